"""Anthropic's POST /v1/messages."""

from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.rollout.address.dialect import (
    Body,
    Event,
    Request,
    as_text,
    call_of,
    calls_of,
    conversation,
    given,
    text_of,
    tools_of,
    usage_of,
)
from pipeline.rollout.asked import Answer

PATH = "/messages"
THOUGHTS = ("thinking", "redacted_thinking")
ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def read(body: Body) -> Request:
    """See `dialect`."""
    messages = list[dict[str, Any]]()
    if system := text_of(body.get("system")):
        messages.append({"role": "system", "content": system})
    for message in body["messages"]:
        messages += _messages_of(message)
    tools = [
        {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": tool["input_schema"],
        }
        for tool in tools_of(body, "custom")
    ]
    return Request(
        messages=conversation(messages),
        tools=[{"type": "function", "function": tool} for tool in tools],
        body=body,
        max_tokens=body.get("max_tokens"),
        stop=tuple(body.get("stop_sequences") or ()),
        ignored=given(body, "temperature", "top_p", "top_k", "thinking", "tool_choice"),
    )


def _messages_of(message: Body) -> list[Body]:
    """Return the messages that a message of blocks holds: results of tools, then the rest."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    results = [
        {
            "role": "tool",
            "tool_call_id": block["tool_use_id"],
            "content": text_of(block.get("content")),
        }
        for block in blocks
        if block["type"] == "tool_result"
    ]
    calls = [
        call_of(block["id"], block["name"], block["input"])
        for block in blocks
        if block["type"] == "tool_use"
    ]
    apart = ("tool_result", "tool_use", *THOUGHTS)
    rest = [block for block in blocks if block["type"] not in apart]
    if results and not rest:
        return results
    return [*results, {"role": message["role"], "content": text_of(rest), "tool_calls": calls}]


def whole(answers: Sequence[Answer], request: Request) -> Body:
    """See `dialect`."""
    message = answers[0].message
    calls = calls_of(answers[0], request)
    texts = [message["content"]] if message["content"] or not calls else []
    content = [{"type": "text", "text": text} for text in texts]
    content += [
        {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
        for call_id, name, arguments in calls
    ]
    reason = "tool_use" if calls else "end_turn"
    prompt, completion = usage_of(answers)
    return {
        "id": f"msg_{answers[0].key}",
        "type": "message",
        "role": "assistant",
        "model": request.body.get("model") or "policy",
        "content": content,
        "stop_reason": "max_tokens" if message["finish_reason"] == "length" else reason,
        "stop_sequence": None,
        "usage": {"input_tokens": prompt, "output_tokens": completion},
    }


def events(answers: Sequence[Answer], request: Request) -> Iterator[Event]:
    """See `dialect`."""

    def event(kind: str, **fields: Any) -> Event:
        return kind, {"type": kind, **fields}

    message = whole(answers, request)
    usage = {**message["usage"], "output_tokens": 0}
    begun = {**message, "content": [], "stop_reason": None, "usage": usage}
    yield event("message_start", message=begun)
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": as_text(block["input"])}
        yield event("content_block_start", index=index, content_block=empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    delta = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=delta, usage=message["usage"])
    yield event("message_stop")


def error(status: int, why: str, code: str) -> Body:
    """See `dialect`."""
    kind = ERRORS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": f"{why} ({code})"}}
