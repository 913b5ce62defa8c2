"""Deadlines for calls of environment code.

In the main thread, an alarm (SIGALRM) interrupts a late call. Python cannot interrupt other
threads: there, a late call goes on and its result is dropped. A late coroutine is cancelled.
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
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.errors import CtrlC

REPEAT_S = 1.0  # between the alarms of a late call, which may swallow the first one
GRACE_S = 5.0  # an event loop that does not answer for this long is replaced
MAX_BESIDE = 64  # calls in the background at the same time
MAX_HANGS = 3  # in a row; then a domain is not called again in this rollout
MAX_CHARACTERS = 10_000_000  # of a text from an environment; longer ones take long to tokenize
FAULT_CHARACTERS = 500  # of the text of a fault
# Files that cannot be the place of a fault.
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen ", __file__)


class CallTimeout(BaseException):
    """Interrupts a late call. It is no Exception, so that `except Exception` does not catch it."""


class Outage(Exception):
    """An environment raises it if a service is down, which is no fault of the policy.

    It may be raised in `reset`, a tool, the user's `reply` and `get_reward`: the episode ends, and
    training leaves it out. Never raise it for a situation that a policy can cause.
    """


class EnvironmentFault(Exception):
    """Code of an environment raised, or took too long; the text is one line.

    `outage`: a service is down, or the domain is not called any more.
    """

    def __init__(self, text: str, timed_out: bool = False, outage: bool = False) -> None:
        super().__init__(text)
        self.timed_out, self.outage = timed_out, outage


class _State(threading.local):  # of the guarded call in the current thread
    deadline = math.inf
    interruptible = False  # whether the alarm may raise
    frame: Any = None  # of `_under_alarm`, in which the alarm must not raise


_state = _State()
_other_handler: Any = None  # of SIGALRM, set by other code


def guarded(name: str, seconds: float, call: Callable[[], Any]) -> Any:
    """Return the result of `call`, awaited if it is awaitable.

    Raises EnvironmentFault if the call raises or takes more than `seconds`. Then it is interrupted
    in the main thread, unless it is blocked outside Python; in other threads it is not.
    """
    begun, outer_deadline = time.monotonic(), _state.deadline
    _state.deadline = begun + seconds
    result, fault = None, None
    try:
        result = _under_alarm(seconds, call) if _in_main_thread() else settled(call())
    except CallTimeout:
        fault = too_long(name, seconds)
    except BaseException as error:
        fault = EnvironmentFault(describe(only_faults(error)), outage=is_outage(error))
    finally:
        _state.deadline = outer_deadline
    if time.monotonic() - begun > seconds:  # a late result or fault does not count
        fault = too_long(name, seconds)
    if fault is not None:
        raise fault
    return result


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def too_long(name: str, seconds: float) -> EnvironmentFault:
    return EnvironmentFault(f"CallTimeout: {name} took more than {seconds:g} s", timed_out=True)


def only_faults(error: BaseException) -> BaseException:
    """Return an exception of environment code; raise a deadline or a person's Ctrl-C again."""
    # For Ctrl-C, `run.py` raises CtrlC and Python's default handler raises KeyboardInterrupt.
    by_python = signal.getsignal(signal.SIGINT) is signal.default_int_handler and _in_main_thread()
    is_person = isinstance(error, CtrlC) or (isinstance(error, KeyboardInterrupt) and by_python)
    if is_person or isinstance(error, CallTimeout):
        raise error
    return error


def is_outage(error: BaseException) -> bool:
    """Whether an exception is an Outage, or a group of exceptions that holds one."""
    in_group = isinstance(error, BaseExceptionGroup) and error.subgroup(Outage) is not None
    return in_group or isinstance(error, Outage)


def describe(error: BaseException) -> str:
    """Type and text of an exception in one short line; with its place if it is no Exception."""
    name, text = type(error).__name__, " ".join(text_of(error)[:FAULT_CHARACTERS].split())
    line = f"{name}: {text}" if text else name
    if isinstance(error, Exception):
        return line
    frames = traceback.extract_tb(error.__traceback__)
    last = ([f for f in frames if not f.filename.startswith(_LIBRARIES)] or frames)[-1]
    return f"{line}, in {Path(last.filename).name}, line {last.lineno}"


def text_of(error: BaseException) -> str:
    try:
        return writable(str(error)[:MAX_CHARACTERS])
    except BaseException as failure:  # `__str__` is code of an environment too
        only_faults(failure)
        return "its text cannot be made"


