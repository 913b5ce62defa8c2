"""GRPO: the advantages of groups and the losses of the GRPO family, as pure functions.

The loss of a sampled token follows GRPO (Shao et al. 2024, arXiv 2402.03300, equation 3):

    ratio   = exp(logprobs - old_logprobs)
    clipped = clip(ratio, 1 - epsilon, 1 + epsilon_high)
    loss    = -min(min(ratio, delta) * advantages, clipped * advantages)
              + beta * k3(logprobs, ref_logprobs)

`old_logprobs` are the sampler's log-probabilities. DAPO (Yu et al. 2025, arXiv 2503.14476, equation
10) added the bound `epsilon_high` to GRPO. INTELLECT-2 (2025, arXiv 2505.07291) added the bound
`delta`, which is off by default. The setting `loss_type` selects a row of the table `FORMULAS`: the
formula, and the weight of each token in the loss.

`loss_type: cispo` (MiniMax-M1, 2025, arXiv 2506.13585, equations 4 and 5) keeps the gradient of
tokens with a clipped ratio: `loss = -stop_gradient(min(ratio, epsilon_high)) * advantages *
logprobs`. This pipeline's cispo limits the ratio to `epsilon_high`, as do ScaleRL (2025, arXiv
2510.13786) and TRL, but MiniMax-M1 limits the ratio to `1 + epsilon_high`.
`importance_sampling_level: sequence` gives all tokens of a sequence the ratio `exp(mean(logprobs -
old_logprobs))` (GSPO, Zheng et al. 2025, arXiv 2507.18071, equation 7); an episode of several
sequences has several ratios. `use_bias_correction_kl`
(default: false; in TRL 1.16: true) multiplies the KL estimate by the ratio (DeepSeek-V3.2, 2025,
arXiv 2512.02556). The loss also has TRL's term `-entropy_coef * mean(entropy of a step)`.

With a sampler that is not exact, a micro-batch has `trainer_logprobs`: the trainer's own values
before the step's first update. As in TRL, the ratio is then `exp(logprobs - trainer_logprobs)`, and
the policy loss of each token is multiplied by `exp(trainer_logprobs - old_logprobs)` of the token
or of the whole sequence. This factor is truncated (Yao et al. 2025, "Your efficient RL framework
secretly brings you off-policy RL training") or masked (Liu et al. 2025, "When Speed Kills
Stability"; IcePop, 2025, arXiv 2510.18855).

Each loss weight is divided by a count over all ranks, so that the sum of the ranks' gradients is
the gradient that one process would compute for the whole batch. For the losses bnpo and grpo, TRL
counts within each micro-batch, not over all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from pipeline.config.settings import GRPOSettings
from pipeline.training.micro_batches import MicroBatch

Joined = tuple[tuple[str, ...], Callable[..., torch.Tensor], float]
EPSILON = 1e-4  # number that is added to standard deviations, as in TRL


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Statistics of the sampled tokens of a micro-batch, as float tensors without gradient.

    Those named in MAXIMA are maxima, and all others are sums.
    """

    loss: torch.Tensor  # the loss with the KL estimate and the entropy bonus
    policy_loss: torch.Tensor  # the loss without the KL estimate and the entropy bonus
    kl: torch.Tensor
    entropy: torch.Tensor
    clipped: torch.Tensor  # number of tokens whose ratio was clipped
    clipped_low: torch.Tensor  # ... at 1 - epsilon
    clipped_high: torch.Tensor  # ... at 1 + epsilon_high (of cispo: at epsilon_high)
    sampling_logp_difference: torch.Tensor  # sum of |logprobs - old_logprobs|
    sampling_logp_difference_max: torch.Tensor  # maximum of |logprobs - old_logprobs|


@dataclass(frozen=True, kw_only=True)
class CorrectedStats(TokenStats):
    """The statistics of a micro-batch with `trainer_logprobs`, which replace `logprobs` in them.

    A ratio is a factor of `importance_sampling_ratios`.
    """

    num_ratios: torch.Tensor
    importance_sampling_ratio: torch.Tensor  # sum
    importance_sampling_ratio_max: torch.Tensor
    importance_sampling_ratio_min: torch.Tensor


MAXIMA = ("sampling_logp_difference_max",)
SUMS = tuple(field.name for field in fields(TokenStats) if field.name not in MAXIMA)
# How statistics are joined over micro-batches and ranks: names, function, value of no micro-batch.
JOINED: list[Joined] = [(SUMS, torch.sum, 0.0), (MAXIMA, torch.amax, 0.0)]
JOINED_RATIOS: list[Joined] = [
    (("num_ratios", "importance_sampling_ratio"), torch.sum, 0.0),
    (("importance_sampling_ratio_max",), torch.amax, 0.0),
    (("importance_sampling_ratio_min",), torch.amin, torch.inf),
]


class Terms(NamedTuple):
    """The policy loss of each token, [N], and where its ratio is clipped."""

    loss: torch.Tensor
    is_low: torch.Tensor  # at 1 - epsilon
    is_high: torch.Tensor
    is_clipped: torch.Tensor  # at any bound


