"""The update: load balancing, micro-batches, all-reduce and clipping of gradients, optimizer step.

If memory runs out, an Updater halves the maximum number of tokens in a micro-batch. All ranks
skip an optimizer step whose loss or gradient is not finite.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.func import functional_call

from pipeline.common.console import say
from pipeline.config.settings import Config
from pipeline.distributed.devices import on_gpu
from pipeline.distributed.ranks import GradientAllReduce, Ranks, sum_gradients
from pipeline.distributed.sharding import (
    ShardedAdamW,
    exchanged,
    held,
    leave_pass,
    local,
    passes_together,
    start_over,
    sum_held_gradients,
    whole,
)
from pipeline.models import rank_memory
from pipeline.models.lora import base_model
from pipeline.models.rank_memory import cost_of_a_pair, memory_of_rank, token_budget
from pipeline.rollout.trajectory import Trajectory
from pipeline.training.grpo import (
    FORMULAS,
    JOINED,
    JOINED_RATIOS,
    TokenStats,
    clipped_ratio,
    grpo_loss,
    learned_loss,
    token_weights,
)
from pipeline.training.micro_batches import (
    Item,
    MicroBatch,
    costs_of,
    empty_batch,
    make_micro_batches,
    make_plan,
    rearranged,
    with_trainer_logprobs,
)
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.update_faults import find_suspects, smaller_budget


class LearnedStats(NamedTuple):
    """The loss of a micro-batch of kept episodes, without gradient."""

    loss: torch.Tensor


Computed = tuple[MicroBatch, TokenStats | LearnedStats]
Result = TypeVar("Result")


class Reference:
    """The reference policy: a copy of the trained parameters (with LoRA: of the adapters).

    A copy that is `aside` stands in main memory, and computes in the place of the parameters: in
    the context `in_place`, the two are exchanged.
    """

    def __init__(self, module: TokenLogprobs, *, aside: bool = False) -> None:
        self.module = module
        self.aside = aside
        self.refresh()

    def refresh(self) -> None:
        """Copy the current parameters of the policy into the reference policy."""
        trained = [(n, p.detach()) for n, p in self.module.named_parameters() if p.requires_grad]
        if self.aside:
            self.parameters = {name: local(p).to("cpu", copy=True) for name, p in trained}
        else:
            self.parameters = {name: parameter.clone() for name, parameter in trained}

    @property
    def _is_exchanged(self) -> bool:
        return self.aside or self.module.sharded is not None

    def in_place(self) -> AbstractContextManager[None]:
        """Return the context in which `logprobs` computes."""
        if not self._is_exchanged:
            return nullcontext()
        named = dict(self.module.named_parameters())
        pairs = [(named[name], tensor) for name, tensor in self.parameters.items()]
        return exchanged(self.module.sharded, pairs)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Return log-probabilities of `batch.targets` under the reference policy, [N]."""
        if self._is_exchanged:
            return self.module(batch)[0]
        return functional_call(self.module, self.parameters, (batch,))[0]


