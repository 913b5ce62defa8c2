"""Faults of an update: too little memory, and a loss or gradient that is not finite."""

import io
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from pipeline.common.console import say
from pipeline.common.untrusted import printable
from pipeline.distributed.ranks import Ranks
from pipeline.training.micro_batches import MicroBatch

TASKS_NAMED = 5  # maximum number of tasks that an error message names for each rank


def smaller_budget(budget: int, batches: Sequence[MicroBatch], failed: int, rank: int) -> int:
    """Halve `budget` until the largest micro-batch with more than one episode exceeds it.

    Micro-batch number `failed` did not fit into memory. Raises RuntimeError if the failed
    micro-batch is a single episode and at least as large as each micro-batch of several episodes.
    """
    num_tokens = batches[failed].input_ids.numel()
    largest = max((b.input_ids.numel() for b in batches if len(b.lengths) > 1), default=0)
    if len(batches[failed].lengths) == 1 and num_tokens >= largest:
        raise RuntimeError(
            f"out of memory in one episode of {num_tokens} tokens on rank {rank} "
            f"(max_tokens_per_microbatch is {budget}); set gradient_checkpointing, "
            "or lower max_tokens"
        )
    while budget >= largest:
        budget //= 2
    say(
        f"warning: out of memory in a micro-batch of {num_tokens} tokens on rank {rank}; "
        f"going on with max_tokens_per_microbatch {budget}"
    )
    return budget


def find_suspects(
    ranks: Ranks, computed: Sequence[tuple[MicroBatch, float]], folder: Path | None
) -> str:
    """Find and save the micro-batches whose loss is not finite; every rank must call this function.

    `computed` has pairs of a micro-batch and its loss. If the losses of all ranks are
    finite but the gradient is not, all micro-batches are suspects. Returns a text such as
    `(rank 1, tasks retail/t3, retail/t7; rank 2, ...); the batches are in FOLDER`.
    """
    suspects = [(batch, loss) for batch, loss in computed if not math.isfinite(loss)]
    if not ranks.max(len(suspects)):
        suspects = list(computed)
    if folder is not None and suspects:
        _save(folder, ranks, suspects)
    mine = sorted({task for batch, _ in suspects for task in batch.tasks})
    parts = []
    for rank, tasks in enumerate(ranks.all_gather_objects(mine, "batches that are not finite")):
        more = f" and {len(tasks) - TASKS_NAMED} more" if len(tasks) > TASKS_NAMED else ""
        if tasks:
            parts.append(f"rank {rank}, tasks {', '.join(tasks[:TASKS_NAMED])}{more}")
    where = "" if folder is None else f"; the batches are in {folder}"
    return f"({printable('; '.join(parts))}){where}"


def _save(folder: Path, ranks: Ranks, suspects: Sequence[tuple[MicroBatch, float]]) -> None:
    step = ranks.current.step or 0
    content = io.BytesIO()
    path = folder / f"step-{step:06d}.rank-{ranks.rank}.pt"
    batches = [
        {
            **vars(batch.to(torch.device("cpu"))),
            "tree": batch.tree and asdict(batch.tree),
            "loss": loss,
        }
        for batch, loss in suspects
    ]
    torch.save({"step": step, "rank": ranks.rank, "micro_batches": batches}, content)
    try:
        folder.mkdir(exist_ok=True)
        path.write_bytes(content.getvalue())
    except OSError as error:
        say(f"warning: {path} could not be written ({error})")
