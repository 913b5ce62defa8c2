"""Finds the tools of an environment class: methods by name, JSON schemas and arguments.

The tools are all public methods but `reset` and `get_reward`, or what the attribute `schemas` says.
"""

import ast
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property, partialmethod, singledispatchmethod, wraps
from itertools import islice
from pathlib import Path
from textwrap import dedent
from types import BuiltinFunctionType, ClassMethodDescriptorType, MethodDescriptorType
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter

from pipeline.common.untrusted import is_plain, reason_of, shown

Value = TypeVar("Value")
MAX_ITEMS = 100_000  # largest number of values, such as words or tools, that a domain gives
NO_TOOLS = ("reset", "get_reward")
OF_THE_EPISODE = {"user", "done", "final_message", "stop_reason", "reward_breakdown", "difference"}
# Attributes that the pipeline reads or sets, so a property of this name is no forgotten tool.
_READ = OF_THE_EPISODE | {"messages", "scenario", "judge", "has_judge", "reward_parts"}
_READ |= {"concurrent", "uses_random_state"}
_KINDS = {staticmethod: "static method", classmethod: "class method"}
_KINDS |= {property: "property", cached_property: "property"}
_OF_C = (MethodDescriptorType, ClassMethodDescriptorType, BuiltinFunctionType)


