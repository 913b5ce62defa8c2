"""Episodes as tokens (Trajectory), their summaries (EpisodeRecord), and who writes their messages.

Example of a Trajectory with two turns: prompt_ids [p p p], completion_ids [s s s e  t t t  s s e],
loss_mask [1 1 1 1  0 0 0  1 1 1]. Here p is a token of the prompt, s a sampled token, e a sampled
end of turn, and t a token of a tool's reply.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import count, groupby, islice
from typing import Any, NamedTuple, Protocol, TypeVar
from zlib import crc32

from pipeline.models.chat.text import Parsed

_places = count()  # of the conversations that wait, in their order


# Why a sequence began that is not the first of its episode: it has no message of the model yet,
# another system message, other tools, an edited history; it follows a message that was cut off, or
# that ended at a text `stop`; or the chat template drops thoughts.
CAUSES = ("new", "system", "tools", "history", "cut", "stop", "thoughts")


class StopReason(StrEnum):
    """The reason why an episode ended; a mistake of the model never raises an exception."""

    COMPLETED = "completed"  # the simulated user or a tool ended the episode
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # a turn or the episode reached its maximum number of tokens
    MALFORMED_CALL = "malformed_call"  # more malformed tool calls than max_malformed_calls
    REPEATED_CALL = "repeated_call"  # max_repeated_calls equal tool calls in a row
    ENVIRONMENT_ERROR = "environment_error"  # environment code failed or exceeded its deadline
    AGENT_ERROR = "agent_error"  # so did a user's loop or agent, after a message of the model


FAILED = (StopReason.ENVIRONMENT_ERROR, StopReason.AGENT_ERROR)

# Environment failures that the policy did not cause; training ignores episodes with these failures.
# Timeouts of tools and failures of get_reward are not in LEFT_OUT: the policy may cause them.
LEFT_OUT = ("reset", "reply", "outage", "reward")


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One sampled assistant message; `finished` is True if the last id ends the turn."""

    ids: list[int]
    logprobs: list[float]
    finished: bool
    versions: list[int] = field(default_factory=list)  # see Trajectory; none: the present one


