"""Seconds, tokens, FLOP/s and memory of each step, and profiler traces of chosen steps."""

import os
import platform
import resource
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.config.settings import ModelSettings
from pipeline.distributed.ranks import Ranks
from pipeline.grpo.updater import Updater
from pipeline.models.capabilities import attention_size
from pipeline.models.loading import on_gpu, uses_bf16
from pipeline.rollout.rollout import Rollout
from pipeline.rollout.trajectory import Trajectory


class Meter:
    def __init__(
        self, ranks: Ranks, rollout: Rollout, updater: Updater, model: Any, settings: ModelSettings
    ) -> None:
        self._ranks, self._rollout, self._updater = ranks, rollout, updater
        self._on_gpu, self._work = updater.accelerator.device.type == "cuda", work_of(model)
        bf16 = self._on_gpu and uses_bf16(settings)
        self._peak = peak_of(torch.cuda.get_device_name()) if bf16 else None
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
        ranks. Tokens per second count the tokens of all ranks. FLOP/s (see `Work`) and MFU are per
        rank. Memory is the largest peak of any rank: of GPU memory in the step or, without a GPU,
        of the process. `exchanged_bytes` counts the bytes that all ranks sent.
        """
        spent = self._spent
        lengths = [one.num_tokens for t in trajectories for one in t.sequences]
        sampled = sum(t.num_sampled_in_all for t in trajectories)
        length = sum(n * n for n in lengths) / max(1, sum(lengths))  # token-weighted mean length
        trained = spent["update_tokens"], spent["update_sampled"]
        spent["sample_flops"] = self._work.of_sampling(spent["sample_tokens"], sampled, length)
        spent["update_flops"] = self._work.of_update(*trained, length)
        spent |= {"sampled": sampled, "episodes": len(trajectories)}
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory = torch.cuda.max_memory_allocated() if self._on_gpu else memory
        of_ranks = self._ranks.all_gather_numbers([*spent.values(), memory / 1e6])
        *columns, memories = zip(*of_ranks, strict=True)
        total = {name: sum(column) for name, column in zip(spent, columns, strict=True)}
        metrics = rates(total, self._ranks.num_ranks, self._peak)
        return {**metrics, "perf/peak_memory_mb": max(memories)}

    def _counters(self) -> dict[str, float]:
        sampling: Any = self._rollout.policy
        phases: dict[str, Any] = {"sample": sampling.sampler, "update": self._updater}
        return {
            **{f"{name}_s": self._ranks.seconds[name] for name in ("sample", "update", "wait")},
            "environment_s": self._rollout.environment_s,
            **{f"{name}_tokens": of.num_tokens for name, of in phases.items()},
            **{f"{name}_padded": of.num_padded_tokens for name, of in phases.items()},
            "update_sampled": self._updater.num_sampled_tokens,
            "bytes": sum(self._ranks.bytes.values()),
            "step_s": time.perf_counter(),
        }


def rates(total: Mapping[str, float], num_ranks: int, peak: float | None) -> dict[str, float]:
    """Return the `perf/` numbers from sums over the ranks; `peak` is the peak FLOP/s of a GPU."""
    metrics = {name: total[name] / num_ranks for name in total if name.endswith("_s")}
    metrics["episodes_per_s"] = total["episodes"] / metrics["step_s"]
    metrics["tokens_per_s"] = total["sampled"] / metrics["step_s"]
    metrics["flops_per_s"] = (total["sample_flops"] + total["update_flops"]) / total["step_s"]
    metrics["exchanged_bytes"] = total["bytes"]
    for phase, tokens in (("sample", total["sampled"]), ("update", total["update_tokens"])):
        seconds, padded = total[f"{phase}_s"] or 1, total[f"{phase}_padded"]
        metrics[f"{phase}_tokens_per_s"] = tokens / (seconds / num_ranks)
        metrics[f"{phase}_padding_share"] = (padded - total[f"{phase}_tokens"]) / (padded or 1)
        metrics[f"{phase}_flops_per_s"] = total[f"{phase}_flops"] / seconds
    if peak is not None:
        for kind in ("", "sample_", "update_"):
            metrics[f"{kind}mfu"] = metrics[f"{kind}flops_per_s"] / peak
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


# Dense bf16 FLOP/s from public tables; check the GPU's datasheet before quoting MFU. A key matches
# a GPU if the GPU's name in CUDA has all words of the key; the first match counts.
PEAKS = {
    **{"B200": 2250e12, "H200 NVL": 836e12, "H200": 989e12, "H100 NVL": 835e12},
    **{"H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "A40": 150e12, "A30": 165e12},
    **{"A10": 125e12, "L40S": 362e12, "L4": 121e12},
}


def peak_of(device_name: str) -> float | None:
    """Return a GPU's peak FLOP/s in bf16; None for a MIG partition or a GPU that PEAKS lacks."""
    words = set(device_name.replace("-", " ").split())
    matches = (peak for name, peak in PEAKS.items() if {*name.split()} <= words)
    return None if "MIG" in words else next(matches, None)


class Work(NamedTuple):
    """The sizes of a model that determine the FLOPs of sampling and training.

    The FLOPs of a mixture-of-experts model are too high, because unused experts count, too.
    """

    body: int  # number of parameters between embedding and output layer
    head: int  # number of parameters of the output layer
    lora: int  # number of parameters of LoRA's matrices
    attention: int  # layers x heads x head size
    trains_all: bool  # whether all weights get gradients, not only LoRA's

    def of_sampling(self, tokens: float, sampled: float, length: float) -> float:
        """Return FLOPs of `tokens` in sequences of `length`; only `sampled` tokens need logits."""
        return tokens * (2 * self.body + 4 * self.attention * length) + 2 * sampled * self.head

    def of_update(self, tokens: float, sampled: float, length: float) -> float:
        """Return FLOPs of a forward and a backward pass; arguments are those of `of_sampling`."""
        each = 6 if self.trains_all else 4
        per_token = each * self.body + 6 * self.lora + 12 * self.attention * length
        return tokens * per_token + each * sampled * self.head


def work_of(model: Any) -> Work:
    base = [p for name, p in model.named_parameters() if ".lora_" not in name]
    num_base = sum(p.numel() for p in base)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    outside = embedding.numel() + (0 if head is embedding else head.numel())
    shape = model.config.get_text_config(decoder=True)
    return Work(
        body=num_base - outside,
        head=head.numel(),
        lora=sum(p.numel() for p in model.parameters()) - num_base,
        attention=int(shape.num_hidden_layers * attention_size(shape)),
        trains_all=any(p.requires_grad for p in base),
    )


def machine(num_ranks: int) -> dict[str, Any]:
    return {
        "host": platform.node(),
        "device": torch.cuda.get_device_name() if on_gpu() else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "num_ranks": num_ranks,
        "torch": torch.__version__,
    }
