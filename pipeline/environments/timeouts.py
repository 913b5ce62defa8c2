"""A deadline for each call of code that is not ours.

In the main thread an alarm interrupts the call. Elsewhere Python can interrupt nothing: there the
call is told late when it comes back, and whoever waits for it must give it up. What is awaited is
cancelled in the event loop. `Calls` plays calls here, or beside each other in threads.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import CtrlC

REPEAT_S = 1.0  # between the alarms of a call that is late: code may swallow one
GRACE_S = 5.0  # after which an event loop that should have cancelled a call is held up by one
MAX_CHARACTERS = 10_000_000  # of a text that an environment returns; more would be tokenized long
FAULT_CHARACTERS = 500  # of the text of a fault

# Files that are not looked at for the place of a fault.
_OTHERS = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen ", __file__)


class CallTimeout(BaseException):
    """Interrupts a call at its deadline; no Exception, so that `except Exception` lets it pass."""


class Outage(Exception):
    """An environment's own word that a service is down, through no fault of the policy's.

    It may be raised in `reset`, a tool, the user's `reply` and `get_reward`: the episode ends, and
    training leaves it out. Never raise it for what a policy can bring about.
    """


class EnvironmentFault(Exception):
    """Code of an environment raised, or took too long; the text is one line and says which.

    `outage`: it says that a service is down, or its domain is not called any more.
    """

    def __init__(self, text: str, timed_out: bool = False, outage: bool = False) -> None:
        super().__init__(text)
        self.timed_out, self.outage = timed_out, outage


class _Here(threading.local):
    """The call that this thread is making."""

    until = math.inf  # its deadline
    interruptible = False  # the alarm may raise
    frame: Any = None  # of the function that makes it
    has_alarms = False
    others: Any = None  # handler of SIGALRM


_here = _Here()


def guarded(name: str, seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns, awaited if it is awaitable.

    Raises EnvironmentFault where it raises, or takes longer than so many seconds. In the main
    thread it is then interrupted, unless it is stuck outside Python; in others it is not.
    """
    begun, outer = time.monotonic(), _here.until
    _here.until = begun + seconds
    result, late = None, False
    fault: EnvironmentFault | None = None
    try:
        if _here.has_alarms:
            result = _under_alarm(seconds, call)
        elif _in_main_thread():
            with alarms():
                result = _under_alarm(seconds, call)
        else:
            result = settled(call())
    except CallTimeout:
        late = True
    except BaseException as error:
        fault = EnvironmentFault(describe(only_faults(error)), outage=is_outage(error))
    finally:
        _here.until = outer
    if late or time.monotonic() - begun > seconds:  # what came too late does not count
        raise too_long(name, seconds)
    if fault is not None:
        raise fault
    return result


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def too_long(name: str, seconds: float) -> EnvironmentFault:
    return EnvironmentFault(f"CallTimeout: {name} took more than {seconds:g} s", timed_out=True)


def only_faults(error: BaseException) -> BaseException:
    """What code that is not ours has raised, be it SystemExit; whatever else is raised again here.

    That is a call's deadline, and a person at the keyboard: `run.py` raises CtrlC then, Python's
    own handler of the signal KeyboardInterrupt, which no code may be blamed for.
    """
    by_python = signal.getsignal(signal.SIGINT) is signal.default_int_handler and _in_main_thread()
    if isinstance(error, CallTimeout | CtrlC):
        raise error
    if isinstance(error, KeyboardInterrupt) and by_python:
        raise error
    return error


def is_outage(error: BaseException) -> bool:
    """Whether it is an Outage, or tasks that were awaited together raised one among others."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(Outage) is not None
    return isinstance(error, Outage)


def describe(error: BaseException) -> str:
    """Its type and text, in one line of bounded length; if it is no Exception, with its place."""
    name, text = type(error).__name__, " ".join(text_of(error)[:FAULT_CHARACTERS].split())
    place = "" if isinstance(error, Exception) else _place_of(error)
    return (f"{name}: {text}" if text else name) + place


def _place_of(error: BaseException) -> str:
    """`, in bank.py, line 7`: the last line outside of libraries before it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_OTHERS)]
    last = next(iter([*own[-1:], *frames[-1:]]), None)
    return "" if last is None else f", in {Path(last.filename).name}, line {last.lineno}"


def text_of(error: BaseException) -> str:
    try:
        return writable(str(error)[:MAX_CHARACTERS])
    except BaseException as unspeakable:  # such a text is code of an environment as well
        only_faults(unspeakable)
        return "its text cannot be made"