def writable(text: str) -> str:
    """The text without lone surrogates, which tokenizers and files do not accept.

    Raises ValueError if it is longer than MAX_CHARACTERS.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"returned {len(text)} characters, the limit is {MAX_CHARACTERS}")
    return text.encode(errors="replace").decode()


def _alarm(number: int, frame: Any) -> None:
    """Interrupt the guarded call; if there is none, run the handler of other code."""
    if _state.frame is None:
        if callable(_other_handler):
            _other_handler(number, frame)
    elif _state.interruptible and frame is not _state.frame:
        raise CallTimeout


def _under_alarm(seconds: float, call: Callable[[], Any]) -> Any:
    """Make a call that an alarm interrupts once it is late, repeatedly if it swallows the alarm.

    Afterwards no alarm is left, and a timer of other code goes on. The handler stays, because
    setting it takes longer than most calls.
    """
    global _other_handler
    if (handler := signal.getsignal(signal.SIGALRM)) is not _alarm:
        _other_handler = handler
        signal.signal(signal.SIGALRM, _alarm)
    begun, _state.frame = time.monotonic(), sys._getframe()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)
    try:
        _state.interruptible = True
        return settled(call())
    finally:
        _state.interruptible = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        _state.frame = None
        if left:
            left -= time.monotonic() - begun
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-6), interval)


def settled(value: Any) -> Any:
    """Return `value`, awaited if it is awaitable: tools, users and rewards may be sync or async.

    One event loop awaits all of them, so that a client that is opened in one call works in the
    next. At the deadline of the guarded call the coroutine is cancelled.
    """
    if not inspect.isawaitable(value):
        return value
    interruptible, _state.interruptible = _state.interruptible, False  # `wait` has a timeout
    try:
        future = _environment_loop.run(_outcome(value))
        wait([future], min(max(0.0, _state.deadline - time.monotonic()), threading.TIMEOUT_MAX))
        if not future.done():
            future.cancel()
            _environment_loop.replace_if_blocked()
            raise CallTimeout
        result, error = future.result()
    finally:
        _state.interruptible = interruptible
    if error is not None:
        raise error
    return result


async def _outcome(value: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    try:
        return await value, None
    except BaseException as error:  # SystemExit would end the event loop
        return None, error


class _EventLoop:
    """An asyncio event loop in a daemon thread, started when it is first needed."""

    _loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = threading.Thread()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        with self._lock:
            if not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def replace_if_blocked(self) -> None:
        """Use a new loop from now on if a call blocks this one for GRACE_S seconds."""
        thread, probe = self._thread, self.run(asyncio.sleep(0))
        if not wait([probe], GRACE_S).done and self._thread is thread:
            self._thread = threading.Thread()

    def _serve(self) -> None:
        loop = self._loop
        while not loop.is_closed():
            with suppress(BaseException):  # a task that raises SystemExit ends `run_forever`
                loop.run_forever()


_environment_loop = _EventLoop()  # runs coroutines of environments
_work_loop = _EventLoop()  # runs the works of `Calls.beside`, which never block it

Guard = Callable[[str, Callable[[], Any]], Awaitable[Any]]  # makes a call: its name, the function
Work = Callable[[Guard], Coroutine[Any, Any, None]]  # one or more calls of one environment
Key = tuple[str, str]  # domain and task


class Calls:
    """Runs the work of environments; each call has a deadline of `seconds`.

    `on_call` gets the task whose call is made or waited for next; it runs in the calling thread.
    After MAX_HANGS late calls in a row, all further work of a domain fails at once: an outage
    costs a rollout a few deadlines, not one per episode.
    """

    def __init__(self, seconds: float, on_call: Callable[[str], None]) -> None:
        self.seconds, self.on_call = seconds, on_call
        self._places = asyncio.Semaphore(MAX_BESIDE)
        self._background: set[Future[None]] = set()
        # Of each domain: late calls in a row, and the deadline of the one that was counted last.
        self._hangs: dict[str, tuple[int, float]] = defaultdict(lambda: (0, -math.inf))

    def here(self, key: Key, work: Work) -> None:
        """Do the work in this thread; raises EnvironmentFault if one of its calls fails."""

        async def guard(name: str, call: Callable[[], Any]) -> Any:
            self.on_call("/".join(key))
            return guarded(name, self.seconds, call)

        begun = time.monotonic()
        self._check(key)
        try:
            work(guard).send(None)  # this guard never waits: the coroutine ends
        except StopIteration:
            self._note(key, None, begun)
        except EnvironmentFault as fault:
            self._note(key, fault, begun)
            raise

    def beside(self, key: Key, work: Work) -> Callable[[], None]:
        """Do the work in the background; returns a function that waits and raises as `here` does.

        A hung call keeps its daemon thread, but neither its place among the MAX_BESIDE nor the
        process. The work ends at a late call.
        """
        begun = 0.0

        async def guard(name: str, call: Callable[[], Any]) -> Any:
            nonlocal begun
            async with self._places:
                self._check(key)
                begun = time.monotonic()
                return await _in_thread(name, self.seconds, call)

        future = _work_loop.run(work(guard))
        self._background.add(future)
        future.add_done_callback(self._background.discard)

        def wait_for_it() -> None:
            self.on_call("/".join(key))
            fault = future.exception()
            self._note(key, fault, begun)
            if fault is not None:
                raise fault

        return wait_for_it

    def forget(self) -> None:
        """Give up all work in the background, and call all domains again."""
        for future in list(self._background):
            future.cancel()
        self._hangs.clear()

    def _note(self, key: Key, fault: BaseException | None, begun: float) -> None:
        """Count a late call; calls that hang at the same time count once."""
        count, deadline = self._hangs[key[0]]
        if not (isinstance(fault, EnvironmentFault) and fault.timed_out):
            self._hangs[key[0]] = 0, deadline
        elif begun >= deadline:
            self._hangs[key[0]] = count + 1, begun + self.seconds

    def _check(self, key: Key) -> None:
        """Raise EnvironmentFault if the domain is not called any more."""
        count, _ = self._hangs[key[0]]
        if count >= MAX_HANGS:
            raise EnvironmentFault(
                f"CallTimeout: {key[0]} is not called again in this rollout, after {count} "
                f"times in a row that took more than {self.seconds:g} s",
                timed_out=True,
                outage=True,
            )


async def _in_thread(name: str, seconds: float, call: Callable[[], Any]) -> Any:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # a late result is dropped

    def run() -> None:
        try:
            future.set_result(guarded(name, seconds, call))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="environment", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):  # unlike `wait_for`, it never ignores a cancellation
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise too_long(name, seconds) from None
