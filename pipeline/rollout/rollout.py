"""Rollouts: many episodes side by side, and the policy that samples their messages together."""

import asyncio
import math
import os
import time
from bisect import bisect
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

from pipeline.common.console import say
from pipeline.config.settings import RolloutSettings
from pipeline.distributed.devices import on_gpu
from pipeline.environments.calls import TICK_S, Calls, end_loop, run_in
from pipeline.environments.domains import Domain
from pipeline.environments.faults import FaultLog
from pipeline.environments.language_models.customers import OpeningMessage, record_customer
from pipeline.environments.tools import Judge, reply_of
from pipeline.models.chat.template import Chat
from pipeline.models.chat.text import Parsed
from pipeline.models.rank_memory import give_memory_back, is_out_of_memory
from pipeline.rollout.episode import Episode, Reply, Shared, Watch
from pipeline.rollout.episode import RolloutRequest as RolloutRequest
from pipeline.rollout.rewards import Completion, RewardFunctions
from pipeline.rollout.samplers.choice import Handle, Sampler
from pipeline.rollout.trajectory import (
    FAILED,
    Conversation,
    Policy,
    Said,
    Sampled,
    Trajectory,
    checksum,
)

Progress = Callable[[int], None]  # gets the number of episodes that have just ended
# Share of messages that must be complete before environments answer. A low share gives more and
# smaller forward passes, which take a GPU as long as large ones.
TURN_SHARE = 0.25
TURN_SHARE_GPU = 0.5
AGENTS_PER_CORE = 4  # processes at once, most of which wait for messages


