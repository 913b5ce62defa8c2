"""OpenAI's POST /v1/chat/completions, with vLLM's `return_token_ids`."""

import time
from collections.abc import Iterator, Sequence

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

PATH = "/chat/completions"
SAMPLING = (  # of these, the policy has its own
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def read(body: Body) -> Request:
    """See `Dialect`."""
    if body.get("functions"):
        raise Refusal(400, "got functions, the old form; write tools")
    messages = [
        {
            **{k: v for k, v in message.items() if k in ("role", "name", "tool_call_id") and v},
            "content": text_of(message.get("content")),
            "tool_calls": [
                call_of(c.get("id"), c["function"]["name"], c["function"].get("arguments") or {})
                for c in message.get("tool_calls") or ()
            ],
        }
        for message in body["messages"]
    ]
    tools = [tool for tool in body.get("tools") or () if tool.get("type", "function") == "function"]
    if len(tools) < len(body.get("tools") or ()):
        raise Refusal(400, "got a tool that is no function; the policy calls functions alone")
    ignored = given(body, *SAMPLING)
    if body.get("tool_choice") not in (None, "auto"):
        ignored += given(body, "tool_choice")
    if (body.get("response_format") or {}).get("type", "text") != "text":
        ignored.append(f"response_format {body['response_format']['type']}")
    if body.get("parallel_tool_calls") is False:
        ignored += given(body, "parallel_tool_calls")
    stop = body.get("stop") or ()
    limits = [body.get(name) for name in ("max_tokens", "max_completion_tokens")]
    return Request(
        messages=conversation(messages),
        tools=tools,
        body=body,
        n=body.get("n") or 1,
        max_tokens=min((limit for limit in limits if limit), default=None),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignored=ignored,
    )


def _message(answer: Answer, request: Request) -> Body:
    calls = [call_of(i, name, as_text(args)) for i, name, args in calls_of(answer, request)]
    content = answer.message["content"]
    message = {"role": "assistant", "content": content if content or not calls else None}
    thoughts = answer.message.get("reasoning_content")
    message |= {"reasoning_content": thoughts} if thoughts else {}
    return {**message, "refusal": None, **({"tool_calls": calls} if calls else {})}


def _choice(index: int, answer: Answer, request: Request) -> Body:
    reason = answer.message["finish_reason"]
    if reason == "stop" and answer.message.get("tool_calls"):
        reason = "tool_calls"
    choice = {"index": index, "message": _message(answer, request), "finish_reason": reason}
    choice["logprobs"] = None
    if request.body.get("logprobs"):
        tokens = [
            {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
            for text, logprob in zip(answer.texts, answer.logprobs, strict=True)
        ]
        choice["logprobs"] = {"content": tokens, "refusal": None}
    if request.body.get("return_token_ids"):
        choice["token_ids"] = answer.ids
    return choice


def _head(answers: Sequence[Answer], request: Request, kind: str) -> Body:
    head = {"id": f"chatcmpl-{answers[0].key}", "object": kind, "created": int(time.time())}
    head["model"] = request.body.get("model") or "policy"
    return head | ({"prompt_token_ids": answers[0].prompt_ids} if _has_ids(request) else {})


def _has_ids(request: Request) -> bool:
    return bool(request.body.get("return_token_ids"))


def _usage(answers: Sequence[Answer]) -> Body:
    prompt, completion = usage_of(answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def whole(answers: Sequence[Answer], request: Request) -> Body:
    """See `Dialect`."""
    choices = [_choice(index, answer, request) for index, answer in enumerate(answers)]
    head = _head(answers, request, "chat.completion")
    return {**head, "choices": choices, "usage": _usage(answers)}


def events(answers: Sequence[Answer], request: Request) -> Iterator[Event]:
    """See `Dialect`."""
    head = _head(answers, request, "chat.completion.chunk")

    def chunk(index: int, delta: Body, reason: str | None = None, **more: object) -> Event:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return "", {**head, "choices": [{**choice, **more}]}

    for choice in (_choice(index, answer, request) for index, answer in enumerate(answers)):
        message = choice["message"]
        index = choice["index"]
        yield chunk(index, {"role": "assistant", "content": ""})
        if thoughts := message.get("reasoning_content"):
            yield chunk(index, {"reasoning_content": thoughts})
        if message["content"]:
            yield chunk(index, {"content": message["content"]}, logprobs=choice["logprobs"])
        for number, call in enumerate(message.get("tool_calls", ())):
            begun = {**call, "index": number, "function": {**call["function"], "arguments": ""}}
            yield chunk(index, {"tool_calls": [begun]})
            rest = {"arguments": call["function"]["arguments"]}
            yield chunk(index, {"tool_calls": [{"index": number, "function": rest}]})
        more = {"token_ids": choice["token_ids"]} if "token_ids" in choice else {}
        yield chunk(index, {}, choice["finish_reason"], **more)
    options = request.body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield "", {**head, "choices": [], "usage": _usage(answers)}
    yield "", "[DONE]"


def error(status: int, why: str, code: str) -> Body:
    """See `Dialect`."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": why, "type": kind, "param": None, "code": code}}
