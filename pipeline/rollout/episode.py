"""An episode, its reward, and the answers of its environment and its customer."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline.chat.text import Parsed
from pipeline.customers.scenario import Welcome
from pipeline.data.tasks import Message, Task
from pipeline.environments import tools
from pipeline.environments.random_state import RandomState
from pipeline.environments.timeouts import Background, Guard
from pipeline.rollout.sampler import Handle
from pipeline.rollout.trajectory import StopReason, Trajectory

UNKNOWN_TOOL = "unknown"  # calls of all nonexistent tools are counted under this name


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    task: Task
    trial: int
    key: int  # 64-bit key that selects the episode's random numbers


class Episode:
    """One episode of a rollout, with its environment and its conversation in the sampler."""

    def __init__(self, request: RolloutRequest, kind: type[Any], welcome: Welcome | None) -> None:
        self.request, self.welcome, task = request, welcome, request.task
        self.in_background = welcome is not None or tools.may_wait(kind)
        self.environment: Any = None
        self.handle: Handle = None  # the episode's open conversation in the sampler
        self.replies: list[Message] = []  # replies to the model's last message
        self.calls: list[str] = []  # tool calls since the last message without a tool call
        self.work: Background | None = None  # work of the environment in the background
        # In the background, episodes would change the global state of each other.
        is_used = tools.uses_random_state(kind) and not self.in_background
        self.random: AbstractContextManager[None] = RandomState(task) if is_used else nullcontext()
        self.raised: list[tuple[str, str]] = []  # (tool, exception) of the environment's last work
        self.ended, self.excused = False, ""  # excused: `left_out` if the current call fails
        known = {name: getattr(task, name) for name in ("domain", "family", "branch")}
        prompt = [dict(message) for message in task.prompt]
        self.trajectory = Trajectory(task_id=task.id, trial=request.trial, messages=prompt, **known)

    def end(self, reason: StopReason) -> None:
        self.trajectory.stop_reason, self.ended = reason, True


async def reward(episode: Episode, guard: Guard) -> None:
    t, environment, episode.excused = episode.trajectory, episode.environment, ""
    score = partial(tools.outcome_of, environment, t.stop_reason.value, t.messages)
    outcome = await guard("get_reward", score, tools.method_of(environment, "get_reward"))
    t.reward, t.reward_breakdown, t.difference = outcome


async def answer(
    parsed: Parsed, reply: Callable[..., Any], most: int, episode: Episode, guard: Guard
) -> None:
    """Let the environment answer tool calls; without tool calls, let the customer answer.

    `reply` is `reply_of` of `customers.py`, and `most` is `max_repeated_calls`.
    """
    trajectory, environment, episode.excused = episode.trajectory, episode.environment, ""
    methods = tools.tool_methods(type(environment))
    for name, arguments in parsed.calls:
        if most:
            episode.calls.append(json.dumps([name, arguments], sort_keys=True))
        call = partial(tools.answer_call, environment, name, arguments)
        result = await guard(name, call, methods.get(name, tools.raw_call(type(environment))))
        if result.raised:
            trajectory.num_tool_errors += 1
            episode.raised.append((name, result.raised))
        known = name if name in methods else UNKNOWN_TOOL
        calls, errors = trajectory.tools.get(known, (0, 0))
        trajectory.tools[known] = [calls + 1, errors + result.is_error]
        episode.replies.append({"role": "tool", "name": name, "content": result.content})
        if result.is_last:
            return episode.end(StopReason.COMPLETED)
        if most and episode.calls[-most:] == episode.calls[-1:] * most:
            return episode.end(StopReason.REPEATED_CALL)
    if not parsed.calls:
        episode.calls, episode.excused = [], "reply"
        method = tools.method_of(environment, "user", "reply")
        said = await guard("reply", partial(reply, environment, parsed.content), method)
        if said is not None:
            return episode.replies.append({"role": "user", "content": said})
        episode.excused = ""
        await guard("final message", partial(setattr, environment, "final_message", parsed.content))
        episode.end(StopReason.COMPLETED)
