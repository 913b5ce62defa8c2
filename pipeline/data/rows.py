"""Rows of task files, and checks of rows.

A JSON array is held in memory; JSON Lines and datasets stay on disk. `read` yields the rows with
the given indices, opens the file once, and raises UserError if the file has changed.
"""

from __future__ import annotations

import json
import re
import zlib
from array import array
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.common.errors import UserError
from pipeline.common.untrusted import (
    MAX_LINE_BYTES,
    lines_of,
    open_file,
    parse_json,
    read_file,
    shown,
)

TaskRow = dict[str, Any]
Rows: TypeAlias = "JsonArray | JsonLines | JoinedRows | DatasetRows"

ROLES = ("system", "user", "assistant", "tool")
MAX_CHARACTERS = 1_000_000  # largest length of a conversation; limits the time of tokenization
KEYS = frozenset(("domain", "id", "prompt", "payload", "family", "branch"))
ROUTE = "environment"  # key whose value names the domain of a row, as in TRL
MAX_ARRAY_BYTES = 256 << 20  # largest file of a JSON array, which is read into memory
ROWS_AT_ONCE = 256  # of a dataset, read into memory
# types of columns that cannot refer to files, unlike columns of images
COLUMN_KINDS = {"Value", "ClassLabel", "Json", "List", "LargeList", "Sequence"}
OPTIONAL = ("domain", "id", "payload", "family", "branch")  # null is as good as no value
CHANGED = "changed since it was read; put it back as it was, or start a new run"


def rows_of_file(path: Path) -> JsonArray | JsonLines:
    """Return the rows of a task file, which holds one JSON array or JSON Lines."""
    with open_file(path) as file:
        begin = file.read(1 << 16).removeprefix(BOM_UTF8).lstrip()
    is_array = path.suffix == ".json" or begin.startswith(b"[")
    return JsonArray(path) if is_array else JsonLines(path)


def rows_of_dataset_file(path: Path) -> JsonArray | JsonLines | None:
    """Return the rows of a dataset's JSON file: one array or JSON Lines; None for another form."""
    with open_file(path) as file:
        lines = (line.removeprefix(BOM_UTF8).strip() for _, line in lines_of(file, str(path)))
        line = next(filter(None, lines), b"")
    if line.startswith(b"["):
        return JsonArray(path)
    try:
        return JsonLines(path) if isinstance(parse_json(line.decode()), dict) else None
    except ValueError:
        return None


def json_lines(path: str | Path) -> Iterator[tuple[str, int, bytes, Any]]:
    """Yield each line's name, offset, bytes and value. Raises UserError if a line is not JSON."""
    start = 0
    with open_file(path) as file:
        for number, line in lines_of(file, str(path)):
            if text := line.decode().removeprefix("\ufeff" * (not start)).strip():
                where = f"{path}, line {number}"
                yield where, start, line, _parsed(text, where, "line")
            start += len(line)


