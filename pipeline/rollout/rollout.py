"""Rollouts: many episodes side by side, with one policy."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from pipeline.chat.template import Chat
from pipeline.config.settings import RolloutSettings
from pipeline.customers.scenario import Welcome, record
from pipeline.environments.calls import TICK_S, Calls, run
from pipeline.environments.customers import reply_of
from pipeline.environments.faults import FaultLog
from pipeline.environments.tools import Judge
from pipeline.rollout.episode import Episode, Reply, Surroundings, Watch
from pipeline.rollout.episode import RolloutRequest as RolloutRequest
from pipeline.rollout.policies import Policy
from pipeline.rollout.rewards import Completion, RewardFunctions
from pipeline.rollout.trajectory import StopReason, Trajectory


class Progress(Protocol):
    """Is told of the episodes of a rollout."""

    def begin(self, count: int) -> None: ...

    def end(self, count: int) -> None: ...


class Rollout:
    """Runs episodes of any domain with one policy, one chat format and one set of limits.

    `on_progress` is called with "domain/task_id" before the rollout calls an environment or takes
    an answer from the background, and with "" before each step of the policy and in each second of
    waiting. If `on_progress` raises an exception, the rollout closes all conversations and can then
    be used again. `faults` gets the failures of environments and the exceptions of tools.
    `welcomes` gives the environments of domains customers from outside, `judge` is for environments
    and reward functions that ask one, `reply` answers for a customer, and `watch` is shown the
    messages.
    """

    def __init__(
        self,
        policy: Policy,
        chat: Chat,
        environments: dict[str, type[Any]],
        limits: RolloutSettings,
        deterministic: bool = False,
        *,
        rewards: RewardFunctions | None = None,
        on_progress: Callable[[str], None] = lambda key: None,
        faults: FaultLog | None = None,
        welcomes: Mapping[str, Welcome] | None = None,
        judge: Judge | None = None,
        reply: Reply = reply_of,
        watch: Watch | None = None,
    ) -> None:
        self.policy = policy
        self.chat = chat
        self.environments = environments
        self.limits = limits
        self.deterministic = deterministic
        self.rewards = rewards
        self.on_progress = on_progress
        self.faults = faults or FaultLog()
        self.welcomes = welcomes or {}
        self.judge = judge
        if rewards is not None and judge is not None:
            rewards.judge = judge
        self.reply = reply
        self.watch = watch
        self.environment_s = 0.0  # seconds of environments and waits
        self.calls = Calls(limits.call_timeout, lambda key: self.on_progress(key))

    def __call__(
        self,
        requests: Sequence[RolloutRequest],
        greedy: bool = False,
        progress: Progress | None = None,
    ) -> list[Trajectory]:
        """Return one trajectory per request, in the order of the requests.

        A deterministic rollout runs the tasks one after the other, and waits for all environments
        before each step, so that the shapes of a forward pass depend on one task only.
        """
        return run(self._play(requests, greedy, progress))

    async def _play(
        self, requests: Sequence[RolloutRequest], greedy: bool, progress: Progress | None
    ) -> list[Trajectory]:
        self.calls.begin(self.limits.rollout_timeout)
        surroundings = Surroundings(
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
        )
        trajectories = list[Trajectory]()
        for _, group in groupby(requests, lambda r: self.deterministic and r.task.key):
            episodes = [
                Episode(
                    request,
                    self.environments[request.task.domain],
                    surroundings,
                    self.welcomes.get(request.task.domain),
                )
                for request in group
            ]
            await self._play_together(episodes, progress)
            await self._call_reward_functions(episodes)
            for episode in episodes:
                if episode.welcome is not None:
                    record(episode.environment, episode.trajectory)
                trajectories.append(episode.trajectory)
        self.environment_s += self.calls.spent_s
        self.calls.spent_s = 0.0
        return trajectories

    async def _play_together(self, episodes: Sequence[Episode], progress: Progress | None) -> None:
        """Play episodes, at most `policy.most` at once; an episode that can go on never waits."""
        waiting = deque(episodes)
        tasks = set[asyncio.Task[None]]()
        try:
            while waiting or tasks:
                started = self._start(waiting, self.policy.most - len(tasks))
                tasks |= set(started)
                if progress is not None and started:
                    progress.begin(len(started))
                await asyncio.sleep(0)  # every new episode comes to its first message or call
                must_wait = self.deterministic and self.calls.is_busy
                if self.policy.num_waiting and not must_wait:
                    self.on_progress("")
                    self.policy.step()
                    await asyncio.sleep(0)  # ... and every other one to its next
                else:
                    await self._wait()
                ended = {task for task in tasks if task.done()}
                for task in ended:
                    task.result()  # raises what ends the whole rollout
                tasks -= ended
                if progress is not None:
                    progress.end(len(ended))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for episode in episodes:
                if episode.conversation is not None:
                    self.policy.close(episode.conversation)

    def _start(self, waiting: deque[Episode], room: int) -> list[asyncio.Task[None]]:
        """Start up to `room` episodes, but none while the room is small."""
        count = min(len(waiting), room)
        if count < min(len(waiting), max(1, self.policy.most // 4)):
            return []
        started = [asyncio.create_task(waiting.popleft().play()) for _ in range(count)]
        for task in started:
            task.add_done_callback(lambda _: self.calls.answered.set())
        return started

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
        played = [
            episode
            for episode in episodes
            if episode.trajectory.stop_reason is not StopReason.ENVIRONMENT_ERROR
        ]
        made = [Completion(e.task, e.environment, e.trajectory) for e in played]
        await self.rewards.score(made, self.faults)
        for trajectory in (e.trajectory for e in played if e.trajectory.left_out == "reward"):
            self.faults.add(trajectory.domain, trajectory.task_id, "reward_funcs", trajectory.error)
        self.environment_s += time.perf_counter() - begun
