"""Tasks from a seed: families, branches with exact shares, splits that share nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from pipeline.data.curriculum import quota
from pipeline.data.rng import generator, stream_key
from pipeline.data.tasks import DIFFICULTIES, SPLITS, Message, Task
from pipeline.embedded.scripted import Database

MAX_TASKS = 100_000  # of one call; a domain with more has a task file

# One pool for every kind of entity, drawn anew for each task.
IDS = tuple(f"K{number:02d}" for number in range(60))


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A task without its id: what the customer wants, the records, what must be true at the end."""

    goal: dict[str, str]
    database: Database
    expected: Database
    facts: tuple[str, ...] = ()
    answer: dict[str, str] | None = None
    # what the tools show to whoever follows the rules, for telling splits apart
    visible: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of request: its phrasings and the shares of its branches.

    Phrasings hold `{record}` and further slots of the goal.
    """

    name: str
    phrasings: tuple[str, ...]
    branches: dict[str, float]
    easy: dict[str, float]  # the shares at difficulty easy: mostly one lookup and one action
    draft: Callable[[Random, str], Draft]  # (random, branch)


def _owner(text: str) -> str:
    """The one split that owns a task's visible content, so that no two splits share any.

    Train owns 70 %, each of the others 15 %.
    """
    share = stream_key("split", text) / 2**64
    return "train" if share < 0.7 else "validation" if share < 0.85 else "test"


def generate(
    domain: str,
    policy: str,
    families: Sequence[Family],
    seed: int,
    n: int,
    split: str,
    difficulty: str,
) -> list[Task]:
    """`n` tasks with the shares of families and branches kept exactly.

    The same arguments give the same tasks everywhere. Splits share no visible content whatever the
    seeds. Raises ValueError when so many different tasks do not exist.
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
            prompt, draft = _draft(domain, policy, family, branch, difficulty, random)
            if _owner(json.dumps([prompt, draft.visible], sort_keys=True)) != split:
                continue
            if (payload := _payload(draft)) not in seen:
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


def _families_and_branches(
    families: Sequence[Family], n: int, difficulty: str
) -> Iterator[tuple[Family, str]]:
    counts = {family.name: len(range(i, n, len(families))) for i, family in enumerate(families)}
    orders = {}
    for family in families:
        shares = family.easy if difficulty == "easy" else family.branches
        total = sum(shares.values())
        shares = {branch: share / total for branch, share in shares.items()}
        orders[family.name] = quota(shares, counts[family.name])
    for number in range(n):
        family = families[number % len(families)]
        yield family, orders[family.name][number // len(families)]


def _draft(
    domain: str, policy: str, family: Family, branch: str, difficulty: str, random: Random
) -> tuple[tuple[Message, ...], Draft]:
    draft = family.draft(random, branch)
    goal = {**draft.goal, "family": family.name}
    named = goal["record"]
    # When hard, the customer gives a customer number; finding the record is one more call.
    if difficulty == "hard":
        named = f"the one of {goal['customer']}"
        del goal["record"]
    else:
        del goal["customer"]
    phrasing = family.phrasings[0] if difficulty == "easy" else random.choice(family.phrasings)
    request = phrasing.format(**{**goal, "record": named})
    prompt = (
        {"role": "system", "content": f"{domain}\n\n{policy.strip()}"},
        {"role": "user", "content": request},
    )
    return prompt, Draft(**{**vars(draft), "goal": goal})


def _payload(draft: Draft) -> str:
    payload = {
        "goal": draft.goal,
        "database": draft.database.model_dump(),
        "expected": draft.expected.model_dump(),
        "facts": list(draft.facts),
        "answer": draft.answer,
    }
    return json.dumps(payload, sort_keys=True)
