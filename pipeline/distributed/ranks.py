"""The collectives of a run: `Ranks`, sums of gradients, and optimizer state shared out over ranks.

The collectives of `Ranks` use gloo instead of NCCL, because gloo obeys timeouts and takes no GPU
memory. With one rank, no collective communicates.
"""

import hashlib
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils.weak import WeakIdKeyDictionary

from pipeline.distributed.rendezvous import store_of_ranks

Item = TypeVar("Item")
FOREVER = timedelta(days=30)
FRAME = 4096  # bytes of each rank in an exchange of small objects
HEAD = 8  # of them, for the size of the object


class Interrupted(BaseException):
    """Raised by every rank, at the same point of the run, after a signal asked the run to stop."""


class CollectiveError(RuntimeError):
    """A failed collective: another rank has ended, is late, or waits in another collective."""


class Phase(NamedTuple):
    """The current work of a rank, such as `sample` or `update`, with the work's stage and step."""

    name: str
    stage: str = ""
    step: int | None = None

    def __str__(self) -> str:
        step = "" if self.step is None else f" step {self.step}"
        return f"{self.name} {self.stage}{step}".strip()


class Ranks:
    def __init__(self, rank: int, num_ranks: int, timeout_s: float) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.is_main = rank == 0
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        if num_ranks > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
            self._store = self.connect_to_store()
        self._num_agreements = 0
        self.agreement = "agreement 0"  # `agreement` is a key of the store
        self.stop_wanted = False  # set by the watchdog; the next `agree` then stops all ranks
        self.task = ""
        self.waits_for = ""
        self.progress_at = time.monotonic()
        self.seconds: dict[str, float] = defaultdict(float)  # phase, or `wait` -> seconds
        self.bytes: dict[str, int] = defaultdict(int)  # bytes that this rank sent, by kind of data
        self.current = Phase("start")
        self._hash = partial(parameter_hash, known=WeakIdKeyDictionary())
        self.on_phase: Callable[[], None] = lambda: None  # called when a phase begins

    def remove_timeouts(self) -> None:
        """Remove the timeouts of process groups: a rank may wait for one that works for long."""
        self._timeout = FOREVER
        if self._group is not None:
            groups: list[Any] = [self._group, dist.group.WORLD]
            for group in groups:
                group.set_timeout(FOREVER)

    def shard(self, count: int) -> range:
        """Return the indices of this rank's share of `count` items."""
        return range(self.rank, count, self.num_ranks)

    def alive(self) -> None:
        """Tell the watchdog that this rank makes progress."""
        self.progress_at = time.monotonic()

    def progress(self, task: str = "") -> None:
        """Record progress on `task`; with an empty `task`, raise Interrupted if a signal has come.

        The other ranks raise Interrupted in `agree`, so every rank must call `agree` later.
        """
        self.task = task
        self.alive()
        if self.stop_wanted and not task:
            self.agree("stop")

    def agree(self, name: str) -> None:
        """Wait for all ranks; raises Interrupted on every rank if any rank got a stop signal."""
        self._num_agreements += 1
        self.agreement = f"agreement {self._num_agreements}"
        self.alive()
        if self._group is None:
            answer = b"stop" if self.stop_wanted else b"go"
        else:
            with self._clock("wait"), self.waiting(name):
                answer = self._agreed()
        if answer == b"stop":
            raise Interrupted

    def _agreed(self) -> bytes:
        key = self.agreement
        old = f"agreement {self._num_agreements - 2}"
        if self.stop_wanted:
            return bytes(self._store.compare_set(key, "", "stop"))
        if self._store.add(f"{key}, ranks", 1) == self.num_ranks:
            for used in (old, f"{old}, ranks"):  # no rank will read the old keys again
                self._store.delete_key(used)
            return bytes(self._store.compare_set(key, "", "go"))
        self._store.wait([key], self._timeout)
        if (answer := bytes(self._store.get(key))) == b"fault":
            raise RuntimeError("the watchdog found a fault")
        return answer

    def connect_to_store(self) -> Any:
        """Return another connection to the key-value store, for use while a collective hangs."""
        return dist.HashStore() if self._group is None else store_of_ranks(self._timeout)

    def is_first(self, name: str) -> bool:
        """Return True on the first rank that asks for `name`, without waiting for other ranks."""
        return self._group is None or bool(self._store.add(f"first, {name}", 1) == 1)

    def barrier(self, name: str) -> None:
        """Wait for all ranks; raises CollectiveError after the timeout."""
        if self._group is not None:
            with self._clock("wait"), self.waiting(name):
                dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)

    def all_gather_objects(self, item: Item, name: str) -> list[Item]:
        """Return the items of all ranks, in order of ranks, on every rank."""
        if self._group is None:
            return [item]
        packed = pickle.dumps(item)
        self.bytes["objects"] += max(FRAME, len(packed))
        frame = torch.zeros(FRAME, dtype=torch.uint8)
        start = (len(packed).to_bytes(HEAD) + packed)[:FRAME]
        frame[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        gathered: list[Any] = [None] * self.num_ranks
        with self._clock("wait"), self.waiting(name):
            frames = [one.numpy().tobytes() for one in self._to_all(frame)]
            sizes = [int.from_bytes(one[:HEAD]) for one in frames]
            if max(sizes) > FRAME - HEAD:  # two more collectives, which take longer
                dist.all_gather_object(gathered, item, group=self._group)
                return gathered
        return [pickle.loads(one[HEAD:]) for one in frames]

    def _to_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Do what `all_gather` does, which takes gloo longer for a small tensor."""
        rows = tensor.expand(self.num_ranks, *tensor.shape).contiguous()
        gathered = torch.empty_like(rows)
        dist.all_to_all_single(gathered, rows, group=self._group)
        return [*gathered]

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return the element-wise sum of all ranks' `numbers`, added in the order of ranks."""
        return [sum(column) for column in zip(*self.all_gather_numbers(numbers), strict=True)]

    def max(self, number: float) -> float:
        return max(numbers[0] for numbers in self.all_gather_numbers([number]))

    def all_gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the CPU tensors of all ranks, in order of ranks; the shapes must be equal."""
        if self._group is None:
            return [tensor]
        self.bytes["tensors"] += tensor.nbytes
        gathered = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        with self._clock("wait"), self.waiting("wait"):
            if tensor.nbytes <= FRAME:
                return self._to_all(tensor)
            dist.all_gather(gathered, tensor, group=self._group)
        return gathered

    def copy_of_main(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's CPU tensor into the tensors of the other ranks, which have its shape."""
        if self._group is None:
            return
        self.bytes["tensors"] += tensor.nbytes if self.is_main else 0
        with self._clock("wait"), self.waiting("wait"):
            dist.broadcast(tensor, src=0, group=self._group)

    def all_gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Return the `values` of each rank, in order of ranks; the lengths may differ."""
        return self.all_gather_objects([float(value) for value in values], "wait")

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        """Send `messages[i]` to rank i (all-to-all); returns the messages that this rank gets."""
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
        """Return the parameters' SHA-256; raises RuntimeError if the ranks' parameters differ."""
        replicated = ((name, p) for name, p in parameters if not hasattr(p, "full_tensor"))
        digests = self.all_gather_objects(self._hash(replicated), f"parameters {when}")
        if different := [rank for rank, other in enumerate(digests) if other != digests[0]]:
            raise RuntimeError(
                f"parameters {when}: ranks {different} differ from rank 0; the run stops here"
            )
        return digests[0]

    @contextmanager
    def phase(self, name: str, stage: str = "", step: int | None = None) -> Iterator[None]:
        """Mark the context as the phase `name`; `seconds[name]` grows by the time without waits."""
        outer = self.current
        self.current = Phase(name, stage, step)
        self.task = ""
        self.alive()
        self.on_phase()
        waited = self.seconds["wait"]
        with self._clock(name):
            yield
        self.seconds[name] -= self.seconds["wait"] - waited
        # After an exception, `current` stays the phase that failed.
        inside = outer.name != "start" and not outer.name.startswith("after ")
        self.current = outer if inside else Phase(f"after {name}", stage, step)

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Mark a wait for other ranks; a RuntimeError in the context becomes a CollectiveError."""
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
            with record_function(name):  # a named range in the traces of --profile
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start


def parameter_hash(
    parameters: Iterable[tuple[str, torch.Tensor]],
    known: MutableMapping[torch.Tensor, tuple[int, bytes]] | None = None,
) -> str:
    """Return a SHA-256 of names and values; `known` keeps the digests of a model's frozen weights.

    Trained weights are always read, because a fused optimizer does not count its changes.
    """
    digest = hashlib.sha256()
    for name, parameter in parameters:
        is_frozen = isinstance(parameter, nn.Parameter) and not parameter.requires_grad
        version, own = (known or {}).get(parameter, (-1, b"")) if is_frozen else (-1, b"")
        if version != parameter._version:
            values = parameter.detach().cpu().flatten().view(torch.uint8).numpy()
            own = hashlib.sha256(values.data).digest()
            if is_frozen and known is not None:
                known[parameter] = parameter._version, own
        digest.update(name.encode() + own)
    return digest.hexdigest()


class GradientAllReduce(nn.Module):
    """A module whose backward pass adds zeros to all gradients, and so starts DDP's all-reduce.

    The backward passes that compute the gradients run earlier and do not communicate. A rank that
    runs out of memory can therefore repeat its own backward passes without the other ranks.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self) -> torch.Tensor:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return torch.stack([_ZeroGradient.apply(p) for p in trained]).sum()


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, parameter: torch.Tensor) -> torch.Tensor:
        context.like = parameter.detach()
        return parameter.new_zeros(())

    @staticmethod
    def backward(context: Any, *_: torch.Tensor) -> torch.Tensor:
        # An expanded tensor takes almost no memory.
        return context.like.new_zeros(()).expand(context.like.shape)


def sum_gradients(module: Any) -> Any:
    """Make DDP sum gradients over the ranks instead of averaging gradients; returns the module.

    The loss is already divided by the number of tokens of all ranks, so no average is needed.
    """
    if isinstance(module, DistributedDataParallel):
        module.register_comm_hook(None, add_up)
    return module


def add_up(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Start the all-reduce of the gradients in DDP's `bucket`; returns a future of the sums."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    sums: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda d: d.value()[0])
    return sums


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Sum the tensor over the ranks in place, by NCCL on GPU and gloo on CPU."""
    dist.all_reduce(tensor)
    return tensor
