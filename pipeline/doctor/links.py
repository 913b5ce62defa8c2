"""The doctor's checks of the exchange between ranks, each measured on every rank.

A `measure_...` runs on one rank and returns plain values. Its `judge_...` makes one finding of the
values of all ranks, in order of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from pipeline.distributed.gradients import sum_gradients, sum_over_ranks
from pipeline.doctor.table import Facts, Finding, Place

EXCHANGED = {"cpu": 16 << 20, "cuda": 256 << 20}  # bytes, for the bandwidth
SAMPLES = {"cpu": 1 << 21, "cuda": 1 << 26}  # of the fit, over all ranks
FAULTY = "NCCL_P2P_DISABLE=1, NCCL_ALGO=Ring; a GPU or link may be faulty (dmesg)"
UNSUMMED = "TORCH_DISTRIBUTED_DEBUG=DETAIL; the ranks do not add their gradients up"
FIT_STEPS, FIT_RATE = 30, 0.75  # halves the distance to the solution in every step


def measure_all_reduce(place: Place) -> Facts:
    """The mean over the ranks of [1, 2, 3] + rank / 2, and median seconds of an all-reduce."""
    ranks, device = place.ranks, place.device
    own = torch.tensor([1.0, 2.0, 3.0], device=device) + ranks.rank / 2
    facts: Facts = {"mean": (sum_over_ranks(own) / ranks.num_ranks).tolist(), "seconds": []}
    for size, most in ((EXCHANGED[device.type] // 4, 10), (1, 200)):  # of float32
        exchange = partial(sum_over_ranks, torch.zeros(size, device=device))
        first = ranks.max(_once(exchange, device))
        count = max(1, min(most, int(2 / first)))  # about two seconds, the same on all ranks
        facts["seconds"].append(median(_once(exchange, device) for _ in range(count)))
    return {**facts, "bytes": EXCHANGED[device.type]}


def _once(call: Callable[[], Any], device: torch.device) -> float:
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def judge_all_reduce(facts: list[Facts]) -> Finding:
    """The mean of every rank, and the bandwidth and latency of the slowest.

    The bus bandwidth is that of nccl-tests (doc/PERFORMANCE.md): 2 (n - 1) / n bytes over seconds.
    """
    num_ranks, num_bytes = len(facts), facts[0]["bytes"]
    expected = [value + (num_ranks - 1) / 4 for value in (1.0, 2.0, 3.0)]
    for rank, fact in enumerate(facts):
        if not _close(fact["mean"], expected, 1e-5):
            text = f"rank {rank} computed the mean {fact['mean']}; it is {expected}"
            return Finding("broken", text, FAULTY)
    many_s, one_s = (max(fact["seconds"][i] for fact in facts) for i in (0, 1))
    bandwidth = 2 * (num_ranks - 1) / num_ranks * num_bytes / many_s / 1e9
    text = f"all {num_ranks} ranks computed the mean {expected}; bus bandwidth {bandwidth:.2f} GB/s"
    return Finding("ok", f"{text} for {num_bytes >> 20} MiB, latency {one_s * 1e6:.0f} µs")


def measure_barrier(place: Place) -> float:
    """Seconds of a barrier."""
    return _once(partial(place.ranks.barrier, "doctor"), place.device)


def judge_barrier(seconds: list[float]) -> Finding:
    return Finding("ok", f"all {len(seconds)} ranks came, in {max(seconds) * 1e3:.1f} ms")


def measure_fit(place: Place) -> Facts:
    """The weights of a line that DDP fits on all ranks, and median seconds of a step.

    Each rank alone sees another line; only the gradient over all ranks leads to y = 2x + 3.
    """
    num_ranks, device = place.ranks.num_ranks, place.device
    size = max(2, SAMPLES[device.type] // num_ranks)
    x = torch.linspace(-1, 1, size, dtype=torch.float64, device=device)[:, None]
    offset = (place.ranks.rank - (num_ranks - 1) / 2) / num_ranks
    y = (2 + offset) * x + 3 + offset
    line = nn.Linear(1, 1, dtype=torch.float64, device=device)
    for parameter in line.parameters():
        nn.init.zeros_(parameter)
    model = sum_gradients(place.accelerator.prepare(line))  # as a run does
    optimizer = torch.optim.SGD(line.parameters(), lr=FIT_RATE)

    def step() -> None:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean() / num_ranks
        loss.backward()
        optimizer.step()

    seconds = median(_once(step, device) for _ in range(FIT_STEPS))
    return {"weights": [parameter.item() for parameter in line.parameters()], "seconds": seconds}


def judge_fit(facts: list[Facts]) -> Finding:
    for rank, fact in enumerate(facts):
        slope, intercept = fact["weights"]
        if not _close((slope, intercept), (2, 3), 1e-6):
            text = (
                f"rank {rank} fitted y = {slope:.7g}x + {intercept:.7g} with DDP; it is y = 2x + 3"
            )
            return Finding("broken", text, UNSUMMED)
    milliseconds = 1e3 * max(fact["seconds"] for fact in facts)
    text = f"{len(facts)} ranks fit y = 2x + 3 together (to 1e-6); a step takes "
    return Finding("ok", f"{text}{milliseconds:.1f} ms")


def _close(values: Sequence[float], others: Sequence[float], tolerance: float) -> bool:
    """False also where one is not a number."""
    return all(abs(a - b) <= tolerance for a, b in zip(values, others, strict=True))
