"""Measure the watchdog with many ranks: requests to the key-value store, and the time to a name.

Simulated ranks run the watchdog's own loop, each in a thread with a connection of its own to one
store. They have no signals, no sentinel and no work. Eight ranks say that they are one machine.
After the measurement, either the process of one rank ends, or a whole machine falls silent and all
other ranks wait for it. The script takes the seconds until a rank is named, and until all other
ranks have read the name.

A simulation has less CPU than so many machines, so `of 2 beats` says how many heartbeats a rank
really posted per second. A rank looks at the processes of its machine by `kill(pid, 0)`, which
takes less CPU than what psutil reads. `--against CHECKOUT` measures another version, too.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from common import ROOT, machine, write_json

RANKS_OF_A_MACHINE = 8
RANKS_OF_A_PROCESS = 256  # `select` takes no file descriptors above 1023
# Messages on the wire of torch 2.13: `get` and `multi_get` wait for the keys in a first message.
REQUESTS = {"set": 1, "check": 1, "compare_set": 1, "get": 2, "multi_get": 2}
FAULTS = {"killed": 1, "silent": RANKS_OF_A_MACHINE}  # numbers of ranks at fault
SPAWN = get_context("spawn")


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    where, figures = machine(), {}
    print("           requests/s   keys/s   of 2      store's   seconds to name   until all know")
    print("  ranks      per rank  per rank  beats    CPU s/s    killed  silent    killed  silent")
    for checkout in filter(None, [arguments.against, ROOT]):
        for num_ranks in arguments.ranks:
            found = measure(checkout, num_ranks, arguments)
            kind = "" if checkout == ROOT else "against/"
            figures |= {f"{kind}{num_ranks}/{name}": value for name, value in found.items()}
            show(f"{num_ranks}{' (against)' if kind else ''}", found)
    print(f"the deadline is {arguments.timeout:g} s")
    write_json(arguments.json, figures, where, vars(arguments))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ranks", type=int, nargs="+", default=[16, 128, 1024])
    made.add_argument("--seconds", type=float, default=20, help="during which requests are counted")
    made.add_argument("--timeout", type=float, default=20, help="the deadline in seconds")
    made.add_argument("--patience", type=float, default=60, help="seconds to wait for a name")
    made.add_argument("--against", type=Path, help="a checkout of another version")
    made.add_argument("--json", type=Path, help="write the figures here as well")
    return made


def show(name: str, found: dict[str, float]) -> None:
    cells = f"{found['requests']:>11.1f}{found['keys']:>10.0f}{found['beats']:>7.2f}"
    cells += f"{found['store_cpu']:>11.3f}  "
    for moment in ("named_s", "known_s"):
        for fault in FAULTS:
            seconds = found[f"{fault}_{moment}"]
            cells += f"{'never' if math.isnan(seconds) else f'{seconds:.1f}':>8}"
        cells += "  "
    print(f"  {name:<12}{cells}", flush=True)


def measure(checkout: Path, num_ranks: int, arguments: argparse.Namespace) -> dict[str, float]:
    found: dict[str, float] = {}
    for fault in FAULTS:
        found |= play(checkout, num_ranks, fault, arguments)
    return found


def play(
    checkout: Path, num_ranks: int, fault: str, arguments: argparse.Namespace
) -> dict[str, float]:
    """Start a store and the simulated ranks, count requests, then make the fault."""
    parts = [
        range(first, min(first + RANKS_OF_A_PROCESS, num_ranks))
        for first in range(0, num_ranks, RANKS_OF_A_PROCESS)
    ]
    store = Process(serve)
    port = store.ask()
    settings = (str(checkout), num_ranks, port, arguments.timeout)
    drivers = [Process(drive, part, *settings) for part in parts]
    try:
        for driver in drivers:
            driver.ask()  # all ranks are there
        time.sleep(2)
        begun, cpu_s = [driver.ask("count") for driver in drivers], store.cpu_s()
        time.sleep(arguments.seconds)
        ended, cpu_s = [driver.ask("count") for driver in drivers], store.cpu_s() - cpu_s
        rates = rates_of(begun, ended, num_ranks)
        at = drivers[-1].ask(fault)  # of the last rank or the last machine
        for driver in drivers:
            driver.ask(f"others of {fault}")
        moments = wait_for_names(drivers, at + arguments.patience)
    finally:
        for process in [*drivers, store]:
            process.end()
    seconds = {"named_s": min(moments) - at, "known_s": max(moments) - at}
    rates["store_cpu"] = cpu_s / arguments.seconds
    return rates | {f"{fault}_{name}": value for name, value in seconds.items()}


def rates_of(begun: list[Any], ended: list[Any], num_ranks: int) -> dict[str, float]:
    """Requests, keys and heartbeats, each per second and rank."""
    totals: Counter[str] = Counter()
    for (before, at), (after, until) in zip(begun, ended, strict=True):
        for name in after:
            totals[name] += (after[name] - before.get(name, 0)) / (until - at)
    return {
        "requests": sum(totals[name] * count for name, count in REQUESTS.items()) / num_ranks,
        "keys": totals["keys"] / num_ranks,
        "beats": totals["set"] / num_ranks,
    }


def wait_for_names(drivers: list[Process], until: float) -> list[float]:
    """When each rank read the fault, by the monotonic clock; nan for a rank that never did."""
    while True:
        moments = [moment for driver in drivers for moment in driver.ask("names")]
        if not any(math.isnan(moment) for moment in moments) or time.monotonic() > until:
            known = [moment for moment in moments if not math.isnan(moment)]
            return known if len(known) == len(moments) else [*known[:1], math.nan]
        time.sleep(0.2)


class Process:
    """A new process that runs `function(pipe, *arguments)`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=function, args=(theirs, *arguments), daemon=True)
        self.process.start()

    def ask(self, question: str = "") -> Any:
        if question:
            self.pipe.send(question)
        return self.pipe.recv()

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def end(self) -> None:
        children = psutil.Process(self.process.pid).children()
        self.process.kill()
        self.process.join()
        for child in children:
            child.kill()


