"""`--doctor`: checks of the ranks, their versions, their links, and of the folder of the runs.

Each rank runs the `measure_...` function of a check. The `judge_...` function of the check gets the
values of all ranks, in order of ranks, and returns one Finding. Rank 0 prints the Finding as a row
of a table. A rank that raises an exception also prints a row.
"""

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator

from pipeline.checkpoints.resume import sees_folder_of_rank_0
from pipeline.common.errors import RunError, UserError
from pipeline.common.untrusted import reason_of
from pipeline.config.settings import Config
from pipeline.distributed.connect import connect
from pipeline.distributed.devices import on_gpu
from pipeline.distributed.ranks import Interrupted, Ranks, sum_over_ranks
from pipeline.distributed.watchdog import ToldElsewhere, Watchdog

TIMEOUT_S = 30.0  # maximum time of a check, unless `--timeout` is shorter
SILENT_S = 5.0  # delay before a rank other than 0 reports that the ranks did not connect
REDUCED = {"cpu": 16 << 20, "cuda": 256 << 20}  # bytes of the all-reduce
FAULTY = "NCCL_P2P_DISABLE=1, NCCL_ALGO=Ring; a GPU or link may be faulty (dmesg)"
INSTALL = "pip install -c constraints.txt -e . on every host"
FOLDER = "another --output-dir; df -h and mount show what is there"
Measured = dict[str, Any]


class Finding(NamedTuple):
    status: Literal["ok", "broken"]
    text: str
    remedy: str = ""


class Check(NamedTuple):
    name: str
    measure: Callable[[Config, Accelerator, Ranks], Any]
    judge: Callable[[list[Any]], Finding]
    remedy: str = ""  # advice after an exception; if empty, `links_remedy()` is printed