def clipped_ratio(
    ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, settings: GRPOSettings
) -> Terms:
    """Return the terms of the loss with clipped ratios (see the top of this file)."""
    low = 1 - settings.epsilon
    high = 1 + settings.upper_clip
    bounded = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    loss = -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
    is_low = (ratio < low) & (advantages < 0)
    is_high = (ratio > high) & (advantages > 0)
    is_clipped = is_low | is_high
    if settings.delta is not None:
        is_clipped |= (ratio > settings.delta) & (advantages < 0)
    return Terms(loss, is_low, is_high, is_clipped)


def weighted_logprobs(
    ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, settings: GRPOSettings
) -> Terms:
    """Return the terms of cispo: log-probabilities times a limited ratio without gradient."""
    limit = settings.upper_clip
    loss = -ratio.clamp(max=limit).detach() * advantages * logprobs
    is_high = (ratio > limit) & (advantages > 0)
    return Terms(loss, torch.zeros_like(is_high), is_high, is_high)


def per_sequence(length: int, num_sequences: float, num_tokens: float, max_tokens: int) -> float:
    """Each sequence counts alike (arXiv 2402.03300, equation 3)."""
    return max(length, 1) * num_sequences


def per_token(length: int, num_sequences: float, num_tokens: float, max_tokens: int) -> float:
    """Each token counts alike (arXiv 2503.14476, equation 8; 2506.13585, equation 4)."""
    return max(num_tokens, 1)


def per_limit(length: int, num_sequences: float, num_tokens: float, max_tokens: int) -> float:
    """Each sequence counts as if it were as long as `max_tokens` (arXiv 2503.20783)."""
    return num_sequences * max_tokens


class Formula(NamedTuple):
    """A loss: the function of its terms, and that of its normaliser, whose inverse is a weight."""

    terms: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, GRPOSettings], Terms]
    normaliser: Callable[[int, float, float, int], float]


FORMULAS = {
    "grpo": Formula(clipped_ratio, per_sequence),
    "bnpo": Formula(clipped_ratio, per_token),
    "dr_grpo": Formula(clipped_ratio, per_limit),
    "dapo": Formula(clipped_ratio, per_token),
    "cispo": Formula(weighted_logprobs, per_token),
}


