"""Playing episodes, each until it ends.

The sampler's messages go to environments, and their replies back.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from pipeline.chat.template import Chat
from pipeline.chat.text import Parsed
from pipeline.config.settings import RolloutSettings
from pipeline.data.tasks import Message, Task
from pipeline.environments.timeouts import Calls, Guard, Work
from pipeline.environments.tools import (
    EnvironmentFault,
    Outcome,
    answer_call,
    error_result,
    may_wait,
    outcome_of,
    reply_of,
    started,
    tool_methods,
    tool_schemas,
)
from pipeline.rollout.sampler import Handle, Sampler
from pipeline.rollout.trajectory import Sampled, StopReason, Trajectory

NO_OUTCOME = Outcome(0.0, {}, {})
UNKNOWN_TOOL = "unknown"  # what calls of tools that do not exist are counted under
TURN_SHARE = 0.25  # of the messages under way: so many are completed before any is answered


@dataclass(frozen=True, kw_only=True)
class Start:
    """An episode to play: a task, which trial of it, and the key of its draws."""

    task: Task
    trial: int
    key: int


@dataclass(kw_only=True)
class _Episode:
    """An episode under way."""

    start: Start
    beside: bool  # its environment works in the background
    messages: list[Message] = field(default_factory=list)
    environment: Any = None
    addition: str = ""  # to the request, of the environment's
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    handle: Handle = None  # of its sampler, while the conversation is open there
    stop_reason: StopReason | None = None
    num_turns: int = 0
    num_malformed_calls: int = 0
    num_tool_errors: int = 0
    outcome: Outcome = NO_OUTCOME
    error: str = ""
    serves: str = ""  # reset or reply, while that is called: the policy is not answerable for it
    left_out: str = ""
    tools: dict[str, list[int]] = field(default_factory=dict)  # calls, and those with an error

    def append(self, ids: list[int], logprobs: list[float] | None = None) -> None:
        """Add sampled tokens (with their log-probabilities), or a reply's (without)."""
        self.completion_ids += ids
        self.loss_mask += [logprobs is not None] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)

    def fail(self, fault: EnvironmentFault) -> None:
        self.stop_reason, self.error = StopReason.ENVIRONMENT_ERROR, str(fault)
        self.left_out = "outage" if fault.outage else self.serves

    def trajectory(self) -> Trajectory:
        assert self.stop_reason is not None
        task = self.start.task
        return Trajectory(
            domain=task.domain,
            task_id=task.id,
            family=task.family,
            branch=task.branch,
            trial=self.start.trial,
            prompt_ids=self.prompt_ids,
            completion_ids=self.completion_ids,
            loss_mask=self.loss_mask,
            logprobs=self.logprobs,
            messages=self.messages,
            stop_reason=self.stop_reason,
            reward=self.outcome.reward,
            num_turns=self.num_turns,
            num_malformed_calls=self.num_malformed_calls,
            num_tool_errors=self.num_tool_errors,
            error=self.error,
            left_out=self.left_out,
            tools=self.tools,
            reward_breakdown=self.outcome.reward_breakdown,
            difference=self.outcome.difference,
        )


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """A message that was sampled, and the replies to it, which are there after `wait`."""

    episode: _Episode
    replies: list[Message] = field(default_factory=list)
    wait: Callable[[], None]
    in_background: bool = False
    limited: bool = False  # replies are results of tools, whose length has a limit


def _nothing(*_: Any) -> None:
    """Where there is nobody to tell, or nothing to wait for."""


