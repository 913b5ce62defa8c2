"""Reward functions, called with the keyword arguments of TRL 1.16's `GRPOTrainer`.

TRL calls a function with the completions of a whole batch. Here a call has the completions of one
task, so that rewards do not depend on the number of ranks.
"""

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, dropwhile, groupby, islice
from typing import Any

from pipeline.common.errors import UserError
from pipeline.common.untrusted import shown
from pipeline.config.rules import reward_names
from pipeline.config.settings import Config
from pipeline.data.tasks import Message, Task
from pipeline.environments.calls import Calls, awaited, is_async, run_coroutine
from pipeline.environments.domains import Domain, imported
from pipeline.environments.faults import EnvironmentFault, FaultLog, describe, only_faults
from pipeline.environments.tools import MAX_REWARD, RandomState, as_number, writable
from pipeline.rollout.trajectory import StopReason, Trajectory

MAX_LOGGED = 2000  # largest number of characters of a value of `log_extra`
NO_LISTS = (str, bytes, Mapping, Set)  # iterables without an order of rewards, or texts
ATTEMPTS = 3  # maximum number of attempts at a call, unless its service is busy
BACKOFF_S = 1.0  # seconds before the second attempt; each further wait is twice as long
MAX_BACKOFF_S = 20.0
JUDGE = "judge"  # argument of reward functions with which they ask the model at `judge_url`
GIVEN = {  # arguments of every reward function; the names of columns are further arguments
    *("prompts", "completions", "completion_ids", "environments"),
    *("trainer_state", "log_extra", "log_metric"),
}


@dataclass(frozen=True)
class RewardFunction:
    """One function of `reward_funcs` with its weight; `name` is the name in metrics."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0

    @property
    def is_async(self) -> bool:
        return is_async(self.function)

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    @property
    def takes_all(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    @property
    def asks_judge(self) -> bool:
        return JUDGE in self.parameters

    def missing(self, columns: Iterable[str]) -> list[str]:
        """Return the required arguments that tasks with these columns do not give."""
        needed = [p for p in self.parameters.values() if p.default is p.empty]
        variable = ("VAR_KEYWORD", "VAR_POSITIONAL")
        known = GIVEN.union(columns)
        return [p.name for p in needed if p.kind.name not in variable and p.name not in known]

    async def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function with the arguments that the function takes.

        An iterable that is no text and no mapping becomes a list, with at most one value too many.
        """
        taken = {k: v for k, v in arguments.items() if self.takes_all or k in self.parameters}
        returned = await awaited(self.function(**taken))
        is_listed = isinstance(returned, Iterable) and not isinstance(returned, NO_LISTS)
        most = len(arguments["completions"]) + 1
        return list(islice(returned, most)) if is_listed else returned


@dataclass(frozen=True)
class Completion:
    """A finished episode as reward functions see the episode.

    `returned` is what a user's loop has returned: a reward, a completion or None.
    """

    domain: Domain
    task: Task
    environment: Any
    trajectory: Trajectory
    returned: float | str | None = None
    begun: int = 0  # see RolloutRequest

    @property
    def prompt(self) -> Any:
        """The messages of the prompt, or a text if the dataset's prompt is a text."""
        is_loop = self.domain.loop is not None  # whose conversations may begin otherwise
        shown = self.task.prompt if is_loop else self.trajectory.messages
        messages = shown[: len(self.task.prompt)]
        return messages[-1]["content"] if self.task.is_text else list(map(_plain, messages))

    @property
    def completion(self) -> Any:
        """The messages after the prompt, or the model's text if the dataset's prompt is a text."""
        messages = self.trajectory.messages[len(self.task.prompt) :]
        if self.domain.loop is not None:
            messages = self._of_loop()
        if self.task.is_text:
            return "".join(m["content"] for m in messages if m["role"] == "assistant")
        return list(map(_plain, messages))

    @property
    def own_reward(self) -> float | None:
        """The reward of the domain itself; None if a loop has left the reward to functions."""
        if self.domain.loop is None or self.domain.has_get_reward:
            return self.trajectory.reward
        return None if isinstance(self.returned, str) else self.returned

    def _of_loop(self) -> list[Message]:
        """Return a loop's text as a message, or what follows the prompt in its last conversation.

        At least one message is returned, so that functions may read the last one.
        """
        silent = {"role": "assistant", "content": ""}
        if isinstance(self.returned, str):
            return [{**silent, "content": self.returned}]
        said = self.trajectory.last_conversation.messages
        return [*dropwhile(lambda m: m["role"] in ("system", "user"), said)] or [silent]


