"""Where a step's time goes: seconds, tokens, FLOP/s and memory; and traces of chosen steps."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.config.settings import ModelSettings
from pipeline.distributed.ranks import Ranks
from pipeline.grpo.updater import Updater
from pipeline.models.layers import widest
from pipeline.models.loading import on_gpu, uses_bf16
from pipeline.rollout.rollout import Rollout
from pipeline.rollout.trajectory import Trajectory


class Meter:
    """Measures steps: what this rank has done and how long it took, seconds by phase."""

    def __init__(
        self, ranks: Ranks, rollout: Rollout, updater: Updater, model: Any, settings: ModelSettings
    ) -> None:
        self._ranks, self._rollout, self._updater = ranks, rollout, updater
        self._device, self._work = updater.accelerator.device, work_of(model)
        bf16 = self._device.type == "cuda" and uses_bf16(settings)
        self._peak = peak_of(torch.cuda.get_device_name()) if bf16 else None
        self._spent: dict[str, float] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the part of a step that is measured."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before, begun = self._counters(), time.perf_counter()
        yield
        step_s, after = time.perf_counter() - begun, self._counters()
        self._spent = {name: after[name] - before[name] for name in after} | {"step_s": step_s}

    def timings(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """What `timings.jsonl` holds of the step in which this rank played these, from all ranks.

        Seconds are means over the ranks, of which `environment` is a part of `sample`, and `wait`,
        for other ranks, of no other; exchanging gradients is a part of `update`. Tokens per second
        are those of all ranks together, in the step or in the phase. FLOP/s (see `work_of`) and
        MFU are a rank's, memory is that of the rank that takes most. `exchanged_bytes` is what all
        ranks gave to others, gradients included.
        """
        spent, work = self._spent, self._work
        lengths = [t.num_tokens for t in trajectories]
        sampled = sum(t.num_sampled_tokens for t in trajectories)
        length = sum(n * n for n in lengths) / max(1, sum(lengths))  # of a token's sequence
        spent["sample_flops"] = work.of_sampling(spent["sample_tokens"], sampled, length)
        spent["update_flops"] = work.of_update(
            spent["update_tokens"], spent["update_sampled"], length
        )
        spent |= {"sampled": sampled, "episodes": len(lengths)}
        rows = self._ranks.all_gather_numbers([*spent.values(), peak_memory_mb(self._device)])
        *columns, memory = zip(*rows, strict=True)
        total = {name: sum(column) for name, column in zip(spent, columns, strict=True)}
        found = rates(total, self._ranks.num_ranks, self._peak)
        return {**found, "perf/peak_memory_mb": max(memory)}

    def _counters(self) -> dict[str, float]:
        """What has added up so far on this rank."""
        sampler, updater, seconds = self._rollout.sampler, self._updater, self._ranks.seconds
        return {
            "sample_s": seconds["sample"],
            "environment_s": self._rollout.environment_s,
            "update_s": seconds["update"],
            "wait_s": seconds["wait"],
            "sample_tokens": sampler.num_tokens,
            "sample_padded": sampler.num_padded_tokens,
            "update_tokens": updater.num_tokens,
            "update_padded": updater.num_padded_tokens,
            "update_sampled": updater.num_sampled_tokens,
            "bytes": sum(self._ranks.bytes.values()),
        }


def rates(total: Mapping[str, float], num_ranks: int, peak: float | None) -> dict[str, float]:
    """Means, shares and rates from sums over the ranks; `peak` is the FLOP/s of a rank's GPU."""
    seconds = {name: total[name] / num_ranks for name in total if name.endswith("_s")}
    found = {f"perf/{name}": value for name, value in seconds.items()}
    found["perf/episodes_per_s"] = total["episodes"] / seconds["step_s"]
    found["perf/tokens_per_s"] = total["sampled"] / seconds["step_s"]
    found["perf/sample_tokens_per_s"] = _ratio(total["sampled"], seconds["sample_s"])
    found["perf/update_tokens_per_s"] = _ratio(total["update_tokens"], seconds["update_s"])
    for phase in ("sample", "update"):
        padding = total[f"{phase}_padded"] - total[f"{phase}_tokens"]
        found[f"perf/{phase}_padding_share"] = _ratio(padding, total[f"{phase}_padded"])
        found[f"perf/{phase}_flops_per_s"] = _ratio(total[f"{phase}_flops"], total[f"{phase}_s"])
    flops = total["sample_flops"] + total["update_flops"]
    found["perf/flops_per_s"] = flops / total["step_s"]
    found["perf/exchanged_bytes"] = total["bytes"]
    if peak is not None:
        kinds = ("", "sample_", "update_")
        found |= {f"perf/{kind}mfu": found[f"perf/{kind}flops_per_s"] / peak for kind in kinds}
    return found


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def peak_memory_mb(device: torch.device) -> float:
    """The most that this rank held: on its GPU in the step, or without one so far in the run."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


@contextmanager
def profiled(
    step: int, steps: Collection[int], folder: Path, ranks: Ranks, device: torch.device
) -> Iterator[None]:
    """Around an optimizer step: writes its trace into the folder, one file a rank, if asked for.

    The phases are ranges in it. The files open in https://ui.perfetto.dev or chrome://tracing.
    """
    if step not in steps:
        yield
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler prints lines of its own
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        yield
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:06d}.rank-{ranks.rank}.json.gz"
    profiler.export_chrome_trace(str(path))
    if ranks.is_main:
        print(f"profile of step {step}: {path}; open it in https://ui.perfetto.dev", flush=True)


# Dense bf16, FLOP/s, as public tables repeat NVIDIA's figures; read the card's own datasheet before
# quoting MFU. Names are words of CUDA's name of the device; the first whose words are all in it
# counts.
PEAKS = {
    "B200": 2250e12,
    "H200 NVL": 836e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
}


def peak_of(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU; None where the table lacks it, or it is a part (MIG) of one."""
    words = device_name.replace("-", " ").split()
    if "MIG" in words:
        return None
    return next((peak for name, peak in PEAKS.items() if set(name.split()) <= set(words)), None)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a token costs in a model, without LoRA's matrices and with them.

    All experts of a mixture count, so there FLOP/s come out too high.
    """

    body: int  # parameters between embedding and output layer
    head: int  # parameters of the output layer
    lora: int
    attention: int  # L H Q
    trains_all: bool  # False: only LoRA's matrices get gradients

    def of_sampling(self, tokens: float, sampled: float, length: float) -> float:
        """FLOPs of feeding `tokens`, of which `sampled` were drawn, in sequences of `length`."""
        return tokens * (2 * self.body + 4 * self.attention * length) + 2 * sampled * self.head

    def of_update(self, tokens: float, sampled: float, length: float) -> float:
        """FLOPs of a forward and a backward pass."""
        each = 6 if self.trains_all else 4
        per_token = each * self.body + 6 * self.lora + 12 * self.attention * length
        return tokens * per_token + each * sampled * self.head


def work_of(model: Any) -> Work:
    """Counted from a causal language model's parameters, with or without LoRA."""
    named = list(model.named_parameters())
    lora = sum(parameter.numel() for name, parameter in named if ".lora_" in name)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    outside = embedding.numel() + (0 if head is embedding else head.numel())
    return Work(
        body=sum(parameter.numel() for _, parameter in named) - lora - outside,
        head=head.numel(),
        lora=lora,
        attention=_attention(model.config.get_text_config(decoder=True)),
        trains_all=any(
            parameter.requires_grad for name, parameter in named if ".lora_" not in name
        ),
    )


def _attention(shape: Any) -> int:
    """L H Q; layers that have no attention, or smaller heads, count like the others."""
    heads = widest(shape, "num_attention_heads")
    size = widest(shape, "head_dim") or shape.hidden_size // max(1, heads)
    return int(shape.num_hidden_layers * heads * size)


def machine(num_ranks: int) -> dict[str, Any]:
    """What the times of a run depend on."""
    return {
        "host": platform.node(),
        "device": torch.cuda.get_device_name() if on_gpu() else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "num_ranks": num_ranks,
        "torch": torch.__version__,
    }
