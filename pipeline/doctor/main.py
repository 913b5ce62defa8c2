"""`--doctor`: finds in under a minute what would otherwise end a run after an hour.

Rank 0 prints one table, a row as soon as its check is done. A rank that raises prints the row of
its check, and the doctor ends. A check that hangs is ended by the watchdog of a run, which names
the rank and prints its stack.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from accelerate import Accelerator

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Interrupted, Ranks
from pipeline.distributed.watchdog import ToldElsewhere, Watchdog
from pipeline.doctor import links, machine
from pipeline.doctor.table import Check, Finding, Place, row
from pipeline.errors import UserError
from pipeline.files.untrusted import reason_of
from pipeline.models.loading import on_gpu

DEADLINE_S = 30.0  # of one check, if the run's own is not shorter
SILENT_S = 5.0  # until another rank than 0 reports that it did not meet the others

INSTALL = "pip install -c constraints.txt -e . on every host"
FOLDER = "another --output-dir; df -h and mount show what is there"
CHECKS = (
    Check("devices", machine.measure_devices, machine.judge_devices, "nvidia-smi on every host"),
    Check("versions", machine.measure_versions, machine.judge_versions, INSTALL),
    Check("all-reduce", links.measure_all_reduce, links.judge_all_reduce, needs_links=True),
    Check("barrier", links.measure_barrier, links.judge_barrier, needs_links=True),
    Check("DDP", links.measure_fit, links.judge_fit, needs_links=True),
    Check("bf16", machine.measure_bf16, machine.judge_bf16, "--mixed-precision no"),
    Check("folder", machine.measure_folder, machine.judge_folder, FOLDER),
)
Connect = Callable[[Config], tuple[Accelerator, Ranks]]


def main(
    config: Config,
    connect: Connect,
    checks: Sequence[Check] = CHECKS,
    deadline_s: float = DEADLINE_S,
) -> int:
    """Check this rank together with the others; 1 where anything is broken, else 0.

    `connect` is that of `pipeline.train`. Raises ToldElsewhere where another rank has reported.
    """
    timeout = min(deadline_s, config.run.timeout)
    run = config.run.model_copy(update={"timeout": timeout})
    rank, begun = int(os.environ.get("RANK", "0")), time.perf_counter()
    findings: dict[str, Finding] = {}
    if rank == 0:
        print(f"doctor: recipe {config.recipe}; each check may take {timeout:g} s")
        print(f"{'check':<12}{'status':<8}finding", flush=True)
    reports, names = rank == 0, ["connection", *(check.name for check in checks)]
    try:
        for finding in _findings(config.model_copy(update={"run": run}), connect, checks):
            name = names[len(findings)]
            findings[name] = finding
            if reports:
                print(row(name, finding), flush=True)
    except Interrupted:
        return 1
    except (ToldElsewhere, UserError):
        raise
    except Exception as error:
        reports, name = True, names[len(findings)]
        if not findings and rank > 0:
            time.sleep(SILENT_S)  # the launcher ends this rank meanwhile, if rank 0 has ended
        findings[name] = _failure(error, rank, next((c for c in checks if c.name == name), None))
        print(row(name, findings[name]), flush=True)
    broken = [name for name, finding in findings.items() if finding.status == "broken"]
    if reports:
        verdict = f"broken: {', '.join(broken)}" if broken else "nothing is broken"
        left = f"; not checked: {', '.join(names[len(findings) :])}" * (len(findings) < len(names))
        print(f"doctor: {verdict}{left} (after {time.perf_counter() - begun:.0f} s)", flush=True)
    return int(bool(broken))


def _findings(config: Config, connect: Connect, checks: Sequence[Check]) -> Iterator[Finding]:
    """The finding of the connection, then that of each check, the same on all ranks."""
    begun = time.perf_counter()
    accelerator, ranks = connect(config)
    place = Place(config=config, accelerator=accelerator, ranks=ranks)
    seconds, backend = time.perf_counter() - begun, "NCCL" if on_gpu() else "gloo"
    met = f"{ranks.num_ranks} ranks met in {seconds:.1f} s; they exchange over {backend}"
    yield Finding("ok", met if ranks.num_ranks > 1 else "one rank, which needs none")
    with Watchdog(ranks, config.run.timeout) as watchdog:
        for check in checks:
            watchdog.advice = f"; try: {check.remedy or links_remedy()}"
            ranks.agree(check.name)
            if check.needs_links and ranks.num_ranks == 1:
                yield Finding("note", "one rank: there is nothing to exchange")
                continue
            with ranks.phase(check.name):
                facts = ranks.all_gather_objects(check.measure(place), check.name)
            yield check.judge(facts)
        ranks.barrier("end")


def _failure(error: Exception, rank: int, check: Check | None) -> Finding:
    text = f"rank {rank} on {platform.node()}: {type(error).__name__}: {reason_of(error)}"
    if isinstance(error, torch.OutOfMemoryError):
        return Finding("broken", text, "ending what else uses this GPU (nvidia-smi)")
    return Finding("broken", text, check.remedy if check and check.remedy else links_remedy())


def links_remedy() -> str:
    """What to try when ranks do not reach each other."""
    gloo = "GLOO_SOCKET_IFNAME=eth0 (a name that `ip addr` shows) chooses the network interface"
    if not on_gpu():
        return f"{gloo}; every host must reach MASTER_ADDR (firewall, /etc/hosts)"
    return (
        "NCCL_DEBUG=INFO shows what NCCL tries; NCCL_SOCKET_IFNAME=eth0 chooses the network "
        "interface, GLOO_SOCKET_IFNAME=eth0 that of barriers; NCCL_IB_DISABLE=1 does without "
        "InfiniBand, NCCL_P2P_DISABLE=1 without direct copies between GPUs"
    )
