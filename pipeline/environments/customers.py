"""Customers: whoever talks with the trained model in an episode."""

from collections.abc import Sequence
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


class Customer:
    """Talks with the model. A subclass may replace the simulated user of the environments."""

    def begin(self, environment: Any, messages: list[dict[str, Any]]) -> None:
        """See the prompt before the model does; may change the request, the last message."""

    def watch(self, messages: Sequence[dict[str, Any]]) -> None:
        """See new messages of the model or of tools, before the next message is made."""

    def reply(self, environment: Any, message: str) -> Steps[str | None] | str | None:
        """Answer a message without tool calls, or return None to end the conversation."""
        return reply_of(environment, message)
