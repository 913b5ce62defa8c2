"""Policies write the model's messages of conversations.

A policy is anything with `await policy.message(conversation)`: a sampler with a model's weights, an
endpoint, a person, a replay.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from pipeline.chat.template import Chat
from pipeline.chat.text import Parsed
from pipeline.config.settings import RolloutSettings
from pipeline.models.allocation import give_memory_back, is_out_of_memory
from pipeline.rollout.sampler import Handle, Sampler
from pipeline.rollout.trajectory import Sampled, Trajectory

TURN_SHARE = 0.25  # share of messages that must be complete before environments answer
_turns = count()


@dataclass(eq=False, kw_only=True)
class Conversation:
    """The messages of a trajectory, and what a policy needs in order to write the next one."""

    trajectory: Trajectory
    schemas: list[dict[str, Any]]  # JSON schemas of the tools
    key: int  # 64-bit key that selects the random numbers
    greedy: bool = False
    is_text: bool = False  # the model's messages are texts as a whole, without tool calls
    num_read: int = 0  # number of messages whose tokens are in the trajectory
    turn: int = field(default_factory=lambda: next(_turns))  # orders conversations that wait

    def add(self, said: "Said") -> "Said":
        """Add a message of the model, whose tokens the policy has added."""
        message = said.parsed.message()
        if said.stopped_by:
            message["stopped_by"] = said.stopped_by
        self.trajectory.messages.append(message)
        self.trajectory.num_turns += 1
        self.num_read = len(self.trajectory.messages)
        return said


@dataclass(frozen=True, kw_only=True)
class Said:
    """A message of the model, read."""

    parsed: Parsed
    finished: bool = True  # False if the message was cut off
    stopped_by: str = ""  # what ended the message, if it is not the end of a turn


class Policy(Protocol):
    """Writes the model's messages."""

    most: int  # largest number of episodes at the same time

    @property
    def num_waiting(self) -> int:
        """The number of conversations that wait for `step`."""

    async def message(self, conversation: Conversation) -> Said | None:
        """Add the next message to a conversation and return it; None if there is no room for one.

        The conversation has new messages of the environment or the customer since the last call.
        """

    def step(self) -> None:
        """Write some messages of the conversations that wait; they are written together."""

    def close(self, conversation: Conversation) -> None:
        """End a conversation, also one that waits."""


class SamplerPolicy:
    """A model whose messages a sampler writes; conversations that wait are sampled together.

    `most` becomes smaller if memory runs out.
    """

    def __init__(self, sampler: Sampler, chat: Chat, limits: RolloutSettings) -> None:
        self.sampler = sampler
        self.chat = chat
        self.limits = limits
        self.most = limits.max_concurrent_episodes
        self._waiting: dict[Conversation, asyncio.Future[Sampled]] = {}
        self._open: dict[Conversation, Handle] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def message(self, conversation: Conversation) -> Said | None:
        if not self._read(conversation):
            return None
        future = asyncio.get_running_loop().create_future()
        self._waiting[conversation] = future
        try:
            sampled: Sampled = await future
        except asyncio.CancelledError:  # a loop of the user's was late
            self.close(conversation)
            raise
        conversation.trajectory.append(sampled.ids, sampled.logprobs)
        return conversation.add(self._said(sampled, conversation))

    def _read(self, conversation: Conversation) -> bool:
        """Add the tokens of new messages; return False if no room is left for a message."""
        trajectory = conversation.trajectory
        new = trajectory.messages[conversation.num_read :]
        if conversation.num_read == 0:
            if new[0]["role"] != "system":
                trajectory.preface = self.chat.preface
            trajectory.prompt_ids = self.chat.prompt_ids(new, conversation.schemas)
            return trajectory.num_tokens < self.limits.max_tokens
        ids = self.chat.reply_ids(new)
        if trajectory.num_tokens + len(ids) >= self.limits.max_tokens:
            return False
        trajectory.append(ids)
        if conversation in self._open:
            self.sampler.extend(self._open[conversation], ids)
        return True

    def _said(self, sampled: Sampled, conversation: Conversation) -> Said:
        stopped_by = ""
        if sampled.finished and sampled.ids[-1] != self.chat.end_of_turn_id:
            stopped_by = self.chat.tokenizer.decode(sampled.ids[-1:])
        if conversation.is_text:
            text = self.chat.tokenizer.decode(sampled.ids, skip_special_tokens=True)
            parsed = Parsed(content=text)
        else:
            parsed = self.chat.parse(sampled.ids, conversation.schemas, sampled.finished)
        return Said(parsed=parsed, finished=sampled.finished, stopped_by=stopped_by)

    def step(self) -> None:
        """Sample until a share of the messages is complete, and wake their conversations."""
        free = max(0, self.most - len(self._open))
        # The time that an environment takes must not change the order of the rows.
        waiting = sorted(self._waiting, key=lambda c: c.turn)
        active = [c for c in waiting if c in self._open or (free := free - 1) >= 0]
        complete: Mapping[Conversation, Sampled] = {}
        try:
            complete = self._sample(active)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._lower_most(len({*self._open, *active}))
        if not complete:  # Inside `except`, less memory could be freed.
            for conversation in [*self._open]:
                self.sampler.close(self._open.pop(conversation))
            give_memory_back()
        for conversation, sampled in complete.items():
            conversation.turn = next(_turns)
            self._waiting.pop(conversation).set_result(sampled)

    def _sample(self, active: Sequence[Conversation]) -> dict[Conversation, Sampled]:
        """Return the messages that are complete."""
        if lacking := [c for c in active if c not in self._open]:
            prompts = [c.trajectory.ids for c in lacking]
            keys = [c.key for c in lacking]
            drawn = [c.trajectory.num_sampled_tokens for c in lacking]
            given = [drawn] if any(drawn) else []
            handles = self.sampler.open(prompts, keys, *given)
            self._open.update(zip(lacking, handles, strict=True))
        per_turn = self.limits.max_tokens_per_turn
        room = [min(per_turn, self.limits.max_tokens - c.trajectory.num_tokens) for c in active]
        until = math.ceil(len(active) * TURN_SHARE)
        handles = [self._open[c] for c in active]
        messages = self.sampler.sample(handles, room, active[0].greedy, until)
        return {c: m for c, m in zip(active, messages, strict=True) if m is not None}

    def _lower_most(self, number: int) -> None:
        """Halve the `number` of episodes at the same time. Raises RuntimeError if it is 1.

        All conversations are then closed. An episode goes on after its last whole message, in a new
        conversation with the same random numbers.
        """
        if number == 1:
            most = self.limits.max_tokens
            raise RuntimeError(f"out of memory in one episode; lower max_tokens, now {most}")
        self.most = number // 2
        print(
            f"warning: out of memory in a rollout with {number} episodes at once; going on with "
            f"max_concurrent_episodes {self.most}",
            flush=True,
        )

    def close(self, conversation: Conversation) -> None:
        self._waiting.pop(conversation, None)
        if conversation in self._open:
            self.sampler.close(self._open.pop(conversation))
