"""The doctor's checks of each rank's machine: devices, versions, bf16, the folder of the runs.

A `measure_...` runs on one rank and returns plain values. Its `judge_...` makes one finding of the
values of all ranks, in order of ranks.
"""

from __future__ import annotations

import os
import platform
import time
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

from pipeline.doctor.table import Facts, Finding, Place, named, ranks_by_value
from pipeline.models.loading import uses_bf16


def measure_devices(place: Place) -> Facts:
    device, host = place.device, platform.node()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = str(getattr(properties, "uuid", device))
        return {"host": host, "device": properties.name, "gpu": gpu}
    return {"host": host, "device": f"CPU with {os.cpu_count()} cores", "gpu": ""}


def judge_devices(facts: list[Facts]) -> Finding:
    for (host, gpu), ranks in ranks_by_value([(f["host"], f["gpu"]) for f in facts]).items():
        if gpu and len(ranks) > 1:
            text = f"{named(ranks)} of {host} share one GPU ({facts[ranks[0]]['device']}, {gpu})"
            remedy = "a GPU for each rank: look at CUDA_VISIBLE_DEVICES and at --num-gpus"
            return Finding("broken", text, remedy)
    places = ranks_by_value([(f["host"], f["device"]) for f in facts])
    text = "; ".join(f"{host}: {named(ranks)} on {kind}" for (host, kind), ranks in places.items())
    if len({fact["gpu"] != "" for fact in facts}) > 1:
        remedy = "nvidia-smi on the host without one; its driver or its PyTorch may lack CUDA"
        return Finding("broken", f"some ranks have no GPU: {text}", remedy)
    return Finding("ok", text)


def measure_versions(place: Place) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("accelerate", "transformers"))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
    python = f"python {platform.python_version()}, torch {torch.__version__}"
    return f"{python}, {packages}, CUDA {torch.version.cuda}, NCCL {nccl}"


def judge_versions(facts: list[str]) -> Finding:
    by_version = ranks_by_value(facts)
    if len(by_version) == 1:
        return Finding("ok", facts[0])
    text = "; ".join(f"{named(ranks)}: {versions}" for versions, ranks in by_version.items())
    return Finding("broken", text, "pip install -c constraints.txt -e . on every host")


def measure_bf16(place: Place) -> tuple[bool, bool]:
    """Whether the recipe computes in bf16 here, and whether the device can."""
    can = place.device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    return uses_bf16(place.config.model), can


def judge_bf16(facts: list[tuple[bool, bool]]) -> Finding:
    wanted = facts[0][0]
    if wanted and (without := [rank for rank, (_, can) in enumerate(facts) if not can]):
        text = f"{named(without)} cannot compute in bf16, which this recipe uses"
        return Finding("broken", text, "--mixed-precision no")
    return Finding("ok", f"this recipe computes in {'bf16' if wanted else 'fp32'} here")


def measure_folder(place: Place) -> tuple[str, bool]:
    """The folder of the runs or its nearest parent, and whether a file of rank 0 is seen there."""
    wanted, ranks = (place.config.run.output_dir or Path("runs")).absolute(), place.ranks
    folder = next(path for path in (wanted, *wanted.parents) if path.exists())
    is_main = ranks.is_main
    with NamedTemporaryFile(dir=folder, prefix=".doctor-") if is_main else nullcontext() as file:
        name = ranks.all_gather_objects(Path(file.name).name if file else "", "folder")[0]
        until = time.monotonic() + 2  # network file systems show a new file a little late
        while not (sees := (folder / name).exists()) and time.monotonic() < until:
            time.sleep(0.2)
        ranks.barrier("folder")
    return f"{folder} on {platform.node()}", sees


def judge_folder(facts: list[tuple[str, bool]]) -> Finding:
    written = facts[0][0]
    for rank, (folder, sees) in enumerate(facts):
        if not sees:
            text = f"rank {rank} cannot see in {folder} the file that rank 0 made in {written}"
            return Finding("broken", text, "an --output-dir in a folder that all hosts share")
    return Finding("ok", f"every rank sees the files that rank 0 writes in {written}")