@dataclass(eq=False)
class _Call:
    """A call of a reward function for the completions of one task."""

    function: RewardFunction
    group: list[Completion]
    fault: EnvironmentFault | None = None  # of the latest attempt
    num_errors: int = 0  # failed attempts with no service busy

    @property
    def is_busy(self) -> bool:
        """Whether a service that the function needs is busy or away."""
        return self.fault is not None and self.fault.wait_s is not None

    @property
    def wait_s(self) -> float:
        """The seconds that the service asks to wait."""
        wait_s = None if self.fault is None else self.fault.wait_s
        return wait_s or 0.0

    def may_pass(self) -> bool:
        """Return whether a call that has failed may be repeated.

        While a service is busy, this is so. An error that is neither an outage nor a late call
        repeats itself, unless the function is async.
        """
        if self.fault is None or self.is_busy:
            return self.is_busy
        may_pass = self.function.is_async or self.fault.outage or self.fault.timed_out
        return may_pass and self.num_errors < ATTEMPTS

    def give_up(self, most_s: float) -> None:
        """End the episodes of the task; `most_s` are the seconds for further waits."""
        error = str(self.fault)
        if self.wait_s > most_s:
            error += f"; it asks to wait {self.wait_s:.0f} s, and less is left of call_timeout"
            error += f" ({most_s:.3g} s)"
        for trajectory in (completion.trajectory for completion in self.group):
            trajectory.stop_reason = StopReason.ENVIRONMENT_ERROR
            trajectory.left_out = "reward"
            trajectory.error = error


def _plain(message: Message) -> Message:
    kept = {k: v for k, v in message.items() if k in ("role", "content", "tool_calls", "name")}
    return deepcopy(kept)  # a reward function may change its arguments


class RewardFunctions:
    """Calls the reward functions of a run, and adds rewards to trajectories.

    `num_calls` is the number of attempts at calls of async functions. `metrics` holds the values
    of `log_metric` by name; the caller empties `metrics`. `trainer_state` is an argument of the
    functions, and so is `judge`, which a run with `judge_url` sets to `LanguageModel.ask`.
    `on_call` is that of Calls; a Rollout sets both.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        seconds: float,
        max_steps: int = 0,
    ) -> None:
        from transformers import TrainerState  # most runs need no TrainerState

        self.functions = functions
        self.trainer_state = TrainerState(max_steps=max_steps)
        self.num_calls = 0
        self.judge: Callable[..., Any] | None = None
        self.on_call: Callable[[str], None] = lambda key: None
        self.metrics: dict[str, list[float]] = defaultdict(list)
        self._calls = Calls(seconds, lambda key: self.on_call(key))

    def names(self, domains: Iterable[Domain]) -> list[str]:
        """Return the names of all sources of rewards, those of domains themselves first."""
        own = dict.fromkeys(domain.own_reward for domain in domains if domain.own_reward)
        return [*own, *(function.name for function in self.functions)]

    def __call__(self, completions: Sequence[Completion], faults: FaultLog | None = None) -> None:
        """Score completions as `score` does, from code that is not async."""
        run_coroutine(self.score(completions, faults))

    async def score(
        self, completions: Sequence[Completion], faults: FaultLog | None = None
    ) -> None:
        """Set `reward` and `rewards` of each trajectory; completions of a task are neighbours.

        A call that fails is repeated if it may pass. A call that has failed for good ends the
        episodes of its task with an environment error. `faults` prints which function waits.
        """
        self._calls.begin()
        calls = list[_Call]()
        for _, of_task in groupby(completions, lambda one: (one.task.key, one.begun)):
            group = list(of_task)
            domain = group[0].domain
            for completion in group:
                own = {domain.own_reward: completion.own_reward} if domain.own_reward else {}
                completion.trajectory.rewards = own
            columns = [*columns_of(group[0].task), *self._judge]
            calls += [_Call(f, group) for f in self.functions if not f.missing(columns)]
        await self._make(calls, faults or FaultLog())
        weights = {function.name: function.weight for function in self.functions}
        for trajectory in (completion.trajectory for completion in completions):
            known = {name: r for name, r in trajectory.rewards.items() if r is not None}
            if trajectory.left_out:
                known = {}
            elif not known:
                trajectory.left_out = "reward"
                trajectory.error = "every reward function returned None or NaN"
            trajectory.reward = math.fsum(weights.get(name, 1.0) * r for name, r in known.items())

    @property
    def _judge(self) -> dict[str, Any]:
        return {} if self.judge is None else {JUDGE: self.judge}

    async def _make(self, calls: list[_Call], faults: FaultLog) -> None:
        """Make calls, and repeat calls after a common wait; all waits take `seconds` at most.

        Calls that would wait longer fail; they wait, too, so that a rollout does not ask at once.
        """
        left_s = self._calls.seconds
        for attempt in count(1):
            await asyncio.gather(*map(self._attempt, calls))
            failed = [call for call in calls if call.fault is not None]
            again = [call for call in failed if left_s > 0 and call.may_pass()]
            calls = [call for call in again if call.wait_s <= left_s]
            for call in failed:
                if call not in calls:
                    call.give_up(left_s)
            if not again:
                return
            pause = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(attempt - 1, 9))
            pause = min(left_s, max(pause, *(call.wait_s for call in calls or again)))
            for call in (call for call in again if call.is_busy):
                line = f"{call.fault}; such calls wait {pause:.3g} s"
                faults.tell_once(line, f"reward function {call.function.name} waits")
            await self._calls.pause(pause)
            left_s -= pause

    async def _attempt(self, call: _Call) -> None:
        """Make a call once, an async one beside others; set the call's `fault`."""
        call.fault = None
        try:
            await self._score(call.function, call.group)
        except EnvironmentFault as fault:
            call.fault = fault
            call.num_errors += not call.is_busy

    async def _score(self, function: RewardFunction, group: Sequence[Completion]) -> None:
        """Call one function for the completions of one task, and store the rewards."""
        extra = dict[str, list[str]]()
        metrics = list[tuple[str, float]]()
        arguments = {
            **arguments_of(group),
            **self._judge,
            "trainer_state": self.trainer_state,
            "log_extra": partial(_log_extra, extra, len(group)),
            "log_metric": partial(_log_metric, metrics),
        }
        task = group[0].task
        made = partial(function, arguments)
        try:
            if function.is_async:
                self.num_calls += 1
                returned = await self._calls.beside(task.key, function.name, made, is_async=True)
            else:
                with RandomState(task):
                    returned = self._calls.here(task.key, function.name, made)
        except EnvironmentFault as fault:
            fault.args = (f"reward function {function.name}: {fault}",)
            raise
        rewards = _rewards(function.name, returned, len(group))
        for number, (completion, reward) in enumerate(zip(group, rewards, strict=True)):
            completion.trajectory.rewards[function.name] = reward
            for name, values in extra.items():
                completion.trajectory.extra[name] = "".join(values[number : number + 1])
        for name, value in metrics:
            self.metrics[name].append(value)


