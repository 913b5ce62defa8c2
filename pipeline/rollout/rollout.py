"""Plays episodes: messages go from the sampler to environments, and replies back."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import groupby
from typing import Any

from pipeline.chat.template import Chat
from pipeline.chat.text import Parsed
from pipeline.config.settings import RolloutSettings
from pipeline.data.tasks import Message, Task
from pipeline.environments.calls import Calls, Guard
from pipeline.environments.tools import (
    EnvironmentFault,
    Outcome,
    answer_call,
    error_result,
    may_wait,
    outcome_of,
    reply_method,
    reply_of,
    started,
    tool_methods,
    tool_schemas,
)
from pipeline.rollout.sampler import Handle, Sampler
from pipeline.rollout.trajectory import Sampled, StopReason, Trajectory

NO_OUTCOME = Outcome(0.0, {}, {})
UNKNOWN_TOOL = "unknown"  # the name under which calls of tools that do not exist are counted
TURN_SHARE = 0.25  # fraction of running messages to finish before replies are computed


@dataclass(frozen=True, kw_only=True)
class Start:
    """An episode to play: a task, the number of the trial, and the key of its draws."""

    task: Task
    trial: int
    key: int


@dataclass(kw_only=True, eq=False)
class _Episode:
    """An episode under way; fields of its Trajectory have the same names here."""

    start: Start
    in_background: bool  # whether its environment works in a thread
    environment: Any = None
    addition: str = ""  # text of the environment that is appended to the request
    handle: Handle = None  # of its open conversation in the sampler
    replies: list[Message] = field(default_factory=list)  # to the last message; after `wait`
    wait: Callable[[], None] | None = None  # waits for the environment's work, if that is under way
    excused: str = ""  # "reset" or "reply" during these calls, whose failure is left out
    outcome: Outcome = NO_OUTCOME
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    messages: list[Message]
    stop_reason: StopReason | None = None
    num_turns: int = 0
    num_malformed_calls: int = 0
    num_tool_errors: int = 0
    error: str = ""
    left_out: str = ""
    tools: dict[str, list[int]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    def append(self, ids: list[int], logprobs: list[float] | None = None) -> None:
        """Add sampled tokens (with their log-probabilities), or a reply's (without)."""
        self.completion_ids += ids
        self.loss_mask += [logprobs is not None] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)

    def trajectory(self) -> Trajectory:
        assert self.stop_reason is not None
        task, names = self.start.task, {f.name for f in fields(Trajectory)}
        return Trajectory(
            domain=task.domain,
            task_id=task.id,
            family=task.family,
            branch=task.branch,
            trial=self.start.trial,
            reward=self.outcome.reward,
            reward_breakdown=self.outcome.reward_breakdown,
            difference=self.outcome.difference,
            **{name: value for name, value in vars(self).items() if name in names},
        )


EpisodeWork = Callable[[_Episode, Guard], Coroutine[Any, Any, None]]


