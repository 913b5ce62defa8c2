"""What a user's loop asks the policy and its domain's environment for, and what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from pipeline.data.tasks import Message
from pipeline.rollout.trajectory import StopReason

# A tool's result or the customer's answer, and why the episode ends with it, if it does.
Act: TypeAlias = tuple[Any, StopReason | None]


class World(NamedTuple):
    """What a loop has of its domain's environment; the functions run in the rollout's thread."""

    tools: list[dict[str, Any]]  # JSON schemas
    call: Callable[[str, dict[str, Any]], Awaitable[Act]]
    reply: Callable[[str], Awaitable[Act]]


class EpisodeOver(Exception):
    """`policy.message` raises this if no further message is allowed.

    A loop that does not catch it ends with reward 0. `reason` says which limit was reached.
    """

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"the episode is over: {reason}")
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A message of the model: as the loop gets it, and as tokens."""

    message: Message  # with its finish_reason
    key: str  # the same on any number of ranks
    prompt_ids: list[int]  # of the conversation before the message
    ids: list[int]
    logprobs: list[float]  # of `ids`, in nats
    texts: list[str]  # of `ids`, if they were asked for


@dataclass(eq=False, kw_only=True)
class Asked:
    """A message that a loop has asked for; `undo` takes back what was done for it."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    with_texts: bool = False
    is_lost: Callable[[], bool] = lambda: False  # whether nobody waits for it any more
    answer: Future[Answer] = field(default_factory=Future)
    task: asyncio.Task[Answer] | None = None  # in the rollout's event loop
    undo: Callable[[], None] | None = None
    before: Known | None = None  # what it continues
    is_malformed: bool = False
    is_taken_back: bool = False
    has_arrived: bool = False  # set in the loop's thread


@dataclass(frozen=True, eq=False, kw_only=True)
class Known:
    """What a conversation holds after a message of the model."""

    messages: list[Message]  # as they are compared
    asked: Asked
    ended_by: str = ""  # "cut" or "stop" if the conversation cannot go on, else ""
