"""Group-relative advantages (GRPO, Shao et al. 2024, arXiv 2402.03300, section 4.1.2).

Pure: tensors in, tensors out.
"""

from __future__ import annotations

import torch

EPSILON = 1e-4  # as in TRL


def group_advantages(
    rewards: torch.Tensor,
    num_generations: int,
    scale_rewards: str = "group",
    batch_std: float | None = None,
    counted: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rewards minus their group's mean, divided by a standard deviation (unbiased) plus 1e-4.

    Zero for what is not counted, and where a group has fewer than two that are.

    Args:
        rewards: [groups x num_generations], siblings next to each other.
        num_generations: size of a group.
        scale_rewards: `group` divides by the group's own deviation, `batch` by that of all rewards
            of the step, `none` (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783) does not divide.
        batch_std: deviation of all rewards of the step, over all ranks; only for `batch`.
        counted: bool, as long as `rewards`: what a group's mean and deviation are made of; all, if
            missing.
    """
    if len(rewards) == 0:  # a rank that has no group of this step
        return rewards
    if counted is not None and not counted.all():
        found = torch.zeros_like(rewards)
        for first in range(0, len(rewards), num_generations):
            mine = torch.arange(first, first + num_generations)[counted[first:][:num_generations]]
            if len(mine) > 1:
                found[mine] = group_advantages(rewards[mine], len(mine), scale_rewards, batch_std)
        return found
    grouped = rewards.view(-1, num_generations)
    advantages = grouped - grouped.mean(dim=1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (grouped.std(dim=1, keepdim=True) + EPSILON)
    elif scale_rewards == "batch":
        assert batch_std is not None, "scale_rewards: batch needs the deviation over all ranks"
        advantages = advantages / (batch_std + EPSILON)
    return advantages.view(-1)


def dead_groups(
    rewards: torch.Tensor, num_generations: int, counted: torch.Tensor | None = None
) -> torch.Tensor:
    """True, per episode, where all siblings earned the same: such a group teaches nothing.

    Among those `counted` (all, if missing); so a group with fewer than two of these is dead.
    """
    counted = torch.ones_like(rewards, dtype=torch.bool) if counted is None else counted
    shape = len(rewards) // num_generations, num_generations
    highest = rewards.masked_fill(~counted, -torch.inf).view(shape).amax(dim=1)
    lowest = rewards.masked_fill(~counted, torch.inf).view(shape).amin(dim=1)
    return (highest <= lowest).repeat_interleave(num_generations)


def in_baseline(left_out: torch.Tensor, num_generations: int) -> torch.Tensor:
    """True, per episode, where it counts in its group: it is not left out, and not alone in that.

    From bool `left_out`, [groups x num_generations].
    """
    counted = ~left_out
    enough = counted.view(len(counted) // num_generations, num_generations).sum(dim=1) > 1
    return counted & enough.repeat_interleave(num_generations)
