"""The losses against plain loops, and where there is little to compute."""

import math
from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch

from pipeline.config.settings import LOSSES, GRPOSettings
from pipeline.training.grpo import FORMULAS, grpo_loss, token_weights
from pipeline.training.micro_batches import MicroBatch
from tests.support.plain_losses import PLAIN_LOSSES, plain_loss

LEVELS = ["token", "sequence"]
EACH_LOSS_TYPE = pytest.mark.parametrize("loss_type", LOSSES)
EACH_LEVEL = pytest.mark.parametrize("level", LEVELS)
PLAIN = GRPOSettings(epsilon=0.2, epsilon_high=0.28, entropy_coef=0.0)


def changed(**updates):
    """PLAIN with other settings, validated."""
    return GRPOSettings(**{**PLAIN.model_dump(), **updates})


def batch_of(old_logprobs, advantages, weights, sequences):
    """Only what the loss reads, in float64; the rest is empty."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        input_ids=nothing,
        position_ids=None,
        lengths=torch.zeros(max(sequences, default=-1) + 1, dtype=torch.int64),
        predictors=nothing,
        which=nothing,
        starts=[],
        sequences=torch.tensor(sequences, dtype=torch.int64),
        targets=nothing,
        old_logprobs=torch.tensor(old_logprobs, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.tensor(weights, dtype=torch.float64),
    )


def loss_of(ratios, advantages, weights, settings=PLAIN, num_tokens=5):
    """Loss, statistics and gradient of a sequence whose tokens have these ratios to sampling."""
    old = [-1.0 - math.log(ratio) for ratio in ratios]
    batch = batch_of(old, advantages, weights, [0] * len(ratios))
    logprobs = torch.full((len(ratios),), -1.0, dtype=torch.float64, requires_grad=True)
    entropy = torch.zeros(len(ratios), dtype=torch.float64)
    loss, stats = grpo_loss(logprobs, entropy, batch, settings, num_tokens, None)
    loss.backward()
    return loss.item(), stats, logprobs.grad.tolist()


def close(numbers):
    return pytest.approx(numbers, abs=1e-9)


def test_a_step_without_a_sampled_token_has_finite_weights():
    assert token_weights([0], "grpo", 1, 0, 100) == [1.0]
    assert token_weights([0], "dapo", 1, 0, 100) == [1.0]


# The correction of an inexact sampler. Two sequences; the ratios of trainer to sampler are 2
# and 1/4 in the first, with the product 1/2, and 4, 1 and 3/2 in the second, with the product 6.

OF_SAMPLER = {"sequences": [0, 1, 0, 1, 1], "weights": [0.1, 0.2, 0.3, 0.4, 0.5]}
TO_SAMPLER = [2.0, 4.0, 0.25, 1.0, 1.5]
BOTH_SIDES = [1.0, -1.0, -1.0, 1.0, 1.0]


def corrected_loss_of(mode, **clips):
    """The loss with the correction, where the policy is still the trainer's."""
    settings = changed(vllm_importance_sampling_mode=mode, **clips)
    trainer = torch.full((5,), -1.0, dtype=torch.float64)
    sampler = [-1.0 - math.log(ratio) for ratio in TO_SAMPLER]
    batch = batch_of(sampler, BOTH_SIDES, OF_SAMPLER["weights"], OF_SAMPLER["sequences"])
    batch = replace(batch, trainer_logprobs=trainer)
    loss, _ = grpo_loss(trainer, torch.zeros_like(trainer), batch, settings, 5, None)
    return loss.item()


@pytest.mark.parametrize(
    ("low", "high", "truncated", "masked"),
    [
        (None, None, [2.0, 4.0, 0.25, 1.0, 1.5], [2.0, 4.0, 0.25, 1.0, 1.5]),
        (0.3, None, [2.0, 4.0, 0.3, 1.0, 1.5], [2.0, 4.0, 0.0, 1.0, 1.5]),
        (None, 1.75, [1.75, 1.75, 0.25, 1.0, 1.5], [0.0, 0.0, 0.25, 1.0, 1.5]),
    ],
)
def test_a_clip_that_is_null_does_not_cut(low, high, truncated, masked):
    clips = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    for mode, expected in (("token_truncate", truncated), ("token_mask", masked)):
        loss = corrected_loss_of(mode, **clips)
        weights = zip(expected, BOTH_SIDES, OF_SAMPLER["weights"], strict=True)
        assert loss == close(-sum(math.prod(factors) for factors in weights))


