"""Our trainer for `vs_trl.py` and `scaling.py`: the loop of `pipeline/train.py`, which waits.

For `vs_trl.py` it waits after each step. For `scaling.py` (work of the kind "block") it waits after
each block of steps; a process is one of several connected ranks, or does one rank's work alone.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from common import ready
from turns import Gate, Work, script_of, siblings, without_users

from pipeline import train
from pipeline.checkpoints.resume import share_folder
from pipeline.config.cli import parse
from pipeline.data.curriculum import tasks_of_step
from pipeline.distributed import ranks as collectives
from pipeline.distributed.connect import connect
from pipeline.distributed.watchdog import Watchdog
from pipeline.preflight.check import check_and_prepare
from pipeline.rollout.samplers import graphs
from pipeline.rollout.trajectory import EpisodeRecord, Trajectory
from pipeline.run_state import Run, open_run
from pipeline.training.collect import RolloutBatch, collect_rollouts, give_advantages

ADD_UP = collectives.add_up
LARGE = ("gradients", "messages")  # large transfers between ranks


class Scripted:
    """Replaces sampled tokens by given tokens; the sampler still does all its work.

    `scripts` holds the tokens of the messages for each prompt and each episode of its group.
    """

    def __init__(self, sampler: Any, scripts: Mapping[tuple[int, ...], list[list[int]]]) -> None:
        self._open = sampler.open
        self._sample_tokens = sampler.sample_tokens
        self._draw = sampler.draw
        self._scripts = scripts
        self._said: dict[int, list[int]] = {}  # keys: random-number keys of episodes
        sampler.open = self.open
        sampler.sample_tokens = self.sample_tokens
        if not sampler.shares_rows:  # on a GPU, tokens take the place of random numbers
            sampler.draw = self.draw
            graphs.uniforms = self.given  # type: ignore[assignment]

    def open(
        self, prompts: Sequence[list[int]], keys: Sequence[int], num_drawn: Sequence[int] = ()
    ) -> Any:
        asked = list(map(tuple, prompts))
        for key, prompt, sibling in zip(keys, asked, siblings(asked), strict=True):
            scripts = self._scripts[prompt]
            self._said[key] = scripts[sibling % len(scripts)]
        self._keys = np.array(sorted(self._said), dtype=np.uint64)
        rows = [self._said[key] for key in self._keys.tolist()]
        self._tokens = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for row, ids in enumerate(rows):
            self._tokens[row, : len(ids)] = ids
        return self._open(prompts, keys, num_drawn)

    def sample_tokens(self, logprobs_BV: Any, keys: Any, positions: Any, greedy: bool) -> Any:
        picked = torch.as_tensor(self._sample_tokens(logprobs_BV, keys, positions, greedy))
        return torch.as_tensor(self.given(keys, positions)).to(picked)

    def given(self, keys: Any, positions: Any) -> Any:
        """The given tokens at positions in the streams with these keys; the arrays broadcast."""
        columns = np.minimum(np.asarray(positions), self._tokens.shape[1] - 1)
        return self._tokens[np.searchsorted(self._keys, np.asarray(keys)), columns]

    def draw(self, logprobs_BV: Any, numbers_B: Any) -> Any:
        return self._draw(logprobs_BV, numbers_B) * 0 + numbers_B.long()


def main(work: Work, gate: Gate) -> None:
    if work.kind == "block":
        take_place(work)
    config = parse(work.flags)
    accelerator, ranks = connect(config)
    if work.kind == "block" and ranks.num_ranks == 1:  # one rank's share of a step
        ranks.shard = lambda count: range(work.rank, count, work.of)  # type: ignore[method-assign]
    folder = share_folder(config, ranks)
    parts = check_and_prepare(config, ranks)
    watchdog = Watchdog(ranks, config.run.timeout)
    run = open_run(config, folder, parts, accelerator, ranks, watchdog)
    if work.forced or (work.kind != "block" and not config.data.reward_funcs):
        run.parts = without_users(run.parts)
    if work.forced:
        Scripted(run.learner.sampling.sampler, scripts_of(run, config.grpo.max_steps))
    if work.kind in ("step", "block"):
        wait = Stepped(gate) if work.kind == "step" else Measured(run, work, gate)
        record = train.record

        def record_and_wait(run: Run, stage: Any, batch: Any, statistics: Any, meter: Any) -> Any:
            metrics = record(run, stage, batch, statistics, meter)
            wait(run, batch)
            return metrics

        train.record = record_and_wait
        train.train(run)
    elif work.kind == "sampling":
        sampling(run, work, gate)
    else:
        updates(run, work, gate)


def take_place(work: Work) -> None:
    """Restrict this process to the cores or the GPU of its rank."""
    if work.device == "cuda":
        if "RANK" not in os.environ:
            torch.cuda.set_device(work.rank)
        return
    rank = int(os.environ.get("RANK", work.rank))
    threads = int(os.environ["OMP_NUM_THREADS"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(rank * threads + i) % len(cores)] for i in range(threads)})


def scripts_of(run: Run, num_units: int) -> dict[tuple[int, ...], list[list[int]]]:
    """The given tokens for each prompt of the next steps and each episode of its group."""
    parts = run.parts
    size = run.config.rollout.num_generations
    found = {}
    for step in range(num_units):
        for task in tasks_of_step(parts.stages[0], step, parts.train, run.config.run.seed):
            prompt = parts.prompt_ids(task.domain, task)
            scripts = [script_of(task, parts, sibling) for sibling in range(size)]
            found[tuple(prompt)] = [list(chain(*messages)) for messages in scripts]
    return found


class Stepped:
    """Waits after each step has written its metrics."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.sampled_s = 0.0

    def __call__(self, run: Run, batch: Any) -> None:
        seconds = run.ranks.seconds["sample"]
        records = run.records[-len(batch.trajectories) :]
        self.gate({**counts(records), "sample_s": seconds - self.sampled_s})
        self.sampled_s = seconds


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
        buffer = bucket.buffer()
        begun = self._now()
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


