"""What the APIs of the address share: how a request is read, and what an answer needs.

Each API is a module with `PATH`; `read`, which makes a Request of a body, and raises Refusal, or
any exception of a body that is not of the API; `whole`, which makes the body of the reply;
`events`, the same in parts, for a stream; and `error`, the body of a refusal.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any

from pipeline.common.untrusted import shown
from pipeline.data.rows import with_usual_messages
from pipeline.data.tasks import Message
from pipeline.rollout.asked import Answer

MAX_N = 128  # most answers to a request
TEXTS = ("text", "input_text", "output_text", "refusal")  # types of parts that are text
USUAL = ("null", "true", '"auto"', '"text"')  # values with which nothing is asked for
Body = dict[str, Any]
Event = tuple[str, Body | str]  # the event's name, which may be empty, and its data


class Refusal(Exception):
    """What a client gets in place of a message; `code` is of OpenAI's kind."""

    def __init__(self, status: int, why: str, code: str = "invalid_request") -> None:
        super().__init__(why)
        self.status = status
        self.code = code


@dataclass(kw_only=True)
class Request:
    """A request for a message, whatever its API."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    body: Body
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignored: list[str] = field(default_factory=list)  # what it asks for in vain

    def __post_init__(self) -> None:
        for name, most in (("n", MAX_N), ("max_tokens", math.inf)):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and 1 <= value <= most):
                raise Refusal(400, f"got {name} {shown(value)}; give a whole number from 1 on")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise Refusal(400, f"got stop {shown(self.stop)}; give texts")


def text_of(content: Any) -> str:
    """Return the text of a content, which may have parts. Raises Refusal for an image."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [content] if isinstance(content, dict) else content
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    if other := next((part for part in parts if part["type"] not in TEXTS), None):
        kind = shown(other["type"])
        raise Refusal(400, f"got a part of the type {kind}, but the policy reads text alone")
    return "".join(part.get("text") or part.get("refusal") or "" for part in parts)


def tools_of(body: Body, kind: str = "function") -> list[Body]:
    """Return the tools of a request. Raises Refusal for those that a server would run itself."""
    tools = body.get("tools") or []
    if other := next((tool for tool in tools if tool.get("type", kind) != kind), None):
        why = f"got a tool of the type {shown(other['type'])}; the policy calls functions alone"
        raise Refusal(400, why)
    return list(tools)


def conversation(messages: Sequence[Message]) -> list[Message]:
    """Return messages in the usual form, without ids; results have the names of their calls.

    They are put in the order of the calls, as programs may report them in any order.
    """
    calls = dict[str, tuple[int, str]]()  # place and name of a call, by its id
    talk = list[Message]()
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        some = list(group)
        if is_result:
            some.sort(key=lambda m: calls.get(m.get("tool_call_id", ""), (len(calls), ""))[0])
        for message in some:
            made = message.get("tool_calls") or []
            calls |= {call["id"]: (n, call["function"]["name"]) for n, call in enumerate(made)}
            _, name = calls.get(message.get("tool_call_id", ""), (0, ""))
            kept = {
                "role": message["role"],
                "content": message.get("content") or "",
                "name": message.get("name") or name,
                "tool_calls": [{"type": "function", "function": c["function"]} for c in made],
            }
            talk.append({k: v for k, v in kept.items() if v or k == "content"})
    usual = with_usual_messages(talk)
    if usual and usual[-1]["role"] == "assistant":
        raise Refusal(400, "got a last message of the assistant; the policy begins its own")
    return list(usual)


def call_of(call_id: Any, name: str, arguments: Any) -> Body:
    """Return a call, whose arguments may be JSON text."""
    return {
        "id": str(call_id or ""),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def calls_of(answer: Answer, request: Request) -> list[tuple[str, str, Body]]:
    """Return the id, the name and the arguments of each call of an answer.

    An id depends on the request alone, because agents write ids into their prompts. It is new in
    the request, also if the agent shows only the latest messages.
    """
    functions = [call["function"] for call in answer.message.get("tool_calls") or ()]
    text = json.dumps(request.body) if functions else ""
    turn = next(n for n in count(len(request.messages)) if f"call_{n}_" not in text)
    return [
        (f"call_{turn}_{number}", function["name"], function["arguments"])
        for number, function in enumerate(functions)
    ]


def as_text(arguments: Body) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def given(body: Body, *names: str) -> list[str]:
    """Return the fields of a request that change what is sampled, with their values."""
    values = [(name, body.get(name)) for name in names]
    kinds = [(name, v.get("type", v) if isinstance(v, dict) else v) for name, v in values]
    return [f"{name} {shown(kind)}" for name, kind in kinds if json.dumps(kind) not in USUAL]


def usage_of(answers: Sequence[Answer]) -> tuple[int, int]:
    """Return the number of tokens of the prompt, and of all answers."""
    return len(answers[0].prompt_ids), sum(len(answer.ids) for answer in answers)