class Rollout:
    """Plays episodes of any domain with one sampler, one chat format and the recipe's limits.

    `on_progress` is told what comes next: domain/task_id before each call of an environment or wait
    for one, nothing ("") before each pass of the sampler. What it raises at a pass ends the
    rollout, which leaves no conversation open and can be used again.
    """

    def __init__(
        self,
        sampler: Sampler,
        chat: Chat,
        environments: dict[str, type[Any]],
        limits: RolloutSettings,
        deterministic: bool = False,
        *,
        on_progress: Callable[[str], None] = _nothing,
    ) -> None:
        self.sampler, self.chat, self.environments = sampler, chat, environments
        self.limits, self.deterministic, self.on_progress = limits, deterministic, on_progress
        self.environment_s = 0.0  # spent in environments, or waiting for them
        self._calls = Calls(limits.call_timeout, lambda key: self.on_progress(key))

    def __call__(self, starts: Sequence[Start], greedy: bool = False) -> list[Trajectory]:
        """One trajectory per start, in order.

        Where runs must be deterministic, only episodes of one task are played side by side, so that
        the shapes of a forward pass do not depend on other tasks.
        """
        self._calls.forget()
        key = (lambda start: start.task.key) if self.deterministic else (lambda start: None)
        together = [list(group) for _, group in groupby(starts, key)]
        return [trajectory for group in together for trajectory in self._play(group, greedy)]

    def _play(self, starts: Sequence[Start], greedy: bool) -> list[Trajectory]:
        """Play at most `max_live_episodes` side by side; waiting ones take the places of others.

        Messages are taken when a share of those under way is complete, so that replies are
        computed together. Episodes whose environment works in the background are waited for once
        they are more than the others: the order of work depends on counts, never on time.
        """
        beside = {domain: may_wait(known) for domain, known in self.environments.items()}
        episodes = [_Episode(start=start, beside=beside[start.task.domain]) for start in starts]
        try:
            self._play_out(episodes, greedy)
            return self._score(episodes)
        except BaseException:
            self._calls.forget()
            for episode in episodes:
                self._close(episode)
            raise

    def _play_out(self, episodes: Sequence[_Episode], greedy: bool) -> None:
        waiting, live, away = deque(episodes), list[_Episode](), list[_Turn]()
        while waiting or live or away:
            live += self._admit(waiting, self.limits.max_live_episodes - len(live) - len(away))
            turns = self._sample(live, greedy) if live else []
            gone = {id(turn.episode) for turn in turns}
            live = [episode for episode in live if id(episode) not in gone]
            ready = [turn for turn in turns if not turn.in_background]
            away += [turn for turn in turns if turn.in_background]
            if len(away) > len(live) + len(ready):
                ready, away = [*ready, *away], []
            live += [turn.episode for turn in ready if self._go_on(turn)]

    def _admit(self, waiting: deque[_Episode], room: int) -> list[_Episode]:
        """Start episodes in free places, many at a time; returns those that are under way."""
        count = min(len(waiting), room)
        if count < min(len(waiting), max(1, self.limits.max_live_episodes // 4)):
            return []
        episodes = [waiting.popleft() for _ in range(count)]
        for wait in [self._begin(e, partial(self._reset, e)) for e in episodes]:
            wait()
        for episode in episodes:
            self._prompt(episode)
        begun = [episode for episode in episodes if episode.stop_reason is None]
        if begun:
            keys = [episode.start.key for episode in begun]
            handles = self.sampler.open([episode.prompt_ids for episode in begun], keys)
            for episode, handle in zip(begun, handles, strict=True):
                episode.handle = handle
        return begun

    async def _reset(self, episode: _Episode, guard: Guard) -> None:
        task = episode.start.task
        start = partial(started, self.environments[task.domain], task.row())
        episode.serves = "reset"
        episode.environment, episode.addition, episode.beside = await guard("reset", start)

    def _prompt(self, episode: _Episode) -> None:
        task = episode.start.task
        episode.messages = [dict(message) for message in task.prompt]
        if episode.stop_reason is not None:
            return
        if episode.addition:
            request = episode.messages[-1]
            episode.messages[-1] = {**request, "content": request["content"] + episode.addition}
        tools = tool_schemas(self.environments[task.domain])
        episode.prompt_ids = self.chat.prompt_ids(episode.messages, tools)
        if self._size(episode) >= self.limits.max_tokens:
            episode.stop_reason = StopReason.MAX_TOKENS

    def _sample(self, live: Sequence[_Episode], greedy: bool) -> list[_Turn]:
        """Sample until a share of the messages is complete; returns their turns."""
        self.on_progress("")
        limits = self.limits
        room = [min(limits.max_tokens_per_turn, limits.max_tokens - self._size(e)) for e in live]
        until = math.ceil(len(live) * TURN_SHARE)
        sampled = self.sampler.sample([e.handle for e in live], room, greedy, until)
        return [
            self._begin_turn(episode, message)
            for episode, message in zip(live, sampled, strict=True)
            if message is not None
        ]

    def _begin_turn(self, episode: _Episode, sampled: Sampled) -> _Turn:
        """Take one sampled message and let the environment or the user answer it."""
        episode.append(sampled.ids, sampled.logprobs)
        episode.num_turns += 1
        tools = tool_schemas(self.environments[episode.start.task.domain])
        parsed = self.chat.parse(sampled.ids, tools, sampled.finished)
        episode.messages.append(parsed.message())
        if sampled.finished and sampled.ids[-1] != self.chat.end_of_turn_id:
            episode.messages[-1]["stopped_by"] = self.chat.tokenizer.decode(sampled.ids[-1:])
        turn = partial(_Turn, episode=episode)
        if not sampled.finished:
            episode.stop_reason = StopReason.MAX_TOKENS
            return turn(wait=_nothing)
        if parsed.malformed:
            return turn(wait=_nothing, replies=self._refuse(episode, parsed.malformed))
        replies: list[Message] = []
        return turn(
            wait=self._begin(episode, partial(self._answer, episode, parsed, replies)),
            replies=replies,
            in_background=episode.beside,
            limited=bool(parsed.calls),
        )

    def _refuse(self, episode: _Episode, malformed: str) -> list[Message]:
        episode.num_malformed_calls += 1
        if episode.num_malformed_calls > self.limits.max_malformed_calls:
            episode.stop_reason = StopReason.MALFORMED_CALL
        content = error_result(f"malformed call: {malformed}")
        return [{"role": "tool", "name": "error", "content": content}]

    @staticmethod
    async def _answer(
        episode: _Episode, parsed: Parsed, replies: list[Message], guard: Guard
    ) -> None:
        """Let the environment answer calls, or the user a message; sets how the episode ends."""
        environment, episode.serves = episode.environment, ""
        for name, arguments in parsed.calls:
            answer = await guard(name, partial(answer_call, environment, name, arguments))
            episode.num_tool_errors += answer.raised
            known = name if name in tool_methods(type(environment)) else UNKNOWN_TOOL
            count = episode.tools.setdefault(known, [0, 0])
            episode.tools[known] = [count[0] + 1, count[1] + answer.is_error]
            replies.append({"role": "tool", "name": name, "content": answer.content})
            if answer.is_last:
                episode.stop_reason = StopReason.COMPLETED
                return
        if not parsed.calls:
            episode.serves = "reply"
            reply = await guard("reply", partial(reply_of, environment, parsed.content))
            if reply is None:
                episode.serves, closing = "", partial(setattr, environment, "final_message")
                await guard("final message", partial(closing, parsed.content))
                episode.stop_reason = StopReason.COMPLETED
            else:
                replies.append({"role": "user", "content": reply})

    def _go_on(self, turn: _Turn) -> bool:
        """Feed the replies to the sampler; False where the episode has ended."""
        turn.wait()
        episode, replies = turn.episode, turn.replies
        if turn.limited:
            replies = [self._limited(reply) for reply in replies]
        episode.messages += replies
        if episode.stop_reason is None and episode.num_turns >= self.limits.max_turns:
            episode.stop_reason = StopReason.MAX_TURNS
        if episode.stop_reason is None:
            ids = self.chat.reply_ids(replies)
            if self._size(episode) + len(ids) < self.limits.max_tokens:
                episode.append(ids)
                self.sampler.extend(episode.handle, ids)
                return True
            episode.stop_reason = StopReason.MAX_TOKENS
        self._close(episode)
        return False

    def _limited(self, reply: Message) -> Message:
        if self.chat.num_content_tokens(reply["content"]) <= self.limits.max_tool_result_tokens:
            return reply
        return {**reply, "content": error_result("result too long")}

    def _close(self, episode: _Episode) -> None:
        handle, episode.handle = episode.handle, None
        if handle is not None:
            self.sampler.close(handle)

    def _score(self, episodes: Sequence[_Episode]) -> list[Trajectory]:
        played = [e for e in episodes if e.stop_reason is not StopReason.ENVIRONMENT_ERROR]
        for wait in [self._begin(e, partial(self._reward, e)) for e in played]:
            wait()
        return [episode.trajectory() for episode in episodes]

    @staticmethod
    async def _reward(episode: _Episode, guard: Guard) -> None:
        episode.serves = ""
        episode.outcome = await guard("get_reward", partial(outcome_of, episode.environment))

    def _begin(self, episode: _Episode, work: Work) -> Callable[[], None]:
        """Do an environment's work, now or in the background; what is returned waits for it.

        What goes wrong in it ends the episode.
        """
        key = episode.start.task.key
        if episode.beside:
            return partial(self._attempt, episode, self._calls.beside(key, work))
        self._attempt(episode, partial(self._calls.here, key, work))
        return _nothing

    def _attempt(self, episode: _Episode, work: Callable[[], None]) -> None:
        begun = time.perf_counter()
        try:
            work()
        except EnvironmentFault as fault:  # of code that is not ours: the run goes on
            episode.fail(fault)
        self.environment_s += time.perf_counter() - begun

    @staticmethod
    def _size(episode: _Episode) -> int:
        return len(episode.prompt_ids) + len(episode.completion_ids)
