"""Experts that solve tasks through the tools, and the conversations that they leave."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from pipeline.data.rng import choose, generator
from pipeline.data.tasks import Message, Task
from pipeline.environments.tools import call_tool


class Agent(Protocol):
    """What an expert acts through: the same tools and the same user as the policy."""

    def call(self, tool: str, **arguments: str) -> dict[str, str]: ...

    def ask(self, question: str) -> str: ...

    def decide(self, right: str, options: Sequence[str], chained: bool = False) -> str:
        """The option to take at a decision of the policy text.

        `chained`: it follows an earlier decision.
        """


# (agent, goal) -> final message; "" after a transfer
Expert = Callable[[Agent, dict[str, str]], str]


@dataclass
class ScriptedAgent:
    """Plays an expert in an environment and keeps the conversation.

    With `rule_share` 1 every decision follows the rule. Below it, a first decision does so with
    that probability, else a habit draws it (the first option .35, the others share .65); a chained
    one is right with .6, else any option: demonstrations that know tools and formats and leave
    every branch likely, for GRPO to sharpen.
    """

    environment: Any
    random: Random
    rule_share: float = 1.0
    messages: list[Message] = field(default_factory=list)

    def call(self, tool: str, **arguments: str) -> dict[str, str]:
        function = {"name": tool, "arguments": arguments}
        self.messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": function}],
            }
        )
        result = call_tool(self.environment, tool, arguments)
        self.messages.append({"role": "tool", "name": tool, "content": result})
        parsed: dict[str, str] = json.loads(result)
        return parsed

    def ask(self, question: str) -> str:
        self.messages.append({"role": "assistant", "content": question})
        answer = self.environment.user.reply(question) if self.environment.user else None
        assert answer is not None, f"nobody answered {question!r}"
        self.messages.append({"role": "user", "content": answer})
        return str(answer)

    def decide(self, right: str, options: Sequence[str], chained: bool = False) -> str:
        if self.rule_share >= 1 or self.random.random() < (0.6 if chained else self.rule_share):
            return right
        rest = len(options) - 1
        weights = [1.0] * len(options) if chained else [0.35] + [0.65 / rest] * rest
        return choose(options, weights, self.random.random())


def named_record(agent: Agent, goal: dict[str, str], find: str, kind: str) -> str:
    """The record that a request is about: named in it, or found through the customer."""
    return goal["record"] if "record" in goal else agent.call(find, customer=goal["customer"])[kind]


def play_expert(
    environment: Any, expert: Expert, task: Task, rule_share: float = 1.0, seed: int = 0
) -> tuple[list[Message], float]:
    """Play one task; returns the whole conversation (prompt first) and the reward."""
    environment.reset(**task.row())
    agent = ScriptedAgent(environment, generator(seed, "expert", *task.key), rule_share)
    final = expert(agent, json.loads(task.payload)["goal"])
    if not environment.done:
        agent.messages.append({"role": "assistant", "content": final})
        environment.final_message = final
    return [*(dict(message) for message in task.prompt), *agent.messages], environment.get_reward()
