"""Advantages: literal numbers."""

import pytest
import torch

from pipeline.advantages import dead_groups, group_advantages

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 1.0, 1.0, 1.0])  # two groups of four


def values(*arguments, **options):
    return group_advantages(*arguments, **options).tolist()


def test_a_reward_counts_against_its_siblings_in_units_of_their_deviation():
    # means 0.5 and 1.5, unbiased deviations 0.57735 and 1.0, each plus 0.0001
    expected = [0.865875, -0.865875, -0.865875, 0.865875, 1.49985, -0.49995, -0.49995, -0.49995]
    assert values(REWARDS, 4) == pytest.approx(expected, abs=1e-6)


def test_without_scaling_only_the_mean_is_taken_off():
    expected = [0.5, -0.5, -0.5, 0.5, 1.5, -0.5, -0.5, -0.5]
    assert values(REWARDS, 4, "none") == pytest.approx(expected)


def test_the_deviation_of_the_whole_step_can_be_used_instead():
    expected = [1.0, -1.0, -1.0, 1.0, 3.0, -1.0, -1.0, -1.0]
    assert values(REWARDS, 4, "batch", batch_std=0.4999) == pytest.approx(expected)


def test_batch_scaling_needs_the_deviation_over_all_ranks():
    with pytest.raises(AssertionError, match="over all ranks"):
        group_advantages(REWARDS, 4, "batch")


@pytest.mark.parametrize("scale", ["group", "none"])
def test_a_group_of_equal_rewards_has_no_advantages(scale):
    assert values(torch.full((8,), 0.3), 8, scale) == pytest.approx([0.0] * 8, abs=1e-3)


def test_advantages_of_a_group_do_not_depend_on_other_groups():
    assert values(REWARDS, 4)[4:] == values(REWARDS[4:], 4)


def test_a_group_is_dead_where_all_siblings_earned_the_same():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    assert dead_groups(rewards, 2).tolist() == [True, True, False, False, True, True]


def test_a_rank_without_groups_has_no_advantages():
    assert values(torch.tensor([]), 8) == []
    assert dead_groups(torch.tensor([]), 8).tolist() == []
