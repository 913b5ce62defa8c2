"""What is one token each in the tiny tokenizer: the words of an embedded domain."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from pipeline.embedded.generation import IDS, Family
from pipeline.embedded.scripted import CaseEnvironment
from pipeline.environments.tools import tool_schemas

SAID = ("the one of ", "Done.", ".", "?", "ok", '{"ok": "', "yes")  # in every domain


def words_of(
    name: str,
    environment: type[CaseEnvironment],
    families: Collection[Family],
    said: Collection[str] = (),
    values: Collection[str] = (),
) -> Iterator[str]:
    """Ids, names of tools and arguments, fields and values of records, phrasings.

    `said` is what else is said, `values` are those of records that no type lists.
    """
    yield from (*IDS, *SAID, name, *said)
    keys, words = set(), set()
    for schema in tool_schemas(environment):
        function = schema["function"]
        yield from (function["name"], f" {function['name']}")
        for argument, parameter in function["parameters"]["properties"].items():
            keys.add(argument)
            words |= set(parameter.get("enum", []))
    _walk(environment.database_class.model_json_schema(), keys, words)
    # Words are keys too: flights come as {"free": ..., "full": ...}.
    keys |= words | set(values)
    yield from (key for key in keys if key)
    for key in keys:
        yield from (f'", "arguments": {{"{key}": "', f'{{"{key}": "', f'", "{key}": "')
    for family in families:
        yield family.name
        for phrasing in family.phrasings:
            yield from (piece for piece in re.split(r"\{\w+\}", phrasing) if piece)


def _walk(schema: Any, keys: set[str], words: set[str]) -> None:
    """Collect the field names and literal values of a JSON schema."""
    if isinstance(schema, dict):
        keys |= set(schema.get("properties", {}))
        values = [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]
        words |= {value for value in values if isinstance(value, str)}
        for value in schema.values():
            _walk(value, keys, words)
    elif isinstance(schema, list):
        for value in schema:
            _walk(value, keys, words)
