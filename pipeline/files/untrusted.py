"""What others wrote: text files and JSON read within limits, and what of them a message may show.

Task files, demonstrations and a model's tool calls are read through here, so that none of them can
take more than bounded time, memory and stack. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.errors import UserError

MAX_LINE_BYTES = 8 << 20  # of a line of a file, which holds one task or demonstration
MAX_DEPTH = 64  # of objects and arrays inside each other
MAX_DIGITS = 4300  # of a whole number, as in Python
MAX_SHOWN = 200  # characters of a refused value
MAX_MESSAGE = 1000  # characters of a message

_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a surrogate pair, or a whole pair
# What a terminal may obey and not show: control characters, and those that turn a line around.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_USER_INFO = re.compile(r"(?<=://)[^/\s'\"]+(?=@)")
_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|(?<=[?&])(?:[a-z_]*token|[a-z_]*key|password|sig|signature)=[^&\s'\"]+",
    re.IGNORECASE,
)


def parse_json(text: str) -> Any:
    """The value of a JSON text; a ValueError says in a few words why there is none.

    Refused beside what is no JSON are NaN, numbers that no float holds, half characters, and
    objects and arrays more than MAX_DEPTH deep, wherever on the stack it is called.
    """
    if text.startswith("\ufeff"):
        raise ValueError("it starts with a byte order mark")
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("{") + text.count("[") > MAX_DEPTH and is_nested_deeply(value):
        raise ValueError(_TOO_DEEP)
    if _HALF.search(text) and not is_plain(value):
        raise ValueError("it holds half of a surrogate pair")
    return value


def is_nested_deeply(value: Any) -> bool:
    """Whether objects and arrays stand more than MAX_DEPTH deep in each other."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def is_plain(value: Any) -> bool:
    """Whether a value that is not nested deeply can be written as JSON.

    NaN cannot, nor a text with half a character, though "\\ud800" is JSON.
    """
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def _whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return int(text)


_DECODER = json.JSONDecoder(parse_constant=_constant, parse_float=_number, parse_int=_whole_number)
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file to be read; OSError for whatever else has a name, such as a pipe."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{str(path)!r} is no regular file")
    return open(path, "rb")


def read_file(path: str | Path, most: int) -> bytes:
    """The whole of a regular file; ValueError where it has more than so many bytes."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"it has more than {most >> 10} KiB")
        return file.read()


def lines_of(file: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, numbered from 1; UserError for one of more than MAX_LINE_BYTES.

    A line ends with \\n only: the texts of JSON may hold what else Unicode calls a line's end.
    """
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise UserError(
                f"{name}, line {number}: more than {MAX_LINE_BYTES >> 20} MiB; give each its own "
                "line, and none that long"
            )
        yield number, line


def shown(value: Any) -> str:
    """A refused value for a message: as Python writes it, on one line and not at length."""
    text = repr(value)
    return masked(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")


def one_line(text: str) -> str:
    """A message in one line of printable characters, not at length, and without passwords."""
    line = " ".join(masked(text).split())
    if len(line) > MAX_MESSAGE:
        line = f"{line[: MAX_MESSAGE // 2]} ... {line[-MAX_MESSAGE // 2 :]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def printable(text: str) -> str:
    """A text of several lines for a terminal: what it may obey stands as Python would write it."""
    return _UNSEEN.sub(lambda found: repr(found[0])[1:-1], text)


def masked(text: str) -> str:
    """A text with *** for the passwords and tokens in it: user:password@host, hf_..., ?token=..."""
    return _TOKEN.sub("***", _USER_INFO.sub("***", text))


def masked_tree(value: Any) -> Any:
    """A tree of settings with *** for the passwords and tokens in its texts."""
    if isinstance(value, Mapping):
        return {key: masked_tree(item) for key, item in value.items()}
    if isinstance(value, list):
        return [masked_tree(item) for item in value]
    return masked(value) if isinstance(value, str) else value


def texts_in(value: Any) -> Iterator[str]:
    """All texts of a tree of lists and mappings, keys among them."""
    if isinstance(value, dict):
        yield from texts_in(list(value))
        yield from texts_in(list(value.values()))
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)
    elif isinstance(value, str):
        yield value


def reason_of(error: BaseException) -> str:
    """What a library says of what it refuses, in one line; its class where it says nothing."""
    said: Iterable[str] = (line.strip() for line in str(error).splitlines())
    return one_line(next(filter(None, said), "") or type(error).__name__).rstrip(".")
