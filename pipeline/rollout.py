"""Playing episodes, each until it ends.

The sampler's messages go to environments, and their replies back.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

from pipeline.chat import Chat
from pipeline.config import RolloutSettings
from pipeline.conversations import Sampled, SamplerEpisode
from pipeline.environments.base import call_tool, error_result, may_wait, settled, tool_schemas
from pipeline.generate_sampler import GenerateSampler
from pipeline.sampler import Sampler
from pipeline.tasks import Message, Task
from pipeline.tool_calls import Parsed
from pipeline.trajectory import StopReason, Trajectory

TURN_SHARE = 0.25  # of the messages under way: so many are completed before any is answered
MAX_CALLS = 64  # environments that wait for something outside, side by side

Value = TypeVar("Value")


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
    messages: list[Message] = field(default_factory=list)
    environment: Any = None
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    handle: SamplerEpisode | None = None
    stop_reason: StopReason | None = None
    num_turns: int = 0
    num_malformed_calls: int = 0
    reward: float = 0.0
    error: str = ""

    def append(self, ids: list[int], logprobs: list[float] | None = None) -> None:
        """Add sampled tokens (with their log-probabilities), or a reply's (without)."""
        self.completion_ids += ids
        self.loss_mask += [logprobs is not None] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)

    def fail(self, error: Exception) -> None:
        self.stop_reason = StopReason.ENVIRONMENT_ERROR
        self.error = f"{type(error).__name__}: {error}"

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
            reward=self.reward,
            num_turns=self.num_turns,
            num_malformed_calls=self.num_malformed_calls,
            error=self.error,
        )


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """A message that was sampled, and what will give the replies to it."""

    episode: _Episode
    replies: Callable[[], list[Message]]
    in_background: bool = False
    limited: bool = False  # replies are results of tools, whose length has a limit


