"""GRPO: advantages of groups, and the losses of its family, as pure functions.

With `ratio = exp(logprobs - old_logprobs)` per token, and old log-probabilities from sampling,

    clipped = clip(ratio, 1 - epsilon, 1 + epsilon_high)
    loss    = -min(min(ratio, delta) * advantages, clipped * advantages)
              + beta * k3(logprobs, ref_logprobs)

is GRPO's objective (Shao et al. 2024, arXiv 2402.03300, equation 3). DAPO (Yu et al. 2025, arXiv
2503.14476, equation 10) separates `epsilon_high` from `epsilon`; INTELLECT-2 (2025, arXiv
2505.07291) adds the bound `delta`, which is off unless set. `token_weights` gives the weights of
the sum over tokens for each `loss_type`.

- `loss_type` cispo (MiniMax-M1, 2025, arXiv 2506.13585, equations 4 and 5) keeps the gradient of
  every token and bounds its weight: `loss = -stop_gradient(min(ratio, epsilon_high)) * advantages
  * logprobs`. The bound is `epsilon_high` itself, as in ScaleRL (2025, arXiv 2510.13786) and TRL,
  not 1 + epsilon_high as in MiniMax-M1.
- `importance_sampling_level` sequence (GSPO, Zheng et al. 2025, arXiv 2507.18071, equation 7) gives
  all tokens of an episode the ratio `exp(mean(logprobs - old_logprobs))`. With `loss_type` grpo it
  is GSPO's objective, equation 5.
- `use_bias_correction_kl` multiplies the divergence by the ratio (DeepSeek-V3.2, 2025, arXiv
  2512.02556); off here, as in GRPO's equation 3, on by default in TRL 1.16.
- The entropy bonus is `-entropy_coef * mean(entropy)` over the step's sampled tokens, for every
  `loss_type` (as in TRL).

Weights are normalised by counts over *all* ranks, and gradients are summed over the ranks, so the
sum is that of one process with the whole batch. For bnpo and grpo, TRL normalises each micro-batch
by itself and averages; on one rank without accumulation the two agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeline.config.settings import GRPOSettings
from pipeline.grpo.micro_batches import MicroBatch

EPSILON = 1e-4  # as in TRL


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Sums over a micro-batch, as float tensors without gradient."""

    loss: torch.Tensor  # weighted, all terms
    policy_loss: torch.Tensor  # weighted, without divergence and entropy
    kl: torch.Tensor
    entropy: torch.Tensor
    clipped: torch.Tensor  # tokens whose ratio was clipped
    sampling_logp_difference: torch.Tensor  # |logprobs - old_logprobs|
    sampling_logp_difference_max: torch.Tensor  # a maximum, not a sum


