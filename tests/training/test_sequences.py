"""An episode trains alike as one sequence and as several: its weight is the episode's."""

from random import Random

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from pipeline.config.settings import LOSSES, Config
from pipeline.distributed.ranks import Ranks
from pipeline.training.micro_batches import micro_batch
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Reference, Updater
from scripts.proofs.grid import difference, in_float64, make_trajectory, small_model
from scripts.proofs.ranks import play_ranks

GROUP = 4
ADVANTAGES = [1.0, -0.5, 2.0, -1.5] * 2


def turns_of(number):
    """A prompt, and two or three pairs of what is sampled and what is replied."""
    random = Random(number)

    def ids(most):
        return [random.randrange(1, 16) for _ in range(random.randint(1, most))]

    return ids(6), [(ids(9), ids(5)) for _ in range(2 + number % 2)]


def whole(number, noise):
    """The episode as one sequence; its sampler's values are the model's with noise."""
    prompt, turns = turns_of(number)
    completion, mask = [], []
    for said, reply in turns:
        completion += said + reply
        mask += [1] * len(said) + [0] * len(reply)
    row = make_trajectory(prompt, completion, mask)
    with torch.no_grad():
        module = TokenLogprobs(in_float64(small_model()), 1.0)
        values = iter(module(micro_batch([(row, 0.0, 1.0)], 0))[0].tolist())
    random = Random(-number)
    logprobs = [next(values) + noise * random.gauss(0, 1) if m else 0.0 for m in mask]
    return make_trajectory(prompt, completion, mask, logprobs=logprobs)


def parted(row):
    """The same episode with a sequence for each turn, which has the earlier ones in its prompt."""
    parts = []
    ids, start = row.ids, len(row.prompt_ids)
    end = 0
    while True in row.loss_mask[end:]:
        begin = row.loss_mask.index(True, end)
        end = row.loss_mask.index(False, begin)
        logprobs = row.logprobs[begin:end]
        said = row.completion_ids[begin:end]
        parts.append(make_trajectory(ids[: start + begin], said, logprobs=logprobs))
    parts[0].further = parts[1:]
    return parts[0]


def gradient_of(is_parted, noise, **grpo):
    """The gradient of an update on all ranks, and its statistics; each rank has its groups."""
    settings = {"beta": 0.1, "entropy_coef": 0.01, "epsilon": 0.05, "max_grad_norm": 1e9, **grpo}
    rollout = {"num_generations": GROUP}
    config = Config.model_validate({"grpo": settings, "rollout": rollout})
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 60)
    module = TokenLogprobs(in_float64(small_model()), 1.0)
    reference = Reference(TokenLogprobs(in_float64(small_model(seed=1)), 1.0))
    updater = Updater(accelerator, module, ranks, config, reference=reference)
    found = []

    def keep(*_):
        found.append(torch.cat([p.grad.flatten() for p in module.parameters()]).numpy().copy())

    updater.optimizer.register_step_pre_hook(keep)
    rows = [whole(number, noise) for number in range(2 * GROUP)]
    rows = [parted(row) if is_parted else row for row in rows]
    groups = range(ranks.rank, 2, ranks.num_ranks)
    mine = [group * GROUP + i for group in groups for i in range(GROUP)]
    statistics = updater.update_policy([rows[i] for i in mine], [ADVANTAGES[i] for i in mine], 1e-3)
    return found[0], statistics


def gradients_of(updates):
    return [gradient_of(*given, **grpo) for given, grpo in updates]


CLIPS = {loss: {"epsilon_high": 1.0} if loss == "cispo" else {} for loss in LOSSES}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_episode_has_one_gradient_however_many_sequences_it_has(num_ranks):
    """Of a token, all losses need the tokens before it, and the episode's weight and advantage."""
    settings = [{"loss_type": loss, **CLIPS[loss]} for loss in LOSSES]
    settings += [{"loss_type": "grpo", "share_prefixes": False, "use_bias_correction_kl": True}]
    updates = [((is_parted, 0.1), grpo) for grpo in settings for is_parted in (False, True)]
    found = play_ranks(gradients_of, num_ranks, updates)[0]
    assert not isinstance(found, str), found
    for grpo, (one, of_one), (several, of_several) in zip(
        settings, found[::2], found[1::2], strict=True
    ):
        assert np.linalg.norm(one) > 0.01, grpo
        assert difference(several, one) < 1e-12, grpo
        assert of_several == pytest.approx(of_one, rel=1e-6), grpo
        assert of_one["train/clip_ratio"] > 0, grpo


def test_a_ratio_of_sequences_is_the_episodes_only_before_the_policy_has_moved():
    """GSPO's ratio is a mean over a sequence; it is 1 for all parts as long as nothing moved."""
    gspo = {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.0}
    one, several = (gradient_of(is_parted, 0.0, **gspo)[0] for is_parted in (False, True))
    assert difference(several, one) < 1e-6
    one, several = (gradient_of(is_parted, 0.1, **gspo)[0] for is_parted in (False, True))
    assert difference(several, one) > 1e-3
