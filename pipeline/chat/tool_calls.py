"""What a sampled message says, and the Hermes format of tool calls."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from pipeline.data.tasks import Message
from pipeline.files.untrusted import is_nested_deeply, is_plain, parse_json


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """What a sampled message says: text, tool calls (name, arguments), and what is malformed."""

    content: str
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    malformed: str = ""

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content}
        if self.calls:
            functions = [{"name": name, "arguments": arguments} for name, arguments in self.calls]
            message["tool_calls"] = [{"type": "function", "function": f} for f in functions]
        return message


def is_call(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a model's JSON is {"name": text, "arguments": object}, not deep and without NaN.

    Missing arguments count as none.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    if is_nested_deeply(value) or not is_plain(value):
        return False
    return isinstance(value.get("arguments") or {}, dict)


def parse_hermes(text: str) -> Parsed:
    """Read tool calls in the Hermes format, which Qwen uses.

    A call is a block `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
    """
    text = re.sub(r"^\s*<think>.*?</think>", "", text, flags=re.DOTALL)
    calls: list[tuple[str, dict[str, Any]]] = []
    content, *blocks = text.split("<tool_call>")
    for block in blocks:
        body, closed, after = block.partition("</tool_call>")
        try:
            call = parse_json(body)
        except ValueError as error:
            return Parsed(content=text, malformed=f"not JSON: {getattr(error, 'msg', error)}")
        if not closed or after.strip():
            return Parsed(
                content=text, malformed="a call must be closed, and nothing may follow it"
            )
        if not is_call(call):
            return Parsed(content=text, malformed="a call needs a name and an object of arguments")
        calls.append((call["name"], call.get("arguments") or {}))
    if "</tool_call>" in content:
        return Parsed(content=text, malformed="</tool_call> without <tool_call>")
    return Parsed(content=content.strip(), calls=calls)
