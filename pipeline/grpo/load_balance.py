"""Equal work for the ranks of an update: groups move from ranks with many tokens to ranks with few.

Which groups teach is known after sampling only, and they are spread unevenly. All ranks make the
same plan from what everyone's groups cost; what moves are whole groups, or halves, so that common
beginnings stay together. The gradient is a sum over all ranks: who adds which part does not matter.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from pipeline.distributed.ranks import Ranks
from pipeline.grpo.micro_batches import Item, bare_trajectory
from pipeline.grpo.prefix_tree import num_distinct_tokens

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
