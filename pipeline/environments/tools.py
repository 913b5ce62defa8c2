"""The interface of environments, and functions that call environments.

As TRL's `environment_factory` expects, an environment class has the methods `reset(**row) -> str |
None` and `get_reward() -> float`. All other public methods, but no static or class methods, are
tools, with type hints and Google docstrings. An environment may have a `user`, who answers the
model's messages that contain no tool call. A tool may set `done`, which ends the episode. The
rollout sets `final_message` and `stop_reason` (a value of `StopReason`) before the call of
`get_reward`. `get_reward` may set two dicts for reports: `reward_breakdown` (named parts of the
reward) and `difference` (name: [actual, expected value]).

A class with an attribute `schemas`, the JSON schemas of its tools, and a method `call(name,
arguments) -> (text, is_error)` gets every call as the model wrote it: unknown tools, missing
arguments and values of other types included. Its other methods are no tools. Before the call of
`get_reward`, `messages` is set to a copy of the conversation, prompt included.
"""

import dataclasses
import inspect
import json
import random
import re
import sys
from collections.abc import Awaitable, Callable, ItemsView, KeysView, Mapping, Sequence, ValuesView
from copy import deepcopy
from datetime import date, time
from enum import Enum
from itertools import islice
from numbers import Complex, Real
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
from pydantic import BaseModel, ValidationError

from pipeline.data.rng import stream_key
from pipeline.data.tasks import Message, Task
from pipeline.environments.calls import awaited, run_here
from pipeline.environments.discovery import (
    arguments_of,
    once_a_class,
    place_of,
    raw_call,
    tool_methods,
)
from pipeline.environments.faults import MAX_CHARACTERS, describe, is_outage, only_faults, text_of

MAX_DIFFERENCES = 20  # largest number of entries of `difference` or `reward_breakdown`
MAX_SHOWN = 200  # largest number of characters of a name or value in `difference`
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+", re.IGNORECASE)  # in Python's text of most objects
MAX_REWARD = 1e30  # largest absolute reward; the reward's square is finite in float64


class ToolError(Exception):
    """A tool raises a ToolError for an impossible request; the model sees the error's message."""


class ToolAnswer(NamedTuple):
    content: str  # the tool's result as the model sees it, JSON or text
    is_error: bool
    raised: str  # the exception of the tool in one line, or empty; a ToolError does not count
    is_last: bool  # True if the tool ended the episode


def call_tool(environment: Any, name: str, arguments: dict[str, Any]) -> str:
    """Call a tool with the model's arguments; return the text that the model sees.

    The text is {"error": ...} for an unknown tool, a wrong argument, or an exception of the tool.
    If a tool raises an Outage, `call_tool` raises the Outage, too.
    """
    answer: ToolAnswer = run_here(answer_call, environment, name, arguments)
    return answer.content


async def answer_call(environment: Any, name: str, arguments: dict[str, Any]) -> ToolAnswer:
    """Call a tool as `call_tool` does."""
    is_error = False
    raised = ""
    try:
        if raw := raw_call(type(environment)):
            text, failed = await awaited(raw(environment, name, arguments))
            content = writable(result_text(text, name, raw))
            is_error = bool(failed)
        else:
            content = await _call(environment, name, arguments)
    except ToolError as error:
        text = writable(str(error)[:MAX_CHARACTERS])
        is_error = True
        content = error_result(text or type(error).__name__)
    except BaseException as error:
        if is_outage(only_faults(error)):
            raise
        is_error = True
        raised = describe(error)
        content = error_result(text_of(error) or type(error).__name__)
    return ToolAnswer(content, is_error, raised, is_done(environment))


def is_done(environment: Any) -> bool:
    """Return whether a tool has ended the episode; a tool may be called `done`."""
    done = getattr(environment, "done", False)
    return bool(done) and not callable(done)


async def _call(environment: Any, name: str, arguments: dict[str, Any]) -> str:
    tools = tool_methods(type(environment))
    if name not in tools:
        raise ToolError(f"unknown tool {name}")
    signature, validators = arguments_of(tools[name])
    try:
        signature.bind(**arguments)
    except TypeError:
        names = ", ".join(signature.parameters)
        raise ToolError(f"wrong arguments: {name} takes {names}") from None
    checked = dict(arguments)
    for key in (key for key in arguments if key in validators):
        try:
            checked[key] = validators[key].validate_python(arguments[key])
        except ValidationError as error:
            raise ToolError(f"wrong arguments: {key}: {error.errors()[0]['msg']}") from None
    result = await awaited(tools[name](environment, **checked))
    return writable(result_text(result, name, tools[name]))


