"""Tasks, and the files of tasks.

A task file holds one object per task, as JSON Lines or as one JSON array:
`{"id": "...", "prompt": [{"role": "system", "content": "..."}, ...], "payload": {...}}`. `prompt`
may be the text of a request. Without an `id`, the row's number is the id. `family` and `branch`
group tasks in reports. The environment's `reset` gets `payload` as JSON text, and each other key as
a keyword argument. Reward functions get a list of values for each key. A dataset has one column for
each key. If rows have the key `environment`, a domain has only the rows that name the domain.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.common.errors import UserError
from pipeline.common.untrusted import one_line, shown
from pipeline.data.rng import permutation
from pipeline.data.rows import (
    KEYS,
    OPTIONAL,
    ROUTE,
    Rows,
    row_problem,
    rows_of_file,
    with_usual_messages,
)

Message = dict[str, Any]
HELD_OUT = "held-out tasks of "  # and a domain: their name among what a run is made of
SCENARIO = "scenario"  # a column, or an environment's attribute: a customer's instructions
MODULE = "module "  # and its name: a file with user code, in the same place
SPLITS = ("train", "validation", "test")
DIFFICULTIES = ("easy", "medium", "hard")
Source: TypeAlias = "Sequence[Task]"  # tasks in memory or on disk


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem for the policy. Ids are unique within a domain, so `key` is (domain, id)."""

    domain: str
    id: str
    prompt: tuple[Message, ...]  # first the rules for the assistant, last the customer's request
    payload: str  # JSON text for the environment
    family: str = ""
    branch: str = ""  # name of the task's correct decision, for reports and `even_branches`
    columns: str = "{}"  # JSON object of the row's further keys
    is_text: bool = False  # True if the row's prompt is a text, not a list of messages

    @property
    def key(self) -> tuple[str, str]:
        return self.domain, self.id

    def row(self) -> dict[str, Any]:
        """Return a copy of the task as keyword arguments for `Environment.reset`."""
        prompt = deepcopy(list(self.prompt))
        row = {"domain": self.domain, "id": self.id, "prompt": prompt, "payload": self.payload}
        return {**row, **json.loads(self.columns)}


class Tasks(Sequence[Task]):
    """The tasks in the rows with the given indices, read at each access.

    `task_of` makes a task of a row and its index. Iteration reads the source once, from row to row.
    """

    def __init__(
        self, rows: Rows, indices: Sequence[int], task_of: Callable[[Any, int], Task]
    ) -> None:
        self._rows = rows
        self._indices = indices
        self._task_of = task_of

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Task]:
        return map(self._task_of, self._rows.read(self._indices), self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Tasks(self._rows, self._indices[index], self._task_of)
        return next(iter(self.at([index])))

    def at(self, numbers: Sequence[int]) -> Tasks:
        """The tasks with these numbers, counted from 0 in this sequence."""
        chosen = array("Q", (self._indices[number] for number in numbers))
        return Tasks(self._rows, chosen, self._task_of)

    def where(self, task_id: str) -> str:
        """Return the place of the task with this id, such as `FILE, line 3`, or ""."""
        indices = (i for i, task in zip(self._indices, self, strict=True) if task.id == task_id)
        return next(map(self._rows.where, indices), "")


def load_tasks(path: Path, domain: str, has_columns: bool = False) -> Tasks:
    """Return the tasks of a domain's JSON or JSONL file. Raises UserError for an invalid task."""
    try:
        return tasks_of(rows_of_file(path), domain, has_columns)
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ValueError: the file is not UTF-8, or too large
        why = f"cannot be read as a UTF-8 task file ({one_line(str(error))})"
        raise UserError(f"{path}: {why}; check the path") from None


def tasks_of(rows: Rows, domain: str, has_columns: bool = False) -> Tasks:
    """Check all rows and return them as tasks. Raises UserError for a bad row.

    If `has_columns` is False, a key that no task has is an error.
    """
    numbers: dict[str, int] = {}  # of this domain's rows, by id
    names: dict[str, None] = {}  # columns of this domain's rows; a row without a column has None
    for number, written in enumerate(rows.read(range(len(rows)))):
        row = _usual(written)
        if isinstance(row, dict) and row.get(ROUTE, domain) != domain:
            continue
        full = _with_defaults(row, number) if has_columns else row
        if problem := row_problem(full, domain, has_columns):
            name = row.get("id") if isinstance(row, dict) else None
            task = f" (task {shown(name)})" if name and isinstance(name, str) else ""
            raise UserError(f"{rows.where(number)}{task}: {problem}")
        if (first := numbers.setdefault(full["id"], number)) != number:
            used = f"task id {shown(full['id'])} was already used at {rows.where(first)}"
            raise UserError(f"{rows.where(number)}: {used}; give every task its own id")
        names |= dict.fromkeys(full)
    if not numbers:
        of_domain = f" of {domain}" if has_columns else ""
        raise UserError(
            f"{rows.name}: holds no tasks{of_domain}; expected one JSON object per line"
        )

    further = sorted(names.keys() - KEYS)

    def task_of(written: Any, index: int) -> Task:
        given = _usual(written)
        is_text = isinstance(given.get("prompt", ""), str)
        row: dict[str, Any] = {"payload": {}, **_with_defaults(given, index), "domain": domain}
        if not isinstance(row["payload"], str):
            row["payload"] = json.dumps(row["payload"], ensure_ascii=False, sort_keys=True)
        columns = {**dict.fromkeys(further), **{key: row.pop(key) for key in row.keys() - KEYS}}
        row["prompt"] = tuple(row["prompt"])
        return Task(**row, columns=columns_text(columns), is_text=is_text)

    return Tasks(rows, array("Q", numbers.values()), task_of)


def columns_text(columns: Mapping[str, Any]) -> str:
    """Return columns except ROUTE as JSON text; dates and other objects become texts."""
    kept = {name: value for name, value in columns.items() if name != ROUTE}
    return json.dumps(kept, ensure_ascii=False, sort_keys=True, default=str)


def _usual(row: Any) -> Any:
    """Return a row without nulls that mean nothing, and with a prompt in the usual form."""
    if not isinstance(row, dict):
        return row
    kept = {k: v for k, v in row.items() if v is not None or k not in OPTIONAL}
    return {**kept, "prompt": with_usual_messages(row["prompt"])} if "prompt" in row else kept


def _with_defaults(row: Any, number: int) -> Any:
    """Return a row with a text as its id, and with a list of messages as its prompt."""
    if not isinstance(row, dict):
        return row
    prompt = row.get("prompt", "")
    name = row.get("id", number)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return {**row, "id": str(name) if type(name) is int else name, "prompt": prompt}


def tasks_for_step(source: Source, count: int, step: int, *key: int | str) -> list[Task]:
    """Return the `count` tasks of step `step` (from 0). Every rank returns the same tasks.

    Each pass over `source` has a random order, which is cut into steps of `count` tasks.
    """
    assert 0 < count <= len(source), f"a step of {count} tasks cannot come from {len(source)}"
    steps_per_pass = len(source) // count
    order = random_order(len(source), *key, "pass", step // steps_per_pass)
    first = (step % steps_per_pass) * count
    return [source[index] for index in order[first : first + count]]


@lru_cache(maxsize=16)  # all steps of a pass use the same permutation
def random_order(count: int, *key: int | str) -> array[int]:
    return array("Q", permutation(count, *key))
