"""Checks of a chat template at the start of a run, on conversations made for them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.chat.text import STUB, Parsed, Special
from pipeline.data.tasks import Message
from pipeline.errors import UserError

Render = Callable[..., str]  # of messages, and of options for `apply_chat_template`
ReadBack = Callable[[Message], Parsed | None]
Calls = list[tuple[str, dict[str, Any]]]


def _say(content: str, calls: Calls | None = None) -> Message:
    return Parsed(content=content, calls=calls or []).message()


def _tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": ""} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": "", "parameters": parameters}
    return {"type": "function", "function": function}


ASKED: Message = {"role": "user", "content": "-"}
STUB_TURN = [ASKED, _say(STUB)]

_REQUEST: Message = {"role": "user", "content": "a longer request"}
_POLICY: Message = {"role": "system", "content": "a policy"}
_ANSWER = _say("an answer")
_CALL = _say("", [("probe_tool", {"x": "y"})])
_RESULT: Message = {"role": "tool", "name": "probe_tool", "content": "probe_result"}
_LONG = [_POLICY, _REQUEST, *[_CALL, _RESULT, _CALL, _RESULT, _ANSWER, _REQUEST] * 6]
_HISTORIES: dict[str, list[Message]] = {
    "another request": [_REQUEST],
    "a system prompt": [_POLICY, ASKED],
    "an earlier turn": [ASKED, _ANSWER, _REQUEST],
    "an earlier tool result": [ASKED, _CALL, _RESULT],
    "many turns": _LONG,
}
_ANSWERS = {
    "an empty answer": _say(""),
    "a thought": _say("<think>\nhm\n</think>\n\nyes"),
    "a long answer": _say("A longer answer, of several lines.\n" * 20),
    "a tool call": _CALL,
    "a tool call with text": {**_CALL, "content": "One moment."},
}
_REPLIES: list[list[Message]] = [
    [{"role": "user", "content": "probe_reply"}],
    [_RESULT],
    [_RESULT, {**_RESULT, "content": "probe_second"}],
]
_THOUGHT, _ANSWERED = "probe_thought", "probe_answer"
_THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")

_ARGUMENTS: dict[str, tuple[str, Any]] = {  # of each type that tools take
    "text": ("string", "Anna B., seat 7"),
    "digits": ("string", "007"),
    "number": ("integer", 3),
    "half": ("number", 0.5),
    "flag": ("boolean", True),
    "items": ("array", ["a", {"n": 1}]),
    "nested": ("object", {"a": {"b": ["c"]}}),
}
_VALUES = {name: value for name, (_, value) in _ARGUMENTS.items()}
_TYPES = {name: kind for name, (kind, _) in _ARGUMENTS.items()}
CALLED = [_tool("probe_tool", **_TYPES), _tool("probe_other", **_TYPES)]
_CALLS: dict[str, tuple[str, Calls]] = {  # the text before the calls, and the calls
    "one with arguments": ("", [("probe_tool", _VALUES)]),
    "one without arguments": ("", [("probe_tool", {})]),
    "one after text": ("One moment.", [("probe_tool", _VALUES)]),
    "two at once": ("", [("probe_tool", _VALUES), ("probe_other", {"text": "b"})]),
}
_RARE_CALLS: dict[str, tuple[str, Calls]] = {  # a format that cannot hold them is still useful
    "quotes": ("", [("probe_tool", {"text": 'it\'s "so"'})]),
    "line breaks": ("", [("probe_tool", {"text": "one\n\ntwo"})]),
}


def end_of_turn_of(render: Render, special: Special) -> str:
    """The special token that closes an assistant message."""
    text = render(STUB_TURN)
    token = special.tokens.search(text, text.rindex(STUB) if STUB in text else len(text))
    if not token:
        raise UserError(
            "model: its chat template does not close an assistant message with a special token"
        )
    return token.group()


def check_deltas(render: Render, after_stub: Callable[[str], str]) -> None:
    """UserError where a template hides tools, or a reply's text depends on earlier messages."""
    offered = render([ASKED], tools=[_tool("probe_tool")])
    answered = render([ASKED, _ANSWER, _RESULT])
    if "probe_tool" not in offered or "probe_result" not in answered:
        raise UserError(
            "model: its chat template ignores tools or their results; use a model whose "
            "template renders them"
        )
    for replies in _REPLIES:
        delta = after_stub(render([*STUB_TURN, *replies], add_generation_prompt=True))
        if STUB in delta or not all(reply["content"] in delta for reply in replies):
            raise _refusal("another answer")
        for what, options, messages in _conversations(replies):
            if not render(messages, add_generation_prompt=True, **options).endswith(delta):
                raise _refusal(what)


