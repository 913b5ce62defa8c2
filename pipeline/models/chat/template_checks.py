"""Checks of a chat template on test conversations, at the start of a run."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.data.tasks import Message
from pipeline.models.chat.text import END_OF_THOUGHT, STUB, THINK, Parsed, Special

Render = Callable[..., str]  # a function with the arguments of `apply_chat_template`
ReadBack = Callable[[Message], Parsed | None]  # returns None if the template cannot write a message


def template_error(fault: str, remedy: str = "give another --chat-template") -> UserError:
    return UserError(f"model: its chat template {fault}; {remedy}")


def _say(content: str, *calls: tuple[str, dict[str, Any]]) -> Message:
    return Parsed(content=content, calls=list(calls)).message()


def _tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": ""} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": "", "parameters": parameters}
    return {"type": "function", "function": function}


_WORD = re.compile(r"probE\d+_\d+")  # which no change of case leaves alone
MIN_WORDS = 400  # of a test message, so that a template that shortens texts is found
MAX_WORDS = 50_000
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")  # in the text of a Python object
_RANDOM = re.compile(r"\|\s*random\b|['\"]random['\"]|\blipsum\b")


def _text(number: int, count: int = MIN_WORDS) -> str:
    """Return a text of `count` words with spaces, line breaks and blank lines between them."""
    return " \n\n".join(f"probE{number}_{n}" for n in range(count))


ASKED: Message = {"role": "user", "content": "-"}
PROBE_TOOLS = [_tool("probe_tool")]
STUB_TURN = [ASKED, _say(STUB)]

_REQUEST: Message = {"role": "user", "content": "a longer request"}
_POLICY: Message = {"role": "system", "content": "a policy"}
_ANSWER = _say("an answer")
CALL = _say("", ("probe_tool", {"x": "y"}))
RESULT: Message = {"role": "tool", "name": "probe_tool", "content": "probe_result"}
_LONG = [_POLICY, _REQUEST, *[CALL, RESULT, CALL, RESULT, _ANSWER, _REQUEST] * 6]
_ANSWERS = {
    "an empty answer": _say(""),
    "a thought": _say("<think>\nhm\n</think>\n\nyes"),
    "a long answer": _say("A longer answer, of several lines.\n" * 20),
    "a tool call": CALL,
    "a tool call with text": {**CALL, "content": "One moment."},
}
# A template must render a reply as the same text after every conversation of this table.
_CONVERSATIONS: dict[str, list[Message]] = {
    "another answer": [ASKED, _ANSWER],
    "another request": [_REQUEST, _ANSWER],
    "a system prompt": [_POLICY, ASKED, _ANSWER],
    "an earlier turn": [ASKED, _ANSWER, _REQUEST, _ANSWER],
    "an earlier tool result": [ASKED, CALL, RESULT, _ANSWER],
    "many turns": [*_LONG, _ANSWER],
    **{what: [ASKED, answer] for what, answer in _ANSWERS.items()},
    **{f"{what} after many turns": [*_LONG, answer] for what, answer in _ANSWERS.items()},
}
_TALK = [_POLICY, ASKED, _REQUEST, _ANSWER]  # messages of domains without tools
_REPLIES: list[list[Message]] = [
    [{"role": "user", "content": _text(0)}],
    [{**RESULT, "content": _text(0)}],
    [{**RESULT, "content": _text(number)} for number in range(2)],
]
_THOUGHT = "probe_thought"
_ANSWERED = "probe_answer"

_ARGUMENTS: dict[str, tuple[str, Any]] = {  # each argument's name, JSON type and value
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
_CALLS = {
    "one with arguments": _say("", ("probe_tool", _VALUES)),
    "one without arguments": _say("", ("probe_tool", {})),
    "one after text": _say("One moment.", ("probe_tool", _VALUES)),
    "two at once": _say("", ("probe_tool", _VALUES), ("probe_other", {"text": "b"})),
}
_RARE_CALLS = {  # If a template cannot write a call of this table, the run only warns.
    "quotes": _say("", ("probe_tool", {"text": 'it\'s "so"'})),
    "line breaks": _say("", ("probe_tool", {"text": "one\n\ntwo"})),
}


def end_of_turn_of(render: Render, special: Special, default: str) -> str:
    """Return the special token that closes an assistant message, or else `default`.

    Raises UserError if there is neither.
    """
    text = render(STUB_TURN)
    token = special.tokens.search(text, text.rindex(STUB) if STUB in text else len(text))
    if not token and not default:
        raise template_error(
            "does not close an assistant message with a special token", "give --chat-template plain"
        )
    return token.group() if token else default


def check_deltas(render: Render, after_stub: Callable[[str], str], has_tools: bool) -> None:
    """Raise UserError if earlier messages alter a reply's text; `has_tools`: also a result's."""
    conversations = {
        what: talk
        for what, talk in _CONVERSATIONS.items()
        if has_tools or all(message in _TALK for message in talk)
    }
    for replies in _REPLIES if has_tools else _REPLIES[:1]:
        delta = after_stub(render([*STUB_TURN, *replies], add_generation_prompt=True))
        is_whole = _WORD.findall(delta) == [w for r in replies for w in r["content"].split()]
        offers = (None, PROBE_TOOLS) if has_tools else (None,)
        for tools, (what, before) in product(offers, conversations.items()):
            if replies[0]["role"] == "user" and "tool_calls" in before[-1]:
                continue
            text = render([*before, *replies], tools=tools, add_generation_prompt=True)
            if not (is_whole and text.endswith(delta)):
                what = "tools" if tools and what == "another answer" else what
                raise template_error(
                    f"renders a reply differently after other conversations ({what})",
                    "give --tool-call-format text, or another --chat-template",
                )


def refuse_random(template: str) -> None:
    """Raise UserError if a template draws at random."""
    if found := _RANDOM.search(template):
        raise template_error(
            f"draws at random ({found.group().strip('| ')}), so that a prompt is never the same"
        )


def talks(has_tools: bool, has_replies: bool) -> list[list[Message]]:
    """Return conversations of messages that domains have, some longer than those of a run."""
    turns = [CALL, RESULT, CALL, RESULT, _ANSWER, _REQUEST] if has_tools else [_ANSWER, _REQUEST]
    long = [_POLICY, _REQUEST, *turns * 25]
    return [[_REQUEST], *([long, long[1:]] if has_tools or has_replies else [])]


def check_shown(render: Render, messages: Sequence[Message], **options: Any) -> dict[str, str]:
    """Return which roles' texts a template leaves out, as {role: "all" or "a part"}.

    The texts of `messages` are replaced by test texts of at least their lengths. Raises UserError
    if a part of a user's text or of a tool result is left out, if messages or their words stand in
    another order, or if the same messages are rendered in different ways.
    """
    talk = [dict(message) for message in messages]
    texts = dict[int, list[str]]()
    for number, message in enumerate(talk):
        if isinstance(text := message["content"], str) and text:
            least = MIN_WORDS // len(talk) + 4
            message["content"] = _text(number, max(least, min(len(text) // 8, MAX_WORDS)))
            texts[number] = message["content"].split()
    options["add_generation_prompt"] = True
    text = render(talk, **options)
    seen = dict.fromkeys(_WORD.findall(text))
    shown = {n: sum(word in seen for word in words) for n, words in texts.items()}
    left_out = dict[str, str]()
    for role in ("user", "tool", "assistant", "system"):
        of = [n for n in texts if talk[n]["role"] == role]
        if any(shown[n] < len(texts[n]) for n in of):
            left_out[role] = "a part" if any(shown[n] for n in of) else "all"
    for role, what in (("tool", "tool results"), ("user", "the user's messages")):
        if role in left_out:
            raise template_error(f"leaves {left_out[role]} of {what} out")
    turns = [words for n, words in texts.items() if talk[n]["role"] != "system"]
    order = dict.fromkeys(word for words in turns for word in words if word in seen)
    if [word for word in seen if word in order] != [*order]:
        raise template_error("writes messages or words in another order")
    if text != render(talk, **options) or _ADDRESS.search(text):
        raise template_error("renders one conversation in different ways")
    return left_out


def check_calls(read_back: ReadBack, has_reader: bool, tool_call_format: str) -> None:
    """Raise UserError if the template writes tool calls that are parsed as different calls."""
    if unread := next(_unread(read_back, _CALLS), None):
        reader = "as Hermes"
        remedy = "leave tool_call_format at auto"
        if tool_call_format == "auto":
            remedy = "set tokenizer.response_template to one that reads them"
        if has_reader:
            reader = "by its response template"
            remedy = f"set tool_call_format: hermes if it reads them, {remedy}"
        raise template_error(
            f"writes tool calls that are not read back {reader} ({unread})",
            f"{remedy}, or give --tool-call-format text, or another --chat-template",
        )
    if lost := [problem.partition(":")[0] for problem in _unread(read_back, _RARE_CALLS)]:
        warn_once(
            f"the chat template's tool calls cannot hold {' or '.join(lost)} in arguments: "
            "a tool gets other text than the model writes"
        )


def _unread(read_back: ReadBack, messages: dict[str, Message]) -> Iterator[str]:
    for what, message in messages.items():
        parsed = read_back(message)
        calls = message["tool_calls"]
        if parsed is not None and (read := parsed.message().get("tool_calls", [])) != calls:
            found = sum(call in read for call in calls)
            yield f"{what}: {parsed.malformed or f'{found} found of {len(calls)}'}"


def with_test_thought(message: Message) -> Message:
    """Return a message of the model with another thought, if it has one: beside or in its text."""
    text = message["content"]
    if "reasoning_content" in message:
        return {**message, "reasoning_content": _THOUGHT}
    if message["role"] == "assistant" and END_OF_THOUGHT in text:
        answer = text.partition(END_OF_THOUGHT)[2]
        return {**message, "content": f"{THINK}\n{_THOUGHT}\n{END_OF_THOUGHT}{answer}"}
    return message


def drops_thoughts(render: Render, opening: str) -> bool:
    """Return whether the template drops thoughts when a user speaks, unless thinking is off."""
    generation_prompt = opening.removeprefix(render([ASKED]))
    for thinking in ({"content": f"{END_OF_THOUGHT}\n\n{_ANSWERED}"}, {"reasoning_content": ""}):
        answer = with_test_thought({**_say(_ANSWERED), **thinking})
        text = render([ASKED, answer])
        closing = END_OF_THOUGHT if "content" in thinking else ""
        if _THOUGHT in text:
            closing = text.partition(_THOUGHT)[2].partition(_ANSWERED)[0].strip()
        is_lost = loses_thought(render, [ASKED, answer, ASKED], 0)
        if is_lost and closing and closing not in generation_prompt:
            return True
    return False


def loses_thought(render: Render, messages: Sequence[Message], first: int, **options: Any) -> bool:
    """Return whether the template leaves out a thought of the model in `messages[first:]`."""
    talk = [*messages[:first], *map(with_test_thought, messages[first:])]
    wanted = str(talk).count(_THOUGHT)
    return wanted > 0 and render(talk, **options).count(_THOUGHT) < wanted


def history_note(render: Render, opening: str, forgets: bool) -> str:
    """Return what later prompts lack of earlier messages, or "" for an append-only template."""
    is_kept = render([ASKED, _say(_ANSWERED), ASKED]).startswith(opening)
    if forgets:
        return (
            "chat template: it drops thoughts of earlier turns, as a server will; where it does, "
            "the conversation goes on as the template renders it, in a new sequence of the episode"
        )
    if not is_kept:
        return (
            "chat template: what it writes before an answer is left out of earlier turns; a server "
            "will leave it out, while training keeps it"
        )
    return ""


def warn_once(text: str) -> None:
    """Show a warning on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        say(f"warning: {text}")