class Rollout:
    """Plays episodes of any domain with one sampler, one chat format and the recipe's limits."""

    def __init__(
        self,
        sampler: Sampler | GenerateSampler,
        chat: Chat,
        environments: dict[str, type[Any]],
        limits: RolloutSettings,
        deterministic: bool = False,
    ) -> None:
        self.sampler, self.chat, self.environments = sampler, chat, environments
        self.limits, self.deterministic = limits, deterministic
        self.environment_s = 0.0  # spent in environments, or waiting for them
        self._pool = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="environment")

    def __call__(self, starts: Sequence[Start], greedy: bool = False) -> list[Trajectory]:
        """One trajectory per start, in order.

        Where runs must be deterministic, only episodes of one task are played side by side, so that
        the shapes of a forward pass do not depend on other tasks.
        """
        key = (lambda start: start.task.key) if self.deterministic else (lambda start: None)
        together = [list(group) for _, group in groupby(starts, key)]
        return [trajectory for group in together for trajectory in self._play(group, greedy)]

    def _play(self, starts: Sequence[Start], greedy: bool) -> list[Trajectory]:
        """Play at most `max_live_episodes` side by side; waiting ones take the places of others.

        Messages are taken when a share of those under way is complete, so that replies are
        computed together. Episodes whose environment works in the background are waited for once
        they are more than the others: the order of work depends on counts, never on time.
        """
        episodes = [_Episode(start=start) for start in starts]
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
        return self._score(episodes)

    def _admit(self, waiting: deque[_Episode], room: int) -> list[_Episode]:
        """Start episodes in free places, many at a time; returns those that are under way."""
        count = min(len(waiting), room)
        if count < min(len(waiting), max(1, self.limits.max_live_episodes // 4)):
            return []
        episodes = [waiting.popleft() for _ in range(count)]
        resets = [self._begin(e, partial(self._reset, e)) for e in episodes]
        for episode, reset in zip(episodes, resets, strict=True):
            self._prompt(episode, reset())
        begun = [episode for episode in episodes if episode.stop_reason is None]
        if begun:
            keys = [episode.start.key for episode in begun]
            handles = self.sampler.open([episode.prompt_ids for episode in begun], keys)
            for episode, handle in zip(begun, handles, strict=True):
                episode.handle = handle
        return begun

    def _begin(self, episode: _Episode, work: Callable[[], Value]) -> Callable[[], Value]:
        """Do an environment's work, now or in the background; what is returned gives its result."""
        if self._in_background(episode):
            return self._timed(self._pool.submit(work).result)
        result = self._timed(work)()
        return lambda: result

    def _timed(self, work: Callable[[], Value]) -> Callable[[], Value]:
        def timed() -> Value:
            begun = time.perf_counter()
            result = work()
            self.environment_s += time.perf_counter() - begun
            return result

        return timed

    def _in_background(self, episode: _Episode) -> bool:
        return may_wait(self.environments[episode.start.task.domain], episode.environment)

    def _reset(self, episode: _Episode) -> str | None:
        """Make the environment; returns what it adds to the request."""
        task = episode.start.task
        try:
            episode.environment = self.environments[task.domain]()
            addition = settled(episode.environment.reset(**task.row()))
            if addition is not None and not isinstance(addition, str):
                raise TypeError(f"reset returned {type(addition).__name__}, not text or None")
            return addition
        except Exception as error:  # code that is not ours: the episode fails, the run goes on
            episode.fail(error)
            return None

    def _prompt(self, episode: _Episode, addition: str | None) -> None:
        task = episode.start.task
        episode.messages = [dict(message) for message in task.prompt]
        if episode.stop_reason is not None:
            return
        if addition:
            request = episode.messages[-1]
            episode.messages[-1] = {**request, "content": request["content"] + addition}
        tools = tool_schemas(self.environments[task.domain])
        episode.prompt_ids = self.chat.prompt_ids(episode.messages, tools)
        if self._size(episode) >= self.limits.max_tokens:
            episode.stop_reason = StopReason.MAX_TOKENS

    @staticmethod
    def _size(episode: _Episode) -> int:
        return len(episode.prompt_ids) + len(episode.completion_ids)

    def _sample(self, live: Sequence[_Episode], greedy: bool) -> list[_Turn]:
        """Sample until a share of the messages is complete; returns their turns."""
        limits = self.limits
        room = [min(limits.max_tokens_per_turn, limits.max_tokens - self._size(e)) for e in live]
        until = math.ceil(len(live) * TURN_SHARE)
        sampled = self.sampler.sample([_handle(e) for e in live], room, greedy, until)
        return [
            self._begin_turn(episode, message)
            for episode, message in zip(live, sampled, strict=True)
            if message is not None
        ]

    def _begin_turn(self, episode: _Episode, sampled: Sampled) -> _Turn:
        """Take one sampled message and let the environment or the user answer it."""
        episode.append(sampled.ids, sampled.logprobs)
        episode.num_turns += 1
        parsed = self.chat.parse(sampled.ids)
        episode.messages.append(parsed.message())
        if not sampled.finished:
            episode.stop_reason = StopReason.MAX_TOKENS
            return _Turn(episode=episode, replies=list)
        calls = parsed.calls and not parsed.malformed
        background = not parsed.malformed and self._in_background(episode)
        replies = self._begin(episode, partial(self._replies, episode, parsed))
        return _Turn(
            episode=episode, replies=replies, in_background=background, limited=bool(calls)
        )

    def _go_on(self, turn: _Turn) -> bool:
        """Feed the replies to the sampler; False where the episode has ended."""
        episode, replies = turn.episode, turn.replies()
        if turn.limited:
            replies = [self._limited(reply) for reply in replies]
        episode.messages += replies
        if episode.stop_reason is None and episode.num_turns >= self.limits.max_turns:
            episode.stop_reason = StopReason.MAX_TURNS
        if episode.stop_reason is None:
            ids = self.chat.reply_ids(replies)
            if self._size(episode) + len(ids) < self.limits.max_tokens:
                episode.append(ids)
                self.sampler.extend(_handle(episode), ids)
                return True
            episode.stop_reason = StopReason.MAX_TOKENS
        self.sampler.close(_handle(episode))
        return False

    def _limited(self, reply: Message) -> Message:
        if self.chat.num_content_tokens(reply["content"]) <= self.limits.max_tool_result_tokens:
            return reply
        return {**reply, "content": error_result("result too long")}

    def _replies(self, episode: _Episode, parsed: Parsed) -> list[Message]:
        """What the environment or the user answers.

        Sets the stop reason when the episode ends here.
        """
        environment = episode.environment
        if parsed.malformed:
            episode.num_malformed_calls += 1
            if episode.num_malformed_calls > self.limits.max_malformed_calls:
                episode.stop_reason = StopReason.MALFORMED_CALL
            content = error_result(f"malformed call: {parsed.malformed}")
            return [{"role": "tool", "name": "error", "content": content}]
        if not parsed.calls:
            return self._talk(episode, parsed.content)
        replies: list[Message] = []
        for name, arguments in parsed.calls:
            result = call_tool(environment, name, arguments)
            replies.append({"role": "tool", "name": name, "content": result})
            if getattr(environment, "done", False):
                episode.stop_reason = StopReason.COMPLETED
                break
        return replies

    def _talk(self, episode: _Episode, content: str) -> list[Message]:
        """A message without a call: the user answers, or it is the final one."""
        environment = episode.environment
        try:
            user = getattr(environment, "user", None)
            answer = settled(user.reply(content)) if user is not None else None
            if answer is not None and not isinstance(answer, str):
                raise TypeError(f"the user replied {type(answer).__name__}, not text or None")
        except Exception as error:
            episode.fail(error)
            return []
        if answer is not None:
            return [{"role": "user", "content": answer}]
        environment.final_message = content
        episode.stop_reason = StopReason.COMPLETED
        return []

    def _score(self, episodes: Sequence[_Episode]) -> list[Trajectory]:
        begun = [self._begin(e, partial(self._reward, e)) for e in episodes]
        for episode, reward in zip(episodes, begun, strict=True):
            episode.reward = reward()
        return [episode.trajectory() for episode in episodes]

    @staticmethod
    def _reward(episode: _Episode) -> float:
        if episode.stop_reason is StopReason.ENVIRONMENT_ERROR:
            return 0.0
        try:
            return float(settled(episode.environment.get_reward()))
        except Exception as error:
            episode.fail(error)
            return 0.0


def _handle(episode: _Episode) -> SamplerEpisode:
    assert episode.handle is not None
    return episode.handle