def _parsed(text: str, where: str, what: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        reason = getattr(error, "msg", error)
        line = getattr(error, "lineno", 0)
    where += f", line {line}" if line and what == "file" else ""
    raise UserError(f"{where}: not JSON ({reason}); mend the {what}")


class JsonArray:
    """The rows of a JSON array in a file."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        text = read_file(path, MAX_ARRAY_BYTES).decode("utf-8-sig")
        self._rows = _parsed(text, self.name, "file")
        if not isinstance(self._rows, list):
            kind = type(self._rows).__name__
            raise UserError(f"{path}: got a {kind}; a .json task file is one array of tasks")

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Sequence[int]) -> Iterator[Any]:
        for index in indices:
            row = self._rows[index]
            if len(json.dumps(row)) > MAX_LINE_BYTES:
                most = f"more than {MAX_LINE_BYTES >> 20} MiB"
                raise UserError(f"{self.where(index)}: {most}; shorten it")
            yield row

    def where(self, index: int) -> str:
        return f"{self.name}, task {index + 1}"


class JsonLines:
    """The rows of a JSON Lines file. Only each line's offset, length and CRC-32 are in memory."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)

    @cached_property
    def _index(self) -> array[int]:
        index = array("Q")
        for _, start, line, _ in json_lines(self.name):
            index.extend((start, len(line), zlib.crc32(line)))
        return index

    def __len__(self) -> int:
        return len(self._index) // 3

    def read(self, indices: Sequence[int]) -> Iterator[Any]:
        try:
            with open_file(self.name) as file:
                for index in indices:
                    start, size, checksum = self._index[3 * index : 3 * index + 3]
                    file.seek(start)
                    line = file.read(size)
                    if zlib.crc32(line) != checksum:
                        raise UserError(f"{self.name}: {CHANGED}")
                    yield json.loads(line.decode().removeprefix("\ufeff").strip())
        except OSError:
            raise UserError(f"{self.name}: {CHANGED}") from None

    def where(self, index: int) -> str:
        start = self._index[3 * index]
        return next((where for where, at, _, _ in json_lines(self.name) if at == start), self.name)


class JoinedRows:
    """The rows of several files, one after another."""

    def __init__(self, parts: Sequence[JsonArray | JsonLines], names: Sequence[str]) -> None:
        self.name = ", ".join(names)
        self._parts = parts

    @cached_property
    def _firsts(self) -> list[int]:
        """The number of each part's first row, and then the number of all rows."""
        return [*accumulate(map(len, self._parts), initial=0)]

    def __len__(self) -> int:
        return self._firsts[-1]

    def _part_of(self, index: int) -> int:
        return bisect_right(self._firsts, index) - 1

    def read(self, indices: Sequence[int]) -> Iterator[Any]:
        for part, inside in groupby(indices, key=self._part_of):
            yield from self._parts[part].read([index - self._firsts[part] for index in inside])

    def where(self, index: int) -> str:
        part = self._part_of(index)
        return self._parts[part].where(index - self._firsts[part])


class DatasetRows:
    """The rows of a memory-mapped `datasets.Dataset`, without the nulls that Arrow adds.

    Arrow gives all objects of a column the same keys. Only columns of `Json` are as written.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        if others := set(re.findall(r"(\w+)\(", repr(dataset.features))) - COLUMN_KINDS:
            raise UserError(f"{name}: a column holds {min(others)}, which no task has; take it out")
        # An Arrow struct would add null for each missing key, and would turn some texts into dates.
        if isinstance(dataset.features.get("payload"), dict):
            raise UserError(f"{name}: payload: got a struct; store payloads as JSON text")
        self.name = name
        self._dataset = dataset.with_format(None)
        self._versions = self._file_versions()
        self._typed = [k for k, v in dataset.features.items() if type(v).__name__ != "Json"]

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: Sequence[int]) -> Iterator[TaskRow]:
        if self._file_versions() != self._versions:
            raise UserError(f"{self.name}: {CHANGED}")
        for first in range(0, len(indices), ROWS_AT_ONCE):
            chunk = indices[first : first + ROWS_AT_ONCE]
            is_whole = list(chunk) == list(range(chunk[0], chunk[-1] + 1))  # ten times as fast
            columns = self._dataset[slice(chunk[0], chunk[-1] + 1) if is_whole else list(chunk)]
            for values in zip(*columns.values(), strict=True):
                row = dict(zip(columns, values, strict=True))
                yield row | {name: _without_nulls(row[name]) for name in self._typed}

    def where(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def _file_versions(self) -> list[tuple[int, int]]:
        files = (Path(file["filename"]) for file in self._dataset.cache_files)
        stats = (file.stat() for file in files if file.exists())
        return [(stat.st_size, stat.st_mtime_ns) for stat in stats]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def row_problem(row: Any, domain: str, has_columns: bool) -> str:
    """Return the first mistake in a row of `domain`, or an empty text."""
    if not isinstance(row, dict):
        return f"got {type(row).__name__}; a task is one JSON object"
    unknown = sorted(row.keys() - KEYS - {ROUTE})
    if unknown and not has_columns:
        return f"unknown key [{shown(unknown[0])}]; a task has {', '.join(sorted(KEYS))}"
    if not isinstance(row.get("id"), str) or not row["id"]:
        return f"id: got {shown(row.get('id'))}; give a non-empty string"
    if (stated := row.get("domain", domain)) != domain:
        got = f"domain: got {shown(stated)} in a file of {domain} tasks"
        return f"{got}; move it or mend it, or rename a column `domain` that means something else"
    if problem := messages_problem(row.get("prompt")):
        return f"prompt: {problem}"
    if row["prompt"][-1]["role"] != "user":
        return "prompt: the last message must be the user's request"
    payload = row.get("payload", {})
    if isinstance(payload, str):
        if len(payload) > MAX_LINE_BYTES:
            return f"payload: more than {MAX_LINE_BYTES >> 20} MiB; shorten it"
        try:
            payload = parse_json(payload)
        except ValueError as error:
            return f"payload: not JSON ({getattr(error, 'msg', error)}); give an object"
    if not isinstance(payload, dict):
        return f"payload: got {shown(payload)}; give an object"
    for name in ("family", "branch"):
        if not isinstance(row.get(name, ""), str):
            return f"{name}: got {shown(row.get(name))}; give a string"
    return ""


def with_usual_messages(messages: Any) -> Any:
    """Return messages in the form that the pipeline uses; what is ambiguous stays as it is.

    Files for the API of OpenAI have the role `developer` for `system`, contents in parts of text,
    no or a null content beside calls, and arguments of calls as JSON text.
    """
    if not isinstance(messages, list):
        return messages
    return [_usual(message) if isinstance(message, dict) else message for message in messages]


def _usual(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    content = message.get("content")
    usual = {k: v for k, v in message.items() if v is not None or k == "content"}
    if usual.get("role") == "developer":
        usual["role"] = "system"
    if isinstance(content, list) and all(map(_is_text, content)):
        usual["content"] = "".join(part["text"] for part in content)
    if isinstance(calls, list) and calls:
        usual["tool_calls"] = [*map(_with_arguments, calls)]
        usual["content"] = usual.get("content") or ""
    return usual


def _is_text(part: Any) -> bool:
    is_text = isinstance(part, dict) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


def _with_arguments(call: Any) -> Any:
    function: Any = call.get("function") if isinstance(call, dict) else None
    text = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(text, str):
        return call
    try:
        return {**call, "function": {**function, "arguments": parse_json(text or "{}")}}
    except ValueError:
        return call


def messages_problem(messages: Any) -> str:
    """Return the first mistake in a conversation, or an empty text."""
    if not isinstance(messages, list) or not messages:
        return "give a non-empty list of messages with role and content"
    for message in messages:
        is_message = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not is_message or message.get("role") not in ROLES:
            roles = ", ".join(ROLES)
            return f"bad message {shown(message)}; give role and content, the role one of {roles}"
        if message.get("function_call"):
            return "a message has a function_call, the old form; write it as tool_calls"
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            form = '{"function": {"name": ..., "arguments": {...}}}'
            return f"bad tool calls {shown(calls)}; give a list of {form}"
    if sum(len(message["content"]) for message in messages) > MAX_CHARACTERS:
        return f"more than {MAX_CHARACTERS} characters; shorten it"
    return ""


def _is_call(call: Any) -> bool:
    function: Any = call.get("function") if isinstance(call, dict) else None
    is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
    return is_named and isinstance(function.get("arguments", {}), dict)
