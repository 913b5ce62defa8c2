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
    tools_of,
    usage_of,
)
from pipeline.rollout.asked import Answer

PATH = "/chat/completions"
SAMPLING = (  # of these, the policy has its own
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def read(body: Body) -> Request:
    """See `dialect`."""
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
    stop = body.get("stop") or ()
    limits = [body.get(name) for name in ("max_tokens", "max_completion_tokens")]
    return Request(
        messages=conversation(messages),
        tools=tools_of(body),
        body=body,
        n=body.get("n") or 1,
        max_tokens=min((limit for limit in limits if limit), default=None),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignored=given(body, *SAMPLING, "tool_choice", "response_format", "parallel_tool_calls"),
    )


def _choice(index: int, answer: Answer, request: Request) -> Body:
    said = answer.message
    calls = [call_of(i, name, as_text(args)) for i, name, args in calls_of(answer, request)]
    message = {"role": "assistant", "content": said["content"] or (None if calls else "")}
    message |= {"refusal": None, **({"tool_calls": calls} if calls else {})}
    if thoughts := said.get("reasoning_content"):
        message["reasoning_content"] = thoughts
    reason = "tool_calls" if calls and said["finish_reason"] == "stop" else said["finish_reason"]
    choice: Body = {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
    if request.body.get("logprobs"):
        tokens = [
            {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
            for text, logprob in zip(answer.texts, answer.logprobs, strict=True)
        ]
        choice["logprobs"] = {"content": tokens, "refusal": None}
    if request.body.get("return_token_ids"):
        choice["token_ids"] = answer.ids
    return choice


def whole(answers: Sequence[Answer], request: Request) -> Body:
    """See `dialect`."""
    prompt, completion = usage_of(answers)
    has_ids = request.body.get("return_token_ids")
    return {
        "id": f"chatcmpl-{answers[0].key}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.body.get("model") or "policy",
        "choices": [_choice(index, answer, request) for index, answer in enumerate(answers)],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
        **({"prompt_token_ids": answers[0].prompt_ids} if has_ids else {}),
    }


def events(answers: Sequence[Answer], request: Request) -> Iterator[Event]:
    """See `dialect`."""
    head: Body = {**whole(answers, request), "object": "chat.completion.chunk"}
    choices = head.pop("choices")
    usage = head.pop("usage")

    def chunk(index: int, delta: Body, reason: str | None = None, **more: object) -> Event:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return "", {**head, "choices": [{**choice, **more}]}

    for choice in choices:
        message = choice["message"]
        index = choice["index"]
        yield chunk(index, {"role": "assistant", "content": ""})
        if thoughts := message.get("reasoning_content"):
            yield chunk(index, {"reasoning_content": thoughts})
        if message["content"]:
            yield chunk(index, {"content": message["content"]}, logprobs=choice["logprobs"])
        for number, call in enumerate(message.get("tool_calls", ())):
            yield chunk(index, {"tool_calls": [{**call, "index": number}]})
        more = {"token_ids": choice["token_ids"]} if "token_ids" in choice else {}
        yield chunk(index, {}, choice["finish_reason"], **more)
    options = request.body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield "", {**head, "choices": [], "usage": usage}
    yield "", "[DONE]"


def error(status: int, why: str, code: str) -> Body:
    """See `dialect`."""
    return {"error": {"message": why, "type": "invalid_request_error", "param": None, "code": code}}
