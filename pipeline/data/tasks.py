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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.data.rng import permutation
from pipeline.data.rows import Array, DatasetRows, Lines, Row, rows_of_file
from pipeline.errors import UserError
from pipeline.files.untrusted import MAX_LINE_BYTES, one_line, parse_json, shown

Message = dict[str, Any]
Visit = Callable[[Row], None] | None  # called with each row of a source after its check
SPLITS = ("train", "validation", "test")
DIFFICULTIES = ("easy", "medium", "hard")
ROLES = ("system", "user", "assistant", "tool")
MAX_CHARACTERS = 1_000_000  # of a conversation in a file; more would take long to tokenize
KEYS = frozenset(("domain", "id", "prompt", "payload", "family", "branch"))
Source: TypeAlias = "Sequence[Task]"  # in memory or on disk


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem, identified by (domain, id): ids may repeat between domains."""

    domain: str
    id: str
    prompt: tuple[Message, ...]  # system: the domain's policy; last: the customer's request
    payload: str  # JSON; only the environment reads it
    family: str = ""
    branch: str = ""  # the decision that the task needs; for reports only

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


class Tasks(Sequence[Task]):
    """Tasks that are made when they are asked for: `make` gives the one at an index."""

    def __init__(self, make: Callable[[int], Task], indices: Sequence[int]) -> None:
        self._make, self._indices = make, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        chosen = self._indices[index]
        return Tasks(self._make, chosen) if isinstance(index, slice) else self._make(chosen)


def load_tasks(path: Path, domain: str, visit: Visit = None) -> Tasks:
    """Read a JSON or JSONL file of one domain's tasks, all of them validated.

    UserError names the file, the line (or the number in the array), the task and what is wrong.
    """
    try:
        return tasks_of(rows_of_file(path), domain, visit)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: cannot be read as a UTF-8 task file ({one_line(str(error))}); check the path"
        ) from None


def tasks_of(rows: Array | Lines | DatasetRows, domain: str, visit: Visit = None) -> Tasks:
    """One domain's tasks from rows, all of them validated; `visit` is called with each row.

    UserError names the row, the task and what is wrong.
    """
    seen: dict[str, str] = {}
    for where, row in rows:
        _check(row, domain, where)
        if (first := seen.setdefault(row["id"], where)) != where:
            raise UserError(
                f"{where}: task id {shown(row['id'])} was already used at {first}; give every task "
                "its own id"
            )
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
    """What is wrong with a row, apart from its id and keys; empty if nothing is."""
    if (stated := row.get("domain", domain)) != domain:
        return f"domain: got {shown(stated)} in a file of {domain} tasks; move it or mend it"
    if problem := messages_problem(row.get("prompt")):
        return f"prompt: {problem}"
    if row["prompt"][-1]["role"] != "user":
        return "prompt: the last message must be the user's request"
    payload = row.get("payload", {})
    if isinstance(payload, str):
        if len(payload) > MAX_LINE_BYTES:
            return f"payload: more than {MAX_LINE_BYTES >> 20} MiB; shorten it"
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


def messages_problem(messages: Any) -> str:
    """What is wrong with a conversation from a file; empty if nothing is."""
    if not isinstance(messages, list) or not messages:
        return "give a non-empty list of messages with role and content"
    for message in messages:
        is_message = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not is_message or message.get("role") not in ROLES:
            return (
                f"bad message {shown(message)}; give role and content, the role one of "
                f"{', '.join(ROLES)}"
            )
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            return (
                f"bad tool calls {shown(calls)}; give a list of "
                '{"function": {"name": ..., "arguments": {...}}}'
            )
    if sum(len(message["content"]) for message in messages) > MAX_CHARACTERS:
        return f"more than {MAX_CHARACTERS} characters; shorten it"
    return ""


def _is_call(call: Any) -> bool:
    function: Any = call.get("function") if isinstance(call, dict) else None
    is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
    return is_named and isinstance(function.get("arguments", {}), dict)


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
            row = {**vars(task), "payload": json.loads(task.payload)}
            file.write(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n")


def tasks_for_step(source: Source, count: int, step: int, *key: int | str) -> list[Task]:
    """The `count` tasks of step `step` (from 0): consecutive cuts of shuffled passes over `source`.

    The same on every rank, and no task twice in a step. The tasks of a pass after its last whole
    step are left out; each pass has its own order, so every task comes up in time.
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


def count_by(tasks: Iterable[Task], attribute: str) -> dict[str, int]:
    """The number of tasks with each value of `attribute`, sorted by value."""
    return dict(sorted(Counter(getattr(task, attribute) for task in tasks).items()))