@dataclass(eq=False)
class Rollout:
    """Runs episodes of any domain with one policy, one chat format and one set of limits.

    `on_progress` is called with "domain/task_id" before the rollout calls an environment or takes
    an answer from the background, and with "" before each step of the policy and in each second of
    waiting. If `on_progress` raises an exception, the rollout closes all conversations and can then
    be used again. `faults` gets the failures of environments and the exceptions of tools.
    `opening_messages` gives the environments of domains customers from outside, `judge` is for
    environments and reward functions that ask one, `reply` answers for a customer, and `watch` is
    shown the messages.
    """

    policy: Policy
    chat: Chat
    domains: Mapping[str, Domain]
    limits: RolloutSettings
    deterministic: bool = False
    _: KW_ONLY
    rewards: RewardFunctions | None = None
    on_progress: Callable[[str], None] = lambda key: None
    faults: FaultLog = field(default_factory=FaultLog)
    opening_messages: Mapping[str, OpeningMessage] = field(default_factory=dict)
    judge: Judge | None = None
    reply: Reply = reply_of
    watch: Watch | None = None

    def __post_init__(self) -> None:
        if self.rewards is not None:
            self.rewards.on_call = lambda key: self.on_progress(key)
            self.rewards.judge = self.judge or self.rewards.judge
        self.environment_s = 0.0  # seconds of environments and waits
        self.calls = Calls(self.limits.call_timeout, lambda key: self.on_progress(key))
        self._open = set[Episode]()  # of `begin`, until `end`
        self._loop: asyncio.AbstractEventLoop | None = None  # in which they play
        self._most_processes = self.limits.max_agents or (
            AGENTS_PER_CORE * len(os.sched_getaffinity(0))
        )

    def __call__(
        self,
        requests: Sequence[RolloutRequest],
        greedy: bool = False,
        progress: Progress | None = None,
    ) -> list[Trajectory]:
        """Return one trajectory per request, in the order of the requests.

        A deterministic rollout runs the tasks one after the other, and waits for all environments
        before each step, so that the shapes of a forward pass depend on one task only. Each message
        of a user's own loop is sampled alone then, whose messages may come in any order.
        """
        episodes = self.begin(requests, greedy)
        try:
            self.go_on(episodes, progress)
            return self.end(episodes)
        finally:
            self.drop(episodes)

    def begin(self, requests: Sequence[RolloutRequest], greedy: bool = False) -> list[Episode]:
        """Make episodes, which `go_on` plays and `end` scores; `drop` must forget them."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self.calls.begin()
        shared = Shared(
            policy=self.policy,
            chat=self.chat,
            limits=self.limits,
            calls=self.calls,
            faults=self.faults,
            greedy=greedy,
            has_reward_functions=self.rewards is not None,
            judge=self.judge,
            reply=self.reply,
            watch=self.watch,
            alone=self.deterministic,
        )
        episodes = [
            Episode(
                request,
                self.domains[request.task.domain],
                shared,
                self.opening_messages.get(request.task.domain),
            )
            for request in requests
        ]
        self._open |= {*episodes}
        return episodes

    def go_on(self, episodes: Sequence[Episode], progress: Progress | None = None) -> None:
        """Play episodes until each has ended, or has sampled as many tokens as its pace allows.

        What an environment or a user's loop does for an episode that waits for the next step goes
        on meanwhile.
        """
        self.calls.end_after(self.limits.rollout_timeout)
        for group in self._groups(episodes):
            self._run(self._play_together(group, progress))
        for episode in episodes:  # also of one that waits for the next step, and has ended
            episode.result()
        self.environment_s += self.calls.spent_s
        self.calls.spent_s = 0.0

    def end(self, episodes: Sequence[Episode]) -> list[Trajectory]:
        """Return the trajectories of episodes that have ended, with their rewards."""
        for group in self._groups(episodes):
            self._run(self._call_reward_functions(group))
        for episode in episodes:
            if episode.opening_message is not None:
                record_customer(episode.environment, episode.trajectory)
        return [episode.trajectory for episode in episodes]

    def close(self) -> None:
        """Drop all episodes, of a run that ends while some wait for a step."""
        self.drop([*self._open])

    def drop(self, episodes: Iterable[Episode]) -> None:
        """Forget episodes, which may still play."""
        playing = [e.playing for e in self._open.intersection(episodes) if e.playing is not None]
        self._open.difference_update(episodes)
        if playing:
            self._run(_cancelled(playing))
        for episode in episodes:
            if episode.conversation is not None:
                self.policy.close(episode.conversation)
        if not self._open and self._loop is not None:
            end_loop(self._loop)
            self._loop = None

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None, "no episode has begun"
        run_in(self._loop, coroutine)

    def _groups(self, episodes: Sequence[Episode]) -> list[list[Episode]]:
        """Return what plays together: all episodes or, if deterministic, those of each group."""
        groups = groupby(episodes, lambda e: self.deterministic and (e.task.key, e.begun))
        return [[*group] for _, group in groups]

    async def _play_together(self, episodes: Sequence[Episode], progress: Progress | None) -> None:
        """Play at most `policy.max_episodes` at once; an episode that can go on never waits."""
        waiting = [episode for episode in episodes if episode.playing is None]
        for episode in episodes:
            episode.pace.left = episode.pace.most
            # The order in which they waited last, in an earlier step, must not matter.
            if episode.conversation is not None:
                episode.conversation.move_to_the_end()
        # After a resume, those of earlier steps begin again, and are active as they were before it.
        self._play([e for e in waiting if e.begun < (e.pace.version or 0)])
        waiting = [episode for episode in waiting if episode.playing is None]
        active = {e for e in episodes if e.playing is not None and not e.playing.done()}
        while waiting or active:
            active |= set(self._start(waiting, active))
            await asyncio.sleep(0)  # every new episode comes to its first message or call
            must_wait = self.deterministic and self.calls.is_busy
            if self.policy.num_waiting and not must_wait:
                self.on_progress("")
                self.policy.step()
                await asyncio.sleep(0)  # ... and every other one to its next
            elif not all(e.waits_for_next_step for e in active):
                await self._wait()
            ended = {e for e in active if e.playing is not None and e.playing.done()}
            for episode in ended:
                episode.result()
            active = {e for e in active - ended if not e.waits_for_next_step}
            if progress is not None and ended:
                progress(len(ended))

    def _start(self, waiting: list[Episode], active: Collection[Episode]) -> list[Episode]:
        """Start episodes as far as there is room, but none while the room is small."""
        count = min(len(waiting), self.policy.max_episodes - len(active))
        if count < min(len(waiting), max(1, self.policy.max_episodes // 4)):
            return []
        # The processes of episodes that wait for the next step do not count: they do nothing.
        places = self._most_processes - sum(episode.is_process for episode in active)
        started = list[Episode]()
        for episode in waiting[:count]:
            if places > 0 or not episode.is_process:
                places -= episode.is_process
                started.append(episode)
        self._play(started)
        waiting[:] = [episode for episode in waiting if episode.playing is None]
        return started

    def _play(self, episodes: Iterable[Episode]) -> None:
        for episode in episodes:
            episode.playing = asyncio.create_task(episode.play())
            episode.playing.add_done_callback(lambda _: self.calls.answered.set())

    async def _wait(self) -> None:
        """Wait until an environment has answered or an episode has ended, for a second at most."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(TICK_S):
                await self.calls.answered.wait()
        except TimeoutError:
            self.on_progress("")
        self.calls.answered.clear()
        self.environment_s += time.monotonic() - begun

    async def _call_reward_functions(self, episodes: Sequence[Episode]) -> None:
        if self.rewards is None:
            return
        begun = time.perf_counter()
        played = [episode for episode in episodes if episode.trajectory.stop_reason not in FAILED]
        await self.rewards.score(
            [
                Completion(e.domain, e.task, e.environment, e.trajectory, e.returned, e.begun)
                for e in played
            ],
            self.faults,
        )
        for trajectory in (e.trajectory for e in played if e.trajectory.left_out == "reward"):
            self.faults.add(trajectory.domain, trajectory.task_id, "reward_funcs", trajectory.error)
        self.environment_s += time.perf_counter() - begun


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class SamplerPolicy:
    """A model whose messages a sampler writes; conversations that wait are sampled together.

    `max_episodes` becomes smaller if memory runs out.
    """

    def __init__(self, sampler: Sampler, chat: Chat, limits: RolloutSettings) -> None:
        self.sampler = sampler
        self.chat = chat
        self.limits = limits
        self.max_episodes = limits.max_concurrent_episodes
        self._waiting: dict[Conversation, asyncio.Future[Sampled]] = {}
        self._open: dict[Conversation, Handle] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._asking)

    @property
    def _asking(self) -> list[Conversation]:
        """The conversations that wait; a user's loop may have given a message up."""
        return [c for c, f in self._waiting.items() if not f.done() and c.pace.left > 0]

    async def message(self, conversation: Conversation) -> Said | None:
        if not self._read(conversation):
            return None
        sampled = self._recorded(conversation)
        if sampled is None:
            future = asyncio.get_running_loop().create_future()
            self._waiting[conversation] = future
            sampled = await future
        begin = len(conversation.sequence.completion_ids) - conversation.num_said
        self._take(conversation, sampled)
        conversation.num_said = 0
        conversation.is_cut = not sampled.finished
        ids = conversation.sequence.completion_ids[begin:]
        if (until := self._until_stop(ids, conversation.stop)) is not None:
            size, text = until
            self.close(conversation)  # what was sampled behind the text has never been
            conversation.sequence.cut(begin + size)
            return conversation.add(Said(parsed=Parsed(content=text), finished=False, at_stop=True))
        return conversation.add(self._said(replace(sampled, ids=ids), conversation))

    def _take(self, conversation: Conversation, sampled: Sampled) -> None:
        """Add tokens of a message to its conversation."""
        versions = sampled.versions or conversation.pace.versions(len(sampled.ids))
        conversation.sequence.append(sampled.ids, sampled.logprobs, versions)

    def _recorded(self, conversation: Conversation) -> Sampled | None:
        """Take a recorded message again, or the first part of one, which is then sampled on."""
        if not conversation.recorded:
            return None
        turn = conversation.recorded.popleft()
        if turn.checksum != checksum(conversation.sequence.ids):
            conversation.recorded.clear()
            where = f"{conversation.trajectory.domain}/{conversation.trajectory.task_id}"
            say(
                f"warning: resume: {where}: its environment answers other than before, so this "
                "episode goes on with new messages; make what it answers depend on its task alone"
            )
            return None
        sampled = Sampled(
            ids=turn.ids, logprobs=turn.logprobs, finished=turn.finished, versions=turn.versions
        )
        if turn.is_whole:
            return sampled
        self._take(conversation, sampled)
        conversation.num_said = len(turn.ids)
        return None

    def _until_stop(self, ids: list[int], stop: Sequence[str]) -> tuple[int, str] | None:
        """Return the number of tokens until a text is complete that ends the message, if any.

        Beside it stands the text before this end.
        """
        decode = partial(self.chat.tokenizer.decode, clean_up_tokenization_spaces=False)
        whole = decode(ids) if stop else ""
        places = [whole.find(text) for text in stop if text in whole]
        if not places:
            return None
        sizes = range(len(ids))
        size = bisect(sizes, False, key=lambda n: any(t in decode(ids[:n]) for t in stop))
        return size, whole[: min(places)]

    def _read(self, conversation: Conversation) -> bool:
        """Add the tokens of new messages; return False if no room is left for a message."""
        trajectory = conversation.trajectory
        new = trajectory.messages[conversation.num_read :]
        if conversation.num_read == 0:
            if new[0]["role"] != "system":
                trajectory.preface = self.chat.preface
            trajectory.prompt_ids = self.chat.prompt_ids(new, conversation.schemas)
            conversation.num_prompted = len(new)
            return trajectory.num_tokens < self.limits.max_tokens
        prompt_ids = self.chat.prompt_without_thoughts(
            trajectory.messages, conversation.schemas, conversation.num_prompted
        )
        if prompt_ids is not None:
            if len(prompt_ids) >= self.limits.max_tokens:
                return False
            self.close(conversation)  # the sampler opens it again, with all of its prompt
            conversation.begin_sequence("thoughts", prompt_ids)
            return True
        ids = self.chat.reply_ids(new)
        sequence = conversation.sequence
        if sequence.num_tokens + len(ids) >= self.limits.max_tokens:
            return False
        sequence.append(ids)
        if conversation in self._open:
            self.sampler.extend(self._open[conversation], ids)
        return True

    def _said(self, sampled: Sampled, conversation: Conversation) -> Said:
        stopped_by = ""
        if sampled.finished and sampled.ids[-1] != self.chat.end_of_turn_id:
            stopped_by = self.chat.tokenizer.decode(sampled.ids[-1:])
        if conversation.is_text:
            text = self.chat.tokenizer.decode(
                sampled.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            parsed = Parsed(content=text)
        else:
            parsed = self.chat.parse(sampled.ids, conversation.schemas, sampled.finished)
        return Said(parsed=parsed, finished=sampled.finished, stopped_by=stopped_by)

    def step(self) -> None:
        """Sample until a share of the messages is complete, and wake their conversations."""
        # The time that an environment takes must not change the order of the rows.
        asking = self._asking
        for conversation in sorted((c for c in asking if c.place is None), key=lambda c: c.key):
            conversation.move_to_the_end()
        waiting = sorted(asking, key=lambda c: c.place or 0)
        waiting = [c for c in waiting if c.alone][:1] or waiting
        if len(self._open) >= self.max_episodes and self._open.keys().isdisjoint(waiting):
            self._close_all()  # nobody waits for them now; they are opened again when they go on
        free = max(0, self.max_episodes - len(self._open))
        active = [c for c in waiting if c in self._open or (free := free - 1) >= 0]
        complete: Mapping[Conversation, Sampled] = {}
        try:
            complete = self._sample(active)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._lower_max_episodes(len({*self._open, *active}))
        if not complete:  # Inside `except`, less memory could be freed.
            self._close_all()
            give_memory_back()
        for conversation, sampled in complete.items():
            conversation.move_to_the_end()
            goes_on = self._goes_on(conversation, sampled)
            # The cache of another one would change the rounding of one that is alone. One that
            # waits for the next step needs a cache of the next weights.
            if conversation.alone or conversation.pace.left <= 0:
                self.sampler.close(self._open.pop(conversation))
            if not goes_on:
                self._waiting.pop(conversation).set_result(sampled)

    def _goes_on(self, conversation: Conversation, sampled: Sampled) -> bool:
        """Count sampled tokens; return True if they are a part of a message, and take them."""
        count = len(sampled.ids)
        conversation.pace.left -= count
        if sampled.finished or count == self._room(conversation):
            return False
        self._take(conversation, sampled)
        conversation.num_said += count
        return True

    def _room(self, conversation: Conversation) -> int:
        """The number of tokens that a message may still have."""
        most = self.limits.max_tokens_per_turn
        most = min(conversation.max_tokens or most, most) - conversation.num_said
        return min(most, self.limits.max_tokens - conversation.sequence.num_tokens)

    def _sample(self, active: Sequence[Conversation]) -> dict[Conversation, Sampled]:
        """Return the messages that are complete."""
        if lacking := [c for c in active if c not in self._open]:
            handles = self.sampler.open(
                [c.sequence.ids for c in lacking],
                [c.key for c in lacking],
                [c.num_drawn for c in lacking],
            )
            self._open.update(zip(lacking, handles, strict=True))
        room = [int(min(self._room(c), c.pace.left)) for c in active]
        until = math.ceil(len(active) * (TURN_SHARE_GPU if on_gpu() else TURN_SHARE))
        handles = [self._open[c] for c in active]
        messages = self.sampler.sample(handles, room, active[0].greedy, until)
        return {c: m for c, m in zip(active, messages, strict=True) if m is not None}

    def _lower_max_episodes(self, number: int) -> None:
        """Halve the `number` of episodes at the same time. Raises RuntimeError if it is 1.

        All conversations are then closed. An episode goes on after its last whole message, in a new
        conversation with the same random numbers.
        """
        if number == 1:
            raise RuntimeError(
                f"out of memory in one episode; lower max_tokens, now {self.limits.max_tokens}"
            )
        self.max_episodes = number // 2
        say(
            f"warning: out of memory in a rollout with {number} episodes at once; going on with "
            f"max_concurrent_episodes {self.max_episodes}"
        )

    def _close_all(self) -> None:
        for conversation in [*self._open]:
            self.sampler.close(self._open.pop(conversation))

    def rest(self) -> None:
        """Free the memory that an update needs, and forget what the present weights computed."""
        self._close_all()
        self.sampler.rest()

    def close(self, conversation: Conversation) -> None:
        self._waiting.pop(conversation, None)
        if conversation in self._open:
            self.sampler.close(self._open.pop(conversation))
