"""Reward functions are tried before a run."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from pipeline.common.errors import UserError
from pipeline.common.untrusted import one_line, shown
from pipeline.config.settings import Config
from pipeline.data.splits import same_by
from pipeline.data.tasks import Message, Task
from pipeline.environments.calls import guarded
from pipeline.environments.domains import Domain
from pipeline.environments.faults import EnvironmentFault
from pipeline.environments.task_sets import TaskSets
from pipeline.environments.tools import RandomState, started
from pipeline.rollout.rewards import (
    JUDGE,
    Completion,
    RewardFunction,
    RewardFunctions,
    columns_of,
)
from pipeline.rollout.trajectory import Trajectory

NUM_REWARDED = 8  # number of a domain's tasks with which each reward function is tried
OF_EVERY_TASK = {"domain", "id", "payload", "family", "branch"}


def request_key(messages: Iterable[Message]) -> int:
    """Return the hash of what the customer says, however it is written."""
    said = [message for message in messages if message["role"] != "system"]
    return same_by(())(Task(domain="", id="", prompt=tuple(said), payload="{}"))


def check_reward_functions(
    rewards: RewardFunctions | None,
    config: Config,
    domains: Mapping[str, Domain],
    tasks: Mapping[str, TaskSets],
) -> list[str]:
    """Try the reward functions; return notes on functions and on columns that are not used.

    Raises UserError if a function applies to no domain, if a domain has no reward, if held-out
    tasks lack a column that training tasks have and a function needs, if a function cannot ask the
    judge, or if a function fails on an empty answer. Async functions are not called.
    """
    functions = [] if rewards is None else list(rewards.functions)
    notes = [
        f"reward function {function.name} is async, so its first call is in the run"
        for function in functions
        if function.is_async
    ]
    judge = _judge_of(config, domains, functions)
    missing = dict[str, str]()  # name of a function -> what tasks lack
    unscored = list[str]()
    used = set[str]()
    for name, domain in domains.items() if functions else ():
        lacking = _lacking(functions, judge, domain, tasks[name].train[0])
        missing |= lacking
        notes += [f"reward function {f} is not called for {name}: {w}" for f, w in lacking.items()]
        applying = [function for function in functions if function.name not in lacking]
        summed = [f"{function.name} (weight {function.weight:g})" for function in applying]
        if domain.own_reward:
            is_loop = domain.loop is not None and not domain.has_get_reward
            own = "what {} returns, if it is a number" if is_loop else "get_reward of {}"
            summed.insert(0, f"{own.format(domain.own_reward)} (weight 1)")
        if not summed:
            unscored.append(name)
        elif len(summed) > 1:
            notes.append(f"{name}: the reward is the sum of {' and '.join(summed)}")
        _refuse_other_columns(applying, judge, tasks[name])
        for task in tasks[name].train[:NUM_REWARDED]:
            _try([f for f in applying if not f.is_async], domain, task, config)
        notes += _unread(applying, domain, tasks[name].train[0])
        used.update(function.name for function in applying)
    for name in missing.keys() - used:
        raise UserError(
            f"reward_funcs: {name} applies to no domain: {missing[name]}; rename an argument or a "
            "column"
        )
    if unscored:
        raise UserError(
            f"reward_funcs: no function applies to {unscored[0]}; give a function for its columns, "
            "or the environment a get_reward"
        )
    return notes


def _lacking(
    functions: Sequence[RewardFunction], judge: Sequence[str], domain: Domain, task: Task
) -> dict[str, str]:
    """Return what a domain's tasks lack, by the name of each function that needs it."""
    columns = columns_of(task)
    if judge and JUDGE in columns:
        raise UserError(
            f"{domain.name}: its tasks have a column {JUDGE}; this is the judge's name in reward "
            "functions; rename the column"
        )
    lacking = dict[str, str]()
    for function in functions:
        if missing := function.missing([*columns, *judge]):
            names = [f"{n} (which judge_url gives)" if n == JUDGE else n for n in missing]
            given = f"its tasks have no {', '.join(names)}, only {', '.join(columns)}"
            lacking[function.name] = given
    return lacking


def _refuse_other_columns(
    functions: Sequence[RewardFunction], judge: Sequence[str], sets: TaskSets
) -> None:
    """Raise UserError if held-out tasks lack a column that a function needs and finds in training.

    A column that a row of a file lacks is null there; training tasks may have that.
    """
    for task in sets.held_out:
        known = [k for k, value in columns_of(task).items() if value is not None]
        for function in functions:
            lacking = function.missing([*known, *judge])
            if lacking and not any(columns_of(t).get(lacking[0], "") is None for t in sets.train):
                raise UserError(
                    f"reward_funcs: {function.name} needs what its training tasks have, but the "
                    f"held-out tasks of {task.domain} have no {', '.join(lacking)} (task "
                    f"{shown(task.id)}); add it to them"
                )


def _unread(functions: Sequence[RewardFunction], domain: Domain, task: Task) -> list[str]:
    """Return notes on columns that neither the environment nor a function reads."""
    if not domain.is_single_turn or any(function.takes_all for function in functions):
        return []
    read = OF_EVERY_TASK.union(*(function.parameters for function in functions))
    unread = sorted(columns_of(task).keys() - read)
    return [f"{domain.name}: no one reads the column {column}" for column in unread]


def _judge_of(
    config: Config, domains: Mapping[str, Domain], functions: Sequence[RewardFunction]
) -> list[str]:
    """Return the name under which functions get the judge, or nothing if no function asks it."""
    url = config.judge.url
    asking = [f for f in functions if f.asks_judge]
    judged = [n for n, domain in domains.items() if domain.asks_judge]
    if url is None and judged:
        raise UserError(
            f"judge_url: the environment of {judged[0]} asks a judge (has_judge); give judge_url "
            "and judge_model"
        )
    if url is None:
        return []
    if not asking and not judged:
        raise UserError(
            f"judge_url: got {url}, and no reward function or environment asks a judge; give a "
            f"reward function the argument {JUDGE}, or take it out"
        )
    if waiting := [f.name for f in asking if not f.is_async]:
        raise UserError(
            f"reward_funcs: {waiting[0]} asks the judge, and is not async; write `async def`, and "
            f"await what {JUDGE} returns"
        )
    return [JUDGE] if asking else []


def _try(functions: Sequence[RewardFunction], domain: Domain, task: Task, config: Config) -> None:
    """Call reward functions with one and with two empty answers. Raises UserError if one fails."""
    seconds = config.rollout.call_timeout
    for count in (1, 2):
        answers = list[Completion]()
        for _ in range(count):
            messages = [*map(dict, task.prompt), {"role": "assistant", "content": ""}]
            trajectory = Trajectory(domain=task.domain, task_id=task.id, messages=messages)
            try:
                with RandomState(task):
                    made = guarded("reset", seconds, partial(started, domain.make, task.row()))
            except EnvironmentFault as fault:
                raise UserError(
                    f"{domain.name}: reset failed on task {shown(task.id)}: "
                    f"{one_line(str(fault))}; mend the environment or the task"
                ) from None
            answers.append(Completion(domain, task, made.environment, trajectory, returned=""))
        RewardFunctions(functions, seconds)(answers)
        if any(function.name not in trajectory.rewards for function in functions):
            raise UserError(
                f"reward_funcs: {count} empty answer(s) to task {shown(task.id)} of "
                f"{domain.name}: {one_line(trajectory.error)}; mend the function"
            )
