"""Faults of two machines, which are two network namespaces, for `chaos.py --machines 2`.

One torchrun on each machine starts its ranks; both machines see the run folder. The
faults are SIGKILL of a rank, of a launcher, or of all processes of a machine; a link that is down;
and a machine whose processes all stop (SIGSTOP). The last two last longer than `--timeout`; then
the link is up again, or the processes go on. Faults of a machine and of the link come when all
ranks have their watchdog.

After each fault, a line names the host and a rank of the machine at fault within `--timeout` + 5 s,
before any line names another rank. If the link is down, each machine names the other one. All
processes of both machines end. With `--max-restarts 2`, a rank is killed and the launchers bring
the run to its end by themselves. After a link that is down, or a pause, of less than half of
`--timeout`, the run goes on as if nothing had been.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil

from scripts.bench.common import ROOT
from scripts.proofs.chaos import OneMachine, Processes, ranks_of
from scripts.proofs.machines import Machines, launchers, two_machines

__all__ = ["TwoMachines", "two_machines"]

RESTARTED = "rank, restarted"
SHORT = ("short link", "short pause")  # less than half the deadline
SLACK_S = 5.0  # seconds after the deadline in which host and rank must be named
NAMED = re.compile(
    r"rank (\d+) on (\S+) \([^)]+\) "
    r"(?:exited|did not come|hangs in|or its launcher has ended|is down or cut off)"
)


class TwoMachines(OneMachine):
    """Two machines with a launcher on each, which start `per_machine` ranks each."""

    kinds = ("one rank", "launcher", "machine", "link", "pause", RESTARTED, *SHORT)

    def __init__(
        self, random: Random, machines: Machines, per_machine: int, timeout_s: float
    ) -> None:
        super().__init__(random)
        self.machines, self.per_machine, self.timeout_s = machines, per_machine, timeout_s

    def start(self, flags: Sequence[str], log: Path, kind: str) -> Processes:
        run = [str(ROOT / "pipeline" / "run.py"), *flags]
        commands = launchers("static", self.machines, self.per_machine, run)
        logs = _logs(log)
        for command in commands if kind == RESTARTED else []:
            command[3:3] = ["--max-restarts", "2"]
        return [self.machines.start(number, commands[number], logs[number]) for number in range(2)]

    def kill(self, kind: str, launchers: Processes, log: Path) -> bool:
        found = [self._processes(number) for number in range(2)]
        if any(launcher.poll() is not None for launcher in launchers):
            return False
        ranks = [ranks_of(psutil.Process(launcher.pid)) for launcher in launchers]
        is_watched = _sentinels(found) == 2 * self.per_machine
        if not all(ranks) or not (is_watched or kind in ("one rank", "launcher")):
            return False
        at, size = self.random.randrange(2), self.per_machine
        victims = found[at]
        if kind == "launcher":
            victims = [psutil.Process(launchers[at].pid)]
        culprits = {str(rank) for rank in range(at * size, (at + 1) * size)}
        if kind in ("one rank", RESTARTED):
            victims = [self.random.choice(ranks[at])]
            try:
                culprits = {victims[0].environ()["RANK"]}
            except psutil.NoSuchProcess:
                return False
        before, begun = [log.stat().st_size for log in _logs(log)], time.perf_counter()
        is_link, is_pause = kind.endswith("link"), kind.endswith("pause")
        if is_link:
            self.machines.set_link(at, "down")
        else:
            _send(signal.SIGSTOP if is_pause else signal.SIGKILL, victims)
        if is_watched and kind not in SHORT:
            self._check_names(kind, at, culprits, _logs(log), before)
        lasts_s = self.timeout_s + 1 + self.random.uniform(0, 5)
        if kind in SHORT:
            lasts_s = self.random.uniform(1, self.timeout_s / 2)
        if is_link or is_pause:
            time.sleep(max(0.0, begun + lasts_s - time.perf_counter()))
        if is_link:
            self.machines.set_link(at, "up")
        if is_pause:
            _send(signal.SIGCONT, victims)
        if kind in (RESTARTED, *SHORT):  # the run goes on by itself
            self.tally.kills[kind] += 1
            if any(codes := [launcher.wait() for launcher in launchers]):
                self.tally.faults.append(f"{kind}: exit codes {codes}:\n{log.read_text()[-4000:]}")
            return True
        self.count_ends(kind, begun, [*found[0], *found[1]])
        return True

    def _processes(self, number: int) -> list[psutil.Process]:
        found = []
        for pid in self.machines.processes(number):
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def _check_names(
        self, kind: str, at: int, culprits: set[str], logs: list[Path], before: list[int]
    ) -> None:
        """Wait for the line that names the rank at fault and its host, in time."""
        size = self.per_machine
        what = f"{kind} at {self.machines.names[at]}, ranks {sorted(culprits)}"
        expected = dict.fromkeys(range(2), (at, culprits))  # host and ranks to name
        if kind == "link":
            of = [{str(number * size + rank) for rank in range(size)} for number in range(2)]
            expected = {number: (1 - number, of[1 - number]) for number in range(2)}
        begun, named = time.perf_counter(), dict[int, str]()
        while len(named) < (2 if kind == "link" else 1):
            if time.perf_counter() - begun > self.timeout_s + SLACK_S:
                said = "\n".join(_since(*log)[-3000:] for log in zip(logs, before, strict=True))
                self.tally.faults.append(f"{what}: named in time {[*named.values()]}:\n{said}")
                return
            time.sleep(0.02)
            for number, (host, ranks) in expected.items():
                found = NAMED.search(_since(logs[number], before[number]))
                if number in named or found is None:
                    continue
                named[number] = found[0]
                if found[1] not in ranks or found[2] != self.machines.names[host]:
                    self.tally.faults.append(f"{what}: the first that is named: {found[0]}")
        self.tally.name_s.setdefault(kind, []).append(time.perf_counter() - begun)


def _send(number: signal.Signals, processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _logs(log: Path) -> list[Path]:
    return [log, log.with_name(f"{log.name}-other")]


def _since(log: Path, size: int) -> str:
    return log.read_bytes()[size:].decode(errors="replace")


def _sentinels(found: list[list[psutil.Process]]) -> int:
    """The number of ranks with a watchdog, whose sentinel is a process."""
    count = 0
    for process in [*found[0], *found[1]]:
        with suppress(psutil.NoSuchProcess):
            count += any(word.endswith("sentinel.py") for word in process.cmdline())
    return count