def token_weights(
    lengths: Sequence[int], loss_type: str, num_sequences: float, num_tokens: float, max_tokens: int
) -> list[float]:
    """The weight of a sampled token of each sequence; `lengths` count the sampled tokens.

    - `grpo`: 1 / (length * num_sequences), the mean over a sequence's tokens, then over sequences
      (arXiv 2402.03300, equation 3);
    - `bnpo`, `dapo`, `cispo`: 1 / num_tokens, the mean over all tokens of the step (arXiv
      2503.14476, equation 8; 2506.13585, equation 4);
    - `dr_grpo`: 1 / (max_tokens * num_sequences), a constant (arXiv 2503.20783).

    `num_sequences` and `num_tokens` count the step's kept episodes and their tokens on all ranks.
    """
    if loss_type == "grpo":
        return [1 / (max(length, 1) * num_sequences) for length in lengths]
    if loss_type == "dr_grpo":
        return [1 / (num_sequences * max_tokens)] * len(lengths)
    assert loss_type in ("bnpo", "dapo", "cispo"), loss_type
    return [1 / max(num_tokens, 1)] * len(lengths)


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """The k3 estimator of KL(policy || reference) per token, exp(d) - d - 1, never negative.

    d = ref_logprobs - logprobs, after Schulman 2020 (kl-approx); GRPO's equation 4.
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def importance_ratios(logprobs: torch.Tensor, batch: MicroBatch, level: str) -> torch.Tensor:
    """The ratio to the sampling policy, [N]: each token's own, or its sequence's geometric mean."""
    differences = logprobs - batch.old_logprobs
    if level == "sequence":
        zeros = differences.new_zeros(len(batch.lengths))
        sums = zeros.index_add(0, batch.sequences, differences)
        counts = zeros.index_add(0, batch.sequences, torch.ones_like(differences))
        differences = (sums / counts.clamp(min=1))[batch.sequences]
    return differences.exp()


def grpo_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: MicroBatch,
    settings: GRPOSettings,
    num_tokens: float,
    ref_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, TokenStats]:
    """The GRPO loss: the weighted sum over N tokens, and its statistics.

    `num_tokens` counts the sampled tokens of the step over all ranks, for the mean entropy. Without
    `ref_logprobs` there is no divergence. Tokens of weight 0 count nowhere.
    """
    ratio = importance_ratios(logprobs, batch, settings.importance_sampling_level)
    advantages, counted = batch.advantages, batch.weights > 0
    upper = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    low, high = 1 - settings.epsilon, 1 + upper
    if settings.loss_type == "cispo":
        per_token = -ratio.clamp(max=upper).detach() * advantages * logprobs
        outside = (ratio > upper) & (advantages > 0)
    else:
        bounded = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
        per_token = -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
        outside = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
        if settings.delta is not None:
            outside |= (ratio > settings.delta) & (advantages < 0)
    loss = policy_loss = (per_token * batch.weights).sum()
    kl = torch.zeros_like(logprobs)
    if ref_logprobs is not None:
        kl = k3(logprobs, ref_logprobs)
        term = kl * ratio if settings.use_bias_correction_kl else kl
        loss = loss + settings.beta * (term * batch.weights).sum()
    if settings.entropy_coef > 0:
        loss = loss - settings.entropy_coef * (entropy * counted).sum() / max(num_tokens, 1)
    gap = (logprobs - batch.old_logprobs).detach().abs() * counted
    stats = TokenStats(
        loss=loss.detach(),
        policy_loss=policy_loss.detach(),
        kl=(kl * counted).sum().detach(),
        entropy=(entropy * counted).sum().detach(),
        clipped=(outside & counted).sum().float(),
        sampling_logp_difference=gap.sum(),
        sampling_logp_difference_max=gap.max() if len(gap) else gap.sum(),
    )
    return loss, stats


def group_advantages(
    rewards: torch.Tensor,
    num_generations: int,
    scale_rewards: str = "group",
    batch_std: float | None = None,
    counted: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rewards minus their group's mean, divided by a standard deviation (unbiased) plus 1e-4.

    `rewards` is [groups x num_generations], siblings next to each other. `scale_rewards` `group`
    divides by the group's own deviation, `batch` by `batch_std`, the deviation of the step's
    rewards on all ranks; `none` (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783) does not divide.
    Only `counted` episodes (bool, as long as `rewards`; all, if missing) enter means and
    deviations. Other episodes, and groups with fewer than two counted ones, get zero.
    """
    if len(rewards) == 0:  # a rank without a group in this step
        return rewards
    if counted is not None and not counted.all():
        advantages = torch.zeros_like(rewards)
        for group in torch.arange(len(rewards)).split(num_generations):
            part = group[counted[group]]
            if (count := len(part)) > 1:
                own = group_advantages(rewards[part], count, scale_rewards, batch_std)
                advantages[part] = own
        return advantages
    grouped = rewards.view(-1, num_generations)
    advantages = grouped - grouped.mean(dim=1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (grouped.std(dim=1, keepdim=True) + EPSILON)
    elif scale_rewards == "batch":
        assert batch_std is not None, "scale_rewards: batch needs the deviation over all ranks"
        advantages = advantages / (batch_std + EPSILON)
    return advantages.view(-1)


def zero_std_groups(
    rewards: torch.Tensor, num_generations: int, counted: torch.Tensor | None = None
) -> torch.Tensor:
    """True, per episode, if all counted siblings (all, if missing) have the same reward.

    Such groups teach nothing. A group with fewer than two counted episodes is one of them.
    """
    counted = torch.ones_like(rewards, dtype=torch.bool) if counted is None else counted
    shape = len(rewards) // num_generations, num_generations
    highest = rewards.masked_fill(~counted, -torch.inf).view(shape).amax(dim=1)
    lowest = rewards.masked_fill(~counted, torch.inf).view(shape).amin(dim=1)
    return (highest <= lowest).repeat_interleave(num_generations)


def in_baseline(left_out: torch.Tensor, num_generations: int) -> torch.Tensor:
    """True, per episode, if it and at least one sibling are not left out.

    `left_out` is bool, [groups x num_generations].
    """
    counted = ~left_out
    enough = counted.view(len(counted) // num_generations, num_generations).sum(dim=1) > 1
    return counted & enough.repeat_interleave(num_generations)
