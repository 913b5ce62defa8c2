"""Every collective of the project; elsewhere the code reads as one process.

Objects, barriers and small numbers travel over a control group on gloo, never NCCL: its deadlines
are real and it takes no GPU memory. With one rank every call is local.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import record_function

Item = TypeVar("Item")
FOREVER = timedelta(days=30)


class Interrupted(BaseException):
    """The run was told to stop; raised on every rank, at the same place."""


class CollectiveError(RuntimeError):
    """A collective failed or its deadline passed, so another rank is gone, late or elsewhere."""


@dataclass(frozen=True)
class Phase:
    """What a rank is doing: `sample`, `update`, `evaluate`, ..., and in which stage and step."""

    name: str
    stage: str = ""
    step: int | None = None

    def __str__(self) -> str:
        step = "" if self.step is None else f" step {self.step}"
        return f"{self.name} {self.stage}{step}".strip()


def meet_again(timeout_s: float, device_type: str) -> None:
    """Meet the other ranks where a launcher has started all of them anew (`--max_restarts`).

    With static rendezvous, Accelerate's default, the launcher keeps one store over all restarts
    (torch 2.13), in which the ranks would find the addresses of ranks that are gone. So each
    attempt gets its own prefix. Accelerate takes the process group that it finds.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    address, timeout = os.environ["MASTER_ADDR"], timedelta(seconds=timeout_s)
    store = dist.TCPStore(address, int(os.environ["MASTER_PORT"]), timeout=timeout)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=dist.PrefixStore(f"attempt {attempt}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
    )


