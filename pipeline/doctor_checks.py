"""What the doctor looks at: each check measures on every rank and is judged from all measurements.

A `measure_...` runs on one rank and returns plain values; whatever it raises is that rank's
failure. Its `judge_...` makes one finding of the measurements of all ranks, in order of ranks.
"""

from __future__ import annotations

import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import Any, Literal

import psutil
import torch
from accelerate import Accelerator
from torch import nn

from pipeline.check import GIB, memory_of_a_rank, memory_per_rank
from pipeline.config import Config, UserError
from pipeline.distributed import Board, Ranks, gather_into, sum_over_ranks
from pipeline.policy import uses_bf16

Facts = dict[str, Any]

SMALLER = "use a smaller model, max_live_episodes or max_tokens_per_microbatch"
EXCHANGED = {"cpu": 16 << 20, "cuda": 256 << 20}  # bytes, for the bandwidth
SAMPLES = {"cpu": 1 << 21, "cuda": 1 << 26}  # of the fit, over all ranks
FIT_STEPS, FIT_RATE = 30, 0.75  # halves the distance to the solution in every step
WRITTEN = 64 << 20  # bytes
BF16_ERROR = 0.01  # rounding to 8 bits costs about 0.003


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's table."""

    status: Literal["ok", "broken", "note"]
    text: str
    remedy: str = ""
    check: str = ""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank, as the checks see it."""

    config: Config
    accelerator: Accelerator
    ranks: Ranks
    board: Board
    deadline_s: float

    @property
    def device(self) -> torch.device:
        return torch.device(self.accelerator.device)


@dataclass(frozen=True)
class Check:
    """A row of the table: what to measure, how to judge it, what to try when it fails."""

    name: str
    measure: Callable[[Place], Any]
    judge: Callable[[list[Any]], Finding]
    remedy: str = ""  # missing: that of the links between the ranks
    talks: bool = False  # needs those links


def named(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0-3, 6`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    several = len(spans) > 1 or any(len(span) > 1 for span in spans)
    texts = (f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)
    return f"{'ranks' if several else 'rank'} {', '.join(texts)}"


def _who_has(values: Sequence[Any]) -> dict[Any, list[int]]:
    """The ranks of each value, given every rank's value."""
    ranks = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    return dict(ranks)


# Devices and versions


def measure_devices(place: Place) -> Facts:
    device = place.device
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = str(getattr(properties, "uuid", device))
        return {"host": platform.node(), "device": properties.name, "gpu": gpu}
    name = f"CPU {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s)"
    return {"host": platform.node(), "device": name, "gpu": ""}


def judge_devices(facts: list[Facts]) -> Finding:
    places = _who_has([(fact["host"], fact["device"]) for fact in facts])
    for (host, gpu), ranks in _who_has([(fact["host"], fact["gpu"]) for fact in facts]).items():
        if gpu and len(ranks) > 1:
            name = facts[ranks[0]]["device"]
            return Finding(
                "broken",
                f"{named(ranks)} of {host} share one GPU ({name}, {gpu})",
                "one GPU per rank: look at CUDA_VISIBLE_DEVICES and at --num-gpus",
            )
    kinds = {fact["gpu"] != "" for fact in facts}
    parts = [f"{host}: {named(ranks)} on {device} each" for (host, device), ranks in places.items()]
    if len(kinds) > 1:
        remedy = "nvidia-smi on the host without; its driver or its PyTorch may lack CUDA"
        return Finding("broken", f"some ranks have no GPU: {'; '.join(parts)}", remedy)
    return Finding("ok", "; ".join(parts).removesuffix(" each" if len(facts) == 1 else ""))


def measure_versions(place: Place) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {name: version(name) for name in ("accelerate", "transformers")}
    if torch.version.cuda is None:
        return {**found, "CUDA": "none", "NCCL": "none"}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {**found, "CUDA": torch.version.cuda, "NCCL": nccl}


