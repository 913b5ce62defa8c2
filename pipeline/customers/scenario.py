"""What a language model needs in order to play a customer, and what an episode keeps of it."""

import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.data.tasks import Task

# Gives an environment its customer: (environment, task, key, request) -> new request.
Welcome = Callable[[Any, Task, int, str], Coroutine[Any, Any, str] | str]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a language model needs in order to play the customer of one episode.

    An environment with a property `scenario` lets a language model play its customer.
    """

    system: str  # the system prompt
    greeting: str  # the agent's first message
    first_words: str = ""  # the customer's first message, or empty: the language model writes it
    schemas: Sequence[dict[str, Any]] = ()  # JSON schemas of the customer's own tools
    # Calls a tool of the customer; returns the text of the result, and whether the call failed.
    call: Callable[[str, dict[str, Any]], tuple[str, bool]] | None = None


def spoken(text: str) -> str:
    """Return a message without the thoughts of a reasoning model, also without an open thought."""
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def record(environment: Any, trajectory: Any) -> None:
    """Add a language model's conversation as the customer to a trajectory.

    The customer's tools are counted apart from the model's, under `customer/` and their name.
    """
    user: Any = getattr(environment, "user", None)
    if (messages := getattr(user, "model_messages", None)) is not None:
        trajectory.customer = list(messages)
        trajectory.tools |= {f"customer/{name}": of for name, of in user.tool_counts.items()}
