"""Faults of an update that are data: too little memory, a loss or gradient that is not finite."""

from __future__ import annotations

import gc
import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.distributed.ranks import Ranks
from pipeline.grpo.micro_batches import MicroBatch
from pipeline.rollout.trajectory import Trajectory

NO_MEMORY = (  # in the text of an error that has no type of its own
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
TASKS_NAMED = 5  # in one line


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was asked for that there is none of, on GPU or CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)


def smaller_budget(budget: int, batches: Sequence[MicroBatch], failed: int, rank: int) -> int:
    """The token budget, halved until the largest of a rank's micro-batches exceeds it.

    The one at `failed` did not fit into memory. Raises RuntimeError where it is a single episode,
    and none that could be cut is larger.
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
    print(
        f"warning: out of memory in a micro-batch of {num_tokens} tokens on rank {rank}; "
        f"going on with max_tokens_per_microbatch {budget}",
        flush=True,
    )
    return budget


def give_memory_back(device: torch.device) -> None:
    """Free what only reference cycles and the allocator's cache still hold."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True)
class Suspects:
    """What is at fault for an update that is not finite: tasks by rank, and where batches lie."""

    tasks: dict[int, list[str]]
    folder: Path | None

    def __str__(self) -> str:
        """`rank 1, tasks retail/t3, retail/t7; rank 2, tasks ... and 9 more`."""
        parts = []
        for rank, names in self.tasks.items():
            more = len(names) - TASKS_NAMED
            listed = ", ".join(names[:TASKS_NAMED]) + (f" and {more} more" if more > 0 else "")
            parts.append(f"rank {rank}, tasks {listed}")
        return "; ".join(parts)

    @property
    def where(self) -> str:
        return "" if self.folder is None else f"; the batches are in {self.folder}"


def find_suspects(
    ranks: Ranks,
    trajectories: Iterable[Trajectory],
    batches: Sequence[MicroBatch],
    losses: Sequence[float],
    folder: Path | None,
) -> Suspects:
    """Find and save the micro-batches whose loss is not finite; every rank must call it.

    Where there is none, on any rank, the gradient alone is at fault, and all are suspects. Each
    rank writes `step-000012.rank-1.pt`, which `torch.load(weights_only=True)` reads.
    `trajectories` are those that this rank has played; it may have computed others.
    """
    mine = [number for number, loss in enumerate(losses) if not np.isfinite(loss)]
    names = {_digest_of(t): f"{t.domain}/{t.task_id}" for t in trajectories}
    digests = [_digests(batch) for batch in batches]
    shared = ranks.all_gather_objects((names, mine, digests), "batches that are not finite")
    names = {digest: name for known, _, _ in shared for digest, name in known.items()}
    everyone = not any(numbers for _, numbers, _ in shared)
    tasks = {
        rank: sorted({names[d] for n in (range(len(rows)) if everyone else bad) for d in rows[n]})
        for rank, (_, bad, rows) in enumerate(shared)
    }
    chosen = range(len(batches)) if everyone else mine
    if folder is not None and chosen:
        saved = [
            {
                **_plain(batches[number]),
                "tasks": [names[digest] for digest in digests[number]],
                "loss": losses[number],
            }
            for number in chosen
        ]
        _save(folder, ranks, saved)
    return Suspects(tasks={rank: found for rank, found in tasks.items() if found}, folder=folder)


def _save(folder: Path, ranks: Ranks, batches: list[dict[str, Any]]) -> None:
    """Write a rank's suspects; a disk that is full must not stop the run as well."""
    step = ranks.current.step or 0
    content, path = io.BytesIO(), folder / f"step-{step:06d}.rank-{ranks.rank}.pt"
    torch.save({"step": step, "rank": ranks.rank, "micro_batches": batches}, content)
    try:
        folder.mkdir(exist_ok=True)  # without the run's folder, which may be gone
        path.write_bytes(content.getvalue())
    except OSError as error:
        print(f"warning: {path} could not be written ({error})", flush=True)


def _plain(batch: MicroBatch) -> dict[str, Any]:
    """A micro-batch's fields in types that `weights_only` lets through."""
    tree = None if batch.tree is None else asdict(batch.tree)
    return {**vars(batch), "tree": tree}


def _digests(batch: MicroBatch) -> list[bytes]:
    """For each sequence of a micro-batch what names its episode."""
    found = []
    for number, length in enumerate(batch.lengths.tolist()):
        where = batch.sequences == number
        found.append(_digest(length, batch.targets[where], batch.old_logprobs[where]))
    return found


def _digest_of(trajectory: Trajectory) -> bytes:
    sampled = [i for i, mask in enumerate(trajectory.loss_mask) if mask]
    targets = torch.tensor([trajectory.completion_ids[i] for i in sampled], dtype=torch.int64)
    logprobs = torch.tensor([trajectory.logprobs[i] for i in sampled], dtype=torch.float32)
    return _digest(trajectory.num_tokens, targets, logprobs)


def _digest(length: int, targets: torch.Tensor, logprobs: torch.Tensor) -> bytes:
    digest = hashlib.sha256(str(length).encode())
    for tensor in (targets, logprobs):
        digest.update(tensor.numpy().tobytes())
    return digest.digest()
