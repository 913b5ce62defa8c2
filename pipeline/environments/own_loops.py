"""Domains whose episodes a user's own loop plays: `async def play(policy, task) -> float`."""

from collections.abc import Callable, Coroutine
from typing import Any

from pipeline.data.tasks import Task

# Arguments: the policy (`rollout/own_loop.py`) and the task. Result: the reward.
Play = Callable[[Any, Task], Coroutine[Any, Any, float]]
OWN_LOOP = "_own_loop"  # attribute of an environment class that stands for a loop: the loop


def environment_of(loop: Play) -> type[Any]:
    """Return the class of environments that stand for a user's loop: they have no tools."""

    class OwnLoop:
        """The environment of an episode that a user's loop plays; it keeps the reward."""

        reward: Any = 0.0

        def reset(self, **row: Any) -> None:
            """Start an episode; the loop makes its own conversations."""

        def get_reward(self) -> Any:
            """Return what the loop has returned."""
            return self.reward

    setattr(OwnLoop, OWN_LOOP, staticmethod(loop))
    OwnLoop.__name__ = getattr(loop, "__name__", "OwnLoop")
    return OwnLoop