def _conversations(
    replies: list[Message],
) -> Iterator[tuple[str, dict[str, Any], list[Message]]]:
    """Conversations that end in `replies`: how each differs from the stub, options, messages."""
    to_user = replies[0]["role"] == "user"
    for options in ({}, {"tools": [_tool("probe_tool")]}):
        if options:
            yield "tools", options, [ASKED, _ANSWER, *replies]
        for what, history in _HISTORIES.items():
            yield what, options, [*history, _ANSWER, *replies]
        for what, answer in _ANSWERS.items():
            if not (to_user and answer.get("tool_calls")):
                yield what, options, [ASKED, answer, *replies]
                yield f"{what} after many turns", options, [*_LONG, answer, *replies]


def _refusal(what: str) -> UserError:
    return UserError(
        f"model: its chat template renders a reply differently after other conversations ({what}), "
        "so sampled tokens could not be kept; use another template"
    )


def renders_calls(render: Render) -> bool:
    """Whether a template writes the calls of an assistant message."""
    return "probe_tool" in render([ASKED, _CALL])


def check_calls(read_back: ReadBack, has_reader: bool, is_hermes: bool) -> None:
    """UserError where calls that the template writes are read back as other calls.

    `read_back` returns None for a message that the template does not write, such as two calls in
    one.
    """
    if unread := next(_unread(read_back, _CALLS), None):
        remedy = "set tokenizer.response_template to one that reads them, or use another template"
        if has_reader:
            remedy = f"set tool_call_format: hermes if it reads them, {remedy}"
        if is_hermes:
            remedy = "leave tool_call_format at auto, or use another template"
        raise UserError(
            "model: its chat template writes tool calls that are not read back "
            f"{'by its response template' if has_reader else 'as Hermes'} ({unread}), so none "
            f"would work; {remedy}"
        )
    if lost := [problem.partition(":")[0] for problem in _unread(read_back, _RARE_CALLS)]:
        warn_once(
            f"the chat template's tool calls cannot hold {' or '.join(lost)} in arguments: "
            "where a model writes them, a tool is given something else"
        )


def _unread(read_back: ReadBack, cases: dict[str, tuple[str, Calls]]) -> Iterator[str]:
    """The calls that are not read back as they were written, and why."""
    for what, (content, calls) in cases.items():
        parsed = read_back(_say(content, calls))
        if parsed is not None and parsed.calls != calls:
            yield f"{what}: {parsed.malformed or _difference(parsed.calls, calls)}"


def _difference(read: Calls, written: Calls) -> str:
    if [name for name, _ in read] != [name for name, _ in written]:
        return f"{len(read)} found of {len(written)}"
    a, b = next((a, b) for (_, a), (_, b) in zip(read, written, strict=True) if a != b)
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return f"other arguments: {', '.join(names)}"


def warn_of_lost_thoughts(render: Render, opening: str) -> None:
    """Warn where a thought vanishes after a later request, and thinking is not off.

    Thinking is off if the generation prompt closes a thought.
    """
    generation_prompt = opening.removeprefix(render([ASKED]))
    tagged = _say(f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWERED}")
    in_fields = [{**_say(_ANSWERED), key: _THOUGHT} for key in _THOUGHT_KEYS]
    for answer in (tagged, *in_fields):
        text, later = render([ASKED, answer]), render([ASKED, answer, ASKED])
        closing = "</think>" if answer is tagged else ""
        if _THOUGHT in text:
            closing = text.partition(_THOUGHT)[2].partition(_ANSWERED)[0].strip()
        if _THOUGHT not in later and closing and closing not in generation_prompt:
            warn_once(
                "the chat template drops earlier thoughts: a server that renders each conversation "
                "anew will drop them, while training keeps them; set chat_template_kwargs: "
                "{enable_thinking: false}, or serve with token-level history"
            )
            return


def warn_once(text: str) -> None:
    """Warn on the first rank alone."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(text, stacklevel=4)
