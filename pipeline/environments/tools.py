"""What an environment is, and how its tools are called.

The class convention is TRL's `environment_factory`: `reset(**row) -> str | None`, public methods
with type hints and Google docstrings are the tools, `get_reward() -> float`. Two data attributes
go beyond it: `user` answers messages that hold no tool call, and `done` ends the episode after a
tool call. `final_message` is set before `get_reward`, which may leave two more for people to read:
`reward_breakdown` (named parts) and `difference` (what: found, expected). This module imports
neither torch nor the model.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from pipeline.environments.timeouts import EnvironmentFault as EnvironmentFault
from pipeline.environments.timeouts import Outage as Outage
from pipeline.environments.timeouts import guarded as guarded
from pipeline.environments.timeouts import is_outage, only_faults, text_of, writable
from pipeline.environments.timeouts import settled as settled

Value = TypeVar("Value")
MAX_DIFFERENCES, MAX_SHOWN = 20, 200  # of an episode; characters of a value
MAX_REWARD = 1e30  # on either side of zero: float32 holds it, and float64 its square


class User(Protocol):
    """Who the policy talks to."""

    def reply(self, message: str) -> str | None:
        """Answer a message; None ends the conversation."""


class ToolError(Exception):
    """What a tool answers when it cannot do what was asked; the model sees the text."""


def _once_a_class(function: Callable[[type[Any]], Value]) -> Callable[[type[Any]], Value]:
    return cache(function)  # type: ignore[return-value]  # mypy holds classes for unhashable


@_once_a_class
def tool_methods(environment_class: type[Any]) -> dict[str, Callable[..., Any]]:
    """The tools of an environment: its class's public functions but `reset` and `get_reward`.

    The rule is TRL's. What an instance holds in its attributes is no tool, callable or not.
    """
    return {
        name: member
        for name, member in inspect.getmembers(environment_class, inspect.isfunction)
        if not name.startswith("_") and name not in ("reset", "get_reward")
    }


@_once_a_class
def tool_schemas(environment_class: type[Any]) -> list[dict[str, Any]]:
    """JSON schemas of the tools, in the form that chat templates take.

    They are made from signatures and docstrings.
    """
    from transformers.utils import get_json_schema

    return [get_json_schema(method) for method in tool_methods(environment_class).values()]


@cache
def _validators(
    function: Callable[..., Any],
) -> tuple[inspect.Signature, dict[str, TypeAdapter[Any]]]:
    hints = get_type_hints(function)
    signature = inspect.signature(function)
    return signature, {
        name: TypeAdapter(hints[name]) for name in signature.parameters if name in hints
    }


class ToolAnswer(NamedTuple):
    content: str  # what the model sees, JSON or text
    is_error: bool
    raised: bool  # by the tool's own code
    is_last: bool  # the tool has ended the episode


def call_tool(environment: Any, name: str, arguments: dict[str, Any]) -> str:
    """Call a tool with arguments that a model wrote; returns what the model sees, JSON or text.

    An unknown tool, a wrong argument or a tool that raises is answered with {"error": ...}; an
    Outage goes on, for the model has no part in it.
    """
    return answer_call(environment, name, arguments).content


def answer_call(environment: Any, name: str, arguments: dict[str, Any]) -> ToolAnswer:
    """The same, with what else it came to; a ToolError is no fault of the tool."""
    is_error = raised = False
    try:
        content = _call(environment, name, arguments)
    except BaseException as error:  # code that is not ours: the model sees what went wrong
        if is_outage(only_faults(error)):
            raise
        is_error, raised = True, not isinstance(error, ToolError)
        content = error_result(text_of(error) or type(error).__name__)
    return ToolAnswer(content, is_error, raised, bool(getattr(environment, "done", False)))


def _call(environment: Any, name: str, arguments: dict[str, Any]) -> str:
    tools = tool_methods(type(environment))
    if name not in tools:
        raise ToolError(f"unknown tool {name}")
    signature, validators = _validators(tools[name])
    try:
        signature.bind(environment, **arguments)
    except TypeError:
        wanted = ", ".join(parameter for parameter in signature.parameters if parameter != "self")
        raise ToolError(f"wrong arguments: {name} takes {wanted}") from None
    try:
        checked = {
            key: validators[key].validate_python(value) if key in validators else value
            for key, value in arguments.items()
        }
    except ValidationError as error:
        wrong = next(
            key
            for key in arguments
            if key in validators and not _valid(validators[key], arguments[key])
        )
        raise ToolError(f"wrong arguments: {wrong}: {error.errors()[0]['msg']}") from None
    result = settled(tools[name](environment, **checked))
    if not isinstance(result, str):
        result = json.dumps(result, ensure_ascii=False, default=str)
    return writable(result)


class Started(NamedTuple):
    environment: Any
    addition: str  # to the request
    beside: bool  # it works in the background


def started(environment_class: type[Any], row: Mapping[str, Any]) -> Started:
    """A new environment after its `reset`."""
    environment = environment_class()
    addition = settled(environment.reset(**row))
    if addition is not None and not isinstance(addition, str):
        raise TypeError(f"reset returned {type(addition).__name__}, not text or None")
    beside = may_wait(environment_class, environment)
    return Started(environment, writable(addition or ""), beside)


def reply_of(environment: Any, message: str) -> str | None:
    """What the user answers; None ends the conversation, and the message is the final one."""
    user = getattr(environment, "user", None)
    answer = settled(user.reply(message)) if user is not None else None
    if answer is None:
        return None
    if not isinstance(answer, str):
        raise TypeError(f"the user replied {type(answer).__name__}, not text or None")
    return writable(answer)


def reward_of(environment: Any) -> float:
    """The reward as a number; ValueError where it is not finite, or beyond MAX_REWARD."""
    found = settled(environment.get_reward())
    if isinstance(found, (str, bytes)):
        raise TypeError(f"get_reward returned {type(found).__name__}, not a number")
    reward = float(found)
    if not math.isfinite(reward):
        raise ValueError(f"get_reward returned {reward}, not a finite number")
    if abs(reward) > MAX_REWARD:
        raise ValueError(f"get_reward returned {reward:g}, the limit is {MAX_REWARD:g}")
    return reward


class Outcome(NamedTuple):
    reward: float
    reward_breakdown: dict[str, float]
    difference: dict[str, list[str]]


def outcome_of(environment: Any) -> Outcome:
    """The reward, and what the environment says of how it came about."""
    reward = reward_of(environment)
    parts = getattr(environment, "reward_breakdown", None)
    difference = getattr(environment, "difference", None)
    return Outcome(
        reward, *(_told(of) if isinstance(of, dict) else {} for of in (parts, difference))
    )


def _told(told: dict[Any, Any]) -> dict[str, Any]:
    """What can be written of it: numbers, and pairs as texts. An environment need not say it."""
    found: dict[str, Any] = {}
    for what, value in list(told.items())[:MAX_DIFFERENCES]:
        name = writable(str(what)[:MAX_SHOWN])
        if isinstance(value, list | tuple):
            found[name] = [writable(str(item)[:MAX_SHOWN]) for item in value[:2]]
        elif isinstance(value, int | float) and math.isfinite(value):
            found[name] = float(value)
    return found


def may_wait(environment_class: type[Any], environment: Any = None) -> bool:
    """Whether calls of an environment may wait for something outside, such as a network.

    They then run in threads beside other episodes. So it is where a tool, `reset`, `get_reward` or
    the user's `reply` is async, or where the class says `concurrent = True`.
    """
    user = getattr(environment, "user", None)
    return _has_async_calls(environment_class) or inspect.iscoroutinefunction(
        getattr(user, "reply", None)
    )


@_once_a_class
def _has_async_calls(environment_class: type[Any]) -> bool:
    methods: list[Any] = list(tool_methods(environment_class).values())
    methods += [getattr(environment_class, name, None) for name in ("reset", "get_reward")]
    return getattr(environment_class, "concurrent", False) is True or any(
        inspect.iscoroutinefunction(method) for method in methods
    )


def _valid(validator: TypeAdapter[Any], value: Any) -> bool:
    try:
        validator.validate_python(value)
    except ValidationError:
        return False
    return True


def error_result(text: str) -> str:
    return json.dumps({"error": text}, ensure_ascii=False)
