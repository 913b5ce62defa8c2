"""Sampled, one message of the policy; Trajectory, one episode in tokens; RunRecord, its summary.

Example of a Trajectory with two turns: prompt_ids [p p p], completion_ids [s s s e  t t t  s s e]
with loss_mask [1 1 1 1  0 0 0  1 1 1]: s sampled, e the sampled end of turn, t the tokens of a
tool's reply.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from itertools import groupby
from operator import itemgetter
from typing import Any


class StopReason(StrEnum):
    """Why an episode ended; mistakes of the model are a status here, never an exception."""

    COMPLETED = "completed"  # the user did not answer, or a tool ended the episode
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # of a turn, or of the episode
    MALFORMED_CALL = "malformed_call"  # more than max_malformed_calls
    ENVIRONMENT_ERROR = "environment_error"  # reset, get_reward or reply failed or was late


# Training leaves out episodes whose environment failed in these ways, because the policy did not
# cause the failure. It did if its own call failed (a tool past its deadline, get_reward).
LEFT_OUT = ("reset", "reply", "outage")


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One assistant message as it was sampled; `finished` if its last id ends messages."""

    ids: list[int]
    logprobs: list[float]
    finished: bool


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One episode of one task; its ids are the sampled ones, never text that was encoded again."""

    domain: str
    task_id: str
    family: str = ""
    branch: str = ""
    trial: int = 0  # the number in its group, or of the evaluation trial
    prompt_ids: list[int]
    completion_ids: list[int]
    loss_mask: list[bool]  # True where the policy sampled the token; as long as completion_ids
    logprobs: list[float]  # of the sampling policy; 0.0 where loss_mask is False
    messages: list[dict[str, Any]] = field(default_factory=list)  # for people
    stop_reason: StopReason = StopReason.COMPLETED
    reward: float = 0.0
    num_turns: int = 0
    num_malformed_calls: int = 0
    num_tool_errors: int = 0  # exceptions of tools' own code that were shown to the model
    error: str = ""  # of the environment, when it failed
    left_out: str = ""  # one of LEFT_OUT; empty: the episode counts
    tools: dict[str, list[int]] = field(default_factory=dict)  # name: [calls, calls with an error]
    reward_breakdown: dict[str, float] = field(default_factory=dict)  # from the environment
    difference: dict[str, list[str]] = field(default_factory=dict)  # name: [actual, expected]

    def __post_init__(self) -> None:
        sizes = {len(self.completion_ids), len(self.loss_mask), len(self.logprobs)}
        assert len(sizes) == 1, f"completion_ids, loss_mask and logprobs differ in length: {sizes}"

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(self.loss_mask)

    def sampled_turns(self) -> list[tuple[list[int], list[float]]]:
        """The sampled ids of each assistant message, and their log-probabilities."""
        tokens = zip(self.loss_mask, self.completion_ids, self.logprobs, strict=True)
        turns = [
            zip(*turn, strict=True) for sampled, turn in groupby(tokens, itemgetter(0)) if sampled
        ]
        return [(list(ids), list(logprobs)) for _, ids, logprobs in turns]

    def record(self) -> RunRecord:
        return RunRecord(**{f.name: getattr(self, f.name) for f in fields(RunRecord)})


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The summary of an episode that ranks exchange; its Trajectory has the same attributes."""

    domain: str
    task_id: str
    family: str
    branch: str
    trial: int
    reward: float
    stop_reason: str
    num_turns: int
    num_sampled_tokens: int
    num_malformed_calls: int
    num_tool_errors: int = 0
    left_out: str = ""
    tools: dict[str, list[int]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
