"""Trials of a domain's tasks before a run."""

import random
import re
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np

from pipeline.common.errors import UserError
from pipeline.common.untrusted import one_line, shown
from pipeline.data.tasks import Message, Task
from pipeline.environments.calls import awaited, guarded
from pipeline.environments.discovery import raw_call
from pipeline.environments.domains import Domain
from pipeline.environments.experts import goal_of
from pipeline.environments.faults import EnvironmentFault
from pipeline.environments.tools import (
    RandomState,
    Started,
    may_wait,
    reward_of,
    started,
    uses_random_state,
)

MAX_DEPTH = 3  # objects within objects whose attributes are compared
PLAIN = (bool, int, float, str, list, tuple, dict, set, type(None))
SESSION = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}")  # a UUID


def try_task(
    domain: Domain,
    task: Task,
    source: str,
    seconds: float,
    success: float | None = None,
    remedy: str = "",
) -> str:
    """Try `reset`, and `get_reward` right after `reset`; return the text of `reset`.

    Raises UserError if a call fails. Two calls of `reset` must start the same episode, and the
    episode must have a request. With a `success`, the domain's expert must also reach this reward
    if the task has a goal.
    """
    if domain.is_loop_alone:
        return ""  # it cannot be tried without a model
    where = f"{source}: task {shown(task.id)}"
    starts = list[Started]()
    is_solvable = success is not None and domain.expert is not None and goal_of(task) is not None
    kind = domain.environment
    is_keyed = uses_random_state(kind) and not may_wait(kind)  # as in a rollout
    try:
        for trial in range(2):
            with RandomState(task, *([] if is_keyed else [trial])):
                start = partial(started, domain.make, task.row())
                starts.append(guarded("reset", seconds, start))
            if trial == 0:  # a service may serve one episode at a time
                starts[0] = _closed(starts[0], seconds)
        if why := _solved(domain, task, seconds, success or 0.0)[1] if is_solvable else "":
            raise UserError(
                f"{where}: the actions that serve its goal do not lead to what it expects ({why}); "
                "mend goal, database or expected"
            )
        difference = _difference(*starts)  # `get_reward` may change the second
        with RandomState(task):
            score = partial(reward_of, starts[1].environment, messages=task.prompt)
            guarded("get_reward", seconds, score)
        _closed(starts[1], seconds)
    except EnvironmentFault as fault:
        failed = f"{fault.call} failed on task {shown(task.id)}: {one_line(str(fault))}"
        hint = remedy or "mend the environment or the task"
        raise UserError(f"{source}: {failed}; {hint}") from None
    if difference:
        generators = ("random, numpy.random or " if is_keyed else "") + "random.Random(id)"
        hint = f"let reset(self, id, **kwargs) draw from {generators}"
        if difference.startswith("self."):
            hint += ", or, if it may differ, set uses_random_state = False in the class"
        raise UserError(
            f"{where}: reset starts another episode each time ({difference}), but the episodes of "
            f"a group must have one task; {getattr(kind, 'same_start', hint)}"
        )
    if not (task.prompt[-1]["content"] or starts[0].addition or task.row().get("scenario")):
        names = ", ".join(
            name for name in task.row() if name not in ("domain", "payload", "prompt")
        )
        hint = f"{remedy or 'give a column prompt with its text'}, or let reset return the request"
        raise UserError(f"{where}: has no request, only {names}; {hint}")
    return starts[0].addition


def _closed(begun: Started, seconds: float) -> Started:
    """Close what an episode holds, if anything; return the episode with its plain data alone."""
    environment = begun.environment
    if not (raw_call(type(environment)) and hasattr(environment, "close")):
        return begun
    copy = object.__new__(type(environment))
    copy.__dict__ = deepcopy({k: v for k, v in vars(environment).items() if type(v) in PLAIN})
    guarded("close", seconds, lambda: awaited(environment.close()))
    return begun._replace(environment=copy)


def _difference(first: Started, second: Started) -> str:
    """Return how two episodes of a task differ, or "".

    Compared are plain data without UUIDs, arrays, generators of random numbers, and the attributes
    of objects whose class is from the package of the environment's class. A UUID names the session
    of an episode at a service, and is no part of a task.
    """
    if first.addition != second.addition:
        return "its text differs"
    if not uses_random_state(type(first.environment)):
        return ""
    package = type(first.environment).__module__.partition(".")[0]
    pairs = [getattr(one.environment, "__dict__", {}) for one in (first, second)]
    for name in sorted(pairs[0].keys() & pairs[1].keys()):
        if _data(pairs[0][name], package) != _data(pairs[1][name], package):
            return f"self.{name} differs"
    return ""


def _data(value: Any, package: str, depth: int = 0) -> str:
    """Return the data of an attribute as a text, or "" for an object of another package."""
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return repr(value.tolist())
    inside: Any = getattr(value, "__dict__", None)
    if inside is not None and type(value).__module__.partition(".")[0] == package:
        if depth == MAX_DEPTH or isinstance(value, type):
            return ""
        return repr({k: _data(v, package, depth + 1) for k, v in sorted(inside.items())})
    text = SESSION.sub("", repr(value)) if type(value) in PLAIN else ""
    return "" if " at 0x" in text else text


def try_expert(domain: Domain, task: Task, seconds: float, success: float) -> list[Message]:
    """Return the conversation of an expert that solves a task; raises UserError otherwise."""
    messages, why = _solved(domain, task, seconds, success)
    if why:
        raise UserError(
            f"tasks of {domain.name}: the expert does not solve task {shown(task.id)} ({why}); "
            "mend the expert or the task"
        )
    return messages


def _solved(
    domain: Domain, task: Task, seconds: float, success: float
) -> tuple[list[Message], str]:
    """Return the expert's conversation, and why the expert does not solve the task, or ""."""
    raised: list[str] = []
    try:
        messages, reward = domain.demonstrate(task, seconds, raised=raised)
    except EnvironmentFault as fault:
        return [], one_line("; ".join([*raised[:1], str(fault)]))
    if reward >= success:
        return messages, ""
    return messages, one_line("; ".join([f"reward {reward:g}", *raised[:1]]))