class Ranks:
    """The ranks of a run, and the collectives between them.

    The watchdog reads plain attributes: the phase, the current task, the time of the last sign of
    progress, and the collective for which this rank waits.
    """

    def __init__(self, rank: int, num_ranks: int, timeout_s: float) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        if num_ranks > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
            # PyTorch has no public name for the store at which its ranks met.
            self._store: Any = dist.distributed_c10d._get_default_store()
        self.num_agreements = 0
        self.stop_wanted = False  # set from outside: the next agreement is to stop
        self.task, self.waits_for, self.progress_at = "", "", time.monotonic()
        self.seconds: dict[str, float] = defaultdict(float)  # by phase; `wait`: in collectives
        self.bytes: dict[str, int] = defaultdict(int)  # that this rank gave to others, by kind
        self.current = Phase("start")
        self.on_phase: Callable[[], None] = lambda: None  # called when a phase begins

    def leave_deadlines_to_watchdog(self) -> None:
        """Let collectives wait without a deadline, because a watchdog ends ranks that wait in vain.

        A collective's own deadline goes by the clock: a run that was suspended (SIGSTOP, a
        scheduler) for longer would fail in the first collective after it.
        """
        self._timeout = FOREVER
        if self._group is not None:
            for group in (self._group, None):  # None is the group of Accelerate
                dist.distributed_c10d._set_pg_timeout(FOREVER, group)  # no public name (torch 2.13)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def shard(self, count: int) -> range:
        """Which of `count` groups this rank plays: every num_ranks-th one.

        So the domains of a step, listed one after another, spread over the ranks.
        """
        return range(self.rank, count, self.num_ranks)

    def alive(self) -> None:
        """Note a sign of progress."""
        self.progress_at = time.monotonic()

    def progress(self, task: str = "") -> None:
        """Note a sign of progress and the current task, in work that ends with an `agree`.

        Between tasks it raises Interrupted where the run is to stop; so will that `agree` on the
        other ranks.
        """
        self.task = task
        self.alive()
        if self.stop_wanted and not task:
            self.agree("stop")

    def agree(self, name: str) -> None:
        """Wait for all ranks; raises Interrupted on all of them where one was told to stop.

        It uses the store, where a rank can tell the others to stop before they have come.
        """
        self.num_agreements += 1
        self.alive()
        if self._group is None:
            is_stop = self.stop_wanted
        else:
            with self._waiting_clock(name):
                is_stop = self._agreed() == b"stop"
        if is_stop:
            raise Interrupted

    def _agreed(self) -> bytes:
        key, old = self.agreement, f"agreement {self.num_agreements - 2}"
        if self.stop_wanted:
            return bytes(self._store.compare_set(key, "", "stop"))
        if self._store.add(f"{key}, ranks", 1) == self.num_ranks:
            for used in (old, f"{old}, ranks"):  # every rank has read it
                self._store.delete_key(used)
            return bytes(self._store.compare_set(key, "", "go"))
        self._store.wait([key], self._timeout)
        if (answer := bytes(self._store.get(key))) == b"fault":
            raise RuntimeError("a fault was noted")
        return answer

    @property
    def agreement(self) -> str:
        """The key of the ranks' current agreement at the store: `go`, `stop` or `fault`."""
        return f"agreement {self.num_agreements}"

    def barrier(self, name: str) -> None:
        """Wait for all ranks; raises CollectiveError when the deadline passes."""
        if self._group is not None:
            with self._waiting_clock(name):
                dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)

    def all_gather_objects(self, item: Item, name: str) -> list[Item]:
        """Every rank's item, in order of ranks, on every rank."""
        if self._group is None:
            return [item]
        self.bytes["objects"] += len(pickle.dumps(item))
        gathered: list[Any] = [None] * self.num_ranks
        with self._waiting_clock(name):
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
        tensor = torch.tensor(numbers, dtype=torch.float64)
        self.bytes["numbers"] += tensor.nbytes
        with self._waiting_clock():
            dist.all_reduce(tensor, op=operation, group=self._group)
        values: list[float] = tensor.tolist()
        return values

    def all_gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor (on CPU, of the same shape), in order of ranks, on every rank."""
        if self._group is None:
            return [tensor]
        self.bytes["tensors"] += tensor.nbytes
        gathered = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        with self._waiting_clock():
            dist.all_gather(gathered, tensor, group=self._group)
        return gathered

    def all_gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers (float64, of any count), in order of ranks, on every rank."""
        counts = self.all_gather_tensors(torch.tensor([len(values)]))
        padded = torch.zeros(max(1, *map(int, counts)), dtype=torch.float64)
        padded[: len(values)] = torch.tensor(values, dtype=torch.float64)
        gathered = self.all_gather_tensors(padded)
        return [row[:count].tolist() for row, count in zip(gathered, counts, strict=True)]

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        """Send each rank its message, in order of ranks; returns the messages to this rank."""
        if self._group is None:
            return list(messages)
        sizes = [len(message) for message in messages]
        arriving = [int(row[self.rank]) for row in self.all_gather_tensors(torch.tensor(sizes))]
        self.bytes["messages"] += sum(sizes)
        sent = torch.frombuffer(bytearray(b"".join(messages) or b"0"), dtype=torch.uint8)
        received = torch.empty(sum(arriving), dtype=torch.uint8)
        with self._waiting_clock():
            dist.all_to_all_single(received, sent[: sum(sizes)], arriving, sizes, self._group)
        return [part.numpy().tobytes() for part in received.split(arriving)]

    def check_same_parameters(
        self, parameters: Iterable[tuple[str, torch.Tensor]], when: str
    ) -> str:
        """The SHA-256 of named parameters, if all ranks have the same.

        Raises RuntimeError naming the ranks whose parameters differ from rank 0's.
        """
        digest = parameter_hash(parameters)
        digests = self.all_gather_objects(digest, f"parameters {when}")
        different = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if different:
            raise RuntimeError(
                f"parameters {when}: ranks {different} differ from rank 0; the run stops here"
            )
        return digest

    @contextmanager
    def phase(self, name: str, stage: str = "", step: int | None = None) -> Iterator[None]:
        """Around a part of the loop: names it in errors and adds up its seconds, without waits."""
        outer, self.current = self.current, Phase(name, stage, step)
        self.task = ""
        self.alive()
        self.on_phase()
        waited = self.seconds["wait"]
        with self._clock(name):
            yield
        self.seconds[name] -= self.seconds["wait"] - waited
        # After an error the inner phase is the one to name; between phases, the last one is.
        inside = outer.name != "start" and not outer.name.startswith("after ")
        self.current = outer if inside else Phase(f"after {name}", stage, step)

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Around a wait for other ranks; its failures are raised as CollectiveError."""
        self.waits_for = name
        self.alive()
        try:
            yield
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise CollectiveError(f"{name}: {error}") from error
        self.waits_for = ""
        self.alive()

    @contextmanager
    def _waiting_clock(self, name: str = "wait") -> Iterator[None]:
        with self._clock("wait"), self.waiting(name):
            yield

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with record_function(name):  # a range in the traces of --profile
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start


def parameter_hash(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over the names and bytes of parameters."""
    digest = hashlib.sha256()
    for name, parameter in parameters:
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