def taken(values: Iterable[Value]) -> list[Value]:
    """Return the values of a user's iterable; raises ValueError for more than MAX_ITEMS."""
    items = list(islice(values, MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        raise ValueError(f"gives more than {MAX_ITEMS} values")
    return items


def taken_pairs(values: Any) -> dict[Any, Any]:
    """Return a dict of a user's mapping or pairs; raises ValueError for more than MAX_ITEMS."""
    return dict(taken(values.items() if isinstance(values, Mapping) else values))


def once_a_class(function: Callable[[type[Any]], Value]) -> Callable[[type[Any]], Value]:
    return cache(function)  # type: ignore[return-value]  # classes count as unhashable


@once_a_class
def raw_call(environment_class: type[Any]) -> Callable[..., Any] | None:
    """Return the method `call` of a class that has the attribute `schemas`, else None."""
    has_schemas = isinstance(getattr(environment_class, "schemas", None), list | tuple)
    return getattr(environment_class, "call", None) if has_schemas else None


@once_a_class
def tool_methods(environment_class: type[Any]) -> dict[str, Callable[..., Any]]:
    """Return a class's tools by name; if the class gets raw calls, the method of each is `call`."""
    if raw := raw_call(environment_class):
        return {of["function"]["name"]: raw for of in environment_class.schemas}
    members = _public_members(environment_class)
    return {name: member for name, member in members if inspect.isfunction(member)}


@once_a_class
def tool_schemas(environment_class: type[Any]) -> list[dict[str, Any]]:
    """Return the JSON schemas of a class's tools: its own, or from type hints and docstrings."""
    if raw_call(environment_class):
        return taken(environment_class.schemas)
    return [_schema(name, tool) for name, tool in tool_methods(environment_class).items()]


@cache
def arguments_of(
    tool: Callable[..., Any],
) -> tuple[inspect.Signature, dict[str, TypeAdapter[Any]]]:
    """Return a tool's signature without `self`, and a validator for each argument with a hint."""
    signature = inspect.signature(tool)
    hints = get_type_hints(tool)
    signature = signature.replace(parameters=[*signature.parameters.values()][1:])
    return signature, {k: TypeAdapter(hints[k]) for k in signature.parameters if k in hints}


def tool_problem(environment_class: type[Any]) -> str:
    """Return what keeps a model from calling a tool of a class, and the remedy; or ""."""
    schemas = getattr(environment_class, "schemas", None)
    if raw_call(environment_class):
        problem = schemas_problem(taken(environment_class.schemas))
        return f"whose {problem}" if problem else ""
    if schemas is not None and callable(getattr(environment_class, "call", None)):
        return f"whose schemas are {shown(schemas)}; give a list of JSON schemas in the class"
    for name, member in _public_members(environment_class):
        if inspect.isfunction(member):
            if problem := _arguments_problem(member):
                return f"whose {name}{place_of(member)} {problem}"
        elif _is_forgotten(member):
            kind = f"a {type(member).__qualname__}"
            what = f"whose {name}{place_of(member)} is {kind}, so no model can call it"
            return f"{what}; write it as a method, or name it _{name}"
    return ""


def no_tools(environment_class: type[Any]) -> list[str]:
    """Return a note for each public member of a class that may be meant as a tool, but is none."""
    if raw_call(environment_class):
        return []
    kinds = {
        name: (kind, place_of(member))
        for name, member in _public_members(environment_class)
        for of, kind in _KINDS.items()
        if isinstance(member, of) and name not in _READ
    }
    return [
        f"the {kind} {name}{place} is no tool; write a method if the model shall call it, "
        f"or name it _{name}"
        for name, (kind, place) in kinds.items()
    ]


def place_of(member: Any) -> str:
    """Return " (FILE, line N)" for the function in a member of a class, or ""."""
    for name in ("fget", "__func__", "func"):
        member = getattr(member, name, member)
    code = getattr(inspect.unwrap(member), "__code__", None)
    return f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else ""


def _public_members(environment_class: type[Any]) -> Iterator[tuple[str, Any]]:
    for name in dir(environment_class):
        if not name.startswith("_") and name not in NO_TOOLS:
            yield name, inspect.getattr_static(environment_class, name)


def _is_forgotten(member: Any) -> bool:
    """Return whether a member, which is no function, can be called or was made of a method."""
    if isinstance(member, partialmethod | singledispatchmethod):
        return True
    is_type = isinstance(member, type) or type(member).__module__ in ("typing", "types")
    return callable(member) and not (is_type or isinstance(member, (*_KINDS, *_OF_C)))


def _arguments_problem(tool: Callable[..., Any]) -> str:
    """Return why a call with arguments by name cannot reach a tool, and the remedy; or ""."""
    if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
        return "yields its result, which no model sees; return it"
    parameters = list(inspect.signature(tool).parameters.values())
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            hint = "give each argument a name (a decorator needs functools.wraps)"
            return f"takes {p.replace(annotation=p.empty)}, which a model cannot see; {hint}"
    if not parameters or parameters[0].name != "self":
        return "does not take self first; add it, or give the method a name with _"
    for p in parameters[1:]:
        if p.kind is p.POSITIONAL_ONLY:
            return f"takes {p.name} by position only, but a model gives names; take out the `/`"
    try:
        outer = inspect.signature(tool, follow_wrapped=False)
        outer.bind(None, **dict.fromkeys(p.name for p in parameters[1:]))
    except TypeError as error:
        return f"has a decorator that does not pass its arguments on by name ({error}); mend it"
    return ""


def schemas_problem(schemas: Any) -> str:
    """Return the first mistake in a list of JSON schemas of tools, and the remedy; or ""."""
    for number, schema in enumerate(schemas):
        if problem := _schema_problem(schema):
            return f"schemas[{number}] {problem}"
    names = [schema["function"]["name"] for schema in schemas]
    twice = [name for name, count in Counter(names).items() if count > 1]
    return f"schemas have {shown(twice[0])} twice; give each its own name" if twice else ""


def _schema_problem(schema: Any) -> str:
    """Return the first mistake in the JSON schema of a tool, and the remedy; or ""."""
    function: Any = schema.get("function") if isinstance(schema, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        form = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
        return f"has no name: {shown(schema)}; write {form}"
    parameters = function.get("parameters", {})
    properties = parameters.get("properties", {}) if isinstance(parameters, dict) else None
    values = properties.values() if isinstance(properties, dict) else [None]
    if not all(isinstance(value, dict) for value in values):
        return f"has the parameters {shown(parameters)}; give a JSON schema of an object"
    return ""


def _schema(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool; raises TypeError with the tool's place in its file.

    A tool without a docstring gets one with the names of its arguments.
    """
    from transformers.utils import get_json_schema

    @wraps(tool)
    def copy() -> None: ...

    try:
        signature, _ = arguments_of(tool)
        hints = {
            k: v for k, v in get_type_hints(tool).items() if k in {*signature.parameters, "return"}
        }
        copy.__name__ = name
        copy.__annotations__ = hints
        copy.__signature__ = signature  # type: ignore[attr-defined]
        if not tool.__doc__:
            lines = (f"    {n}: {n}" for n in signature.parameters)
            copy.__doc__ = "\n".join([name, "", "Args:", *lines])
        schema: dict[str, Any] = get_json_schema(copy)
        if not is_plain(schema):
            raise ValueError(
                "its docstring or hints hold what JSON cannot: a NaN, half a character"
            )
    except Exception as error:  # hints are user code
        raise TypeError(f"{name}{place_of(tool)}: {reason_of(error)}") from None
    return schema


def keywords_read(function: Callable[..., Any]) -> set[str] | None:
    """Return the names of the arguments that a function may read; None if it may read any.

    A function that takes `**kwargs` reads what it names, and KEY where its source has `kwargs[KEY]`
    or `kwargs.get(KEY)`, if that is all that it does with `kwargs`.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
        rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        source = "" if rest is None else dedent(inspect.getsource(function))
        nodes = list(ast.walk(ast.parse(source)))
    except (TypeError, ValueError, OSError, SyntaxError):
        return None
    keys = dict[ast.expr, str]()
    for node in nodes:
        match node:
            case ast.Subscript(value=ast.Name() as of, slice=ast.Constant(value=str(key))):
                keys[of] = key
            case ast.Call(
                func=ast.Attribute(value=ast.Name() as of, attr="get" | "pop"),
                args=[ast.Constant(value=str(key)), *_],
            ):
                keys[of] = key
    whole = (rest, "locals", "vars")
    loaded = [node for node in nodes if isinstance(node, ast.Name) and node.id in whole]
    if hasattr(function, "__wrapped__") or not all(node in keys for node in loaded):
        return None
    return {p.name for p in parameters} | {keys[node] for node in loaded}
