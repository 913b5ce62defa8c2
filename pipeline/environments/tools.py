"""The interface of environments, and functions that call environments.

As TRL's `environment_factory` expects, an environment class has the methods `reset(**row) -> str |
None` and `get_reward() -> float`. All other public methods, but no static ones, are tools, with
type hints and Google docstrings. An environment may have a `user`, who answers the model's messages
that contain no tool call. A tool may set `done`, which ends the episode. The rollout sets
`final_message` and `stop_reason` (a value of `StopReason`) before the call of `get_reward`.
`get_reward` may set two dicts for reports: `reward_breakdown` (named parts of the reward) and
`difference` (name: [actual, expected value]).

A class with an attribute `schemas`, the JSON schemas of its tools, and a method `call(name,
arguments) -> (text, is_error)` gets every call as the model wrote it: unknown tools, missing
arguments and values of other types included. Its other methods are no tools. Before the call of
`get_reward`, `messages` is set to a copy of the conversation, prompt included.
"""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cache, wraps
from itertools import islice
from typing import Any, NamedTuple, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from pipeline.data.tasks import Message
from pipeline.environments.event_loop import Steps
from pipeline.environments.faults import MAX_CHARACTERS, describe, is_outage, only_faults, text_of
from pipeline.environments.faults import EnvironmentFault as EnvironmentFault
from pipeline.environments.faults import Outage as Outage
from pipeline.environments.timeouts import awaited
from pipeline.environments.timeouts import run_steps as run_steps
from pipeline.environments.timeouts import settled as settled

Value = TypeVar("Value")
MAX_DIFFERENCES = 20  # largest number of entries of `difference` or `reward_breakdown`
MAX_SHOWN = 200  # largest number of characters of a name or value in `difference`
MAX_ITEMS = 100_000  # largest number of values, such as words or tools, that a domain gives
MAX_REWARD = 1e30  # largest absolute reward; the reward's square is finite in float64


class ToolError(Exception):
    """A tool raises a ToolError for an impossible request; the model sees the error's message."""


def taken(values: Iterable[Value]) -> list[Value]:
    """Return the values of a user's iterable; raises ValueError for more than MAX_ITEMS."""
    found = list(islice(values, MAX_ITEMS + 1))
    if len(found) > MAX_ITEMS:
        raise ValueError(f"gives more than {MAX_ITEMS} values")
    return found


def taken_pairs(values: Any) -> dict[Any, Any]:
    """Return a dict of a user's mapping or pairs; raises ValueError for more than MAX_ITEMS."""
    return dict(taken(values.items() if isinstance(values, Mapping) else values))


def _once_a_class(function: Callable[[type[Any]], Value]) -> Callable[[type[Any]], Value]:
    return cache(function)  # type: ignore[return-value]  # mypy treats classes as unhashable


@_once_a_class
def raw_call(environment_class: type[Any]) -> Callable[..., Any] | None:
    """Return the method `call` of a class that has the attribute `schemas`, else None."""
    has_schemas = isinstance(getattr(environment_class, "schemas", None), list | tuple)
    return getattr(environment_class, "call", None) if has_schemas else None


@_once_a_class
def tool_methods(environment_class: type[Any]) -> dict[str, Callable[..., Any]]:
    """Return a class's tools by name; if the class gets raw calls, the method of each is `call`."""
    if raw := raw_call(environment_class):
        return {of["function"]["name"]: raw for of in tool_schemas(environment_class)}
    return {
        name: member
        for name, member in inspect.getmembers(environment_class, inspect.isfunction)
        if not name.startswith("_")
        and name not in ("reset", "get_reward")
        and not isinstance(inspect.getattr_static(environment_class, name), staticmethod)
    }


@_once_a_class
def tool_schemas(environment_class: type[Any]) -> list[dict[str, Any]]:
    """Return the JSON schemas of a class's tools: its own, or from type hints and docstrings."""
    from transformers.utils import get_json_schema

    if raw_call(environment_class):
        return taken(environment_class.schemas)
    methods = tool_methods(environment_class).values()
    return [get_json_schema(m if m.__doc__ else _documented(m)) for m in methods]


def _documented(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a method without a docstring; its docstring has the arguments' names."""

    @wraps(method)
    def copy() -> None: ...

    names = [name for name in inspect.signature(method).parameters if name != "self"]
    copy.__doc__ = "\n".join([method.__name__, "", "Args:", *(f"    {n}: {n}" for n in names)])
    return copy


@cache
def _validators(tool: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, TypeAdapter[Any]]]:
    signature, hints = inspect.signature(tool), get_type_hints(tool)
    return signature, {k: TypeAdapter(hints[k]) for k in signature.parameters if k in hints}


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
    return run_steps(answer_call(environment, name, arguments)).content


