"""Reward functions, called with the keyword arguments of TRL 1.16's `GRPOTrainer`.

TRL calls a function with the completions of a whole batch. Here a call has the completions of one
task, so that rewards do not depend on the number of ranks.
"""

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any

from pipeline.config.rules import name_of
from pipeline.config.settings import Config
from pipeline.data.tasks import Message, Task
from pipeline.environments.domains import imported
from pipeline.environments.faults import EnvironmentFault
from pipeline.environments.timeouts import Calls, Guard
from pipeline.environments.tools import MAX_REWARD
from pipeline.rollout.trajectory import StopReason, Trajectory

ATTEMPTS = 3  # maximum number of attempts at a call of an async function
BACKOFF_S = 1.0  # seconds before the second attempt; each further wait is twice as long
GIVEN = {  # arguments of every reward function; the names of columns are further arguments
    *("prompts", "completions", "completion_ids", "environments"),
    *("trainer_state", "log_extra", "log_metric"),
}


@dataclass(frozen=True)
class RewardFunction:
    """One function of `reward_funcs` with its weight. `name` is the function's name."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0

    @property
    def is_async(self) -> bool:
        call = getattr(self.function, "__call__", None)  # noqa: B004
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    def missing(self, columns: Iterable[str]) -> list[str]:
        """Return the required arguments that tasks with these columns do not give."""
        variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        needed = (p.name for p in self._parameters.values() if p.kind not in variable)
        known = GIVEN.union(columns)
        empty = inspect.Parameter.empty
        return [n for n in needed if self._parameters[n].default is empty and n not in known]

    def taken(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that the function takes: all if the function has `**kwargs`."""
        kinds = [p.kind for p in self._parameters.values()]
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        return {k: v for k, v in arguments.items() if takes_all or k in self._parameters}


@dataclass(frozen=True)
class Completion:
    """A finished episode as reward functions see the episode."""

    task: Task
    environment: Any
    trajectory: Trajectory

    @property
    def prompt(self) -> Any:
        """The messages of the prompt, or a text if the dataset's prompt is a text."""
        messages = self.trajectory.messages[: len(self.task.prompt)]
        return messages[-1]["content"] if self.task.is_text else messages

    @property
    def completion(self) -> Any:
        """The messages after the prompt, or the model's text if the dataset's prompt is a text."""
        messages = self.trajectory.messages[len(self.task.prompt) :]
        if self.task.is_text:
            return "".join(m["content"] for m in messages if m["role"] == "assistant")
        return list(map(_plain, messages))


def _plain(message: Message) -> Message:
    return {k: v for k, v in message.items() if k in ("role", "content", "tool_calls", "name")}


