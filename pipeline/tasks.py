"""Tasks: what a customer wants, and where tasks come from (generators, JSON and JSONL files).

A task file holds one object per task, as JSON Lines or as one JSON array:
`{"id": "...", "prompt": [{"role": "system", "content": "..."}, ...], "payload": {...}}`, with
optional `domain`, `family` and `branch`. `payload` reaches the environment's `reset` as one JSON
string.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.config import UserError
from pipeline.draws import permutation

Message = dict[str, Any]
SPLITS = ("train", "validation", "test")
DIFFICULTIES = ("easy", "medium", "hard")
ROLES = ("system", "user", "assistant", "tool")


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


def load_tasks(path: Path, domain: str) -> list[Task]:
    """Read a JSON or JSONL file of one domain's tasks, all of them validated.

    UserError names the file, the line (or the place in the array), the task and what is wrong.
    """
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for where, row in _rows(path):
        task = _task(row, domain, where)
        if task.id in seen:
            raise UserError(
                f"{where}: task id {task.id!r} was already used at {seen[task.id]}; give every "
                "task its own id"
            )
        seen[task.id] = where
        tasks.append(task)
    if not tasks:
        raise UserError(
            f"{path}: holds no tasks; expected one JSON object per line or one JSON array"
        )
    return tasks


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: cannot be read as a UTF-8 task file ({error}); check the path"
        ) from None
    if path.suffix == ".json" or text.lstrip().startswith("["):
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}, line {error.lineno}: not JSON ({error.msg}); mend the file"
            ) from None
        if not isinstance(data, list):
            raise UserError(
                f"{path}: got a {type(data).__name__}; a .json task file is one array of tasks"
            )
        yield from ((f"{path}, task {i}", row) for i, row in enumerate(data, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):  # JSON may hold other line separators
        if not line.strip():
            continue
        try:
            yield f"{path}, line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}, line {number}: not JSON ({error.msg}); mend the line"
            ) from None


def _task(row: Any, domain: str, where: str) -> Task:
    def require(condition: bool, problem: str) -> None:
        if not condition:
            raise UserError(f"{where}: {problem}")

    require(isinstance(row, dict), f"got {type(row).__name__}; a task is one JSON object")
    known = {"domain", "id", "prompt", "payload", "family", "branch"}
    unknown = sorted(set(row) - known)
    require(not unknown, f"unknown key {unknown[:1]}; a task has {', '.join(sorted(known))}")
    identity = row.get("id")
    require(
        isinstance(identity, str) and bool(identity),
        f"id: got {identity!r}; give a non-empty string",
    )
    where = f"{where} (task {identity!r})"
    stated = row.get("domain", domain)
    require(
        stated == domain, f"domain: got {stated!r} in a file of {domain} tasks; move it or mend it"
    )
    prompt = row.get("prompt")
    require(isinstance(prompt, list) and bool(prompt), "prompt: give a non-empty list of messages")
    for message in prompt:
        fine = isinstance(message, dict) and isinstance(message.get("content"), str)
        require(
            fine and message.get("role") in ROLES,
            f"prompt: bad message {message!r}; give role and content",
        )
    require(prompt[-1]["role"] == "user", "prompt: the last message must be the user's request")
    payload = row.get("payload", {})
    require(
        isinstance(payload, dict | str), f"payload: got {type(payload).__name__}; give an object"
    )
    if isinstance(payload, str):
        try:
            json.loads(payload)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: payload: not JSON ({error.msg}); give an object") from None
    else:
        payload = json.dumps(payload, ensure_ascii=False, sort_keys=True)
    for name in ("family", "branch"):
        require(isinstance(row.get(name, ""), str), f"{name}: got {row.get(name)!r}; give a string")
    return Task(
        domain=domain,
        id=identity,
        prompt=tuple(prompt),
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
    order = permutation(len(source), *key, "pass", step // steps_per_pass)
    first = (step % steps_per_pass) * count
    return [source[index] for index in order[first : first + count]]


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
