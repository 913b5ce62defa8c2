"""Our trainer for `vs_trl.py`: the loop of `pipeline/train.py`, which waits after each step."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import common  # noqa: F401  # adds the repository to sys.path
import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from turns import Gate, Work, script_of, siblings, without_users

from pipeline.config.cli import parse
from pipeline.data.curriculum import tasks_of_step
from pipeline.distributed.watchdog import Watchdog
from pipeline.environments.tools import tool_schemas
from pipeline.grpo.collect import RolloutBatch, collect_rollouts
from pipeline.rollout.trajectory import RunRecord, Trajectory
from pipeline.train import Training, connect


class Scripted:
    """Replaces sampled tokens by given tokens; the sampler still does all its work.

    `scripts` holds the tokens of the messages for each prompt and each episode of its group.
    """

    def __init__(self, sampler: Any, scripts: Mapping[tuple[int, ...], list[list[int]]]) -> None:
        self._open, self._sample_tokens, self._scripts = (
            sampler.open,
            sampler.sample_tokens,
            scripts,
        )
        self._said: dict[int, list[int]] = {}  # keys: random-number keys of episodes
        sampler.open, sampler.sample_tokens = self.open, self.sample_tokens

    def open(self, prompts: Sequence[list[int]], keys: Sequence[int]) -> Any:
        asked = list(map(tuple, prompts))
        for key, prompt, sibling in zip(keys, asked, siblings(asked), strict=True):
            scripts = self._scripts[prompt]
            self._said[key] = scripts[sibling % len(scripts)]
        self._keys = np.array(sorted(self._said), dtype=np.uint64)
        rows = [self._said[key] for key in self._keys.tolist()]
        self._tokens = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for row, ids in enumerate(rows):
            self._tokens[row, : len(ids)] = ids
        return self._open(prompts, keys)

    def sample_tokens(self, logprobs_BV: Any, keys: Any, positions: Any, greedy: bool) -> Any:
        picked = torch.as_tensor(self._sample_tokens(logprobs_BV, keys, positions, greedy))
        columns = np.minimum(np.asarray(positions), self._tokens.shape[1] - 1)
        tokens = self._tokens[np.searchsorted(self._keys, np.asarray(keys)), columns]
        return torch.as_tensor(tokens).to(picked)


def main(work: Work, gate: Gate) -> None:
    config = parse(work.flags)
    accelerator, ranks = connect(config)
    kind = {"step": Stepped, "memory": Counted}.get(work.kind, Training)
    run = kind(config, accelerator, ranks, Watchdog(ranks, config.run.timeout))
    if not config.data.reward_funcs:
        run.parts = without_users(run.parts)
    if work.forced:
        Scripted(run.learner.sampling.sampler, scripts_of(run, work.num_units))
    if isinstance(run, Stepped):
        run.gate = gate
        run.train()
    else:
        {"sampling": sampling, "update": updates}[work.kind](run, work, gate)


def scripts_of(run: Training, num_units: int) -> dict[tuple[int, ...], list[list[int]]]:
    """The given tokens for each prompt of the next steps and each episode of its group."""
    parts, found, size = run.parts, {}, run.config.rollout.num_generations
    for step in range(num_units):
        for task in tasks_of_step(parts.stages[0], step, parts.train, run.config.run.seed):
            tools = tool_schemas(parts.environments[task.domain])
            prompt = parts.chat.prompt_ids(list(task.prompt), tools)
            scripts = [script_of(task, parts, sibling) for sibling in range(size)]
            found[tuple(prompt)] = [list(chain(*messages)) for messages in scripts]
    return found


class Stepped(Training):
    """The training loop, which waits after each step has written its metrics."""

    gate: Gate
    sampled_s = 0.0

    def facts(self) -> dict[str, float]:
        return {}

    def record(self, stage: Any, batch: Any, statistics: Any, meter: Any) -> Any:
        metrics = super().record(stage, batch, statistics, meter)
        seconds = self.ranks.seconds["sample"]
        records = self.records[-len(batch.trajectories) :]
        self.gate({**counts(records), "sample_s": seconds - self.sampled_s, **self.facts()})
        self.sampled_s = seconds
        return metrics


class Counted(Stepped):
    """The training loop, which counts the bytes that training cannot do without."""

    counted = 0  # weights, gradients and moments, and what autograd keeps of a micro-batch

    def begin_grpo(self) -> Any:
        meter = super().begin_grpo()
        assert self.learner.updater is not None
        module = self.learner.updater.module
        own = {p.untyped_storage()._cdata: p.nbytes for p in module.parameters()}
        kept, hooks = dict[int, int](), list[saved_tensors_hooks]()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if (storage := tensor.untyped_storage())._cdata not in own:
                kept[storage._cdata] = storage.nbytes()
            return tensor

        def begin(*_: Any) -> None:
            kept.clear()
            hooks.append(saved_tensors_hooks(keep, lambda tensor: tensor))
            hooks[-1].__enter__()

        def end(*_: Any) -> None:
            hooks.pop().__exit__()
            self.counted = max(self.counted, 4 * sum(own.values()) + sum(kept.values()))

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)
        return meter

    def facts(self) -> dict[str, float]:
        return {"counted_mb": self.counted / 1e6}


def collect(run: Training, step: int) -> RolloutBatch:
    stage = run.parts.stages[0]
    sources = run.parts.sources(stage)
    return collect_rollouts(run.learner.rollout, run.ranks, run.config, stage, step, sources)


def sampling(run: Training, work: Work, gate: Gate) -> None:
    """Sample the episodes of each step, always from the same weights."""
    for step in range(work.num_units):
        batch = collect(run, step)
        gate(counts([t.record() for t in batch.trajectories]))


def updates(run: Training, work: Work, gate: Gate) -> None:
    """Update on the episodes of the first step, which TRL's side reads from a file.

    A micro-batch may hold as many tokens as TRL's micro-batch with its padding.
    """
    stage = run.parts.stages[0]
    batch = collect(run, 0)
    leave(batch.trajectories, Path(work.exchange) / f"{run.ranks.rank}.json")
    run.begin_grpo()
    run.begin_stage(stage)
    updater = run.learner.updater
    assert updater is not None
    budget = work.microbatch_tokens or work.batch * longest(batch.trajectories)
    updater.max_tokens_per_microbatch = budget
    for _ in range(work.num_units):
        run.advantages(batch, 0)
        run.update(stage, batch)
        gate(counts([t.record() for t in batch.trajectories]))


def longest(trajectories: Sequence[Trajectory]) -> int:
    """Tokens of a sequence with TRL's padding: the longest prompt plus the longest completion."""
    prompt = max(len(t.prompt_ids) for t in trajectories)
    return prompt + max(len(t.completion_ids) for t in trajectories)


def leave(trajectories: Sequence[Trajectory], path: Path) -> None:
    rows = [asdict(replace(t, messages=[])) for t in trajectories]
    path.write_text(json.dumps(rows), encoding="utf-8")


def counts(records: Sequence[RunRecord]) -> dict[str, float]:
    return {
        "episodes": len(records),
        "tokens": sum(record.num_sampled_tokens for record in records),
        "reward": sum(record.reward for record in records),
    }


if __name__ == "__main__":
    asked = Work(**json.loads(sys.argv[1]))
    main(asked, Gate(asked.device))
