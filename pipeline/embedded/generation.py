"""Generates tasks from a random seed, and lists a domain's words for the tiny model's tokenizer.

A family is a kind of request, such as a refund, and a branch is one case of the request, such as a
shipped order. Each family and each branch gets a fixed share of the tasks.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar

from pydantic import BaseModel

from pipeline.data.curriculum import quota
from pipeline.data.rng import generator, stream_key
from pipeline.data.tasks import DIFFICULTIES, SPLITS, Task
from pipeline.embedded.scripted import Branch, CaseEnvironment, Database, Family
from pipeline.environments.tools import tool_schemas

MAX_TASKS = 100_000  # largest number of tasks that one call of `generate` returns
IDS = tuple(f"K{number:02d}" for number in range(60))  # possible ids of a task's records

SAID = ("the one of ", "Done.", ".", "?", "ok", '{"ok": "', "yes")  # words that all domains use


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A task without id and prompt; `expected` is the database after a correct episode."""

    goal: dict[str, str]
    database: Database
    expected: Database
    facts: tuple[str, ...] = ()
    answer: dict[str, str] | None = None
    visible: dict[str, Any] = field(default_factory=dict)  # values that tools return to the expert


# Arguments: random generator, name of the family, name of the branch, branch. Result: a draft.
DraftTask = Callable[[Random, str, str, Branch], Draft]
Record = TypeVar("Record", bound=BaseModel)


def random_record(
    random: Random, kind: type[Record], options: Mapping[str, str], **given: str
) -> Record:
    """Return a record with the values of `given`; the other fields in `options` are random.

    `options` maps a field's name to the field's possible values, separated by spaces.
    """
    values = {name: random.choice(texts.split()) for name, texts in options.items()}
    return kind.model_validate({**values, **given})


def _split_of(text: str) -> str:
    """Return the split for the text of a task: train (70 % of all texts), validation or test."""
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
    """Return `n` tasks; fixed shares decide how many tasks belong to each family and branch.

    The same arguments give the same tasks in every process. Two tasks of different splits, even
    with different seeds, have different prompts or different results of tools. Raises ValueError if
    fewer than `n` different tasks exist.
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
        name = f"{split}-{difficulty}-{seed}-{len(tasks):05d}"
        task = Task(domain=domain, id=name, prompt=prompt, payload=payload)
        tasks.append(replace(task, family=family.name, branch=branch))
    return tasks


def shares_of(family: Family, difficulty: str) -> dict[str, float]:
    """Return each branch's share of the family's tasks at a difficulty; the shares sum to 1."""
    branches = family.branches.items()
    is_easy = difficulty == "easy"
    shares = {name: branch.easy if is_easy else branch.share for name, branch in branches}
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items() if share}


def _families_and_branches(
    families: Sequence[Family], n: int, difficulty: str
) -> Iterator[tuple[Family, str]]:
    per_family = -(-n // len(families))
    branches = [quota(shares_of(family, difficulty), per_family) for family in families]
    for number in range(n):
        row, column = divmod(number, len(families))
        yield families[column], branches[column][row]


def _request(
    family: Family, goal: dict[str, str], difficulty: str, random: Random
) -> tuple[str, dict[str, str]]:
    """Return the text of the customer's request, and the goal for the task's payload.

    At difficulty hard, the request names only the customer, so an expert must call a tool to find
    the record. The request gives the id of the task's record, except at the difficulty hard.
    """
    is_hard = difficulty == "hard"
    name = f"the one of {goal['customer']}" if is_hard else goal["record"]
    hidden = "record" if is_hard else "customer"
    phrasing = family.phrasings[0] if difficulty == "easy" else random.choice(family.phrasings)
    request = phrasing.format(**{**goal, "record": name})
    kept = {key: value for key, value in goal.items() if key != hidden}
    return request, {**kept, "family": family.name}


def _payload(draft: Draft) -> str:
    names = ("goal", "database", "expected", "facts", "answer")
    parts = {name: getattr(draft, name) for name in names}
    return json.dumps(parts, sort_keys=True, default=Database.model_dump)


def words_of(
    name: str,
    environment: type[CaseEnvironment],
    families: Collection[Family],
    said: Collection[str] = (),
    values: Collection[str] = (),
) -> Iterator[str]:
    """Yield a domain's words; each word becomes a token of the tiny model's tokenizer.

    `said` adds texts of messages to the words, and `values` adds values of records.
    """
    yield from (*IDS, *SAID, name, *said)
    database = environment.database_class.model_json_schema()
    objects = [database, *database["$defs"].values()]
    for schema in tool_schemas(environment):
        function = schema["function"]
        yield from (function["name"], f" {function['name']}")
        objects.append(function["parameters"])
    keys = set(values)  # some values are keys in a tool's JSON result, such as {"free": id}
    for properties in (schema["properties"] for schema in objects):
        keys |= set(properties).union(*(field.get("enum", ()) for field in properties.values()))
    yield from keys
    for key in keys:
        yield from (f'", "arguments": {{"{key}": "', f'{{"{key}": "', f'", "{key}": "')
    for family in families:
        yield family.name
        for phrasing in family.phrasings:
            yield from (piece for piece in re.split(r"\{\w+\}", phrasing) if piece)
