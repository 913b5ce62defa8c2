"""The story of an episode, from `reset` to the reward.

`Episode.play` tells it: `_reset` makes the environment, `_converse` lets policy, tools and customer
take turns (or `_let_play` a user's own loop, which calls tools and customer itself), and `_score`
asks the environment for the reward. The policy is in `rollout.py`. Reward functions are called when
all episodes of a rollout have ended.
"""

import asyncio
import inspect
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipeline.common.untrusted import masked
from pipeline.config.settings import RolloutSettings
from pipeline.data.tasks import Message, Task
from pipeline.environments import tools
from pipeline.environments.agent_process import AgentProcess
from pipeline.environments.calls import Calls, awaited
from pipeline.environments.discovery import raw_call, tool_methods
from pipeline.environments.domains import Domain, Play
from pipeline.environments.faults import EnvironmentFault, FaultLog
from pipeline.environments.language_models.customers import OpeningMessage
from pipeline.environments.tools import RandomState, reply_of
from pipeline.models.chat.template import Chat
from pipeline.models.chat.text import Parsed
from pipeline.rollout.own_loop import Act, LoopPolicy, play
from pipeline.rollout.trajectory import (
    CAUSES,
    FAILED,
    Conversation,
    Pace,
    Policy,
    StopReason,
    Trajectory,
    Turn,
)

UNKNOWN_TOOL = "unknown"  # calls of all nonexistent tools are counted under this name