def answer_call(environment: Any, name: str, arguments: dict[str, Any]) -> Steps[ToolAnswer]:
    """Return Steps that call a tool as `call_tool` does; the Steps' result is a ToolAnswer."""
    is_error, raised = False, ""
    try:
        if raw := raw_call(type(environment)):
            text, failed = yield from awaited(raw(environment, name, arguments))
            content, is_error = writable(text), bool(failed)
        else:
            content = yield from _call(environment, name, arguments)
    except ToolError as error:
        text = writable(str(error)[:MAX_CHARACTERS])
        is_error, content = True, error_result(text or type(error).__name__)
    except BaseException as error:
        if is_outage(only_faults(error)):
            raise
        is_error, raised = True, describe(error)
        content = error_result(text_of(error) or type(error).__name__)
    return ToolAnswer(content, is_error, raised, is_done(environment))


def is_done(environment: Any) -> bool:
    """Return whether a tool has ended the episode; a tool may be called `done`."""
    done = getattr(environment, "done", False)
    return bool(done) and not callable(done)


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
        result = _json_of(result)
    return writable(result)


def _json_of(value: Any) -> str:
    """Return JSON text, or its begin with more than MAX_CHARACTERS characters."""
    chunks, size = list[str](), 0
    # `json.dumps` would first read all of a dict whose `items` never end.
    for chunk in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value):
        chunks.append(chunk)
        if (size := size + len(chunk)) > MAX_CHARACTERS:
            break
    return "".join(chunks)


class Started(NamedTuple):
    environment: Any
    addition: str  # text from `reset` that is appended to the user's request
    in_background: bool  # True if the environment's calls run in the background


def started(environment_class: type[Any], row: Mapping[str, Any]) -> Steps[Started]:
    environment = environment_class()
    addition = yield from awaited(environment.reset(**reset_arguments(environment.reset, row)))
    if addition is not None and not isinstance(addition, str):
        raise TypeError(f"reset returned {type(addition).__name__}, not text or None")
    return Started(environment, writable(addition or ""), may_wait(environment_class, environment))


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


def reward_of(
    environment: Any, stop_reason: str = "completed", messages: Sequence[Message] = ()
) -> Steps[float]:
    """Return the reward of a conversation, or 0 if the environment has no `get_reward`.

    Raises ValueError for NaN and for absolute values above MAX_REWARD.
    """
    if not hasattr(environment, "get_reward"):
        return 0.0
    environment.stop_reason = stop_reason
    if raw_call(type(environment)):
        environment.messages = deepcopy(list(messages))
    value = yield from awaited(environment.get_reward())
    if isinstance(value, (str, bytes)):
        raise TypeError(f"get_reward returned {type(value).__name__}, not a number")
    reward = float(value)
    if not abs(reward) <= MAX_REWARD:  # the condition is also True for NaN
        raise ValueError(f"get_reward returned {reward:g}, not a number up to {MAX_REWARD:g}")
    return reward


def outcome_of(
    environment: Any, stop_reason: str = "completed", messages: Sequence[Message] = ()
) -> Steps[tuple[float, dict[str, float], dict[str, list[str]]]]:
    """Return the reward, and the environment's `reward_breakdown` and `difference`."""
    reward = yield from reward_of(environment, stop_reason, messages)
    parts = _explanation(getattr(environment, "reward_breakdown", None))
    return reward, parts, _explanation(getattr(environment, "difference", None))


def _explanation(attribute: Any) -> dict[str, Any]:
    """Return a dict's entries with finite numbers or pairs as values; a pair becomes two texts."""
    shown: dict[str, Any] = {}
    items = attribute.items() if isinstance(attribute, dict) else ()
    for key, value in islice(items, MAX_DIFFERENCES):
        name = writable(str(key)[:MAX_SHOWN])
        if isinstance(value, list | tuple):
            shown[name] = [writable(str(item)[:MAX_SHOWN]) for item in islice(value, 2)]
        elif isinstance(value, int | float) and math.isfinite(value):
            shown[name] = float(value)
    return shown


def may_wait(environment_class: type[Any], environment: Any = None) -> bool:
    """Return whether an environment runs in the background, because a call may wait for a network.

    The result is True if a tool, `reset`, `get_reward` or the user's `reply` is async, or if the
    class attribute `concurrent` is True.
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


def writable(text: str) -> str:
    """Replace lone surrogates in a text, because tokenizers and files do not accept surrogates.

    Raises ValueError if the text is longer than MAX_CHARACTERS.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"returned {len(text)} characters, the limit is {MAX_CHARACTERS}")
    return text.encode(errors="replace").decode()


def error_result(text: str) -> str:
    return json.dumps({"error": text}, ensure_ascii=False)
