"""Trials of a domain's tasks before a run."""

import re
from functools import partial

from pipeline.data.tasks import Message, Task
from pipeline.environments.domains import Domain
from pipeline.environments.experts import goal_of
from pipeline.environments.faults import EnvironmentFault
from pipeline.environments.random_state import RandomState
from pipeline.environments.timeouts import guarded
from pipeline.environments.tools import Started, reward_of, started
from pipeline.errors import UserError
from pipeline.files.untrusted import one_line, shown

PLAIN = (bool, int, float, str, list, tuple, dict, set, type(None))
SESSION = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}")  # a UUID


def try_task(
    domain: Domain,
    task: Task,
    source: str,
    seconds: float,
    success: float | None = None,
    remedy: str = "",
) -> None:
    """Try `reset`, and `get_reward` right after `reset`. Raises UserError.

    Two calls of `reset` must start the same episode, and the episode must have a request. With a
    `success`, the domain's expert must also reach this reward if the task has a goal.
    """
    where, made = f"{source}: task {shown(task.id)}", list[Started]()
    is_solvable = success is not None and domain.expert is not None and goal_of(task) is not None
    try:
        for _ in range(2):
            with RandomState(task):
                start = partial(started, domain.environment, task.row())
                made.append(guarded("reset", seconds, start))
        if why := _solved(domain, task, seconds, success or 0.0)[1] if is_solvable else "":
            raise UserError(
                f"{where}: the actions that serve its goal do not lead to what it expects ({why}); "
                "mend goal, database or expected"
            )
        is_same = made[0].addition == made[1].addition and _plain(made[0]) == _plain(made[1])
        with RandomState(task):
            guarded("get_reward", seconds, partial(reward_of, made[0].environment))
    except EnvironmentFault as fault:
        failed = f"{fault.call} failed on task {shown(task.id)}: {one_line(str(fault))}"
        hint = remedy or "mend the environment or the task"
        raise UserError(f"{source}: {failed}; {hint}") from None
    if not is_same:
        raise UserError(
            f"{where}: reset starts another episode each time, but the episodes of a group must "
            "have one task; let reset draw from `random` or `numpy.random`, or from the task"
        )
    if not task.prompt[-1]["content"] and not made[0].addition:
        names = ", ".join(name for name in task.row() if name not in ("domain", "payload"))
        hint = f"{remedy or 'give a column prompt'}, or let reset return the request"
        raise UserError(f"{where}: has no request, only {names}; {hint}")


def _plain(made: Started) -> dict[str, str]:
    """Return the attributes of an environment that are plain data, as texts without UUIDs.

    A UUID names the session of an episode at a service, and is no part of a task.
    """
    values = vars(made.environment) if hasattr(made.environment, "__dict__") else {}
    plain = {name: value for name, value in values.items() if type(value) in PLAIN}
    texts = {name: SESSION.sub("", repr(value)) for name, value in plain.items()}
    return {name: text for name, text in texts.items() if " at 0x" not in text}


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
