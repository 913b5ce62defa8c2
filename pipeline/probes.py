"""Conversations that a chat template is tried with, once, at the start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.special_text import STUB
from pipeline.tasks import Message

ASKED: Message = {"role": "user", "content": "-"}
STUB_TURN: list[Message] = [ASKED, {"role": "assistant", "content": STUB}]
ANSWER: Message = {"role": "assistant", "content": "an answer"}
FUNCTION = {"name": "probe_tool", "arguments": {"x": "y"}}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": FUNCTION}],
}
RESULT: Message = {"role": "tool", "name": "probe_tool", "content": "probe_result"}
TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
POLICY: Message = {"role": "system", "content": "a policy"}
REQUEST: Message = {"role": "user", "content": "a longer request"}
LONG = [POLICY, REQUEST, *[CALL, RESULT, CALL, RESULT, ANSWER, REQUEST] * 6]
HISTORIES: dict[str, list[Message]] = {
    "another request": [REQUEST],
    "a system prompt": [POLICY, ASKED],
    "an earlier turn": [ASKED, ANSWER, REQUEST],
    "an earlier tool result": [ASKED, CALL, RESULT],
    "many turns": LONG,
}
SAID: dict[str, dict[str, Any]] = {
    "an empty answer": {"content": ""},
    "a thought": {"content": "<think>\nhm\n</think>\n\nyes"},
    "a long answer": {"content": "A longer answer, of several lines.\n" * 20},
    "a tool call": CALL,
    "a tool call with text": {**CALL, "content": "One moment."},
}
REPLIES: list[list[Message]] = [
    [{"role": "user", "content": "probe_reply"}],
    [RESULT],
    [RESULT, {**RESULT, "content": "probe_second"}],
]


def conversations(
    replies: list[Message],
) -> Iterator[tuple[str, dict[str, Any], list[Message]]]:
    """Conversations that end in `replies`, and in what each differs from the stub's."""
    calls = replies[0]["role"] == "tool"
    said = {what: {"role": "assistant", **message} for what, message in SAID.items()}
    for options in ({}, {"tools": [TOOL]}):
        if options:
            yield "tools", options, [ASKED, ANSWER, *replies]
        for what, history in HISTORIES.items():
            yield what, options, [*history, ANSWER, *replies]
        for what, message in said.items():
            if calls or "tool_calls" not in message:
                yield what, options, [ASKED, message, *replies]
                yield f"{what} after many turns", options, [*LONG, message, *replies]
