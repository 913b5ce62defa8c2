"""Experts: functions that solve a task with the same tools as the trained model.

An expert is called as `expert(agent, goal)`, where `goal` comes from the task's payload, and
returns the final message. The warm start (supervised training before GRPO) trains on conversations
of experts.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from pipeline.common.untrusted import is_plain
from pipeline.data.rng import choose, generator
from pipeline.data.tasks import Message, Task
from pipeline.environments.calls import awaited, run_here
from pipeline.environments.tools import answer_call, is_done, reply_of, reset_arguments, reward_of


def call_message(tool: str, arguments: Mapping[str, Any], content: str = "") -> Message:
    call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


@dataclass
class Agent:
    """Gives an expert the tools and the user of an environment, and records the conversation.

    If `rule_share` is 1, `decide` always returns the right option. If `rule_share` is less than 1,
    `decide` returns the right option with probability `rule_share` (.6 in a chained decision), and
    otherwise a random option. The random option is the first of `options` with probability .35, but
    in a chained decision, the random option is each option with equal probability. Random decisions
    in demonstrations keep every option likely enough for GRPO to sample.
    """

    environment: Any
    random: Random
    rule_share: float = 1.0
    messages: list[Message] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)  # exceptions of tools, other than ToolErrors
    thought: str = ""  # stands before the next call or question, in one message with it
    quotes_rules: bool = False  # the setting `warm_start.quote_rules`

    def think(self, text: str) -> None:
        """Write a text in front of the next call or question."""
        self.thought = text

    def quote(self, rule: str) -> None:
        """Write the rule of the prompt that decides, if `warm_start.quote_rules` is true."""
        if self.quotes_rules:
            self.think(rule)

    def call(self, tool: str, /, **arguments: Any) -> Any:
        """Call a tool and return the tool's result, parsed if the result is JSON."""
        self.messages.append(call_message(tool, arguments, self.thought))
        self.thought = ""
        result, _, raised, _ = run_here(answer_call, self.environment, tool, arguments)
        self.raised += [f"{tool} raised {raised}"] if raised else []
        self.messages.append({"role": "tool", "name": tool, "content": result})
        try:
            return json.loads(result)
        except ValueError:
            return result

    def ask(self, question: str) -> str:
        """Ask the user a question and return the user's answer."""
        content = f"{self.thought}\n{question}".lstrip("\n")
        self.thought = ""
        self.messages.append({"role": "assistant", "content": content})
        answer: str | None = run_here(reply_of, self.environment, question)
        if answer is None:
            raise ValueError(f"nobody answers {question!r}")
        self.messages.append({"role": "user", "content": answer})
        return answer

    def decide(self, right: str, options: Sequence[str], chained: bool = False) -> str:
        """Choose one of `options`; `right` is the option that the policy text requires.

        `chained` is True if the decision depends on an earlier decision in the episode.
        """
        if self.rule_share >= 1 or self.random.random() < (0.6 if chained else self.rule_share):
            return right
        rest = len(options) - 1
        weights = [1.0] * len(options) if chained else [0.35] + [0.65 / rest] * rest
        return choose(options, weights, self.random.random())


# Arguments: agent, goal. Result: the final message (ignored if a tool has ended the episode).
Expert = Callable[[Agent, Any], str]


def goal_of(task: Task) -> Any:
    """Return the goal in the task's payload, or None if the payload has no goal."""
    payload = json.loads(task.payload)
    return (payload.get("goal") or None) if isinstance(payload, dict) else None


def run_expert(
    environment: Any,
    expert: Expert,
    task: Task,
    rule_share: float = 1.0,
    seed: int = 0,
    raised: list[str] | None = None,
    *,
    quotes_rules: bool = False,
) -> tuple[list[Message], float]:
    """Let the expert solve a task; return the conversation (prompt included) and the reward.

    The exceptions of tools, except ToolErrors, are appended to `raised`.
    """
    goal = goal_of(task)
    if goal is None:
        raise ValueError("its payload has no goal")
    prompt = [dict(message) for message in task.prompt]
    arguments = reset_arguments(environment.reset, task.row())
    prompt[-1]["content"] += run_here(awaited, environment.reset(**arguments)) or ""
    agent = Agent(environment, generator(seed, "expert", *task.key), rule_share)
    agent.quotes_rules = quotes_rules
    agent.raised = agent.raised if raised is None else raised
    final = expert(agent, goal)
    if not is_done(environment):
        agent.messages.append({"role": "assistant", "content": final})
        environment.final_message = final
    messages = [*prompt, *agent.messages]
    if not is_plain(agent.messages):
        raise ValueError("it wrote what JSON cannot hold, such as half of a surrogate pair")
    reward: float = run_here(partial(reward_of, environment, messages=messages))
    return messages, reward
