"""What an environment is, and how its tools are called.

The class convention is TRL's `environment_factory`: `reset(**row) -> str | None`, public methods
with type hints and Google docstrings are the tools, `get_reward() -> float`. Two data attributes
go beyond it: `user` answers messages that hold no tool call, and `done` ends the episode after a
tool call. `final_message` is set before `get_reward`. This module imports neither torch nor the
model.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from functools import cache
from threading import Lock, Thread
from typing import Any, Protocol, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

Value = TypeVar("Value")


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


def call_tool(environment: Any, name: str, arguments: dict[str, Any]) -> str:
    """Call a tool with arguments that a model wrote; returns what the model sees, JSON or text.

    An unknown tool, a wrong argument or a tool that raises is answered with {"error": ...}.
    """
    tools = tool_methods(type(environment))
    if name not in tools:
        return error_result(f"unknown tool {name}")
    signature, validators = _validators(tools[name])
    try:
        signature.bind(environment, **arguments)
    except TypeError:
        wanted = ", ".join(parameter for parameter in signature.parameters if parameter != "self")
        return error_result(f"wrong arguments: {name} takes {wanted}")
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
        return error_result(f"wrong arguments: {wrong}: {error.errors()[0]['msg']}")
    try:
        result = settled(tools[name](environment, **checked))
        if not isinstance(result, str):
            result = json.dumps(result, ensure_ascii=False, default=str)
        return result.encode(errors="replace").decode()  # half a character breaks tokenizers
    except Exception as error:  # code that is not ours: the model sees what went wrong
        return error_result(str(error) or type(error).__name__)


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


def settled(value: Any) -> Any:
    """`value`, awaited if it is awaitable: tools, users and rewards may be sync or async.

    All are awaited in one event loop of a thread of its own, so that a client that an environment
    opens in one call serves in the next.
    """
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    with _one_loop:  # threads may ask at once
        loop = _event_loop()
    return asyncio.run_coroutine_threadsafe(wait(), loop).result()


_one_loop = Lock()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="event loop", daemon=True).start()
    return loop


def _valid(validator: TypeAdapter[Any], value: Any) -> bool:
    try:
        validator.validate_python(value)
    except ValidationError:
        return False
    return True


def error_result(text: str) -> str:
    return json.dumps({"error": text}, ensure_ascii=False)
