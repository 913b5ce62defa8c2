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
    usage_of,
)
from pipeline.rollout.asked import Answer

PATH = "/responses"
PARTS = ("input_text", "output_text", "text", "refusal")


def read(body: Body) -> Request:
    """See `Dialect`."""
    if stored := given(body, "previous_response_id", "conversation", "prompt"):
        raise Refusal(400, f"got {stored[0]}, but nothing is stored; send the whole input")
    if other := [tool for tool in body.get("tools") or () if tool["type"] != "function"]:
        raise Refusal(400, f"got a tool of the type {other[0]['type']}; the policy has only yours")
    functions = [
        {key: value for key, value in tool.items() if key != "type" and value is not None}
        for tool in body.get("tools") or ()
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    ignored = given(body, "temperature", "top_p", "reasoning")
    if body.get("tool_choice") not in (None, "auto"):
        ignored += given(body, "tool_choice")
    form = (body.get("text") or {}).get("format") or {}
    if form.get("type", "text") != "text":
        ignored.append(f"text.format {form['type']}")
    return Request(
        messages=conversation(_messages_of(body)),
        tools=tools,
        body=body,
        max_tokens=body.get("max_output_tokens"),
        ignored=ignored,
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
            content = text_of(item.get("content"), PARTS)
            messages.append({"role": item["role"], "content": content})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = call_of(item["call_id"], item["name"], item["arguments"])
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = text_of(item["output"], PARTS)
            result = {"role": "tool", "tool_call_id": item["call_id"], "content": content}
            messages.append(result)
        elif kind != "reasoning":
            raise Refusal(400, f"got an item of the type {kind}, which the policy does not read")
    return messages


def _items(answer: Answer, request: Request) -> list[Body]:
    calls = calls_of(answer, request)
    text = answer.message["content"]
    items = list[Body]()
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        item = {"id": f"msg_{answer.key}", "type": "message", "role": "assistant"}
        items.append({**item, "status": "completed", "content": [part]})
    for call_id, name, arguments in calls:
        item = {"id": f"fc_{answer.key}_{call_id}", "type": "function_call", "call_id": call_id}
        item |= {"name": name, "arguments": as_text(arguments), "status": "completed"}
        items.append(item)
    return items


def _response(answer: Answer, request: Request, status: str) -> Body:
    """Return a response without its output."""
    body = request.body
    return {
        **{"id": f"resp_{answer.key}", "object": "response", "created_at": int(time.time())},
        **{"status": status, "model": body.get("model") or "policy", "output": []},
        **{"error": None, "incomplete_details": None, "instructions": body.get("instructions")},
        **{"metadata": body.get("metadata") or {}, "temperature": 1.0, "top_p": 1.0},
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "text": body.get("text") or {"format": {"type": "text"}},
    }


def whole(answers: Sequence[Answer], request: Request) -> Body:
    """See `Dialect`."""
    is_cut = answers[0].message["finish_reason"] == "length"
    response = _response(answers[0], request, "incomplete" if is_cut else "completed")
    response["output"] = _items(answers[0], request)
    if is_cut:
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    prompt, completion = usage_of(answers)
    response["usage"] = {
        "input_tokens": prompt,
        "output_tokens": completion,
        "total_tokens": prompt + completion,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return response


def events(answers: Sequence[Answer], request: Request) -> Iterator[Event]:
    """See `Dialect`."""
    for number, (kind, fields) in enumerate(_events(answers, request)):
        yield kind, {"type": kind, "sequence_number": number, **fields}


def _events(answers: Sequence[Answer], request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = _response(answers[0], request, "in_progress")
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    response = whole(answers, request)
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
