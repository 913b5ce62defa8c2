"""Advantages: literal numbers."""

import pytest
import torch

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.training.collect import RolloutBatch, Sample, give_advantages
from pipeline.training.grpo import group_advantages, in_baseline, zero_std_groups
from scripts.proofs.grid import make_trajectory


def values(*arguments, **options):
    return group_advantages(*arguments, **options).tolist()


def test_a_group_is_dead_where_all_siblings_earned_the_same():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    assert zero_std_groups(rewards, 2).tolist() == [True, True, False, False, True, True]


def test_a_rank_without_groups_has_no_advantages():
    assert values(torch.tensor([]), 8) == []
    assert zero_std_groups(torch.tensor([]), 8).tolist() == []
    assert in_baseline(torch.tensor([], dtype=torch.bool), 8).tolist() == []


# One left out beside 1, 0, 0; one alone; two that earned the same; a whole group
MIXED = torch.tensor([1.0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1])
LEFT_OUT = [False, True, False, False, False, True, True, True, True, True] + [False] * 6


def test_what_is_left_out_has_no_part_in_its_groups_mean_and_deviation():
    counted = in_baseline(torch.tensor(LEFT_OUT), 4)
    assert counted.tolist() == [True, False, True, True] + 6 * [False] + 6 * [True]
    found = values(MIXED, 4, counted=counted)
    assert found[:4] == pytest.approx([1.154500, 0, -0.577250, -0.577250], abs=1e-6)
    assert found[4:12] == [0.0] * 8
    assert found[12:] == values(MIXED[12:], 4)
    assert values(MIXED, 4, "batch", batch_std=0.4999, counted=counted)[0] == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    "counted", [~torch.tensor(LEFT_OUT), in_baseline(torch.tensor(LEFT_OUT), 4)]
)
def test_a_group_is_dead_where_fewer_than_two_count_or_those_earned_the_same(counted):
    assert zero_std_groups(MIXED, 4, counted)[::4].tolist() == [False, True, True, False]


@pytest.mark.parametrize("scale", [1e-9, 1e30])
def test_advantages_do_not_depend_on_the_rewards_size_where_there_is_one(scale):
    rewards = torch.tensor([-3.5, 0.0, 7.2, 7.2], dtype=torch.float64) * scale
    expected = [-1.165, -0.512, 0.838, 0.838] if scale > 1 else [-6.2e-5, -2.7e-5, 4.5e-5, 4.5e-5]
    assert values(rewards, 4) == pytest.approx(expected, rel=0.02)


def test_advantages_of_a_domain_are_scaled() -> None:
    config = Config.model_validate(
        {
            "grpo": {"domain_advantage_scale": {"retail": 3}, "scale_rewards": "none"},
            "rollout": {"num_generations": 2},
        }
    )
    domains = ["airline", "airline", "retail", "retail", "retail", "retail"]
    rewards = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    played = [make_trajectory(domain=d, reward=r) for d, r in zip(domains, rewards, strict=True)]
    samples = [Sample(trajectory=t, index=i, kept=True) for i, t in enumerate(played)]
    batch = RolloutBatch(samples=samples, num_first=6, rounds=[3], tasks=[], memory=None)
    give_advantages(batch, Ranks(0, 1, 5), config)
    assert [sample.advantage for sample in samples] == [0.5, -0.5, 1.5, -1.5, 0.0, 0.0]
    assert [sample.kept for sample in samples] == [True, True, True, True, False, False]