def serve(pipe: Any) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def drive(
    pipe: Any, part: range, checkout: str, num_ranks: int, port: int, timeout_s: float
) -> None:
    """Run the ranks of `part`, and answer the questions of `play`."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # no lines about host names
    sys.path.insert(0, checkout)
    counts: Counter[str] = Counter()
    ranks = simulate(part, num_ranks, port, timeout_s, counts)
    for rank in ranks:
        rank.start()
    threading.Thread(target=work, args=(ranks,), daemon=True).start()
    pipe.send("ready")
    while True:
        question = pipe.recv()
        if question == "count":
            pipe.send((dict(counts), time.monotonic()))
        elif question == "names":
            pipe.send([rank.told_at for rank in ranks if rank.is_running])
        elif question in FAULTS:
            pipe.send(time.monotonic())
            for rank in ranks[-FAULTS[question] :]:
                rank.stop()
        else:
            for rank in ranks:
                rank.ranks.waits_for = "update" if question == "others of silent" else ""
            pipe.send("waiting")


def work(ranks: list[Any]) -> None:
    while True:
        for rank in ranks:
            if not rank.ranks.waits_for:
                rank.ranks.alive()
        time.sleep(0.5)


def simulate(
    part: range, num_ranks: int, port: int, timeout_s: float, counts: Counter[str]
) -> list[Any]:
    """Return ranks of which each can `start()` the watchdog's loop and `stop()` it."""
    import torch.distributed as dist

    from pipeline.distributed import watchdog
    from pipeline.distributed.ranks import Ranks

    pids: dict[threading.Thread, int] = {}
    nothing = open(os.devnull, "wb")  # noqa: SIM115

    class Store:
        """Counts requests and keys."""

        def __init__(self) -> None:
            self.client = dist.TCPStore("127.0.0.1", port, is_master=False)

        def __getattr__(self, name: str) -> Any:
            def ask(*arguments: Any) -> Any:
                keys = arguments[0]
                counts[name] += 1
                counts["keys"] += len(keys) if name in ("check", "multi_get") else 1
                return getattr(self.client, name)(*arguments)

            return ask

    class Seen:
        """Stands for psutil.Process."""

        def __init__(self, pid: int) -> None:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                raise psutil.NoSuchProcess(pid) from None

        def status(self) -> str:
            return psutil.STATUS_RUNNING

    class SimulatedRanks(Ranks):
        def __init__(self, rank: int) -> None:
            super().__init__(rank, 1, timeout_s)
            self.num_ranks = num_ranks

        def connect_to_store(self) -> Any:
            return clients.pop()

    class SimulatedRank(watchdog.Watchdog):
        told_at, is_running = math.nan, True

        def __init__(self, rank: int) -> None:
            os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_OF_A_MACHINE)
            os.environ["LOCAL_RANK"] = str(rank % RANKS_OF_A_MACHINE)
            self.ranks = SimulatedRanks(rank)
            super().__init__(self.ranks, timeout_s)
            self._thread.name = f"machine-{rank // RANKS_OF_A_MACHINE}"
            self._sentinel = SimpleNamespace(stdin=nothing)
            self._signals, self._wakeup = socket.socketpair()

        def start(self) -> None:
            if self.ranks.rank == num_ranks - 1:  # the rank that is killed
                self.child = subprocess.Popen(["sleep", "600"])
                pids[self._thread] = self.child.pid
            self._looked_at = time.monotonic()
            self._thread.start()

        def stop(self) -> None:
            self.is_running = False
            if self._thread in pids:
                self.child.kill()
                self.child.wait()
            self._wakeup.send(b"\0")
            self._thread.join()

        def _end(self) -> None:
            if math.isnan(self.told_at):
                self.told_at = time.monotonic()

    watchdog.psutil = SimpleNamespace(  # type: ignore[assignment]
        Process=Seen, NoSuchProcess=psutil.NoSuchProcess, STATUS_ZOMBIE=psutil.STATUS_ZOMBIE
    )
    with ThreadPoolExecutor(64) as pool:  # a connection may wait for a name server
        clients = list(pool.map(lambda _: Store(), part))
    own_pid = os.getpid()
    platform.node = lambda: threading.current_thread().name
    os.getpid = lambda: pids.get(threading.current_thread(), own_pid)
    return [SimulatedRank(rank) for rank in part]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
