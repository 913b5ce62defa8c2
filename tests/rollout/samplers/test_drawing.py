"""Picking tokens: the draw decides, among what top_k and top_p keep, and nothing impossible."""

import numpy as np
import pytest
import torch

from pipeline.data.rng import uniforms
from pipeline.rollout.samplers import drawing as picking
from pipeline.rollout.samplers.drawing import (
    BLOCK,
    cumulative,
    inverse_cdf,
    inverse_cdf_by_blocks,
    kept,
    logprobs_of,
    sample_tokens,
)

IMPOSSIBLE = float("-inf")
LARGEST = 1 - 2.0**-53  # of the draws
SETTINGS = [(0, 1.0), (1, 1.0), (3, 1.0), (99, 1.0), (0, 0.3), (0, 0.9), (0, 1e-9), (4, 0.7)]


def streams(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(count, dtype=np.uint64), np.arange(count) % 7


def some_logprobs(count: int, vocabulary: int = 12) -> torch.Tensor:
    """Distributions with many ties, of which every other one has tokens that are impossible."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 3, (count, vocabulary), generator=generator).float()
    impossible = torch.rand(count, vocabulary, generator=generator) < 0.4
    impossible[::2], impossible[:, 5] = False, False
    return logprobs_of(logits.masked_fill(impossible, IMPOSSIBLE), 1.0)


def by_definition(logprobs: torch.Tensor, draw: float, top_k: int, top_p: float) -> int:
    """The token of one row, step by step."""
    shares = logprobs.double().exp().tolist()
    best = sorted(range(len(shares)), key=lambda token: (-shares[token], token))
    best = best[: top_k or None]
    nucleus: list[int] = []
    while sum(shares[t] for t in nucleus) < top_p * sum(shares[t] for t in best) - 1e-12:
        nucleus.append(best[len(nucleus)])
    number, reached = draw * sum(shares[t] for t in nucleus), 0.0
    for token in sorted(nucleus):
        reached += shares[token]
        if number < reached:
            return token
    raise AssertionError("the draw lies beyond the line")


@pytest.mark.parametrize(("top_k", "top_p"), SETTINGS)
def test_a_token_is_drawn_as_defined(top_k, top_p):
    logprobs, (keys, positions) = some_logprobs(500), streams(500)
    picked = sample_tokens(logprobs, keys, positions, False, top_k, top_p)
    assert picked.dtype == torch.int64
    draws = uniforms(keys, positions)
    assert picked.tolist() == [
        by_definition(row, draw, top_k, top_p) for row, draw in zip(logprobs, draws, strict=True)
    ]
    assert len(set(picked.tolist())) > 5


@pytest.mark.parametrize("size", [BLOCK, 3 * BLOCK, 3 * BLOCK + 7])
def test_a_large_vocabulary_is_sampled_by_blocks_with_the_same_draws(size):
    logprobs = some_logprobs(300, size)
    logprobs[0] = torch.full((size,), IMPOSSIBLE).index_fill(0, torch.tensor(BLOCK - 1), 0.0)
    draws = torch.from_numpy(uniforms(*streams(300)))
    draws[:2], draws[2:4] = 0.0, LARGEST
    found = inverse_cdf_by_blocks(logprobs, draws)
    assert torch.equal(found, inverse_cdf(cumulative(logprobs), draws))
    assert found[0] == BLOCK - 1
    assert (logprobs.gather(-1, found[:, None]) > IMPOSSIBLE).all()
    assert len(set((found // BLOCK).tolist())) == -(-size // BLOCK)


@pytest.mark.parametrize(("top_k", "top_p"), SETTINGS)
@pytest.mark.parametrize("draw", [0.0, LARGEST])
def test_a_token_of_probability_zero_is_never_picked(monkeypatch, draw, top_k, top_p):
    monkeypatch.setattr(picking, "uniforms", lambda keys, positions: np.full(len(keys), draw))
    logits = torch.randn(500, 300, generator=torch.Generator().manual_seed(1)) * 5
    logits[:, :40], logits[:, 200:] = IMPOSSIBLE, IMPOSSIBLE  # at both ends of the line
    logprobs = logprobs_of(logits, 0.7)
    picked = sample_tokens(logprobs, *streams(500), False, top_k, top_p)
    allowed = kept(logprobs, top_k, top_p) & (logprobs > IMPOSSIBLE)
    assert allowed.gather(-1, picked[:, None]).all()
    if draw == 0.0:
        assert picked.tolist() == [row.nonzero()[0].item() for row in allowed]
    if draw == LARGEST and top_k == 3:
        assert picked.tolist() == [row.nonzero()[-1].item() for row in allowed]


def test_nor_is_one_left_out_where_a_device_adds_up_in_another_order(monkeypatch):
    """A parallel sum rounds each place of the line for itself, so that it need not ascend."""
    logprobs = some_logprobs(4000)
    allowed = kept(logprobs, 3, 1.0)
    noise = torch.randint(-4, 5, logprobs.shape, generator=torch.Generator().manual_seed(2))
    rounded = lambda logprobs: cumulative(logprobs) * (1 + noise.double() * 2.0**-52)  # noqa: E731
    monkeypatch.setattr(picking, "cumulative", rounded)
    line = cumulative(logprobs.masked_fill(~allowed, IMPOSSIBLE))
    boundary = (line / line[:, -1:]).gather(-1, torch.arange(4000)[:, None] % 12)[:, 0].numpy()
    for draws in (boundary * (1 - 2.0**-50), np.full(4000, LARGEST), np.zeros(4000)):
        monkeypatch.setattr(picking, "uniforms", lambda keys, positions, draws=draws: draws)
        picked = sample_tokens(logprobs, *streams(4000), False, 3)
        assert allowed.gather(-1, picked[:, None]).all()


def test_greedy_and_the_single_most_likely_token_are_the_first_of_the_largest():
    logprobs, places = some_logprobs(200), streams(200)
    largest = [row.index(max(row)) for row in logprobs.tolist()]
    assert sample_tokens(logprobs, *places, True).tolist() == largest
    assert sample_tokens(logprobs, *places, True, 3, 0.5).tolist() == largest
    assert sample_tokens(logprobs, *places, False, 1).tolist() == largest
