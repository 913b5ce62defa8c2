"""`--doctor`: finds in under a minute the faults that would end a run after an hour.

Rank 0 prints one table, a row as soon as its check is done. A rank with an exception prints the row
of its check, and the doctor ends. If a check hangs, the watchdog names the rank, prints its stack
and ends the process.
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
from pipeline.doctor.checks import CHECKS, Check, Finding, Place
from pipeline.errors import UserError
from pipeline.files.untrusted import reason_of
from pipeline.models.loading import on_gpu

DEADLINE_S = 30.0  # of one check; the timeout of the run is used if it is shorter
SILENT_S = 5.0  # delay before a rank other than 0 reports that the ranks did not meet

Connect = Callable[[Config], tuple[Accelerator, Ranks]]


def main(
    config: Config,
    connect: Connect,
    checks: Sequence[Check] = CHECKS,
    deadline_s: float = DEADLINE_S,
) -> int:
    """Check this rank together with the others; 1 if anything is broken, else 0.

    `connect` is that of `pipeline.train`. Raises ToldElsewhere if another rank has reported.
    """
    timeout = min(deadline_s, config.run.timeout)
    run = config.run.model_copy(update={"timeout": timeout})
    rank, begun = int(os.environ.get("RANK", "0")), time.perf_counter()
    reports, names = rank == 0, ["connection", *(check.name for check in checks)]
    findings: list[Finding] = []
    if reports:
        print(f"doctor: recipe {config.recipe}; each check may take {timeout:g} s")
        print(f"{'check':<12}{'status':<8}finding", flush=True)
    try:
        for finding in _findings(config.model_copy(update={"run": run}), connect, checks):
            findings.append(finding)
            if reports:
                _print_row(names[len(findings) - 1], finding)
    except Interrupted:
        return 1
    except (ToldElsewhere, UserError):
        raise
    except Exception as error:
        reports, name, remedies = True, names[len(findings)], ["", *(c.remedy for c in checks)]
        if not findings and rank > 0:
            time.sleep(SILENT_S)  # if rank 0 has ended, the launcher ends this rank meanwhile
        text = f"rank {rank} on {platform.node()}: {type(error).__name__}: {reason_of(error)}"
        remedy = remedies[len(findings)] or links_remedy()
        if isinstance(error, torch.OutOfMemoryError):
            remedy = "ending what else uses this GPU (nvidia-smi)"
        findings.append(Finding("broken", text, remedy))
        _print_row(name, findings[-1])
    broken = [name for name, f in zip(names, findings, strict=False) if f.status == "broken"]
    if reports:
        verdict = f"broken: {', '.join(broken)}" if broken else "nothing is broken"
        left = f"; not checked: {', '.join(names[len(findings) :])}" * (len(findings) < len(names))
        print(f"doctor: {verdict}{left} (after {time.perf_counter() - begun:.0f} s)", flush=True)
    return int(bool(broken))


def _print_row(name: str, finding: Finding) -> None:
    """Print a row of the table; the remedy follows in its own line."""
    remedy = f"\n{'':20}try: {finding.remedy}" if finding.remedy else ""
    print(f"{name:<12}{finding.status:<8}{finding.text}{remedy}", flush=True)


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


def links_remedy() -> str:
    """The remedy if ranks do not reach each other."""
    gloo = "GLOO_SOCKET_IFNAME=eth0 (a name that `ip addr` shows) chooses the network interface"
    if not on_gpu():
        return f"{gloo}; every host must reach MASTER_ADDR (firewall, /etc/hosts)"
    return (
        "NCCL_DEBUG=INFO shows what NCCL tries; NCCL_SOCKET_IFNAME=eth0 chooses the network "
        "interface, GLOO_SOCKET_IFNAME=eth0 that of barriers; NCCL_IB_DISABLE=1 does without "
        "InfiniBand, NCCL_P2P_DISABLE=1 without direct copies between GPUs"
    )