class Updater:
    """Trains the policy on trajectories.

    `accelerator` prepares `module` for training. `reference`, a Reference of `module`, is
    required if `grpo.beta` is above 0, and `start`, another or the same one with the weights at the
    start of the stage, if `grpo.movement_coef` is. `loss` has the signature of `grpo_loss`. Weight
    decay leaves out norms and biases unless `decays_vectors`. Every rank must make its Updater.
    """

    def __init__(
        self,
        accelerator: Any,
        module: TokenLogprobs,
        ranks: Ranks,
        config: Config,
        *,
        reference: Reference | None = None,
        start: Reference | None = None,
        pad_id: int = 0,
        loss: Callable[..., tuple[torch.Tensor, TokenStats]] = grpo_loss,
        decays_vectors: bool = True,
    ) -> None:
        self.accelerator = accelerator
        self.ranks = ranks
        self.reference = reference
        self.start = start
        self.loss = loss
        self.module = accelerator.prepare_model(module, evaluation_mode=True)  # without DDP
        self.model = module.model
        self.sharded = module.sharded
        self.settings = settings = config.grpo
        self.limits = config.rollout
        self.corrects = config.corrects_sampling
        # Of the sequences that this rank computes in a step, by the number of `_accumulate`'s call.
        self._trainer_logprobs: dict[int, list[torch.Tensor]] = {}
        self.pad_id = pad_id
        self.deterministic = config.run.deterministic
        self.balances = settings.balance_ranks and ranks.num_ranks > 1 and not self.deterministic
        shared = settings.share_prefixes and not settings.padding_free
        self.shares_prefixes = shared and module.shares_prefixes
        if shared and not module.shares_prefixes and ranks.is_main:
            say("warning: share_prefixes is ignored; it needs sdpa and layers of full attention")
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        shards_moments = settings.shard == "optimizer" and ranks.num_ranks > 1
        make = ShardedAdamW if shards_moments else torch.optim.AdamW
        self.optimizer = make(
            _groups(self.parameters, decays_vectors),
            lr=0.0,  # each step sets its own
            betas=(settings.adam_beta1, settings.adam_beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        # Numbers of tokens in the forward passes of this rank, without and with padding.
        self.num_tokens = self.num_padded_tokens = 0
        self._first_budget = token_budget(
            config, base_model(module.model), memory_of_rank(), on_gpu()
        )
        self.max_tokens_per_microbatch = self._first_budget
        self._pair = cost_of_a_pair(base_model(module.model))
        rank_memory.keep_freed_memory(module)
        self.num_skipped = self.num_skipped_in_a_row = 0  # numbers of skipped optimizer steps
        self.faults_folder: Path | None = None  # folder for micro-batches of skipped steps
        self._skipped_step: int | None = None
        self._smaller_budget: int | None = None  # after memory ran out
        self._nothing = empty_batch(pad_id)
        if self.sharded is None:
            self.gradient_all_reduce = sum_gradients(accelerator.prepare(GradientAllReduce(module)))
            self._form_buckets()

    def _form_buckets(self) -> None:
        """Let DDP form its buckets.

        DDP changes its buckets, and so the order of its sums, after the first all-reduce. After
        these extra all-reduces, a resumed run and an uninterrupted run sum in the same order, and
        each gradient is a part of a bucket.
        """
        for _ in range(2):
            self.optimizer.zero_grad()
            self._all_reduce_gradients()
        self._zero_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Return the Updater's state, which is equal on all ranks and excludes the optimizer."""
        budget = self.max_tokens_per_microbatch
        return {
            "max_tokens_per_microbatch": None if budget == self._first_budget else budget,
            "num_skipped_steps": self.num_skipped,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's state; `max_tokens_per_microbatch` can only become smaller."""
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
        *,
        learned: Sequence[Trajectory] = (),
        is_last: bool = True,
    ) -> dict[str, float]:
        """Do one optimizer step on all ranks' `trajectories`; return statistics over all ranks.

        The step uses only episodes with True in `kept` (default: all episodes). `learned` has kept
        episodes of learned domains, the same on all ranks: the loss gets `learned_beta` times their
        mean KL divergence per token (see `learned_loss`), but not in a step without signal.
        `is_last` is False if the next call is another update on the same episodes. All ranks skip a
        step whose loss or gradient is not finite, and raise RuntimeError after more than
        `max_skipped_steps` of these in a row. A rank raises RuntimeError if a single episode does
        not fit into its memory.
        """
        kept = [True] * len(trajectories) if kept is None else kept
        lengths = [t.num_sampled_in_all * k for t, k in zip(trajectories, kept, strict=True)]
        # The sequences to train, each with the index of its episode.
        trained = [
            (i, sequence)
            for i, length in enumerate(lengths)
            if length
            for sequence in trajectories[i].sequences
            if sequence.num_sampled_tokens
        ]
        if self.deterministic:  # a loop may begin the sequences of an episode in any order
            trained.sort(key=lambda pair: (pair[0], pair[1].ids, len(pair[1].prompt_ids)))
        costs = list[float]()
        if self.balances:
            trained.sort(key=lambda pair: pair[1].ids)
            costs = costs_of(
                [sequence.ids for _, sequence in trained], self.shares_prefixes, self._pair
            )
        mine = [float(sum(kept)), float(sum(lengths)), *costs]
        everyone = self.ranks.all_gather_objects(mine, "update")
        num_sequences, num_tokens = self._counts(everyone)
        statistics = {"train/learning_rate": learning_rate, "train/trained_episodes": num_sequences}
        if num_tokens == 0:  # all groups on all ranks are zero-std groups
            return statistics | {"train/skipped": 0}
        weights = token_weights(
            lengths, self.settings.loss_type, num_sequences, num_tokens, self.limits.max_tokens
        )
        items = [(sequence, advantages[i], weights[i]) for i, sequence in trained]
        num_learned = sum(trajectory.num_sampled_tokens for trajectory in learned)
        anchors = [(t, 0.0, self.settings.learned_beta / num_learned) for t in learned]
        if self.deterministic:
            size = self.limits.num_generations
            groups = [list[Item]() for _ in lengths[::size]]
            for (i, _), item in zip(trained, items, strict=True):
                groups[i // size].append(item)
            done = self._backward_in_order(groups, anchors, num_tokens)
        else:
            if self.balances:
                items = rearranged(items, make_plan([row[2:] for row in everyone]), self.ranks)
            mine = [anchors[index] for index in self.ranks.shard(len(anchors))]
            done = self._accumulate(items, num_tokens, anchors=mine)
            self._all_reduce_gradients()
            if self.ranks.num_ranks > 1 and self.sharded is None:
                self.ranks.bytes["gradients"] += sum(p.nbytes for p in self.parameters)
        if is_last:
            self._trainer_logprobs.clear()
        sums, is_finite = self._step(done, learning_rate)
        if not is_finite:
            self._count_skipped(done)
        if learned:
            statistics["train/learned_kl"] = sums["learned_loss"] / self.settings.learned_beta
        return statistics | {"train/skipped": int(not is_finite), **self._means(sums, num_tokens)}

    def _counts(self, everyone: Sequence[Sequence[float]]) -> tuple[float, float]:
        return sum(row[0] for row in everyone), sum(row[1] for row in everyone)

    def _cut(self, items: Sequence[Item]) -> list[MicroBatch]:
        return make_micro_batches(
            items,
            self.max_tokens_per_microbatch,
            self.pad_id,
            self.settings.padding_free,
            self.shares_prefixes,
        )

    def _all_reduce_gradients(self) -> None:
        if self.ranks.num_ranks > 1 and self.sharded is None:
            with self.ranks.waiting("gradients"):
                self.accelerator.backward(self.gradient_all_reduce())

    def _zero_gradients(self) -> None:
        """Zero the gradients in DDP's buckets; without buckets, free the gradients."""
        in_buckets = self.ranks.num_ranks > 1 and not (
            self.deterministic or self.sharded is not None
        )
        self.optimizer.zero_grad(set_to_none=not in_buckets)

    def _backward_in_order(
        self, groups: Sequence[Sequence[Item]], anchors: Sequence[Item], num_tokens: float
    ) -> list[Computed]:
        """Sum the gradients of all groups, one group after the other, in the order of the groups.

        The `anchors` of all ranks follow, in groups that the ranks take in turn.
        The order of the sum and the shapes of forward passes do not depend on the number of ranks.
        """
        none: Sequence[Item] = []
        own = [*groups, *[none] * (int(self.ranks.max(len(groups))) - len(groups))]
        parts = [(group, none) for group in own]
        size = self.limits.num_generations
        for first in range(0, len(anchors), size * self.ranks.num_ranks):
            start = first + size * self.ranks.rank
            parts.append((none, anchors[start : start + size]))
        sizes = [parameter.numel() for parameter in self.parameters]
        total = self.parameters[0].new_zeros(sum(sizes))
        done = []
        for index, (group, learned) in enumerate(parts):
            done += self._accumulate(group, num_tokens, index, anchors=learned)
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            mine = torch.cat([gradient.flatten() for gradient in gradients])
            self._zero_gradients()
            for gradient in self.ranks.all_gather_tensors(mine):
                total += gradient
        for parameter, gradient in zip(self.parameters, total.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)
        return done

    def _accumulate(
        self,
        items: Sequence[Item],
        num_tokens: float,
        number: int = 0,
        *,
        anchors: Sequence[Item] = (),
    ) -> list[Computed]:
        """Sum the gradients of all items and `anchors`, micro-batch by micro-batch.

        If a micro-batch does not fit into memory, all gradients are computed again with smaller
        micro-batches; ranks of a sharded model agree on this. All gradients must be zero before the
        call. All updates of a step give the same items to the call with a `number`.
        """
        while True:
            batches = self._cut(items)
            if known := self._trainer_logprobs.get(number):
                batches = with_trainer_logprobs(batches, known)
            self._smaller_budget = None
            of_reference = self._logprobs(self.reference, batches) if self.reference else []
            batches += [replace(batch, is_learned=True) for batch in self._cut(anchors)]
            with held(self.sharded):
                done = self._pass_through(
                    batches, partial(self._backward_one, num_tokens), of_reference
                )
                budget = self._agreed_budget()
                if budget is None:
                    sum_held_gradients(self.sharded, self._nothing_back)
            if budget is None:
                break
            self._start_over(budget)
        self.num_tokens += sum(batch.num_tokens for batch in batches)
        self.num_padded_tokens += sum(batch.input_ids.numel() for batch in batches)
        self._trainer_logprobs[number] = [
            batch.trainer_logprobs[batch.order]
            for batch, _ in done
            if batch.trainer_logprobs is not None
        ]
        return done

    def _nothing_back(self) -> Computed:
        """Do a pass with a backward pass of gradients that are zero."""
        return self._backward_one(1.0, self._nothing, None)

    def _start_over(self, budget: int) -> None:
        """Undo what failed passes have done, before passes with smaller micro-batches."""
        self.max_tokens_per_microbatch = budget
        start_over(self.sharded, self._nothing_back)
        self._zero_gradients()
        rank_memory.give_memory_back()

    def logprobs(
        self, policy: Reference | None, sequences: Sequence[Trajectory]
    ) -> list[list[float]]:
        """Return the log-probabilities of each sequence's sampled tokens under a policy.

        None is the policy in training. Every rank must call this function. Each sequence must have
        a sampled token, and no `advantages`. If `deterministic`, each sequence has a pass of its
        own, so that the values do not depend on the other sequences of a rank.
        """
        # The advantage of an item is the sequence's place, by which the values are put back.
        items: list[Item] = [(one, float(i), 0.0) for i, one in enumerate(sequences)]
        while True:
            parts = [[item] for item in items] if self.deterministic else [items]
            batches = [batch for part in parts for batch in self._cut(part)]
            self._smaller_budget = None
            found = self._logprobs(policy, batches)
            if (budget := self._agreed_budget()) is None:
                break
            self._start_over(budget)
        values: list[list[float]] = [[] for _ in sequences]
        for batch, logprobs in zip(batches, found, strict=True):
            of_tokens = torch.stack([batch.advantages, logprobs.cpu().double()], 1)[batch.order]
            for place, value in of_tokens.tolist():
                values[int(place)].append(value)
        return values

    @torch.no_grad()
    def _logprobs(
        self, policy: Reference | None, batches: Sequence[MicroBatch]
    ) -> list[torch.Tensor]:
        def one(batch: MicroBatch, _: Any) -> torch.Tensor:
            batch = batch.to(self.accelerator.device)
            return policy.logprobs(batch) if policy else self.module(batch)[0]

        place = policy.in_place() if policy else nullcontext()
        with place, held(self.sharded), self.accelerator.autocast():
            return self._pass_through(batches, one)

    def _pass_through(
        self,
        batches: Sequence[MicroBatch],
        compute: Callable[[MicroBatch, Any], Result],
        extra: Sequence[Any] = (),
    ) -> list[Result]:
        """Return the results of `compute` of the micro-batches, each with its item of `extra`.

        The last micro-batches may have none.
        If memory runs out, `_smaller_budget` is set, and the results are useless.
        """
        found = list[Result]()
        for batch, counts in self.passes(batches):
            is_small = self._smaller_budget is not None or not counts
            try:
                if is_small:
                    compute(self._nothing, None)
                else:
                    found.append(
                        compute(batch, extra[len(found)] if len(found) < len(extra) else None)
                    )
            except (RuntimeError, MemoryError) as error:
                if is_small or not rank_memory.is_out_of_memory(error):
                    raise
                self._smaller_budget = smaller_budget(
                    self.max_tokens_per_microbatch, batches, len(found), self.ranks.rank
                )
            else:
                continue
            # Inside `except`, less memory could be freed: the exception keeps activations alive.
            rank_memory.give_memory_back()
            leave_pass(self.sharded, partial(compute, self._nothing, None))
            if not passes_together(self.sharded):
                break
        return found

    def _agreed_budget(self) -> int | None:
        """Return the budget with which to compute again; of a sharded model, the ranks' least."""
        if self.sharded is None:
            return self._smaller_budget
        found = self.ranks.all_gather_numbers([self._smaller_budget or 0])
        return min((int(budget) for (budget,) in found if budget), default=None)

    def passes(self, batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield this rank's micro-batches, with True: they count.

        All ranks pass through a sharded model together. A rank with fewer micro-batches than
        another then also gets micro-batches of one token that do not count.
        """
        together = passes_together(self.sharded)
        count = int(self.ranks.max(len(batches))) if together else len(batches)
        for index in range(count):
            if self.sharded is not None:
                self.sharded.num_exchanges = 0
            yield (batches[index], True) if index < len(batches) else (self._nothing, False)

    def _backward_one(
        self, num_tokens: float, batch: MicroBatch, ref_logprobs: torch.Tensor | None
    ) -> Computed:
        self.ranks.alive()
        here = batch.to(self.accelerator.device)
        logprobs, entropy = self.module(here)
        if batch.is_learned:
            loss = learned_loss(logprobs, here)
            self.accelerator.backward(loss)
            return batch, LearnedStats(loss.detach())
        if self.corrects and batch.trainer_logprobs is None:  # the step's first update
            batch, here = (replace(b, trainer_logprobs=logprobs.detach()) for b in (batch, here))
        loss, stats = self.loss(logprobs, entropy, here, self.settings, num_tokens, ref_logprobs)
        self.accelerator.backward(loss)
        return batch, stats

    def _step(
        self, done: Sequence[Computed], learning_rate: float
    ) -> tuple[dict[str, float], bool]:
        """Clip the gradient by its norm, and do the optimizer step if loss and gradient are finite.

        Returns statistics over all ranks, and True if the optimizer step was done.
        """
        squares = 0.0 if self.start is None else self._pull_to(self.start)
        with self.ranks.waiting("gradients"):  # on a GPU, `float()` waits for the all-reduce
            max_norm = self.settings.max_grad_norm
            norm = float(whole(self.accelerator.clip_grad_norm_(self.parameters, max_norm)))
        joined = [*JOINED, *(JOINED_RATIOS if self.corrects else [])]
        mine = dict[str, float]()
        own = [stats for batch, stats in done if not batch.is_learned]
        for names, reduce, nothing in joined:
            mine |= _over_batches(own, names, reduce, nothing)
        mine |= {"grad_norm": norm, "budget": float(self.max_tokens_per_microbatch)}
        mine["learned_loss"] = sum(float(stats.loss) for batch, stats in done if batch.is_learned)
        mine["loss"] += mine["learned_loss"]
        mine["movement"] = squares
        numbers = torch.tensor([*mine.values()], dtype=torch.float64)
        rows = torch.stack(self.ranks.all_gather_tensors(numbers))
        of_ranks = dict(zip(mine, rows.T, strict=True))
        self.max_tokens_per_microbatch = int(of_ranks["budget"].min())
        joined.append((("learned_loss",), torch.sum, 0.0))
        # Each rank has all weights, or a part of each.
        joined.append((("movement",), torch.amax if self.sharded is None else torch.sum, 0.0))
        totals = {n: float(reduce(of_ranks[n])) for names, reduce, _ in joined for n in names}
        totals["loss"] += self.settings.movement_coef / 2 * totals["movement"]
        is_finite = bool(torch.stack([of_ranks["loss"], of_ranks["grad_norm"]]).isfinite().all())
        if is_finite:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self.num_skipped_in_a_row = 0
        self._zero_gradients()
        return totals | {"grad_norm": norm}, is_finite

    @torch.no_grad()
    def _pull_to(self, start: Reference) -> float:
        """Add the gradient of `movement_coef / 2` times the squared distance to `start`.

        Returns the squared distance before the step; of sharded weights, this rank's part. This is
        L2-SP (Li et al. 2018, arXiv 1802.01483, section 3), a part of the loss: the gradient is
        clipped as a whole, and AdamW's moments have it too. Decoupled from them, as weight decay
        is, it would be another method.
        """
        squares = []
        for name, parameter in self.module.named_parameters():
            if name in start.parameters:
                distance = local(parameter) - local(start.parameters[name])
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local(parameter.grad).add_(distance, alpha=self.settings.movement_coef)
                squares.append(distance.square().sum())
        return float(torch.stack(squares).double().sum())

    def _means(self, sums: Mapping[str, float], num_tokens: float) -> dict[str, float]:
        means = {f"train/{name}": sums[name] for name in ("grad_norm", "loss", "policy_loss")}
        if self.reference is not None:
            means["train/kl"] = sums["kl"] / num_tokens
        if self.start is not None:
            means["train/movement"] = sums["movement"] ** 0.5
        means["train/entropy"] = sums["entropy"] / num_tokens
        means["train/clip_ratio"] = sums["clipped"] / num_tokens
        if FORMULAS[self.settings.loss_type].terms is clipped_ratio:
            low, high = (sums[f"clipped_{at}"] / num_tokens for at in ("low", "high"))
            means |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high}
            means["clip_ratio/region_mean"] = low + high
        means["train/sampling_logp_difference_max"] = sums["sampling_logp_difference_max"]
        means["train/sampling_logp_difference_mean"] = sums["sampling_logp_difference"] / num_tokens
        if self.corrects:
            name = "importance_sampling_ratio"
            means |= {f"train/{name}_{kind}": sums[f"{name}_{kind}"] for kind in ("min", "max")}
            means[f"train/{name}_mean"] = sums[name] / sums["num_ratios"]
        if self.max_tokens_per_microbatch != self._first_budget:
            means["train/max_tokens_per_microbatch"] = self.max_tokens_per_microbatch
        return means

    def _count_skipped(self, done: Sequence[Computed]) -> None:
        """Count a skipped step, save the step's suspicious micro-batches, and print a warning.

        Several skipped updates in the same step count once. Raises RuntimeError after more than
        `max_skipped_steps` skipped steps in a row.
        """
        step = self.ranks.current.step
        if step is None or step != self._skipped_step:
            self.num_skipped += 1
            self.num_skipped_in_a_row += 1
        self._skipped_step = step
        losses = [(batch, float(stats.loss)) for batch, stats in done]
        suspects = find_suspects(self.ranks, losses, self.faults_folder)
        if self.num_skipped_in_a_row > self.settings.max_skipped_steps:
            raise RuntimeError(
                f"the loss or gradient was not finite in {self.num_skipped_in_a_row} steps in a "
                f"row {suspects}; lower the learning rate or look at them"
            )
        if self.ranks.is_main:
            at = "" if step is None else f"step {step}: "
            why = "the loss or gradient was not finite, so the update was skipped"
            say(f"warning: {at}{why} {suspects}")


def _over_batches(
    done: Sequence[TokenStats | LearnedStats],
    names: Sequence[str],
    reduce: Callable[..., torch.Tensor],
    nothing: float,
) -> dict[str, float]:
    """Return statistics over this rank's micro-batches by name, or `nothing` without any."""
    if not done:
        return dict.fromkeys(names, nothing)
    rows = [torch.stack([getattr(stats, name) for name in names]) for stats in done]
    found = reduce(torch.stack(rows).double(), 0)
    return dict(zip(names, found.tolist(), strict=True))


def _groups(parameters: Sequence[torch.Tensor], decays_vectors: bool) -> list[dict[str, Any]]:
    """Return the optimizer's groups: one, and a second for norms and biases without decay."""
    vectors = [] if decays_vectors else [p for p in parameters if p.dim() < 2]
    if not vectors:
        return [{"params": [*parameters]}]
    matrices = [p for p in parameters if p.dim() > 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
