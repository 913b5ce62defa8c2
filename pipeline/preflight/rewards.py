"""Checks of the reward functions before a run."""

from collections.abc import Mapping, Sequence
from functools import partial

from pipeline.config.settings import Config
from pipeline.data.tasks import Task
from pipeline.environments.domains import Domain
from pipeline.environments.random_state import RandomState
from pipeline.environments.timeouts import guarded
from pipeline.environments.tools import started
from pipeline.errors import UserError
from pipeline.files.untrusted import one_line, shown
from pipeline.rollout.rewards import (
    Completion,
    RewardFunction,
    RewardFunctions,
    load_reward_functions,
)
from pipeline.rollout.trajectory import Trajectory

NUM_TRIED = 100  # number of a domain's tasks whose columns are compared with arguments


def check_reward_functions(
    config: Config, domains: Mapping[str, Domain], tasks: Mapping[str, Sequence[Task]]
) -> list[str]:
    """Try the reward functions; return notes on functions that do not apply to a domain.

    Raises UserError if a function applies to no domain, if a domain has no reward, or if a
    function fails on an empty answer. Async functions are not called.
    """
    rewards = load_reward_functions(config)
    functions = [] if rewards is None else list(rewards.functions)
    notes, unused = list[str](), {function.name for function in functions}
    for name, domain in domains.items():
        columns = {key for task in tasks[name][:NUM_TRIED] for key in task.row()}
        scored = hasattr(domain.environment, "get_reward")
        for function in functions:
            if missing := function.missing(columns):
                given = f"its tasks have no {', '.join(missing)}"
                notes.append(f"reward function {function.name} is not called for {name}: {given}")
                continue
            unused.discard(function.name)
            scored = True
            if not function.is_async:
                _try(function, domain, tasks[name][0], config.rollout.call_timeout)
        if functions and not scored:
            raise UserError(
                f"reward_funcs: no function applies to {name}, and its environment has no "
                f"get_reward; the columns of its tasks are {', '.join(sorted(columns))}"
            )
    if unused:
        why = next(note for note in notes if f" {min(unused)} " in note).partition(": ")[2]
        raise UserError(f"reward_funcs: {min(unused)} applies to no domain: {why}; rename them")
    return notes


def _try(function: RewardFunction, domain: Domain, task: Task, seconds: float) -> None:
    """Call a reward function with an empty answer. Raises UserError if the function fails."""
    messages = [*map(dict, task.prompt), {"role": "assistant", "content": ""}]
    trajectory = Trajectory(domain=task.domain, task_id=task.id, messages=messages)
    with RandomState(task):
        made = guarded("reset", seconds, partial(started, domain.environment, task.row()))
    RewardFunctions([function], seconds)([Completion(task, made.environment, trajectory)])
    if function.name not in trajectory.rewards:
        raise UserError(
            f"reward_funcs: {function.name} fails on an empty answer to task {shown(task.id)} of "
            f"{domain.name} ({one_line(trajectory.error)}); mend the function"
        )
