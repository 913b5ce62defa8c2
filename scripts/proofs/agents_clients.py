"""One small agent for each client library and language, for `agents.py`.

Each agent looks a lamp up with one tool and says its colour. It is written as the documentation of
its library writes agents. It gets an address and a key, and knows nothing of training.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

from pipeline.data.tasks import Task

# litellm would fetch a list of prices when it is imported, and the Agents SDK would send traces.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")

PROGRAMS = Path(__file__).resolve().parent / "agents_programs"
QUESTION = "Which colour has the lamp?"
SYSTEM: Any = {"role": "system", "content": "desk"}
USER: Any = {"role": "user", "content": QUESTION}
RESULT = "blue, 40 W"
DESCRIPTION = "Look an item up."
PARAMETERS = {
    "type": "object",
    "properties": {"item": {"type": "string"}},
    "required": ["item"],
}
FUNCTION: Any = {"name": "look", "description": DESCRIPTION, "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL: Any = {"type": "function", **FUNCTION, "strict": False}
ANTHROPIC_TOOL: Any = {"name": "look", "description": DESCRIPTION, "input_schema": PARAMETERS}

Play = Callable[[str, str], Any]  # arguments: the address and the key
Script = tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Agent:
    """An agent, and the messages with which a policy makes it say "blue"."""

    name: str
    dialect: str
    play: Play
    script: Script
    sequences: int  # of the two turns


AGENTS: dict[str, Agent] = {}


def call(name: str, **arguments: str) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


LOOK = call("look", item="lamp")
SAY = say("The lamp is blue.")
CODE = "Thought: look\n<code>\nprint(look(item='lamp'))\n</code>"
END = "Thought: done\n<code>\nfinal_answer('The lamp is blue.')\n</code>"


def agent(dialect: str, script: Script = (LOOK, SAY), sequences: int = 1) -> Callable[[Play], Play]:
    """Add a function to AGENTS."""

    def add(play: Play) -> Play:
        name = play.__name__
        AGENTS[name] = Agent(
            name=name, dialect=dialect, play=play, script=script, sequences=sequences
        )
        return play

    return add


def loop_of(agent: Agent, address: Callable[[str], Any] = nullcontext) -> Callable[[Any, Any], Any]:
    """The loop with which an agent is trained; the reward is 1 for the right colour.

    `address` is a context that gives the agent another address than the policy's.
    """

    async def play(policy: Any, task: Any) -> float:
        with address(policy.base_url) as url:
            return reward_of(await agent.play(url, policy.api_key))

    def play_in_thread(policy: Any, task: Any) -> float:
        with address(policy.base_url) as url:
            return reward_of(agent.play(url, policy.api_key))

    return play if inspect.iscoroutinefunction(agent.play) else play_in_thread


def reward_of(answer: object) -> float:
    return float("blue" in str(answer))


def is_blue(completions: list[str], **columns: Any) -> list[float]:
    """A reward function for agents in processes of their own."""
    return [reward_of(text) for text in completions]


def results(message: Any) -> list[Any]:
    """The results of the calls of an assistant's message."""
    return [
        {"role": "tool", "tool_call_id": made.id, "content": RESULT} for made in message.tool_calls
    ]


# OpenAI's client


@agent("chat")
def openai_sync(url: str, key: str) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key=key)
    messages = [SYSTEM, USER]
    while True:
        reply = client.chat.completions.create(
            model="gpt-4o",
            messages=messages,
            tools=[TOOL],
            tool_choice="auto",
            temperature=0.2,
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        messages += results(message)


@agent("chat")
async def openai_async(url: str, key: str) -> str:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=url, api_key=key)
    messages = [SYSTEM, USER]
    while True:
        reply = await client.chat.completions.create(
            model="gpt-4o", messages=messages, tools=[TOOL], parallel_tool_calls=True
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        messages += results(message)


@agent("chat")
def openai_model_dump(url: str, key: str) -> str:
    """The history has all nulls of `model_dump()`, and parts."""
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key=key)
    question = {"role": "user", "content": [{"type": "text", "text": QUESTION}]}
    messages: list[Any] = [{"role": "developer", "content": "desk"}, question]
    while True:
        reply = client.chat.completions.create(
            model="gpt-4o", messages=messages, tools=[TOOL], max_completion_tokens=500
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump())
        messages += results(message)


