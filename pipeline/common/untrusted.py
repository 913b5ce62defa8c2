"""Reads untrusted files and JSON up to size limits, and makes texts safe for messages.

Task files, demonstrations and a model's tool calls are untrusted.
"""

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from pipeline.common.errors import CtrlC, UserError

MAX_LINE_BYTES = 8 << 20  # largest size of a line in a file of tasks or demonstrations
MAX_DEPTH = 64  # largest number of nested levels of JSON objects and arrays
MAX_SHOWN = 200  # largest number of characters of a refused value in a message
CACHED = ("models--", "datasets--")  # start of the names of folders in the hub's cache
MAX_MESSAGE = 1000  # largest number of characters of a message

_USER_INFO = re.compile(r"(?<=://)[^/\s]+(?=@)")
_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"
    r"|\bsk-(?:(?=[\w-]*\d)[\w-]{16,}|[\w-]{24,})"
    r"|\b(?:gh[a-z]_|gsk_|sk_live_)[A-Za-z0-9]{16,}|\bAIza[\w-]{30,}"
    r"|(?<=\bBearer )\s*(?:(?=\S*\d)[\w.~+/=-]{12,}|[\w.~+/=-]{20,})"
    r"|(?<=\bBasic )\s*(?=\S*[\d=])[\w+/=-]{12,}"
    # From the begin of a word alone, or a word of 100,000 letters would take minutes.
    r"|(?<![\w-])[\w-]{0,64}?api[-_]?key['\"]?\s*[:=]\s*['\"]?(?=\S*\d)[\w.~+/-]{8,}=*"
    r"|(?<=[?&])(?:[a-z_]*token|[a-z_]*key|password|sig|signature)=[^&\s'\"]+",
    re.IGNORECASE,
)


_secrets = set[str]()  # values of `keep_secret`
BLOCK = 10  # characters by which a long secret is found that is cut off
_ESCAPED = re.compile(r"\\u00([2-7][0-9a-f])|%([2-7][0-9a-f])", re.IGNORECASE)  # of ASCII
SHORTEST_SECRET = 8  # characters; local servers take keys such as EMPTY, which are words


def keep_secret(value: str) -> None:
    """Mask a value, such as an API key, in all texts that are shown from now on."""
    if len(value) >= SHORTEST_SECRET:
        escaped = json.dumps(value)[1:-1]
        _secrets.update((value, escaped, escaped.replace("/", "\\/"), quote(value, safe="")))


def parse_json(text: str) -> Any:
    """Parse a JSON text; raises ValueError with a short reason if `parse_json` refuses the text.

    `parse_json` refuses invalid JSON, NaN, numbers too large for a float, lone surrogates, and more
    than MAX_DEPTH levels of objects and arrays.
    """
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if _is_deep(value):
            raise RecursionError
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from None
    if not is_plain(value):
        raise ValueError("it holds half of a surrogate pair")
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no JSON number")
    return value


def _is_deep(value: Any, levels: int = MAX_DEPTH) -> bool:
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deep(item, levels - 1) for item in items)


def is_plain(value: Any) -> bool:
    """Return whether a value can be written as UTF-8 JSON with at most MAX_DEPTH nested levels."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return not _is_deep(value)


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; raises OSError for other kinds of files, such as pipes."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{str(path)!r} is no regular file")
    return open(path, "rb")


def read_file(path: str | Path, most: int) -> bytes:
    """Return the content of a regular file; raises ValueError for more than `most` bytes."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"it has more than {most >> 10} KiB")
        return file.read()


def is_inside(path: str | Path, folder: str | Path) -> bool:
    """Return whether a path, after its links, lies in a folder.

    In the hub's cache, a folder of a model or dataset has links to other folders of its repository.
    """
    root = Path(os.path.realpath(folder))
    if root.parent.name == "snapshots" and root.parents[1].name.startswith(CACHED):
        root = root.parents[1]
    return Path(os.path.realpath(path)).is_relative_to(root)


def link_out_of(folder: str | Path, parts: Sequence[str] = ("",)) -> str:
    """Return the path of a link in parts of a folder that leads out of the folder, or ""."""
    for part in (path for name in parts if (path := Path(folder, name)).is_dir()):
        for path in sorted(part.iterdir()):
            if path.is_symlink() and not is_inside(path, folder):
                return str(path.relative_to(folder))
    return ""


def lines_of(file: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line) for each line of a file; only \\n ends a line.

    Raises UserError for a line of more than MAX_LINE_BYTES bytes.
    """
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
        if len(line) > MAX_LINE_BYTES:
            raise UserError(
                f"{name}, line {number}: more than {MAX_LINE_BYTES >> 20} MiB; give each its own, "
                "shorter line"
            )
        yield number, line


def shown(value: Any) -> str:
    """Return the `repr` of a value, cut to MAX_SHOWN characters, with passwords masked."""
    try:
        text = masked(repr(value))
    except CtrlC:
        raise
    except (Exception, SystemExit, KeyboardInterrupt):  # raised by the user's class
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def one_line(text: str) -> str:
    """Return a text as one printable line, cut to about MAX_MESSAGE characters; mask passwords."""
    line = " ".join(masked(text).split())
    if len(line) > MAX_MESSAGE:
        line = f"{line[: MAX_MESSAGE // 2]} ... {line[-MAX_MESSAGE // 2 :]}"
    return printable(line)


def printable(text: str) -> str:
    """Mask secrets in a text; replace control characters but newline and tab by Python escapes."""
    shown = (c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in masked(text))
    return "".join(shown)


def masked(text: str) -> str:
    """Replace secrets in a text by ***.

    These are values of `keep_secret`, `user:password@`, tokens with a known beginning (`hf_...`,
    `sk-...`), X in `Bearer X` and `Basic X`, and `token=X` or `api-key: X` as a whole. A secret is
    also found where each of its characters is escaped, and by any BLOCK characters from a multiple
    of BLOCK on, or its last ones.
    """
    plain = _ESCAPED.sub(lambda found: chr(int(found[1] or found[2], 16)), text)
    long = [secret for secret in sorted(_secrets) if len(secret) >= 2 * BLOCK]
    starts = [(s, i) for s in long for i in (*range(0, len(s) - BLOCK + 1, BLOCK), len(s) - BLOCK)]
    blocks = [secret[i : i + BLOCK] for secret, i in starts]
    if any(secret in plain for secret in (*_secrets, *blocks)):
        text = without_secrets(plain)
        for block in blocks:
            around = f"[^\\s\"'*]{{0,{BLOCK}}}{re.escape(block)}[^\\s\"']*"
            text = re.sub(around, "***", text)
    return _TOKEN.sub("***", _USER_INFO.sub("***", text))


def without_secrets(text: str) -> str:
    """Replace the values of `keep_secret` in a text by ***, and nothing else."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def in_texts(change: Callable[[str], str], value: Any) -> Any:
    """Return a nested value with each of its texts changed, in keys and in values."""
    if isinstance(value, Mapping):
        return {in_texts(change, key): in_texts(change, item) for key, item in value.items()}
    if isinstance(value, list):
        return [in_texts(change, item) for item in value]
    return change(value) if isinstance(value, str) else value


def masked_tree(value: Any) -> Any:
    """Replace passwords and tokens in nested settings by ***, in keys and in values."""
    return in_texts(masked, value)


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's class if the message is empty.

    After a line that ends with a colon comes what it announces.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].endswith(":"):
        lines[0] = " ".join(lines)
    return one_line(lines[0] if lines else type(error).__name__).rstrip(".")
