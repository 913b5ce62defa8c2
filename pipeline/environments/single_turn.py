"""The environment of a dataset whose answers are scored by reward functions alone."""

from typing import Any


class SingleTurnEnvironment:
    """An environment without tools: the model's first message ends the episode."""

    uses_random_state = False

    def reset(self, **row: Any) -> None:
        """Do nothing, because the task's prompt is the whole request."""
