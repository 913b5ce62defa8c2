"""Episodes: the sampler writes messages, environments and users answer them."""

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
from pipeline.environments import tools
from pipeline.environments.timeouts import Calls, Guard
from pipeline.models.weights import trained_weights
from pipeline.rollout.sampler import Handle, Sampler
from pipeline.rollout.trajectory import Sampled, StopReason, Trajectory

UNKNOWN_TOOL = "unknown"  # counts the calls of tools that do not exist
TURN_SHARE = 0.25  # fraction of running messages to finish before replies are computed


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """A request for one episode of a task."""

    task: Task
    trial: int
    key: int  # of the stream of draws


@dataclass(kw_only=True, eq=False)
class _Episode:
    """A running episode; it shares field names with its Trajectory."""

    request: RolloutRequest
    in_background: bool  # the environment works in a thread
    environment: Any = None
    addition: str = ""  # the environment appends this text to the request
    handle: Handle = None  # the open conversation in the sampler
    replies: list[Message] = field(default_factory=list)  # to the last message; after `wait`
    wait: Callable[[], None] | None = None  # waits for the environment's current work
    excused: str = ""  # "reset" or "reply" during these calls: training leaves their failures out
    reward: float = 0.0
    reward_breakdown: dict[str, float] = field(default_factory=dict)
    difference: dict[str, list[str]] = field(default_factory=dict)
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
        task, names = self.request.task, {f.name for f in fields(Trajectory)}
        return Trajectory(
            domain=task.domain,
            task_id=task.id,
            family=task.family,
            branch=task.branch,
            trial=self.request.trial,
            **{name: value for name, value in vars(self).items() if name in names},
        )