def token_weights(
    lengths: Sequence[int], loss_type: str, num_sequences: float, num_tokens: float, max_tokens: int
) -> list[float]:
    """Return, for each sequence, the loss weight of every sampled token of the sequence.

    `lengths` has the number of sampled tokens of each sequence. The update of a step uses
    `num_sequences` episodes with `num_tokens` sampled tokens in total, counted over all ranks.
    """
    normaliser = FORMULAS[loss_type].normaliser
    return [1 / normaliser(n, num_sequences, num_tokens, max_tokens) for n in lengths]


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the k3 estimate of KL(policy || reference) at each token (Schulman 2020, kl-approx).

    The estimate is exp(d) - d - 1 >= 0 with d = ref_logprobs - logprobs (GRPO's equation 4).
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def learned_loss(logprobs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the KL term of kept episodes: the weighted sum over their N sampled tokens.

    The tokens are draws of the policy at the end of an earlier stage, with `old_logprobs`, so k3
    is of KL(that policy || current one). Its gradient is unbiased, and 0 while the two are equal.
    CLEAR (Rolnick et al. 2019, arXiv 1811.11682, section 3) clones its old policy by this KL
    divergence, over all actions.
    """
    return (k3(batch.old_logprobs, logprobs) * batch.weights).sum()


def importance_ratios(logprobs: torch.Tensor, batch: MicroBatch, level: str) -> torch.Tensor:
    """Return the ratio exp(logprobs - old_logprobs) of each token, [N].

    If `level` is "sequence", all tokens of a sequence get the geometric mean of their ratios. If
    the micro-batch has `trainer_logprobs`, these replace `old_logprobs`.
    """
    old = batch.old_logprobs if batch.trainer_logprobs is None else batch.trainer_logprobs
    differences = logprobs - old
    if level == "sequence":
        sums = sums_of_sequences(differences, batch)
        counts = sums_of_sequences(torch.ones_like(differences), batch)
        differences = (sums / counts.clamp(min=1))[batch.sequences]
    return differences.exp()


def sums_of_sequences(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the sum over the sampled tokens of each sequence, [B]."""
    return values.new_zeros(len(batch.lengths)).index_add(0, batch.sequences, values)


def importance_sampling_ratios(batch: MicroBatch, settings: GRPOSettings) -> torch.Tensor:
    """Return the ratios of trainer to sampler: of each token, [N], or of each sequence, [B].

    The ratio of a sequence is the product of its tokens' ratios. A ratio beyond the bounds becomes
    the bound (truncated) or 0 (masked).
    """
    assert batch.trainer_logprobs is not None, "only an inexact sampler is corrected"
    differences = batch.trainer_logprobs - batch.old_logprobs
    level, _, remedy = settings.vllm_importance_sampling_mode.partition("_")
    if level == "sequence":
        differences = sums_of_sequences(differences, batch)
    ratios = differences.exp()
    low = settings.vllm_importance_sampling_clip_min or 0.0
    high = settings.vllm_importance_sampling_clip_max or torch.inf
    if remedy == "truncate":
        return ratios.clamp(low, high)
    return ratios.masked_fill((ratios < low) | (ratios > high), 0.0)


def grpo_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: MicroBatch,
    settings: GRPOSettings,
    num_tokens: float,
    ref_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, TokenStats]:
    """Return the loss of a micro-batch (a weighted sum over N tokens) and the loss's TokenStats.

    The entropy bonus is divided by `num_tokens`, the step's number of sampled tokens on all ranks.
    If `ref_logprobs` is None, the loss has no KL estimate. TokenStats ignore tokens of weight 0.
    """
    ratio = importance_ratios(logprobs, batch, settings.importance_sampling_level)
    counted = batch.weights > 0
    terms = FORMULAS[settings.loss_type].terms(ratio, logprobs, batch.advantages, settings)
    policy_terms = terms.loss
    if batch.trainer_logprobs is not None:
        ratios = importance_sampling_ratios(batch, settings)
        by_sequence = settings.vllm_importance_sampling_mode.startswith("sequence")
        policy_terms = policy_terms * (ratios[batch.sequences] if by_sequence else ratios)
    loss = policy_loss = (policy_terms * batch.weights).sum()
    kl = torch.zeros_like(logprobs)
    if ref_logprobs is not None:
        kl = k3(logprobs, ref_logprobs)
        term = kl * ratio if settings.use_bias_correction_kl else kl
        loss = loss + settings.beta * (term * batch.weights).sum()
    if settings.entropy_coef > 0:
        loss = loss - settings.entropy_coef * (entropy * counted).sum() / max(num_tokens, 1)
    now = logprobs if batch.trainer_logprobs is None else batch.trainer_logprobs
    gap = (now - batch.old_logprobs).detach().abs() * counted
    stats = TokenStats(
        loss=loss.detach(),
        policy_loss=policy_loss.detach(),
        kl=(kl * counted).sum().detach(),
        entropy=(entropy * counted).sum().detach(),
        clipped=(terms.is_clipped & counted).sum().float(),
        clipped_low=(terms.is_low & counted).sum().float(),
        clipped_high=(terms.is_high & counted).sum().float(),
        sampling_logp_difference=gap.sum(),
        sampling_logp_difference_max=gap.max() if len(gap) else gap.sum(),
    )
    if batch.trainer_logprobs is not None:
        stats = CorrectedStats(
            **vars(stats),
            num_ratios=torch.ones_like(ratios).sum(),
            importance_sampling_ratio=ratios.sum(),
            importance_sampling_ratio_max=ratios.max(),
            importance_sampling_ratio_min=ratios.min(),
        )
    return loss, stats


def group_advantages(
    rewards: torch.Tensor,
    num_generations: int,
    scale_rewards: str = "group",
    batch_std: float | None = None,
    counted: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the advantages: each reward minus the mean reward of its group, divided by a scale.

    `rewards` is [groups * num_generations]. If `scale_rewards` is "group", the scale is the
    unbiased standard deviation of the group's rewards plus 1e-4. With `scale_rewards` "batch", the
    scale is `batch_std` plus 1e-4. With `scale_rewards` "none", the scale is 1 (Liu et al. 2025,
    arXiv 2503.20783). The mean and the deviation of a group use only episodes with True in
    `counted` (default: all episodes). Episodes with False in `counted` have the advantage 0. In a
    group with fewer than two counted episodes, all advantages are 0.
    """
    if len(rewards) == 0:  # this rank has no group in this step
        return rewards
    if counted is not None and not counted.all():
        advantages = torch.zeros_like(rewards)
        for group in torch.arange(len(rewards)).split(num_generations):
            part = group[counted[group]]
            if (count := len(part)) > 1:
                advantages[part] = group_advantages(rewards[part], count, scale_rewards, batch_std)
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
    """Return True for each episode of a zero-std group (all counted rewards are equal).

    A reward is counted if its episode has True in `counted` (default: all episodes). A group with
    fewer than two counted episodes is also a zero-std group.
    """
    counted = torch.ones_like(rewards, dtype=torch.bool) if counted is None else counted
    shape = len(rewards) // num_generations, num_generations
    highest = rewards.masked_fill(~counted, -torch.inf).view(shape).amax(dim=1)
    lowest = rewards.masked_fill(~counted, torch.inf).view(shape).amin(dim=1)
    return (highest <= lowest).repeat_interleave(num_generations)


def in_baseline(left_out: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Return True for each episode that counts in the mean reward of its group.

    An episode counts if `left_out` is False for the episode and for at least one other episode of
    the same group. `left_out` has a flag for each episode, [groups * num_generations].
    """
    counted = ~left_out
    enough = counted.view(len(counted) // num_generations, num_generations).sum(dim=1) > 1
    return counted & enough.repeat_interleave(num_generations)
