"""Seconds, tokens and memory of each step, and profiler traces of chosen steps."""

import os
import platform
import resource
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.distributed.ranks import Ranks
from pipeline.grpo.updater import Updater
from pipeline.models.loading import on_gpu
from pipeline.rollout.rollout import Rollout
from pipeline.rollout.trajectory import Trajectory


class Meter:
    def __init__(self, ranks: Ranks, rollout: Rollout, updater: Updater) -> None:
        self._ranks = ranks
        self._rollout = rollout
        self._updater = updater
        self._on_gpu = updater.accelerator.device.type == "cuda"
        self._spent: dict[str, float] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = self._counters()
        yield
        self._spent = {name: value - before[name] for name, value in self._counters().items()}

    def timings(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the `perf/` numbers of the last step; `trajectories` are this rank's episodes.

        Seconds are means over the ranks. `sample_s` contains `environment_s`; `update_s` contains
        the all-reduce of gradients. `sample_s` and `update_s` do not contain the waits for other
        ranks. Tokens per second count the tokens of all ranks. Memory is the largest peak of any
        rank: of GPU memory in the step or, without a GPU, of the process. `exchanged_bytes` counts
        the bytes that all ranks sent.
        """
        sampled = sum(t.num_sampled_in_all for t in trajectories)
        spent = {**self._spent, "sampled": sampled, "episodes": len(trajectories)}
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory = torch.cuda.max_memory_allocated() if self._on_gpu else memory
        of_ranks = self._ranks.all_gather_numbers([*spent.values(), memory / 1e6])
        *columns, memories = zip(*of_ranks, strict=True)
        total = {name: sum(column) for name, column in zip(spent, columns, strict=True)}
        metrics = rates(total, self._ranks.num_ranks)
        return {**metrics, "perf/peak_memory_mb": max(memories)}

    def _counters(self) -> dict[str, float]:
        sampling: Any = self._rollout.policy
        phases: dict[str, Any] = {"sample": sampling.sampler, "update": self._updater}
        return {
            **{f"{name}_s": self._ranks.seconds[name] for name in ("sample", "update", "wait")},
            "environment_s": self._rollout.environment_s,
            **{f"{name}_tokens": of.num_tokens for name, of in phases.items()},
            **{f"{name}_padded": of.num_padded_tokens for name, of in phases.items()},
            "bytes": sum(self._ranks.bytes.values()),
            "step_s": time.perf_counter(),
        }


def rates(total: Mapping[str, float], num_ranks: int) -> dict[str, float]:
    """Return the `perf/` numbers from sums over the ranks."""
    metrics = {name: total[name] / num_ranks for name in total if name.endswith("_s")}
    metrics["episodes_per_s"] = total["episodes"] / metrics["step_s"]
    metrics["tokens_per_s"] = total["sampled"] / metrics["step_s"]
    metrics["exchanged_bytes"] = total["bytes"]
    for phase, tokens in (("sample", total["sampled"]), ("update", total["update_tokens"])):
        seconds = total[f"{phase}_s"] or 1
        padded = total[f"{phase}_padded"]
        metrics[f"{phase}_tokens_per_s"] = tokens / (seconds / num_ranks)
        metrics[f"{phase}_padding_share"] = (padded - total[f"{phase}_tokens"]) / (padded or 1)
    return {f"perf/{name}": value for name, value in metrics.items()}


@contextmanager
def profiled(
    step: int, steps: Collection[int], folder: Path, ranks: Ranks, device: torch.device
) -> Iterator[None]:
    """Profile this context if `step` is in `steps`; each rank writes a trace file into `folder`."""
    if step not in steps:
        yield
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler prints only errors
    gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *gpu]) as profiler:
        yield
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:06d}.rank-{ranks.rank}.json.gz"
    profiler.export_chrome_trace(str(path))
    if ranks.is_main:
        print(f"profile of step {step}: {path}; open it in https://ui.perfetto.dev", flush=True)


def machine(num_ranks: int) -> dict[str, Any]:
    return {
        "host": platform.node(),
        "device": torch.cuda.get_device_name() if on_gpu() else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "num_ranks": num_ranks,
        "torch": torch.__version__,
    }
