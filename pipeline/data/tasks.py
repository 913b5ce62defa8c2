"""Tasks: what a customer wants, and where tasks come from (generators, task files, datasets).

A task file holds one object per task, as JSON Lines or as one JSON array:
`{"id": "...", "prompt": [{"role": "system", "content": "..."}, ...], "payload": {...}}`, with
optional `domain`, `family` and `branch`. `payload` reaches the environment's `reset` as one JSON
string. A dataset has the same columns. Rows of JSON Lines and datasets stay on disk: each is
checked once, and read again when its task is asked for.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, overload

from pipeline.data.rng import permutation
from pipeline.data.rows import Row, Rows, rows_of_file
from pipeline.errors import UserError
from pipeline.files.untrusted import MAX_LINE_BYTES, one_line, parse_json, shown

Message = dict[str, Any]
Visit = Callable[[Row], None] | None  # is shown each row of a source once it is checked
SPLITS = ("train", "validation", "test")
DIFFICULTIES = ("easy", "medium", "hard")
ROLES = ("system", "user", "assistant", "tool")
MAX_CHARACTERS = 1_000_000  # of a conversation in a file; more would take long to tokenize
KEYS = frozenset(("domain", "id", "prompt", "payload", "family", "branch"))


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem, identified by (domain, id): ids may repeat between domains."""

    domain: str
    id: str
    prompt: tuple[Message, ...]  # system: the domain's policy; last: the customer's request
    payload: str  # JSON; only the environment reads it
    family: str = ""
    branch: str = ""  # what the policy decides in this task; for reports only

    @property
    def key(self) -> tuple[str, str]:
        return self.domain, self.id

    def row(self) -> dict[str, Any]:
        """The keyword arguments of `Environment.reset`.

        They are fresh copies, so that no episode can alter a task.
        """
        return {
            "domain": self.domain,
            "id": self.id,
            "prompt": deepcopy(list(self.prompt)),
            "payload": self.payload,
        }


