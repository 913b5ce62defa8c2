"""Picking tokens: the inverse of the cumulative distribution at counter-based draws.

Legend: B sequences, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.rng import uniforms


def logprobs_of(logits_BV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities of every next token at the sampling temperature, [B, V], float32."""
    return (logits_BV.float() / temperature).log_softmax(-1)


def pick(
    logprobs_BV: torch.Tensor,
    keys: NDArray[np.uint64],
    positions: NDArray[np.int64],
    greedy: bool,
    top_k: int = 0,
    top_p: float = 1.0,
) -> torch.Tensor:
    """The next token of each row, [B] int64, whose draw stands at `positions` of `keys`.

    Greedy takes the most likely one. Otherwise `top_k` and then `top_p`, of what it left, say which
    tokens can be drawn; 0 and 1.0 leave all. Training knows the whole distribution only, so with
    limits what is drawn is slightly off-policy. Nothing here waits for the device.
    """
    if greedy:
        return logprobs_BV.argmax(-1)
    draws = torch.from_numpy(uniforms(keys, positions))
    if logprobs_BV.is_cuda:  # from other memory than pinned, a copy waits for all before it
        draws = draws.pin_memory().to(logprobs_BV.device, non_blocking=True)
    if top_k == 0 and top_p == 1.0:
        return inverse_cdf(cumulative(logprobs_BV), draws)
    logprobs_BV = logprobs_BV.masked_fill(~kept(logprobs_BV, top_k, top_p), float("-inf"))
    # Shares of the line that tokens left out do not end: no rounding can make them the pick.
    line = cumulative(logprobs_BV).masked_fill(logprobs_BV == float("-inf"), 0.0)
    return (line > draws[:, None] * line.amax(-1, keepdim=True)).int().argmax(-1)


def kept(logprobs_BV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The tokens that can be drawn, [B, V] bool: at least one a row, equals by lower id first.

    Of the `top_k` most likely ones (all, if 0), the fewest whose share of their probability reaches
    `top_p`: the nucleus of Holtzman et al. 2020 (arXiv 1904.09751, section 3.1).
    """
    order = logprobs_BV.sort(descending=True, stable=True)
    best, likely = order.indices[:, : top_k or None], order.values[:, : top_k or None]
    kept_BV = torch.zeros_like(logprobs_BV, dtype=torch.bool)
    if top_p == 1.0:
        return kept_BV.scatter_(-1, best, True)
    line = cumulative(likely)
    before = torch.nn.functional.pad(line[:, :-1], (1, 0))  # what more likely tokens reach
    return kept_BV.scatter_(-1, best, before < top_p * line[:, -1:])


def cumulative(logprobs_BV: torch.Tensor) -> torch.Tensor:
    """The cumulative distribution of each row, [B, V], float64; its last value is near 1."""
    return logprobs_BV.double().exp().cumsum(-1)


def inverse_cdf(cumulative_BV: torch.Tensor, draws_B: torch.Tensor) -> torch.Tensor:
    """The token of each row in whose share of the distribution the draw, in [0, 1), lies."""
    numbers = draws_B[:, None] * cumulative_BV[:, -1:]
    last = cumulative_BV.shape[-1] - 1
    return torch.searchsorted(cumulative_BV, numbers, right=True)[:, 0].clamp_(max=last)
