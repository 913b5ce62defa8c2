"""The watchdog: a thread on each rank that handles signals and names the rank that is at fault.

Twice a second each rank posts its state, a beat, in the store where the ranks met. A rank that sees
a failed, hanging, exited or killed rank posts this fault; the first fault is printed, and every
rank ends with exit code 1. If Python is stuck in a rank, it posts no beats, so another rank names
it; if Python is stuck in all ranks, their sentinels end them. Deadlines stop during a suspension.
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
from typing import Any, Self

import psutil

from pipeline.distributed import sentinel
from pipeline.distributed.ranks import Board, CollectiveError, Interrupted, Ranks
from pipeline.errors import INTERRUPTED, LOST_CONNECTION, UserError
from pipeline.files.untrusted import printable

TICK_S = 0.5
SAME_SIGNAL_S = 2.0  # Ctrl-C arrives twice: from the terminal and from the launcher
PATIENCE_S = 3.0  # the rank at fault reports before a rank that lost its connection
# A pause of this thread for more than this, and more than a tenth of the deadline, is a suspension.
SUSPENDED_S = 3.0
GRACE_S = 5.0  # from a fault to the forced end of a rank
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WHERE_TORCH_WAITS = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/")


class ToldElsewhere(Exception):
    """Another rank has reported the fault that ends this rank."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.exit_code = {"mistake": 2, "stop": INTERRUPTED}.get(kind, 1)


@dataclass(kw_only=True)
class Beat:
    """The state of a rank."""

    rank: int
    host: str
    pid: int
    tick: int
    phase: str
    task: str
    waits_for: str  # a collective; empty while the rank works
    idle_s: float  # since its last sign of progress, when it posted the beat
    left: bool  # the rank has ended in good order
    seen_at: float  # when the reading rank first saw this beat

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"

    @property
    def place(self) -> str:
        return f"{self.phase}, task {self.task}" if self.task else self.phase

    @property
    def silent_s(self) -> float:
        return self.idle_s + time.monotonic() - self.seen_at


