"""From trajectories to micro-batches: which share a forward pass, and which rank computes them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress, pairwise
from operator import itemgetter
from typing import Any, TypeVar

import torch

from pipeline.distributed.ranks import Ranks
from pipeline.grpo.prefix_tree import PrefixTree, shared_row
from pipeline.rollout.sequences import num_common, num_distinct_tokens
from pipeline.rollout.trajectory import Trajectory

Item = tuple[Trajectory, float, float]  # a trajectory, its advantage, the weight of its tokens
KEYS_PER_TOKEN = 8  # attention gathers at most so many keys per token of the budget
TOLERANCE = 0.03  # the largest load of a rank may exceed the mean by this share
Kind = TypeVar("Kind")
Owners = tuple[int, int]  # the ranks that compute the halves of a group
Plan = Mapping[tuple[int, int], Owners]  # by (rank, number of its group)


def make_micro_batches(
    items: Sequence[Item],
    max_tokens: int,
    pad_id: int,
    padding_free: bool = False,
    share_prefixes: bool = False,
) -> list[MicroBatch]:
    """Forward passes of at most `max_tokens` tokens, of sequences in order of length.

    Padding counts; `padding_free` joins sequences without it. With `share_prefixes` the order is
    lexicographic, and common prefixes count once. Episodes without a sampled token have no term in
    the loss and no place here.
    """
    sampled = [item for item in items if item[0].num_sampled_tokens]
    if share_prefixes:
        ordered = sorted(sampled, key=lambda item: item[0].ids)
        ends = shared_cuts([item[0].ids for item in ordered], max_tokens)
    else:
        ordered = sorted(sampled, key=lambda item: -item[0].num_tokens)
        ends = cuts([item[0].num_tokens for item in ordered], max_tokens, padding_free)
    return [
        micro_batch(ordered[first:last], pad_id, padding_free, share_prefixes)
        for first, last in zip([0, *ends], ends, strict=False)
    ]


def cuts(lengths: Sequence[int], max_tokens: int, padding_free: bool) -> list[int]:
    """Where each micro-batch ends, for lengths in falling order; a longer one stands alone."""
    ends, first, tokens = [], 0, 0
    for i, length in enumerate(lengths):
        needed = tokens + length if padding_free else lengths[first] * (i + 1 - first)
        if i > first and needed > max_tokens:
            ends.append(i)
            first, needed = i, length
        tokens = needed
    return [*ends, len(lengths)] if lengths else []


def shared_cuts(sequences: Sequence[list[int]], max_tokens: int) -> list[int]:
    """The same for sequences in lexicographic order; common prefixes count once.

    There is a bound on the keys that attention gathers, too.
    """
    ends, tokens, keys = [], 0, 0
    for i, ids in enumerate(sequences):
        new = len(ids) - (num_common(sequences[i - 1], ids) if i else 0)
        tokens, keys = tokens + new, keys + len(ids)
        if keys > len(ids) and (tokens > max_tokens or keys > KEYS_PER_TOKEN * max_tokens):
            ends.append(i)
            tokens = keys = len(ids)
    return [*ends, len(sequences)] if sequences else []


def micro_batch(
    items: Sequence[Item], pad_id: int, padding_free: bool = False, share_prefixes: bool = False
) -> MicroBatch:
    """One forward pass over these sequences: one row for each, or one row for all.

    With `share_prefixes` they must be in lexicographic order.
    """
    sequences = [trajectory.ids for trajectory, _, _ in items]
    position_ids = tree = None
    paths: Sequence[Sequence[int]]  # the columns of each sequence's tokens
    if share_prefixes:
        ids, positions, paths, tree = shared_row(sequences)
        input_ids, position_ids = [ids], torch.tensor([positions])
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
    for number, (path, (t, *advantage_weight)) in enumerate(zip(paths, items, strict=True)):
        columns = path[len(t.prompt_ids) - 1 :]
        rows = zip(columns, t.completion_ids, t.logprobs, t.loss_mask, strict=False)
        tokens += [(*row, number, *advantage_weight) for *row, sampled in rows if sampled]
    if share_prefixes:
        tokens.sort(key=itemgetter(0))
    columns, targets, old_logprobs, numbers, advantages, weights = zip(*tokens, strict=True)
    sequence_N = torch.tensor(numbers)
    return MicroBatch(
        input_ids=torch.tensor(input_ids),
        position_ids=position_ids,
        tree=tree,
        lengths=torch.tensor([len(ids) for ids in sequences]),
        rows=sequence_N if position_ids is None else torch.zeros_like(sequence_N),
        columns=torch.tensor(columns),
        sequences=sequence_N,
        targets=torch.tensor(targets),
        old_logprobs=torch.tensor(old_logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weights=torch.tensor(weights, dtype=torch.float32),
        tasks=[f"{trajectory.domain}/{trajectory.task_id}" for trajectory, _, _ in items],
    )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The B sequences of one forward pass, and the terms of the loss of their N sampled tokens.

    Without `position_ids`, each sequence has a row of `input_ids`, padded on the right. With them,
    one row has all sequences: one after the other, or with a `tree`, common prefixes once. Sampled
    tokens after the same prefix are then neighbours among the N.
    """

    input_ids: torch.Tensor  # [B, T] int64, or [1, T]
    position_ids: torch.Tensor | None  # [1, T] int64, the position of each token in its sequence
    tree: PrefixTree | None = None
    lengths: torch.Tensor  # [B] int64, tokens of each sequence, without padding
    rows: torch.Tensor  # [N] int64, row of each sampled token
    columns: torch.Tensor  # [N] int64, the output at this column predicts the token
    sequences: torch.Tensor  # [N] int64, the token's number among the B sequences
    targets: torch.Tensor  # [N] int64, the sampled ids
    old_logprobs: torch.Tensor  # [N] float32
    advantages: torch.Tensor  # [N] float32
    weights: torch.Tensor  # [N] float32, share of the global normaliser; 0 drops a token
    tasks: list[str] = field(default_factory=list)  # domain/task_id of each sequence

    @property
    def num_tokens(self) -> int:
        """Tokens that a forward pass computes, without padding."""
        return int(self.lengths.sum()) if self.position_ids is None else self.input_ids.numel()

    def to(self, device: torch.device) -> MicroBatch:
        fields = vars(self).items()
        return replace(self, **{k: v.to(device) for k, v in fields if hasattr(v, "to")})