class Source(Protocol):
    """Where tasks come from.

    Sized and indexable, so that a large file need not be held as objects.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Task: ...


class Tasks(Sequence[Task]):
    """Tasks that are made when they are asked for: `make` gives the one at an index."""

    def __init__(self, make: Callable[[int], Task], indices: Sequence[int]) -> None:
        self._make = make
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> Tasks: ...

    def __getitem__(self, index: int | slice) -> Task | Tasks:
        if isinstance(index, slice):
            return Tasks(self._make, self._indices[index])
        return self._make(self._indices[index])


def load_tasks(path: Path, domain: str, visit: Visit = None) -> Tasks:
    """Read a JSON or JSONL file of one domain's tasks, all of them validated.

    UserError names the file, the line (or the place in the array), the task and what is wrong.
    """
    try:
        return tasks_of(rows_of_file(path), domain, visit)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: cannot be read as a UTF-8 task file ({one_line(str(error))}); check the path"
        ) from None


def tasks_of(rows: Rows, domain: str, visit: Visit = None) -> Tasks:
    """One domain's tasks from rows, all of them validated; `visit` is called with each.

    UserError names the place of a row, the task and what is wrong.
    """
    seen: dict[str, str] = {}
    for where, row in rows:
        _check(row, domain, where)
        identity = row["id"]
        if identity in seen:
            raise UserError(
                f"{where}: task id {shown(identity)} was already used at {seen[identity]}; give "
                "every task its own id"
            )
        seen[identity] = where
        if visit is not None:
            visit(row)
    if not seen:
        raise UserError(
            f"{rows.name}: holds no tasks; expected one JSON object per line or one JSON array"
        )
    return Tasks(lambda index: _task(rows[index], domain), range(len(seen)))


def _check(row: Any, domain: str, where: str) -> None:
    if not isinstance(row, dict):
        problem = f"got {type(row).__name__}; a task is one JSON object"
    elif unknown := sorted(row.keys() - KEYS):
        problem = f"unknown key [{shown(unknown[0])}]; a task has {', '.join(sorted(KEYS))}"
    elif not isinstance(row.get("id"), str) or not row["id"]:
        problem = f"id: got {shown(row.get('id'))}; give a non-empty string"
    elif problem := _problem(row, domain):
        where = f"{where} (task {shown(row['id'])})"
    else:
        return
    raise UserError(f"{where}: {problem}")


def _problem(row: Row, domain: str) -> str:
    """What is wrong with a row beside its id and its keys; empty if nothing is."""
    if (stated := row.get("domain", domain)) != domain:
        return f"domain: got {shown(stated)} in a file of {domain} tasks; move it or mend it"
    prompt = row.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        return "prompt: give a non-empty list of messages"
    size = 0
    for message in prompt:
        fine = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not fine or message.get("role") not in ROLES:
            return f"prompt: bad message {shown(message)}; give role and content"
        if "tool_calls" in message and (problem := call_problem(message)):
            return f"prompt: {problem}"
        size += len(message["content"])
    if size > MAX_CHARACTERS:
        return f"prompt: more than {MAX_CHARACTERS} characters; shorten it"
    if prompt[-1]["role"] != "user":
        return "prompt: the last message must be the user's request"
    payload = row.get("payload", {})
    if not isinstance(payload, dict | str):
        return f"payload: got {type(payload).__name__}; give an object"
    if isinstance(payload, str) and len(payload) > MAX_LINE_BYTES:
        return f"payload: more than {MAX_LINE_BYTES >> 20} MiB; shorten it"
    if isinstance(payload, str):
        try:
            payload = parse_json(payload)
        except ValueError as error:
            return f"payload: not JSON ({getattr(error, 'msg', error)}); give an object"
        if not isinstance(payload, dict):
            return f"payload: got {shown(payload)}; give an object"
    for name in ("family", "branch"):
        if not isinstance(row.get(name, ""), str):
            return f"{name}: got {shown(row.get(name))}; give a string"
    return ""


def call_problem(message: Message) -> str:
    """What is wrong with the tool calls of a message from a file; empty if nothing is."""
    calls = message.get("tool_calls") or []
    for call in calls if isinstance(calls, list) else [calls]:
        held = call.get("function") if isinstance(call, dict) else None
        function = held if isinstance(held, dict) else {}
        named = isinstance(function.get("name"), str)
        if not named or not isinstance(function.get("arguments", {}), dict):
            return (
                f"bad tool calls {shown(calls)}; give a list of "
                '{"function": {"name": ..., "arguments": {...}}}'
            )
    return ""


def _task(row: Row, domain: str) -> Task:
    payload = row.get("payload", {})
    if not isinstance(payload, str):
        payload = json.dumps(payload, ensure_ascii=False, sort_keys=True)
    return Task(
        domain=domain,
        id=row["id"],
        prompt=tuple(row["prompt"]),
        payload=payload,
        family=row.get("family", ""),
        branch=row.get("branch", ""),
    )


def save_tasks(tasks: Iterable[Task], path: Path) -> None:
    """Write tasks as JSON Lines that `load_tasks` reads back."""
    with path.open("w", encoding="utf-8") as file:
        for task in tasks:
            row = {
                **task.row(),
                "payload": json.loads(task.payload),
                "family": task.family,
                "branch": task.branch,
            }
            file.write(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n")


def tasks_for_step(source: Source, count: int, step: int, *key: int | str) -> list[Task]:
    """The `count` tasks of step `step` (from 0): consecutive cuts of shuffled passes over `source`.

    The same on every rank, and no task twice in a step. What a pass holds beyond its last whole
    step is left out; each pass has its own order, so every task comes up in time.
    """
    assert 0 < count <= len(source), f"a step of {count} tasks cannot come from {len(source)}"
    steps_per_pass = len(source) // count
    order = _order(len(source), *key, "pass", step // steps_per_pass)
    first = (step % steps_per_pass) * count
    return [source[index] for index in order[first : first + count]]


@lru_cache(maxsize=16)  # a pass of each domain, and more domains than a run has
def _order(count: int, *key: int | str) -> array[int]:
    """A permutation, kept: only the first step of a pass takes time that grows with `count`."""
    return array("Q", permutation(count, *key))


def shard_tasks(count: int, rank: int, num_ranks: int) -> range:
    """The indices of the groups that `rank` plays: every num_ranks-th one.

    Shares differ by at most one. Interleaved, so that the domains of a step, listed one after
    another, spread over the ranks.
    """
    assert 0 <= rank < num_ranks
    return range(rank, count, num_ranks)


def count_by(tasks: Sequence[Task], attribute: str) -> dict[str, int]:
    """How many tasks have each value of `attribute`, sorted by value."""
    counts: dict[str, int] = {}
    for task in tasks:
        value = getattr(task, attribute)
        counts[value] = counts.get(value, 0) + 1
    return dict(sorted(counts.items()))
