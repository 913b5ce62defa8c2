"""The doctor's table: what a check is, what it finds, and how a row is printed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks

Facts = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """The result of one check over all ranks."""

    status: Literal["ok", "broken", "note"]
    text: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank, as the checks see it."""

    config: Config
    accelerator: Accelerator
    ranks: Ranks

    @property
    def device(self) -> torch.device:
        return torch.device(self.accelerator.device)


@dataclass(frozen=True)
class Check:
    """One check: what each rank measures, and how the measurements of all ranks are judged."""

    name: str
    measure: Callable[[Place], Any]
    judge: Callable[[list[Any]], Finding]
    remedy: str = ""  # when it fails; missing: that of the links between the ranks
    needs_links: bool = False


def row(name: str, finding: Finding) -> str:
    """A row of the table; the remedy follows in a line of its own."""
    remedy = f"\n{'':20}try: {finding.remedy}" if finding.remedy else ""
    return f"{name:<12}{finding.status:<8}{finding.text}{remedy}"


def named(ranks: Iterable[int]) -> str:
    """Ranks in words: `rank 1`, `ranks 0, 1, 3`."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def ranks_by_value(values: Sequence[Any]) -> dict[Any, list[int]]:
    """The ranks that have each value, from the values of all ranks in order."""
    ranks = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    return dict(ranks)
