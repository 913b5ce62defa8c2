"""Draws held-out and validation tasks from a source, by a hash of each row.

Rows of a file often lie in blocks, so their places say nothing about them that a split may use. A
hash of what a row holds puts the rows in an order that is as good as random, that all ranks share,
and in which a row that is added or moved changes the place of no other row.
"""

import json
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from pipeline.data.tasks import SCENARIO, Message, Task

LEAST = 3  # different tasks: to train, to validate, to hold out
HELD_BACK_SHARE = 5  # at most a fifth of the rows is held out, and at most a fifth validates
UNSEEN = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")  # characters without width
Numbers = NDArray[np.int64]
Same = Callable[[Task], int]  # a hash that is equal for rows that are one task


@dataclass(frozen=True)
class Split:
    """The numbers of the rows that each part of a run uses, from 0, in the order of the source."""

    train: list[int]
    validation: list[int]
    held_out: list[int]
    num_left: int  # rows that could be trained on, beyond the asked number
    num_copies: int  # rows that equal one that is held out or validates; no part uses them


class Census:
    """Has of each row of a source its hashes, its family, and its prompt's characters.

    Rows of which `same` is equal are one task. Where an environment makes the tasks from ids, as a
    game does, all rows are alike: with fewer than LEAST contents, the ids tell tasks apart.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        same: Same,
        by_prompt: bool = False,
        held_out: Sequence[Task] = (),
    ) -> None:
        """No part uses rows that are equal to a task of `held_out`.

        With `by_prompt`, the prompt is all that a model sees of a task, and ids tell nothing.
        """
        self.lengths = array("Q")
        self._by_prompt = by_prompt
        self._held_out = held_out
        self._held_out_groups = np.array([*{*map(same, held_out)}], dtype=np.uint64)
        self._same = array("Q")
        self._contents = array("Q")  # decide the order of the rows
        self._ids = array("Q")  # their hashes
        self._families = array("Q")
        self._numbers: dict[str, int] = {}  # of families
        for task in tasks:
            self.lengths.append(num_characters(task.prompt))
            self._same.append(same(task))
            self._contents.append(self._content(task))
            self._ids.append(_hash(task.id))
            self._families.append(self._numbers.setdefault(task.family, len(self._numbers)))

    def _content(self, task: Task) -> int:
        columns = json.loads(task.columns)
        if self._by_prompt:
            return seen_of(task.prompt, columns)
        return content_of(task.prompt, task.payload, columns)

    @property
    def first_copy_of_held_out(self) -> int | None:
        """The number of the first row with the content of a task of `held_out`."""
        known = {*map(self._content, self._held_out)}
        return next((n for n, content in enumerate(self._contents) if content in known), None)

    @property
    def how_drawn(self) -> str:
        """How rows are drawn, in words."""
        has_families = len(self._numbers) > 1
        return "drawn by a hash of the task" + ", evenly over `family`" * has_families

    @cached_property
    def is_by_id(self) -> bool:
        """Whether the ids tell tasks apart, because the rows are alike."""
        return not self._by_prompt and len(set(self._same)) < LEAST

    @property
    def num_different(self) -> int:
        return len(np.unique(self._groups))

    @property
    def _groups(self) -> NDArray[np.uint64]:
        """A number for each row, equal for rows that are one task."""
        return np.frombuffer(self._ids if self.is_by_id else self._same, dtype=np.uint64)

    @property
    def _hashes(self) -> NDArray[np.uint64]:
        return np.frombuffer(self._ids if self.is_by_id else self._contents, dtype=np.uint64)

    def drawn(self, count: int) -> list[int]:
        """Draw up to `count` different rows, evenly over the families."""
        order, _, _ = self._order()
        return sorted(order[:count].tolist())

    def split(self, num_train: int | None, num_validation: int, num_held_out: int) -> Split:
        """Draw rows for each part. No task is in two of them, or twice where it is not trained.

        Families have equal numbers of held-out rows, as far as a fifth of a family allows it.
        `num_train` of None means all rows that are left.
        """
        order, places, sizes = self._order()
        caps = sizes // HELD_BACK_SHARE
        caps = caps if caps.any() else np.ones_like(caps)
        most = max(1, len(order) // HELD_BACK_SHARE)
        held_out = order[places < caps][: min(num_held_out, most)]
        rest = order[(places < 2 * caps) & ~np.isin(order, held_out)]
        validation = rest[: min(num_validation, most)]
        groups = self._groups
        drawn = np.concatenate([held_out, validation])
        free = np.flatnonzero(
            ~np.isin(groups, np.concatenate([groups[drawn], self._held_out_groups]))
        )
        by_hash = free[np.argsort(self._hashes[free], kind="stable")]
        train = by_hash[:num_train]
        return Split(
            train=sorted(train.tolist()),
            validation=sorted(validation.tolist()),
            held_out=sorted(held_out.tolist()),
            num_left=len(free) - len(train),
            num_copies=len(groups) - len(free) - len(drawn),
        )

    def _order(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return the first row of each task, its place in its family, and the family's size.

        The first rows of all families come first, then their second rows, and so on. In a family,
        tasks without copies come first. Families of fewer than HELD_BACK_SHARE rows count as one.
        """
        groups, rows, copies = np.unique(self._groups, return_index=True, return_counts=True)
        is_free = ~np.isin(groups, self._held_out_groups)
        rows, copies = rows[is_free], copies[is_free]
        hashes = self._hashes[rows]
        families = np.frombuffer(self._families, dtype=np.uint64)[rows].astype(np.int64) + 1
        families[np.bincount(families)[families] < HELD_BACK_SHARE] = 0
        by_family = np.lexsort((hashes, copies, families))
        sizes = np.bincount(families)
        begins = np.cumsum(sizes) - sizes
        places = np.empty_like(rows)
        places[by_family] = np.arange(len(rows)) - begins[families[by_family]]
        order = np.lexsort((hashes, places))
        return rows[order], places[order], sizes[families[order]]


