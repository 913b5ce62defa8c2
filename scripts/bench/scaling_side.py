"""Ranks of our trainer as sides of `scaling.py`: connected, or apart, each with a rank's work."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch
from zlib import crc32

import common  # noqa: F401  # puts the repository on the path
import torch
from common import ready, seconds_of
from our_side import Scripted, counts, scripts_of
from turns import Gate, Work, without_users

from pipeline import session, train
from pipeline.collect import save_trajectories
from pipeline.config.cli import parse
from pipeline.data.tasks import shard_tasks
from pipeline.distributed import gradients as distributed
from pipeline.distributed.watchdog import Watchdog
from pipeline.grpo import dynamic_sampling
from pipeline.grpo.micro_batches import packed

LARGE = ("gradients", "messages")  # kinds of what ranks give each other


@dataclass(frozen=True, kw_only=True)
class Share(Work):
    """What a process does. Its kind is steps, or transfers (of what ranks hand each other)."""

    rank: int = 0  # of a run apart: the rank whose work it does,
    of: int = 1  # among so many
    block: int = 1  # steps of a unit
    stage_steps: int = 1  # of the stage whose records are gathered
    tries: int = 15  # of a transfer


class Exchange:
    """The exchange of gradients: bytes, and seconds that this rank stood still for it.

    They begin where the last bucket is ready, which ends the backward pass, and end where the sums
    have come; waiting for a rank that is still busy is among them.
    """

    def __init__(self, device: str) -> None:
        self._device, self._add_up = device, distributed._add_up
        self._times: list[tuple[Any, Any]] = []
        self.bytes = 0

    def __call__(self, bucket: Any) -> Any:
        buffer, begun = bucket.buffer(), self._now()
        self.bytes += buffer.numel() * buffer.element_size()
        future = self._add_up(bucket)
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
    accelerator, ranks = session.connect(config)
    run = session.start(config, accelerator, ranks, Watchdog(ranks, config.run.timeout))
    if work.forced:
        run.parts = without_users(run.parts)
        Scripted(run.rollout.sampler, scripts_of(run, run.config.grpo.max_steps))
    if run.ranks.num_ranks > 1:
        {"steps": steps, "transfers": transfers}[work.kind](run, work, gate)
        return

    def share(count: int, *_: int) -> range:
        return shard_tasks(count, work.rank, work.of)

    with patch.object(dynamic_sampling, "shard_tasks", share):
        steps(run, work, gate)


def take_place(work: Share) -> None:
    """Keep to the cores or the GPU of the rank, whether it is connected or not."""
    if work.device == "cuda":
        if "RANK" not in os.environ:
            torch.cuda.set_device(work.rank)
        return
    rank, threads = int(os.environ.get("RANK", work.rank)), int(os.environ["OMP_NUM_THREADS"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(rank * threads + i) % len(cores)] for i in range(threads)})


def steps(run: session.Run, work: Share, gate: Gate) -> None:
    """The whole loop, let on at every `block`-th step's end."""
    exchange, write = Exchange(work.device), run.log.timings
    sampled_s, seen = [0.0], 0  # at the end of each step of the block, and before it
    before: dict[str, float] = {}

    def counters() -> dict[str, float]:
        given = run.ranks.bytes
        return {
            "wait_s": run.ranks.seconds["wait"],
            "exchange_s": exchange.seconds(),
            "exchange_bytes": exchange.bytes,
            "control_bytes": sum(n for kind, n in given.items() if kind not in LARGE),
            "moved_bytes": given["messages"],
        }

    def arrive(record: Mapping[str, Any]) -> None:
        nonlocal sampled_s, seen, before
        write(record)
        sampled_s.append(run.ranks.seconds["sample"])
        if len(sampled_s) <= work.block:
            return
        now = counters()
        records = run.records[seen:]
        # A sum that is the same on as many ranks as you like only if all play the same episodes.
        played = sum(crc32(f"{r.domain} {r.task_id} {r.trial}".encode()) for r in records)
        spent = {f"sample_{i}_s": b - a for i, (a, b) in enumerate(pairwise(sampled_s))}
        gate(
            {
                **counts(records),
                "played": played,
                **spent,
                **{name: now[name] - before[name] for name in now},
            }
        )
        before, seen, sampled_s = now, len(run.records), sampled_s[-1:]

    before = counters()
    with patch.object(distributed, "_add_up", exchange), patch.object(run.log, "timings", arrive):
        train.train(run)


def transfers(run: session.Run, work: Share, gate: Gate) -> None:
    """Milliseconds and bytes of this rank for what crosses ranks, or would, once each."""
    trajectories = dynamic_sampling.play_step(run, run.parts.stages[0], 0).trajectories
    # Copied step by step: pickle writes a text that records share only once.
    step = pickle.dumps([trajectory.record() for trajectory in trajectories])
    records = [record for _ in range(work.stage_steps) for record in pickle.loads(step)]
    parameters = [p for p in run.model.parameters() if p.requires_grad]
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

    facts = {
        "gradient_ms": ms_of(lambda: distributed.sum_over_ranks(gradient)),
        "gradient_bytes": gradient.numel() * gradient.element_size(),
        "numbers_ms": ms_of(lambda: run.ranks.sum(numbers)),
        "numbers_bytes": len(numbers) * 8,
        "moved_ms": ms_of(lambda: run.ranks.exchange(messages)),
        "moved_bytes": sum(map(len, messages)),
        "records_ms": ms_of(lambda: run.ranks.all_gather_objects(records, "records")),
        "records_bytes": len(pickle.dumps(records)),
        "objects_ms": ms_of(lambda: run.ranks.all_gather_objects(trajectories, "trajectories")),
        "objects_bytes": len(pickle.dumps(trajectories)),
        "disk_ms": ms_of(lambda: save_trajectories(run, "measured", trajectories)),
    }
    written = (run.folder / "trajectories" / "measured").glob(f"*rank-{run.ranks.rank}.*")
    gate({**facts, "disk_bytes": sum(path.stat().st_size for path in written)})


if __name__ == "__main__":
    asked = Share(**json.loads(sys.argv[1]))
    main(asked, Gate(asked.device))
