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
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future, wait
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar

from pipeline.environments.faults import (
    CallTimeout,
    fault_of,
    in_main_thread,
    too_long,
)

REPEAT_S = 1.0  # between the alarms of a late call, which may swallow the first one
GRACE_S = 5.0  # an event loop that does not answer for this long is replaced
_signal: Any = import_module("_signal")  # `signal` makes enums, which takes longer than most calls

Value = TypeVar("Value")
# A call of an environment. It yields an awaitable of the environment and receives its result.
Steps = Generator[Awaitable[Any], Any, Value]


class _State(threading.local):  # of the guarded call in the current thread
    deadline = math.inf
    interruptible = False  # whether the alarm may raise
    frame: Any = None  # of `_under_alarm`, in which the alarm must not raise


_state = _State()
_other_handler: Any = None  # of SIGALRM, set by other code


def guarded(name: str, seconds: float, call: Callable[[], Any]) -> Any:
    """Return the result of `call`, awaited if it is awaitable; `call` may also return Steps.

    Raises EnvironmentFault if the call raises or takes more than `seconds`. Then it is interrupted
    in the main thread, unless it is blocked outside Python; in other threads it is not.
    """
    begun, outer_deadline = time.monotonic(), _state.deadline
    _state.deadline = begun + seconds
    result, fault = None, None
    try:
        steps = steps_of(call)
        result = _under_alarm(seconds, steps) if in_main_thread() else run_steps(steps)
    except CallTimeout:
        fault = too_long(name, seconds)
    except BaseException as error:
        fault = fault_of(error)
    finally:
        _state.deadline = outer_deadline
    if time.monotonic() - begun > seconds:  # a late result or fault does not count
        fault = too_long(name, seconds)
    if fault is not None:
        raise fault
    return result


def _alarm(number: int, frame: Any) -> None:
    """Interrupt the guarded call; if there is none, run the handler of other code."""
    if _state.frame is None:
        if callable(_other_handler):
            _other_handler(number, frame)
    elif _state.interruptible and frame is not _state.frame:
        raise CallTimeout


def _under_alarm(seconds: float, steps: Steps[Any]) -> Any:
    """Make a call that an alarm interrupts once it is late, repeatedly if it swallows the alarm.

    Afterwards no alarm is left, and a timer of other code goes on. The handler stays, because
    setting it takes longer than most calls.
    """
    global _other_handler
    if (handler := _signal.getsignal(signal.SIGALRM)) is not _alarm:
        _other_handler = handler
        signal.signal(signal.SIGALRM, _alarm)
    begun, _state.frame = time.monotonic(), sys._getframe()
    left, interval = _signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)
    try:
        _state.interruptible = True
        return run_steps(steps)
    finally:
        _state.interruptible = False
        _signal.setitimer(signal.ITIMER_REAL, 0)
        _state.frame = None
        if left:
            left -= time.monotonic() - begun
            _signal.setitimer(signal.ITIMER_REAL, max(left, 1e-6), interval)


def settled(value: Any) -> Any:
    """Return `value`, awaited if it is awaitable: tools, users and rewards may be sync or async."""
    return run_steps(awaited(value))


def awaited(value: Any) -> Steps[Any]:
    """Steps that return `value`, or its result if it is awaitable."""
    if inspect.isawaitable(value):
        value = yield value
    return value


def steps_of(call: Callable[[], Any]) -> Steps[Any]:
    """Steps of a call that returns Steps, an awaitable or a value."""
    value = call()
    if inspect.isgenerator(value):
        return (yield from value)
    return (yield value) if inspect.isawaitable(value) else value


def first_step(steps: Steps[Any]) -> tuple[Awaitable[Any] | None, Any]:
    """Run a call up to its first awaitable; returns the awaitable, or None and the result."""
    try:
        return next(steps), None
    except StopIteration as end:
        return None, end.value


def run_steps(steps: Steps[Value]) -> Value:
    """Run a call in this thread; the first awaitable and the rest run in the event loop.

    One event loop runs all of them, so that a client that is opened in one call works in the next.
    At the deadline of the guarded call the coroutine is cancelled.
    """
    result: Value
    awaitable, result = first_step(steps)
    if awaitable is None:
        return result
    interruptible, _state.interruptible = _state.interruptible, False  # `wait` has a timeout
    try:
        future = environment_loop.run(_finish(steps, awaitable))
        wait([future], min(max(0.0, _state.deadline - time.monotonic()), threading.TIMEOUT_MAX))
        if not future.done():
            future.cancel()
            work_loop.run(environment_loop.replace_if_blocked()).result()
            raise CallTimeout
        result, error = future.result()
    finally:
        _state.interruptible = interruptible
    if error is not None:
        raise error
    return result


async def _finish(
    steps: Steps[Any], awaitable: Awaitable[Any] | None = None
) -> tuple[Any, BaseException | None]:
    """Run the rest of a call in the event loop; returns its result and its exception."""
    try:
        if awaitable is None:
            awaitable = next(steps)
        while True:
            try:
                result = await awaitable
            except BaseException as error:
                awaitable = steps.throw(error)
            else:
                awaitable = steps.send(result)
    except StopIteration as end:
        return end.value, None
    except BaseException as error:  # SystemExit would end the event loop
        return None, error


async def finish_or_fault(steps: Steps[Any], awaitable: Awaitable[Any] | None) -> tuple[Any, Any]:
    """Like `_finish`, with a fault for the exception; its text is code of the environment too."""
    result, error = await _finish(steps, awaitable)
    return result, None if error is None else fault_of(error)


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

    async def replace_if_blocked(self) -> None:
        """Use a new loop from now on if a call blocks this one for GRACE_S seconds."""
        thread, probe = self._thread, asyncio.wrap_future(self.run(asyncio.sleep(0)))
        await asyncio.wait([probe], timeout=GRACE_S)
        if not probe.done() and self._thread is thread:
            self._thread = threading.Thread()

    def _serve(self) -> None:
        loop = self._loop
        while not loop.is_closed():
            with suppress(BaseException):  # a task that raises SystemExit ends `run_forever`
                loop.run_forever()


environment_loop = _EventLoop()  # runs coroutines of environments
work_loop = _EventLoop()  # runs the works of `Calls.beside`, which never block it
