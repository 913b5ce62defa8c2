"""The update: even shares, micro-batches, one exchange of gradients, clip, optimizer step.

Too little memory for a micro-batch, and a loss or gradient that is not finite, are data here: the
one makes micro-batches smaller, the other skips the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from pipeline.config.settings import Config
from pipeline.distributed.gradients import Exchange, sharded_adamw, summed_over_ranks
from pipeline.distributed.ranks import Ranks
from pipeline.files.untrusted import printable
from pipeline.grpo.algorithm import TokenStats, grpo_loss, token_weights
from pipeline.grpo.faults import (
    find_suspects,
    give_memory_back,
    is_out_of_memory,
    smaller_budget,
)
from pipeline.grpo.micro_batches import (
    Item,
    MicroBatch,
    costs_of,
    make_micro_batches,
    make_plan,
    rearranged,
)
from pipeline.grpo.token_logprobs import TokenLogprobs
from pipeline.rollout.trajectory import Trajectory

Computed = tuple[MicroBatch, TokenStats]


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
    made of the same module, is needed where `grpo.beta` is above 0. `loss` is `grpo_loss`, or a
    function like it.
    """

    def __init__(
        self,
        accelerator: Any,
        module: TokenLogprobs,
        ranks: Ranks,
        config: Config,
        pad_id: int,
        reference: Reference | None = None,
        *,
        loss: Callable[..., tuple[torch.Tensor, TokenStats]] = grpo_loss,
    ) -> None:
        self.accelerator, self.ranks, self.reference = accelerator, ranks, reference
        self.loss = loss
        self.module = accelerator.prepare_model(module, evaluation_mode=True)  # without DDP
        self.exchange = summed_over_ranks(accelerator.prepare(Exchange(module)))
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
        # The setting, until memory does not suffice for it.
        self.max_tokens_per_microbatch = self.settings.max_tokens_per_microbatch
        self.num_skipped = self.num_skipped_in_a_row = 0  # steps
        self.faults_folder: Path | None = None  # where micro-batches of skipped steps are kept
        self._skipped_step: int | None = None
        # DDP arranges its buckets anew after the first exchange, and with them the order in which
        # it adds the terms of three ranks or more: a resumed run must not begin with the other one.
        self._exchange()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the optimizer's state; equal on all ranks."""
        budget = self.max_tokens_per_microbatch
        is_smaller = budget != self.settings.max_tokens_per_microbatch
        return {
            "max_tokens_per_microbatch": budget if is_smaller else None,
            "num_skipped_steps": self.num_skipped,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; a setting that was made smaller since then stays so."""
        self.num_skipped = state.get("num_skipped_steps", 0)
        self.num_skipped_in_a_row = state.get("num_skipped_in_a_row", 0)
        budget = state.get("max_tokens_per_microbatch") or self.max_tokens_per_microbatch
        self.max_tokens_per_microbatch = min(budget, self.max_tokens_per_microbatch)

    def update_policy(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[float],
        learning_rate: float,
        kept: Sequence[bool] | None = None,
    ) -> dict[str, float]:
        """One optimizer step on this rank's groups; returns statistics over all ranks.

        Episodes that are not `kept` (all are, if missing) take no part. Where the loss or the
        gradient is not finite, the optimizer step is skipped on all ranks. Raises RuntimeError on
        all of them when this happens in more than `max_skipped_steps` steps in a row, and on one
        whose memory does not suffice for a single episode.
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
            return statistics | {"train/skipped": 0}
        loss_type, max_tokens = self.settings.loss_type, self.limits.max_tokens
        weights = token_weights(lengths, loss_type, num_sequences, num_tokens, max_tokens)
        items = list(zip(trajectories, advantages, weights, strict=True))
        parts = [[items[i] for i in group] for group in groups]
        if self.balances:
            parts = rearranged(parts, make_plan([row[2:] for row in everyone]), self.ranks)
        if self.deterministic:
            done = self._backward_in_order(parts, num_tokens)
        else:
            done = self._backward([item for part in parts for item in part], num_tokens)
        found, is_finite = self._finish(done, learning_rate)
        if not is_finite:
            self._count_skipped(trajectories, done)
        return statistics | {"train/skipped": int(not is_finite), **self._means(found, num_tokens)}

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

    def _cut(self, items: Sequence[Item]) -> list[MicroBatch]:
        budget, padding_free = self.max_tokens_per_microbatch, self.settings.padding_free
        return make_micro_batches(items, budget, self.pad_id, padding_free, self.shares_prefixes)

    def _finish(
        self, done: Sequence[Computed], learning_rate: float
    ) -> tuple[dict[str, float], bool]:
        """Clip the gradient, the same on every rank, by its global norm, and step.

        No step where the norm, or the loss of any rank, is not finite. Returns sums over the ranks
        by the names of TokenStats, with the norm, and whether all was finite.
        """
        max_norm = self.settings.max_grad_norm
        with self.ranks.waiting("gradients"):  # on a GPU, they are waited for here
            norm = float(self.accelerator.clip_grad_norm_(self.parameters, max_norm))
        sums = [*_sums([stats for _, stats in done]), norm, self.max_tokens_per_microbatch]
        rows = torch.stack(self.ranks.all_gather_tensors(torch.tensor(sums, dtype=torch.float64)))
        *_, max_gaps, norms, budgets = rows.T
        self.max_tokens_per_microbatch = int(budgets.min())
        names = [field.name for field in fields(TokenStats)]
        totals = [*rows[:, : len(names) - 1].sum(0).tolist(), float(max_gaps.max())]
        is_finite = bool(rows[:, 0].isfinite().all() and norms.isfinite().all())
        if is_finite:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self.num_skipped_in_a_row = 0
        self.optimizer.zero_grad()
        return dict(zip(names, totals, strict=True)) | {"grad_norm": norm}, is_finite

    def _means(self, found: Mapping[str, float], num_tokens: float) -> dict[str, float]:
        """What is logged of an update, from sums over all ranks."""
        means = {f"train/{name}": found[name] for name in ("grad_norm", "loss", "policy_loss")}
        if self.reference is not None:
            means["train/kl"] = found["kl"] / num_tokens
        means["train/entropy"] = found["entropy"] / num_tokens
        means["train/clip_ratio"] = found["clipped"] / num_tokens
        means["train/logprob_gap"] = found["max_logprob_gap"]
        means["train/logprob_gap_mean"] = found["logprob_gap"] / num_tokens
        if self.max_tokens_per_microbatch != self.settings.max_tokens_per_microbatch:
            means["train/max_tokens_per_microbatch"] = self.max_tokens_per_microbatch
        return means

    def _count_skipped(self, trajectories: Sequence[Trajectory], done: Sequence[Computed]) -> None:
        """Keep the micro-batches at fault and say so; RuntimeError where it happens too often.

        Several updates on the episodes of one step count once.
        """
        step = self.ranks.current.step
        if step is None or step != self._skipped_step:
            self.num_skipped += 1
            self.num_skipped_in_a_row += 1
        self._skipped_step = step
        batches, losses = [batch for batch, _ in done], [float(stats.loss) for _, stats in done]
        suspects = find_suspects(self.ranks, trajectories, batches, losses, self.faults_folder)
        if self.num_skipped_in_a_row > self.settings.max_skipped_steps:
            raise RuntimeError(
                f"the loss or gradient was not finite in {self.num_skipped_in_a_row} steps in a "
                f"row ({suspects}){suspects.where}; lower the learning rate or look at them"
            )
        if self.ranks.is_main:
            at = "" if step is None else f"step {step}: "
            print(
                f"warning: {at}the loss or gradient was not finite, so the update was skipped "
                f"({printable(str(suspects))}){suspects.where}",
                flush=True,
            )

    def _backward(self, items: Sequence[Item], num_tokens: float) -> list[Computed]:
        """Accumulate this rank's gradient, then add it to those of the others, once."""
        done = self._accumulate(items, num_tokens)
        self._exchange()
        if self.ranks.num_ranks > 1:
            self.ranks.bytes["gradients"] += sum(p.nbytes for p in self.parameters)
        return done

    def _exchange(self) -> None:
        if self.ranks.num_ranks > 1:
            with self.ranks.waiting("gradients"):
                self.accelerator.backward(self.exchange())

    def _backward_in_order(
        self, groups: Sequence[Sequence[Item]], num_tokens: float
    ) -> list[Computed]:
        """Add the gradients of single groups in the step's own order, group after group.

        Each sum then has the same terms in the same order, and each forward pass the same shapes,
        whatever the number of ranks. One group's gradient per rank is exchanged at a time.
        """
        sizes = [parameter.numel() for parameter in self.parameters]
        total, done = self.parameters[0].new_zeros(sum(sizes)), []
        for turn in range(int(self.ranks.max(len(groups)))):
            done += self._accumulate(groups[turn] if turn < len(groups) else [], num_tokens)
            mine = torch.cat([_gradient(p).flatten() for p in self.parameters])
            self.optimizer.zero_grad()
            for share in self.ranks.all_gather_tensors(mine):
                total += share
        for parameter, share in zip(self.parameters, total.split(sizes), strict=True):
            parameter.grad = share.view_as(parameter)
        return done

    def _accumulate(self, items: Sequence[Item], num_tokens: float) -> list[Computed]:
        """Add the gradients of these items up in micro-batches, where there are none before.

        Where one does not fit into memory, all start again with smaller ones: what its backward
        pass had added already cannot be taken off.
        """
        while True:
            batches, found = self._cut(items), []
            try:
                for batch in batches:
                    found.append(self._backward_one(batch, num_tokens))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self.max_tokens_per_microbatch = smaller_budget(
                    self.max_tokens_per_microbatch, batches, len(found), self.ranks.rank
                )
            else:
                self.num_tokens += sum(batch.num_tokens for batch in batches)
                self.num_padded_tokens += sum(batch.input_ids.numel() for batch in batches)
                return list(zip(batches, found, strict=True))
            # Here, and no sooner, the exception is gone, whose frames held the activations.
            self.optimizer.zero_grad()
            give_memory_back(self.accelerator.device)

    def _backward_one(self, batch: MicroBatch, num_tokens: float) -> TokenStats:
        self.ranks.alive()
        batch = batch.to(self.accelerator.device)
        logprobs, entropy = self.module(batch)
        ref_logprobs = None if self.reference is None else self._ref_logprobs(batch)
        loss, stats = self.loss(logprobs, entropy, batch, self.settings, num_tokens, ref_logprobs)
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
