"""Text that others wrote: bounded reading of files and JSON, and text that is safe in a message.

Task files, demonstrations and a model's tool calls are read with these functions, within limits of
time, memory and stack. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.errors import UserError

MAX_LINE_BYTES = 8 << 20  # of a line of a file, which holds one task or demonstration
MAX_DEPTH = 64  # of objects and arrays inside each other
MAX_SHOWN = 200  # characters of a refused value
MAX_MESSAGE = 1000  # characters of a message

_USER_INFO = re.compile(r"(?<=://)[^/\s'\"]+(?=@)")
_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|(?<=[?&])(?:[a-z_]*token|[a-z_]*key|password|sig|signature)=[^&\s'\"]+",
    re.IGNORECASE,
)


def parse_json(text: str) -> Any:
    """The value of a JSON text; ValueError gives the reason in a few words.

    Also refused: NaN, numbers too large for a float, lone surrogates, and objects and arrays with
    more than MAX_DEPTH levels.
    """
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
        is_deep = is_nested_deeply(value)
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    if not is_plain(value):
        raise ValueError("it holds half of a surrogate pair")
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no JSON number")
    return value


def is_nested_deeply(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Whether lists and dictionaries are nested more than `levels` deep."""
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_nested_deeply(item, levels - 1) for item in items)


def is_plain(value: Any) -> bool:
    """Whether a value can be written as JSON in UTF-8: no NaN, no lone surrogate, not deep."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return not is_nested_deeply(value)


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; OSError for anything else, such as a pipe."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{str(path)!r} is no regular file")
    return open(path, "rb")


def read_file(path: str | Path, most: int) -> bytes:
    """The content of a regular file; ValueError if it has more than `most` bytes."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"it has more than {most >> 10} KiB")
        return file.read()


def lines_of(file: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, numbered from 1; UserError for one of more than MAX_LINE_BYTES.

    Only \\n ends a line, because JSON texts may hold the other line ends of Unicode.
    """
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
        if len(line) > MAX_LINE_BYTES:
            size = f"more than {MAX_LINE_BYTES >> 20} MiB"
            raise UserError(f"{name}, line {number}: {size}; give each its own, shorter line")
        yield number, line


def shown(value: Any) -> str:
    """A refused value for a message: its `repr`, cut to MAX_SHOWN characters, without passwords."""
    text = repr(value)
    return masked(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")


def one_line(text: str) -> str:
    """A message as one line of printable characters, at most MAX_MESSAGE, without passwords."""
    line = " ".join(masked(text).split())
    if len(line) > MAX_MESSAGE:
        line = f"{line[: MAX_MESSAGE // 2]} ... {line[-MAX_MESSAGE // 2 :]}"
    return printable(line)


def printable(text: str) -> str:
    """A text of several lines for a terminal, with control characters as Python escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def masked(text: str) -> str:
    """A text with *** for the passwords and tokens in it: user:password@host, hf_..., ?token=..."""
    return _TOKEN.sub("***", _USER_INFO.sub("***", text))


def masked_tree(value: Any) -> Any:
    """A tree of settings with *** for the passwords and tokens in its texts and keys."""
    if isinstance(value, Mapping):
        return {masked_tree(key): masked_tree(item) for key, item in value.items()}
    if isinstance(value, list):
        return [masked_tree(item) for item in value]
    return masked(value) if isinstance(value, str) else value


def reason_of(error: BaseException) -> str:
    """The first line of an error's message, or its class if the message is empty."""
    lines = (line.strip() for line in str(error).splitlines())
    return one_line(next(filter(None, lines), type(error).__name__)).rstrip(".")
