"""GRPO: the loss, pure, and the update.

The objective is GRPO's (Shao et al. 2024, arXiv 2402.03300, equation 3) with a clipped ratio per
token,

    ratio = exp(logprobs - old_logprobs)
    loss  = -min(ratio * advantages, clip(ratio, 1 - epsilon, 1 + epsilon_high) * advantages)
            + beta * k3(logprobs, ref_logprobs) - entropy_coef * entropy,

with `epsilon_high` apart from `epsilon` (DAPO, Yu et al. 2025, arXiv 2503.14476), k3 = exp(d) - d
- 1 for d = ref_logprobs - logprobs (Schulman 2020), and old log-probabilities kept from sampling.

One normaliser: each token's term is multiplied by its weight, and the weights of a step are
normalised by counts over *all* ranks. DDP averages gradients over ranks, so the loss of a rank is
multiplied by the number of ranks; the gradient is then that of one process with the whole batch,
whatever each rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.config import GRPOSettings, RolloutSettings
from pipeline.distributed import Ranks
from pipeline.trajectory import MicroBatch, StopReason, Trajectory


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Sums over a micro-batch of what is logged; each is a float tensor without gradient."""

    policy_loss: torch.Tensor  # weighted
    kl: torch.Tensor
    entropy: torch.Tensor
    clipped: torch.Tensor  # tokens whose ratio was clipped
    logprob_gap: torch.Tensor  # largest |logprobs - old_logprobs|


def token_weights(
    lengths: Sequence[int], loss_type: str, num_sequences: float, num_tokens: float, max_tokens: int
) -> list[float]:
    """The weight of every sampled token of each sequence.

    `grpo`: mean over a sequence's tokens, then over sequences (arXiv 2402.03300); `bnpo` and
    `dapo`: mean over all tokens of the step (arXiv 2503.14476); `dr_grpo`: sum over tokens /
    (sequences x max_tokens) (arXiv 2503.20783). `num_sequences` and `num_tokens` count what
    is trained on in the step, over all ranks: without dead groups where these are dropped.
    """
    if loss_type == "grpo":
        return [1 / (max(length, 1) * num_sequences) for length in lengths]
    if loss_type == "dr_grpo":
        return [1 / (num_sequences * max_tokens)] * len(lengths)
    assert loss_type in ("bnpo", "dapo"), loss_type
    return [1 / max(num_tokens, 1)] * len(lengths)


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """The k3 estimator of KL(policy || reference) per token, never negative.

    After Schulman 2020 (kl-approx).
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def grpo_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: MicroBatch,
    settings: GRPOSettings,
    ref_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, TokenStats]:
    """The weighted sum of the module's formula over [N] tokens, and what is logged of it."""
    epsilon_high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    ratio = (logprobs - batch.old_logprobs).exp()
    clipped = ratio.clamp(1 - settings.epsilon, 1 + epsilon_high)
    per_token = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    policy_loss = per_token.detach()
    kl = torch.zeros_like(logprobs) if ref_logprobs is None else k3(logprobs, ref_logprobs)
    per_token = per_token + settings.beta * kl - settings.entropy_coef * entropy
    counted = batch.weights > 0
    low = (ratio < 1 - settings.epsilon) & (batch.advantages < 0)
    high = (ratio > 1 + epsilon_high) & (batch.advantages > 0)
    gap = ((logprobs - batch.old_logprobs).abs() * counted).detach()
    stats = TokenStats(
        policy_loss=(policy_loss * batch.weights).sum(),
        kl=(kl * counted).sum().detach(),
        entropy=(entropy * counted).sum().detach(),
        clipped=((low | high) & counted).sum().float(),
        logprob_gap=gap.max() if len(gap) else gap.sum(),
    )
    return (per_token * batch.weights).sum(), stats


