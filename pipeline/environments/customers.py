"""Customers: whoever talks with the trained model in an episode."""

from collections.abc import Sequence
from typing import Any

from pipeline.environments.event_loop import Steps
from pipeline.environments.tools import reply_of


class Customer:
    """Talks with the model. A subclass may replace the simulated user of the environments."""

    def begin(self, environment: Any, messages: list[dict[str, Any]]) -> None:
        """See the prompt before the model does; may change the request, the last message."""

    def watch(self, messages: Sequence[dict[str, Any]]) -> None:
        """See new messages of the model or of tools, before the next message is made."""

    def reply(self, environment: Any, message: str) -> Steps[str | None] | str | None:
        """Answer a message without tool calls, or return None to end the conversation."""
        return reply_of(environment, message)
