"""Experts: functions that reach the goal of a task with the tools of the policy.

`expert(agent, goal)` gets the `goal` of the task's payload and returns the final message. Its
episodes are the demonstrations of the warm start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from pipeline.data.rng import choose, generator
from pipeline.data.tasks import Message, Task
from pipeline.environments.tools import call_tool, reply_of, reward_of, run_steps, settled


class Agent(Protocol):
    """The expert's access to the tools and the user of the policy."""

    def call(self, tool: str, **arguments: Any) -> Any:
        """Call a tool; returns its result, parsed if it is JSON."""

    def ask(self, question: str) -> str:
        """Send the user a message; returns the answer."""

    def decide(self, right: str, options: Sequence[str], chained: bool = False) -> str:
        """Choose an option at a decision of the policy text, where `right` follows the rule.

        `chained`: the decision follows an earlier one.
        """


# (agent, the payload's goal) -> the final message, unused if a tool has ended the episode
Expert = Callable[[Agent, Any], str]


@dataclass
class ScriptedAgent:
    """Plays an expert in an environment and keeps the conversation.

    With `rule_share` 1 every decision is right. Below 1, a first decision is right with that
    probability, else drawn (the first option with .35, the others share .65); a chained one is
    right with .6, else any option. Such demonstrations teach tools and formats and leave every
    branch likely, which GRPO needs.
    """

    environment: Any
    random: Random
    rule_share: float = 1.0
    messages: list[Message] = field(default_factory=list)

    def call(self, tool: str, **arguments: Any) -> Any:
        call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        result = call_tool(self.environment, tool, arguments)
        self.messages.append({"role": "tool", "name": tool, "content": result})
        try:
            return json.loads(result)
        except ValueError:
            return result

    def ask(self, question: str) -> str:
        self.messages.append({"role": "assistant", "content": question})
        answer = run_steps(reply_of(self.environment, question))
        if answer is None:
            raise ValueError(f"nobody answers {question!r}")
        self.messages.append({"role": "user", "content": answer})
        return answer

    def decide(self, right: str, options: Sequence[str], chained: bool = False) -> str:
        if self.rule_share >= 1 or self.random.random() < (0.6 if chained else self.rule_share):
            return right
        rest = len(options) - 1
        weights = [1.0] * len(options) if chained else [0.35] + [0.65 / rest] * rest
        return choose(options, weights, self.random.random())


def goal_of(task: Task) -> Any:
    """The goal in a task's payload, or None."""
    payload = json.loads(task.payload)
    return (payload.get("goal") or None) if isinstance(payload, dict) else None


def run_expert(
    environment: Any, expert: Expert, task: Task, rule_share: float = 1.0, seed: int = 0
) -> tuple[list[Message], float]:
    """Play one task; returns the whole conversation (prompt first) and the reward."""
    goal = goal_of(task)
    if goal is None:
        raise ValueError("its payload has no goal")
    prompt = [dict(message) for message in task.prompt]
    if addition := settled(environment.reset(**task.row())):
        prompt[-1]["content"] += addition
    agent = ScriptedAgent(environment, generator(seed, "expert", *task.key), rule_share)
    final = expert(agent, goal)
    if not getattr(environment, "done", False):
        agent.messages.append({"role": "assistant", "content": final})
        environment.final_message = final
    return [*prompt, *agent.messages], run_steps(reward_of(environment))