class RewardFunctions:
    """Calls the reward functions of a run, and adds rewards to trajectories.

    `num_calls` is the number of attempts at calls of async functions. `metrics` holds the values
    of `log_metric` by name; the caller empties `metrics`. `trainer_state` is an argument of the
    functions.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        seconds: float,
        max_steps: int = 0,
        on_call: Callable[[str], None] = lambda key: None,
    ) -> None:
        from transformers import TrainerState  # most runs need no TrainerState

        self.functions, self.trainer_state = functions, TrainerState(max_steps=max_steps)
        self.num_calls = 0
        self.metrics: dict[str, list[float]] = defaultdict(list)
        self._calls = Calls(seconds, on_call)

    def names(self, environments: Iterable[type[Any]]) -> list[str]:
        """Return the names of all sources of rewards, environments with `get_reward` first."""
        own = {kind.__name__: None for kind in environments if hasattr(kind, "get_reward")}
        return [*own, *(function.name for function in self.functions)]

    def __call__(self, completions: Sequence[Completion]) -> None:
        """Set `reward` and `rewards` of each trajectory; completions of a task are neighbours.

        A failing function ends the episodes of the task with an environment error.
        """
        self._calls.forget()
        waits: list[tuple[Callable[[], None], list[Completion]]] = []
        for key, of_task in groupby(completions, lambda completion: completion.task.key):
            group = list(of_task)
            for completion in group:
                _add_own_reward(completion)
            for function in self.functions:
                if not function.missing(group[0].task.row()):
                    work = partial(self._score, function, group)
                    begin = self._calls.beside if function.is_async else self._here
                    waits.append((begin(key, work), group))
        for wait, group in waits:
            try:
                wait()
            except EnvironmentFault as fault:
                for completion in group:
                    _fail(completion.trajectory, str(fault))
        for completion in completions:
            self._add_up(completion.trajectory)

    def _here(self, key: tuple[str, str], work: Any) -> Callable[[], None]:
        return partial(self._calls.here, key, work)

    def _add_up(self, trajectory: Trajectory) -> None:
        if trajectory.left_out:
            return
        weights = {function.name: function.weight for function in self.functions}
        known = {name: r for name, r in trajectory.rewards.items() if r is not None}
        if not known:
            _fail(trajectory, "every reward function returned None")
        trajectory.reward = math.fsum(weights.get(name, 1.0) * r for name, r in known.items())

    async def _score(
        self, function: RewardFunction, group: Sequence[Completion], guard: Guard
    ) -> None:
        """Call one function for the completions of one task, and store the rewards."""
        columns: dict[str, list[Any]] = {}
        metrics: list[tuple[str, float]] = []
        arguments = {
            **arguments_of(group),
            "trainer_state": self.trainer_state,
            "log_extra": lambda name, values: columns.update({str(name): list(values)}),
            "log_metric": lambda name, value: metrics.append((str(name), float(value))),
        }
        call = partial(function.function, **function.taken(arguments))
        for attempt in range(ATTEMPTS):
            columns.clear()
            metrics.clear()
            self.num_calls += function.is_async
            try:
                returned = await guard(function.name, call, function.function)
                break
            except EnvironmentFault:
                if attempt + 1 == ATTEMPTS or not function.is_async:
                    raise
                await asyncio.sleep(BACKOFF_S * 2**attempt)
        rewards = _rewards(function.name, returned, len(group))
        for number, (completion, reward) in enumerate(zip(group, rewards, strict=True)):
            completion.trajectory.rewards[function.name] = reward
            for name, values in columns.items():
                shown = str(values[number]) if number < len(values) else ""
                completion.trajectory.extra[name] = shown
        for name, value in metrics:
            if math.isfinite(value) and name not in ("kind", "stage", "step"):
                self.metrics[name].append(value)


def _add_own_reward(completion: Completion) -> None:
    trajectory, kind = completion.trajectory, type(completion.environment)
    own = {kind.__name__: trajectory.reward} if hasattr(kind, "get_reward") else {}
    trajectory.rewards = dict[str, float | None](own)


def _fail(trajectory: Trajectory, error: str) -> None:
    trajectory.stop_reason, trajectory.left_out = StopReason.ENVIRONMENT_ERROR, "reward"
    trajectory.error, trajectory.reward = error, 0.0


def arguments_of(group: Sequence[Completion]) -> dict[str, list[Any]]:
    """Return the lists that a reward function gets, each with one entry per completion."""
    rows = [completion.task.row() for completion in group]
    names = {name: None for row in rows for name in row if name != "prompt"}
    arguments: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
    arguments["prompts"] = [completion.prompt for completion in group]
    arguments["completions"] = [completion.completion for completion in group]
    arguments["completion_ids"] = [list(c.trajectory.completion_ids) for c in group]
    arguments["environments"] = [completion.environment for completion in group]
    return arguments


def _rewards(name: str, returned: Any, count: int) -> list[float | None]:
    """Return `count` rewards. None and NaN mean that the function does not apply.

    Raises EnvironmentFault if `returned` is not a list of `count` numbers.
    """
    if isinstance(returned, (str, bytes)) or not hasattr(returned, "__len__"):
        raise EnvironmentFault(f"{name} returned {type(returned).__name__}, not a list of numbers")
    if len(returned) != count:
        raise EnvironmentFault(f"{name} returned {len(returned)} rewards for {count} completions")
    rewards: list[float | None] = []
    for value in returned:
        try:
            reward = math.nan if value is None else float(value)
        except (TypeError, ValueError):
            raise EnvironmentFault(f"{name} returned {value!r:.80}, not a number") from None
        if abs(reward) > MAX_REWARD:
            raise EnvironmentFault(f"{name} returned {reward:g}, the limit is {MAX_REWARD:g}")
        rewards.append(None if math.isnan(reward) else reward)
    return rewards


def load_reward_functions(
    config: Config, on_call: Callable[[str], None] = lambda key: None
) -> RewardFunctions | None:
    """Import `data.reward_funcs`; returns None if there are none. Raises UserError."""
    data = config.data
    if not data.reward_funcs:
        return None
    weights = data.reward_weights or [1.0] * len(data.reward_funcs)
    functions = []
    for target, weight in zip(data.reward_funcs, weights, strict=True):
        _, function = imported(f"reward_funcs: got {target!r}", target)
        functions.append(RewardFunction(name_of(target), function, weight))
    return RewardFunctions(functions, config.rollout.call_timeout, config.grpo.max_steps, on_call)
