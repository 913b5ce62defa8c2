"""The doctor's checks of what the ranks exchange, each measured on every rank.

A `measure_...` runs on one rank and returns plain values; whatever it raises is that rank's
failure. Its `judge_...` makes one finding of the measurements of all ranks, in order of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from pipeline.distributed.gradients import gather_into, sum_over_ranks, summed_over_ranks
from pipeline.doctor.table import FIXED_SPACE, Facts, Finding, Place, named

EXCHANGED = {"cpu": 16 << 20, "cuda": 256 << 20}  # bytes, for the bandwidth
SAMPLES = {"cpu": 1 << 21, "cuda": 1 << 26}  # of the fit, over all ranks
FAULTY = "NCCL_P2P_DISABLE=1, NCCL_ALGO=Ring; a GPU or link may be faulty (dmesg)"
FIT_STEPS, FIT_RATE = 30, 0.75  # halves the distance to the solution in every step


def measure_mean(place: Place) -> list[list[float]]:
    """What this rank contributes, and the mean over the ranks that it computes."""
    own = torch.tensor([1.0, 2.0, 3.0], device=place.device) + place.ranks.rank / 2
    mean = sum_over_ranks(own.clone()) / place.ranks.num_ranks
    return [own.tolist(), mean.tolist()]


def judge_mean(facts: list[list[list[float]]]) -> Finding:
    expected = [value + (len(facts) - 1) / 4 for value in (1.0, 2.0, 3.0)]
    for rank, (_, mean) in enumerate(facts):
        if not _close(mean, expected, 1e-5):
            text = f"rank {rank} computed the mean {_vector(mean)}; it is {_vector(expected)}"
            return Finding("broken", text, FAULTY)
    shown = [f"rank {rank} gave {_vector(own)}" for rank, (own, _) in enumerate(facts)]
    if len(shown) > 4:
        shown[2:-1] = ["..."]
    return Finding("ok", f"{', '.join(shown)}; all got the mean {_vector(expected)}")


def _vector(values: Sequence[float]) -> str:
    return f"[{f',{FIXED_SPACE}'.join(f'{value:g}' for value in values)}]"


def measure_speed(place: Place) -> Facts:
    """Seconds of exchanging many bytes and of exchanging one number, by kind; medians."""
    num_bytes, num_ranks, device = EXCHANGED[place.device.type], place.ranks.num_ranks, place.device
    facts: Facts = {"bytes": num_bytes, "gathered": True, "all-reduce": [], "all-gather": []}
    for size, most in ((num_bytes // 4, 10), (1, 200)):  # of float32
        tensor = torch.zeros(size, device=device)
        part = torch.full((-(-size // num_ranks),), float(place.ranks.rank), device=device)
        whole = gather_into(torch.empty(len(part) * num_ranks, device=device), part)
        in_order = torch.arange(num_ranks, device=device).repeat_interleave(len(part))
        facts["gathered"] &= torch.equal(whole, in_order.float())
        facts["all-reduce"].append(_seconds(partial(sum_over_ranks, tensor), place, most))
        facts["all-gather"].append(_seconds(partial(gather_into, whole, part), place, most))
    return facts


def _seconds(call: Callable[[], Any], place: Place, most: int) -> float:
    """The median of as many calls as take two seconds, `most` at most; the first is not counted."""
    first = place.ranks.max(_once(call, place.device))
    count = max(1, min(most, int(2 / first)))  # the same on all ranks
    return median(_once(call, place.device) for _ in range(count))


def _once(call: Callable[[], Any], device: torch.device) -> float:
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def judge_speed(facts: list[Facts]) -> Finding:
    """Of the slowest rank.

    The bus bandwidth is that of nccl-tests (doc/PERFORMANCE.md): bytes over seconds, times
    2 (n - 1) / n for an all-reduce and (n - 1) / n for an all-gather of so many bytes in all.
    """
    num_ranks, num_bytes = len(facts), facts[0]["bytes"]
    wrong = [rank for rank, fact in enumerate(facts) if not fact["gathered"]]
    if wrong:
        return Finding("broken", f"all-gather gave other values to {named(wrong)}", FAULTY)
    texts = []
    for name, factor in (("all-reduce", 2), ("all-gather", 1)):
        many_s, one_s = (max(fact[name][i] for fact in facts) for i in (0, 1))
        bandwidth = num_bytes / many_s * factor * (num_ranks - 1) / num_ranks
        texts.append(f"{name} {bandwidth / 1e9:.2f} GB/s and {one_s * 1e6:.0f} µs")
    how = (
        f"bus bandwidth, as nccl-tests defines it, of {num_bytes >> 20} MiB; latency of one number"
    )
    return Finding("ok", f"{'; '.join(texts)} ({how})")


def measure_barrier(place: Place) -> tuple[float, float]:
    """Seconds of a barrier, and the deadline of a run's."""
    begun = time.perf_counter()
    place.ranks.barrier("doctor")
    return time.perf_counter() - begun, place.config.run.timeout


