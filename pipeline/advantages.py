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
) -> torch.Tensor:
    """Rewards minus their group's mean, divided by a standard deviation (unbiased) plus 1e-4.

    Args:
        rewards: [groups x num_generations], siblings next to each other.
        num_generations: size of a group.
        scale_rewards: `group` divides by the group's own deviation, `batch` by that of all rewards
            of the step, `none` (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783) does not divide.
        batch_std: deviation of all rewards of the step, over all ranks; only for `batch`.
    """
    if len(rewards) == 0:  # a rank that has no group of this step
        return rewards
    grouped = rewards.view(-1, num_generations)
    advantages = grouped - grouped.mean(dim=1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (grouped.std(dim=1, keepdim=True) + EPSILON)
    elif scale_rewards == "batch":
        assert batch_std is not None, "scale_rewards: batch needs the deviation over all ranks"
        advantages = advantages / (batch_std + EPSILON)
    return advantages.view(-1)


def dead_groups(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """True, per episode, where all siblings earned the same: such a group teaches nothing."""
    grouped = rewards.view(-1, num_generations)
    return (grouped == grouped[:, :1]).all(dim=1).repeat_interleave(num_generations)