def _log_extra(extra: dict[str, list[str]], count: int, column: str, values: Iterable[Any]) -> None:
    texts = [writable(str(value)[:MAX_LOGGED]) for value in islice(values, count)]
    extra[writable(str(column))] = texts


def _log_metric(metrics: list[tuple[str, float]], name: str, value: float) -> None:
    try:
        value = float(value)
    except OverflowError:  # an integer that no float can hold
        return
    if abs(value) <= MAX_REWARD:  # of more, and of inf and NaN, there is no mean
        metrics.append((writable(str(name)), value))


def columns_of(task: Task) -> dict[str, Any]:
    """Return a task's columns by name, without the prompt."""
    row = {"family": task.family, "branch": task.branch, **task.row()}
    return {name: value for name, value in row.items() if name != "prompt"}


def arguments_of(group: Sequence[Completion]) -> dict[str, list[Any]]:
    """Return the lists that a reward function gets, each with one entry per completion."""
    rows = [columns_of(completion.task) for completion in group]
    return {name: [row[name] for row in rows] for name in rows[0]} | {
        "prompts": [completion.prompt for completion in group],
        "completions": [completion.completion for completion in group],
        "completion_ids": [
            [
                token
                for one in c.trajectory.last_conversation.sequences
                for token in one.completion_ids
            ]
            for c in group
        ],
        "environments": [completion.environment for completion in group],
    }


def _rewards(name: str, returned: Any, count: int) -> list[float | None]:
    """Return `count` rewards. None and NaN mean that the function does not apply.

    Raises EnvironmentFault if `returned` is not a list of `count` numbers.
    """
    where = f"reward function {name} returned"
    wanted = f"not a list of {count} numbers"
    if not isinstance(returned, list):
        raise EnvironmentFault(f"{where} {shown(returned)}, {wanted}")
    if len(returned) != count:
        more = " or more" if len(returned) > count else ""
        raise EnvironmentFault(f"{where} {len(returned)}{more} rewards, {wanted}")
    numbers = f"not numbers up to {MAX_REWARD:g}"
    why = ""
    try:
        rewards = [math.nan if v is None else as_number(v, name) for v in returned]
    except BaseException as error:  # `__float__` may be user code
        rewards = [math.inf]
        why = f" ({describe(only_faults(error))})"
    if any(abs(reward) > MAX_REWARD for reward in rewards):
        raise EnvironmentFault(f"{where} {shown(returned)}, {numbers}{why}")
    return [None if math.isnan(reward) else reward for reward in rewards]


def load_reward_functions(config: Config) -> RewardFunctions | None:
    """Import `data.reward_funcs`; returns None if there are none. Raises UserError."""
    data = config.data
    if not data.reward_funcs:
        return None
    weights = data.reward_weights or [1.0] * len(data.reward_funcs)
    names = reward_names(data.reward_funcs)
    functions = [
        RewardFunction(name, _imported(target), weight)
        for name, target, weight in zip(names, data.reward_funcs, weights, strict=True)
    ]
    return RewardFunctions(functions, config.rollout.call_timeout, config.grpo.max_steps)


def callables_of(rewards: RewardFunctions | None) -> list[Callable[..., Any]]:
    """Return the functions themselves, whose arguments say which columns they read."""
    return [function.function for function in rewards.functions] if rewards else []


def _imported(target: str) -> Any:
    where = f"reward_funcs: got {target!r}"
    _, function = imported(where, target)
    if isinstance(function, type) or not callable(function):
        raise UserError(f"{where}, which is {shown(function)}; name a function or callable object")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise UserError(f"{where}, whose arguments cannot be read; call it in a `def`") from None
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            raise UserError(f"{where}, whose {p.name} cannot be given by name; take out the `/`")
    return function
