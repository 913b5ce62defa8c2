"""A customer that a language model plays, by the scenario of an episode."""

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pipeline.customers.scenario import Scenario, spoken
from pipeline.data.tasks import Message
from pipeline.environments.faults import Outage

STOPS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")  # those of τ²-bench
MAX_ERRORS = 10  # failed calls of the customer's tools
MAX_ROUNDS = 30  # messages with calls of the customer's tools, one after the other
SILENCE = "I got an empty message. Could you say that again?"
GREETING = "Hello! How can I help you?"
SYSTEM = """\
You play a customer who writes to the service agent of a company. Answer with the customer's next
message and nothing else: short and in your own words. Your instructions say who you are and what
you want. Tell what the agent asks for, one thing after the other, and invent nothing. Do not read
the instructions out. When your request is settled, or when nothing more can be done, write
###STOP### instead of a message. When the agent transfers you to a person, write ###TRANSFER###.

Your instructions:
"""
Ask = Callable[[list[Message], Sequence[dict[str, Any]]], Awaitable[Message]]


def scenario_of(text: str, request: str) -> Scenario:
    """Return the scenario of a task of any domain: the customer's instructions and request."""
    return Scenario(system=SYSTEM + text, greeting=GREETING, first_words=request)


class LlmCustomer:
    """The customer of one episode; `ask` returns the language model's next message.

    `model_messages` is the conversation as the language model sees it, with calls of its own tools.
    The agent's thoughts and tool calls are not in it. `tool_counts` has [calls, failed calls] by
    tool. Every method raises Outage if the language model fails as a customer.
    """

    def __init__(self, scenario: Scenario, ask: Ask) -> None:
        self._scenario = scenario
        self._ask = ask
        self.model_messages: list[Message] = [{"role": "system", "content": scenario.system}]
        self.tool_counts: dict[str, list[int]] = {}
        self._num_errors = 0
        self._is_gone = False

    async def first_words(self) -> str:
        """Return the customer's first message, which answers the agent's greeting."""
        if known := self._scenario.first_words:
            greeting = {"role": "user", "content": self._scenario.greeting}
            self.model_messages += [greeting, {"role": "assistant", "content": known}]
            return known
        said = await self._answer(self._scenario.greeting)
        self._is_gone = any(stop in said for stop in STOPS)
        return said

    async def reply(self, message: str) -> str | None:
        """Return the answer to a message, or None if the customer ends the conversation."""
        if self._is_gone:
            return None
        if not (heard := spoken(message)):
            return SILENCE
        said = await self._answer(heard)
        return None if any(stop in said for stop in STOPS) else said

    async def _answer(self, heard: str) -> str:
        self.model_messages.append({"role": "user", "content": heard})
        for _ in range(MAX_ROUNDS):
            answer = await self._ask(self.model_messages, self._scenario.schemas)
            said = spoken(answer["content"])
            self.model_messages.append({**answer, "content": said})
            if calls := answer.get("tool_calls"):
                self.model_messages += [self._result(call) for call in calls]
            elif said:
                return said
            else:
                raise Outage("customer: the language model wrote thoughts and no message")
        raise Outage(f"customer: {MAX_ROUNDS} messages with calls of tools and no other one")

    def _result(self, call: Message) -> Message:
        """Call one of the customer's own tools; return the message with the result."""
        name = call["function"]["name"]
        text = f"Error: there is no tool {name}"
        failed = True
        if self._scenario.call is not None:
            text, failed = self._scenario.call(name, json.loads(call["function"]["arguments"]))
        counts = self.tool_counts.setdefault(name, [0, 0])
        counts[0] += 1
        counts[1] += failed
        self._num_errors += failed
        if self._num_errors >= MAX_ERRORS:
            raise Outage(f"customer: {MAX_ERRORS} calls of the customer's tools failed")
        return {"role": "tool", "tool_call_id": call["id"], "content": text}
