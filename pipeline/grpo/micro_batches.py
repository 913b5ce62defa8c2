"""Trajectories to micro-batches: which rank computes them, and which share a forward pass."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import torch

from pipeline.distributed.ranks import Ranks
from pipeline.grpo.prefix_tree import PrefixTree, shared_row
from pipeline.rollout.sequences import num_common, num_distinct_tokens
from pipeline.rollout.trajectory import StopReason, Trajectory

Item = tuple[Trajectory, float, float]  # a trajectory, its advantage, the weight of its tokens
KEYS_PER_TOKEN = 8  # that attention may gather, for each token of a micro-batch's budget


def make_micro_batches(
    items: Sequence[Item],
    max_tokens: int,
    pad_id: int,
    padding_free: bool = False,
    share_prefixes: bool = False,
) -> list[MicroBatch]:
    """Sequences sorted by length, cut where a forward pass would exceed `max_tokens`.

    Padding counts; with `padding_free` there is none. With `share_prefixes` they are sorted by
    their tokens, and what is computed once counts once. Episodes without a sampled token (the
    environment failed at once) have no term and are left out.
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
    """The same for sequences in lexicographic order, whose common beginnings count once.

    What attention gathers for each sequence is bounded as well.
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
    """One forward pass over these sequences: a row each, or all in one.

    With `share_prefixes` they must be sorted by their tokens.
    """
    sequences = [trajectory.ids for trajectory, _, _ in items]
    ends = list(accumulate(map(len, sequences)))
    position_ids = tree = None
    if share_prefixes:
        row = shared_row(sequences)
        input_ids, position_ids, tree = [row.ids], torch.tensor([row.positions]), row.tree
        paths: Sequence[Sequence[int]] = row.paths
    elif padding_free:
        input_ids = [[token for ids in sequences for token in ids]]
        position_ids = torch.cat([torch.arange(len(ids)) for ids in sequences])[None]
        paths = [range(end - len(ids), end) for ids, end in zip(sequences, ends, strict=True)]
    else:
        longest = max(map(len, sequences))
        input_ids = [ids + [pad_id] * (longest - len(ids)) for ids in sequences]
        paths = [range(longest)] * len(items)
    tokens: list[tuple[Any, ...]] = []
    for number, ((trajectory, advantage, weight), path) in enumerate(
        zip(items, paths, strict=True)
    ):
        start = len(trajectory.prompt_ids)
        same = (number, advantage, weight)
        tokens += [
            (path[start + i - 1], trajectory.completion_ids[i], trajectory.logprobs[i], *same)
            for i, mask in enumerate(trajectory.loss_mask)
            if mask
        ]
    if share_prefixes:
        tokens.sort(key=itemgetter(0))
    columns, targets, old_logprobs, numbers, advantages, weights = zip(*tokens, strict=True)
    where = torch.tensor(numbers)
    return MicroBatch(
        input_ids=torch.tensor(input_ids),
        position_ids=position_ids,
        tree=tree,
        lengths=torch.tensor([len(ids) for ids in sequences]),
        rows=where if position_ids is None else torch.zeros_like(where),
        columns=torch.tensor(columns),
        sequences=where,
        targets=torch.tensor(targets),
        old_logprobs=torch.tensor(old_logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weights=torch.tensor(weights, dtype=torch.float32),
    )


def bare_trajectory(
    prompt_ids: list[int], completion_ids: list[int], loss_mask: list[bool], logprobs: list[float]
) -> Trajectory:
    """An episode with what an update needs of it, and nothing else."""
    return Trajectory(
        domain="",
        task_id="",
        family="",
        branch="",
        trial=0,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        stop_reason=StopReason.COMPLETED,
        reward=0.0,
        num_turns=0,
    )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Sequences of one forward pass, and for each sampled token what its term of the loss needs.

    Flat over the N sampled tokens of the B sequences. Each sequence has a row of `input_ids`,
    padded on the right, and `position_ids` is missing; or all stand in one row, and `position_ids`
    has each token's position in its sequence: one after the other, or with a `tree` such that
    common beginnings stand there once, and tokens with one prediction next to each other.
    """

    input_ids: torch.Tensor  # [B, T] int64, or [1, T]
    position_ids: torch.Tensor | None  # [1, T] int64
    tree: PrefixTree | None = None
    lengths: torch.Tensor  # [B] int64, real tokens of each sequence
    rows: torch.Tensor  # [N] int64, row of each sampled token
    columns: torch.Tensor  # [N] int64, place in its row whose output predicts it
    sequences: torch.Tensor  # [N] int64, which of the B sequences it belongs to
    targets: torch.Tensor  # [N] int64, the sampled ids
    old_logprobs: torch.Tensor  # [N] float32
    advantages: torch.Tensor  # [N] float32
    weights: torch.Tensor  # [N] float32, share of the global normaliser; 0 drops a token

    @property
    def num_tokens(self) -> int:
        """Tokens that a forward pass computes, without padding."""
        return int(self.lengths.sum()) if self.position_ids is None else self.input_ids.numel()

    def to(self, device: torch.device) -> MicroBatch:
        moved: dict[str, Any] = {
            name: None if value is None else value.to(device) for name, value in vars(self).items()
        }
        return MicroBatch(**moved)


