"""Every collective of the project. Elsewhere the code reads as one process.

Objects, barriers and small numbers travel over a control group on gloo, never NCCL: its deadlines
are real and it takes no GPU memory. With one rank every call is local.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Item = TypeVar("Item")


class Ranks:
    """The ranks of a run, and what they say to each other. `seconds` counts the time spent in
    here.
    """

    def __init__(self, rank: int, num_ranks: int, timeout_s: float) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._timeout = timedelta(seconds=timeout_s)
        self._group = (
            dist.new_group(backend="gloo", timeout=self._timeout) if num_ranks > 1 else None
        )
        self.seconds = 0.0
        self.phase = "start"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self, name: str) -> None:
        """Wait for all ranks. Raises RuntimeError naming the missing rank when the deadline
        passes.
        """
        if self._group is None:
            return
        with self._clock():
            try:
                dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)
            except RuntimeError as error:
                raise RuntimeError(
                    f"barrier {name!r} (phase {self.phase!r}, rank {self.rank}): {error}"
                ) from error

    def all_gather_objects(self, item: Item, name: str) -> list[Item]:
        """Every rank's item, in order of ranks, on every rank; behind a barrier that names a
        missing rank.
        """
        if self._group is None:
            return [item]
        self.barrier(name)
        with self._clock():
            gathered: list[Any] = [None] * self.num_ranks
            dist.all_gather_object(gathered, item, group=self._group)
        return gathered

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Sums over the ranks, element by element, in float64."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def max(self, number: float) -> float:
        """The largest over the ranks."""
        return self._reduce([number], dist.ReduceOp.MAX)[0]

    def _reduce(self, numbers: Sequence[float], operation: Any) -> list[float]:
        if self._group is None:
            return list(numbers)
        with self._clock():
            tensor = torch.tensor(numbers, dtype=torch.float64)
            dist.all_reduce(tensor, op=operation, group=self._group)
        values: list[float] = tensor.tolist()
        return values

    def check_same_parameters(self, model: torch.nn.Module, when: str) -> str:
        """The SHA-256 of the parameters. Raises RuntimeError naming the ranks whose parameters
        differ from rank 0's.
        """
        digest = parameter_hash(model)
        digests = self.all_gather_objects(digest, f"parameters {when}")
        different = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if different:
            raise RuntimeError(
                f"parameters {when}: ranks {different} differ from rank 0; the run stops here"
            )
        return digest

    @contextmanager
    def _clock(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


def parameter_hash(model: torch.nn.Module) -> str:
    """SHA-256 over names and bytes of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
