"""The update: even shares, micro-batches, one exchange of gradients, clip, optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch.func import functional_call

from pipeline.balance import costs_of, make_plan, rearranged
from pipeline.config import Config, GRPOSettings
from pipeline.distributed import Ranks, sharded_adamw, summed_over_ranks
from pipeline.grpo import TokenStats, grpo_loss, token_weights
from pipeline.micro_batches import Item, empty_micro_batch, make_micro_batches
from pipeline.policy import TokenLogprobs
from pipeline.trajectory import MicroBatch, Trajectory


class Reference:
    """The reference policy: a copy of the trained parameters, put in their place for a forward.

    With LoRA these are the adapters alone; a copy of fresh ones, whose product is zero, is the
    base model.
    """

    def __init__(self, module: TokenLogprobs) -> None:
        self.module = module
        self.parameters: dict[str, torch.Tensor] = {}
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the policy as it is now the reference."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and name not in self.parameters:
                self.parameters[name] = torch.empty_like(parameter, requires_grad=False)
            if parameter.requires_grad:
                self.parameters[name].copy_(parameter)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities of `batch.targets` under the reference, [N]."""
        found: torch.Tensor = functional_call(self.module, self.parameters, (batch,))[0]
        return found


class Updater:
    """Optimizer updates on trajectories.

    `module` is the policy's TokenLogprobs, which `accelerator` has not seen yet; `reference`,
    made of the same module, is needed where `grpo.beta` is above 0.
    """

    def __init__(
        self,
        accelerator: Any,
        module: TokenLogprobs,
        ranks: Ranks,
        config: Config,
        pad_id: int,
        reference: Reference | None = None,
    ) -> None:
        self.accelerator, self.ranks, self.reference = accelerator, ranks, reference
        self.module, self.wrapped = module, summed_over_ranks(accelerator.prepare(module))
        self.settings, self.limits, self.pad_id = config.grpo, config.rollout, pad_id
        self.deterministic = config.run.deterministic
        self.balances = (
            self.settings.balance_ranks and ranks.num_ranks > 1 and not self.deterministic
        )
        shared = self.settings.share_prefixes and not self.settings.padding_free
        self.shares_prefixes = shared and module.shares_prefixes
        if shared and not module.shares_prefixes and ranks.is_main:
            print("warning: share_prefixes is ignored; it needs sdpa and layers of full attention")
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        make = sharded_adamw if self.settings.shard_optimizer else torch.optim.AdamW
        self.optimizer = make(
            self.parameters,
            lr=self.settings.learning_rate,
            betas=(self.settings.adam_beta1, self.settings.adam_beta2),
            weight_decay=self.settings.weight_decay,
            fused=True,
        )
        self.num_tokens = self.num_padded_tokens = 0  # computed so far; the latter with padding
        self.num_sampled_tokens = 0  # of this rank's episodes, trained on so far

    def update_policy(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[float],
        learning_rate: float,
        kept: Sequence[bool] | None = None,
    ) -> dict[str, float]:
        """One optimizer step on this rank's groups; returns statistics over all ranks.

        Episodes that are not `kept` (all are, if missing) take no part. Raises RuntimeError where
        the gradient is not finite, before any weight changes.
        """
        kept = [True] * len(trajectories) if kept is None else kept
        lengths = [t.num_sampled_tokens * k for t, k in zip(trajectories, kept, strict=True)]
        self.num_sampled_tokens += sum(lengths)
        groups = self._groups(lengths)
        sequences = [[trajectories[i].ids for i in group] for group in groups]
        costs = costs_of(sequences, self.shares_prefixes) if self.balances else []
        self.ranks.barrier("update")  # names a rank that is stuck in its rollouts
        everyone = self.ranks.all_gather_numbers([sum(kept), sum(lengths), *costs])
        num_sequences, num_tokens = self._counts(everyone)
        statistics = {"train/learning_rate": learning_rate, "train/trained_episodes": num_sequences}
        if num_tokens == 0:  # every group was dead, on every rank
            return statistics
        loss_type, max_tokens = self.settings.loss_type, self.limits.max_tokens
        weights = token_weights(lengths, loss_type, num_sequences, num_tokens, max_tokens)
        items = list(zip(trajectories, advantages, weights, strict=True))
        parts = [[items[i] for i in group] for group in groups]
        if self.balances:
            parts = rearranged(parts, make_plan([row[2:] for row in everyone]), self.ranks)
        if self.deterministic:
            sums = self._backward_in_order([self._cut(part) for part in parts], num_tokens)
        else:
            sums = self._backward(self._cut([item for part in parts for item in part]), num_tokens)
        statistics |= self._step(learning_rate)
        loss, policy_loss, kl, entropy, clipped, gap, max_gap = self._over_ranks(sums)
        statistics |= {"train/loss": loss, "train/policy_loss": policy_loss}
        if self.reference is not None:
            statistics["train/kl"] = kl / num_tokens
        statistics["train/entropy"] = entropy / num_tokens
        statistics["train/clip_ratio"] = clipped / num_tokens
        statistics["train/logprob_gap"] = max_gap
        statistics["train/logprob_gap_mean"] = gap / num_tokens
        return statistics

    def _groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """The episodes of each group that have a term in the loss; siblings stand together."""
        size = self.limits.num_generations
        starts = range(0, len(lengths), size)
        return [
            [i for i in range(first, min(first + size, len(lengths))) if lengths[i]]
            for first in starts
        ]

    def _counts(self, everyone: Sequence[Sequence[float]]) -> tuple[float, float]:
        """Sequences and sampled tokens of all ranks: per-rank counts would make means of means."""
        return sum(row[0] for row in everyone), sum(row[1] for row in everyone)

    def _over_ranks(self, sums: Sequence[float]) -> list[float]:
        """Sums over the ranks; of the last, the largest gap, the maximum."""
        rows = self.ranks.all_gather_tensors(torch.tensor(sums, dtype=torch.float64))
        stacked = torch.stack(rows)
        return [*stacked[:, :-1].sum(0).tolist(), float(stacked[:, -1].max())]

    def _cut(self, items: Sequence[Item]) -> list[MicroBatch]:
        budget, padding_free = self.settings.max_tokens_per_microbatch, self.settings.padding_free
        return make_micro_batches(items, budget, self.pad_id, padding_free, self.shares_prefixes)

    def _step(self, learning_rate: float) -> dict[str, float]:
        """Clip the gradient, the same on every rank, by its global norm, and step."""
        max_norm = self.settings.max_grad_norm
        grad_norm = float(self.accelerator.clip_grad_norm_(self.parameters, max_norm))
        if not math.isfinite(grad_norm):
            raise RuntimeError(f"the gradient norm is {grad_norm}; the weights are kept")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"train/grad_norm": grad_norm}

    def _backward(self, batches: list[MicroBatch], num_tokens: float) -> list[float]:
        """Accumulate the gradient and exchange it once, inside the last backward pass.

        All ranks run the same number of micro-batches. Returns the sums of what is logged.
        """
        count = int(self.ranks.max(len(batches)))
        batches += [empty_micro_batch(self.pad_id)] * (count - len(batches))
        found = []
        for number, batch in enumerate(batches, 1):
            last = number == count
            with nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                found.append(self._backward_one(self.wrapped, batch, num_tokens))
        if self.ranks.num_ranks > 1:
            self.ranks.bytes["gradients"] += sum(p.nbytes for p in self.parameters)
        return _sums(found)

    def _backward_in_order(self, groups: list[list[MicroBatch]], num_tokens: float) -> list[float]:
        """Add the gradients of single groups in the step's own order, group after group.

        Each sum then has the same terms in the same order, and each forward pass the same shapes,
        whatever the number of ranks. One group's gradient per rank is exchanged at a time.
        """
        sizes = [parameter.numel() for parameter in self.parameters]
        total, found = self.parameters[0].new_zeros(sum(sizes)), []
        for turn in range(int(self.ranks.max(len(groups)))):
            batches = groups[turn] if turn < len(groups) else []
            found += [self._backward_one(self.module, batch, num_tokens) for batch in batches]
            mine = torch.cat([_gradient(p).flatten() for p in self.parameters])
            self.optimizer.zero_grad()
            for share in self.ranks.all_gather_tensors(mine):
                total += share
        for parameter, share in zip(self.parameters, total.split(sizes), strict=True):
            parameter.grad = share.view_as(parameter)
        return _sums(found)

    def _backward_one(self, module: Any, batch: MicroBatch, num_tokens: float) -> TokenStats:
        self.num_tokens += batch.num_tokens
        self.num_padded_tokens += batch.input_ids.numel()
        batch = batch.to(self.accelerator.device)
        logprobs, entropy = module(batch)
        ref_logprobs = None if self.reference is None else self._ref_logprobs(batch)
        loss, stats = grpo_loss(logprobs, entropy, batch, self.settings, num_tokens, ref_logprobs)
        self.accelerator.backward(loss)
        return stats

    def _ref_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        assert self.reference is not None
        with self.accelerator.autocast():
            return self.reference.logprobs(batch)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _sums(found: Sequence[TokenStats]) -> list[float]:
    """Sums of every statistic but the last, the largest gap, and the largest of that."""
    if not found:
        return [0.0] * len(fields(TokenStats))
    stacked = torch.stack([torch.stack([v.double() for v in vars(s).values()]) for s in found])
    return [*stacked[:, :-1].sum(0).tolist(), float(stacked[:, -1].max())]


def learning_rate_at(done: int, num_steps: int, peak: float, settings: GRPOSettings) -> float:
    """The learning rate of a stage's next step after `done` of `num_steps`.

    Linear warm-up to `peak`, then the decay. Each stage has a schedule of its own, so that a later
    domain learns as fast as the first.
    """
    warmup = settings.warmup_steps
    if done < warmup:
        return peak * (done + 1) / warmup
    if settings.lr_scheduler_type == "constant":
        return peak
    share = min(1.0, (done - warmup) / max(1, num_steps - warmup))
    if settings.lr_scheduler_type == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return peak * (1 - (1 - settings.lr_end_share) * share)
