"""Calls of environments: in the thread of the rollout, or in others beside it, each in its time."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.environments.deadline import EnvironmentFault, guarded, too_long

MAX_BESIDE = 64  # works in the background, side by side
IDLE_S = 2.0  # after which a thread without a job ends
MAX_HANGS = 3  # in a row; then a domain is not called again in this rollout

Guard = Callable[[str, Callable[[], Any]], Any]  # makes a call: its name, and what to call
Work = Callable[[Guard], None]  # one or more calls of one environment
Key = tuple[str, str]  # domain and task


class Calls:
    """Lets environments work; `seconds` is the deadline of each of their calls.

    `on_call` is told, in this thread, whose call is made or waited for next. Where a domain hangs
    again and again, the rest of its works fail at once: an outage costs a rollout minutes, not a
    deadline per episode.
    """

    def __init__(self, seconds: float, on_call: Callable[[str], None]) -> None:
        self.seconds, self.on_call = seconds, on_call
        self._threads = _Threads(seconds)
        self._hangs: dict[str, _Hangs] = {}  # by domain

    def here(self, key: Key, work: Work) -> None:
        """Do a work now; raises EnvironmentFault where one of its calls fails."""

        def guard(name: str, call: Callable[[], Any]) -> Any:
            self.on_call("/".join(key))
            return guarded(name, self.seconds, call)

        hangs, begun = self._of_domain(key), time.monotonic()
        if hangs.too_many:
            raise hangs.refusal()
        try:
            work(guard)
        except EnvironmentFault as fault:
            hangs.note(fault, begun)
            raise
        hangs.note(None, begun)

    def beside(self, key: Key, work: Work) -> Callable[[], None]:
        """Do a work in the background; what is returned waits for it, and raises as `here` does.

        A work that is given up makes no further call, and what it was about to do is not done.
        """
        job, hangs = _Job(work), self._of_domain(key)
        if hangs.too_many:
            job.end(hangs.refusal())
        else:
            self._threads.submit(job)

        def wait() -> None:
            self.on_call("/".join(key))
            self._threads.wait(job, hangs.refusal() if hangs.too_many else None)
            hangs.note(job.fault if isinstance(job.fault, EnvironmentFault) else None, job.begun)
            if job.fault is not None:
                raise job.fault

        return wait

    def forget(self) -> None:
        """Give up what is under way, and call all domains again."""
        self._threads.give_up_all()
        self._hangs = {}

    def _of_domain(self, key: Key) -> _Hangs:
        return self._hangs.setdefault(key[0], _Hangs(key[0], self.seconds))


@dataclass
class _Hangs:
    """How often a domain hung in a row; calls that hang at the same time count once."""

    domain: str
    seconds: float
    count: int = 0
    until: float = -math.inf  # the deadline of the call that was counted last

    @property
    def too_many(self) -> bool:
        return self.count >= MAX_HANGS

    def note(self, fault: EnvironmentFault | None, begun: float) -> None:
        if fault is None or not fault.timed_out:
            self.count = 0
        elif begun >= self.until:
            self.count, self.until = self.count + 1, begun + self.seconds

    def refusal(self) -> EnvironmentFault:
        return EnvironmentFault(
            f"CallTimeout: {self.domain} is not called again in this rollout, after {self.count} "
            f"times in a row that took more than {self.seconds:g} s",
            timed_out=True,
            outage=True,
        )


class _GivenUp(BaseException):
    """Ends a work that nobody waits for any more, in its own thread."""


@dataclass(eq=False)
class _Job:
    """A work in the background."""

    work: Work
    call: str = ""  # what it calls at the moment
    begun: float = 0.0  # when its last call began
    in_call: bool = False
    given_up: bool = False
    done: bool = False
    fault: BaseException | None = None

    def end(self, fault: BaseException | None) -> None:
        self.done, self.fault = True, fault


class _Threads:
    """Threads that do jobs, MAX_BESIDE at most; they end where there is nothing to do for a while.

    One whose call hangs is left to itself, and another takes its place. They are daemons, which
    cannot keep the process from ending.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        lock = threading.Lock()  # guards the jobs and all below
        self._submitted, self._ended = threading.Condition(lock), threading.Condition(lock)
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._num_threads = self._num_idle = 0  # without those that were left to themselves
        self._awaited: _Job | None = None

    def submit(self, job: _Job) -> None:
        with self._submitted:
            self._waiting.append(job)
            self._call_threads()

    def wait(self, job: _Job, refusal: EnvironmentFault | None) -> None:
        """Return once the job is done, or its call is late; with a refusal, do not let it wait."""
        with self._ended:
            self._awaited = job
            while not job.done:
                if refusal is not None:
                    self._give_up(job, refusal)
                for late in [other for other in self._running if self._left_of(other) < 0]:
                    self._give_up(late, too_long(late.call, self.seconds))
                if not job.done:
                    self._ended.wait(min(map(self._left_of, self._running), default=self.seconds))

    def give_up_all(self) -> None:
        with self._submitted:
            for job in [*self._waiting, *self._running]:
                self._give_up(job, EnvironmentFault("given up"))

    def _left_of(self, job: _Job) -> float:
        """Seconds until its call is late; a call that it begins later has as many at least."""
        return job.begun + self.seconds - time.monotonic() if job.in_call else self.seconds

    def _give_up(self, job: _Job, fault: EnvironmentFault) -> None:
        """Between two calls it may end by itself, which takes no time."""
        job.given_up, job.fault = True, fault
        if job in self._waiting:
            self._waiting.remove(job)
            job.end(fault)
        elif job.in_call:
            self._running.remove(job)
            job.end(fault)
            self._num_threads -= 1
            self._call_threads()

    def _call_threads(self) -> None:
        while self._num_idle < len(self._waiting) and self._num_threads < MAX_BESIDE:
            self._num_threads += 1
            self._num_idle += 1
            threading.Thread(target=self._serve, name="environment", daemon=True).start()
        self._submitted.notify()

    def _serve(self) -> None:
        """Do jobs, one after the other; this thread was counted as idle when it was made."""
        while True:
            with self._submitted:
                while not self._waiting:
                    if not self._submitted.wait(IDLE_S) and not self._waiting:
                        self._num_threads -= 1
                        self._num_idle -= 1
                        return
                self._num_idle -= 1
                job = self._waiting.popleft()
                self._running.append(job)
            fault = self._fault_of(job)
            with self._ended:
                if job.done:  # it was given up, and another thread has the place
                    return
                self._running.remove(job)
                job.end(fault)
                self._num_idle += 1
                if job is self._awaited:
                    self._ended.notify()

    def _fault_of(self, job: _Job) -> BaseException | None:
        try:
            job.work(lambda name, call: self._guarded(job, name, call))
        except _GivenUp:
            return job.fault
        except BaseException as error:  # raised where it is waited for
            return error
        return None

    def _guarded(self, job: _Job, name: str, call: Callable[[], Any]) -> Any:
        with self._ended:
            if job.given_up:
                raise _GivenUp
            job.call, job.begun, job.in_call = name, time.monotonic(), True
        try:
            return guarded(name, self.seconds, call)
        finally:
            with self._ended:
                job.in_call = False
                if job.given_up:
                    raise _GivenUp
