"""The answers of an endpoint on disk, so that a resumed run pays for no call twice.

Each rank appends to a file of its own and reads the files of all ranks when it starts. A line is
written at once, so a killed process loses no answer; an incomplete last line is dropped.
"""

import hashlib
import json
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.data.tasks import Message
from pipeline.errors import UserError
from pipeline.files.durable import LinesFile
from pipeline.files.untrusted import parse_json, shown


def key_of(*parts: Any) -> str:
    """Return the hash of JSON values: what was asked of which model."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()


def _entry(line: bytes) -> tuple[str, Message | None, int]:
    """Return the key, message and number of tokens of a line; raises an error for another line."""
    entry = parse_json(line.decode())
    key = entry["key"]
    message = entry["message"]
    num_tokens = entry["num_tokens"]
    if not isinstance(key, str) or type(num_tokens) is not int or num_tokens < 0:
        raise TypeError
    if message is not None:
        functions = [call["function"] for call in message.get("tool_calls", [])]
        called = [(function["name"], function["arguments"]) for function in functions]
        texts = [message["content"], *chain(*called)]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError
    return key, message, num_tokens


class AnswerCache:
    """Answers by key. `num_calls` and `num_tokens` count what all ranks have paid so far.

    Raises UserError for a file that holds no answers.
    """

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._answers: dict[str, Message] = {}
        self.num_calls = self.num_tokens = 0
        own = folder / f"{name}.jsonl"
        size = 0
        for path in sorted(folder.glob("*.jsonl")):
            whole = path.read_bytes().rpartition(b"\n")[0]
            for number, line in enumerate(whole.split(b"\n") if whole else [], 1):
                try:
                    self._take(*_entry(line))
                except (ValueError, TypeError, LookupError, AttributeError):
                    where = f"{path}, line {number}"
                    remedy = "remove the line, or the file"
                    raise UserError(f"{where}: holds no answer ({shown(line)}); {remedy}") from None
            size = len(whole) + 1 if path == own and whole else size
        self._file = LinesFile(own, size)

    def _take(self, key: str, message: Message | None, num_tokens: int) -> None:
        self.num_calls += 1
        self.num_tokens += num_tokens
        if message is not None:
            self._answers[key] = message

    def get(self, key: str) -> Message | None:
        return self._answers.get(key)

    def put(self, key: str, message: Message | None, num_tokens: int) -> None:
        """Store a paid answer; None stands for an answer that was of no use."""
        entry = {"key": key, "message": message, "num_tokens": num_tokens}
        self._file.append(json.dumps(entry))
        self._take(key, message, num_tokens)

    def close(self) -> None:
        self._file.close()
