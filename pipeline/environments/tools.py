"""The interface of environments, and calls of their tools.

The class convention is TRL's `environment_factory`: `reset(**row) -> str | None`, public methods
with type hints and Google docstrings are the tools, `get_reward() -> float`. Two attributes are
added: `user` answers messages without a tool call, and `done` ends the episode after a tool call.
`final_message` is set before `get_reward`, which may set two attributes for the report:
`reward_breakdown` (named parts) and `difference` (name: found, expected).
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from pipeline.environments.event_loop import Steps
from pipeline.environments.faults import EnvironmentFault as EnvironmentFault
from pipeline.environments.faults import Outage as Outage
from pipeline.environments.timeouts import awaited, is_outage, only_faults, text_of, writable
from pipeline.environments.timeouts import run_steps as run_steps
from pipeline.environments.timeouts import settled as settled

Value = TypeVar("Value")
MAX_DIFFERENCES, MAX_SHOWN = 20, 200  # of an episode; characters of a value
MAX_REWARD = 1e30  # on either side of zero: float32 holds it, and float64 its square


class User(Protocol):
    """The partner of the policy in conversation."""

    def reply(self, message: str) -> str | None:
        """Answer a message; None ends the conversation."""


class ToolError(Exception):
    """A tool raises it if it cannot do the request; the model sees the text."""


def _once_a_class(function: Callable[[type[Any]], Value]) -> Callable[[type[Any]], Value]:
    return cache(function)  # type: ignore[return-value]  # mypy takes classes for unhashable


@_once_a_class
def tool_methods(environment_class: type[Any]) -> dict[str, Callable[..., Any]]:
    """The tools of an environment: public functions of its class but `reset` and `get_reward`.

    The rule is TRL's. Attributes of an instance are no tools.
    """
    return {
        name: member
        for name, member in inspect.getmembers(environment_class, inspect.isfunction)
        if not name.startswith("_") and name not in ("reset", "get_reward")
    }


@_once_a_class
def tool_schemas(environment_class: type[Any]) -> list[dict[str, Any]]:
    """JSON schemas of the tools for chat templates, from signatures and docstrings."""
    from transformers.utils import get_json_schema

    return [get_json_schema(method) for method in tool_methods(environment_class).values()]


@cache
def _validators(tool: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, TypeAdapter[Any]]]:
    signature, hints = inspect.signature(tool), get_type_hints(tool)
    return signature, {k: TypeAdapter(hints[k]) for k in signature.parameters if k in hints}


class ToolAnswer(NamedTuple):
    content: str  # what the model sees, JSON or text
    is_error: bool
    raised: bool  # an exception of the tool's code, other than ToolError
    is_last: bool  # the tool has ended the episode


def call_tool(environment: Any, name: str, arguments: dict[str, Any]) -> str:
    """Call a tool with arguments that a model wrote; returns the model's view of the result.

    An unknown tool, a wrong argument or a tool that raises gives {"error": ...}; an Outage is
    raised again.
    """
    return run_steps(answer_call(environment, name, arguments)).content


def answer_call(environment: Any, name: str, arguments: dict[str, Any]) -> Steps[ToolAnswer]:
    """`call_tool` with details of the result."""
    is_error = raised = False
    try:
        content = yield from _call(environment, name, arguments)
    except BaseException as error:
        if is_outage(only_faults(error)):
            raise
        is_error, raised = True, not isinstance(error, ToolError)
        content = error_result(text_of(error) or type(error).__name__)
    return ToolAnswer(content, is_error, raised, bool(getattr(environment, "done", False)))


def _call(environment: Any, name: str, arguments: dict[str, Any]) -> Steps[str]:
    tools = tool_methods(type(environment))
    if name not in tools:
        raise ToolError(f"unknown tool {name}")
    signature, validators = _validators(tools[name])
    try:
        signature.bind(environment, **arguments)
    except TypeError:
        names = ", ".join(parameter for parameter in signature.parameters if parameter != "self")
        raise ToolError(f"wrong arguments: {name} takes {names}") from None
    checked = dict(arguments)
    for key in (key for key in arguments if key in validators):
        try:
            checked[key] = validators[key].validate_python(arguments[key])
        except ValidationError as error:
            raise ToolError(f"wrong arguments: {key}: {error.errors()[0]['msg']}") from None
    result = yield from awaited(tools[name](environment, **checked))
    if not isinstance(result, str):
        result = json.dumps(result, ensure_ascii=False, default=str)
    return writable(result)


class Started(NamedTuple):
    environment: Any
    addition: str  # to the request
    beside: bool  # whether its calls are made in the background


def started(environment_class: type[Any], row: Mapping[str, Any]) -> Steps[Started]:
    """A new environment after its `reset`."""
    environment = environment_class()
    addition = yield from awaited(environment.reset(**row))
    if addition is not None and not isinstance(addition, str):
        raise TypeError(f"reset returned {type(addition).__name__}, not text or None")
    return Started(environment, writable(addition or ""), may_wait(environment_class, environment))


def reply_method(environment: Any) -> Any:
    """The user's method `reply`, found without running code of the environment, or None."""
    user = inspect.getattr_static(environment, "user", None)
    return inspect.getattr_static(user, "reply", None)


