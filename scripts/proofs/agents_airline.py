"""Loops that play the embedded airline: with `policy.message`, and with clients, for `agents.py`.

All of them are the same agent, so all must draw the same tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from statistics import fmean
from typing import Any

from pipeline.data.tasks import Message, Task
from pipeline.environments.discovery import tool_schemas
from pipeline.environments.embedded import airline
from pipeline.environments.tools import answer_call, reply_of

TOOLS = tool_schemas(airline.AirlineEnvironment)
tally = Counter[str]()  # of requests, by clients that send some twice
Ask = Callable[[list[Message]], Awaitable[Message]]  # gives the next message of a conversation


def generate_tasks(*arguments: Any) -> list[Task]:
    """The airline's tasks, for a domain `desk`."""
    return [replace(task, domain="desk") for task in airline.generate_tasks(*arguments)]


class Desk:
    """The airline as an object: calls of tools, the customer, and the reward.

    Desks with other numbers say something else first.
    """

    def __init__(self, task: Task, number: int = 1) -> None:
        row = task.row()
        self.messages: list[Any] = [dict(message) for message in row["prompt"]]
        self.messages[-1]["content"] += f" {number}" * (number > 1)
        self.environment = airline.AirlineEnvironment()
        self.environment.reset(**row)

    async def call(self, name: str, arguments: str | dict[str, Any]) -> str:
        known = json.loads(arguments) if isinstance(arguments, str) else arguments
        return (await answer_call(self.environment, name, known)).content

    async def reply(self, text: str) -> str | None:
        """The customer's answer; None ends the episode."""
        self.environment.final_message = text
        return await reply_of(self.environment, text)

    def reward(self) -> float:
        return float(self.environment.get_reward())


# The agent with the OpenAI SDK, and its twin with policy.message


async def serve(client: Any, desk: Desk) -> None:
    """Serve a customer; an agent of the OpenAI SDK that knows nothing of training."""
    messages = desk.messages
    while True:
        reply = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            result = await desk.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            answer = await desk.reply(message.content or "")
            if answer is None:
                return
            messages.append({"role": "user", "content": answer})


async def play(policy: Any, task: Task) -> float:
    from openai import AsyncOpenAI

    desk = Desk(task)
    await serve(AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key), desk)
    return desk.reward()


async def play_direct(policy: Any, task: Task) -> float:
    return await played_with(lambda messages: policy.message(messages, TOOLS), task)


async def play_at_once(policy: Any, task: Task) -> float:
    """Three desks of one episode ask at once."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key)
    desks = [Desk(task, number) for number in (1, 2, 3)]
    await asyncio.gather(*(serve(client, desk) for desk in desks))
    return fmean(desk.reward() for desk in desks)


async def play_at_once_direct(policy: Any, task: Task) -> float:
    async def ask(messages: list[Message]) -> Message:
        message: Message = await policy.message(messages, TOOLS)
        return message

    return fmean(await asyncio.gather(*(played_with(ask, task, number) for number in (1, 2, 3))))


async def played_with(ask: Ask, task: Task, number: int = 1) -> float:
    """Play with a function that gives messages as `policy.message` does."""
    desk = Desk(task, number)
    messages = desk.messages
    while True:
        message = await ask(messages)
        messages.append(message)
        for call in message.get("tool_calls") or []:
            result = await desk.call(**call["function"])
            name = {"name": call["function"]["name"], "tool_call_id": call.get("id", "")}
            messages.append({"role": "tool", "content": result, **name})
        if not message.get("tool_calls"):
            answer = await desk.reply(message["content"] or "")
            if answer is None:
                return desk.reward()
            messages.append({"role": "user", "content": answer})


# Clients that behave badly


async def play_rewriting(policy: Any, task: Task) -> float:
    """Shuffles keys, indents arguments, makes ids of its own, and reverses results."""
    import httpx

    async with httpx.AsyncClient(timeout=600) as client:
        draw = random.Random(task.id)

        async def ask(messages: list[Message]) -> Message:
            body = {"messages": rewritten(messages, draw), "tools": TOOLS, "temperature": 0.1}
            url = f"{policy.base_url}/chat/completions"
            reply = await client.post(url, content=json.dumps(shuffled(body, draw), indent=1))
            message: Message = reply.raise_for_status().json()["choices"][0]["message"]
            return message

        return await played_with(ask, task)


def rewritten(messages: list[Message], draw: random.Random) -> list[Message]:
    """The same conversation, as a client may write it anew before each request."""
    found = list[Message]()
    results = list[Message]()
    ids = dict[str, str]()
    for message in messages:
        if message["role"] == "tool":
            name = message["tool_call_id"]
            parts = [{"type": "text", "text": message["content"]}]
            results.append({"role": "tool", "tool_call_id": ids[name], "content": parts})
            continue
        found += reversed(results)
        results = []
        ids = {}
        again = {**message}
        if message["role"] == "assistant":
            nothing = {"refusal": None, "audio": None, "annotations": [], "reasoning_content": "hm"}
            again |= {**nothing, "name": "agent-7", "content": message["content"] or None}
        if calls := message.get("tool_calls"):
            ids = {call["id"]: f"own-{draw.randrange(10**9)}" for call in calls}
            again["tool_calls"] = [
                {
                    "index": number,
                    "id": ids[call["id"]],
                    "type": "function",
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": indented(call["function"]["arguments"], draw),
                    },
                }
                for number, call in enumerate(calls)
            ]
        found.append(again)
    return [*found, *reversed(results)]


def indented(arguments: str, draw: random.Random) -> str:
    return json.dumps(shuffled(json.loads(arguments), draw), indent=3)


def shuffled(value: Any, draw: random.Random) -> Any:
    """The same JSON, with the keys in another order."""
    if isinstance(value, list):
        return [shuffled(item, draw) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: shuffled(value[key], draw) for key in draw.sample(list(value), len(value))}


async def play_impatient(policy: Any, task: Task) -> float:
    """The SDK gives up after half a second, and tries again with its header."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    async def count(request: Any) -> None:
        tally["requests"] += 1

    client = AsyncOpenAI(
        base_url=policy.base_url,
        api_key=policy.api_key,
        timeout=0.5,
        max_retries=99,
        http_client=DefaultAsyncHttpxClient(timeout=0.5, event_hooks={"request": [count]}),
    )
    desk = Desk(task)
    await serve(client, desk)
    return desk.reward()


async def play_impatient_raw(policy: Any, task: Task) -> float:
    """The same without the header that says that a request is a second one."""
    import httpx

    async with httpx.AsyncClient(timeout=0.5) as client:

        async def ask(messages: list[Message]) -> Message:
            url = f"{policy.base_url}/chat/completions"
            while True:
                tally["requests"] += 1
                with suppress(httpx.TimeoutException):
                    reply = await client.post(url, json={"messages": messages, "tools": TOOLS})
                    message: Message = reply.raise_for_status().json()["choices"][0]["message"]
                    return message

        return await played_with(ask, task)


async def play_cancelling(policy: Any, task: Task) -> float:
    """Gives the first request up twice, before it is answered, and then asks again."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0)

    async def ask(messages: list[Message]) -> Message:
        is_first = all(message["role"] != "assistant" for message in messages)
        for seconds in (0.05, 0.2, None) if is_first else (None,):
            tally["requests"] += 1
            with suppress(TimeoutError):
                reply = await asyncio.wait_for(
                    client.chat.completions.create(model="m", messages=messages, tools=TOOLS),
                    seconds,
                )
                break
        message: Message = reply.choices[0].message.model_dump(exclude_none=True)
        return {"content": "", **message}

    return await played_with(ask, task)
