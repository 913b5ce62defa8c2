"""OpenAI's POST /v1/responses. Nothing is stored, so each request has the whole conversation."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.rollout.address.chat_completions import error as error  # the same form
from pipeline.rollout.address.dialect import (
    Body,
    Event,
    Refusal,
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

PATH = "/responses"


def read(body: Body) -> Request:
    """See `dialect`."""
    if stored := given(body, "previous_response_id", "conversation", "prompt"):
        raise Refusal(400, f"got {stored[0]}, but nothing is stored; send the whole input")
    tools = [
        {key: value for key, value in tool.items() if key != "type" and value is not None}
        for tool in tools_of(body)
    ]
    form = {"text.format": (body.get("text") or {}).get("format")}
    return Request(
        messages=conversation(_messages_of(body)),
        tools=[{"type": "function", "function": tool} for tool in tools],
        body=body,
        max_tokens=body.get("max_output_tokens"),
        ignored=given(
            body | form, "temperature", "top_p", "reasoning", "tool_choice", "text.format"
        ),
    )


def _messages_of(body: Body) -> list[Body]:
    """Return the messages of the items of the input."""
    messages = list[Body]()
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    items = body.get("input") or []
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        kind = item.get("type") or "message"
        if kind == "message":
            content = text_of(item.get("content"))
            messages.append({"role": item["role"], "content": content})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = call_of(item["call_id"], item["name"], item["arguments"])
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = text_of(item["output"])
            result = {"role": "tool", "tool_call_id": item["call_id"], "content": content}
            messages.append(result)
        elif kind != "reasoning":
            raise Refusal(400, f"got an item of the type {kind}, which the policy does not read")
    return messages


def _items(answer: Answer, request: Request) -> list[Body]:
    text = answer.message["content"]
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    said = {"id": f"msg_{answer.key}", "type": "message", "role": "assistant", "content": [part]}
    calls = [
        {
            "id": f"fc_{answer.key}_{call_id}",
            "type": "function_call",
            "call_id": call_id,
            "name": name,
            "arguments": as_text(arguments),
        }
        for call_id, name, arguments in calls_of(answer, request)
    ]
    items = [said, *calls] if text or not calls else calls
    return [{**item, "status": "completed"} for item in items]


def whole(answers: Sequence[Answer], request: Request) -> Body:
    """See `dialect`."""
    body = request.body
    is_cut = answers[0].message["finish_reason"] == "length"
    prompt, completion = usage_of(answers)
    return {
        "id": f"resp_{answers[0].key}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(answers[0], request),
        "model": body.get("model") or "policy",
        "instructions": body.get("instructions"),
        "error": None,
        "metadata": body.get("metadata") or {},
        "temperature": 1.0,
        "top_p": 1.0,
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "text": body.get("text") or {"format": {"type": "text"}},
        "usage": {
            "input_tokens": prompt,
            "output_tokens": completion,
            "total_tokens": prompt + completion,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def events(answers: Sequence[Answer], request: Request) -> Iterator[Event]:
    """See `dialect`."""
    for number, (kind, fields) in enumerate(_events(answers, request)):
        yield kind, {"type": kind, "sequence_number": number, **fields}


def _events(answers: Sequence[Answer], request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    response = whole(answers, request)
    begun = {**response, "status": "in_progress", "incomplete_details": None, "output": []}
    begun["usage"] = None
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(response["output"]):
        added = {**item, "status": "in_progress"}
        added |= {"content": []} if item["type"] == "message" else {"arguments": ""}
        yield "response.output_item.added", {"output_index": index, "item": added}
        at: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            at["content_index"] = 0
            yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**at, "part": part}
        else:
            call = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
            yield "response.function_call_arguments.done", {**at, **call}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": response}
