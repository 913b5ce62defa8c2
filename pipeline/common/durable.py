"""Writes files that stay usable if the process is killed, and reads incomplete files."""

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from sys import intern
from typing import Any

from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.common.untrusted import open_file, shown


def write_text(path: Path, text: str) -> None:
    """Replace the content of a file atomically, and sync the file to the disk."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text, encoding="utf-8")
    sync(aside)
    aside.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LinesFile:
    """A file for new lines; opening keeps only the complete lines in the first `size` bytes."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self._file.seek(0)
        self.size = self._file.read(size).rfind(b"\n") + 1
        if self.size != size:
            say(
                f"warning: {path}: at the checkpoint it had {size} bytes, and {self.size} of these "
                "remain in whole lines; the rest stays missing"
            )
        self._file.truncate(self.size)
        self.sync()

    def append(self, line: str) -> None:
        """Append a line; if the write is incomplete, remove the line and raise OSError."""
        rest = f"{line}\n".encode()
        size = self.size + len(rest)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(self.size)
            error.filename = str(self._path)
            raise
        self.size = size

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def finite(value: Any) -> Any:
    """Return `value` with None in place of NaN and infinite numbers, which JSON does not allow."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSONL file except an incomplete last line; [] for a missing file.

    Raises UserError for another line that is no JSON object.
    """
    if not path.is_file():
        return []
    records = list[dict[str, Any]]()
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError
            records.append({intern(name): value for name, value in record.items()})
        except (ValueError, RecursionError):
            if number < len(lines):
                raise UserError(
                    f"{path}, line {number}: is no record of a run ({shown(line)}); restore the "
                    "file"
                ) from None
    return records


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a gzip file, even if the writing process was killed."""
    cut_off = suppress(EOFError, gzip.BadGzipFile, zlib.error)
    with open_file(path) as packed, gzip.open(packed, "rb") as file, cut_off:
        yield from (line for line in file if line.endswith(b"\n"))
