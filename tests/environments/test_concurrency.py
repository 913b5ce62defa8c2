"""Environments that wait for something outside: they wait side by side, beside other episodes.

Where calls meet at a barrier, they could not go on if they were made one after the other; the
barrier then breaks, and the test fails.
"""

import asyncio
from threading import Barrier

import pytest

from pipeline.config.settings import RolloutSettings
from pipeline.rollout.rollout import RolloutRequest
from tests.support.helpers import (
    Desk,
    ScriptedSampler,
    call,
    chat,
    make_task,
    played,
    rollout_of,
    say,
)

LIMITS = RolloutSettings(max_turns=6, max_tokens_per_turn=100, max_tokens=800)
TIMEOUT_S = 60


def test_every_call_of_a_class_that_says_it_is_concurrent_runs_beside_others():
    barriers = {"reset": Barrier(4), "tool": Barrier(3), "get_reward": Barrier(4)}

    class Blocking(Desk):
        concurrent = True

        def reset(self, **row):
            barriers["reset"].wait(TIMEOUT_S)
            return super().reset(**row)

        def meet(self) -> str:
            """Meet the others."""
            barriers["tool"].wait(TIMEOUT_S)
            return "met"

        def get_reward(self) -> float:
            barriers["get_reward"].wait(TIMEOUT_S)
            return super().get_reward()

    scripts = [[call("meet"), say("done")] for _ in range(3)] + [[say("done")]]
    trajectories, _ = played(scripts, {"desk": Blocking}, LIMITS)
    assert [t.reward for t in trajectories] == [1.0] * 4
    assert not any(t.error for t in trajectories)
    assert not any(barrier.broken for barrier in barriers.values())


@pytest.mark.parametrize("blocks", [False, True], ids=["coroutines", "threads"])
def test_an_episode_goes_on_while_99_others_wait(blocks):
    """99 customers wait with their first reply for the third reply of the first customer."""
    meeting, replies = Barrier(100) if blocks else asyncio.Barrier(100), []

    class Blocking:
        def __init__(self, name):
            self.name = name

        def meets(self):
            replies.append(self.name)
            return self.name != "t0" or replies.count("t0") == 3

        def reply(self, message):
            if self.meets():
                meeting.wait(TIMEOUT_S)
            return None if "done" in message else "go on"

    class Async(Blocking):
        async def reply(self, message):
            if self.meets():
                async with asyncio.timeout(TIMEOUT_S):
                    await meeting.wait()
            return None if "done" in message else "go on"

    class Talking(Desk):
        concurrent = blocks
        wait = None

        def reset(self, **row):
            self.user = (Blocking if blocks else Async)(row["id"])
            return super().reset(**row)

    scripts = [[say("well")] * 3 + [say("done")]] + [[say("done")]] * 99
    trajectories, _ = played(scripts, {"desk": Talking}, LIMITS)
    assert [t.error for t in trajectories] == [""] * 100
    assert [t.reward for t in trajectories] == [1.0] * 100
    assert [t.task_id for t in trajectories] == [f"t{n}" for n in range(100)]
    assert replies.count("t0") == 4


def test_the_passes_of_a_deterministic_rollout_do_not_depend_on_waiting_times():
    passes = []

    class Watched(ScriptedSampler):
        def sample(self, episodes, max_tokens, greedy=False, until=None):
            passes[-1].append(list(episodes))
            return super().sample(episodes, max_tokens)

    def desk(first):
        seen = asyncio.Event()

        class Waiting(Desk):
            async def look(self, item: str) -> str:
                """Look an item up; `first` is looked up before all others.

                Args:
                    item: Its name.
                """
                async with asyncio.timeout(TIMEOUT_S):
                    await (asyncio.sleep(0) if item == first else seen.wait())
                seen.set()
                return item

        return Waiting

    for first in ("lamp", "door"):
        passes.append([])
        said = [[call("look", item=item), say("done")] for item in ("lamp", "desk", "door")]
        sampler, environments = Watched(dict(enumerate(said))), {"desk": desk(first)}
        requests = [RolloutRequest(task=make_task(), trial=n, key=n) for n in range(3)]
        rollout_of(sampler, chat(), environments, LIMITS, deterministic=True)(requests)
    assert passes == [[[0, 1, 2]] * 2] * 2
