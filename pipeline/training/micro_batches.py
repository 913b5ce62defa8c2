"""Micro-batches for the forward passes of an update, and the distribution of sequences to ranks."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, repeat
from operator import itemgetter
from typing import Any

import torch

from pipeline.distributed.ranks import Ranks
from pipeline.rollout.samplers.drawing import num_common
from pipeline.rollout.trajectory import Trajectory
from pipeline.training.prefix_tree import PrefixTree, shared_row

# A trajectory, the advantage of its sampled tokens (unless it has `advantages` of its own), and the
# loss weight of each of them.
Item = tuple[Trajectory, float, float]
KEYS_PER_TOKEN = 8  # attention gathers at most `KEYS_PER_TOKEN * max_tokens` keys
TOLERANCE = 0.03  # minimum relative gain in time for which sequences move to other ranks


def make_micro_batches(
    items: Sequence[Item],
    max_tokens: int,
    pad_id: int,
    padding_free: bool = False,
    share_prefixes: bool = False,
) -> list[MicroBatch]:
    """Return micro-batches of at most `max_tokens` tokens each, padding included.

    A sequence of more than `max_tokens` tokens gets a micro-batch of its own. With `padding_free`,
    a micro-batch is one row without padding. With `share_prefixes`, a prefix that several sequences
    share is computed once per micro-batch. Episodes without a sampled token are left out.
    """
    sampled = [item for item in items if item[0].num_sampled_tokens]
    if share_prefixes:
        ordered = sorted(sampled, key=lambda item: item[0].ids)
        ends = shared_cuts([item[0].ids for item in ordered], max_tokens)
    else:
        ordered = sorted(sampled, key=lambda item: -item[0].num_tokens)
        ends = cuts([item[0].num_tokens for item in ordered], max_tokens, padding_free)
    return [
        micro_batch(ordered[first:end], pad_id, padding_free, share_prefixes)
        for first, end in pairwise([0, *ends])
    ]


def cuts(lengths: Sequence[int], max_tokens: int, padding_free: bool) -> list[int]:
    """Return, for each micro-batch, the index of its last sequence plus 1.

    `lengths` must be in descending order. A sequence of more than `max_tokens` tokens has a
    micro-batch of its own.
    """
    ends = []
    first = 0
    tokens = 0
    for i, length in enumerate(lengths):
        needed = tokens + length if padding_free else lengths[first] * (i + 1 - first)
        if i > first and needed > max_tokens:
            ends.append(i)
            first = i
            needed = length
        tokens = needed
    return [*ends, len(lengths)] if lengths else []


def shared_cuts(sequences: Sequence[list[int]], max_tokens: int) -> list[int]:
    """Return what `cuts` returns, for sequences in lexicographic order.

    A common prefix counts once towards `max_tokens`. In
    several sequences, attention reads at most `KEYS_PER_TOKEN * max_tokens` keys.
    """
    ends = []
    tokens = 0
    keys = 0
    for i, ids in enumerate(sequences):
        new = len(ids) - (num_common(sequences[i - 1], ids) if i else 0)
        tokens = tokens + new
        keys = keys + len(ids)
        if keys > len(ids) and (tokens > max_tokens or keys > KEYS_PER_TOKEN * max_tokens):
            ends.append(i)
            tokens = keys = len(ids)
    return [*ends, len(sequences)] if sequences else []


def empty_batch(pad_id: int) -> MicroBatch:
    """Return a micro-batch of one token that has the weight 0."""
    text = Trajectory(domain="", task_id="", prompt_ids=[pad_id])
    text.append([pad_id], [0.0])
    return micro_batch([(text, 0.0, 0.0)], pad_id)


def micro_batch(
    items: Sequence[Item], pad_id: int, padding_free: bool = False, share_prefixes: bool = False
) -> MicroBatch:
    """Return the micro-batch of `items`; `share_prefixes` needs items in lexicographic order."""
    sequences = [trajectory.ids for trajectory, _, _ in items]
    position_ids = tree = None
    paths: Sequence[Sequence[int]]  # for each sequence, the columns of its tokens in `input_ids`
    if share_prefixes:
        ids, positions, paths, tree = shared_row(sequences)
        input_ids = [ids]
        position_ids = torch.tensor([positions])
    elif padding_free:
        input_ids = [[token for ids in sequences for token in ids]]
        position_ids = torch.cat([torch.arange(len(ids)) for ids in sequences])[None]
        ends = [0, *accumulate(map(len, sequences))]
        paths = [range(first, last) for first, last in pairwise(ends)]
    else:
        longest = max(map(len, sequences))
        input_ids = [ids + [pad_id] * (longest - len(ids)) for ids in sequences]
        paths = [range(longest)] * len(items)
    tokens: list[tuple[Any, ...]] = []
    for index, (path, (t, advantage, weight)) in enumerate(zip(paths, items, strict=True)):
        columns = path[len(t.prompt_ids) - 1 :]
        own = t.advantages or repeat(advantage)
        rows = zip(columns, t.completion_ids, t.logprobs, own, t.loss_mask, strict=False)
        tokens += [(*row, index, weight) for *row, sampled in rows if sampled]
    if share_prefixes:
        tokens.sort(key=itemgetter(0))
    columns, targets, old_logprobs, advantages, indices, weights = zip(*tokens, strict=True)
    sequence_N = torch.tensor(indices)
    row_N = sequence_N if position_ids is None else torch.zeros_like(sequence_N)
    predictors_U, which_N = torch.unique_consecutive(
        row_N * len(input_ids[0]) + torch.tensor(columns), return_inverse=True
    )
    starts_U = torch.searchsorted(which_N, torch.arange(len(predictors_U)))
    return MicroBatch(
        input_ids=torch.tensor(input_ids),
        position_ids=position_ids,
        tree=tree,
        lengths=torch.tensor([len(ids) for ids in sequences]),
        predictors=predictors_U,
        which=which_N,
        starts=starts_U.tolist(),
        sequences=sequence_N,
        targets=torch.tensor(targets),
        old_logprobs=torch.tensor(old_logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weights=torch.tensor(weights, dtype=torch.float32),
        tasks=[f"{trajectory.domain}/{trajectory.task_id}" for trajectory, _, _ in items],
    )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The B sequences of one forward pass and their N sampled tokens.

    If `position_ids` is None, each sequence is a row of `input_ids`, padded on the right. If
    `position_ids` is given, one row of `input_ids` contains all sequences. If `tree` is given,
    `input_ids` contains each common prefix only once.
    """

    input_ids: torch.Tensor  # int64; [B, T] without `position_ids`, [1, T] with `position_ids`
    position_ids: torch.Tensor | None  # [1, T] int64, position of each token within its sequence
    tree: PrefixTree | None = None
    lengths: torch.Tensor  # [B] int64, number of tokens of each sequence, without padding
    # [U] int64, the tokens before sampled tokens: indices in `input_ids.flatten()`
    predictors: torch.Tensor
    which: torch.Tensor  # [N] int64, index in `predictors` of the token before each sampled token
    starts: list[int]  # [U], on the host: index of each predictor's first sampled token
    sequences: torch.Tensor  # [N] int64, index of each sampled token's sequence
    targets: torch.Tensor  # [N] int64, the ids of the sampled tokens
    old_logprobs: torch.Tensor  # [N] float32, log-probabilities from the sampler
    advantages: torch.Tensor  # [N] float32
    weights: torch.Tensor  # [N] float32, weight of each sampled token in the loss
    # [N], the trainer's log-probabilities before the step's first update; None: no correction
    trainer_logprobs: torch.Tensor | None = None
    is_learned: bool = False  # kept episodes of learned domains; `old_logprobs` are those then
    tasks: list[str] = field(default_factory=list)  # domain/task_id of each sequence

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the forward pass computes, padding excluded."""
        return int(self.lengths.sum()) if self.position_ids is None else self.input_ids.numel()

    @property
    def order(self) -> torch.Tensor:
        """Indices that sort the sampled tokens by sequence, and then by position, [N]."""
        return self.sequences.argsort(stable=True)

    def to(self, device: torch.device) -> MicroBatch:
        fields = vars(self).items()
        return replace(self, **{k: v.to(device) for k, v in fields if hasattr(v, "to")})


def with_trainer_logprobs(
    batches: Sequence[MicroBatch], logprobs: Sequence[torch.Tensor]
) -> list[MicroBatch]:
    """Return micro-batches with the `trainer_logprobs` of an earlier update of the same items.

    `logprobs` has the values of each micro-batch of that update, in the order `MicroBatch.order`.
    `make_micro_batches` puts sequences into an order that does not depend on `max_tokens`, so the
    micro-batches of the two updates may have different sizes.
    """
    parts = torch.cat([*logprobs]).split([len(batch.targets) for batch in batches])
    return [
        replace(batch, trainer_logprobs=part[batch.order.argsort()])
        for batch, part in zip(batches, parts, strict=True)
    ]


def costs_of(
    sequences: Sequence[list[int]], share_prefixes: bool, pair: float = 0.0
) -> list[float]:
    """Return two costs for each sequence: the cost of all tokens, and the cost of new tokens.

    With `share_prefixes`, tokens of the common prefix with the previous sequence are not new. A
    token costs 1, and its attention to each token before it `pair`.
    """
    costs = []
    for before, ids in pairwise([[], *sequences]):
        shared = num_common(before, ids) if share_prefixes else 0
        whole, known = (count + pair * count**2 / 2 for count in (len(ids), shared))
        costs += [whole, whole - known]
    return costs


def make_plan(costs: Sequence[Sequence[float]]) -> list[list[int]]:
    """Return, for each sequence of each rank, the index of the rank that computes the sequence.

    `costs[r]` is the result of `costs_of` on rank r. Each rank computes consecutive sequences in
    the order of `costs`. A bisection minimises the highest cost of any rank. Sequences move to
    other ranks only if the moves divide the highest cost by at least 1 + TOLERANCE.
    """
    pairs = [list(zip(row[::2], row[1::2], strict=True)) for row in costs]
    loads = [sum(row[1::2]) for row in costs]
    longest = max((whole for row in pairs for whole, _ in row), default=0.0)
    low = max(sum(loads) / len(loads), longest)
    high = max(loads) / (1 + TOLERANCE)
    plan = [[rank] * len(row) for rank, row in enumerate(pairs)]
    while high > 1.005 * low:
        limit = (low + high) / 2
        load = 0.0
        owner = 0
        owners = list[list[int]]()
        for row in pairs:
            owners.append([])
            for whole, new in row:
                load += new
                if load > limit:
                    owner = owner + 1
                    load = whole
                owners[-1].append(owner)
        if owner < len(costs):
            plan = owners
            high = limit
        else:
            low = limit
    return plan


def rearranged(items: Sequence[Item], plan: Sequence[Sequence[int]], ranks: Ranks) -> list[Item]:
    """Return the items that `plan` assigns to this rank; every rank must call this function."""
    if all(owner == rank for rank, owners in enumerate(plan) for owner in owners):
        return list(items)
    parts: list[list[Item]] = [[] for _ in range(ranks.num_ranks)]
    for owner, item in zip(plan[ranks.rank], items, strict=True):
        parts[owner].append(item)
    staying, parts[ranks.rank] = parts[ranks.rank], []
    arrived = ranks.exchange([packed(part) for part in parts])
    return staying + [item for message in arrived if message for item in pickle.loads(message)]


def packed(items: Sequence[Item]) -> bytes:
    """Return the items as bytes for another rank; fields that only reports use are emptied."""
    unused: dict[str, Any] = {
        **{"messages": [], "tools": {}, "reward_breakdown": {}, "difference": {}},
        "further": [],  # which are items of their own
    }
    rows = [(replace(trajectory, **unused), *numbers) for trajectory, *numbers in items]
    return pickle.dumps(rows) if rows else b""
