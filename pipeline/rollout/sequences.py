"""Conversations in rows, common prefixes of prompts, and how a token is drawn.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.rng import uniforms
from pipeline.models.weights import SamplingCopy, Weights

PASS_TOKENS = 128  # a forward pass costs about as much as so many more tokens in another one
Ids = tuple[int, ...]
Tokens = TypeVar("Tokens", list[int], tuple[int, ...])


@dataclass(kw_only=True, eq=False)
class Slot:
    """A row of the cache, and the conversations whose tokens so far it holds."""

    place: int
    length: int  # tokens in the cache
    members: list[RowEpisode] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class RowEpisode:
    """One conversation inside the row sampler."""

    key: int  # of its stream of draws
    pending: list[int]  # tokens to feed before the next one is sampled
    slot: Slot
    num_sampled: int = 0  # draws used so far
    room: int = 0  # largest number of tokens of the current message
    ids: list[int] = field(default_factory=list)  # of the current message
    logprobs: list[float] = field(default_factory=list)

    def append(self, ids: list[int], logprobs: list[float]) -> None:
        """Add sampled tokens to the current message; the last one is still to be fed."""
        self.ids += ids
        self.logprobs += logprobs
        self.num_sampled += len(ids)
        self.pending = ids[-1:]


def members_of(rows: Sequence[Slot]) -> tuple[list[RowEpisode], NDArray[np.int64]]:
    """The conversations of rows, and for each the index of its row."""
    which = np.repeat(np.arange(len(rows)), [len(row.members) for row in rows])
    return [episode for row in rows for episode in row.members], which


def streams_of(episodes: Sequence[Any]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The key of each episode's draws, and how many it has used."""
    keys = np.array([episode.key for episode in episodes], dtype=np.uint64)
    return keys, np.array([episode.num_sampled for episode in episodes])


