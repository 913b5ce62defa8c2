"""Tasks from a seed, and the words of a domain, which are one token each in the tiny tokenizer.

Tasks have families and branches with exact shares; splits share no task.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from pipeline.data.curriculum import quota
from pipeline.data.rng import generator, stream_key
from pipeline.data.tasks import DIFFICULTIES, SPLITS, Task
from pipeline.embedded.scripted import Branch, CaseEnvironment, Database, Family
from pipeline.environments.tools import tool_schemas

MAX_TASKS = 100_000  # that one call generates; for more, use a task file
# The ids of all kinds of records, drawn anew for each task.
IDS = tuple(f"K{number:02d}" for number in range(60))

SAID = ("the one of ", "Done.", ".", "?", "ok", '{"ok": "', "yes")  # by all domains


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A task without its id: the customer's goal, the records, the expected end."""

    goal: dict[str, str]
    database: Database
    expected: Database
    facts: tuple[str, ...] = ()
    answer: dict[str, str] | None = None
    visible: dict[str, Any] = field(default_factory=dict)  # what the tools show to the expert


# (random, names of family and branch, the branch)
DraftTask = Callable[[Random, str, str, Branch], Draft]


def _split_of(text: str) -> str:
    """The split of a task's visible content: train for 70 %, each of the others for 15 %."""
    share = stream_key("split", text) / 2**64
    return "train" if share < 0.7 else "validation" if share < 0.85 else "test"


def generate(
    domain: str,
    policy: str,
    families: Sequence[Family],
    draft_task: DraftTask,
    seed: int,
    n: int,
    split: str,
    difficulty: str,
) -> list[Task]:
    """`n` tasks with exact shares of families and branches.

    The same arguments give the same tasks everywhere. Splits share no visible content, whatever
    the seeds. Raises ValueError if there are not so many different tasks.
    """
    if n > MAX_TASKS:
        raise ValueError(f"got {n}, but at most {MAX_TASKS} are generated; give a task file")
    if split not in SPLITS or difficulty not in DIFFICULTIES:
        raise ValueError(
            f"split {split!r}, difficulty {difficulty!r}; use one of {SPLITS}, {DIFFICULTIES}"
        )
    random = generator(seed, "tasks", domain, split, difficulty)
    tasks: list[Task] = []
    seen: set[str] = set()
    for family, branch in _families_and_branches(families, n, difficulty):
        for _ in range(1000):
            draft = draft_task(random, family.name, branch, family.branches[branch])
            request, goal = _request(family, draft.goal, difficulty, random)
            prompt = (
                {"role": "system", "content": f"{domain}\n\n{policy.strip()}"},
                {"role": "user", "content": request},
            )
            if _split_of(json.dumps([prompt, draft.visible], sort_keys=True)) != split:
                continue
            if (payload := _payload(replace(draft, goal=goal))) not in seen:
                break
        else:
            raise ValueError(f"{domain}: no {n} different {split} tasks exist; ask for fewer")
        seen.add(payload)
        tasks.append(
            Task(
                domain=domain,
                id=f"{split}-{difficulty}-{seed}-{len(tasks):05d}",
                prompt=prompt,
                payload=payload,
                family=family.name,
                branch=branch,
            )
        )
    return tasks


def shares_of(family: Family, difficulty: str) -> dict[str, float]:
    """The share of each branch that tasks of this difficulty have."""
    if difficulty == "easy":
        return {name: branch.easy for name, branch in family.branches.items() if branch.easy}
    return {name: branch.share for name, branch in family.branches.items()}


def _families_and_branches(
    families: Sequence[Family], n: int, difficulty: str
) -> Iterator[tuple[Family, str]]:
    branches = []
    for family in families:
        shares = shares_of(family, difficulty)
        total = sum(shares.values())
        shares = {branch: share / total for branch, share in shares.items()}
        branches.append(quota(shares, -(-n // len(families))))
    for number in range(n):
        row, column = divmod(number, len(families))
        yield families[column], branches[column][row]


def _request(
    family: Family, goal: dict[str, str], difficulty: str, random: Random
) -> tuple[str, dict[str, str]]:
    """The customer's request, and the goal as the expert gets it."""
    # A hard request names the customer: one more call finds the record.
    is_hard = difficulty == "hard"
    name = f"the one of {goal['customer']}" if is_hard else goal["record"]
    hidden = "record" if is_hard else "customer"
    phrasing = family.phrasings[0] if difficulty == "easy" else random.choice(family.phrasings)
    request = phrasing.format(**{**goal, "record": name})
    kept = {key: value for key, value in goal.items() if key != hidden}
    return request, {**kept, "family": family.name}


def _payload(draft: Draft) -> str:
    payload = {
        "goal": draft.goal,
        "database": draft.database.model_dump(),
        "expected": draft.expected.model_dump(),
        "facts": list(draft.facts),
        "answer": draft.answer,
    }
    return json.dumps(payload, sort_keys=True)


def words_of(
    name: str,
    environment: type[CaseEnvironment],
    families: Collection[Family],
    said: Collection[str] = (),
    values: Collection[str] = (),
) -> Iterator[str]:
    """Ids, names of tools and arguments, fields and values of records, phrasings.

    `said` are further texts of messages, `values` further values of records.
    """
    yield from (*IDS, *SAID, name, *said)
    database = environment.database_class.model_json_schema()
    objects = [database, *database["$defs"].values()]
    for schema in tool_schemas(environment):
        function = schema["function"]
        yield from (function["name"], f" {function['name']}")
        objects.append(function["parameters"])
    keys = set(values)  # some records have ids as keys: flights are {"free": ..., "full": ...}
    for properties in (schema["properties"] for schema in objects):
        keys |= set(properties).union(*(field.get("enum", ()) for field in properties.values()))
    yield from keys
    for key in keys:
        yield from (f'", "arguments": {{"{key}": "', f'{{"{key}": "', f'", "{key}": "')
    for family in families:
        yield family.name
        for phrasing in family.phrasings:
            yield from (piece for piece in re.split(r"\{\w+\}", phrasing) if piece)
