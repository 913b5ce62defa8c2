"""Rows of tasks: a JSON array in memory; JSON Lines and datasets, whose rows stay on disk.

All rows are read once, to be checked, and later one by one by their index. If a file has changed
since it was checked, reading from it is an error.
"""

from __future__ import annotations

import json
import re
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.files.untrusted import MAX_LINE_BYTES, lines_of, open_file, parse_json, read_file

Row = dict[str, Any]

MAX_ARRAY_BYTES = 256 << 20  # of a file that is read into memory
# Types of columns without references to files; Image, for example, has them.
KINDS = {"Value", "ClassLabel", "Json", "List", "LargeList", "Sequence"}
CHANGED = "changed since it was read; put it back as it was, or start a new run"


def rows_of_file(path: Path) -> Array | Lines:
    """The rows of a JSON file (one array) or a JSONL file, which may hold an array as well."""
    with open_file(path) as file:
        is_array = path.suffix == ".json" or file.read(1 << 16).lstrip().startswith(b"[")
    return Array(path) if is_array else Lines(path)


def json_lines(path: str | Path) -> Iterator[tuple[str, int, bytes, Any]]:
    """The name, offset, bytes and value of each line of a JSON Lines file, without blank lines.

    Raises UserError for a line that is no JSON.
    """
    start = 0
    with open_file(path) as file:
        for number, line in lines_of(file, str(path)):
            if text := line.decode().strip():
                where = f"{path}, line {number}"
                yield where, start, line, _parsed(text, where, "line")
            start += len(line)


def _parsed(text: str, where: str, what: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        reason, line = error.msg, f", line {error.lineno}" if what == "file" else ""
    except ValueError as error:
        reason, line = str(error), ""
    raise UserError(f"{where}{line}: not JSON ({reason}); mend the {what}")


class Array:
    """The rows of a file of one JSON array, held in memory; iteration gives names as well."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            data = read_file(path, MAX_ARRAY_BYTES)
        except ValueError:
            raise UserError(
                f"{path}: an array of more than {MAX_ARRAY_BYTES >> 20} MiB; write one JSON object "
                "per line (.jsonl), which is not held in memory"
            ) from None
        self._rows = _parsed(data.decode(), self.name, "file")
        if not isinstance(self._rows, list):
            raise UserError(
                f"{path}: got a {type(self._rows).__name__}; a .json task file is one array of "
                "tasks"
            )

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for number, row in enumerate(self._rows, 1):
            where = f"{self.name}, task {number}"
            if len(json.dumps(row)) > MAX_LINE_BYTES:
                raise UserError(f"{where}: more than {MAX_LINE_BYTES >> 20} MiB; shorten it")
            yield where, row

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]


class Lines:
    """The rows of a JSON Lines file; memory holds the offset, length and CRC-32 of each."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._index = array("Q")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for where, start, line, row in json_lines(self.name):
            self._index.extend((start, len(line), zlib.crc32(line)))
            yield where, row

    def __getitem__(self, index: int) -> Any:
        start, size, checksum = self._index[3 * index : 3 * index + 3]
        try:
            with open_file(self.name) as file:
                file.seek(start)
                line = file.read(size)
        except OSError:
            line = b""
        if zlib.crc32(line) != checksum:
            raise UserError(f"{self.name}: {CHANGED}")
        return json.loads(line)


class DatasetRows:
    """The rows of a `datasets.Dataset`, which stay memory-mapped.

    Arrow gives each message the keys of all messages; keys whose value is null are removed.
    Payloads that are structs are refused: Arrow adds null for missing keys, and makes dates of
    texts, so they may differ from the source.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        if not len(dataset):
            raise UserError(f"{name}: holds no tasks; give a dataset that has rows")
        if others := set(re.findall(r"(\w+)\(", repr(dataset.features))) - KINDS:
            raise UserError(f"{name}: a column holds {min(others)}, which no task has; take it out")
        if isinstance(dataset.features.get("payload"), dict):
            raise UserError(f"{name}: payload: got a struct; store payloads as JSON text")
        self.name, self._dataset = name, dataset.with_format(None)
        self._stamps = self._stamped()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        batches = self._dataset.iter(batch_size=256)
        rows = (values for batch in batches for values in zip(*batch.values(), strict=True))
        for index, values in enumerate(rows):
            row = dict(zip(self._dataset.column_names, values, strict=True))
            yield f"{self.name}[{index}]", _task_row(row)

    def __getitem__(self, index: int) -> Row:
        if self._stamped() != self._stamps:
            raise UserError(f"{self.name}: {CHANGED}")
        return _task_row(self._dataset[index])

    def _stamped(self) -> list[tuple[int, int]]:
        """The size and the modification time of each file."""
        files = (Path(file["filename"]) for file in self._dataset.cache_files)
        stats = (file.stat() for file in files if file.exists())
        return [(stat.st_size, stat.st_mtime_ns) for stat in stats]


def _task_row(row: Row) -> Row:
    """A row of a dataset without nulls; nulls inside its payload stay."""
    payload = row.pop("payload", None)
    return {**_without_nulls(row), **({} if payload is None else {"payload": payload})}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