def passes(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The passes in which sequences of falling lengths are fed: (first, last) of each.

    They are cut where that saves more padding than another pass costs.
    """
    cut = max(range(len(lengths)), key=lambda j: (len(lengths) - j) * (lengths[0] - lengths[j]))
    if (len(lengths) - cut) * (lengths[0] - lengths[cut]) <= PASS_TOKENS:
        return [(0, len(lengths))]
    rest = [(cut + first, cut + last) for first, last in passes(lengths[cut:])]
    return [*passes(lengths[:cut]), *rest]


def shared_prefixes(prompts: Sequence[Ids], at_least: int) -> list[Ids]:
    """Common prefixes of neighbours in sorted order, of `at_least` so many tokens.

    A prompt that shares less than half of a prefix starts another one: domains have policies of
    their own behind a common opening.
    """
    prefixes: list[Ids] = []
    prefix: Ids = ()
    for before, prompt in pairwise([(), *sorted(prompts)]):
        if prefix and 2 * (shared := num_common(prefix, prompt)) >= len(prefix):
            prefixes[-1] = prefix = prefix[:shared]
        elif (shared := num_common(before, prompt)) >= at_least:
            prefix = prompt[:shared]
            prefixes.append(prefix)
        else:
            prefix = ()
    return [prefix for prefix in prefixes if len(prefix) >= at_least]


def num_common(a: Tokens, b: Tokens) -> int:
    """The length of the common prefix of two sequences."""
    known, most = 0, min(len(a), len(b))
    while known < most:  # bisection: comparing slices is much faster than a loop over tokens
        middle = (known + most + 1) // 2
        if a[known:middle] == b[known:middle]:
            known = middle
        else:
            most = middle - 1
    return known


def num_distinct_tokens(sequences: Sequence[list[int]]) -> int:
    """Tokens of these sequences where common prefixes count once."""
    pairs = pairwise([[], *sorted(sequences)])
    return sum(len(ids) - num_common(previous, ids) for previous, ids in pairs)


def logprobs_of(logits_BV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities of every next token at the sampling temperature, [B, V], float32."""
    return (logits_BV.float() / temperature).log_softmax(-1)


def sample_tokens(
    logprobs_BV: torch.Tensor,
    keys: NDArray[np.uint64],
    positions: NDArray[np.int64],
    greedy: bool,
    top_k: int = 0,
    top_p: float = 1.0,
) -> torch.Tensor:
    """The next token of each row, [B] int64, by the draw at `positions` of the streams `keys`.

    Greedy takes the most likely one. Otherwise `top_k`, then `top_p` restrict the tokens that can
    be drawn; 0 and 1.0 do not. Training computes the whole distribution, so that with these limits
    it is slightly off-policy. Nothing here waits for the device.
    """
    if greedy:
        return logprobs_BV.argmax(-1)
    draws = torch.from_numpy(uniforms(keys, positions))
    if logprobs_BV.is_cuda:  # a copy from memory that is not pinned would wait for the device
        draws = draws.pin_memory().to(logprobs_BV.device, non_blocking=True)
    if top_k == 0 and top_p == 1.0:
        return inverse_cdf(cumulative(logprobs_BV), draws)
    logprobs_BV = logprobs_BV.masked_fill(~kept(logprobs_BV, top_k, top_p), float("-inf"))
    # Intervals of width zero for excluded tokens, so that rounding cannot select them.
    line = cumulative(logprobs_BV).masked_fill(logprobs_BV == float("-inf"), 0.0)
    return (line > draws[:, None] * line.amax(-1, keepdim=True)).int().argmax(-1)


def kept(logprobs_BV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The tokens that can be drawn, [B, V] bool: at least one a row; of equals, lower ids first.

    Among the `top_k` most likely ones (all, if 0), the smallest set whose share of their
    probability reaches `top_p`: the nucleus of Holtzman et al. 2020 (arXiv 1904.09751, 3.1).
    """
    order = logprobs_BV.sort(descending=True, stable=True)
    best, likely = order.indices[:, : top_k or None], order.values[:, : top_k or None]
    kept_BV = torch.zeros_like(logprobs_BV, dtype=torch.bool)
    if top_p == 1.0:
        return kept_BV.scatter_(-1, best, True)
    line = cumulative(likely)
    before = torch.nn.functional.pad(line[:, :-1], (1, 0))  # of all that are more likely
    return kept_BV.scatter_(-1, best, before < top_p * line[:, -1:])


def cumulative(logprobs_BV: torch.Tensor) -> torch.Tensor:
    """The cumulative distribution of each row, [B, V], float64; its last value is near 1."""
    return logprobs_BV.double().exp().cumsum(-1)


def inverse_cdf(cumulative_BV: torch.Tensor, draws_B: torch.Tensor) -> torch.Tensor:
    """The token of each row whose interval of the distribution holds the draw, in [0, 1)."""
    numbers = draws_B[:, None] * cumulative_BV[:, -1:]
    last = cumulative_BV.shape[-1] - 1
    return torch.searchsorted(cumulative_BV, numbers, right=True)[:, 0].clamp_(max=last)


class ModelSampler:
    """Samples from a copy of the model whose parameters have the type `dtype`.

    The model may be plain or have LoRA adapters; `load_weights` then takes the adapters. A message
    ends at the end of turn, at one of `other_stops` (ids, too), or at its limit.
    """

    def __init__(
        self,
        model: Any,
        end_of_turn_id: int,
        temperature: float,
        dtype: torch.dtype,
        top_k: int = 0,
        top_p: float = 1.0,
        *,
        other_stops: Sequence[int] = (),
    ) -> None:
        self._copy = SamplingCopy(model)
        self.model = self._copy.model
        self.device = next(self.model.parameters()).device
        self.end_of_turn_id, self.temperature = end_of_turn_id, temperature
        self.top_k, self.top_p = top_k, top_p
        self.stop_ids = frozenset((end_of_turn_id, *other_stops))
        self.stops = np.array(sorted(self.stop_ids))
        self.num_tokens = self.num_padded_tokens = 0
        self._prepare()
        self._copy.cast(dtype)

    def _prepare(self) -> None:
        """Set up this kind of sampler, while the copy's parameters have the model's own type."""
        raise NotImplementedError

    def load_weights(self, weights: Weights) -> None:
        """See `Sampler`. Weights that have the type already are shared, not copied."""
        self._copy.load(weights)

    def sample_tokens(
        self,
        logprobs_BV: torch.Tensor,
        keys: NDArray[np.uint64],
        positions: NDArray[np.int64],
        greedy: bool,
    ) -> torch.Tensor:
        """The next token of each row, [B]; its draw stands at `positions` of the stream `keys`."""
        return sample_tokens(logprobs_BV, keys, positions, greedy, self.top_k, self.top_p)
