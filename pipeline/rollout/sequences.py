"""What samplers hand around: conversations and their rows, weights, and how prompts are fed.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pipeline.grpo.prefix_tree import num_common
from pipeline.models.lora import merged_parameters

PASS_TOKENS = 128  # a pass through the model costs about as much as so many tokens more in another
Ids = tuple[int, ...]


@dataclass(kw_only=True, eq=False)
class Row:
    """A row of the cache, and the conversations that hold the same tokens so far."""

    place: int
    length: int  # tokens in the cache
    members: list[SamplerEpisode] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class SamplerEpisode:
    """One conversation inside the sampler."""

    key: int  # of its stream of draws
    pending: list[int]  # tokens to feed before the next one is sampled
    row: Row | None = None
    num_sampled: int = 0  # draws used so far
    room: int = 0  # tokens that the message under way may have
    ids: list[int] = field(default_factory=list)  # of the message under way
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One assistant message as it was sampled; `finished` when its last id ends messages."""

    ids: list[int]
    logprobs: list[float]
    finished: bool


def own_copy(model: Any, dtype: torch.dtype) -> Any:
    """A copy of a model to sample from, which shares the weights that have the type already."""
    shared = {  # not the buffers: rotary frequencies need fp32
        id(p): nn.Parameter(p.data.to(dtype), requires_grad=False) for p in model.parameters()
    }
    return copy.deepcopy(model, shared).eval()


def take_weights(own_model: Any, model: Any) -> None:
    """Share or copy the weights of the trained model; LoRA's are merged on the way."""
    named = zip(own_model.named_parameters(), merged_parameters(model), strict=True)
    for (own_name, own), (name, trained) in named:
        assert own_name == name, f"{own_name} cannot take the weights of {name}"
        if own.dtype == trained.dtype:
            own.data = trained.detach()
        else:
            own.copy_(trained)


def row_of(episode: SamplerEpisode) -> Row:
    assert episode.row is not None
    return episode.row


def members_of(rows: Sequence[Row]) -> tuple[list[SamplerEpisode], NDArray[np.int64]]:
    """The conversations of rows, and for each the index of its row."""
    which = np.repeat(np.arange(len(rows)), [len(row.members) for row in rows])
    return [episode for row in rows for episode in row.members], which


def streams_of(
    episodes: Sequence[SamplerEpisode],
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The key of each episode's draws, and how many it has used."""
    keys = np.array([episode.key for episode in episodes], dtype=np.uint64)
    return keys, np.array([episode.num_sampled for episode in episodes])


def append_sampled(
    episodes: Sequence[SamplerEpisode], ids: list[list[int]], logprobs: list[list[float]]
) -> None:
    """Add sampled tokens to the messages under way; the last one is still to be fed."""
    for episode, new, theirs in zip(episodes, ids, logprobs, strict=True):
        episode.ids += new
        episode.logprobs += theirs
        episode.num_sampled += len(new)
        episode.pending = [new[-1]]


def passes(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Which lengths, in falling order, are fed together: (first, last) of each pass.

    They are cut where that saves more padding than a pass of its own costs.
    """
    cut = max(range(len(lengths)), key=lambda j: (len(lengths) - j) * (lengths[0] - lengths[j]))
    if (len(lengths) - cut) * (lengths[0] - lengths[cut]) <= PASS_TOKENS:
        return [(0, len(lengths))]
    rest = [(cut + first, cut + last) for first, last in passes(lengths[cut:])]
    return [*passes(lengths[:cut]), *rest]


def common_stems(prompts: Sequence[Ids], at_least: int) -> list[Ids]:
    """What neighbours in sorted order begin with alike, where it is `at_least` so long.

    A prompt that shares less than half of a stem starts another: domains have policies of their
    own behind a common opening.
    """
    stems: list[Ids] = []
    before: Ids = ()
    stem: Ids | None = None
    for prompt in sorted(prompts):
        if stem is not None and 2 * (shared := num_common(stem, prompt)) >= len(stem):
            stems[-1] = stem = stem[:shared]
        elif (shared := num_common(before, prompt)) >= at_least:
            stem = prompt[:shared]
            stems.append(stem)
        else:
            stem = None
        before = prompt
    return [stem for stem in stems if len(stem) >= at_least]
