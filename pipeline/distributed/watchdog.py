"""A thread on each rank that hears signals, watches the other ranks, and names who is at fault.

Each rank tells the others twice a second where it stands (a beat). Whoever first sees a rank that
failed, hangs, exited or was killed notes it at the store where the ranks met and says so; every
rank then ends with exit code 1. A rank whose Python is stuck shows no beats, so another one names
it; should all be stuck, their sentinels end them. While a run is suspended no deadline goes on.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import Any, Self

import psutil

from pipeline.distributed import sentinel
from pipeline.distributed.ranks import CollectiveError, Interrupted, Ranks
from pipeline.distributed.store import Board
from pipeline.errors import INTERRUPTED, UserError
from pipeline.files.untrusted import printable

TICK_S = 0.5
SAME_SIGNAL_S = 2.0  # Ctrl-C arrives twice: from the terminal and from the launcher
PATIENCE_S = 3.0  # for the one who knows to speak first
# So long between two looks of this thread, or a tenth of the deadline: it was not let run.
SUSPENDED_S = 3.0
GRACE_S = 5.0  # for this rank's own clean end, once a fault is known
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WHERE_TORCH_WAITS = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/")
# What broken or late connections say where no collective of ours names them.
OF_CONNECTIONS = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting")


class ToldElsewhere(Exception):
    """This rank ends because of a fault of another, which was already told.

    `exit_code` is what it should end with.
    """

    def __init__(self, fault: dict[str, Any]) -> None:
        super().__init__(fault["text"])
        self.exit_code = {"mistake": 2, "stop": INTERRUPTED}.get(fault["kind"], 1)


@dataclass(kw_only=True)
class Beat:
    """Where a rank stands."""

    host: str
    pid: int
    tick: int = 0
    phase: str = "start"
    task: str = ""
    waits_for: str = ""  # a collective; empty while the rank works
    idle_s: float = 0.0  # since its last sign of progress
    left: bool = False  # it ends in good order

    @property
    def place(self) -> str:
        return f"{self.phase}, task {self.task}" if self.task else self.phase


class Watchdog:
    """Watches inside its `with` block, in the main thread, whose signals it takes over.

    `timeout_s` is how long a rank may show no progress. Set `can_resume` once there is a
    checkpoint: it decides the exit code when a second signal ends the rank at once.
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self._ranks, self._timeout_s, self.can_resume = ranks, timeout_s, False
        self.advice = ""  # printed after a fault that the watchdog names
        self._board = Board(ranks.num_ranks)
        self._own = Beat(host=platform.node(), pid=os.getpid())
        # Of the other ranks: their newest beat, and when its tick was seen to change.
        self._others: dict[int, tuple[Beat, float]] = {}
        self._fault: dict[str, Any] = {}  # the first of any rank, as far as this one knows
        self._fault_at = self._first_signal_at = 0.0
        self._looked_at = time.monotonic()
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._signals, self._wakeup = socket.socketpair()
        self._handlers: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._signals.setblocking(False)
        self._wakeup.setblocking(False)
        for heeded in SIGNALS:
            if signal.getsignal(heeded) is not signal.SIG_IGN:  # as under nohup
                self._handlers[heeded] = signal.signal(heeded, _leave_it_to_the_thread)
        self._old_fd = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._ranks.on_phase = self._tell
        self._ranks.leave_deadlines_to_watchdog()
        self._call_sentinel()
        self._looked_at = time.monotonic()
        self._tell()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tell the others how this rank ends; raises ToldElsewhere where another one is to blame.

        Of ranks that fail together one keeps its exception, with a note of where it was.
        """
        try:
            if isinstance(error, UserError):
                fault = self._note("mistake", self._ranks.rank, "")
                if fault["rank"] != self._ranks.rank:
                    raise ToldElsewhere(fault) from error
                error.is_first = True
            elif error is not None and not isinstance(error, Interrupted):
                self._blame(error)
        finally:
            self._close()

    def _close(self) -> None:
        self._ranks.on_phase = lambda: None
        self._closed.set()
        self._wakeup.send(b"\0")
        self._thread.join()
        if self._sentinel is not None and self._sentinel.stdin is not None:
            self._sentinel.stdin.close()  # which ends it
            self._sentinel.wait()
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._signals.close()
        self._wakeup.close()
        self._own = self._here()
        self._own.left = True
        with suppress(RuntimeError):  # nobody may be left to hear it
            self._board.post(f"beat {self._ranks.rank}", asdict(self._own))

    def _call_sentinel(self) -> None:
        if not faulthandler.is_enabled():
            faulthandler.enable(file=2)  # prints the stacks where the sentinel ends this process
        ticks = str(round((self._timeout_s + GRACE_S) / sentinel.TICK_S))
        command = [sys.executable, "-I", "-S", sentinel.__file__, str(os.getpid()), ticks]
        self._sentinel = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=2, start_new_session=True
        )

    def _is_awake(self) -> None:
        if self._sentinel is not None and self._sentinel.stdin is not None:
            with suppress(OSError):  # somebody has killed it
                os.write(self._sentinel.stdin.fileno(), b".")

    def _blame(self, error: BaseException) -> None:
        lost = isinstance(error, CollectiveError) or any(t in str(error) for t in OF_CONNECTIONS)
        if self._ranks.stop_wanted and lost:  # others left because of the same signal
            raise ToldElsewhere({"kind": "stop", "text": ""}) from error
        patient_until = time.monotonic() + (PATIENCE_S if lost else 0)
        while not self._fault and time.monotonic() < patient_until:
            time.sleep(0.1)
        if not self._fault and lost:
            with suppress(RuntimeError):  # the store may be gone as well
                self._name_culprits(error)
        fault = self._fault or self._note("raised", self._ranks.rank, "")
        if fault["kind"] != "raised" or fault["rank"] != self._ranks.rank:
            raise ToldElsewhere(fault) from error
        error.add_note(f"rank {self._ranks.rank} on {self._own.host}, in {self._here().place}")

    def _note(self, kind: str, rank: int, text: str) -> dict[str, Any]:
        """Note a fault of a rank, and say it if it is the first; returns the first."""
        own = {"kind": kind, "rank": rank, "by": self._ranks.rank, "text": text}
        try:
            fault: dict[str, Any] = self._board.post_first("fault", own)
        except RuntimeError:  # the store went with its process
            fault = self._fault or own
        if fault == own and text and not self._fault:
            print(printable(text + self.advice), file=sys.stderr, flush=True)
        self._fault, self._fault_at = fault, self._fault_at or time.monotonic()
        return fault

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._is_awake()
            self._hear_signals()
            if self._closed.is_set():
                return
            try:
                self._exchange_beats()
                if not self._fault:
                    self._look()
            except RuntimeError as error:  # the store went with its process
                if not self._fault:
                    reason = str(error).splitlines()[0]
                    self._note("store", self._ranks.rank, f"the launcher is gone ({reason})")
            if self._fault:
                self._end()

    def _hear_signals(self) -> None:
        """Wait for a tick, or a signal; the first asks for a stop, a later one ends this rank."""
        ready, _, _ = select.select([self._signals], [], [], TICK_S)
        if not ready:
            return
        heard = [number for number in self._signals.recv(64) if number in SIGNALS]
        now = time.monotonic()
        if not heard:
            return
        if not self._first_signal_at:
            self._first_signal_at = now
            self._stop(signal.Signals(heard[0]).name)
        elif now - self._first_signal_at > SAME_SIGNAL_S:
            leave_at_once(INTERRUPTED if self.can_resume else 1)

    def _stop(self, why: str) -> None:
        """Ask all ranks to stop; not where the launcher ends them because one of them is gone."""
        with suppress(RuntimeError):  # without the store every rank ends
            self._exchange_beats()
            self._look_for_gone_ranks()
            if self._fault:
                return
            self._ranks.stop_wanted = True
            if self._board.post_first("stop", self._ranks.rank) == self._ranks.rank:
                text = f"{why}: the run stops in good order; a second signal ends it at once"
                print(text, file=sys.stderr, flush=True)

    def _exchange_beats(self) -> None:
        self._tell()
        others = [rank for rank in range(self._ranks.num_ranks) if rank != self._ranks.rank]
        names = [f"beat {rank}" for rank in others]
        for rank, found in zip(others, self._board.read_all(names), strict=True):
            if found is not None:
                now, (last, seen_at) = Beat(**found), self._others.get(rank, (None, 0.0))
                changed = last is None or last.tick != now.tick
                self._others[rank] = (now, time.monotonic() if changed else seen_at)
        if not self._fault and self._board.has_first("fault"):
            self._fault = self._board.post_first("fault", None)
            self._fault_at = time.monotonic()
        if not self._ranks.stop_wanted and self._board.has_first("stop"):
            self._ranks.stop_wanted = True

    def _tell(self) -> None:
        """Tell the others where this rank stands: at every tick, and when a phase begins."""
        self._own = self._here()
        with suppress(RuntimeError):  # where the store is gone, reading from it says so
            self._board.post(f"beat {self._ranks.rank}", asdict(self._own))

    def _here(self) -> Beat:
        ranks = self._ranks
        return Beat(
            host=self._own.host,
            pid=self._own.pid,
            tick=self._own.tick + 1,
            phase=str(ranks.current),
            task=ranks.task,
            waits_for=ranks.waits_for or _collective_of_torch(),
            idle_s=time.monotonic() - ranks.progress_at,
        )

    def _look(self) -> None:
        """Name a rank that is gone or hangs, this one among them."""
        now = time.monotonic()
        gap_s, self._looked_at = now - self._looked_at, now
        if gap_s > max(
            SUSPENDED_S, self._timeout_s / 10
        ):  # the others may have been suspended as well: all begin anew
            self._ranks.alive()
            self._others = {rank: (beat, now) for rank, (beat, _) in self._others.items()}
            return
        self._look_for_gone_ranks()
        if not self._fault and self._own.idle_s > self._timeout_s:
            if self._own.waits_for:
                self._name_culprits(None)
            else:
                self._note("hangs", self._ranks.rank, self._hang(self._ranks.rank, self._own))
        for rank, (beat, seen_at) in self._others.items():
            if not self._fault and not beat.left and now - seen_at > self._timeout_s + TICK_S:
                self._note("hangs", rank, self._hang(rank, beat, now - seen_at))

    def _look_for_gone_ranks(self) -> None:
        for rank, (beat, _) in self._others.items():
            if not self._fault and self._is_gone(rank, beat):
                text = f"rank {rank} on {beat.host} (pid {beat.pid}) exited or was killed"
                self._note("gone", rank, f"{text}; it was in {beat.place}")

    def _is_gone(self, rank: int, beat: Beat) -> bool:
        """Whether a rank of this machine ended without a word."""
        if beat.left or beat.host != self._own.host:
            return False
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(beat.pid).status() != psutil.STATUS_ZOMBIE:
                return False
        return not self._board.read_all([f"beat {rank}"])[0]["left"]

    def _name_culprits(self, error: BaseException | None) -> None:
        """Name who did not come to the collective that this rank waited for in vain."""
        self._look_for_gone_ranks()
        if self._fault:
            return
        waited, now = self._own.waits_for, time.monotonic()
        idle_s = {rank: beat.idle_s + now - at for rank, (beat, at) in self._others.items()}
        silent = [rank for rank, (_, at) in self._others.items() if now - at > PATIENCE_S]
        working = [rank for rank, (beat, _) in self._others.items() if not beat.waits_for]
        if culprits := silent or working:
            rank = max(culprits, key=lambda rank: idle_s[rank])
            beat = self._others[rank][0]
            text = f"rank {rank} on {beat.host} (pid {beat.pid}) did not come to {waited!r}: it is "
            text += f"in {beat.place}, its last sign of progress was {idle_s[rank]:.0f} s ago"
            self._note("hangs", rank, text)
        elif error is None:
            waits = [f"rank {r} waits for {b.waits_for}" for r, (b, _) in self._others.items()]
            text = f"the ranks wait for each other: rank {self._ranks.rank} waits for {waited}, "
            self._note("apart", self._ranks.rank, text + ", ".join(waits))

    def _hang(self, rank: int, beat: Beat, silent_s: float = 0.0) -> str:
        where = f"rank {rank} on {beat.host} (pid {beat.pid}) hangs in {beat.place}"
        return f"{where}: no sign of progress for {beat.idle_s + silent_s:.0f} s"

    def _end(self) -> None:
        """A fault is known: wake the main thread, and end this rank if it does not end itself."""
        own = self._here()
        # Where the store is gone, another rank may have named this one, and nobody can tell it.
        is_stuck = not own.waits_for and own.idle_s > self._timeout_s
        hangs = self._fault["kind"] == "hangs" and self._fault["rank"] == self._ranks.rank
        if hangs or is_stuck:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = "".join(traceback.format_stack(frame))
            print(f"rank {self._ranks.rank} is at\n{stack}", file=sys.stderr, flush=True)
        with suppress(RuntimeError):  # without the store it wakes anyway
            self._board.wake(self._ranks.agreement)
        if hangs or is_stuck or time.monotonic() - self._fault_at > GRACE_S:
            leave_at_once(1)


def _collective_of_torch() -> str:
    """Where the main thread is where ranks wait for each other in code that is not ours.

    So the trainer of the warm start does. A rank that computes a backward pass looks the same.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    inside = frame is not None and any(
        part in frame.f_code.co_filename for part in WHERE_TORCH_WAITS
    )
    return "a collective of torch" if inside else ""


def leave_at_once(code: int) -> None:
    """End this process now, whatever its threads are doing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """The signal's number is already in the pipe that the watchdog's thread reads."""