def judge_versions(facts: list[dict[str, str]]) -> Finding:
    different = []
    for name in facts[0]:
        ranks_of = _who_has([fact[name] for fact in facts])
        if len(ranks_of) > 1:
            each = (f"{value} on {named(ranks)}" for value, ranks in ranks_of.items())
            different.append(f"{name} is {', '.join(each)}")
    if different:
        return Finding(
            "broken",
            "; ".join(different),
            "install the same versions on every host: pip install -c constraints.txt -e .",
        )
    text = ", ".join(f"{name} {value}" for name, value in facts[0].items())
    return Finding("ok", text + ("; the same on all ranks" if len(facts) > 1 else ""))


# The links between the ranks


def measure_mean(place: Place) -> list[list[float]]:
    """What this rank contributes, and the mean over the ranks that it computes."""
    own = torch.tensor([1.0, 2.0, 3.0], device=place.device) + place.ranks.rank / 2
    mean = sum_over_ranks(own.clone()) / place.ranks.num_ranks
    return [own.tolist(), mean.tolist()]


def judge_mean(facts: list[list[list[float]]]) -> Finding:
    expected = [value + (len(facts) - 1) / 4 for value in (1.0, 2.0, 3.0)]
    for rank, (_, mean) in enumerate(facts):
        if max(abs(a - b) for a, b in zip(mean, expected, strict=True)) > 1e-5:
            text = f"rank {rank} computed the mean {_vector(mean)}; it is {_vector(expected)}"
            remedy = "NCCL_P2P_DISABLE=1, NCCL_ALGO=Ring; a GPU or link may be faulty (dmesg)"
            return Finding("broken", text, remedy)
    shown = [f"rank {rank} gave {_vector(own)}" for rank, (own, _) in enumerate(facts)]
    if len(shown) > 4:
        shown[2:-1] = ["..."]
    return Finding("ok", f"{', '.join(shown)}; all got the mean {_vector(expected)}")


def _vector(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:g}' for value in values)}]"


