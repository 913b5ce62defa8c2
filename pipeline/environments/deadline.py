"""A deadline for each call of code that is not ours.

In the main thread an alarm interrupts the call. Elsewhere Python can interrupt nothing: there the
call is told late when it comes back, and whoever waits for it must give it up. What is awaited is
cancelled in the event loop.
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
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
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