@agent("chat, streamed")
def openai_stream(url: str, key: str) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key=key)
    messages = [SYSTEM, USER]
    while True:
        with client.chat.completions.stream(
            model="gpt-4o",
            messages=messages,
            tools=[TOOL],
            stream_options={"include_usage": True},
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        messages += results(message)


@agent("chat", script=(LOOK, say('{"colour": "blue"}')))
def openai_parse(url: str, key: str) -> str:
    from openai import OpenAI
    from pydantic import BaseModel, ValidationError

    class Found(BaseModel):
        colour: str

    client = OpenAI(base_url=url, api_key=key)
    tool = {"type": "function", "function": {**FUNCTION, "strict": True}}
    tool["function"]["parameters"] = {**PARAMETERS, "additionalProperties": False}
    messages: list[Any] = [{"role": "system", "content": "desk that writes JSON"}, USER]
    while True:
        try:
            reply = client.chat.completions.parse(
                model="gpt-4o", messages=messages, tools=[tool], response_format=Found
            )
        except ValidationError:
            return "not what was asked for"
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.parsed.colour if message.parsed else ""
        messages.append(message)
        messages += results(message)


@agent("responses")
def openai_responses(url: str, key: str) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key=key)
    items: list[Any] = [USER]
    while True:
        reply = client.responses.create(
            model="gpt-4o", instructions="desk", input=items, tools=[RESPONSES_TOOL]
        )
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        items += reply.output
        items += outputs(calls)


@agent("responses, streamed")
def openai_responses_stream(url: str, key: str) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key=key)
    items: list[Any] = [USER]
    while True:
        with client.responses.stream(
            model="gpt-4o", instructions="desk", input=items, tools=[RESPONSES_TOOL]
        ) as stream:
            reply = stream.get_final_response()
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        without = {"parsed_arguments"}
        items += [item.model_dump(exclude_none=True, exclude=without) for item in reply.output]
        items += outputs(calls)


def outputs(calls: list[Any]) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": made.call_id, "output": RESULT}
        for made in calls
    ]


# OpenAI's Agents SDK


def desk_of(model: Any) -> Any:
    from agents import Agent as Desk
    from agents import function_tool

    @function_tool
    def look(item: str) -> str:
        """Look an item up."""
        return RESULT

    return Desk(name="desk", instructions="desk", tools=[look], model=model)


@agent("responses")
async def agents_responses(url: str, key: str) -> str:
    from agents import OpenAIResponsesModel, Runner
    from openai import AsyncOpenAI

    model = OpenAIResponsesModel("gpt-4o", AsyncOpenAI(base_url=url, api_key=key))
    return (await Runner.run(desk_of(model), QUESTION)).final_output


@agent("chat")
async def agents_chat(url: str, key: str) -> str:
    from agents import OpenAIChatCompletionsModel, Runner
    from openai import AsyncOpenAI

    model = OpenAIChatCompletionsModel("gpt-4o", AsyncOpenAI(base_url=url, api_key=key))
    return (await Runner.run(desk_of(model), QUESTION)).final_output


@agent("responses, streamed")
async def agents_streamed(url: str, key: str) -> str:
    from agents import OpenAIResponsesModel, Runner
    from openai import AsyncOpenAI

    model = OpenAIResponsesModel("gpt-4o", AsyncOpenAI(base_url=url, api_key=key))
    run = Runner.run_streamed(desk_of(model), QUESTION)
    async for _ in run.stream_events():
        pass
    return run.final_output


# Anthropic's client