class Measured:
    """Waits after each block of steps. It must be made before GRPO begins."""

    def __init__(self, run: Run, work: Work, gate: Gate) -> None:
        self.ranks = run.ranks
        self.block = work.block
        self.gate = gate
        self.exchange = exchange = Exchange(work.device)

        # DDP takes a function with these annotations alone.
        def add_up(
            state: Any, bucket: torch.distributed.GradBucket
        ) -> torch.futures.Future[torch.Tensor]:
            sums: torch.futures.Future[torch.Tensor] = exchange(state, bucket)
            return sums

        collectives.add_up = add_up  # which the updater gives to DDP
        self.sampled_s = [0.0]  # cumulative seconds before and after each step of the block
        self.seen = 0
        self.before = self.counters()

    def counters(self) -> dict[str, float]:
        given = self.ranks.bytes
        return {
            "wait_s": self.ranks.seconds["wait"],
            "exchange_s": self.exchange.seconds(),
            "exchange_bytes": self.exchange.bytes,
            "control_bytes": sum(n for kind, n in given.items() if kind not in LARGE),
            "moved_bytes": given["messages"],
        }

    def __call__(self, run: Run, batch: Any) -> None:
        self.sampled_s.append(self.ranks.seconds["sample"])
        if len(self.sampled_s) <= self.block:
            return
        now = self.counters()
        records = run.records[self.seen :]
        # This sum is equal for all numbers of ranks only if all runs sample the same episodes.
        played = sum(crc32(f"{r.domain} {r.task_id} {r.trial}".encode()) for r in records)
        spent = {f"sample_{i}_s": b - a for i, (a, b) in enumerate(pairwise(self.sampled_s))}
        self.gate(
            {
                **counts(records),
                "played": played,
                **spent,
                **{name: now[name] - self.before[name] for name in now},
            }
        )
        self.before = now
        self.seen = len(run.records)
        self.sampled_s = self.sampled_s[-1:]


def collect(run: Run, step: int) -> RolloutBatch:
    stage = run.parts.stages[0]
    sources = run.parts.sources(stage)
    run.open_groups.begin_step(step)
    return collect_rollouts(run.open_groups, run.ranks, run.config, stage, sources)


def sampling(run: Run, work: Work, gate: Gate) -> None:
    """Sample the episodes of each step, always from the same weights."""
    for step in range(work.num_units):
        batch = collect(run, step)
        gate(counts([t.record() for t in batch.trajectories]))


def updates(run: Run, work: Work, gate: Gate) -> None:
    """Update on the episodes of the first step, which TRL's side reads from a file.

    A micro-batch may hold as many tokens as TRL's micro-batch with its padding.
    """
    stage = run.parts.stages[0]
    batch = collect(run, 0)
    rows = [asdict(replace(t, messages=[])) for t in batch.trajectories]
    exchange = Path(work.exchange) / f"{run.ranks.rank}.json"
    exchange.write_text(json.dumps(rows), encoding="utf-8")
    train.begin_grpo(run)
    train.begin_stage(run, stage)
    budget = work.microbatch_tokens or work.batch * longest(batch.trajectories)
    train.updater_of(run).max_tokens_per_microbatch = budget
    for _ in range(work.num_units):
        give_advantages(batch, run.ranks, run.config)
        train.update(run, stage, batch)
        gate(counts([t.record() for t in batch.trajectories]))


def longest(trajectories: Sequence[Trajectory]) -> int:
    """Tokens of a sequence with TRL's padding: the longest prompt plus the longest completion."""
    prompt = max(len(t.prompt_ids) for t in trajectories)
    return prompt + max(len(t.completion_ids) for t in trajectories)


def counts(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    return {
        "episodes": len(records),
        "tokens": sum(record.num_sampled_tokens for record in records),
        "reward": sum(record.reward for record in records),
    }


if __name__ == "__main__":
    asked = Work(**json.loads(sys.argv[1]))
    main(asked, Gate(asked.device))
