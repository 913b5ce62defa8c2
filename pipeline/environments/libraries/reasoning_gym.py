"""Datasets of reasoning-gym: generated questions, scored by the dataset that has made them.

Some of its scorers evaluate the answer as a formula; none of them may read an answer that it cannot
parse without an exception.
"""

import json
import os
import random
import re
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from typing import Any

from pipeline.common.console import installed
from pipeline.common.errors import UserError, nearest
from pipeline.data.rng import stream_key
from pipeline.data.tasks import Task
from pipeline.environments.domains import Domain
from pipeline.environments.experts import Agent

# How reasoning-gym's own prompts ask for an answer.
TAGGED = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
SPLITS = ("validation", "test", "test", *["train"] * 7)  # of the tenths of all questions
MAX_MISSES = 500  # questions in a row that are known or of another split: there are no more
# Datasets that draw from sets of texts, whose order is another one in each process.
ORDERED_BY_HASH = {
    *("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"),
    "word_ladder",
}
NUM_OPTIONS = 4  # answers of other questions that a demonstration may give


class Question:
    """An episode of one message: the answer to a question."""

    uses_random_state = False
    _make: Any = None  # returns the dataset of a seed
    pattern = TAGGED
    final_message = ""

    def reset(self, payload: str) -> None:
        self.made_of = json.loads(payload)

    def get_reward(self) -> float:
        found = self.pattern.findall(self.final_message)
        answer = found[-1] if found else self.final_message.strip()
        dataset = type(self)._make(self.made_of["seed"])
        entry = entry_of(dataset, self.made_of["index"])
        with suppress(Exception):  # of a scorer that cannot read the answer
            return float(dataset.score_answer(answer, entry))
        return 0.0


def entry_of(dataset: Any, index: int) -> dict[str, Any]:
    """Return a question of a dataset, equal in each process: list_functions draws from `random`."""
    state = random.getstate()
    random.seed(index)
    entry: dict[str, Any] = dataset[index]
    random.setstate(state)
    return entry


def tasks_of(dataset: Any, seed: int, n: int, split: str, family: str) -> list[Task]:
    """Return up to `n` tasks of a split: different questions, the text of each decides its split.

    They are the same in each call, and so is the beginning of more of them.
    """
    found = list[Task]()
    seen = set[bytes]()
    answers = list[str]()  # the latest ones
    last = -1
    for index in range(len(dataset)):
        if len(found) == n or index - last > MAX_MISSES:
            break
        entry = entry_of(dataset, index)
        digest = blake2b(entry["question"].encode(), digest_size=8).digest()
        if digest in seen:
            continue
        seen.add(digest)
        payload: dict[str, Any] = {"seed": seed, "index": index}
        if isinstance(answer := entry["answer"], str):
            payload["goal"] = {"answer": answer, "others": answers}
            answers = [*answers, answer][-NUM_OPTIONS:]
        if SPLITS[int.from_bytes(digest, "big") % len(SPLITS)] != split:
            continue
        last = index
        about = entry["metadata"]
        levels = about.get("difficulty")  # of gsm_symbolic a number
        name = {**(levels if isinstance(levels, dict) else {}), **about}.get(family, "")
        task = Task(
            domain="",
            id=f"{split}-{index}",
            prompt=({"role": "user", "content": entry["question"]},),
            payload=json.dumps(payload),
            family=str(name),
        )
        found.append(task)
    return found


def expert(agent: Agent, goal: dict[str, Any]) -> str:
    options = [goal["answer"], *(o for o in goal["others"] if o != goal["answer"])]
    return agent.decide(goal["answer"], options) if len(options) > 1 else goal["answer"]


def reasoning_gym(
    name: str,
    answer: re.Pattern[str] = TAGGED,
    family: str = "source_dataset",
    size: int = 20_000,
    **configuration: Any,
) -> Domain:
    """Return the domain of a dataset. Raises UserError for an unknown one.

    `answer` is a regular expression: its last match (or its group) in the message is the answer,
    else the whole message is. `family` is the key of the metadata that names a task's family.
    `size` is the number of questions that are generated at most, equal ones included. The dataset
    `composite` has `datasets`, a list of {name, weight, config}.
    """
    library = installed("reasoning_gym", "pip install reasoning-gym")
    known = library.factory.DATASETS
    if name not in known:
        near = nearest(name, known)
        raise UserError(f"no dataset {name}" + f"; did you mean {near}?" * bool(near))
    if "datasets" in configuration:
        of = library.composite.DatasetSpec
        specs = [of(**{"weight": 1.0, "config": {}} | spec) for spec in configuration["datasets"]]
        configuration = {**configuration, "datasets": specs}

    used = {name, *(spec.name for spec in configuration.get("datasets", ()))}
    hashed = ", ".join(sorted(used & ORDERED_BY_HASH))
    if hashed and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise UserError(f"{hashed} differs in each process; set PYTHONHASHSEED=0 in the shell")

    @cache
    def make(seed: int) -> Any:
        key = stream_key("reasoning_gym", name, seed) % 2**31
        return library.create_dataset(name, seed=key, size=size, **configuration)

    def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
        return tasks_of(make(seed), seed, n, split, family)

    make(0)  # so that a wrong configuration is told at once
    return Domain(
        name="",
        environment=type("Question", (Question,), {"_make": staticmethod(make), "pattern": answer}),
        generate_tasks=generate_tasks,
        expert=expert,
        about=lambda: {
            "environment": f"reasoning_gym:{name}",
            "version": version("reasoning-gym"),
        },
    )
