"""Conversations that a chat template is tried with, once, at the start."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.chat.text import STUB, Parsed
from pipeline.data.tasks import Message

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

# Arguments of every kind that tools take; the second is text all the same.
ARGUMENTS: dict[str, Any] = {
    "text": "Anna B., seat 7",
    "digits": "007",
    "number": 3,
    "half": 0.5,
    "flag": True,
    "items": ["a", {"n": 1}],
    "nested": {"a": {"b": ["c"]}},
}
# Texts that some formats of calls cannot hold, though they are of use without them.
RARE_TEXTS = {"quotes": 'it\'s "so"', "line breaks": "one\n\ntwo"}
_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}
_PROPERTIES = {
    name: {"type": _KINDS.get(type(value), "object"), "description": ""}
    for name, value in ARGUMENTS.items()
}
CALLED = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": _PROPERTIES},
        },
    }
    for name in ("probe_tool", "probe_other")
]
Calls = list[tuple[str, dict[str, Any]]]
CALLS: dict[str, tuple[str, Calls]] = {  # what is said with them, and the calls
    "one with arguments": ("", [("probe_tool", ARGUMENTS)]),
    "one without arguments": ("", [("probe_tool", {})]),
    "one after text": ("One moment.", [("probe_tool", ARGUMENTS)]),
    "two at once": ("", [("probe_tool", ARGUMENTS), ("probe_other", {"text": "b"})]),
}


def unread_call(read_back: Callable[[Message], Parsed | None]) -> str:
    """Which call is not read back as it was said, and why; empty where all are.

    `read_back` returns None for a message that the template does not write, as two calls in one.
    """
    for what, (said, calls) in CALLS.items():
        parsed = read_back(Parsed(content=said, calls=calls).message())
        if parsed is not None and parsed.calls != calls:
            return f"{what}: {parsed.malformed or _difference(parsed.calls, calls)}"
    return ""


def _difference(found: Calls, said: Calls) -> str:
    if [name for name, _ in found] != [name for name, _ in said]:
        return f"{len(found)} found of {len(said)}"
    read, meant = next((a, b) for (_, a), (_, b) in zip(found, said, strict=True) if a != b)
    other = [name for name in {**read, **meant} if read.get(name) != meant.get(name)]
    return f"other arguments: {', '.join(other)}"


def lost_arguments(read_back: Callable[[Message], Parsed | None]) -> list[str]:
    """What the arguments of a call cannot hold."""
    lost = []
    for what, text in RARE_TEXTS.items():
        calls = [("probe_tool", {"text": text})]
        parsed = read_back(Parsed(content="", calls=calls).message())
        if parsed is not None and parsed.calls != calls:
            lost.append(what)
    return lost


def in_hermes(message: Message) -> str:
    """A message as the Hermes format writes it."""
    functions = [json.dumps(call["function"]) for call in message["tool_calls"]]
    blocks = [f"<tool_call>\n{function}\n</tool_call>" for function in functions]
    return "\n".join([message["content"], *blocks])


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