def judge_barrier(facts: list[tuple[float, float]]) -> Finding:
    seconds, timeout = max(took for took, _ in facts), facts[0][1]
    text = f"all {len(facts)} ranks came, in {seconds * 1e3:.1f} ms"
    return Finding("ok", f"{text}; a run waits {timeout:g} s for a missing rank (--timeout)")


def measure_fit(place: Place) -> Facts:
    """Weights and seconds of a step, by DDP on all ranks and, on rank 0, by one process.

    Each rank alone sees another line; only the gradient over all ranks leads to y = 2x + 3.
    """
    num_ranks, device = place.ranks.num_ranks, place.device
    size = max(2, SAMPLES[device.type] // num_ranks)

    def shard(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1, 1, size, dtype=torch.float64, device=device)[:, None]
        offset = (rank - (num_ranks - 1) / 2) / num_ranks
        return x, (2 + offset) * x + 3 + offset

    together = summed_over_ranks(place.accelerator.prepare(_line(device)))  # as a run does
    facts = {"ddp": _fit(together, [shard(place.ranks.rank)], num_ranks)}
    if place.ranks.is_main:  # the others wait for the judgement
        shards = [shard(rank) for rank in range(num_ranks)]
        facts["alone"] = _fit(_line(device), shards, num_ranks)
    return facts


def _line(device: torch.device) -> nn.Module:
    line = nn.Linear(1, 1, dtype=torch.float64, device=device)
    for parameter in line.parameters():
        nn.init.zeros_(parameter)
    return line


def _fit(
    model: nn.Module, shards: list[tuple[torch.Tensor, torch.Tensor]], num_shards: int
) -> Facts:
    """Gradient descent on the mean squared error of `num_shards` micro-batches over all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=FIT_RATE)

    def step() -> None:
        for x, y in shards:
            loss = (model(x) - y).square().mean() / num_shards
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    device = shards[0][0].device
    _once(step, device)  # the first steps also set up
    _once(step, device)
    seconds = median(_once(step, device) for _ in range(FIT_STEPS - 2))
    return {"weights": [parameter.item() for parameter in model.parameters()], "seconds": seconds}


def judge_fit(facts: list[Facts]) -> Finding:
    alone = facts[0]["alone"]
    for rank, fact in enumerate(facts):
        fitted = fact["ddp"]["weights"]
        if not _close(fitted, alone["weights"], 1e-6):
            text = f"rank {rank} fitted {_equation(fitted)} with DDP, one process alone "
            remedy = "TORCH_DISTRIBUTED_DEBUG=DETAIL; the ranks do not add their gradients up"
            return Finding("broken", text + _equation(alone["weights"]), remedy)
    if not _close(alone["weights"], [2, 3], 1e-6):
        text = f"fitted {_equation(alone['weights'])}, which is not y = 2x + 3"
        return Finding("broken", text, "reinstall PyTorch; its arithmetic is wrong on this device")
    ddp_s, alone_s = max(fact["ddp"]["seconds"] for fact in facts), alone["seconds"]
    text = (
        f"{len(facts)} ranks fit {_equation(alone['weights'])}, as one process does with gradient "
    )
    text += f"accumulation (to 1e-6); a step takes {ddp_s * 1e3:.1f} ms, that of one process "
    text += f"{alone_s * 1e3:.1f} ms: speed-up {alone_s / ddp_s:.2f}"
    if ddp_s > alone_s:
        text += ", slower: the exchange costs more than it saves, or the ranks share cores"
    return Finding("ok", text)


def _close(these: Sequence[float], others: Sequence[float], tolerance: float) -> bool:
    """False also where one is not a number."""
    return all(abs(a - b) <= tolerance for a, b in zip(these, others, strict=True))


def _equation(weights: Sequence[float]) -> str:
    return f"y = {weights[0]:.7g}x + {weights[1]:.7g}"
