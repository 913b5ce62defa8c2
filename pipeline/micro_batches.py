"""Trajectories to micro-batches: which sequences share a forward pass, padded or joined."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.trajectory import MicroBatch, StopReason, Trajectory

Item = tuple[Trajectory, float, float]  # a trajectory, its advantage, the weight of its tokens


def make_micro_batches(
    items: Sequence[Item], max_tokens: int, pad_id: int, padding_free: bool = False
) -> list[MicroBatch]:
    """Sequences sorted by length, cut where a forward pass would exceed `max_tokens`.

    Padding counts; with `padding_free` there is none. Episodes without a sampled token (the
    environment failed at once) have no term and are left out.
    """
    sampled = [item for item in items if item[0].num_sampled_tokens]
    ordered = sorted(sampled, key=lambda item: -item[0].num_tokens)
    ends = cuts([item[0].num_tokens for item in ordered], max_tokens, padding_free)
    return [
        micro_batch(ordered[first:last], pad_id, padding_free)
        for first, last in zip([0, *ends], ends, strict=False)
    ]


def cuts(lengths: Sequence[int], max_tokens: int, padding_free: bool) -> list[int]:
    """Where each micro-batch ends, for lengths in falling order; a longer one stands alone."""
    ends, first, tokens = [], 0, 0
    for i, length in enumerate(lengths):
        needed = tokens + length if padding_free else lengths[first] * (i + 1 - first)
        if i > first and needed > max_tokens:
            ends.append(i)
            first, needed = i, length
        tokens = needed
    return [*ends, len(lengths)] if lengths else []


def micro_batch(items: Sequence[Item], pad_id: int, padding_free: bool = False) -> MicroBatch:
    """One forward pass over these sequences: a row each, or with `padding_free` all in one row."""
    longest = max(trajectory.num_tokens for trajectory, _, _ in items)
    input_ids: list[list[int]] = []
    rows, columns, sequences, targets = [], [], [], []
    old_logprobs, advantages, weights = [], [], []
    offset = 0
    for number, (trajectory, advantage, weight) in enumerate(items):
        ids = trajectory.prompt_ids + trajectory.completion_ids
        input_ids.append(ids if padding_free else ids + [pad_id] * (longest - len(ids)))
        start = len(trajectory.prompt_ids) + offset
        sampled = [i for i, mask in enumerate(trajectory.loss_mask) if mask]
        rows += [0 if padding_free else number] * len(sampled)
        columns += [start + i - 1 for i in sampled]
        sequences += [number] * len(sampled)
        targets += [trajectory.completion_ids[i] for i in sampled]
        old_logprobs += [trajectory.logprobs[i] for i in sampled]
        advantages += [advantage] * len(sampled)
        weights += [weight] * len(sampled)
        offset += len(ids) if padding_free else 0
    position_ids = None
    if padding_free:
        position_ids = torch.cat([torch.arange(len(ids)) for ids in input_ids])[None]
        input_ids = [[token for ids in input_ids for token in ids]]
    return MicroBatch(
        input_ids=torch.tensor(input_ids),
        position_ids=position_ids,
        lengths=torch.tensor([trajectory.num_tokens for trajectory, _, _ in items]),
        rows=torch.tensor(rows, dtype=torch.int64),
        columns=torch.tensor(columns, dtype=torch.int64),
        sequences=torch.tensor(sequences, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        old_logprobs=torch.tensor(old_logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weights=torch.tensor(weights, dtype=torch.float32),
    )


def empty_micro_batch(pad_id: int) -> MicroBatch:
    """One token of weight zero: what a rank computes when others have one micro-batch more."""
    nothing = Trajectory(
        domain="",
        task_id="",
        family="",
        branch="",
        trial=0,
        prompt_ids=[pad_id],
        completion_ids=[pad_id],
        loss_mask=[True],
        logprobs=[0.0],
        stop_reason=StopReason.COMPLETED,
        reward=0.0,
        num_turns=0,
    )
    return micro_batch([(nothing, 0.0, 0.0)], pad_id)