@agent("messages")
def anthropic_sync(url: str, key: str) -> str:
    from anthropic import Anthropic

    client = Anthropic(base_url=url.removesuffix("/v1"), api_key=key)
    messages = [USER]
    while True:
        reply = client.messages.create(
            model="claude-sonnet-4-5",
            max_tokens=1000,
            system="desk",
            messages=messages,
            tools=[ANTHROPIC_TOOL],
        )
        uses = [block for block in reply.content if block.type == "tool_use"]
        if not uses:
            return "".join(block.text for block in reply.content if block.type == "text")
        blocks = [{"type": "tool_result", "tool_use_id": u.id, "content": RESULT} for u in uses]
        messages.append({"role": "assistant", "content": reply.content})
        messages.append({"role": "user", "content": blocks})


@agent("messages, streamed")
async def anthropic_stream(url: str, key: str) -> str:
    """The system prompt is a block that the server may cache."""
    from anthropic import AsyncAnthropic

    client = AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key)
    cached = {"type": "text", "text": "desk", "cache_control": {"type": "ephemeral"}}
    messages = [USER]
    while True:
        async with client.messages.stream(
            model="claude-sonnet-4-5",
            max_tokens=1000,
            system=[cached],
            messages=messages,
            tools=[ANTHROPIC_TOOL],
        ) as stream:
            reply = await stream.get_final_message()
        uses = [block for block in reply.content if block.type == "tool_use"]
        if not uses:
            return "".join(block.text for block in reply.content if block.type == "text")
        parts = [{"type": "text", "text": RESULT}]
        blocks = [{"type": "tool_result", "tool_use_id": u.id, "content": parts} for u in uses]
        messages.append({"role": "assistant", "content": reply.content})
        messages.append({"role": "user", "content": blocks})


# litellm


async def by_litellm(model: str, url: str, key: str) -> str:
    import litellm

    messages = [SYSTEM, USER]
    while True:
        reply = await litellm.acompletion(
            model=model, api_base=url, api_key=key, messages=messages, tools=[TOOL]
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        messages += [{**result, "name": "look"} for result in results(message)]


@agent("chat")
async def litellm_openai(url: str, key: str) -> str:
    return await by_litellm("openai/policy", url, key)


@agent("messages")
async def litellm_anthropic(url: str, key: str) -> str:
    return await by_litellm("anthropic/claude-sonnet-4-5", url.removesuffix("/v1"), key)


# smolagents. Both agents write the calls of their history as text: a new sequence for each turn.


def smolagents_parts(url: str, key: str) -> dict[str, Any]:
    from smolagents import OpenAIServerModel, tool

    @tool
    def look(item: str) -> str:
        """Look an item up.

        Args:
            item: name of the item
        """
        return RESULT

    model = OpenAIServerModel(model_id="policy", api_base=url, api_key=key)
    return {"tools": [look], "model": model, "max_steps": 3, "verbosity_level": 0}


@agent("chat", script=(LOOK, call("final_answer", answer="The lamp is blue.")), sequences=2)
def smolagents_tool_calling(url: str, key: str) -> str:
    from smolagents import ToolCallingAgent

    return str(ToolCallingAgent(**smolagents_parts(url, key)).run(QUESTION))


@agent("chat", script=(say(CODE), say(END)), sequences=2)
def smolagents_code(url: str, key: str) -> str:
    from smolagents import CodeAgent

    return str(CodeAgent(**smolagents_parts(url, key)).run(QUESTION))


# LangGraph


def graph_of(url: str, key: str, **settings: Any) -> Any:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    @tool
    def look(item: str) -> str:
        """Look an item up."""
        return RESULT

    model = ChatOpenAI(model="policy", base_url=url, api_key=key, **settings)
    return create_react_agent(model, [look], prompt="desk")


@agent("chat")
async def langgraph_invoke(url: str, key: str) -> str:
    found = await graph_of(url, key).ainvoke({"messages": [("user", QUESTION)]})
    return found["messages"][-1].content


@agent("chat, streamed")
async def langgraph_streamed(url: str, key: str) -> str:
    graph = graph_of(url, key, streaming=True)
    last = ""
    async for kind, value in graph.astream(
        {"messages": [("user", QUESTION)]}, stream_mode=["messages", "values"]
    ):
        if kind == "values":
            last = value["messages"][-1].content
    return last


# pydantic-ai


def pydantic_agent(url: str, key: str, **settings: Any) -> Any:
    from pydantic_ai import Agent as Desk
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=url, api_key=key))
    desk = Desk(model, system_prompt="desk", **settings)

    @desk.tool_plain
    def look(item: str) -> str:
        """Look an item up."""
        return RESULT

    return desk