# Divergence, entropy, statistics


def test_no_tokens_have_no_loss():
    loss, stats, gradient = loss_of([], [], [], changed(entropy_coef=0.1), num_tokens=7)
    assert (loss, gradient) == (0.0, [])
    assert all(value == 0.0 for value in vars(stats).values())


# Against plain loops


def test_each_loss_has_a_formula_here_and_in_the_tests():
    assert list(LOSSES) == list(FORMULAS) == list(PLAIN_LOSSES)


def random_sequences(random):
    """Sequences of 0 to 5 tokens, at least one, with ratios far from 1."""
    found = []
    for length in [random.randint(1, 5), *(random.randint(0, 5) for _ in range(3))]:
        shift, tokens = random.gauss(0, 0.5), []
        for _ in range(length):
            now = random.uniform(-3, -0.1)
            old, reference = now + random.gauss(shift, 0.5), now + random.gauss(0, 0.5)
            tokens.append((now, old, reference, random.uniform(0, 2)))
        found.append((random.choice([-1.5, -0.4, 0.0, 0.7, 2.0]), tokens))
    return found


def from_grpo(sequences, settings, max_tokens):
    """The module's loss and gradient of the same numbers."""
    lengths = [len(tokens) for _, tokens in sequences]
    of_sequence = token_weights(lengths, settings.loss_type, len(lengths), sum(lengths), max_tokens)
    places = [number for number, length in enumerate(lengths) for _ in range(length)]
    now, old, reference, entropy = zip(*(t for _, tokens in sequences for t in tokens), strict=True)
    advantages, weights = [sequences[i][0] for i in places], [of_sequence[i] for i in places]
    batch = batch_of(old, advantages, weights, places)
    logprobs = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    rest = [torch.tensor(values, dtype=torch.float64) for values in (entropy, reference)]
    loss, _ = grpo_loss(logprobs, rest[0], batch, settings, sum(lengths), rest[1])
    loss.backward()
    return loss.item(), logprobs.grad.tolist()


def slopes(sequences, settings, max_tokens, step=1e-6):
    """The gradient of the plain loops, by central differences."""
    found = []
    for number, (advantage, tokens) in enumerate(sequences):
        for at, (now, *rest) in enumerate(tokens):
            sides = []
            for moved in (now + step, now - step):
                there = [*tokens[:at], (moved, *rest), *tokens[at + 1 :]]
                around = [*sequences[:number], (advantage, there), *sequences[number + 1 :]]
                sides.append(plain_loss(around, settings, max_tokens, stopped=sequences))
            found.append((sides[0] - sides[1]) / (2 * step))
    return found


@EACH_LEVEL
@EACH_LOSS_TYPE
def test_the_loss_and_its_gradient_are_those_of_plain_loss(loss_type, level):
    uppers = [1.1, 2.0] if loss_type == "cispo" else [None, 0.4]
    deltas = [None] if "delta" in LOSSES[loss_type].unused else [None, 1.7]
    combinations = product(uppers, deltas, [0.0, 0.3], [0.0, 0.05])
    for seed, (epsilon_high, delta, beta, entropy_coef) in enumerate([*combinations] * 3):
        settings = changed(
            loss_type=loss_type,
            importance_sampling_level=level,
            epsilon_high=epsilon_high,
            delta=delta,
            beta=beta,
            entropy_coef=entropy_coef,
        )
        sequences = random_sequences(Random(seed))
        loss, gradient = from_grpo(sequences, settings, max_tokens=20)
        assert loss == pytest.approx(plain_loss(sequences, settings, 20, sequences), abs=1e-12)
        assert gradient == pytest.approx(slopes(sequences, settings, 20), abs=1e-7)