# Gives the customer's answer to a message, or None: (environment, message).
Reply = Callable[[Any, str], Any]
# Is shown the prompt and then each further message: (environment, messages).
Watch = Callable[[Any, list[Message]], None]


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    task: Task
    trial: int
    key: int  # 64-bit key that selects the episode's random numbers
    begun: int = 0  # number of optimizer steps before the one in which the episode begins


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the episodes of a rollout share."""

    policy: Policy
    chat: Chat
    limits: RolloutSettings
    calls: Calls
    faults: FaultLog
    greedy: bool
    has_reward_functions: bool = False
    judge: tools.Judge | None = None
    reply: Reply = reply_of
    watch: Watch | None = None
    alone: bool = False  # each message of a user's loop is sampled by itself


class Episode:
    """One episode of a rollout: a conversation of the policy with an environment.

    `opening_message` gives the environment a customer from outside.
    """

    def __init__(
        self,
        request: RolloutRequest,
        domain: Domain,
        shared: Shared,
        opening_message: OpeningMessage | None = None,
    ) -> None:
        self.task = request.task
        self.key = request.key
        self.begun = request.begun
        self.playing: asyncio.Task[None] | None = None  # from the episode's start on
        self.pace = Pace()
        self.recorded = list[Turn]()  # messages to be taken again
        self.domain = domain
        self.is_process = domain.is_process or isinstance(domain.loop, AgentProcess)
        self.opening_message = opening_message
        self.shared = shared
        self._until: float | None = None  # as the rollout's
        self.environment: Any = None
        self.returned: float | str | None = None  # by a user's loop
        self.in_background = opening_message is not None or tools.may_wait(domain.environment)
        # In the background, episodes would change the global state of each other.
        is_used = tools.uses_random_state(domain.environment) and not self.in_background
        self._random: AbstractContextManager[None] = (
            RandomState(self.task) if is_used else nullcontext()
        )
        self._repeated: list[str] = []  # tool calls since the last message without a tool call
        self._is_agents = False  # whether the code of a loop or agent has failed
        self._left_out = ""  # why training leaves the episode out if the current call fails
        self.trajectory = Trajectory(
            domain=self.task.domain,
            task_id=self.task.id,
            family=self.task.family,
            branch=self.task.branch,
            trial=request.trial,
            messages=[dict(message) for message in self.task.prompt],
        )
        self._messages = self.trajectory.messages  # the conversation as the environment sees it
        self._has_failed = False  # whether the latest call of a tool has
        self.conversation: Conversation | None = None  # from the episode's start on

    @property
    def waits_for_next_step(self) -> bool:
        """Whether the episode has sampled all the tokens that it may in this step."""
        return self.pace.left <= 0

    @property
    def has_ended(self) -> bool:
        """Whether the episode has ended, before it would have to wait for the next step."""
        is_over = self.playing is not None and self.playing.done()
        return is_over and not self.waits_for_next_step

    def result(self) -> None:
        """Raise what ends the whole rollout, if the episode has ended with it."""
        if self.playing is not None and self.playing.done():
            self.playing.result()

    @property
    def can_be_replayed(self) -> bool:
        """Whether the same messages lead to the same episode, as far as can be known."""
        return self.domain.loop is None and not self.in_background

    async def play(self) -> None:
        """Play the episode to its end, and score it; a failure of the environment ends it."""
        trajectory = self.trajectory
        schemas = self.domain.tools
        self.conversation = conversation = Conversation(
            trajectory=trajectory,
            schemas=schemas,
            key=self.key,
            greedy=self.shared.greedy,
            is_text=self.shared.has_reward_functions and not schemas,
            pace=self.pace,
            recorded=deque(self.recorded),
        )
        try:
            await self._play(conversation)
        except EnvironmentFault as fault:
            self.shared.policy.close(conversation)
            is_agents = self._is_agents and trajectory.num_turns > 0 and not fault.outage
            trajectory.stop_reason = FAILED[is_agents]
            trajectory.error = masked(str(fault))
            trajectory.left_out = "outage" if fault.outage else self._left_out
            self.shared.faults.add(*self.task.key, fault.call, str(fault))
        await self._close()
        causes = Counter(
            one.begun_by for one in trajectory.sequences if one.num_turns or one.num_sampled_tokens
        )
        trajectory.new_sequences = {cause: causes[cause] for cause in CAUSES if causes[cause]}

    async def _play(self, conversation: Conversation) -> None:
        trajectory = self.trajectory
        await self._reset()
        if self.domain.loop is None:
            trajectory.stop_reason = await self._converse(conversation)
            self.shared.policy.close(conversation)
            await self._score()
        else:
            trajectory.stop_reason = await self._let_play(self.domain.loop)
            if self.domain.has_get_reward:
                await self._score()

    async def _close(self) -> None:
        """Let an environment that gets raw calls, and so has no other tools, end what it holds."""
        close = getattr(self.environment, "close", None)
        if close is None or not raw_call(type(self.environment)):
            return

        async def closed() -> None:
            await awaited(close())

        try:
            await self._call("close", closed, close)
        except EnvironmentFault as fault:  # what the episode has earned stays
            self.shared.faults.add(*self.task.key, fault.call, str(fault))

    async def _converse(self, conversation: Conversation) -> StopReason:
        """Let policy, tools and customer take turns until something ends the episode."""
        trajectory = self.trajectory
        end = None
        self._show(trajectory.messages)
        while end is None:
            said = await self.shared.policy.message(conversation)
            self._show(trajectory.messages[-1:] if said is not None else [])
            if said is None or not said.finished:
                end = StopReason.MAX_TOKENS
            elif said.parsed.malformed:
                end = self._refuse(said.parsed.malformed)
            elif said.parsed.calls:
                end = await self._call_tools(said.parsed.calls)
            else:
                end = await self._ask_customer(said.parsed.content)
            if end is None and trajectory.num_turns >= self.shared.limits.max_turns:
                end = StopReason.MAX_TURNS
        return end

    async def _let_play(self, loop: Play) -> StopReason:
        """Let a user's loop play the episode; what it returns is the reward, or others score it."""
        trajectory = self.trajectory
        self._show(trajectory.messages)  # a person may change the request
        self.task = replace(self.task, prompt=tuple(map(dict, trajectory.messages)))
        self._messages = [*self.task.prompt]
        policy = LoopPolicy(
            self.shared.policy,
            self.shared.chat,
            self.shared.limits,
            trajectory,
            key=self.key,
            pace=self.pace,
            greedy=self.shared.greedy,
            alone=self.shared.alone,
            wake=self.shared.calls.answered.set,
            show=self._show,
            tools=self.domain.tools,
            call=self._call_of_loop,
            reply=self._reply_to_loop,
        )
        scored_by = "functions" if self.shared.has_reward_functions else "loop"
        scored_by = "environment" if self.domain.has_get_reward else scored_by
        try:
            self.returned = await self.shared.calls.loop(
                self.task.key,
                getattr(loop, "__name__", "play"),
                lambda: policy.busy_s,
                partial(play, loop, policy, self.task, scored_by),
            )
        except EnvironmentFault as fault:
            fault.outage = fault.outage or policy.lost_connection
            self._is_agents = policy.fault is None
            if self._is_agents:
                raise
        finally:
            policy.close()
            trajectory.num_turns = sum(one.num_turns for one in trajectory.sequences)
            if policy.fault is None:  # else the call that has failed says it
                # What the model has said may have made the loop fail.
                self._left_out = "" if trajectory.num_turns else "reset"
        if policy.fault is not None:
            raise policy.fault
        if isinstance(self.returned, str):
            final = {"role": "assistant", "content": self.returned}
            self._messages += [final] if self._messages[-1] != final else []
            await self._end_with(self.returned)
        trajectory.reward = self.returned if isinstance(self.returned, float) else 0.0
        trajectory.reward_breakdown = tools.explanation(policy.reward_parts)
        if policy.end is None and policy.is_cut:
            return StopReason.MAX_TOKENS
        return policy.end or StopReason.COMPLETED

    async def _reset(self) -> None:
        self._left_out = "reset"
        start = partial(tools.started, self.domain.make, self.task.row())
        reset = tools.method_of(self.domain.environment, "reset")
        started = await self._call("reset", start, reset)
        self.environment = started.environment
        self.in_background = started.in_background
        tools.give_judge(self.environment, self.shared.judge)
        request = self.trajectory.messages[-1]
        request["content"] += started.addition
        if self.opening_message is not None:
            self.in_background = True
            opening_message = partial(
                self.opening_message, self.environment, self.task, self.key, request["content"]
            )
            request["content"] = await self._call("customer", opening_message, self.opening_message)
            self.in_background = tools.may_wait(type(self.environment), self.environment)

    def _refuse(self, why: str) -> StopReason | None:
        """Answer a malformed tool call."""
        self.trajectory.num_malformed_calls += 1
        answer = tools.error_result(f"malformed call: {why}")
        self._add({"role": "tool", "name": "error", "content": answer})
        too_many = self.trajectory.num_malformed_calls > self.shared.limits.max_malformed_calls
        return StopReason.MALFORMED_CALL if too_many else None

    async def _call_tools(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> StopReason | None:
        self._left_out = ""
        methods = tool_methods(self.domain.environment)
        most = self.shared.limits.max_repeated_calls
        replies = list[Message]()
        end = None
        for name, arguments in calls:
            if most:
                self._repeated.append(json.dumps([name, arguments], sort_keys=True))
            call = partial(tools.answer_call, self.environment, name, arguments)
            method = methods.get(name, raw_call(self.domain.environment))
            try:
                result = await self._call(name, call, method)
            except EnvironmentFault:
                self._add(*replies)
                raise
            if result.raised:
                self.trajectory.num_tool_errors += 1
                self.shared.faults.add(*self.task.key, name, result.raised)
            known = name if name in methods else UNKNOWN_TOOL
            num_calls, num_errors = self.trajectory.tools.get(known, (0, 0))
            self.trajectory.tools[known] = [num_calls + 1, num_errors + result.is_error]
            self._has_failed = result.is_error
            replies.append({"role": "tool", "name": name, "content": result.content})
            if result.is_last:
                end = StopReason.COMPLETED
                break
            if most and self._repeated[-most:] == self._repeated[-1:] * most:
                end = StopReason.REPEATED_CALL
                break
        self._add(*replies)
        return end

    async def _call_of_loop(self, name: str, arguments: dict[str, Any]) -> Act:
        calls = [(name, arguments)]
        self._messages.append(Parsed(content="", calls=calls).message())
        end = await self._call_tools(calls)
        result = self._messages[-1]
        told = {key: result[key] for key in ("role", "name", "content")}
        return {**told, "is_error": self._has_failed or "raw_content" in result}, end

    async def _reply_to_loop(self, text: str) -> Act:
        self._messages.append({"role": "assistant", "content": text})
        end = await self._ask_customer(text)
        return (None if end else self._messages[-1]["content"]), end

    async def _ask_customer(self, message: str) -> StopReason | None:
        self._repeated = []
        self._left_out = "reply"
        reply = tools.method_of(self.environment, "user", "reply")
        ask = partial(self.shared.reply, self.environment, message)
        said = await self._call("reply", ask, reply)
        if said is not None:
            self._add({"role": "user", "content": said})
            return None
        await self._end_with(message)
        return StopReason.COMPLETED

    async def _end_with(self, message: str) -> None:
        self._left_out = ""
        await self._call(
            "final message", partial(setattr, self.environment, "final_message", message)
        )

    def _add(self, *replies: Message) -> None:
        """Add replies to the conversation; the result of a tool that is too long is an error."""
        most = self.shared.limits.max_tool_result_tokens
        for reply in (reply for reply in replies if reply["role"] == "tool"):
            num_tokens = self.shared.chat.num_content_tokens(reply["content"])
            if num_tokens > most:
                reply["raw_content"] = reply["content"]
                reply["content"] = tools.error_result("result too long")
                why = f"its result has {num_tokens} tokens, max_tool_result_tokens is {most}"
                self.shared.faults.add(*self.task.key, reply["name"], why)
        self._messages += replies
        if self.domain.loop is None:  # else its policy shows what it makes of them
            self._show(list(replies))

    def _show(self, messages: list[Message]) -> None:
        if self.shared.watch is not None:
            self.shared.watch(self.environment, messages)

    async def _score(self) -> None:
        trajectory = self.trajectory
        self._left_out = ""
        self._until = math.inf  # what is over is scored
        said = [  # without thoughts, which the chat template alone needs
            {key: value for key, value in message.items() if key != "reasoning_content"}
            for message in self._messages
        ]
        score = partial(tools.outcome_of, self.environment, trajectory.stop_reason.value, said)
        method = tools.method_of(self.environment, "get_reward")
        outcome = await self._call("get_reward", score, method)
        trajectory.reward, trajectory.reward_breakdown, trajectory.difference = outcome

    async def _call(self, name: str, call: Callable[[], Any], method: Any = None) -> Any:
        """Make a call of environment code; a call of a coroutine function needs no thread."""
        if self.in_background:
            return await self.shared.calls.beside(
                self.task.key,
                name,
                call,
                is_async=inspect.iscoroutinefunction(method),
                until=self._until,
            )
        with self._random:
            return self.shared.calls.here(self.task.key, name, call)
