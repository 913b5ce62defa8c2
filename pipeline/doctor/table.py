"""The doctor's table: what a check is, what it finds, and how a row is printed."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.store import Board

Facts = dict[str, Any]

COLUMNS = (12, 8, 80)  # of name, status, and finding with what to try
FIXED_SPACE = "\N{NO-BREAK SPACE}"  # where a line must not end


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's table."""

    status: Literal["ok", "broken", "note"]
    text: str
    remedy: str = ""
    check: str = ""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank, as the checks see it."""

    config: Config
    accelerator: Accelerator
    ranks: Ranks
    board: Board
    deadline_s: float

    @property
    def device(self) -> torch.device:
        return torch.device(self.accelerator.device)


@dataclass(frozen=True)
class Check:
    """A row of the table: what to measure, how to judge it, what to try when it fails."""

    name: str
    measure: Callable[[Place], Any]
    judge: Callable[[list[Any]], Finding]
    remedy: str = ""  # missing: that of the links between the ranks
    talks: bool = False  # needs those links


def shown(finding: Finding) -> str:
    """A row without its name: the status, then the text and what to try, in their column."""
    first, second, width = COLUMNS
    lines = [finding.text] + ([f"try: {finding.remedy}"] if finding.remedy else [])
    wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    text = f"\n{' ' * (first + second)}".join(part for line in lines for part in wrap.wrap(line))
    return f"{finding.status:<{second}}{text}".replace(FIXED_SPACE, " ")


def named(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0-3, 6`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    several = len(spans) > 1 or any(len(span) > 1 for span in spans)
    texts = (f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)
    return f"{'ranks' if several else 'rank'} {', '.join(texts)}"


def who_has(values: Sequence[Any]) -> dict[Any, list[int]]:
    """The ranks of each value, given every rank's value."""
    ranks = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    return dict(ranks)
