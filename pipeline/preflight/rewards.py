"""Checks of the reward functions before a run."""

from collections.abc import Mapping, Sequence
from functools import partial

from pipeline.config.settings import SINGLE_TURN, Config
from pipeline.data.tasks import Task
from pipeline.environments.calls import guarded
from pipeline.environments.domains import Domain
from pipeline.environments.faults import EnvironmentFault
from pipeline.environments.own_loops import OWN_LOOP
from pipeline.environments.random_state import RandomState
from pipeline.environments.tools import run_here, started
from pipeline.errors import UserError
from pipeline.files.untrusted import one_line, shown
from pipeline.rollout.rewards import (
    JUDGE,
    Completion,
    RewardFunction,
    RewardFunctions,
    columns_of,
    load_reward_functions,
)
from pipeline.rollout.trajectory import Trajectory

NUM_TRIED = 8  # number of a domain's tasks with which each function is tried
OF_EVERY_TASK = {"domain", "id", "payload", "family", "branch"}


def check_reward_functions(
    config: Config,
    domains: Mapping[str, Domain],
    tasks: Mapping[str, Sequence[Task]],
    held_out: Mapping[str, Sequence[Task]],
) -> list[str]:
    """Try the reward functions; return notes on functions and on columns that are not used.

    Raises UserError if a function applies to no domain, if a domain has no reward, if held-out
    tasks lack a column that training tasks have and a function needs, if a function cannot ask the
    judge, or if a function fails on an empty answer. Async functions are not called.
    """
    rewards = load_reward_functions(config)
    functions = [] if rewards is None else list(rewards.functions)
    later = "is async, so its first call is in the run"
    notes = [f"reward function {f.name} {later}" for f in functions if f.is_async]
    judge = _judge_of(config, functions)
    missing = dict[str, str]()  # name of a function -> what tasks lack
    unscored = list[str]()
    used = set[str]()
    for name, domain in domains.items() if functions else ():
        if hasattr(domain.environment, OWN_LOOP):
            notes.append(
                f"{name}: its loop returns the reward; no reward function is called for it"
            )
            continue
        columns = columns_of(tasks[name][0])
        if judge and JUDGE in columns:
            hint = "this is the judge's name in reward functions; rename the column"
            raise UserError(f"{name}: its tasks have a column {JUDGE}; {hint}")
        applying = [function for function in functions if not function.missing([*columns, *judge])]
        for function in functions:
            if lacking := function.missing([*columns, *judge]):
                names = [f"{n} (which judge_url gives)" if n == JUDGE else n for n in lacking]
                given = f"its tasks have no {', '.join(names)}, only {', '.join(columns)}"
                missing[function.name] = given
                notes.append(f"reward function {function.name} is not called for {name}: {given}")
        if not applying and not hasattr(domain.environment, "get_reward"):
            unscored.append(name)
        for task in held_out[name]:
            known = [k for k, value in columns_of(task).items() if value is not None]
            for function in applying:
                # A column that a row of a file lacks is null there; training tasks may have that.
                lacking = function.missing([*known, *judge])
                if lacking and not any(
                    columns_of(t).get(lacking[0], "") is None for t in tasks[name]
                ):
                    where = f"held-out tasks of {name} have no {', '.join(lacking)}"
                    why = f"{function.name} needs what its training tasks have, but the {where}"
                    raise UserError(f"reward_funcs: {why} (task {shown(task.id)}); add it to them")
        for task in tasks[name][:NUM_TRIED]:
            _try([f for f in applying if not f.is_async], domain, task, config)
        is_single = config.data.factories[name].factory == SINGLE_TURN
        if is_single and not any(function.takes_all for function in applying):
            read = OF_EVERY_TASK.union(*(function.parameters for function in applying))
            notes += [f"{name}: no one reads the column {c}" for c in sorted(columns.keys() - read)]
        used.update(function.name for function in applying)
    for name in missing.keys() - used:
        why = f"{name} applies to no domain: {missing[name]}"
        raise UserError(f"reward_funcs: {why}; rename an argument or a column")
    if unscored:
        hint = "give a function for its columns, or the environment a get_reward"
        raise UserError(f"reward_funcs: no function applies to {unscored[0]}; {hint}")
    return notes


def _judge_of(config: Config, functions: Sequence[RewardFunction]) -> list[str]:
    """Return the name under which functions get the judge, or nothing if no function asks it."""
    url = config.data.judge_url
    asking = [f for f in functions if f.asks_judge]
    if url is None:
        return []
    if not asking and config.data.tau2_reward != "official":
        hint = f"give a reward function the argument {JUDGE}, or take it out"
        raise UserError(f"judge_url: got {url}, and no reward function asks a judge; {hint}")
    if waiting := [f.name for f in asking if not f.is_async]:
        hint = f"write `async def`, and await what {JUDGE} returns"
        raise UserError(f"reward_funcs: {waiting[0]} asks the judge, and is not async; {hint}")
    return [JUDGE] if asking else []


def _try(functions: Sequence[RewardFunction], domain: Domain, task: Task, config: Config) -> None:
    """Call reward functions with an empty answer. Raises UserError if a function fails."""
    seconds = config.rollout.call_timeout
    messages = [*map(dict, task.prompt), {"role": "assistant", "content": ""}]
    trajectory = Trajectory(domain=task.domain, task_id=task.id, messages=messages)
    try:
        with RandomState(task):
            start = partial(run_here, started, domain.environment, task.row())
            made = guarded("reset", seconds, start)
    except EnvironmentFault as fault:
        failed = f"reset failed on task {shown(task.id)}: {one_line(str(fault))}"
        raise UserError(f"{domain.name}: {failed}; mend the environment or the task") from None
    RewardFunctions(functions, seconds)([Completion(task, made.environment, trajectory)])
    if any(function.name not in trajectory.rewards for function in functions):
        raise UserError(
            f"reward_funcs: an empty answer to task {shown(task.id)} of {domain.name}: "
            f"{one_line(trajectory.error)}; mend the function"
        )