def make_micro_batches(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    weights: Sequence[float],
    max_tokens: int,
    pad_id: int,
) -> list[MicroBatch]:
    """Sequences sorted by length, cut where a forward pass would exceed `max_tokens`.

    Padded tokens count. Episodes without a sampled token (the environment failed at once) have no
    term and are left out.
    """
    sampled = [i for i, trajectory in enumerate(trajectories) if trajectory.num_sampled_tokens]
    order = sorted(sampled, key=lambda i: (-trajectories[i].num_tokens, i))
    batches: list[MicroBatch] = []
    first = 0
    while first < len(order):
        longest = trajectories[order[first]].num_tokens
        count = max(1, max_tokens // longest)
        chosen = order[first : first + count]
        batches.append(
            _micro_batch([(trajectories[i], advantages[i], weights[i]) for i in chosen], pad_id)
        )
        first += count
    return batches


def _micro_batch(items: Sequence[tuple[Trajectory, float, float]], pad_id: int) -> MicroBatch:
    longest = max(trajectory.num_tokens for trajectory, _, _ in items)
    input_ids, rows, columns, targets = [], [], [], []
    old_logprobs, advantages, weights = [], [], []
    for row, (trajectory, advantage, weight) in enumerate(items):
        ids = trajectory.prompt_ids + trajectory.completion_ids
        input_ids.append(ids + [pad_id] * (longest - len(ids)))
        start = len(trajectory.prompt_ids)
        sampled = [i for i, mask in enumerate(trajectory.loss_mask) if mask]
        rows += [row] * len(sampled)
        columns += [start + i - 1 for i in sampled]
        targets += [trajectory.completion_ids[i] for i in sampled]
        old_logprobs += [trajectory.logprobs[i] for i in sampled]
        advantages += [advantage] * len(sampled)
        weights += [weight] * len(sampled)
    return MicroBatch(
        input_ids=torch.tensor(input_ids),
        lengths=torch.tensor([trajectory.num_tokens for trajectory, _, _ in items]),
        rows=torch.tensor(rows, dtype=torch.int64),
        columns=torch.tensor(columns, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        old_logprobs=torch.tensor(old_logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weights=torch.tensor(weights, dtype=torch.float32),
    )


def empty_micro_batch(pad_id: int) -> MicroBatch:
    """One token of weight zero: what a rank computes when others have one micro-batch more."""
    nothing = Trajectory(
        domain="",
        task_id="",
        family="",
        branch="",
        trial=0,
        prompt_ids=[pad_id],
        completion_ids=[pad_id],
        loss_mask=[True],
        logprobs=[0.0],
        stop_reason=StopReason.COMPLETED,
        reward=0.0,
        num_turns=0,
    )
    return _micro_batch([(nothing, 0.0, 0.0)], pad_id)


class Updater:
    """Optimizer updates on trajectories.

    An update is micro-batches, accumulation, one gradient exchange, clip, step.
    """

    def __init__(
        self,
        accelerator: Any,
        module: Any,  # TokenLogprobs, wrapped by Accelerate
        reference: Any | None,  # TokenLogprobs of the reference policy; None at beta 0
        ranks: Ranks,
        settings: GRPOSettings,
        limits: RolloutSettings,
        pad_id: int,
    ) -> None:
        self.accelerator, self.module, self.reference, self.ranks = (
            accelerator,
            module,
            reference,
            ranks,
        )
        self.settings, self.limits, self.pad_id = settings, limits, pad_id
        self.optimizer = torch.optim.AdamW(
            module.parameters(),
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            weight_decay=settings.weight_decay,
        )

    def update_policy(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float], learning_rate: float
    ) -> dict[str, float]:
        """One optimizer step on this rank's trajectories; returns statistics over all ranks."""
        lengths = [trajectory.num_sampled_tokens for trajectory in trajectories]
        self.ranks.barrier("update")  # names a rank that is stuck in its rollouts
        num_sequences, num_tokens = self.ranks.sum([len(lengths), sum(lengths)])
        statistics = {"train/learning_rate": learning_rate, "train/trained_episodes": num_sequences}
        if num_tokens == 0:  # every group was dead, on every rank
            return statistics
        max_tokens = self.limits.max_tokens
        weights = token_weights(
            lengths, self.settings.loss_type, num_sequences, num_tokens, max_tokens
        )
        batches = make_micro_batches(
            trajectories, advantages, weights, self.settings.max_tokens_per_microbatch, self.pad_id
        )
        sums = self._backward(batches)
        grad_norm = self.accelerator.clip_grad_norm_(
            self.module.parameters(), self.settings.max_grad_norm
        )
        if not math.isfinite(float(grad_norm)):  # the same on every rank: gradients are exchanged
            raise RuntimeError(
                f"the gradient norm is {float(grad_norm)}; the weights are kept as they were"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        policy_loss, kl, entropy, clipped, gap = sums
        totals = self.ranks.sum([policy_loss, kl, entropy, clipped])
        statistics["train/loss"] = totals[0]
        if self.reference is not None:
            statistics["train/kl"] = totals[1] / num_tokens
        statistics["train/entropy"] = totals[2] / num_tokens
        statistics["train/clip_ratio"] = totals[3] / num_tokens
        statistics["train/logprob_gap"] = self.ranks.max(gap)
        statistics["train/grad_norm"] = float(grad_norm)
        return statistics

    def _backward(self, batches: list[MicroBatch]) -> list[float]:
        """Accumulate the gradient and exchange it once.

        All ranks run the same number of micro-batches.
        """
        count = int(self.ranks.max(len(batches)))
        batches = batches + [empty_micro_batch(self.pad_id)] * (count - len(batches))
        sums = [torch.zeros(5, device=self.accelerator.device)]
        for number, batch in enumerate(batches, 1):
            batch = batch.to(self.accelerator.device)
            last = number == count
            with nullcontext() if last else self.accelerator.no_sync(self.module):
                logprobs, entropy = self.module(batch)
                loss, stats = grpo_loss(
                    logprobs, entropy, batch, self.settings, self._ref_logprobs(batch)
                )
                self.accelerator.backward(loss * self.ranks.num_ranks)
            sums.append(torch.stack([value.float() for value in vars(stats).values()]))
        stacked = torch.stack(sums)
        return [*stacked[:, :4].sum(0).tolist(), float(stacked[:, 4].max())]

    def _ref_logprobs(self, batch: MicroBatch) -> torch.Tensor | None:
        if self.reference is None:
            return None
        with torch.no_grad(), self.accelerator.autocast():
            ref_logprobs: torch.Tensor = self.reference(batch)[0]
        return ref_logprobs


def learning_rate_at(done: int, num_steps: int, settings: GRPOSettings) -> float:
    """The learning rate of a stage's next step after `done` of `num_steps`.

    Linear warm-up, then the decay. Each stage has a schedule of its own, so that a later domain
    learns as fast as the first.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps
    if done < warmup:
        return peak * (done + 1) / warmup
    if settings.lr_scheduler_type == "constant":
        return peak
    share = min(1.0, (done - warmup) / max(1, num_steps - warmup))
    if settings.lr_scheduler_type == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return peak * (1 - (1 - settings.lr_end_share) * share)
