"""`--doctor`: what would otherwise fail an hour into a run, found in under a minute.

One table on rank 0, a row as soon as it is found. What the ranks measured reaches rank 0 as notes
at the store where they met, so that a failure on any rank shows also where collectives fail, and
a check that hangs is named and ended by a watchdog.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Thread, Timer
from typing import Any

from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import GradientAccumulationPlugin

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.store import Board
from pipeline.doctor import links, machine
from pipeline.doctor.table import COLUMNS, Check, Finding, Place, named, shown
from pipeline.models.loading import on_gpu

DEADLINE_S = 30.0  # of one check, if the run's own is not shorter
EARLY = 2 / 3  # of the deadline, after which a collective fails by itself
GRACE_S = 10.0  # by which rank 0 speaks before the others give up
SILENT_S = 5.0  # the same, for those that cannot reach rank 0
# What gloo says on a rank that waited for another one.
WAITED = ("Timed out", "Connection closed", "Connection reset")

INSTALL = "pip install -c constraints.txt -e . on every host"
DISK = "another --output-dir; df -h and mount show what is there"
CHECKS = (
    Check("devices", machine.measure_devices, machine.judge_devices, "nvidia-smi on every host"),
    Check("versions", machine.measure_versions, machine.judge_versions, INSTALL),
    Check("all-reduce", links.measure_mean, links.judge_mean, talks=True),
    Check("bandwidth", links.measure_speed, links.judge_speed, talks=True),
    Check("barrier", links.measure_barrier, links.judge_barrier, talks=True),
    Check("DDP", links.measure_fit, links.judge_fit, talks=True),
    Check("bf16", machine.measure_bf16, machine.judge_bf16, "--mixed-precision no"),
    Check("disk", machine.measure_disk, machine.judge_disk, DISK),
    Check("memory", machine.measure_memory, machine.judge_memory, machine.SMALLER),
)


def main(config: Config, checks: Sequence[Check] = CHECKS, deadline_s: float = DEADLINE_S) -> int:
    """Check this rank together with the others; 1 on every rank if anything is broken, else 0."""
    return Doctor(config, checks, min(deadline_s, config.run.timeout)).run()


def connect(config: Config, deadline_s: float) -> Place:
    """Meet the other ranks as a run does, with shorter deadlines."""
    # Errors of gloo say more than the watchdog can, so they come before it. NCCL would end the
    # process without a word of the doctor's, so it comes after.
    early_s = EARLY * deadline_s
    timeout = timedelta(seconds=2 * deadline_s if on_gpu() else early_s)
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # as a run does
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
    )
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    assert config.run.num_gpus in (None, num_ranks), "ranks do not know each other"
    return Place(
        config=config,
        accelerator=accelerator,
        ranks=Ranks(rank, num_ranks, early_s),
        board=Board(num_ranks),
        deadline_s=deadline_s,
    )


def links_remedy() -> str:
    """What to try when ranks do not hear each other."""
    gloo = "GLOO_SOCKET_IFNAME=eth0 (a name that `ip addr` shows) chooses the network interface"
    if not on_gpu():
        return f"{gloo}; every host must reach MASTER_ADDR (firewall, /etc/hosts)"
    return (
        "NCCL_DEBUG=INFO shows what NCCL tries; NCCL_SOCKET_IFNAME=eth0 chooses the network "
        "interface, GLOO_SOCKET_IFNAME=eth0 that of barriers; NCCL_IB_DISABLE=1 does without "
        "InfiniBand, NCCL_P2P_DISABLE=1 without direct copies between GPUs"
    )


@dataclass(frozen=True)
class Outcome:
    """What a check measured on one rank, or why it could not."""

    facts: Any = None
    error: str = ""


class Doctor:
    """The checks in their order, on this rank."""

    def __init__(self, config: Config, checks: Sequence[Check], deadline_s: float) -> None:
        self.config, self.checks, self.deadline_s = config, checks, deadline_s
        self.rank = int(os.environ.get("RANK", "0"))
        self.findings: list[Finding] = []
        self.begun = time.perf_counter()

    def run(self) -> int:
        self._heading()
        place = self._connect()
        if place is None:
            return 1
        watching = Board(place.ranks.num_ranks)
        for check in self.checks:
            self._begin(check.name)
            try:
                with self._watched(check.name, _remedy(check), watching):
                    finding = self._examine(check, place)
            except RuntimeError as error:  # the store is gone, with the rank or agent that held it
                return self._end_alone(check.name, error)
            self._row(check.name, finding)
        code = self._end()
        self._part(place)
        return code

    def _connect(self) -> Place | None:
        name, begun = "connection", time.perf_counter()
        self._begin(name)
        try:
            with self._watched(name, links_remedy(), None):
                place = connect(self.config, self.deadline_s)
        except Exception as error:
            self._end_alone(name, error)
            return None
        num_ranks, backend = place.ranks.num_ranks, "NCCL" if on_gpu() else "gloo"
        text = f"{num_ranks} ranks met in {time.perf_counter() - begun:.1f} s; they exchange over "
        text += backend
        self._row(name, Finding("ok", text if num_ranks > 1 else "one rank, which needs none"))
        return place

    def _examine(self, check: Check, place: Place) -> Finding:
        """Measure; rank 0 judges what all ranks measured and tells the others."""
        if check.talks and place.ranks.num_ranks == 1:
            return Finding("note", "one rank: there is nothing to exchange")
        if check.talks and self._links_are_broken():
            return Finding("note", "not checked, because the ranks cannot talk (see above)")
        board, name, wait_s = place.board, check.name, 2 * self.deadline_s + GRACE_S
        board.post(f"{name} {place.ranks.rank}", _measured(check, place))
        if place.ranks.is_main:
            every = range(place.ranks.num_ranks)
            finding = _judged(check, [board.read(f"{name} {rank}", wait_s) for rank in every])
            board.post(f"{name} judged", finding)
        judged: Finding = board.read(f"{name} judged", wait_s)
        return judged

    def _links_are_broken(self) -> bool:
        talking = {check.name for check in self.checks if check.talks}
        return any(f.status == "broken" and f.check in talking for f in self.findings)

    def _end_alone(self, name: str, error: Exception) -> int:
        """After an error that rank 0 cannot be told of; if it has one too, it speaks alone."""
        text = f"rank {self.rank} on {platform.node()}: {_say(error)}"
        finding = Finding("broken", text, links_remedy())
        if self.rank > 0:
            time.sleep(SILENT_S)  # the launcher ends this rank meanwhile, if rank 0 has ended
            print(f"\n{name:<{COLUMNS[0]}}{shown(finding)}", flush=True)
        self._row(name, finding)
        return self._end()

    def _part(self, place: Place) -> None:
        """All leave when rank 0 has said all, and rank 0, which may hold the store, is the last."""
        board, ranks = place.board, place.ranks
        with suppress(RuntimeError):  # a rank that is gone does not matter any more
            if ranks.is_main:
                board.post("all is said", True)
                for rank in range(1, ranks.num_ranks):
                    board.read(f"rank {rank} leaves", SILENT_S)
            else:
                board.read("all is said", SILENT_S)
                board.post(f"rank {ranks.rank} leaves", True)

    @contextmanager
    def _watched(self, name: str, remedy: str, board: Board | None) -> Iterator[None]:
        """Ends this process with 1 when what is inside takes longer than the deadline."""
        patience = self.deadline_s + (GRACE_S if self.rank > 0 else 0)
        timer = Timer(patience, self._give_up, [name, remedy, board])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, name: str, remedy: str, board: Board | None) -> None:
        try:
            if self.rank == 0:
                text = f"not done after {self.deadline_s:g} s{_accounts(name, board)}"
                self._row(name, Finding("broken", text, remedy))
                self._end()
        finally:
            os._exit(1)

    def _heading(self) -> None:
        if self.rank == 0:
            print(f"doctor: recipe {self.config.recipe}; each check may take {self.deadline_s:g} s")
            first, second, _ = COLUMNS
            print(f"{'check':<{first}}{'status':<{second}}finding", flush=True)

    def _begin(self, name: str) -> None:
        if self.rank == 0:
            print(f"{name:<{COLUMNS[0]}}", end="", flush=True)

    def _row(self, name: str, finding: Finding) -> None:
        self.findings.append(replace(finding, check=name))
        if self.rank == 0:
            print(shown(finding), flush=True)

    def _end(self) -> int:
        broken = [finding.check for finding in self.findings if finding.status == "broken"]
        done = {finding.check for finding in self.findings}
        left = [check.name for check in self.checks if check.name not in done]
        if self.rank == 0:
            verdict = f"broken: {', '.join(broken)}" if broken else "nothing is broken"
            rest = f"; not checked: {', '.join(left)}" if left else ""
            seconds = time.perf_counter() - self.begun
            print(f"doctor: {verdict}{rest} (after {seconds:.0f} s)", flush=True)
        return 1 if broken else 0


def _remedy(check: Check, error: str = "") -> str:
    if "OutOfMemoryError" in error:
        return "ending what else uses this GPU (nvidia-smi)"
    return check.remedy or links_remedy()


def _measured(check: Check, place: Place) -> Outcome:
    try:
        return Outcome(facts=check.measure(place))
    except Exception as error:
        return Outcome(error=_say(error))


def _judged(check: Check, outcomes: Sequence[Outcome]) -> Finding:
    if any(outcome.error for outcome in outcomes):
        text = _errors(dict(enumerate(outcomes)))
        return Finding("broken", text, _remedy(check, text))
    try:
        return check.judge([outcome.facts for outcome in outcomes])
    except Exception as error:
        return Finding("broken", _say(error), _remedy(check))


def _accounts(name: str, board: Board | None) -> str:
    """What is known of the ranks that a check waits for; nothing, where the store hangs too."""
    found: list[str] = []

    def ask(board: Board) -> None:
        ranks = range(int(os.environ.get("WORLD_SIZE", "1")))
        with suppress(RuntimeError):
            done = {r: board.read(f"{name} {r}", 1) for r in ranks if board.has(f"{name} {r}")}
            found.append(_errors(done))
            if waiting := set(ranks) - set(done):
                found.append(f"{named(waiting)} still in it")

    if board is not None:
        asking = Thread(target=ask, args=[board], daemon=True)
        asking.start()
        asking.join(SILENT_S)
    return "".join(f"; {text}" for text in found if text)


def _errors(outcomes: dict[int, Outcome]) -> str:
    """`rank 1: KeyError: ...`; ranks that say the same together, those that only waited last."""
    ranks_of: dict[str, list[int]] = {}
    for rank, outcome in outcomes.items():
        if outcome.error:
            ranks_of.setdefault(outcome.error, []).append(rank)
    errors = sorted(ranks_of, key=lambda error: any(words in error for words in WAITED))
    return "; ".join(f"{named(ranks_of[error])}: {error}" for error in errors)


def _say(error: Exception) -> str:
    text = str(error).split("Exception raised from ")[0]  # the frames of C++
    words = " ".join(re.sub(r"\[\S+:\d+\]", "", text).split())  # and its files
    return f"{type(error).__name__}: {words[:600]}" if words else type(error).__name__