def result_text(result: Any, name: str, tool: Callable[..., Any]) -> str:
    """Return a tool's result as text; raises TypeError for an object that has no text of its own.

    A text stays as it is, and anything else becomes JSON. Dataclasses and pydantic models become
    objects, sets sorted arrays, dates ISO texts, enums their values, bytes UTF-8 text; arrays and
    tensors become numbers and lists. Other objects become their text.
    """
    if isinstance(result, str):
        return result
    try:
        return _json(result)
    except _NoText as error:
        hint = "return texts, numbers, lists, dicts or dataclasses"
        raise TypeError(f"{name}{place_of(tool)} returned {error}; {hint}") from None


class _NoText(TypeError):
    """A value in a tool's result that is no JSON and has no text of its own."""


def _json(value: Any) -> str:
    """Return JSON text, or its begin with more than MAX_CHARACTERS characters."""
    chunks = list[str]()
    size = 0
    # `json.dumps` would first read all of a dict whose `items` never end.
    for chunk in json.JSONEncoder(ensure_ascii=False, default=_plain).iterencode(value):
        chunks.append(chunk)
        if (size := size + len(chunk)) > MAX_CHARACTERS:
            break
    return "".join(chunks)


def _plain(value: Any) -> Any:
    """Return a value that JSON lacks as one that JSON has, or with values that have one."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, set | frozenset):
        return sorted(value, key=_order)
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            raise _NoText(f"{len(bytes(value))} bytes that are no UTF-8 text") from None
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence | KeysView | ValuesView | ItemsView):
        return list(value)
    if callable(to_list := getattr(value, "tolist", None)) and not isinstance(value, type):
        return to_list()  # an array or a number of numpy, or a tensor
    text = str(value)
    if _ADDRESS.search(text):
        raise _NoText(f"an object of {type(value).__module__}.{type(value).__qualname__}")
    return text


def _order(value: Any) -> tuple[bool, float, str]:
    """Return a key that sorts values of any types: numbers first, then all others by their JSON."""
    is_number = isinstance(value, int | float) and value == value
    return not is_number, value if is_number else 0, _json(value)


# Asks a language model: await judge(messages, seed=...) -> message.
Judge = Callable[..., Awaitable[Message]]


def give_judge(environment: Any, judge: Judge | None) -> None:
    """Give an environment with `has_judge` the judge, as its attribute `judge`."""
    if judge is not None and getattr(environment, "has_judge", False):
        environment.judge = judge


class Started(NamedTuple):
    environment: Any
    addition: str  # text from `reset` that is appended to the user's request
    in_background: bool  # True if the environment's calls run in the background


async def started(make: Callable[[], Any], row: Mapping[str, Any]) -> Started:
    """Make an environment and reset it."""
    environment = make()
    addition = await awaited(environment.reset(**reset_arguments(environment.reset, row)))
    if addition is not None and not isinstance(addition, str):
        raise TypeError(f"reset returned {type(addition).__name__}, not text or None")
    return Started(environment, writable(addition or ""), may_wait(type(environment), environment))


def reset_arguments(reset: Callable[..., Any], row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of `row` that `reset` takes: all if `reset` has `**kwargs`."""
    parameters = inspect.signature(reset).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return row
    names = [p.name for p in parameters]
    if missing := [p.name for p in parameters if p.default is p.empty and p.name not in row]:
        raise TypeError(f"reset needs {missing[0]}, and the task has {', '.join(row)}")
    return {name: row[name] for name in names if name in row}


def uses_random_state(environment_class: type[Any]) -> bool:
    """Return whether an environment may draw from the global generators.

    A class with the attribute `uses_random_state = False` saves the time of the change of state.
    """
    return bool(getattr(environment_class, "uses_random_state", True))


def method_of(environment: Any, *path: str) -> Any:
    """Look up a method, such as `environment.user.reply`, without running environment code."""
    for name in path:
        environment = inspect.getattr_static(environment, name, None)
    return environment


async def reward_of(
    environment: Any, stop_reason: str = "completed", messages: Sequence[Message] = ()
) -> float:
    """Return the reward of a conversation, or 0 if the environment has no `get_reward`.

    Raises ValueError for NaN and for absolute values above MAX_REWARD.
    """
    environment.stop_reason = stop_reason
    if raw_call(type(environment)):
        environment.messages = deepcopy(list(messages))
    if not hasattr(environment, "get_reward"):
        return 0.0
    value = await awaited(environment.get_reward())
    reward = as_number(value, "get_reward")
    if not abs(reward) <= MAX_REWARD:  # the condition is also True for NaN
        raise ValueError(f"get_reward returned {reward:g}, not a number up to {MAX_REWARD:g}")
    return reward


