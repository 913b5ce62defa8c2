"""Rollouts: the sampler writes the model's messages; environments and simulated users reply."""

import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from pipeline.chat.template import Chat
from pipeline.chat.text import Parsed
from pipeline.config.settings import RolloutSettings
from pipeline.customers.scenario import Welcome, record
from pipeline.data.tasks import Message
from pipeline.environments import customers, tools
from pipeline.environments.faults import FaultLog
from pipeline.environments.timeouts import Calls, Guard
from pipeline.models.allocation import give_memory_back, is_out_of_memory
from pipeline.rollout.episode import Episode, answer, reward
from pipeline.rollout.episode import RolloutRequest as RolloutRequest
from pipeline.rollout.rewards import Completion, RewardFunctions
from pipeline.rollout.sampler import Sampler
from pipeline.rollout.trajectory import Sampled, StopReason, Trajectory

TURN_SHARE = 0.25  # share of messages that must be complete before environments answer
_Work = Callable[[Episode, Guard], Coroutine[Any, Any, None]]


class Rollout:
    """Runs episodes of any domain with one sampler, one chat format and one set of limits.

    `on_progress` is called with "domain/task_id" before the rollout calls an environment or takes
    an answer from the background, and with "" before each call of the sampler and in each second of
    waiting. If `on_progress` raises an exception, the rollout closes all conversations and can then
    be used again. `faults` gets the failures of environments and the exceptions of tools.
    """

    def __init__(
        self,
        sampler: Sampler,
        chat: Chat,
        environments: dict[str, type[Any]],
        limits: RolloutSettings,
        deterministic: bool = False,
        *,
        rewards: RewardFunctions | None = None,
        on_progress: Callable[[str], None] = lambda key: None,
        faults: FaultLog | None = None,
    ) -> None:
        self.sampler, self.chat, self.environments = sampler, chat, environments
        self.limits, self.deterministic, self.on_progress = limits, deterministic, on_progress
        self.rewards, self.faults = rewards, faults or FaultLog()
        self.on_messages: Callable[[Any, list[Message]], None] = lambda environment, messages: None
        # Both get a number of episodes.
        self.on_started: Callable[[int], None] = lambda count: None
        self.on_finished: Callable[[int], None] = lambda count: None
        self._open: dict[Episode, None] = {}  # episodes with an open conversation
        self.most = limits.max_concurrent_episodes  # becomes smaller if memory runs out
        self.environment_s, self.reply = 0.0, customers.reply_of  # seconds; the user's answers
        self.welcomes: Mapping[str, Welcome] = {}  # by domain
        self._calls = Calls(limits.call_timeout, lambda key: self.on_progress(key))
        self._until = math.inf  # time by the monotonic clock at which `rollout_timeout` is over

    def __call__(
        self, requests: Sequence[RolloutRequest], greedy: bool = False
    ) -> list[Trajectory]:
        """Return one trajectory per request, in the order of the requests.

        A deterministic rollout runs the tasks one after the other, and waits for all environments
        before each pass, so that the shapes of a forward pass depend on one task only.
        """
        self._calls.forget()
        self._until = time.monotonic() + (self.limits.rollout_timeout or math.inf)
        groups = groupby(requests, lambda request: self.deterministic and request.task.key)
        return [t for _, group in groups for t in self._collect(list(group), greedy)]

    def _collect(self, requests: Sequence[RolloutRequest], greedy: bool) -> list[Trajectory]:
        """Run and score episodes, at most `max_concurrent_episodes` at the same time."""
        classes = [self.environments[request.task.domain] for request in requests]
        welcomes = [self.welcomes.get(request.task.domain) for request in requests]
        episodes = list(map(Episode, requests, classes, welcomes))
        try:
            self._run(deque(episodes), greedy)
            for episode in (e for e in episodes if not (e.in_background or e.trajectory.error)):
                self._begin(episode, reward)
            for episode in episodes:
                self._finish(episode, episode.work)
            self._call_reward_functions(episodes)
        except BaseException:
            self._calls.forget()
            for episode in episodes:
                self._close(episode)
            raise
        for episode in (episode for episode in episodes if episode.welcome is not None):
            record(episode.environment, episode.trajectory)
        return [episode.trajectory for episode in episodes]

    def _call_reward_functions(self, episodes: Sequence[Episode]) -> None:
        if self.rewards is not None:
            begun, failed = time.perf_counter(), StopReason.ENVIRONMENT_ERROR
            played = [e for e in episodes if e.trajectory.stop_reason is not failed]
            made = [Completion(e.request.task, e.environment, e.trajectory) for e in played]
            self.rewards(made, self.faults)
            for t in (e.trajectory for e in played if e.trajectory.left_out == "reward"):
                self.faults.add(t.domain, t.task_id, "reward_funcs", t.error)
            self.environment_s += time.perf_counter() - begun

    def _run(self, waiting: deque[Episode], greedy: bool) -> None:
        """Run all episodes to the end; an episode whose environment has answered never waits."""
        live: list[Episode] = []  # episodes whose next message the sampler writes
        away: list[Episode] = []  # episodes whose environment works
        while waiting or live or away:
            room = self.most - len(live) - len(away)
            away += self._start(waiting, room)
            live += self._go_on(away, may_wait=not self._next(live))
            if self._next(live):
                away += self._sample(live, greedy)
                live += self._go_on(away, may_wait=not live)

    def _start(self, waiting: deque[Episode], room: int) -> list[Episode]:
        """Start and return up to `room` episodes."""
        count = min(len(waiting), room)
        if count < min(len(waiting), max(1, self.most // 4)):
            return []
        self.on_started(count)
        for episode in (episodes := [waiting.popleft() for _ in range(count)]):
            self._begin(episode, self._reset)
        return episodes

    def _go_on(self, away: list[Episode], may_wait: bool) -> list[Episode]:
        """Remove the episodes from `away` whose environment has answered; return the live ones."""
        works = [episode.work for episode in away if episode.work is not None]
        if works and (self.deterministic or (may_wait and len(works) == len(away))):
            begun = time.perf_counter()
            self._calls.wait(works, for_all=self.deterministic)
            self.environment_s += time.perf_counter() - begun
        back = dict.fromkeys(e for e in away if e.work is None or e.work.future.done())
        away[:] = [episode for episode in away if episode not in back]
        for episode in back:
            self._finish(episode, episode.work)
        live = [e for e in back if e.trajectory.num_turns and self._continue(e)]
        live += self._prompted([e for e in back if not (e.trajectory.num_turns or e.ended)])
        for episode in (e for e in back if e.in_background and e.ended and not e.trajectory.error):
            self._begin(episode, reward)
        self.on_finished(len([episode for episode in back if episode.ended]))
        return live

    def _prompted(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Make the prompts of episodes after `reset`; return the episodes that go on."""
        for episode in episodes:
            trajectory = episode.trajectory
            self.on_messages(episode.environment, trajectory.messages)
            if trajectory.messages[0]["role"] != "system":
                trajectory.preface = self.chat.preface
            schemas = tools.tool_schemas(self.environments[trajectory.domain])
            trajectory.prompt_ids = self.chat.prompt_ids(trajectory.messages, schemas)
            if trajectory.num_tokens >= self.limits.max_tokens:
                episode.end(StopReason.MAX_TOKENS)
        return [episode for episode in episodes if not episode.ended]

    def _next(self, live: Sequence[Episode]) -> list[Episode]:
        """Return the episodes that can have a conversation now: all, unless memory ran out."""
        free = max(0, self.most - len(self._open))
        return [e for e in live if e.handle is not None or (free := free - 1) >= 0]

    async def _reset(self, episode: Episode, guard: Guard) -> None:
        task, episode.excused = episode.request.task, "reset"
        start = partial(tools.started, self.environments[task.domain], task.row())
        episode.environment, addition, episode.in_background = await guard("reset", start)
        if (welcome := episode.welcome) is not None:
            arguments = episode.environment, task, episode.request.key, addition
            addition = await guard("customer", partial(welcome, *arguments), welcome)
            episode.in_background = tools.may_wait(type(episode.environment), episode.environment)
        episode.trajectory.messages[-1]["content"] += addition

    def _sample(self, live: list[Episode], greedy: bool) -> list[Episode]:
        """Sample; remove the episodes from `live` whose message is complete; return them."""
        self.on_progress("")
        active, complete = self._next(live), dict[Episode, Sampled]()
        try:
            complete = self._messages(active, greedy)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._lower_most(len({*self._open, *active}))
        if not complete:  # Inside `except`, less memory could be freed.
            for episode in [*self._open]:
                self._close(episode)
            give_memory_back()
        live[:] = [episode for episode in live if episode not in complete]
        for episode, message in complete.items():
            self._add_message(episode, message)
        return [*complete]

    def _messages(self, active: Sequence[Episode], greedy: bool) -> dict[Episode, Sampled]:
        """Sample until a share of the messages is complete, and return the complete ones."""
        if lacking := [episode for episode in active if episode.handle is None]:
            prompts, keys = [e.trajectory.ids for e in lacking], [e.request.key for e in lacking]
            drawn = [e.trajectory.num_sampled_tokens for e in lacking]
            handles = self.sampler.open(prompts, keys, *([drawn] if any(drawn) else []))
            for episode, handle in zip(lacking, handles, strict=True):
                episode.handle, self._open[episode] = handle, None
        per_turn, most = self.limits.max_tokens_per_turn, self.limits.max_tokens
        room = [min(per_turn, most - episode.trajectory.num_tokens) for episode in active]
        until = math.ceil(len(active) * TURN_SHARE)
        messages = self.sampler.sample([e.handle for e in active], room, greedy, until)
        return {e: m for e, m in zip(active, messages, strict=True) if m is not None}

    def _lower_most(self, number: int) -> None:
        """Halve the `number` of episodes at the same time. Raises RuntimeError if it is 1.

        All conversations are then closed. An episode goes on after its last whole message, in a new
        conversation with the same random numbers.
        """
        if number == 1:
            most = self.limits.max_tokens
            raise RuntimeError(f"out of memory in one episode; lower max_tokens, now {most}")
        self.most, of = number // 2, f"with {number} episodes at once"
        say = f"out of memory in a rollout {of}; going on with max_concurrent_episodes {self.most}"
        print(f"warning: {say}", flush=True)

    def _add_message(self, episode: Episode, sampled: Sampled) -> None:
        """Add the tokens of a sampled message to its episode, and parse the message."""
        trajectory, stopped_by = episode.trajectory, ""
        trajectory.append(sampled.ids, sampled.logprobs)
        schemas = tools.tool_schemas(self.environments[trajectory.domain])
        if self.rewards is not None and not schemas:  # reward functions get the whole text
            text = self.chat.tokenizer.decode(sampled.ids, skip_special_tokens=True)
            parsed = Parsed(content=text)
        else:
            parsed = self.chat.parse(sampled.ids, schemas, sampled.finished)
        if sampled.finished and sampled.ids[-1] != self.chat.end_of_turn_id:
            stopped_by = self.chat.tokenizer.decode(sampled.ids[-1:])
        self._take(episode, parsed, sampled.finished, stopped_by)

    def _take(self, episode: Episode, parsed: Parsed, finished: bool, stopped_by: str) -> None:
        """Add a message to its episode; let the environment or simulated user answer."""
        trajectory, episode.replies = episode.trajectory, []
        trajectory.num_turns += 1
        trajectory.messages.append(parsed.message())
        if stopped_by:
            trajectory.messages[-1]["stopped_by"] = stopped_by
        self.on_messages(episode.environment, trajectory.messages[-1:])
        if not finished:
            episode.end(StopReason.MAX_TOKENS)
        elif parsed.malformed:
            trajectory.num_malformed_calls += 1
            if trajectory.num_malformed_calls > self.limits.max_malformed_calls:
                episode.end(StopReason.MALFORMED_CALL)
            content = tools.error_result(f"malformed call: {parsed.malformed}")
            episode.replies = [{"role": "tool", "name": "error", "content": content}]
        else:
            self._begin(
                episode, partial(answer, parsed, self.reply, self.limits.max_repeated_calls)
            )

    def _continue(self, episode: Episode) -> bool:
        """Append the replies to the episode's messages; return False if the episode has ended."""
        trajectory, replies, limits = episode.trajectory, episode.replies, self.limits
        count, most = self.chat.num_content_tokens, limits.max_tool_result_tokens
        for r in (r for r in replies if r["role"] == "tool"):
            if (num_tokens := count(r["content"])) > most:
                r.update(content=tools.error_result("result too long"), raw_content=r["content"])
                why = f"its result has {num_tokens} tokens, max_tool_result_tokens is {most}"
                self.faults.add(*episode.request.task.key, r["name"], why)
        trajectory.messages += replies
        self.on_messages(episode.environment, replies)
        if not episode.ended and trajectory.num_turns >= limits.max_turns:
            episode.end(StopReason.MAX_TURNS)
        if not episode.ended:
            self._extend(episode)
        if episode.ended:
            self._close(episode)
        return not episode.ended

    def _extend(self, episode: Episode) -> None:
        """Append the tokens of the replies, or end an episode that has no room for them."""
        trajectory, ids = episode.trajectory, self.chat.reply_ids(episode.replies)
        if trajectory.num_tokens + len(ids) >= self.limits.max_tokens:
            return episode.end(StopReason.MAX_TOKENS)
        trajectory.append(ids)
        if episode.handle is not None:
            self.sampler.extend(episode.handle, ids)

    def _close(self, episode: Episode) -> None:
        handle, episode.handle = episode.handle, None
        if handle is not None:
            del self._open[episode]
            self.sampler.close(handle)

    def _begin(self, episode: Episode, work: _Work) -> None:
        """Run the function `work` to its end, or start `work` in the background."""
        key, run = episode.request.task.key, partial(work, episode)
        if episode.in_background:
            until = math.inf if episode.ended else self._until  # what is over is scored
            episode.work = self._calls.beside(key, run, until)
        else:
            with episode.random:
                self._finish(episode, partial(self._calls.here, key, run))

    def _finish(self, episode: Episode, work: Callable[[], None] | None) -> None:
        """Let the episode's environment work; if the environment fails, end only this episode."""
        episode.work = None
        if work is None:
            return
        begun, key = time.perf_counter(), episode.request.task.key
        try:
            work()
        except tools.EnvironmentFault as fault:
            episode.end(StopReason.ENVIRONMENT_ERROR)
            episode.trajectory.error = str(fault)
            episode.trajectory.left_out = "outage" if fault.outage else episode.excused
            self.faults.add(*key, fault.call, str(fault))
        while episode.raised:
            self.faults.add(*key, *episode.raised.pop())
        self.environment_s += time.perf_counter() - begun