class Rollout:
    """Runs episodes of any domain with one sampler, one chat format and the recipe's limits.

    `on_progress` gets domain/task_id before each call of an environment or wait for one, and ""
    before each call of the sampler. If it raises there, the rollout closes all conversations and
    can be used again.
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

    def __call__(
        self, requests: Sequence[RolloutRequest], greedy: bool = False
    ) -> list[Trajectory]:
        """One trajectory per request, in order.

        In a deterministic run, only episodes of one task run side by side: other tasks must not
        change the shapes of a forward pass.
        """
        self._calls.forget()
        groups = groupby(requests, lambda request: self.deterministic and request.task.key)
        return [t for _, group in groups for t in self._collect(list(group), greedy)]

    def load_weights(self, model: Any) -> None:
        """Give the sampler the model's current weights."""
        self.sampler.load_weights(trained_weights(model))

    def _collect(self, requests: Sequence[RolloutRequest], greedy: bool) -> list[Trajectory]:
        """Run episodes, at most `max_concurrent_episodes` side by side, and score them."""
        background = {name: tools.may_wait(known) for name, known in self.environments.items()}
        episodes = [
            _Episode(
                request=request,
                in_background=background[request.task.domain],
                messages=[dict(message) for message in request.task.prompt],
            )
            for request in requests
        ]
        try:
            self._take_turns(deque(episodes), greedy)
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

    def _take_turns(self, waiting: deque[_Episode], greedy: bool) -> None:
        """Run until all episodes have ended.

        The rollout waits for environments in the background once their episodes outnumber the
        others. The order of work depends on counts, never on time.
        """
        live: list[_Episode] = []  # the sampler writes their next message
        away: list[_Episode] = []  # their environment works in the background
        while waiting or live or away:
            running = len(live) + len(away)
            live += self._start(waiting, self.limits.max_concurrent_episodes - running)
            answered = self._sample(live, greedy) if live else []
            gone = set(answered)
            live = [episode for episode in live if episode not in gone]
            ready = [episode for episode in answered if episode.wait is None]
            away += [episode for episode in answered if episode.wait is not None]
            if len(away) > len(live) + len(ready):
                ready, away = [*ready, *away], []
            live += [episode for episode in ready if self._continue(episode)]

    def _start(self, waiting: deque[_Episode], room: int) -> list[_Episode]:
        """Start episodes in free places, many at a time; returns the ones that continue."""
        count = min(len(waiting), room)
        if count < min(len(waiting), max(1, self.limits.max_concurrent_episodes // 4)):
            return []
        episodes = [waiting.popleft() for _ in range(count)]
        for episode in episodes:
            self._begin(episode, self._reset)
        for episode in episodes:
            self._wait(episode)
            if episode.stop_reason is not None:
                continue
            episode.messages[-1]["content"] += episode.addition
            schemas = tools.tool_schemas(self.environments[episode.request.task.domain])
            episode.prompt_ids = self.chat.prompt_ids(episode.messages, schemas)
            if episode.num_tokens >= self.limits.max_tokens:
                episode.stop_reason = StopReason.MAX_TOKENS
        live = [episode for episode in episodes if episode.stop_reason is None]
        if live:
            prompts, keys = [e.prompt_ids for e in live], [e.request.key for e in live]
            for episode, handle in zip(live, self.sampler.open(prompts, keys), strict=True):
                episode.handle = handle
        return live

    async def _reset(self, episode: _Episode, guard: Guard) -> None:
        task, episode.excused = episode.request.task, "reset"
        start = partial(tools.started, self.environments[task.domain], task.row())
        episode.environment, episode.addition, episode.in_background = await guard("reset", start)

    def _sample(self, live: Sequence[_Episode], greedy: bool) -> list[_Episode]:
        """Sample until a share of the messages is complete; returns their episodes."""
        self.on_progress("")
        limits = self.limits
        room = [min(limits.max_tokens_per_turn, limits.max_tokens - e.num_tokens) for e in live]
        until = math.ceil(len(live) * TURN_SHARE)
        messages = self.sampler.sample([e.handle for e in live], room, greedy, until)
        complete = []
        for episode, message in zip(live, messages, strict=True):
            if message is not None:
                self._take(episode, message)
                complete.append(episode)
        return complete

    def _take(self, episode: _Episode, sampled: Sampled) -> None:
        """Add a message to its episode, and let the environment or the user answer it."""
        episode.append(sampled.ids, sampled.logprobs)
        episode.num_turns += 1
        episode.replies = []
        schemas = tools.tool_schemas(self.environments[episode.request.task.domain])
        parsed = self.chat.parse(sampled.ids, schemas, sampled.finished)
        episode.messages.append(parsed.message())
        if sampled.finished and sampled.ids[-1] != self.chat.end_of_turn_id:
            episode.messages[-1]["stopped_by"] = self.chat.tokenizer.decode(sampled.ids[-1:])
        if not sampled.finished:
            episode.stop_reason = StopReason.MAX_TOKENS
        elif parsed.malformed:
            episode.num_malformed_calls += 1
            if episode.num_malformed_calls > self.limits.max_malformed_calls:
                episode.stop_reason = StopReason.MALFORMED_CALL
            content = tools.error_result(f"malformed call: {parsed.malformed}")
            episode.replies = [{"role": "tool", "name": "error", "content": content}]
        else:
            self._begin(episode, partial(_answer, parsed))

    def _continue(self, episode: _Episode) -> bool:
        """Append the replies to the last message; False if the episode has ended."""
        self._wait(episode)
        replies, most = episode.replies, self.limits.max_tool_result_tokens
        for reply in replies:
            if reply["role"] == "tool" and self.chat.num_content_tokens(reply["content"]) > most:
                reply["content"] = tools.error_result("result too long")
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

    def _close(self, episode: _Episode) -> None:
        handle, episode.handle = episode.handle, None
        if handle is not None:
            self.sampler.close(handle)

    def _begin(
        self, episode: _Episode, work: Callable[[_Episode, Guard], Coroutine[Any, Any, None]]
    ) -> None:
        """Do an environment's work, or begin it in the background."""
        key = episode.request.task.key
        if episode.in_background:
            episode.wait = self._calls.beside(key, partial(work, episode))
        else:
            episode.wait = partial(self._calls.here, key, partial(work, episode))
            self._wait(episode)

    def _wait(self, episode: _Episode) -> None:
        """Wait for an environment's work; its failure ends the episode, not the run."""
        wait, episode.wait = episode.wait, None
        if wait is None:
            return
        begun = time.perf_counter()
        try:
            wait()
        except tools.EnvironmentFault as fault:
            episode.stop_reason, episode.error = StopReason.ENVIRONMENT_ERROR, str(fault)
            episode.left_out = "outage" if fault.outage else episode.excused
        self.environment_s += time.perf_counter() - begun


async def _score(episode: _Episode, guard: Guard) -> None:
    episode.excused = ""
    call = partial(tools.outcome_of, episode.environment)
    outcome = await guard("get_reward", call, type(episode.environment).get_reward)
    episode.reward, episode.reward_breakdown, episode.difference = outcome


async def _answer(parsed: Parsed, episode: _Episode, guard: Guard) -> None:
    """Let the environment answer the calls, or the user answer the message."""
    environment, episode.excused = episode.environment, ""
    methods = tools.tool_methods(type(environment))
    for name, arguments in parsed.calls:
        call = partial(tools.answer_call, environment, name, arguments)
        answer = await guard(name, call, methods.get(name))
        episode.num_tool_errors += answer.raised
        known = name if name in methods else UNKNOWN_TOOL
        calls, errors = episode.tools.get(known, (0, 0))
        episode.tools[known] = [calls + 1, errors + answer.is_error]
        episode.replies.append({"role": "tool", "name": name, "content": answer.content})
        if answer.is_last:
            episode.stop_reason = StopReason.COMPLETED
            return
    if not parsed.calls:
        episode.excused = "reply"
        answer_it = partial(tools.reply_of, environment, parsed.content)
        reply = await guard("reply", answer_it, tools.reply_method(environment))
        if reply is not None:
            episode.replies.append({"role": "user", "content": reply})
            return
        episode.excused, closing = "", partial(setattr, environment, "final_message")
        await guard("final message", partial(closing, parsed.content))
        episode.stop_reason = StopReason.COMPLETED