def ranks_in_words(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _ranks_by_value(values: Sequence[Any]) -> dict[Any, list[int]]:
    return {value: [rank for rank, v in enumerate(values) if v == value] for value in values}


def measure_devices(_: Config, accelerator: Accelerator, ranks: Ranks) -> Measured:
    values = {"host": platform.node(), "device": f"CPU with {os.cpu_count()} cores", "gpu": ""}
    if accelerator.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(accelerator.device)
        values |= {"device": gpu.name, "gpu": str(getattr(gpu, "uuid", accelerator.device))}
    return values


def judge_devices(values: list[Measured]) -> Finding:
    for (host, gpu), ranks in _ranks_by_value([(v["host"], v["gpu"]) for v in values]).items():
        if gpu and len(ranks) > 1:
            device = values[ranks[0]]["device"]
            text = f"{ranks_in_words(ranks)} of {host} share one GPU ({device}, {gpu})"
            return Finding(
                "broken",
                text,
                "a GPU for each rank: look at CUDA_VISIBLE_DEVICES and at --num-gpus",
            )
    devices = _ranks_by_value([(v["host"], v["device"]) for v in values]).items()
    text = "; ".join(
        f"{host}: {ranks_in_words(ranks)} on {device}" for (host, device), ranks in devices
    )
    if len({value["gpu"] != "" for value in values}) > 1:
        return Finding(
            "broken",
            f"some ranks have no GPU: {text}",
            "nvidia-smi on the host without one; its driver or its PyTorch may lack CUDA",
        )
    return Finding("ok", text)


def measure_versions(*_: object) -> str:
    names = ["accelerate", "transformers", *(["vllm"] if find_spec("vllm") else [])]
    packages = ", ".join(f"{name} {version(name)}" for name in names)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
    python = f"python {platform.python_version()}, torch {torch.__version__}"
    return f"{python}, {packages}, CUDA {torch.version.cuda}, NCCL {nccl}"


def judge_versions(values: list[str]) -> Finding:
    by_version = _ranks_by_value(values)
    text = "; ".join(
        f"{ranks_in_words(ranks)}: {versions}" for versions, ranks in by_version.items()
    )
    return Finding("broken", text, INSTALL) if len(by_version) > 1 else Finding("ok", values[0])


def measure_all_reduce(_: Config, accelerator: Accelerator, ranks: Ranks) -> Measured:
    """Add `rank + 1` up over the ranks; returns whether the sum is right, and the seconds."""
    device = accelerator.device
    size = REDUCED[device.type]
    values: Measured = {}
    for _number in range(2 if ranks.num_ranks > 1 else 0):  # the first one connects the ranks
        own = torch.full((size // 4,), ranks.rank + 1.0, device=device)
        begun = time.perf_counter()
        total = sum_over_ranks(own)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        values = {"seconds": time.perf_counter() - begun, "bytes": size}
        values["is_right"] = bool((total == ranks.num_ranks * (ranks.num_ranks + 1) / 2).all())
    return values


def judge_all_reduce(values: list[Measured]) -> Finding:
    if len(values) == 1:
        return Finding("ok", "one rank: there is nothing to exchange")
    if wrong := [rank for rank, value in enumerate(values) if not value["is_right"]]:
        return Finding("broken", f"{ranks_in_words(wrong)} computed a wrong sum", FAULTY)
    seconds = max(value["seconds"] for value in values)
    size = values[0]["bytes"]
    # Twice round the ring: the bus bandwidth of NCCL's tests, and `--plan-bandwidth`.
    sent = 2 * (len(values) - 1) / len(values) * size
    text = f"{len(values)} ranks added {size / 1e6:.0f} MB up in {1e3 * seconds:.1f} ms"
    return Finding("ok", f"{text} (each sent {sent / 1e9 / seconds:.2f} GB/s)")


def measure_folder(config: Config, _: Accelerator, ranks: Ranks) -> tuple[str, str, bool]:
    """Return this host, a folder of rank 0, and whether this rank sees what rank 0 writes there."""
    return platform.node(), *sees_folder_of_rank_0(config.run.output_dir or Path("runs"), ranks)


def judge_folder(values: list[tuple[str, str, bool]]) -> Finding:
    host, folder, _ = values[0]
    for rank, (other, _, sees) in enumerate(values):
        if not sees:
            text = f"rank {rank} on {other} cannot see {folder} of rank 0 on {host}"
            return Finding("broken", text, "a folder that all hosts share as --output-dir")
    return Finding("ok", f"every rank sees the files that rank 0 writes in {folder} on {host}")


CHECKS = (
    Check("devices", measure_devices, judge_devices, "nvidia-smi on every host"),
    Check("versions", measure_versions, judge_versions, INSTALL),
    Check("all-reduce", measure_all_reduce, judge_all_reduce),
    Check("folder", measure_folder, judge_folder, FOLDER),
)


def main(config: Config, checks: Sequence[Check] = CHECKS, timeout_s: float = TIMEOUT_S) -> int:
    """Run the checks together with the other ranks; returns 1 if anything is broken, else 0."""
    timeout_s = min(timeout_s, config.run.timeout)
    config = config.changed("run", timeout=timeout_s)
    rank = int(os.environ.get("RANK", "0"))
    begun = time.perf_counter()
    reports = rank == 0
    left = {"connection": "", **{check.name: check.remedy for check in checks}}  # remedies
    broken = list[str]()
    if reports:
        print(f"doctor: recipe {config.recipe}; each check may take {timeout_s:g} s")
        print(f"{'check':<12}{'status':<8}finding", flush=True)
    try:
        for name, finding in zip([*left], _findings(config, checks), strict=True):
            del left[name]
            if finding.status == "broken":
                broken.append(name)
            if reports:
                _print_row(name, finding)
    except Interrupted:
        return 1
    except (ToldElsewhere, UserError):
        raise
    except Exception as error:
        reports = True
        name = next(iter(left), "end")
        if name == "connection" and rank > 0:
            time.sleep(SILENT_S)  # if rank 0 has ended, the launcher ends this rank
        text = f"rank {rank} on {platform.node()}: {type(error).__name__}: {reason_of(error)}"
        remedy = left.pop(name, "") or links_remedy()
        if isinstance(error, RunError):  # of `meeting`, whose line has the rank and a remedy
            text, _, remedy = str(error).removeprefix("connection: ").partition("; ")
        if isinstance(error, torch.OutOfMemoryError):
            remedy = "ending what else uses this GPU (nvidia-smi)"
        broken.append(name)
        _print_row(name, Finding("broken", text, remedy))
    if reports:
        verdict = f"broken: {', '.join(broken)}" if broken else "nothing is broken"
        verdict += f"; not checked: {', '.join(left)}" * bool(left)
        print(f"doctor: {verdict} (after {time.perf_counter() - begun:.0f} s)", flush=True)
    return int(bool(broken))


def _print_row(name: str, finding: Finding) -> None:
    remedy = f"\n{'':20}try: {finding.remedy}" if finding.remedy else ""
    print(f"{name:<12}{finding.status:<8}{finding.text}{remedy}", flush=True)


def _findings(config: Config, checks: Sequence[Check]) -> Iterator[Finding]:
    begun = time.perf_counter()
    accelerator, ranks = connect(config)
    seconds = time.perf_counter() - begun
    backend = "NCCL" if on_gpu() else "gloo"
    met = f"{ranks.num_ranks} ranks met in {seconds:.1f} s; they exchange over {backend}"
    yield Finding("ok", met if ranks.num_ranks > 1 else "one rank, which needs none")
    with Watchdog(ranks, config.run.timeout) as watchdog:
        for check in checks:
            watchdog.advice = f"; try: {check.remedy or links_remedy()}"
            ranks.agree(check.name)
            with ranks.phase(check.name):
                measured = check.measure(config, accelerator, ranks)
                values = ranks.all_gather_objects(measured, check.name)
            yield check.judge(values)
        ranks.barrier("end")


def links_remedy() -> str:
    gloo = "GLOO_SOCKET_IFNAME=eth0 (a name that `ip addr` shows) chooses the network interface"
    if not on_gpu():
        return f"{gloo}; every host must reach MASTER_ADDR (firewall, /etc/hosts)"
    return (
        "NCCL_DEBUG=INFO shows what NCCL tries; NCCL_SOCKET_IFNAME=eth0 chooses the network "
        "interface, GLOO_SOCKET_IFNAME=eth0 that of barriers; NCCL_IB_DISABLE=1 does without "
        "InfiniBand, NCCL_P2P_DISABLE=1 without direct copies between GPUs"
    )