@dataclass(kw_only=True)
class EpisodeRecord:
    """The summary of an episode. Ranks exchange summaries of episodes, not tokens."""

    domain: str
    task_id: str
    family: str = ""
    branch: str = ""
    trial: int = 0  # index of the episode among the episodes of its task
    reward: float = 0.0
    stop_reason: StopReason = StopReason.COMPLETED
    num_turns: int = 0
    num_sampled_tokens: int = 0
    num_malformed_calls: int = 0
    num_tool_errors: int = 0  # number of tool calls that raised an exception
    left_out: str = ""  # one of LEFT_OUT, or empty if training may use the episode
    tools: dict[str, list[int]] = field(default_factory=dict)  # {tool name: [calls, failed calls]}
    error: str = ""  # text of the environment's failure, or empty
    rewards: dict[str, float | None] = field(default_factory=dict)  # with reward functions, by name
    # {one of CAUSES: number of the episode's sequences that began so}
    new_sequences: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Trajectory(EpisodeRecord):
    """One episode as tokens. Sampled token ids are never decoded and encoded again."""

    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)  # True at sampled tokens of completion_ids
    logprobs: list[float] = field(default_factory=list)  # in nats; 0.0 where loss_mask is False
    # Of each sampled token, the number of optimizer steps that its weights had; only recorded with
    # `partial_rollout_tokens`.
    versions: list[int] = field(default_factory=list)
    # Of each token of completion_ids, from a teacher; empty: they have the episode's advantage.
    advantages: list[float] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)  # the conversation as texts
    preface: str = ""  # the chat template's own text before a prompt without a system message
    customer: list[dict[str, Any]] = field(default_factory=list)  # ... as a language model saw it
    reward_breakdown: dict[str, float] = field(default_factory=dict)  # the parts of the reward
    extra: dict[str, str] = field(default_factory=dict)  # values of `log_extra` by column
    difference: dict[str, list[str]] = field(default_factory=dict)  # {name: [actual, expected]}
    begun_by: str = ""  # one of CAUSES, or empty for the first sequence
    # The other sequences: those with which this conversation goes on, then the other conversations
    # of an episode that a user's own loop has played. Only a conversation's first one has messages.
    further: list["Trajectory"] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes = {len(self.completion_ids), len(self.loss_mask), len(self.logprobs)}
        assert len(sizes) == 1, f"completion_ids, loss_mask and logprobs differ in length: {sizes}"
        self.num_sampled_tokens = sum(self.loss_mask)

    @property
    def sequences(self) -> list["Trajectory"]:
        """The sequences of the episode; most episodes have one."""
        return [self, *(later for one in self.further for later in one.sequences)]

    @property
    def last_conversation(self) -> "Trajectory":
        """The first sequence of the last conversation, whose own ones are its `sequences`."""
        return [one for one in (self, *self.further) if one is self or one.messages][-1]

    @property
    def num_sampled_in_all(self) -> int:
        """The number of sampled tokens of all sequences of the episode."""
        return sum(one.num_sampled_tokens for one in self.sequences)

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    def append(
        self, ids: list[int], logprobs: list[float] | None = None, versions: Iterable[int] = ()
    ) -> None:
        """Add sampled tokens with their `logprobs`, or a reply's tokens without `logprobs`."""
        is_sampled = logprobs is not None
        self.completion_ids += ids
        self.loss_mask += [is_sampled] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)
        self.versions += versions
        self.num_sampled_tokens += is_sampled * len(ids)

    def cut(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens` of `completion_ids`."""
        for values in (self.completion_ids, self.loss_mask, self.logprobs):
            del values[num_tokens:]
        self.num_sampled_tokens = sum(self.loss_mask)
        del self.versions[self.num_sampled_tokens :]

    def record(self) -> EpisodeRecord:
        found: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(EpisodeRecord)}
        found["num_sampled_tokens"] = self.num_sampled_in_all
        return EpisodeRecord(**found)


class Turn(NamedTuple):
    """A sampled message, or the first part of one, to be taken again in place of sampling."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    checksum: int  # of all tokens before it
    is_whole: bool
    finished: bool  # whether the last id ends the turn


@dataclass(eq=False, kw_only=True)
class Pace:
    """How many tokens an episode may sample in a step, and under which weights."""

    most: float = math.inf
    left: float = 0  # of `most`; an episode without any waits for the next step
    version: int | None = None  # number of optimizer steps that the weights have had

    def versions(self, count: int) -> list[int]:
        """The versions of `count` tokens that are sampled now."""
        return [] if self.version is None else [self.version] * count


@dataclass(eq=False, kw_only=True)
class Conversation:
    """The messages of a trajectory, and what a policy needs in order to write the next one.

    Its tokens are those of `sequence`, which is the trajectory itself until the conversation is
    rendered anew.
    """

    trajectory: Trajectory
    schemas: list[dict[str, Any]]  # JSON schemas of the tools
    key: int  # 64-bit key that selects the random numbers
    greedy: bool = False
    is_text: bool = False  # the model's messages are texts as a whole, without tool calls
    alone: bool = False  # each message is sampled by itself, not together with others
    max_tokens: int | None = None  # of the next message, if less than all messages may have
    stop: tuple[str, ...] = ()  # texts that end the next message
    num_read: int = 0  # number of messages whose tokens are in the sequence
    num_prompted: int = 0  # ... and are its prompt
    num_begun: int = 0  # number of sequences after the first one
    pace: Pace = field(default_factory=lambda: Pace(left=math.inf))  # of the episode
    num_said: int = 0  # number of tokens of a message that goes on in a later step
    recorded: deque[Turn] = field(default_factory=deque)  # to be taken again
    is_cut: bool = False  # whether the last message has no end
    # Among those that wait; None: behind them, by `key`, as soon as a message is sampled.
    place: int | None = field(default_factory=lambda: next(_places))

    def __post_init__(self) -> None:
        self.sequence = self.trajectory

    @property
    def num_drawn(self) -> int:
        """The number of sampled tokens, each of which has used one random number."""
        later = self.trajectory.further[: self.num_begun]
        return sum(one.num_sampled_tokens for one in (self.trajectory, *later))

    def begin_sequence(self, begun_by: str, prompt_ids: list[int]) -> None:
        """Go on with `prompt_ids`, which stand for all messages."""
        self.sequence = Trajectory(
            domain=self.trajectory.domain,
            task_id=self.trajectory.task_id,
            prompt_ids=prompt_ids,
            begun_by=begun_by,
        )
        self.trajectory.further.insert(self.num_begun, self.sequence)
        self.num_begun += 1
        self.num_prompted = len(self.trajectory.messages)

    def move_to_the_end(self) -> None:
        """Stand behind all conversations that wait, or will wait when their environment answers."""
        self.place = next(_places)

    def rewinder(self) -> Callable[[], None]:
        """Return a function that takes back what comes into the conversation from now on."""
        trajectory = self.trajectory
        sequence = self.sequence
        num_messages = len(trajectory.messages)
        num_tokens = len(sequence.completion_ids)
        before = dict(vars(self))
        num_turns = trajectory.num_turns

        def rewind() -> None:
            sequence.cut(num_tokens)
            del trajectory.messages[num_messages:]
            del trajectory.further[before["num_begun"] : self.num_begun]
            trajectory.num_turns = num_turns
            vars(self).update({**before, "place": self.place})

        return rewind

    def record(self, before: int) -> list[Turn]:
        """Return the messages, as far as weights of versions below `before` have sampled them."""
        turns = list[Turn]()
        for one in self.trajectory.sequences:
            versions = iter(one.versions)
            begin = 0
            for is_sampled, of in groupby(one.loss_mask):
                size = len([*of])
                if is_sampled:
                    kept = [version for version in islice(versions, size) if version < before]
                    end = begin + len(kept)
                    turn = Turn(
                        ids=one.completion_ids[begin:end],
                        logprobs=one.logprobs[begin:end],
                        versions=kept,
                        checksum=checksum(one.prompt_ids + one.completion_ids[:begin]),
                        is_whole=len(kept) == size,
                        finished=True,
                    )
                    turns += [turn] if kept else []
                    if not turn.is_whole:
                        return turns
                begin += size
        if turns:
            turns[-1] = turns[-1]._replace(is_whole=not self.num_said, finished=not self.is_cut)
        return turns

    def add(self, said: "Said") -> "Said":
        """Add a message of the model, whose tokens the policy has added."""
        message = said.parsed.message()
        if said.parsed.thoughts is not None:
            message["reasoning_content"] = said.parsed.thoughts
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
    at_stop: bool = False  # whether it was cut off at one of the conversation's texts `stop`
    stopped_by: str = ""  # what ended the message, if it is not the end of a turn


class Policy(Protocol):
    """Writes the model's messages: a sampler with a model's weights, an endpoint, a person."""

    max_episodes: int  # largest number of episodes at the same time

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


def checksum(ids: list[int]) -> int:
    return crc32(repr(ids).encode())


Record = TypeVar("Record", bound=EpisodeRecord)


def grouped(records: Iterable[Record], *names: str) -> dict[str, list[Record]]:
    """Group records by the values of the fields `names`; a group's key joins values with `/`."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault("/".join(getattr(record, name) for name in names), []).append(record)
    return groups


def succeeded(reward: Any, threshold: float) -> Any:
    """Return whether a reward, or each reward of an array, is at least the threshold."""
    return reward >= threshold - 1e-9 * abs(threshold)


def is_graded(rewards: Iterable[float]) -> bool:
    """Return whether any reward is a number other than 0 and 1."""
    return any(reward not in (0, 1) for reward in rewards)