def halves(group: Sequence[Kind], ids: Callable[[Kind], list[int]]) -> list[list[Kind]]:
    """The two halves of a group; sequences with long common prefixes stay together."""
    ordered = sorted(group, key=ids)
    middle = (len(ordered) + 1) // 2
    return [ordered[:middle], ordered[middle:]]


def costs_of(groups: Sequence[Sequence[list[int]]], share_prefixes: bool) -> list[float]:
    """Tokens to compute: three numbers a group, for the whole group and for each half."""
    parts = [part for group in groups for part in (group, *halves(group, lambda ids: ids))]
    if share_prefixes:
        return [float(num_distinct_tokens(part)) for part in parts]
    return [float(sum(map(len, part))) for part in parts]


def make_plan(costs: Sequence[Sequence[float]]) -> Plan:
    """The owners of all groups' halves, from every rank's `costs_of`.

    The rank with the largest load repeatedly gives a group or a half to the rank with the smallest
    load, so that these two become most equal. This ends within TOLERANCE or when no move helps.
    """

    def cost(rank: int, place: tuple[int, int], owners: Owners) -> float:
        whole, *parts = costs[place[0]][3 * place[1] :][:3]
        if owners == (rank, rank):
            return whole
        return sum(part for part, owner in zip(parts, owners, strict=True) if owner == rank)

    plan = {(rank, i): (rank, rank) for rank, row in enumerate(costs) for i in range(len(row) // 3)}
    loads = [sum(row[::3]) for row in costs]
    while max(loads) > (1 + TOLERANCE) * sum(loads) / len(loads):
        high, low = loads.index(max(loads)), loads.index(min(loads))
        best, move = loads[high], None
        for place, (first, second) in plan.items():
            possible = first == second == high, first == high, second == high
            for owners in compress([(low, low), (low, second), (first, low)], possible):
                after = [
                    loads[rank] + cost(rank, place, owners) - cost(rank, place, plan[place])
                    for rank in (high, low)
                ]
                if max(after) < best:
                    best, move = max(after), (place, owners, after)
        if move is None:
            break
        place, plan[place], (loads[high], loads[low]) = move
    return plan


def rearranged(groups: Sequence[Sequence[Item]], plan: Plan, ranks: Ranks) -> list[list[Item]]:
    """This rank's groups after the moves of the plan; every rank must call it."""
    staying: list[list[Item]] = []
    leaving: list[list[Item]] = [[] for _ in range(ranks.num_ranks)]
    for number, group in enumerate(groups):
        staying.append([])
        parts = halves(group, lambda item: item[0].ids)
        for owner, part in zip(plan[ranks.rank, number], parts, strict=True):
            (staying[-1] if owner == ranks.rank else leaving[owner]).extend(part)
    if all(owner == rank for (rank, _), owners in plan.items() for owner in owners):
        return staying
    arrived = ranks.exchange([packed(items) for items in leaving])
    return [*staying, *(pickle.loads(message) if message else [] for message in arrived)]


def packed(items: Sequence[Item]) -> bytes:
    """Episodes for another rank, without the fields for reports; empty if there are none."""
    unused: dict[str, Any] = {"messages": [], "tools": {}, "reward_breakdown": {}, "difference": {}}
    rows = [(replace(trajectory, **unused), *numbers) for trajectory, *numbers in items]
    return pickle.dumps(rows) if rows else b""
