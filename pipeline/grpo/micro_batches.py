"""Trajectories to micro-batches: which sequences share a forward pass, and how they stand in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch

from pipeline.grpo.prefix_tree import num_common, shared_row
from pipeline.rollout.trajectory import MicroBatch, StopReason, Trajectory

Item = tuple[Trajectory, float, float]  # a trajectory, its advantage, the weight of its tokens
KEYS_PER_TOKEN = 8  # that attention may gather, for each token of a micro-batch's budget


def make_micro_batches(
    items: Sequence[Item],
    max_tokens: int,
    pad_id: int,
    padding_free: bool = False,
    share_prefixes: bool = False,
) -> list[MicroBatch]:
    """Sequences sorted by length, cut where a forward pass would exceed `max_tokens`.

    Padding counts; with `padding_free` there is none. With `share_prefixes` they are sorted by
    their tokens, and what is computed once counts once. Episodes without a sampled token (the
    environment failed at once) have no term and are left out.
    """
    sampled = [item for item in items if item[0].num_sampled_tokens]
    if share_prefixes:
        ordered = sorted(sampled, key=lambda item: item[0].ids)
        ends = shared_cuts([item[0].ids for item in ordered], max_tokens)
    else:
        ordered = sorted(sampled, key=lambda item: -item[0].num_tokens)
        ends = cuts([item[0].num_tokens for item in ordered], max_tokens, padding_free)
    return [
        micro_batch(ordered[first:last], pad_id, padding_free, share_prefixes)
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


def shared_cuts(sequences: Sequence[list[int]], max_tokens: int) -> list[int]:
    """The same for sequences in lexicographic order, whose common beginnings count once.

    What attention gathers for each sequence is bounded as well.
    """
    ends, tokens, keys = [], 0, 0
    for i, ids in enumerate(sequences):
        new = len(ids) - (num_common(sequences[i - 1], ids) if i else 0)
        tokens, keys = tokens + new, keys + len(ids)
        if keys > len(ids) and (tokens > max_tokens or keys > KEYS_PER_TOKEN * max_tokens):
            ends.append(i)
            tokens = keys = len(ids)
    return [*ends, len(sequences)] if sequences else []


def micro_batch(
    items: Sequence[Item], pad_id: int, padding_free: bool = False, share_prefixes: bool = False
) -> MicroBatch:
    """One forward pass over these sequences: a row each, or all in one.

    With `share_prefixes` they must be sorted by their tokens.
    """
    sequences = [trajectory.ids for trajectory, _, _ in items]
    ends = list(accumulate(map(len, sequences)))
    position_ids = tree = None
    if share_prefixes:
        row = shared_row(sequences)
        input_ids, position_ids, tree = [row.ids], torch.tensor([row.positions]), row.tree
        paths: Sequence[Sequence[int]] = row.paths
    elif padding_free:
        input_ids = [[token for ids in sequences for token in ids]]
        position_ids = torch.cat([torch.arange(len(ids)) for ids in sequences])[None]
        paths = [range(end - len(ids), end) for ids, end in zip(sequences, ends, strict=True)]
    else:
        longest = max(map(len, sequences))
        input_ids = [ids + [pad_id] * (longest - len(ids)) for ids in sequences]
        paths = [range(longest)] * len(items)
    tokens: list[tuple[Any, ...]] = []
    for number, ((trajectory, advantage, weight), path) in enumerate(
        zip(items, paths, strict=True)
    ):
        start = len(trajectory.prompt_ids)
        same = (number, advantage, weight)
        tokens += [
            (path[start + i - 1], trajectory.completion_ids[i], trajectory.logprobs[i], *same)
            for i, mask in enumerate(trajectory.loss_mask)
            if mask
        ]
    if share_prefixes:
        tokens.sort(key=itemgetter(0))
    columns, targets, old_logprobs, numbers, advantages, weights = zip(*tokens, strict=True)
    where = torch.tensor(numbers)
    return MicroBatch(
        input_ids=torch.tensor(input_ids),
        position_ids=position_ids,
        tree=tree,
        lengths=torch.tensor([len(ids) for ids in sequences]),
        rows=where if position_ids is None else torch.zeros_like(where),
        columns=torch.tensor(columns),
        sequences=where,
        targets=torch.tensor(targets),
        old_logprobs=torch.tensor(old_logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weights=torch.tensor(weights, dtype=torch.float32),
    )


def bare_trajectory(
    prompt_ids: list[int], completion_ids: list[int], loss_mask: list[bool], logprobs: list[float]
) -> Trajectory:
    """An episode with what an update needs of it, and nothing else."""
    return Trajectory(
        domain="",
        task_id="",
        family="",
        branch="",
        trial=0,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        stop_reason=StopReason.COMPLETED,
        reward=0.0,
        num_turns=0,
    )
