"""The simulated user, who talks with the trained model in an episode."""

from typing import Any, Protocol

from pipeline.environments.calls import awaited
from pipeline.environments.tools import writable


class User(Protocol):
    """The simulated user, who talks with the trained model."""

    def reply(self, message: str) -> str | None:
        """Answer a message, or return None to end the conversation."""


async def reply_of(environment: Any, message: str) -> str | None:
    """Return the user's answer to `message`, or None if the conversation ends."""
    user = getattr(environment, "user", None)
    answer = None if user is None else await awaited(user.reply(message))
    if answer is None:
        return None
    if not isinstance(answer, str):
        raise TypeError(f"the user replied {type(answer).__name__}, not text or None")
    return writable(answer)