def measure_speed(place: Place) -> Facts:
    """Seconds of exchanging many bytes and of exchanging one number, by kind; medians."""
    num_bytes = EXCHANGED[place.device.type]
    facts: Facts = {"bytes": num_bytes}
    many, one = _exchanges(place, num_bytes // 4), _exchanges(place, 1)
    for name in many:
        facts[name] = _seconds(many[name], place, most=10), _seconds(one[name], place, most=200)
    return facts


def _exchanges(place: Place, size: int) -> dict[str, Callable[[], Any]]:
    """Exchanges of so many float32 over all ranks; the all-gather is tried for its result."""
    num_ranks, device = place.ranks.num_ranks, place.device
    tensor = torch.zeros(size, device=device)
    part = torch.full((-(-size // num_ranks),), float(place.ranks.rank), device=device)
    whole = gather_into(torch.empty(len(part) * num_ranks, device=device), part)
    in_order = torch.arange(num_ranks, device=device).repeat_interleave(len(part))
    assert torch.equal(whole, in_order.float()), "all-gather gave other values than were sent"
    return {
        "all-reduce": lambda: sum_over_ranks(tensor),
        "all-gather": lambda: gather_into(whole, part),
    }


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
    texts = []
    for name, factor in (("all-reduce", 2), ("all-gather", 1)):
        many_s, one_s = (max(fact[name][i] for fact in facts) for i in (0, 1))
        bandwidth = num_bytes / many_s * factor * (num_ranks - 1) / num_ranks
        texts.append(f"{name} {bandwidth / 1e9:.2f} GB/s, {one_s * 1e6:.0f} µs")
    how = f"bus bandwidth as in nccl-tests, {num_bytes >> 20} MiB; latency of one number"
    return Finding("ok", f"{'; '.join(texts)} ({how})")


def measure_barrier(place: Place) -> tuple[float, float]:
    """Seconds of a barrier, and the deadline of a run's."""
    begun = time.perf_counter()
    place.ranks.barrier("doctor")
    return time.perf_counter() - begun, place.config.run.timeout


def judge_barrier(facts: list[tuple[float, float]]) -> Finding:
    seconds, timeout = max(took for took, _ in facts), facts[0][1]
    text = f"all {len(facts)} ranks came, in {seconds * 1e3:.1f} ms"
    return Finding("ok", f"{text}; a run names the missing rank after {timeout:g} s (--timeout)")


# The same fit on all ranks and on one


def measure_fit(place: Place) -> Facts:
    """Weights and seconds of a step, by DDP on all ranks and, on rank 0, by one process.

    Each rank alone sees another line; only the gradient's mean over all ranks leads to
    y = 2x + 3.
    """
    num_ranks, device = place.ranks.num_ranks, place.device
    size = max(2, SAMPLES[device.type] // num_ranks)

    def shard(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1, 1, size, dtype=torch.float64, device=device)[:, None]
        offset = (rank - (num_ranks - 1) / 2) / num_ranks
        return x, (2 + offset) * x + 3 + offset

    together = place.accelerator.prepare(_line(device))
    facts = {"ddp": _fit(together, [shard(place.ranks.rank)])}
    if place.ranks.is_main:  # the others wait for the judgement
        facts["alone"] = _fit(_line(device), [shard(rank) for rank in range(num_ranks)])
    return facts


def _line(device: torch.device) -> nn.Module:
    line = nn.Linear(1, 1, dtype=torch.float64, device=device)
    for parameter in line.parameters():
        nn.init.zeros_(parameter)
    return line


def _fit(model: nn.Module, shards: list[tuple[torch.Tensor, torch.Tensor]]) -> Facts:
    """Gradient descent from zero on the mean squared error, each shard a micro-batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=FIT_RATE)

    def step() -> None:
        for x, y in shards:
            loss = (model(x) - y).square().mean() / len(shards)
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
        if _distance(fitted, alone["weights"]) > 1e-6:
            text = f"rank {rank} fitted {_equation(fitted)} with DDP, one process alone "
            remedy = "TORCH_DISTRIBUTED_DEBUG=DETAIL; gradients are not averaged over all ranks"
            return Finding("broken", text + _equation(alone["weights"]), remedy)
    if _distance(alone["weights"], [2, 3]) > 1e-6:
        text = f"fitted {_equation(alone['weights'])}, which is not y = 2x + 3"
        return Finding("broken", text, "reinstall PyTorch; its arithmetic is wrong on this device")
    ddp_s, alone_s = max(fact["ddp"]["seconds"] for fact in facts), alone["seconds"]
    text = f"{_equation(alone['weights'])}, the same to 1e-6 on {len(facts)} ranks (a step "
    text += f"{ddp_s * 1e3:.1f} ms) and in one process with gradient accumulation "
    text += f"({alone_s * 1e3:.1f} ms): speed-up {alone_s / ddp_s:.2f}"
    return Finding("ok", text)


def _distance(these: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(these, others, strict=True))


def _equation(weights: Sequence[float]) -> str:
    return f"y = {weights[0]:.7g}x + {weights[1]:.7g}"


# bf16, disk, memory


def measure_bf16(place: Place) -> Facts:
    device, wanted = place.device, uses_bf16(place.config.model)
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return {"wanted": wanted, "error": None}
    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).to(device)
    exact, rounded = matrix @ matrix, (matrix.bfloat16() @ matrix.bfloat16()).float()
    return {"wanted": wanted, "error": ((rounded - exact).norm() / exact.norm()).item()}


def judge_bf16(facts: list[Facts]) -> Finding:
    wanted = facts[0]["wanted"]
    without = [r for r, f in enumerate(facts) if f["error"] is None or not f["error"] < BF16_ERROR]
    if without:
        text = f"does not work on {named(without)}, and this recipe "
        if wanted:
            return Finding("broken", f"{text}asks for it", "--mixed-precision no")
        return Finding("note", f"{text}does without (mixed_precision)")
    error = max(fact["error"] for fact in facts)
    text = f"works (a matrix product within {error:.1%} of fp32)"
    if wanted:
        return Finding("ok", f"{text}; this recipe uses it")
    return Finding("note", f"{text}, but this recipe computes in fp32 here (mixed_precision)")


def measure_disk(place: Place) -> Facts:
    """Speed and free bytes on each host's first rank; on all, whether rank 0's file is seen."""
    folder = (place.config.run.output_dir or Path("runs")).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    facts: Facts = {"host": platform.node(), "folder": str(folder), "there": str(there)}
    try:
        facts["sees"] = _show_a_file(there, place) if place.ranks.is_main else _look(there, place)
        if place.accelerator.local_process_index == 0:
            facts |= {"speed": _write_speed(there), "free": psutil.disk_usage(str(there)).free}
    except OSError as error:
        facts["error"] = error.strerror
    return facts


def _show_a_file(folder: Path, place: Place) -> bool:
    """Make a file, which is gone again when all other ranks have looked for it."""
    try:
        with NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            place.board.post("file", Path(file.name).name)
            for rank in range(1, place.ranks.num_ranks):
                place.board.read(f"rank {rank} looked", place.deadline_s)
    except OSError:
        place.board.post("file", "")  # there is nothing to look for
        raise
    return True


def _look(folder: Path, place: Place) -> bool:
    name = place.board.read("file", place.deadline_s)
    seen = not name
    for _ in range(10):  # network file systems show a new file a little late
        seen = seen or (folder / name).exists()
        if seen:
            break
        time.sleep(0.2)
    place.board.post(f"rank {place.ranks.rank} looked", True)
    return seen


def _write_speed(folder: Path) -> float:
    """Bytes per second, up to the disk itself."""
    block = os.urandom(1 << 20)
    with TemporaryFile(dir=folder) as file:  # has no name, so that nothing can be left behind
        begun = time.perf_counter()
        for _ in range(WRITTEN // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return WRITTEN / (time.perf_counter() - begun)


def judge_disk(facts: list[Facts]) -> Finding:
    for rank, fact in enumerate(facts):
        if "error" in fact:
            text = f"{fact['host']} (rank {rank}) cannot write in {fact['there']}"
            text += f", where {fact['folder']} would be made: {fact['error']}"
            return Finding("broken", text, "another --output-dir, or mend this folder")
    blind = [rank for rank, fact in enumerate(facts) if not fact["sees"]]
    if blind:
        other = facts[blind[0]]
        text = f"{named(blind)} on {other['host']} cannot see in {other['there']} the file that "
        text += f"rank 0 on {facts[0]['host']} made in {facts[0]['there']}"
        return Finding("broken", text, "an --output-dir in a folder that all hosts share")
    first = [fact for fact in facts if "speed" in fact]
    each = [
        f"{fact['host']}: {fact['speed'] / 1e6:.0f} MB/s with fsync, {fact['free'] / GIB:.1f} GiB "
        "free"
        for fact in first
    ]
    text = f"{'; '.join(each)}; in {facts[0]['there']}, for runs in {facts[0]['folder']}"
    if min(fact["free"] for fact in first) < GIB:
        return Finding("note", text, "freeing some space, or another --output-dir")
    return Finding("ok", text)


def measure_memory(place: Place) -> Facts:
    """Bytes that are free for this rank, and on rank 0 what a rank of this recipe needs."""
    if place.device.type == "cuda":
        torch.cuda.empty_cache()
        free = float(torch.cuda.mem_get_info(place.device)[0])
    else:
        share = psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free = min(share, memory_of_a_rank(place.config))
    facts: Facts = {"host": platform.node(), "free": free}
    if place.ranks.is_main:
        try:
            facts["need"] = sum(memory_per_rank(place.config).values())
        except UserError as error:
            facts["why"] = str(error)
    return facts


def judge_memory(facts: list[Facts]) -> Finding:
    least = min(range(len(facts)), key=lambda rank: facts[rank]["free"])
    text = f"{facts[least]['free'] / GIB:.1f} GiB free for each rank"
    if len(facts) > 1:
        text += f" (the least: rank {least} on {facts[least]['host']})"
    if "why" in facts[0]:
        return Finding("note", f"{text}; what the recipe needs is not known: {facts[0]['why']}")
    need = facts[0]["need"]
    text += f"; this recipe needs about {need / GIB:.1f} GiB"
    short = [rank for rank, fact in enumerate(facts) if fact["free"] < need]
    if short:
        remedy = f"{SMALLER}, or end what else runs there (nvidia-smi, top)"
        return Finding("broken", f"{named(short)} cannot hold it: {text}", remedy)
    return Finding("ok", text)
