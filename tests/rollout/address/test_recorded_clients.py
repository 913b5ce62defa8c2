"""Requests of real client libraries, as they were recorded, are played against the address.

`scripts/proofs/agents.py --record tests/rollout/address/recorded` has written them, with the
packages themselves, whose own types have read the answers. Here the answers are read by their form.
"""

import json
from pathlib import Path

import httpx
import pytest

from pipeline.rollout.trajectory import StopReason
from tests.rollout.test_own_loop import ids_of, play, sampled

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
ROOM = {"max_tokens": 4000, "max_tokens_per_turn": 400}


@pytest.mark.parametrize("path", RECORDED, ids=[path.stem for path in RECORDED])
def test_the_requests_of_a_client_are_answered_and_sampled_as_it_needs(path):
    recorded = json.loads(path.read_text())
    script, requests = recorded["script"], recorded["requests"]
    assert len(script) == len(requests) == 2
    replies = []

    async def loop(policy, task):
        base = policy.base_url.removesuffix("/v1")
        async with httpx.AsyncClient(timeout=60) as client:
            for request in requests:
                headers = {
                    name: value.replace("KEY", policy.api_key)
                    for name, value in request["headers"].items()
                }
                content = json.dumps(request["body"])
                reply = await client.post(base + request["path"], content=content, headers=headers)
                assert reply.status_code == 200, reply.text
                replies.append(reply)
        return 1.0

    one_each = recorded["sequences"] == 2
    (episode,) = play(loop, *([[m] for m in script] if one_each else [script]), **ROOM)
    assert (episode.error, episode.stop_reason) == ("", StopReason.COMPLETED)
    assert (episode.reward, episode.num_turns) == (1.0, 2)
    assert len(episode.sequences) == recorded["sequences"]
    for request, reply, wanted in zip(requests, replies, script, strict=True):
        read = READERS[request["path"]][bool(request["body"].get("stream"))]
        text, calls = read(reply, request["body"])
        for stop in request["body"].get("stop", ()):
            wanted = {**wanted, "content": wanted["content"].partition(stop)[0]}
        functions = [call["function"] for call in wanted.get("tool_calls", ())]
        assert text == wanted["content"]
        assert calls == [(function["name"], function["arguments"]) for function in functions]
    if not one_each:
        assert sampled(episode) == ids_of(*script)


def of(found, **kinds):
    """The fields of an object, each of which must be of a kind."""
    wrong = [name for name, kind in kinds.items() if not isinstance(found.get(name), kind)]
    assert wrong == [], found
    return [found[name] for name in kinds]


def function_of(function):
    name, arguments = of(function, name=str, arguments=str)
    return name, json.loads(arguments)


# OpenAI's chat completions


def chat(reply, body):
    found = reply.json()
    of(found, id=str, created=int, model=str)
    assert found["object"] == "chat.completion"
    of(found["usage"], prompt_tokens=int, completion_tokens=int, total_tokens=int)
    (choice,) = found["choices"]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert (choice["index"], choice["logprobs"], message["role"]) == (0, None, "assistant")
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    ids = [of(call, id=str, type=str)[0] for call in calls]
    assert len({*ids}) == len(calls) and all(call["type"] == "function" for call in calls)
    return message["content"] or "", [function_of(call["function"]) for call in calls]


def chat_stream(reply, body):
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, last = [data for _, data in events(reply)]
    assert last == "[DONE]"
    text, calls, reasons = "", {}, []
    for chunk in chunks:
        of(chunk, id=str, created=int, model=str)
        assert (chunk["object"], chunk["id"]) == ("chat.completion.chunk", chunks[0]["id"])
        for choice in chunk["choices"]:
            assert choice["index"] == 0
            text += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls", ()):
                call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
                call["name"] += part["function"].get("name", "")
                call["arguments"] += part["function"].get("arguments", "")
                if "id" in part:
                    of(part, id=str, type=str)
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert reasons == ["tool_calls" if calls else "stop"]
    if (body.get("stream_options") or {}).get("include_usage"):
        assert chunks[-1]["choices"] == []
        of(chunks[-1]["usage"], prompt_tokens=int, completion_tokens=int, total_tokens=int)
    return text, [function_of(calls[index]) for index in sorted(calls)]


# Anthropic's messages