class Rollout:
    """Plays episodes of any domain with one sampler, one chat format and the recipe's limits.

    `on_progress` is called with domain/task_id before each call of an environment or wait for one,
    and with "" before each call of the sampler. An exception that it raises before a call of the
    sampler ends the rollout, which leaves no conversation open and can be used again.
    """

    def __init__(
        self,
        sampler: Sampler,
        chat: Chat,
        environments: dict[str, type[Any]],
        limits: RolloutSettings,
        deterministic: bool = False,
        *,
        on_progress: Callable[[str], None] = lambda key: None,
    ) -> None:
        self.sampler, self.chat, self.environments = sampler, chat, environments
        self.limits, self.deterministic, self.on_progress = limits, deterministic, on_progress
        self.environment_s = 0.0  # seconds spent in environments, or waiting for them
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
        """Play the episodes, at most `max_concurrent_episodes` side by side, and score them."""
        background = {name: may_wait(known) for name, known in self.environments.items()}
        episodes = [
            _Episode(
                start=start,
                in_background=background[start.task.domain],
                messages=[dict(message) for message in start.task.prompt],
            )
            for start in starts
        ]
        try:
            self._play_turns(deque(episodes), greedy)
            for episode in episodes:
                if episode.stop_reason is not StopReason.ENVIRONMENT_ERROR:
                    self._begin(episode, _score)
            for episode in episodes:
                self._wait(episode)
        except BaseException:
            self._calls.forget()
            for episode in episodes:
                self._close(episode)
            raise
        return [episode.trajectory() for episode in episodes]

    def _play_turns(self, waiting: deque[_Episode], greedy: bool) -> None:
        """Play until all episodes have ended.

        Episodes whose environment works in the background are waited for once they outnumber the
        others: the order of work depends on counts, never on time.
        """
        live: list[_Episode] = []  # the sampler has their next message to sample
        away: list[_Episode] = []  # their environment works in the background
        while waiting or live or away:
            live += self._start(
                waiting, self.limits.max_concurrent_episodes - len(live) - len(away)
            )
            answered = self._sample(live, greedy) if live else []
            gone = set(answered)
            live = [episode for episode in live if episode not in gone]
            ready = [episode for episode in answered if episode.wait is None]
            away += [episode for episode in answered if episode.wait is not None]
            if len(away) > len(live) + len(ready):
                ready, away = [*ready, *away], []
            live += [episode for episode in ready if self._continue(episode)]

    def _start(self, waiting: deque[_Episode], room: int) -> list[_Episode]:
        """Start episodes in free places, many at a time; returns those that go on."""
        count = min(len(waiting), room)
        if count < min(len(waiting), max(1, self.limits.max_concurrent_episodes // 4)):
            return []
        episodes = [waiting.popleft() for _ in range(count)]
        for episode in episodes:
            self._begin(episode, self._reset)
        for episode in episodes:
            self._wait(episode)
            if episode.stop_reason is None:
                self._encode_prompt(episode)
        live = [episode for episode in episodes if episode.stop_reason is None]
        if live:
            prompts, keys = [e.prompt_ids for e in live], [e.start.key for e in live]
            for episode, handle in zip(live, self.sampler.open(prompts, keys), strict=True):
                episode.handle = handle
        return live

    async def _reset(self, episode: _Episode, guard: Guard) -> None:
        task, episode.excused = episode.start.task, "reset"
        start = partial(started, self.environments[task.domain], task.row())
        episode.environment, episode.addition, episode.in_background = await guard("reset", start)

    def _encode_prompt(self, episode: _Episode) -> None:
        if episode.addition:
            episode.messages[-1]["content"] += episode.addition
        tools = tool_schemas(self.environments[episode.start.task.domain])
        episode.prompt_ids = self.chat.prompt_ids(episode.messages, tools)
        if episode.num_tokens >= self.limits.max_tokens:
            episode.stop_reason = StopReason.MAX_TOKENS

    def _sample(self, live: Sequence[_Episode], greedy: bool) -> list[_Episode]:
        """Sample until a share of the messages is complete; returns the episodes of these."""
        self.on_progress("")
        limits = self.limits
        room = [min(limits.max_tokens_per_turn, limits.max_tokens - e.num_tokens) for e in live]
        until = math.ceil(len(live) * TURN_SHARE)
        messages = self.sampler.sample([e.handle for e in live], room, greedy, until)
        pairs = zip(live, messages, strict=True)
        complete = [(episode, message) for episode, message in pairs if message is not None]
        for episode, message in complete:
            self._take(episode, message)
        return [episode for episode, _ in complete]

    def _take(self, episode: _Episode, sampled: Sampled) -> None:
        """Add a message to its episode, and let the environment or the user answer it."""
        episode.append(sampled.ids, sampled.logprobs)
        episode.num_turns += 1
        episode.replies = []
        tools = tool_schemas(self.environments[episode.start.task.domain])
        parsed = self.chat.parse(sampled.ids, tools, sampled.finished)
        episode.messages.append(parsed.message())
        if sampled.finished and sampled.ids[-1] != self.chat.end_of_turn_id:
            episode.messages[-1]["stopped_by"] = self.chat.tokenizer.decode(sampled.ids[-1:])
        if not sampled.finished:
            episode.stop_reason = StopReason.MAX_TOKENS
        elif parsed.malformed:
            episode.num_malformed_calls += 1
            if episode.num_malformed_calls > self.limits.max_malformed_calls:
                episode.stop_reason = StopReason.MALFORMED_CALL
            content = error_result(f"malformed call: {parsed.malformed}")
            episode.replies = [{"role": "tool", "name": "error", "content": content}]
        else:
            self._begin(episode, partial(_answer, parsed))

    def _continue(self, episode: _Episode) -> bool:
        """Append the replies to the last message; False if the episode has ended."""
        self._wait(episode)
        replies = [self._limited(reply) for reply in episode.replies]
        episode.messages += replies
        if episode.stop_reason is None and episode.num_turns >= self.limits.max_turns:
            episode.stop_reason = StopReason.MAX_TURNS
        if episode.stop_reason is None:
            ids = self.chat.reply_ids(replies)
            if episode.num_tokens + len(ids) < self.limits.max_tokens:
                episode.append(ids)
                self.sampler.extend(episode.handle, ids)
                return True
            episode.stop_reason = StopReason.MAX_TOKENS
        self._close(episode)
        return False

    def _limited(self, reply: Message) -> Message:
        """The reply, or an error in place of a tool's result that is too long."""
        most = self.limits.max_tool_result_tokens
        if reply["role"] != "tool" or self.chat.num_content_tokens(reply["content"]) <= most:
            return reply
        return {**reply, "content": error_result("result too long")}

    def _close(self, episode: _Episode) -> None:
        handle, episode.handle = episode.handle, None
        if handle is not None:
            self.sampler.close(handle)

    def _begin(self, episode: _Episode, work: EpisodeWork) -> None:
        """Do an environment's work, in the background if it is to be done there."""
        key = episode.start.task.key
        if episode.in_background:
            episode.wait = self._calls.beside(key, partial(work, episode))
        else:
            episode.wait = partial(self._calls.here, key, partial(work, episode))
            self._wait(episode)

    def _wait(self, episode: _Episode) -> None:
        """Wait until an environment's work is done; its failure ends the episode, not the run."""
        wait, episode.wait = episode.wait, None
        if wait is None:
            return
        begun = time.perf_counter()
        try:
            wait()
        except EnvironmentFault as fault:
            episode.stop_reason, episode.error = StopReason.ENVIRONMENT_ERROR, str(fault)
            episode.left_out = "outage" if fault.outage else episode.excused
        self.environment_s += time.perf_counter() - begun


async def _score(episode: _Episode, guard: Guard) -> None:
    episode.excused = ""
    method = type(episode.environment).get_reward
    episode.outcome = await guard("get_reward", partial(outcome_of, episode.environment), method)


async def _answer(parsed: Parsed, episode: _Episode, guard: Guard) -> None:
    """Let the environment answer calls, or the user a message; sets how the episode ends."""
    environment, episode.excused = episode.environment, ""
    tools = tool_methods(type(environment))
    for name, arguments in parsed.calls:
        call = partial(answer_call, environment, name, arguments)
        answer = await guard(name, call, tools.get(name))
        episode.num_tool_errors += answer.raised
        known = name if name in tools else UNKNOWN_TOOL
        calls, errors = episode.tools.get(known, (0, 0))
        episode.tools[known] = [calls + 1, errors + answer.is_error]
        episode.replies.append({"role": "tool", "name": name, "content": answer.content})
        if answer.is_last:
            episode.stop_reason = StopReason.COMPLETED
            return
    if not parsed.calls:
        episode.excused = "reply"
        answer_it = partial(reply_of, environment, parsed.content)
        reply = await guard("reply", answer_it, reply_method(environment))
        if reply is not None:
            episode.replies.append({"role": "user", "content": reply})
            return
        episode.excused, closing = "", partial(setattr, environment, "final_message")
        await guard("final message", partial(closing, parsed.content))
        episode.stop_reason = StopReason.COMPLETED