@agent("chat")
async def pydantic_ai_text(url: str, key: str) -> str:
    return (await pydantic_agent(url, key).run(QUESTION)).output


@agent("chat", script=(LOOK, call("final_result", colour="blue")))
async def pydantic_ai_typed(url: str, key: str) -> str:
    from pydantic import BaseModel

    class Found(BaseModel):
        colour: str

    return (await pydantic_agent(url, key, output_type=Found).run(QUESTION)).output.colour


@agent("chat, streamed")
async def pydantic_ai_streamed(url: str, key: str) -> str:
    async with pydantic_agent(url, key).run_stream(QUESTION) as run:
        return await run.get_output()


# Without a library, and programs


@agent("chat")
async def httpx_raw(url: str, key: str) -> str:
    """No header of a library, no retry, and 5 s between two bytes."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"}
    messages = [SYSTEM, USER]
    async with httpx.AsyncClient(headers=headers) as client:
        while True:
            body = {"messages": messages, "tools": [TOOL]}
            reply = await client.post(f"{url}/chat/completions", json=body)
            message = reply.raise_for_status().json()["choices"][0]["message"]
            if not message.get("tool_calls"):
                return message["content"]
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": made["id"], "content": RESULT}
                for made in message["tool_calls"]
            ]


def program(words: list[str], url: str, key: str) -> str:
    """Run a program that finds address and key where SDKs look for them; return what it prints."""
    done = subprocess.run(
        words,
        env={**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key},
        input=json.dumps({"question": QUESTION}) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@agent("chat")
def curl(url: str, key: str) -> str:
    return program(["bash", str(PROGRAMS / "agent.sh")], url, key)


@agent("chat")
def node_fetch(url: str, key: str) -> str:
    return program(["node", str(PROGRAMS / "agent.js")], url, key)


@agent("chat")
def global_client(url: str, key: str) -> str:
    return program([sys.executable, str(PROGRAMS / "global_client.py")], url, key)


# All of them in one domain

importing = Lock()
# What libraries raise for mistakes of a model, such as a call of a tool that there is not.
MISTAKES = ("ModelBehaviorError", "MaxTurnsExceeded", "UnexpectedModelBehavior")


@cache
def import_packages() -> None:
    for name in ("agents", "anthropic", "httpx", "langchain_openai", "litellm", "openai"):
        import_module(name)
    for name in ("langgraph.prebuilt", "pydantic_ai.providers.openai", "smolagents"):
        import_module(name)


def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
    """Tasks of the domain `clients`, of which each names an agent."""
    names = [*AGENTS]
    return [
        Task(
            domain="clients",
            id=f"{names[number % len(names)]}/{split}-{number}",
            prompt=(SYSTEM, USER),
            payload="{}",
        )
        for number in range(n)
    ]


def play(policy: Any, task: Any) -> float:
    """A loop that plays the agent that the task names."""
    with importing:  # threads that import the same packages at once may find them half made
        import_packages()
    agent = AGENTS[task.id.partition("/")[0]]
    try:
        answer = agent.play(policy.base_url, policy.api_key)
        return reward_of(asyncio.run(answer) if inspect.iscoroutine(answer) else answer)
    except Exception as error:
        if type(error).__name__ not in MISTAKES:
            raise
        return 0.0