Kind = TypeVar("Kind")
TOLERANCE = 0.03  # by which the busiest rank may exceed the mean
HALVES = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Tokens that a group's forward passes compute: on one rank, and in halves on two."""

    whole: float
    halves: tuple[float, float]

    def on(self, rank: int, owners: Sequence[int]) -> float:
        """What a rank computes where the halves have these owners."""
        if owners[0] == owners[1]:
            return self.whole if owners[0] == rank else 0.0
        return sum(self.halves[half] for half in HALVES if owners[half] == rank)


Plan = Mapping[tuple[int, int], Sequence[int]]  # (rank, group there): the owners of its halves


def halves(group: Sequence[Kind], ids: Callable[[Kind], list[int]]) -> list[list[Kind]]:
    """A group in two, such that those with most in common stay together."""
    ordered = sorted(group, key=ids)
    middle = (len(ordered) + 1) // 2
    return [ordered[:middle], ordered[middle:]]


def costs_of(groups: Sequence[Sequence[list[int]]], share_prefixes: bool) -> list[float]:
    """Three numbers a group of token sequences: the cost of the whole, and of each half."""
    parts = [part for group in groups for part in (group, *halves(group, lambda ids: ids))]
    if share_prefixes:
        return [float(num_distinct_tokens(part)) for part in parts]
    return [float(sum(map(len, part))) for part in parts]


def make_plan(costs: Sequence[Sequence[float]]) -> Plan:
    """The owners of all groups from every rank's `costs_of`; those that move have others than now.

    Again and again the rank with most gives the one with least what evens the two out best, until
    all are within TOLERANCE, or nothing helps.
    """
    found = {
        (rank, number): Cost(whole=whole, halves=(first, second))
        for rank, row in enumerate(costs)
        for number, (whole, first, second) in enumerate(
            zip(row[::3], row[1::3], row[2::3], strict=True)
        )
    }
    owners = {place: (place[0], place[0]) for place in found}
    loads = [sum(row[::3]) for row in costs]
    while max(loads) > (1 + TOLERANCE) * sum(loads) / len(loads):
        high, low = loads.index(max(loads)), loads.index(min(loads))
        best, change = loads[high], None
        for place, cost in found.items():
            now = owners[place]
            for moved in (HALVES, (0,), (1,)):
                if any(now[half] != high for half in moved):
                    continue
                then = (low if 0 in moved else now[0], low if 1 in moved else now[1])
                after = [loads[r] + cost.on(r, then) - cost.on(r, now) for r in (high, low)]
                if max(after) < best:
                    best, change = max(after), (place, then, after)
        if change is None:
            break
        place, owners[place], (loads[high], loads[low]) = change
    return owners


def rearranged(groups: Sequence[Sequence[Item]], plan: Plan, ranks: Ranks) -> list[list[Item]]:
    """This rank's groups after the plan's moves; every rank must call it."""
    staying: list[list[Item]] = []
    leaving: list[list[Item]] = [[] for _ in range(ranks.num_ranks)]
    for number, group in enumerate(groups):
        parts = list(
            zip(plan[ranks.rank, number], halves(group, lambda item: item[0].ids), strict=True)
        )
        staying.append([item for owner, part in parts if owner == ranks.rank for item in part])
        for owner, part in parts:
            if owner != ranks.rank:
                leaving[owner] += part
    if all(owner == rank for (rank, _), owners in plan.items() for owner in owners):
        return staying
    arrived = ranks.exchange([packed(items) for items in leaving])
    return [*staying, *(unpacked(message) for message in arrived)]


def packed(items: Sequence[Item]) -> bytes:
    """What an update needs of episodes, as typed arrays; nothing where there are none."""
    rows = [trajectory for trajectory, _, _ in items]
    lengths = [(len(row.prompt_ids), len(row.completion_ids)) for row in rows]
    file = io.BytesIO()
    np.savez(
        file,
        lengths=np.array(lengths, dtype=np.int64),
        numbers=np.array([numbers for _, *numbers in items], dtype=np.float64),
        ids=np.array([token for row in rows for token in row.ids], dtype=np.int32),
        loss_mask=np.array([value for row in rows for value in row.loss_mask], dtype=bool),
        logprobs=np.array([value for row in rows for value in row.logprobs], dtype=np.float32),
    )
    return file.getvalue() if items else b""


def unpacked(message: bytes) -> list[Item]:
    """Episodes from another rank; their tasks and messages have stayed there."""
    if not message:
        return []
    with np.load(io.BytesIO(message), allow_pickle=False) as file:
        columns = {name: file[name].tolist() for name in file.files}
    ids, mask, logprobs = (iter(columns[name]) for name in ("ids", "loss_mask", "logprobs"))
    items = []
    for (prompt, completion), (advantage, weight) in zip(
        columns["lengths"], columns["numbers"], strict=True
    ):
        trajectory = bare_trajectory(
            prompt_ids=list(islice(ids, prompt)),
            completion_ids=list(islice(ids, completion)),
            loss_mask=list(islice(mask, completion)),
            logprobs=list(islice(logprobs, completion)),
        )
        items.append((trajectory, advantage, weight))
    return items