class Watchdog:
    """Watches inside its `with` block, in the main thread, and handles signals there.

    `timeout_s` is how long a rank may show no progress. Set `can_resume` once there is a
    checkpoint: it decides the exit code when a second signal ends the rank at once. `advice` is
    printed after the message about a rank that hangs or is gone.
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self._ranks, self._timeout_s = ranks, timeout_s
        self.can_resume, self.advice = False, ""
        self._board = Board(ranks.num_ranks)
        self._num_ticks = 0
        self._own = self._beat()
        self._others: dict[int, Beat] = {}
        self._fault: dict[str, Any] = {}  # the first fault of any rank, when this rank has read it
        self._fault_at = self._first_signal_at = 0.0
        self._looked_at = time.monotonic()
        self._sentinel: Any = None
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._handlers: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                # The thread reads the number of the signal from the socket.
                self._handlers[number] = signal.signal(number, lambda *_: None)
        self._old_fd = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._ranks.on_phase = self._post_beat
        self._ranks.leave_deadlines_to_watchdog()
        if not faulthandler.is_enabled():
            faulthandler.enable(file=2)  # prints the stacks if the sentinel ends this process
        ticks = str(round((self._timeout_s + GRACE_S) / sentinel.TICK_S))
        command = [sys.executable, "-I", "-S", sentinel.__file__, str(os.getpid()), ticks]
        self._sentinel = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=2, start_new_session=True
        )
        self._looked_at = time.monotonic()
        self._post_beat()
        self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, *rest: object) -> None:
        """Report how this rank ends; raises ToldElsewhere if another rank is at fault.

        If several ranks fail, one keeps its exception, with a note on its phase and task.
        """
        try:
            if error is not None and not isinstance(error, Interrupted):
                self._blame(error)
        finally:
            self._ranks.on_phase = lambda: None
            self._wakeup.send(b"\0")
            self._thread.join()
            self._sentinel.stdin.close()  # ends the sentinel
            self._sentinel.wait()
            signal.set_wakeup_fd(self._old_fd)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._signals.close()
            self._wakeup.close()
            self._post_beat(left=True)

    def _blame(self, error: BaseException) -> None:
        lost = isinstance(error, CollectiveError) or any(t in str(error) for t in LOST_CONNECTION)
        if self._ranks.stop_wanted and lost:  # the same signal has ended other ranks
            raise ToldElsewhere("stop") from error
        patient_until = time.monotonic() + (PATIENCE_S if lost else 0)
        while not self._fault and time.monotonic() < patient_until:
            time.sleep(0.1)
        if not self._fault and lost:
            with suppress(RuntimeError):  # the store may be gone as well
                self._name_culprits(is_deadlock=False)
        kind = "mistake" if isinstance(error, UserError) else "raised"
        fault = self._fault or self._post_fault(kind, self._own)
        if (fault["kind"], fault["rank"]) != (kind, self._ranks.rank):
            raise ToldElsewhere(fault["kind"]) from error
        if isinstance(error, UserError):
            error.is_first = True
        else:
            error.add_note(f"rank {self._ranks.rank} on {self._own.host}, in {self._beat().place}")

    def _post_fault(self, kind: str, beat: Beat, text: str = "") -> dict[str, Any]:
        """Post a rank's fault, and print it if it is the first; returns the first fault."""
        own = {"kind": kind, "rank": beat.rank, "by": self._ranks.rank, "text": text}
        try:
            fault: dict[str, Any] = self._board.post_first("fault", own)
        except RuntimeError:  # the store ended with the launcher
            fault = self._fault or own
        if fault == own and text and not self._fault:
            print(printable(text + self.advice), file=sys.stderr, flush=True)
        self._fault, self._fault_at = fault, self._fault_at or time.monotonic()
        return fault

    def _watch(self) -> None:
        while True:
            with suppress(OSError):  # the sentinel may have been killed
                self._sentinel.stdin.write(b".")
            ready, _, _ = select.select([self._signals], [], [], TICK_S)
            received = self._signals.recv(64) if ready else b""
            if 0 in received:  # sent by `__exit__`
                return
            if numbers := [number for number in received if number in SIGNALS]:
                self._handle_signal(numbers[0])
            try:
                self._exchange_beats()
                if not self._fault:
                    self._look()
            except RuntimeError as error:  # the store ended with the launcher
                text = f"the launcher is gone ({str(error).splitlines()[0]})"
                self._post_fault("store", self._own, text)
            if self._fault:
                self._end()

    def _handle_signal(self, number: int) -> None:
        """The first signal asks all ranks to stop; a later one ends this rank."""
        now, is_first = time.monotonic(), not self._first_signal_at
        self._first_signal_at = self._first_signal_at or now
        if now - self._first_signal_at > SAME_SIGNAL_S:
            leave_at_once(INTERRUPTED if self.can_resume else 1)
        with suppress(RuntimeError):  # without the store every rank ends
            self._exchange_beats()
            self._look_for_gone_ranks()
            if not is_first or self._fault:  # the launcher signals the others of a gone rank
                return
            self._ranks.stop_wanted = True
            if self._board.post_first("stop", self._ranks.rank) == self._ranks.rank:
                text = "the run stops in good order; a second signal ends it at once"
                print(f"{signal.Signals(number).name}: {text}", file=sys.stderr, flush=True)

    def _exchange_beats(self) -> None:
        self._post_beat()
        others = set(range(self._ranks.num_ranks)) - {self._ranks.rank}
        for fields in self._board.read(*(f"beat {rank}" for rank in others)):
            last = self._others.get(fields["rank"])
            if last is None or last.tick != fields["tick"]:
                self._others[fields["rank"]] = Beat(**{**fields, "seen_at": time.monotonic()})
        if not self._fault and (found := self._board.read("fault")):
            self._fault, self._fault_at = found[0], time.monotonic()
        if self._board.read("stop"):
            self._ranks.stop_wanted = True

    def _post_beat(self, left: bool = False) -> None:
        """Post this rank's beat: at every tick, and when a phase begins."""
        self._own = self._beat(left)
        with suppress(RuntimeError):  # `_watch` notices a store that is gone
            self._board.post(f"beat {self._ranks.rank}", asdict(self._own))

    def _beat(self, left: bool = False) -> Beat:
        ranks = self._ranks
        self._num_ticks += 1
        return Beat(
            rank=ranks.rank,
            host=platform.node(),
            pid=os.getpid(),
            tick=self._num_ticks,
            phase=str(ranks.current),
            task=ranks.task,
            waits_for=ranks.waits_for or _collective_of_torch(),
            idle_s=time.monotonic() - ranks.progress_at,
            left=left,
            seen_at=time.monotonic(),
        )

    def _look(self) -> None:
        """Name a rank that is gone or hangs; it may be this one."""
        now = time.monotonic()
        gap_s, self._looked_at = now - self._looked_at, now
        if gap_s > max(SUSPENDED_S, self._timeout_s / 10):
            # Other ranks may have been suspended too: all deadlines start anew.
            self._ranks.alive()
            for beat in self._others.values():
                beat.seen_at = now
            return
        self._look_for_gone_ranks()
        is_late = self._own.idle_s > self._timeout_s
        if is_late and self._own.waits_for:
            self._name_culprits(is_deadlock=True)
        limit_s = self._timeout_s + TICK_S
        late = [b for b in self._others.values() if not b.left and now - b.seen_at > limit_s]
        for beat in [*([self._own] if is_late else []), *late]:
            if not self._fault:
                text = f"no sign of progress for {beat.silent_s:.0f} s"
                self._post_fault("hangs", beat, f"{beat} hangs in {beat.place}: {text}")

    def _look_for_gone_ranks(self) -> None:
        """Name a rank of this machine that ended without a last beat."""
        for beat in self._others.values():
            if beat.left or beat.host != self._own.host:
                continue
            with suppress(psutil.NoSuchProcess):
                if psutil.Process(beat.pid).status() != psutil.STATUS_ZOMBIE:
                    continue
            if not self._fault and not self._board.read(f"beat {beat.rank}")[0]["left"]:
                text = f"{beat} exited or was killed; it was in {beat.place}"
                self._post_fault("gone", beat, text)

    def _name_culprits(self, is_deadlock: bool) -> None:
        """Name the rank that is missing in the collective for which this rank waits.

        The missing rank posts no beats, or it works, or, in a deadlock, it waits elsewhere.
        """
        self._look_for_gone_ranks()
        now, beats = time.monotonic(), list(self._others.values())
        silent = [beat for beat in beats if now - beat.seen_at > PATIENCE_S]
        working = [beat for beat in beats if not beat.waits_for]
        culprits = silent or working or (beats if is_deadlock else [])
        if self._fault or not culprits:
            return
        beat = max(culprits, key=lambda beat: beat.silent_s)
        text = f"{beat} did not come to {self._own.waits_for!r}: it is in {beat.place}, "
        text += f"waits for {beat.waits_for!r}, " if beat.waits_for else ""
        text += f"its last sign of progress was {beat.silent_s:.0f} s ago"
        self._post_fault("hangs", beat, text)

    def _end(self) -> None:
        """After a fault: wake the main thread, and end this rank if it does not end itself."""
        own = self._beat()
        hangs = self._fault["kind"] == "hangs" and self._fault["rank"] == self._ranks.rank
        # Without the store, this rank cannot read that another rank has named it.
        hangs |= not own.waits_for and own.idle_s > self._timeout_s
        if hangs:
            stack = "".join(traceback.format_stack(_main_frame()))
            print(f"rank {self._ranks.rank} is at\n{stack}", file=sys.stderr, flush=True)
        with suppress(RuntimeError):  # without the store, the main thread wakes anyway
            self._board.wake(self._ranks.agreement)
        if hangs or time.monotonic() - self._fault_at > GRACE_S:
            leave_at_once(1)


def _main_frame() -> Any:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _collective_of_torch() -> str:
    """Not empty while the main thread is in code of torch that may wait for other ranks.

    The warm start waits there. A backward pass that computes is in the same code.
    """
    file = getattr(getattr(_main_frame(), "f_code", None), "co_filename", "")
    return "a collective of torch" if any(part in file for part in WHERE_TORCH_WAITS) else ""


def leave_at_once(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
