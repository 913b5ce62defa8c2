"""Micro-batches: every sampled token once, within the budget, padded or joined."""

import numpy as np
import pytest

from pipeline.training.micro_batches import make_micro_batches
from scripts.proofs.grid import make_episodes, make_trajectory

BOTH = pytest.mark.parametrize("padding_free", [False, True])


def all_ones(rows):
    return [(row, 0.0, 1.0) for row in rows]


def tokens_of(items):
    """For each sampled token: weight, target, old log-probability, advantage, as float32 keeps
    them."""
    return sorted(
        (weight, row.completion_ids[at], float(np.float32(row.logprobs[at])), advantage)
        for row, advantage, weight in items
        for at, mask in enumerate(row.loss_mask)
        if mask
    )


@pytest.mark.parametrize("layout", [(False,), (True,), (False, True)])
def test_micro_batches_hold_every_sampled_token_once_within_the_budget(layout):
    rows, advantages = make_episodes(40)
    weights = [1.0 + number for number in range(40)]  # tells the sequences apart
    items = list(zip(rows, [round(a * 4) / 4 for a in advantages], weights, strict=True))
    batches = make_micro_batches(items, 90, 7, *layout)
    assert len(batches) > 5
    found = []
    for batch in batches:
        assert batch.input_ids.numel() <= 90
        fields = (batch.weights, batch.targets, batch.old_logprobs, batch.advantages)
        found += list(zip(*(field.tolist() for field in fields), strict=True))
        # a sequence is told apart by its weight
        pairs = set(zip(batch.sequences.tolist(), batch.weights.tolist(), strict=True))
        assert len(pairs) == len(batch.lengths)
    assert sorted(found) == tokens_of(items)


@BOTH
def test_a_sequence_longer_than_the_budget_stands_alone(padding_free):
    rows = [make_trajectory([1], [2] * 20), make_trajectory([1], [2] * 3)]
    batches = make_micro_batches(all_ones(rows), 8, 0, padding_free)
    assert [batch.input_ids.shape for batch in batches] == [(1, 21), (1, 4)]
