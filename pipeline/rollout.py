"""Playing episodes, each until it ends.

The sampler's messages go to environments, and their replies back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from pipeline.chat import Chat
from pipeline.config import RolloutSettings
from pipeline.environments.base import call_tool, error_result, settled, tool_schemas
from pipeline.sampler import Sampled, Sampler, SamplerEpisode
from pipeline.tasks import Message, Task
from pipeline.tool_calls import Parsed
from pipeline.trajectory import StopReason, Trajectory


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
    messages: list[Message]
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


class Rollout:
    """Plays episodes of any domain with one sampler, one chat format and the recipe's limits."""

    def __init__(
        self,
        sampler: Sampler,
        chat: Chat,
        environments: dict[str, type[Any]],
        limits: RolloutSettings,
        deterministic: bool = False,
    ) -> None:
        self.sampler, self.chat, self.environments = sampler, chat, environments
        self.limits, self.deterministic = limits, deterministic

    def __call__(self, starts: Sequence[Start], greedy: bool = False) -> list[Trajectory]:
        """One trajectory per start, in order.

        At most `max_live_episodes` are played side by side; where runs must be deterministic, only
        those of one task, so that the shapes of a forward pass do not depend on other tasks.
        """
        key = (lambda start: start.task.key) if self.deterministic else (lambda start: None)
        size = self.limits.max_live_episodes
        together = [list(group) for _, group in groupby(starts, key)]
        batches = [group[i : i + size] for group in together for i in range(0, len(group), size)]
        return [trajectory for batch in batches for trajectory in self._play(batch, greedy)]

    def _play(self, starts: Sequence[Start], greedy: bool) -> list[Trajectory]:
        episodes = [self._reset(start) for start in starts]
        live = [episode for episode in episodes if episode.stop_reason is None]
        if live:
            handles = self.sampler.open([e.prompt_ids for e in live], [e.start.key for e in live])
            for episode, handle in zip(live, handles, strict=True):
                episode.handle = handle
        while live:
            room = [
                min(self.limits.max_tokens_per_turn, self.limits.max_tokens - self._size(e))
                for e in live
            ]
            sampled = self.sampler.sample([_handle(e) for e in live], room, greedy)
            for episode, message in zip(live, sampled, strict=True):
                self._take_turn(episode, message)
                if episode.stop_reason is not None:
                    self.sampler.close(_handle(episode))
            live = [episode for episode in live if episode.stop_reason is None]
        return [self._score(episode) for episode in episodes]

    def _reset(self, start: Start) -> _Episode:
        task = start.task
        messages = [dict(message) for message in task.prompt]
        episode = _Episode(start=start, messages=messages)
        try:
            episode.environment = self.environments[task.domain]()
            addition = settled(episode.environment.reset(**task.row()))
            if addition is not None and not isinstance(addition, str):
                raise TypeError(f"reset returned {type(addition).__name__}, not text or None")
        except Exception as error:  # code that is not ours: the episode fails, the run goes on
            episode.fail(error)
            return episode
        if addition:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + addition}
        tools = tool_schemas(self.environments[task.domain])
        episode.prompt_ids = self.chat.prompt_ids(messages, tools)
        if self._size(episode) >= self.limits.max_tokens:
            episode.stop_reason = StopReason.MAX_TOKENS
        return episode

    @staticmethod
    def _size(episode: _Episode) -> int:
        return len(episode.prompt_ids) + len(episode.completion_ids)

    def _take_turn(self, episode: _Episode, sampled: Sampled) -> None:
        """Take one sampled message.

        Then either the episode has a stop reason, or its reply is in the sampler.
        """
        episode.append(sampled.ids, sampled.logprobs)
        episode.num_turns += 1
        parsed = self.chat.parse(sampled.ids)
        episode.messages.append(parsed.message())
        if not sampled.finished:
            episode.stop_reason = StopReason.MAX_TOKENS
            return
        replies = self._replies(episode, parsed)
        episode.messages += replies
        if episode.stop_reason is not None:
            return
        if episode.num_turns >= self.limits.max_turns:
            episode.stop_reason = StopReason.MAX_TURNS
            return
        ids = self.chat.reply_ids(replies)
        if self._size(episode) + len(ids) >= self.limits.max_tokens:
            episode.stop_reason = StopReason.MAX_TOKENS
            return
        episode.append(ids)
        self.sampler.extend(_handle(episode), ids)

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
            if self.chat.num_content_tokens(result) > self.limits.max_tool_result_tokens:
                result = error_result("result too long")
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

    def _score(self, episode: _Episode) -> Trajectory:
        if episode.stop_reason is not StopReason.ENVIRONMENT_ERROR:
            try:
                episode.reward = float(settled(episode.environment.get_reward()))
            except Exception as error:
                episode.fail(error)
        assert episode.stop_reason is not None
        return Trajectory(
            domain=episode.start.task.domain,
            task_id=episode.start.task.id,
            family=episode.start.task.family,
            branch=episode.start.task.branch,
            trial=episode.start.trial,
            prompt_ids=episode.prompt_ids,
            completion_ids=episode.completion_ids,
            loss_mask=episode.loss_mask,
            logprobs=episode.logprobs,
            messages=episode.messages,
            stop_reason=episode.stop_reason,
            reward=episode.reward,
            num_turns=episode.num_turns,
            num_malformed_calls=episode.num_malformed_calls,
            error=episode.error,
        )


def _handle(episode: _Episode) -> SamplerEpisode:
    assert episode.handle is not None
    return episode.handle
