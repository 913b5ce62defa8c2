"""GRPO: the loss in literal numbers, and an update that the number of ranks does not change."""

import math
from random import Random

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers import make_trajectory, play_ranks, small_model

from pipeline.config import GRPOSettings, RolloutSettings
from pipeline.distributed import Ranks
from pipeline.grpo import (
    Updater,
    empty_micro_batch,
    grpo_loss,
    k3,
    learning_rate_at,
    make_micro_batches,
    token_weights,
)
from pipeline.policy import TokenLogprobs
from pipeline.trajectory import MicroBatch

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]
PLAIN = GRPOSettings(epsilon=0.2, epsilon_high=0.28, beta=0.0, entropy_coef=0.0)


def batch_of(old_logprobs, advantages, weights) -> MicroBatch:
    """Only what the loss reads; the rest is empty."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        input_ids=nothing,
        lengths=nothing,
        rows=nothing,
        columns=nothing,
        targets=nothing,
        old_logprobs=torch.tensor(old_logprobs),
        advantages=torch.tensor(advantages),
        weights=torch.tensor(weights),
    )


# Five tokens: ratio 1; too high and good (clipped); too low and good; too high and bad; too low
# and bad (clipped).
RATIOS = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5])
ADVANTAGES = [1.0, 1.0, 1.0, -1.0, -1.0]
OLD = [-1.0, -2.0, -0.5, -1.5, -1.0]


def example(weights=(0.2,) * 5, settings=PLAIN, entropy=(0.0,) * 5, ref_logprobs=None):
    logprobs = (torch.tensor(OLD) + RATIOS.log()).requires_grad_()
    batch = batch_of(OLD, ADVANTAGES, list(weights))
    loss, stats = grpo_loss(logprobs, torch.tensor(entropy), batch, settings, ref_logprobs)
    loss.backward()
    return loss.detach(), stats, logprobs.grad.tolist()


# The loss


def test_the_clipped_loss_of_five_tokens():
    loss, stats, gradient = example()
    # -(1.0 + 1.28 + 0.5 - 1.5 - 0.8) * 0.2
    assert float(loss) == pytest.approx(-0.096, abs=1e-6)
    assert float(stats.policy_loss) == pytest.approx(-0.096, abs=1e-6)
    assert float(stats.clipped) == 2.0
    assert float(stats.logprob_gap) == pytest.approx(math.log(2), abs=1e-6)
    # d loss / d logprob is -ratio * advantage * weight, and 0 where the ratio is clipped
    assert gradient == pytest.approx([-0.2, 0.0, -0.1, 0.3, 0.0], abs=1e-6)


def test_without_epsilon_high_both_clips_are_epsilon():
    loss, _, _ = example(settings=PLAIN.model_copy(update={"epsilon_high": None}))
    assert float(loss) == pytest.approx(-(1.0 + 1.2 + 0.5 - 1.5 - 0.8) * 0.2, abs=1e-6)


def test_each_token_counts_by_its_weight():
    loss, _, gradient = example(weights=(1.0, 0.5, 0.0, 2.0, 0.25))
    # -1.0 * 1 - 1.28 * 0.5 + 1.5 * 2 + 0.8 * 0.25
    assert float(loss) == pytest.approx(1.56, abs=1e-6)
    assert gradient == pytest.approx([-1.0, 0.0, 0.0, 3.0, 0.0], abs=1e-6)


def test_a_token_of_weight_zero_is_in_no_statistic():
    _, stats, _ = example(weights=(1.0, 0.0, 0.0, 0.0, 0.0), entropy=(0.5,) * 5)
    assert float(stats.clipped) == 0.0
    assert float(stats.entropy) == 0.5
    assert float(stats.logprob_gap) == 0.0


def test_k3_in_literal_numbers():
    logprobs = torch.tensor([-1.0, -1.0, -1.0])
    reference = torch.tensor([-1.0, -1.0 + math.log(2), -1.0 - math.log(2)])
    assert k3(logprobs, reference).tolist() == pytest.approx([0.0, 0.306853, 0.193147], abs=1e-6)


def test_beta_adds_the_divergence_from_the_reference():
    settings = PLAIN.model_copy(update={"beta": 0.5})
    reference = torch.tensor(OLD) + RATIOS.log() + math.log(2)
    loss, stats, gradient = example(settings=settings, ref_logprobs=reference)
    assert float(loss) == pytest.approx(-0.096 + 0.5 * 0.306853, abs=1e-6)
    assert float(stats.kl) == pytest.approx(5 * 0.306853, abs=1e-5)
    assert float(stats.policy_loss) == pytest.approx(-0.096, abs=1e-6)
    # k3's derivative is 1 - exp(d) = -1 at d = log 2: half a unit of beta, times 0.2
    assert gradient == pytest.approx([-0.3, -0.1, -0.2, 0.2, -0.1], abs=1e-6)


def test_the_entropy_bonus_lowers_the_loss():
    settings = PLAIN.model_copy(update={"entropy_coef": 0.1})
    loss, stats, _ = example(settings=settings, entropy=(1.0, 2.0, 3.0, 4.0, 5.0))
    assert float(loss) == pytest.approx(-0.096 - 0.1 * 0.2 * 15, abs=1e-6)
    assert float(stats.entropy) == 15.0


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", [1 / 8, 1 / 16]),  # 4 sequences, of 2 and of 4 tokens
        ("bnpo", [0.1, 0.1]),  # 10 tokens
        ("dapo", [0.1, 0.1]),
        ("dr_grpo", [0.0025, 0.0025]),  # 4 sequences x 100 tokens
    ],
)
def test_the_weight_of_a_token_comes_from_counts_over_all_ranks(loss_type, expected):
    weights = token_weights([2, 4], loss_type, num_sequences=4, num_tokens=10, max_tokens=100)
    assert weights == pytest.approx(expected)


def test_an_episode_without_a_sampled_token_has_a_finite_weight():
    assert token_weights([0], "grpo", 1, 5, 100) == [1.0]
    assert token_weights([0], "dapo", 1, 0, 100) == [1.0]
