"""The watchdog: a thread on each rank that handles signals and finds the rank at fault.

Twice a second, each rank posts a heartbeat (its state) to the ranks' key-value store, and reads the
heartbeats of all ranks. A rank that fails, or finds a rank that hangs or has ended, posts a fault.
The first fault is printed, and every rank ends with exit code 1. A rank that is stuck outside
Python posts no heartbeats, so another rank posts the fault. If all ranks are stuck outside Python,
or the store does not answer, the sentinels end the ranks.
"""

import faulthandler
import json
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
from pathlib import Path
from typing import IO, Any, Self

import psutil

from pipeline.common.children import STOPS, call_in_children
from pipeline.common.errors import INTERRUPTED, LOST_CONNECTION, EngineError, RunError, UserError
from pipeline.common.layout import RANKS
from pipeline.common.untrusted import one_line, printable, reason_of
from pipeline.distributed import sentinel
from pipeline.distributed.ranks import CollectiveError, Interrupted, Ranks

# Seconds in which a repeated signal is ignored, because terminal and launcher both send SIGINT.
SAME_SIGNAL_S = 2.0
# After PATIENCE_S without a new heartbeat, a rank counts as silent. A rank whose collective fails
# looks for the reason for LOOK_S.
PATIENCE_S = 3.0
LOOK_S = 5.0
TICK_S = 0.5  # seconds between two heartbeats
GRACE_S = 5.0  # seconds from a fault to the forced end of a rank
WHERE_TORCH_WAITS = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/")


