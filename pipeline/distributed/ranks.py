"""Every collective of the project; elsewhere the code reads as one process.

Objects, barriers and small numbers travel over a control group on gloo, never NCCL: its deadlines
are real and it takes no GPU memory. With one rank every call is local.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import record_function

Item = TypeVar("Item")
FOREVER = timedelta(days=30)


class Interrupted(BaseException):
    """The run was told to stop; raised on every rank, at the same place."""


class CollectiveError(RuntimeError):
    """A collective failed or its deadline passed, so another rank is gone, late or elsewhere."""


class Phase(NamedTuple):
    """What a rank is doing: `sample`, `update`, `evaluate`, ..., and in which stage and step."""

    name: str
    stage: str = ""
    step: int | None = None

    def __str__(self) -> str:
        step = "" if self.step is None else f" step {self.step}"
        return f"{self.name} {self.stage}{step}".strip()


def meet_again(timeout_s: float, device_type: str) -> None:
    """Make the process group of ranks that a launcher has restarted (`--max_restarts`).

    With static rendezvous, Accelerate's default, the launcher keeps one store over all restarts
    (torch 2.13), and the store still holds the addresses of the ended ranks. So each attempt gets
    its own prefix. Accelerate uses an existing process group.
    """
    environ, timeout = os.environ, timedelta(seconds=timeout_s)
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    store = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), timeout=timeout)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=dist.PrefixStore(f"attempt {attempt}", store),
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        timeout=timeout,
    )


class Ranks:
    """The ranks of a run, and the collectives between them.

    The watchdog reads plain attributes: the phase, the current task, the time of the last sign of
    progress, and the collective for which this rank waits.
    """

    def __init__(self, rank: int, num_ranks: int, timeout_s: float) -> None:
        self.rank, self.num_ranks, self.is_main = rank, num_ranks, rank == 0
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        if num_ranks > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
            self._store = _store()
        self.num_agreements = 0
        self.stop_wanted = False  # set from outside: the next agreement is to stop
        self.task, self.waits_for, self.progress_at = "", "", time.monotonic()
        self.seconds: dict[str, float] = defaultdict(float)  # by phase; `wait`: in collectives
        self.bytes: dict[str, int] = defaultdict(int)  # that this rank gave to others, by kind
        self.current = Phase("start")
        self.on_phase: Callable[[], None] = lambda: None  # called when a phase begins

    def leave_deadlines_to_watchdog(self) -> None:
        """Remove the deadlines of collectives, because a watchdog ends ranks that wait in vain.

        These deadlines also count the time in which a run is suspended (SIGSTOP, a scheduler).
        """
        self._timeout = FOREVER
        if self._group is not None:
            for group in (self._group, None):  # None is the group of Accelerate
                dist.distributed_c10d._set_pg_timeout(FOREVER, group)  # no public name (torch 2.13)

    def shard(self, count: int) -> range:
        """The indices of this rank's groups: every num_ranks-th one spreads the domains evenly."""
        return range(self.rank, count, self.num_ranks)

    def alive(self) -> None:
        """Note a sign of progress for the watchdog."""
        self.progress_at = time.monotonic()

    def progress(self, task: str = "") -> None:
        """Note a sign of progress and the current task, in work that ends with an `agree`.

        Between tasks it raises Interrupted if the run must stop; on other ranks, `agree` does.
        """
        self.task = task
        self.alive()
        if self.stop_wanted and not task:
            self.agree("stop")

    def agree(self, name: str) -> None:
        """Wait for all ranks; raises Interrupted on all of them if one must stop.

        The store holds the answer, so a rank can stop the others before they arrive here.
        """
        self.num_agreements += 1
        self.alive()
        if self._group is None:
            answer = b"stop" if self.stop_wanted else b"go"
        else:
            with self._clock("wait"), self.waiting(name):
                answer = self._agreed()
        if answer == b"stop":
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
            with self._clock("wait"), self.waiting(name):
                dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)

    def all_gather_objects(self, item: Item, name: str) -> list[Item]:
        """Every rank's item, in order of ranks, on every rank."""
        if self._group is None:
            return [item]
        self.bytes["objects"] += len(pickle.dumps(item))
        gathered: list[Any] = [None] * self.num_ranks
        with self._clock("wait"), self.waiting(name):
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
        with self._clock("wait"), self.waiting("wait"):
            dist.all_reduce(tensor, op=operation, group=self._group)
        values: list[float] = tensor.tolist()
        return values

    def all_gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor (on CPU, of the same shape), in order of ranks, on every rank."""
        if self._group is None:
            return [tensor]
        self.bytes["tensors"] += tensor.nbytes
        gathered = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        with self._clock("wait"), self.waiting("wait"):
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
        with self._clock("wait"), self.waiting("wait"):
            dist.all_to_all_single(received, sent[: sum(sizes)], arriving, sizes, self._group)
        return [part.numpy().tobytes() for part in received.split(arriving)]

    def check_same_parameters(
        self, parameters: Iterable[tuple[str, torch.Tensor]], when: str
    ) -> str:
        """The SHA-256 of named parameters, if all ranks have the same.

        Raises RuntimeError naming the ranks whose parameters differ from rank 0's.
        """
        digests = self.all_gather_objects(parameter_hash(parameters), f"parameters {when}")
        if different := [rank for rank, other in enumerate(digests) if other != digests[0]]:
            why = f"ranks {different} differ from rank 0; the run stops here"
            raise RuntimeError(f"parameters {when}: {why}")
        return digests[0]

    @contextmanager
    def phase(self, name: str, stage: str = "", step: int | None = None) -> Iterator[None]:
        """Around a part of the loop: errors name it, and `seconds` count it, without waits."""
        outer, self.current = self.current, Phase(name, stage, step)
        self.task = ""
        self.alive()
        self.on_phase()
        waited = self.seconds["wait"]
        with self._clock(name):
            yield
        self.seconds[name] -= self.seconds["wait"] - waited
        # After an error, the inner phase stays; between phases, the last phase stays as "after".
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
    def _clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with record_function(name):  # a range in the traces of --profile
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start


class Board:
    """Notes in the store that any rank can read, also if collectives fail or hang.

    A board has its own connection to the store, so no other wait delays it. With one rank the
    notes stay in this process.
    """

    def __init__(self, num_ranks: int) -> None:
        store: Any = _store() if num_ranks > 1 else dist.HashStore()
        self._store = store.clone()

    def post(self, name: str, item: Any) -> None:
        """Post an item of JSON's types; it replaces the last one of this name."""
        self._store.set(f"note {name}", json.dumps(item))

    def post_first(self, name: str, item: Any) -> Any:
        """Post an item unless the name has one already; returns the first."""
        return json.loads(self._store.compare_set(f"note {name}", "", json.dumps(item)))

    def read(self, *names: str) -> list[Any]:
        """The items of these names; nothing while one of them is missing."""
        keys = [f"note {name}" for name in names]
        if not self._store.check(keys):
            return []
        return [json.loads(text) for text in self._store.multi_get(keys)]

    def wake(self, agreement: str) -> None:
        """End this rank's wait for an agreement that will not come about."""
        self._store.compare_set(agreement, "", "fault")


def _store() -> Any:
    """The store at which the ranks met; PyTorch has no public name for it."""
    return dist.distributed_c10d._get_default_store()


def parameter_hash(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over the names and bytes of parameters."""
    digest = hashlib.sha256()
    for name, parameter in parameters:
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
