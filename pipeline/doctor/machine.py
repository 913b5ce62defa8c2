"""The doctor's checks of each rank's machine: devices, versions, bf16, disk, memory.

A `measure_...` runs on one rank and returns plain values; whatever it raises is that rank's
failure. Its `judge_...` makes one finding of the measurements of all ranks, in order of ranks.
"""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile

import psutil
import torch

from pipeline.doctor.table import Facts, Finding, Place, named, who_has
from pipeline.errors import UserError
from pipeline.models.loading import uses_bf16
from pipeline.preflight.memory import GIB, memory_of_a_rank, memory_per_rank

SMALLER = "a smaller model, max_live_episodes or max_tokens_per_microbatch"
WRITTEN = 64 << 20  # bytes
BF16_ERROR = 0.01  # rounding to 8 bits costs about 0.003


def measure_devices(place: Place) -> Facts:
    device = place.device
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = str(getattr(properties, "uuid", device))
        return {"host": platform.node(), "device": properties.name, "gpu": gpu}
    threads = "1 thread" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"
    name = f"CPU ({platform.machine()}, {os.cpu_count()} cores, {threads})"
    return {"host": platform.node(), "device": name, "gpu": ""}


def judge_devices(facts: list[Facts]) -> Finding:
    places = who_has([(fact["host"], fact["device"]) for fact in facts])
    for (host, gpu), ranks in who_has([(fact["host"], fact["gpu"]) for fact in facts]).items():
        if gpu and len(ranks) > 1:
            name = facts[ranks[0]]["device"]
            return Finding(
                "broken",
                f"{named(ranks)} of {host} share one GPU ({name}, {gpu})",
                "a GPU for each rank: look at CUDA_VISIBLE_DEVICES and at --num-gpus",
            )
    kinds = {fact["gpu"] != "" for fact in facts}
    parts = [f"{host}: {named(ranks)}, each on {dev}" for (host, dev), ranks in places.items()]
    if len(kinds) > 1:
        remedy = "nvidia-smi on the host without one; its driver or its PyTorch may lack CUDA"
        return Finding("broken", f"some ranks have no GPU: {'; '.join(parts)}", remedy)
    return Finding(
        "ok", "; ".join(parts).replace(", each on", " on" if len(facts) == 1 else ", each on")
    )


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
        ranks_of = who_has([fact[name] for fact in facts])
        if len(ranks_of) > 1:
            each = (f"{value} on {named(ranks)}" for value, ranks in ranks_of.items())
            different.append(f"{name} is {', '.join(each)}")
    if different:
        return Finding(
            "broken",
            "; ".join(different),
            "the same versions on every host: pip install -c constraints.txt -e .",
        )
    text = ", ".join(f"{name} {value}" for name, value in facts[0].items())
    return Finding("ok", text + ("; the same on all ranks" if len(facts) > 1 else ""))


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
        return Finding("note", f"{text}does without (--mixed-precision)")
    error = max(fact["error"] for fact in facts)
    text = f"works (a matrix product within {error:.1%} of fp32)"
    if wanted:
        return Finding("ok", f"{text}; this recipe uses it")
    return Finding("note", f"{text}, but this recipe computes in fp32 here (--mixed-precision)")


def measure_disk(place: Place) -> Facts:
    """Speed and free bytes on each host's first rank; on all, whether rank 0's file is seen."""
    folder = (place.config.run.output_dir or Path("runs")).absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    facts: Facts = {"host": platform.node(), "folder": str(folder), "there": str(there)}
    try:
        facts["sees"] = _show_a_file(there, place) if place.ranks.is_main else _look(there, place)
        if place.accelerator.local_process_index == 0:
            facts |= {"speed": _write_speed(there), "free": psutil.disk_usage(str(there)).free}
    except OSError as error:
        facts["error"] = error.strerror or str(error)
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
            text += f" (for {fact['folder']}): {fact['error']}"
            return Finding("broken", text, "another --output-dir, or mend this folder")
    blind = [rank for rank, fact in enumerate(facts) if not fact["sees"]]
    if blind:
        other = facts[blind[0]]
        text = f"{named(blind)} on {other['host']} cannot see in {other['there']} the file that "
        text += f"rank 0 on {facts[0]['host']} made in {facts[0]['there']}"
        return Finding("broken", text, "an --output-dir in a folder that all hosts share")
    first = [fact for fact in facts if "speed" in fact]
    each = [
        f"{fact['host']}: {fact['speed'] / 1e6:.0f} MB/s ({WRITTEN >> 20} MiB with fsync), "
        f"{fact['free'] / GIB:.1f} GiB free"
        for fact in first
    ]
    folder, there = facts[0]["folder"], facts[0]["there"]
    text = f"{'; '.join(each)}; in {there}" + ("" if there == folder else f", for {folder}")
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
    has = f"has {facts[least]['free'] / GIB:.1f} GiB free"
    if len(facts) > 1:
        has += f" or more (least: rank {least} on {facts[least]['host']})"
    if "why" in facts[0]:
        text = f"each rank {has}; what the recipe needs is not known: {facts[0]['why']}"
        return Finding("note", text)
    need = facts[0]["need"]
    text = f"each rank needs about {need / GIB:.1f} GiB for this recipe and {has}"
    short = [rank for rank, fact in enumerate(facts) if fact["free"] < need]
    if short:
        remedy = f"{SMALLER}, or end what else runs there (nvidia-smi, top)"
        return Finding("broken", f"too little on {named(short)}: {text}", remedy)
    return Finding("ok", text)
