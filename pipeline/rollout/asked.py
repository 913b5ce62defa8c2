"""What a user's loop asks the policy and its domain's environment for, and what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.tasks import Message
from pipeline.rollout.trajectory import StopReason

OVER = "the episode is over"


class EpisodeOver(Exception):
    """`policy.message` raises this if no further message is allowed.

    A loop that does not catch it ends with reward 0. `reason` says which limit was reached.
    """

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"{OVER}: {reason}")
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
    answer: Future[Answer] = field(init=False)
    task: asyncio.Task[Any] | None = None  # in the rollout's event loop, once it has begun
    undo: Callable[[], None] | None = None
    before: Asked | None = None  # what it continues
    history: list[Message] = field(default_factory=list)  # with its message, as they are compared
    ended_by: str = ""  # "cut" or "stop" if the conversation cannot go on, else ""
    is_malformed: bool = False
    is_taken_back: bool = False
    has_arrived: bool = False  # set in the loop's thread
    is_unread: bool = False  # whether its client left as it was sent; the next one may get it