def as_number(value: Any, function: str) -> float:
    """Return a reward as a float. Raises TypeError for texts and complex numbers."""
    is_complex = isinstance(value, Complex) and not isinstance(value, Real)
    if is_complex or isinstance(value, (str, bytes, bytearray)):
        raise TypeError(f"{function} returned {type(value).__name__}, not a number")
    return float(value)


async def outcome_of(
    environment: Any, stop_reason: str = "completed", messages: Sequence[Message] = ()
) -> tuple[float, dict[str, float], dict[str, list[str]]]:
    """Return the reward, and the environment's `reward_breakdown` and `difference`."""
    reward = await reward_of(environment, stop_reason, messages)
    parts = explanation(getattr(environment, "reward_breakdown", None))
    return reward, parts, explanation(getattr(environment, "difference", None))


def explanation(attribute: Any) -> dict[str, Any]:
    """Return a dict's entries with finite numbers or pairs as values; a pair becomes two texts."""
    shown: dict[str, Any] = {}
    items = attribute.items() if isinstance(attribute, dict) else ()
    for key, value in islice(items, MAX_DIFFERENCES):
        name = writable(str(key)[:MAX_SHOWN])
        if isinstance(value, list | tuple):
            shown[name] = [writable(str(item)[:MAX_SHOWN]) for item in islice(value, 2)]
        elif isinstance(value, int | float) and abs(value) <= sys.float_info.max:
            shown[name] = float(value)
    return shown


def may_wait(environment_class: type[Any], environment: Any = None) -> bool:
    """Return whether an environment runs in the background, because a call may wait for a network.

    The result is True if a tool, `reset`, `get_reward` or the user's `reply` is async, or if the
    class attribute `concurrent` is True.
    """
    reply = getattr(getattr(environment, "user", None), "reply", None)
    return _has_async_calls(environment_class) or inspect.iscoroutinefunction(reply)


@once_a_class
def _has_async_calls(environment_class: type[Any]) -> bool:
    methods: list[Any] = list(tool_methods(environment_class).values())
    methods += [getattr(environment_class, name, None) for name in ("reset", "get_reward")]
    return getattr(environment_class, "concurrent", False) is True or any(
        inspect.iscoroutinefunction(method) for method in methods
    )


def writable(text: str) -> str:
    """Replace lone surrogates in a text, because tokenizers and files do not accept surrogates.

    Raises ValueError if the text is longer than MAX_CHARACTERS.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"returned {len(text)} characters, the limit is {MAX_CHARACTERS}")
    return text.encode(errors="replace").decode()


def error_result(text: str) -> str:
    return json.dumps({"error": text}, ensure_ascii=False)


class User(Protocol):
    """The simulated user, who talks with the trained model."""

    def reply(self, message: str) -> str | None:
        """Answer a message, or return None to end the conversation."""


async def reply_of(environment: Any, message: str) -> str | None:
    """Return the user's answer to `message`, or None if the conversation ends."""
    user = getattr(environment, "user", None)
    answer = None if user is None else await awaited(user.reply(message))
    if answer is None:
        return None
    if not isinstance(answer, str):
        raise TypeError(f"the user replied {type(answer).__name__}, not text or None")
    return writable(answer)


_numpy: Any = np.random  # checkers do not know the functions for the global bit generator


class RandomState:
    """The state of the global random number generators while one episode's environment runs.

    The task (with `further` numbers) alone decides the initial state, so all episodes of a task
    draw the same numbers, on any rank and after a resume. Inside the context the global generators
    have the episode's state; after the context the generators have their earlier state. Only the
    main thread may enter.
    """

    def __init__(self, task: Task, *further: int) -> None:
        self._key = stream_key("environment", *task.key, *further)
        self._state: Any = None  # state of `random`, or None before the first use
        self._bits = np.random.MT19937(self._key)

    def __enter__(self) -> None:
        self._outer = random.getstate(), _numpy.get_bit_generator()
        if self._state is None:
            random.seed(self._key)
        else:
            random.setstate(self._state)
        _numpy.set_bit_generator(self._bits)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._state = random.getstate()
        random.setstate(self._outer[0])
        _numpy.set_bit_generator(self._outer[1])