class ToldElsewhere(Exception):
    """Raised on a rank that ends because of a fault of another rank."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.exit_code = {"mistake": 2, "stop": INTERRUPTED}.get(kind, 1)


@dataclass(kw_only=True)
class Heartbeat:
    rank: int
    host: str
    pid: int
    posted_at: float  # time by the monotonic clock of the posting rank
    phase: str  # the phase and the current task as text
    waits_for: str  # the collective in which the rank waits; empty while the rank works
    idle_s: float  # seconds from the rank's last progress to this heartbeat
    left: bool  # whether the watchdog of the rank has ended normally
    seen_at: float  # when the reading rank first read this heartbeat

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"

    @property
    def silent_s(self) -> float:
        return self.idle_s + time.monotonic() - self.seen_at


class Watchdog:
    """A context manager for the main thread: handles signals and finds faults of ranks.

    A rank without progress for `timeout_s` is at fault. Set `can_resume` to True when the run has a
    checkpoint. `advice` is printed after the message about a rank that hangs or has ended. Set
    `run_folder` on rank 0 to let it write there, with its heartbeats, where each rank is.
    Processes that are forked from this rank close `not_for_children`, and so does the end.
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self.can_resume = False
        self.advice = ""
        self.run_folder: Path | None = None
        self.not_for_children: list[IO[str]] = []
        self._store = ranks.connect_to_store()
        self._own: Heartbeat
        others = [rank for rank in range(ranks.num_ranks) if rank != ranks.rank]
        self._keys = ["fault", "stop", *(f"heartbeat {rank}" for rank in others)]
        self._others: dict[int, Heartbeat] = {}
        self._first = "rank 0"  # and its host, on whose machine the store is
        self._fault: dict[str, Any] = {}  # the run's first fault, or empty
        self._fault_at = self._first_signal_at = 0.0
        self._handlers: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP
                # The thread reads the number of the signal from the socket.
                self._handlers[number] = signal.signal(number, lambda *_: None)
        self._old_fd = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._ranks.on_phase = self._post_heartbeat
        self._ranks.remove_timeouts()
        if not faulthandler.is_enabled():
            faulthandler.enable(file=2)  # prints the stacks if the sentinel ends this process
        self._post_heartbeat()
        host = json.loads(self._store.get("heartbeat 0"))["host"]  # waits for rank 0
        for key in self._keys:
            self._store.compare_set(key, "", "")  # a read waits for missing keys
        self._first = f"rank 0 on {host} ({os.environ.get('MASTER_ADDR', 'this machine')})"
        timeout_s = str(self._timeout_s + GRACE_S)
        arguments = [str(os.getpid()), timeout_s, str(self._own), self._first]
        self._sentinel: Any = subprocess.Popen(
            [sys.executable, "-I", "-S", sentinel.__file__, *arguments],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=2,
            start_new_session=True,
        )
        self._forget_children = call_in_children(self._let_go)
        self._thread.start()
        return self

    def _let_go(self) -> None:
        """In a process that was forked from this rank: be no rank."""
        signal.set_wakeup_fd(-1)
        for number in self._handlers:
            is_ctrl_c = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
        for file in (self._signals, self._wakeup, self._sentinel.stdin, *self.not_for_children):
            file.close()

    def __exit__(self, _: object, error: BaseException | None, *rest: object) -> None:
        """Add the phase to the exception; raises ToldElsewhere if another rank is at fault."""
        try:
            if error is not None and not isinstance(error, Interrupted):
                self._blame(error)
        finally:
            self._ranks.on_phase = lambda: None
            self._forget_children()
            self._wakeup.send(b"\0")
            self._thread.join()
            self._sentinel.stdin.close()  # ends the sentinel
            self._sentinel.wait()
            signal.set_wakeup_fd(self._old_fd)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._signals.close()
            self._wakeup.close()
            for file in self.not_for_children:
                file.close()
            self._post_heartbeat(left=True)
            raised = f"{type(error).__name__}: {reason_of(error)}" if error else ""
            told = one_line(self._fault.get("text", ""))
            self._write_ranks(True, told or raised or "interrupted" * self._ranks.stop_wanted)

    def _blame(self, error: BaseException) -> None:
        self._post_heartbeat()
        lost = isinstance(error, CollectiveError) or any(t in str(error) for t in LOST_CONNECTION)
        if self._ranks.stop_wanted and lost:  # the stop signal has also ended other ranks
            kind = "stop" if self.can_resume else "stop before the first checkpoint"
            raise ToldElsewhere(kind) from error
        if lost:  # another rank may find the reason
            until = time.monotonic() + LOOK_S
            while not self._fault and time.monotonic() < until:
                time.sleep(0.1)
        if not self._fault and lost:
            with suppress(RuntimeError):  # the key-value store may have ended
                self._name_missing_rank(is_deadlock=False)
        kind = "mistake" if isinstance(error, UserError) else "raised"
        fault = self._fault or self._post_fault(kind, self._own)
        if (fault["kind"], fault["rank"]) != (kind, self._ranks.rank):
            raise ToldElsewhere(fault["kind"]) from error
        where = f"rank {self._ranks.rank} on {self._own.host}, in {self._own.phase}"
        if isinstance(error, EngineError):
            error.args = (f"{error} ({where})",)
        if isinstance(error, UserError | RunError):
            error.is_first = True
        else:
            error.add_note(where)

    def _post_fault(self, kind: str, beat: Heartbeat, text: str = "") -> dict[str, Any]:
        own = {"kind": kind, "rank": beat.rank, "by": self._ranks.rank, "text": text}
        try:
            fault = json.loads(self._store.compare_set("fault", "", json.dumps(own)))
        except RuntimeError:  # the key-value store ended with the launcher
            fault = self._fault or own
        if fault == own and text and not self._fault:
            print(printable(text + self.advice), file=sys.stderr, flush=True)
        self._fault = fault
        self._fault_at = self._fault_at or time.monotonic()
        return fault

    def _watch(self) -> None:
        while True:
            with suppress(OSError):  # the sentinel may have been killed
                self._sentinel.stdin.write(b".")
            ready, _, _ = select.select([self._signals], [], [], TICK_S)
            received = self._signals.recv(64) if ready else b""
            if 0 in received:  # `__exit__` sends a 0
                return
            if numbers := [number for number in received if number in STOPS]:
                self._handle_signal(numbers[0])
            self._write_ranks()
            try:
                self._exchange_heartbeats()
                if not self._fault:
                    self._look()
            except RuntimeError as error:  # the key-value store ended with the launcher
                text = (
                    f"{self._first} or its launcher has ended: the key-value store is gone "
                    f"({str(error).splitlines()[0]})"
                )
                self._post_fault("store", self._own, text)
            if self._fault:
                self._end()

    def _handle_signal(self, number: int) -> None:
        now = time.monotonic()
        is_first = not self._first_signal_at
        self._first_signal_at = self._first_signal_at or now
        if now - self._first_signal_at > SAME_SIGNAL_S:
            leave_at_once(INTERRUPTED if self.can_resume else 1)
        with suppress(RuntimeError):  # if the store has ended, `_watch` ends the rank
            self._exchange_heartbeats()
            self._look_for_ended_ranks()
            # After a fault, the launcher sends SIGTERM as soon as a rank has ended.
            if not is_first or self._fault:
                return
            self._ranks.stop_wanted = True
            rank = str(self._ranks.rank)
            if self._store.compare_set("stop", "", rank) == rank.encode():
                print(
                    f"{signal.Signals(number).name}: the run stops in good order; a second signal "
                    "ends it at once",
                    file=sys.stderr,
                    flush=True,
                )

    def _exchange_heartbeats(self) -> None:
        """Post a heartbeat, and read the heartbeats of the other ranks and the faults."""
        self._post_heartbeat()
        fault, stop, *texts = self._store.multi_get(self._keys)
        for fields in map(json.loads, filter(None, texts)):
            last = self._others.get(fields["rank"])
            if last is None or last.posted_at != fields["posted_at"]:
                self._others[fields["rank"]] = Heartbeat(**fields | {"seen_at": time.monotonic()})
        if fault and not self._fault:
            self._fault = json.loads(fault)
            self._fault_at = time.monotonic()
        self._ranks.stop_wanted |= bool(stop)

    def _write_ranks(self, is_over: bool = False, why: str = "") -> None:
        """Write where each rank is, for those who watch the run."""
        if self.run_folder is None or not (self.run_folder / ".lock").exists():
            return  # the folder may be another one by now
        beats = [self._own, *(self._others[rank] for rank in sorted(self._others))]
        shown = ("rank", "host", "pid", "phase", "waits_for", "idle_s")
        ranks = [{name: getattr(beat, name) for name in shown} for beat in beats]
        posted = {"time": time.time(), "is_over": is_over, "why": why, "ranks": ranks}
        path = self.run_folder / RANKS
        with suppress(OSError):  # what is watched may be gone or full; the run finds out
            path.with_name(f".{RANKS}").write_text(json.dumps(posted), encoding="utf-8")
            path.with_name(f".{RANKS}").replace(path)

    def _post_heartbeat(self, left: bool = False) -> None:
        ranks = self._ranks
        self._own = Heartbeat(
            rank=ranks.rank,
            host=platform.node(),
            pid=os.getpid(),
            posted_at=time.monotonic(),
            phase=str(ranks.current) + (f", task {ranks.task}" if ranks.task else ""),
            waits_for=ranks.waits_for or _collective_of_torch(),
            idle_s=time.monotonic() - ranks.progress_at,
            left=left,
            seen_at=time.monotonic(),
        )
        with suppress(RuntimeError):  # if the store has ended, `_watch` ends the rank
            self._store.set(f"heartbeat {ranks.rank}", json.dumps(asdict(self._own)))

    def _look(self) -> None:
        self._look_for_ended_ranks()
        is_late = self._own.idle_s > self._timeout_s
        if is_late and self._own.waits_for:
            self._name_missing_rank(is_deadlock=True)
        last = time.monotonic() - self._timeout_s - TICK_S
        late = [b for b in self._others.values() if not b.left and b.seen_at < last]
        for beat in [*([self._own] if is_late else []), *late]:
            if not self._fault:
                text = (
                    f"{beat} hangs in {beat.phase}: no sign of progress for {beat.silent_s:.0f} s"
                )
                self._post_fault("hangs", beat, text)

    def _look_for_ended_ranks(self) -> None:
        for beat in self._others.values():
            if beat.left or beat.host != self._own.host:
                continue
            with suppress(psutil.NoSuchProcess):
                if psutil.Process(beat.pid).status() != psutil.STATUS_ZOMBIE:
                    continue
            last = Heartbeat(**json.loads(self._store.get(f"heartbeat {beat.rank}")))
            if not self._fault and not last.left:
                text = f"{last} exited or was killed; it was in {last.phase}"
                self._post_fault("gone", last, text)

    def _name_missing_rank(self, is_deadlock: bool) -> None:
        self._look_for_ended_ranks()
        beats = list(self._others.values())
        silent = [beat for beat in beats if time.monotonic() - beat.seen_at > PATIENCE_S]
        working = [beat for beat in beats if not beat.waits_for]
        missing = silent or working or (beats if is_deadlock else [])
        if self._fault or not missing:
            return
        beat = max(missing, key=lambda beat: beat.silent_s)
        waits_for = self._own.waits_for or "a collective of torch"  # which has raised
        waits = f"waits for {beat.waits_for!r}, " if beat.waits_for else ""
        text = (
            f"{beat} did not come to {waits_for!r}: it is in {beat.phase}, {waits}"
            f"its last sign of progress was {beat.silent_s:.0f} s ago"
        )
        self._post_fault("hangs", beat, text)

    def _end(self) -> None:
        own = self._own
        hangs = self._fault["kind"] == "hangs" and self._fault["rank"] == self._ranks.rank
        # If the store has ended, no other rank can report that this rank hangs.
        hangs |= not own.waits_for and own.idle_s > self._timeout_s
        if hangs:
            stack = "".join(traceback.format_stack(_main_frame()))
            print(f"rank {self._ranks.rank} is at\n{stack}", file=sys.stderr, flush=True)
        with suppress(RuntimeError):  # the store may have ended; then no rank needs the key
            self._store.compare_set(self._ranks.agreement, "", "fault")
        if hangs or time.monotonic() - self._fault_at > GRACE_S:
            leave_at_once(1)


def _main_frame() -> Any:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _collective_of_torch() -> str:
    file = getattr(getattr(_main_frame(), "f_code", None), "co_filename", "")
    return "a collective of torch" if any(part in file for part in WHERE_TORCH_WAITS) else ""


def leave_at_once(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
