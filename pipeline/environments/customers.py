"""The simulated user, who talks with the trained model in an episode.

`Rollout.reply` may be another function than `reply_of`, such as one that asks a person.
"""

from typing import Any, Protocol

from pipeline.environments.event_loop import Steps
from pipeline.environments.timeouts import awaited
from pipeline.environments.tools import writable


class User(Protocol):
    """The simulated user, who talks with the trained model."""

    def reply(self, message: str) -> str | None:
        """Answer a message, or return None to end the conversation."""


def reply_of(environment: Any, message: str) -> Steps[str | None]:
    """Return the user's answer to `message`, or None if the conversation ends."""
    user = getattr(environment, "user", None)
    if user is None or (answer := (yield from awaited(user.reply(message)))) is None:
        return None
    if not isinstance(answer, str):
        raise TypeError(f"the user replied {type(answer).__name__}, not text or None")
    return writable(answer)