def messages(reply, body):
    found = reply.json()
    of(found, id=str, model=str, content=list)
    assert (found["type"], found["role"], found["stop_sequence"]) == ("message", "assistant", None)
    of(found["usage"], input_tokens=int, output_tokens=int)
    return blocks_of(found["content"], found["stop_reason"])


def blocks_of(blocks, reason):
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    uses = [block for block in blocks if block["type"] == "tool_use"]
    assert len(uses) + sum(block["type"] == "text" for block in blocks) == len(blocks)
    assert reason == ("tool_use" if uses else "end_turn")
    return text, [tuple(of(use, id=str, name=str, input=dict)[1:]) for use in uses]


def messages_stream(reply, body):
    found = [(name, data) for name, data in events(reply) if name != "ping"]
    assert [name for name, _ in found] == [data["type"] for _, data in found]
    (_, start), *middle, (_, delta), (_, stop) = found
    assert (start["type"], delta["type"], stop["type"]) == (
        *("message_start", "message_delta", "message_stop"),
    )
    of(start["message"], id=str, model=str, content=list)
    of(start["message"]["usage"], input_tokens=int, output_tokens=int)
    of(delta["usage"], output_tokens=int)
    blocks, texts = [], []
    for name, data in middle:
        if name == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append(data["content_block"])
            texts.append("")
        elif name == "content_block_delta":
            kinds = {"text_delta": "text", "input_json_delta": "partial_json"}
            texts[data["index"]] += data["delta"][kinds[data["delta"]["type"]]]
        else:
            assert (name, data["index"]) == ("content_block_stop", len(blocks) - 1)
    for block, text in zip(blocks, texts, strict=True):
        name = "text" if block["type"] == "text" else "input"
        assert not block[name]  # a client adds what follows to it
        block[name] = text if name == "text" else json.loads(text)
    return blocks_of(blocks, delta["delta"]["stop_reason"])


# OpenAI's responses


def responses(reply, body):
    return response_of(reply.json())


def response_of(found):
    of(found, id=str, created_at=int | float, model=str, output=list, tools=list)
    of(found, parallel_tool_calls=bool, tool_choice=str)
    assert (found["object"], found["status"]) == ("response", "completed")
    of(found["usage"], input_tokens=int, output_tokens=int, total_tokens=int)
    of(found["usage"]["input_tokens_details"], cached_tokens=int, cache_write_tokens=int)
    of(found["usage"]["output_tokens_details"], reasoning_tokens=int)
    text, calls = "", []
    for item in found["output"]:
        of(item, id=str, type=str, status=str)
        if item["type"] == "function_call":
            of(item, call_id=str)
            calls.append(function_of(item))
        else:
            assert (item["type"], item["role"]) == ("message", "assistant")
            for part in item["content"]:
                of(part, text=str, annotations=list)
                assert part["type"] == "output_text"
                text += part["text"]
    return text, calls


def responses_stream(reply, body):
    found = list(events(reply))
    assert [name for name, _ in found] == [data["type"] for _, data in found]
    assert [data["sequence_number"] for _, data in found] == [*range(len(found))]
    assert found[0][0] == "response.created" and found[-1][0] == "response.completed"
    whole = found[-1][1]["response"]
    text, arguments = "", {}
    added, done = {}, {}
    for name, data in found:
        if name == "response.output_item.added":
            added[data["output_index"]] = data["item"]
        elif name == "response.output_item.done":
            done[data["output_index"]] = data["item"]
        elif name == "response.output_text.delta":
            text += data["delta"]
            assert (added[data["output_index"]]["id"], data["content_index"]) == (
                *(data["item_id"], 0),
            )
        elif name == "response.function_call_arguments.delta":
            index = data["output_index"]
            arguments[index] = arguments.get(index, "") + data["delta"]
            assert added[index]["id"] == data["item_id"]
    assert added.keys() == done.keys()
    assert [done[index] for index in sorted(done)] == whole["output"]
    for index, item in done.items():
        assert arguments.get(index) == item.get("arguments")
    read, calls = response_of(whole)
    assert read == text
    return text, calls


def events(reply):
    """The name and the data of each server-sent event."""
    for block in reply.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line[0] != ":")
        if data := fields.get("data"):
            yield fields.get("event", ""), data if data == "[DONE]" else json.loads(data)


READERS = {
    "/v1/chat/completions": (chat, chat_stream),
    "/v1/messages": (messages, messages_stream),
    "/v1/responses": (responses, responses_stream),
}