def content_of(
    prompt: Iterable[Message], payload: str = "{}", columns: Mapping[str, Any] | None = None
) -> int:
    """Return 64 bits of the hash (BLAKE2b, RFC 7693) of what a task holds, without its names."""
    values = {name: value for name, value in (columns or {}).items() if value is not None}
    return _hash_of([[*prompt], json.loads(payload), values])


def _hash_of(values: Any) -> int:
    return _hash(json.dumps(values, sort_keys=True))


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def seen_of(prompt: Iterable[Message], columns: Mapping[str, Any]) -> int:
    """Return the hash of what a model sees of a task of one turn: prompt, and customer's words."""
    return content_of(prompt, columns={SCENARIO: columns.get(SCENARIO)})


def num_characters(prompt: Iterable[Message]) -> int:
    return sum(len(message["content"]) for message in prompt)


# Rows that are one task although they are written otherwise


def same_by(read: Collection[str] | None) -> Same:
    """Return a function that hashes what the model sees, and the values of the keys `read`.

    If `read` is None, all values count. Case, width, and spaces count nowhere.
    """

    def same(task: Task) -> int:
        values = {"payload": json.loads(task.payload), **json.loads(task.columns)}
        kept = {
            name: value
            for name, value in values.items()
            if value is not None and (read is None or name in read or name == SCENARIO)
        }
        return _hash_of(plain_words([[*map(_said, task.prompt)], kept]))

    return same


def _said(message: Message) -> list[Any]:
    calls = message.get("tool_calls") or []
    return [message["role"], message["content"], [call.get("function") for call in calls]]


@lru_cache(maxsize=4096)  # tasks have texts in common, such as the rules of a domain
def _plain(text: str) -> str:
    text = text if text.isascii() else UNSEEN.sub("", normalize("NFKC", text))
    return " ".join(text.casefold().split())


def plain_words(value: Any) -> Any:
    """Return a JSON value whose texts have neither case, nor width, nor spaces around words."""
    if isinstance(value, str):
        return _plain(value)
    if isinstance(value, dict):
        return {key: plain_words(of) for key, of in value.items()}
    return [*map(plain_words, value)] if isinstance(value, list) else value