def reply_of(environment: Any, message: str) -> Steps[str | None]:
    """The user's answer; None ends the conversation with this message as the final one."""
    user = getattr(environment, "user", None)
    if user is None or (answer := (yield from awaited(user.reply(message)))) is None:
        return None
    if not isinstance(answer, str):
        raise TypeError(f"the user replied {type(answer).__name__}, not text or None")
    return writable(answer)


def reward_of(environment: Any) -> Steps[float]:
    """The reward as a number; ValueError if it is not finite, or beyond MAX_REWARD."""
    value = yield from awaited(environment.get_reward())
    if isinstance(value, (str, bytes)):
        raise TypeError(f"get_reward returned {type(value).__name__}, not a number")
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"get_reward returned {reward}, not a finite number")
    if abs(reward) > MAX_REWARD:
        raise ValueError(f"get_reward returned {reward:g}, the limit is {MAX_REWARD:g}")
    return reward


class Outcome(NamedTuple):
    reward: float
    reward_breakdown: dict[str, float]
    difference: dict[str, list[str]]


def outcome_of(environment: Any) -> Steps[Outcome]:
    """The reward and its explanation."""
    reward = yield from reward_of(environment)
    names = ("reward_breakdown", "difference")
    return Outcome(reward, *(_explanation(getattr(environment, name, None)) for name in names))


def _explanation(attribute: Any) -> dict[str, Any]:
    """The finite numbers, and the pairs as texts, of an attribute that should be a dict."""
    shown: dict[str, Any] = {}
    items = list(attribute.items()) if isinstance(attribute, dict) else []
    for key, value in items[:MAX_DIFFERENCES]:
        name = writable(str(key)[:MAX_SHOWN])
        if isinstance(value, list | tuple):
            shown[name] = [writable(str(item)[:MAX_SHOWN]) for item in value[:2]]
        elif isinstance(value, int | float) and math.isfinite(value):
            shown[name] = float(value)
    return shown


def may_wait(environment_class: type[Any], environment: Any = None) -> bool:
    """Whether calls of an environment run in the background, because they may wait for a network.

    True if a tool, `reset`, `get_reward` or the user's `reply` is async, or if the class says
    `concurrent = True`.
    """
    reply = getattr(getattr(environment, "user", None), "reply", None)
    return _has_async_calls(environment_class) or inspect.iscoroutinefunction(reply)


@_once_a_class
def _has_async_calls(environment_class: type[Any]) -> bool:
    methods: list[Any] = list(tool_methods(environment_class).values())
    methods += [getattr(environment_class, name, None) for name in ("reset", "get_reward")]
    return getattr(environment_class, "concurrent", False) is True or any(
        inspect.iscoroutinefunction(method) for method in methods
    )


def error_result(text: str) -> str:
    return json.dumps({"error": text}, ensure_ascii=False)
