"""Rows of tasks where they lie: a JSON array in memory, JSON Lines and datasets on disk.

Rows are gone through once, to be checked, and then read by their index. A file that changed
meanwhile is never taken for the one that was checked.
"""

from __future__ import annotations

import json
import math
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import UserError
from pipeline.files.untrusted import MAX_LINE_BYTES, lines_of, open_file, parse_json, read_file

Row = dict[str, Any]

MAX_ARRAY_BYTES = 256 << 20  # of a file that is read into memory as a whole


class Rows(Protocol):
    """What gives each row with its place in words, and then any row by its index."""

    name: str

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...

    def __getitem__(self, index: int, /) -> Row: ...


def rows_of_file(path: Path) -> Rows:
    """The rows of a JSON file (one array) or a JSONL file, which may hold an array as well."""
    is_array = path.suffix == ".json" or _first_character(path) == "["
    return _Array(path) if is_array else _Lines(path)


def _first_character(path: Path) -> str:
    """The first that is no white space; empty if there is none."""
    with open_file(path) as file:
        while piece := file.read(1 << 16):
            if piece := piece.lstrip():
                return chr(piece[0])
    return ""


class _Array:
    """A file of one JSON array, held in memory."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            data = read_file(path, MAX_ARRAY_BYTES)
        except ValueError:
            raise UserError(
                f"{path}: an array of more than {MAX_ARRAY_BYTES >> 20} MiB; write one JSON object "
                "per line (.jsonl), which is not held in memory"
            ) from None
        try:
            rows = parse_json(data.decode())
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}, line {error.lineno}: not JSON ({error.msg}); mend the file"
            ) from None
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise UserError(f"{path}: not JSON ({error}); mend the file") from None
        if not isinstance(rows, list):
            raise UserError(
                f"{path}: got a {type(rows).__name__}; a .json task file is one array of tasks"
            )
        self._rows = rows
        self._may_be_large = len(data) > MAX_LINE_BYTES

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for number, row in enumerate(self._rows, 1):
            where = f"{self.name}, task {number}"
            if self._may_be_large and len(json.dumps(row)) > MAX_LINE_BYTES:
                raise UserError(f"{where}: more than {MAX_LINE_BYTES >> 20} MiB; shorten it")
            yield where, row

    def __getitem__(self, index: int) -> Row:
        row: Row = self._rows[index]
        return row


class _Lines:
    """A file of JSON Lines; kept are where each row begins, its length and its CRC-32."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._starts, self._sizes, self._sums = array("Q"), array("Q"), array("Q")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        start = 0
        with open_file(self.name) as file:
            for number, line in lines_of(file, self.name):
                where = f"{self.name}, line {number}"
                text = line.decode()
                if text.strip():
                    self._starts.append(start)
                    self._sizes.append(len(line))
                    self._sums.append(zlib.crc32(line))
                    try:
                        row = parse_json(text)
                    except ValueError as error:
                        reason = getattr(error, "msg", error)
                        raise UserError(f"{where}: not JSON ({reason}); mend the line") from None
                    yield where, row
                start += len(line)

    def __getitem__(self, index: int) -> Row:
        try:
            with open_file(self.name) as file:
                file.seek(self._starts[index])
                line = file.read(self._sizes[index])
        except OSError:
            line = b""
        if zlib.crc32(line) != self._sums[index]:
            raise UserError(_changed(self.name))
        row: Row = json.loads(line.decode())
        return row


class DatasetRows:
    """The rows of a `datasets.Dataset`, which stay memory-mapped.

    Arrow gives each message the keys of all messages; those that are null are left out. Of payloads
    that are structs, those are refused that Arrow may have altered: it adds null for missing keys,
    and makes dates of text.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        if not len(dataset):
            raise UserError(f"{name}: holds no tasks; give a dataset that has rows")
        if kind := _kind_that_opens_files(dataset.features):
            raise UserError(f"{name}: a column holds {kind}, which no task has; take it out")
        self.name = name
        self._dataset = dataset.with_format(None)
        self._in_struct = isinstance(dataset.features.get("payload"), dict)
        self._stamps = self._stamped()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        batches = self._dataset.iter(batch_size=256)
        columns = self._dataset.column_names
        rows = (values for batch in batches for values in zip(*batch.values(), strict=True))
        for index, values in enumerate(rows):
            row = _without_nulls(dict(zip(columns, values, strict=True)))
            where, payload = f"{self.name}[{index}]", row.get("payload")
            if self._in_struct and not _is_exact(payload):
                raise UserError(
                    f"{where}: payload: a struct with nulls or dates, which may not be what was "
                    "written; store payloads as JSON text"
                )
            yield where, row

    def __getitem__(self, index: int) -> Row:
        if self._stamped() != self._stamps:
            raise UserError(_changed(self.name))
        return _without_nulls(self._dataset[index])

    def _stamped(self) -> list[tuple[int, int]]:
        """Size and time of each of its files, as an unchanged one has them."""
        files = [Path(file["filename"]) for file in self._dataset.cache_files]
        found = [file.stat() for file in files if file.exists()]
        return [(stat.st_size, stat.st_mtime_ns) for stat in found]


def _kind_that_opens_files(feature: Any) -> str:
    """The first kind of column that reads files which rows name, such as Image; empty if none."""
    if isinstance(feature, dict):
        return next(filter(None, map(_kind_that_opens_files, feature.values())), "")
    if hasattr(feature, "feature"):  # a list
        return _kind_that_opens_files(feature.feature)
    kind = type(feature).__name__
    return "" if kind in ("Value", "ClassLabel", "Json") else kind


def _without_nulls(row: Row) -> Row:
    kept: Row = _pruned({**row, "payload": None})
    return kept if row.get("payload") is None else {**kept, "payload": row["payload"]}


def _is_exact(value: Any) -> bool:
    """Whether a value of an Arrow struct can only be what it was made from."""
    if isinstance(value, dict):
        return all(inner is not None and _is_exact(inner) for inner in value.values())
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | bool | int)


def _pruned(value: Any) -> Any:
    """`value` without the keys whose value is null."""
    if isinstance(value, dict):
        return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
    return [_pruned(inner) for inner in value] if isinstance(value, list) else value


def _changed(name: str) -> str:
    return f"{name}: changed since it was read; put it back as it was, or start a new run"
