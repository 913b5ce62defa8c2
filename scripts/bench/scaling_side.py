"""Our trainer for `scaling.py`: connected ranks, or separate processes with one rank's work."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any
from zlib import crc32

import common  # noqa: F401  # adds the repository to sys.path
import torch
from common import ready, seconds_of
from our_side import Scripted, collect, counts, scripts_of
from turns import Gate, Work, without_users

from pipeline.checkpoints.transcripts import save_transcripts
from pipeline.config.cli import parse
from pipeline.distributed import ranks as collectives
from pipeline.distributed.watchdog import Watchdog
from pipeline.grpo.micro_batches import packed
from pipeline.train import Training, connect

ADD_UP = collectives.add_up
LARGE = ("gradients", "messages")  # large transfers


@dataclass(frozen=True, kw_only=True)
class Share(Work):
    """The work of a process. `kind` is steps or transfers (between ranks)."""

    rank: int = 0  # separate run: the rank whose work the process does
    of: int = 1  # separate run: the number of ranks
    block: int = 1  # steps per unit
    stage_steps: int = 1  # steps of the stage whose records are gathered
    tries: int = 15  # repetitions of a transfer


class Exchange:
    """Measures the all-reduce of gradients: its bytes, and the seconds that this rank waits.

    The wait begins when the last bucket is ready, at the end of the backward pass, and ends when
    the sums have arrived. The wait for a slower rank is included.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._times: list[tuple[Any, Any]] = []
        self.bytes = 0

    def __call__(self, state: Any, bucket: Any) -> Any:
        buffer, begun = bucket.buffer(), self._now()
        self.bytes += buffer.numel() * buffer.element_size()
        future = ADD_UP(state, bucket)
        if not bucket.is_last():
            return future

        def end(done: Any) -> Any:
            self._times.append((begun, self._now()))
            return done.value()

        return future.then(end)

    def _now(self) -> Any:
        if self._device == "cpu":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> float:
        if self._device == "cpu":
            return float(sum(end - begun for begun, end in self._times))
        ready(self._device)
        return float(sum(begun.elapsed_time(end) for begun, end in self._times)) / 1e3


def main(work: Share, gate: Gate) -> None:
    take_place(work)
    config = parse(work.flags)
    accelerator, ranks = connect(config)
    if ranks.num_ranks == 1:  # A separate run samples one rank's share of a step.
        ranks.shard = lambda count: range(work.rank, count, work.of)  # type: ignore[method-assign]
    run = Measured(config, accelerator, ranks, Watchdog(ranks, config.run.timeout))
    if work.forced:
        run.parts = without_users(run.parts)
        Scripted(run.learner.sampling.sampler, scripts_of(run, run.config.grpo.max_steps))
    if work.kind == "transfers":
        transfers(run, work, gate)
    else:
        run.work, run.gate = work, gate
        run.train()


def take_place(work: Share) -> None:
    """Restrict this process to the cores or the GPU of its rank."""
    if work.device == "cuda":
        if "RANK" not in os.environ:
            torch.cuda.set_device(work.rank)
        return
    rank, threads = int(os.environ.get("RANK", work.rank)), int(os.environ["OMP_NUM_THREADS"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(rank * threads + i) % len(cores)] for i in range(threads)})


class Measured(Training):
    """The training loop, which waits after each block of steps."""

    work: Share
    gate: Gate

    def begin_grpo(self) -> Any:
        self.exchange = Exchange(self.work.device)
        collectives.add_up = self.exchange  # which the updater gives to DDP
        meter = super().begin_grpo()
        self.sampled_s = [0.0]  # cumulative seconds before and after each step of the block
        self.seen, self.before = 0, self.counters()
        return meter

    def counters(self) -> dict[str, float]:
        given = self.ranks.bytes
        return {
            "wait_s": self.ranks.seconds["wait"],
            "exchange_s": self.exchange.seconds(),
            "exchange_bytes": self.exchange.bytes,
            "control_bytes": sum(n for kind, n in given.items() if kind not in LARGE),
            "moved_bytes": given["messages"],
        }

    def record(self, stage: Any, batch: Any, statistics: Any, meter: Any) -> Any:
        metrics = super().record(stage, batch, statistics, meter)
        self.sampled_s.append(self.ranks.seconds["sample"])
        if len(self.sampled_s) <= self.work.block:
            return metrics
        now, before = self.counters(), self.before
        records = self.records[self.seen :]
        # This sum is equal for all numbers of ranks only if all runs sample the same episodes.
        played = sum(crc32(f"{r.domain} {r.task_id} {r.trial}".encode()) for r in records)
        spent = {f"sample_{i}_s": b - a for i, (a, b) in enumerate(pairwise(self.sampled_s))}
        self.gate(
            {
                **counts(records),
                "played": played,
                **spent,
                **{name: now[name] - before[name] for name in now},
            }
        )
        self.before, self.seen, self.sampled_s = now, len(self.records), self.sampled_s[-1:]
        return metrics


def transfers(run: Training, work: Share, gate: Gate) -> None:
    """Measure each transfer between ranks once: milliseconds and bytes of this rank."""
    trajectories = collect(run, 0).trajectories
    # Each step is copied, because pickle writes a shared text only once.
    step = pickle.dumps([trajectory.record() for trajectory in trajectories])
    records = [record for _ in range(work.stage_steps) for record in pickle.loads(step)]
    parameters = [p for p in run.learner.model.parameters() if p.requires_grad]
    gradient = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
    numbers = [0.0] * 16
    group = packed([(t, 0.0, 0.0) for t in trajectories[: run.config.rollout.num_generations]])
    messages = [group if rank != run.ranks.rank else b"" for rank in range(run.ranks.num_ranks)]

    def ms_of(transfer: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(work.tries):
            run.ranks.barrier("transfer")
            seconds.append(seconds_of(transfer, work.device))
        return median(seconds) * 1e3

    folder = run.folder / "trajectories" / "measured"
    facts = {
        "gradient_ms": ms_of(lambda: collectives.sum_over_ranks(gradient)),
        "gradient_bytes": gradient.numel() * gradient.element_size(),
        "numbers_ms": ms_of(lambda: run.ranks.sum(numbers)),
        "numbers_bytes": len(numbers) * 8,
        "moved_ms": ms_of(lambda: run.ranks.exchange(messages)),
        "moved_bytes": sum(map(len, messages)),
        "records_ms": ms_of(lambda: run.ranks.all_gather_objects(records, "records")),
        "records_bytes": len(pickle.dumps(records)),
        "objects_ms": ms_of(lambda: run.ranks.all_gather_objects(trajectories, "trajectories")),
        "objects_bytes": len(pickle.dumps(trajectories)),
        "disk_ms": ms_of(lambda: save_transcripts(folder, 0, run.ranks.rank, trajectories)),
    }
    written = folder.glob(f"*rank-{run.ranks.rank}.*")
    gate({**facts, "disk_bytes": sum(path.stat().st_size for path in written)})


if __name__ == "__main__":
    asked = Share(**json.loads(sys.argv[1]))
    main(asked, Gate(asked.device))