def writable(text: str) -> str:
    """The text without halves of characters, which break tokenizers and files.

    Raises ValueError where it is longer than any conversation.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"returned {len(text)} characters, the limit is {MAX_CHARACTERS}")
    return text.encode(errors="replace").decode()


@contextmanager
def alarms() -> Iterator[None]:
    """Around many calls: the handler of SIGALRM that interrupts them, set once, which costs most.

    Alarms of others reach their own handler, which is back at the end.
    """
    if _here.has_alarms or not _in_main_thread():
        yield
        return
    _here.others = signal.signal(signal.SIGALRM, _ring) or signal.SIG_DFL
    _here.has_alarms = True
    try:
        yield
    finally:
        _here.has_alarms = False
        # An alarm that is still on its way is dropped: the default action would end the process.
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, _here.others)


def _ring(number: int, frame: Any) -> None:
    """Interrupts a call where it is, but not the function below that makes it."""
    if _here.frame is None:
        if callable(_here.others):
            _here.others(number, frame)
    elif _here.interruptible and frame is not _here.frame:
        raise CallTimeout


def _under_alarm(seconds: float, call: Callable[[], Any]) -> Any:
    """Make a call that is interrupted once it is late, and again should it swallow that.

    When this returns or raises, no alarm is left, and a timer that ran before goes on.
    """
    begun, _here.frame = time.monotonic(), sys._getframe()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)
    try:
        return _interruptible(call)
    finally:
        _here.interruptible = False
        _, repeat = signal.setitimer(signal.ITIMER_REAL, 0)
        _here.frame = None
        if repeat != REPEAT_S:  # the call has set alarms of its own, perhaps a handler
            signal.signal(signal.SIGALRM, _ring)
        if left:
            left -= time.monotonic() - begun
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-6), interval)


def _interruptible(call: Callable[[], Any]) -> Any:
    _here.interruptible = True
    return settled(call())


def settled(value: Any) -> Any:
    """`value`, awaited if it is awaitable: tools, users and rewards may be sync or async.

    All are awaited in one event loop of a thread of its own, so that a client that an environment
    opens in one call serves in the next. At the deadline of the call it is cancelled.
    """
    if not inspect.isawaitable(value):
        return value
    interruptible, _here.interruptible = _here.interruptible, False  # this wait ends by itself
    try:
        result, error = _loops.run(value, _here.until)
    finally:
        _here.interruptible = interruptible
    if error is not None:
        raise error
    return result


Outcome = tuple[Any, BaseException | None]


class _Loops:
    """The event loop that serves; where a call holds it up beyond its deadline, a new one does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # threads may ask at once
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, value: Any, until: float) -> Outcome:
        with self._lock:
            if self._loop is None or self._loop.is_closed():
                self._loop = asyncio.new_event_loop()
                serve = threading.Thread(target=_serve, args=[self._loop], daemon=True)
                serve.name = "event loop"
                serve.start()
            loop = self._loop
        seconds = None if until == math.inf else max(0.0, until - time.monotonic())
        future: Future[Outcome] = Future()
        loop.call_soon_threadsafe(_start, value, seconds, future)
        try:
            return future.result(None if seconds is None else seconds + GRACE_S)
        except TimeoutError:
            with self._lock:
                if self._loop is loop:
                    self._loop = None
            return None, CallTimeout()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    while not loop.is_closed():  # a task that raises SystemExit ends `run_forever`
        try:
            loop.run_forever()
        except BaseException as error:
            loop.call_exception_handler({"message": "in a task", "exception": error})


def _start(value: Any, seconds: float | None, future: Future[Outcome]) -> None:
    """In the event loop: what is awaited, until it ends or its time does."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(_outcome(value))
    timer = None if seconds is None else loop.call_later(seconds, _expire, task, future)

    def end(_: Any) -> None:
        if timer is not None:
            timer.cancel()
        if not future.done():
            cancelled = (None, asyncio.CancelledError())  # by its own code
            future.set_result(cancelled if task.cancelled() else task.result())

    task.add_done_callback(end)


def _expire(task: asyncio.Task[Outcome], future: Future[Outcome]) -> None:
    future.set_result((None, CallTimeout()))
    task.cancel()  # not waited for: it may refuse


async def _outcome(value: Any) -> Outcome:
    try:
        return await value, None
    except BaseException as error:  # raised where it was asked for; here it would end the loop
        return None, error


_loops = _Loops()


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
