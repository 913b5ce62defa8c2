"""Deadlines for calls of environment code.

A call that passes the deadline is late. In the main thread, an alarm (SIGALRM) interrupts a late
call. Python can interrupt only the main thread, so a late call in another thread continues, and the
late result is dropped. A late coroutine is cancelled.
"""

import asyncio
import inspect
import math
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from pipeline.distributed.forks import end_child
from pipeline.environments.event_loop import (
    Steps,
    Value,
    environment_loop,
    finish,
    in_thread,
    work_loop,
)
from pipeline.environments.faults import (
    CallTimeout,
    EnvironmentFault,
    describe,
    is_outage,
    only_faults,
    too_long,
)
from pipeline.environments.waits import wait_of

REPEAT_S = 1.0  # seconds between alarms; a late call may catch the first alarm's CallTimeout
MAX_THREADS = 512  # largest number of threads for synchronous calls in the background
TICK_S = 1.0  # seconds between two signs of progress while the calling thread waits
MAX_HANGS = 3  # a rollout stops calling a domain after this number of late calls in a row
_signal: Any = import_module("_signal")  # faster than the module `signal`, which creates enums


class _State(threading.local):  # for each thread, the state of the call that `guarded` runs
    deadline = math.inf
    interruptible = False  # whether the alarm may interrupt the call now
    frame: Any = None  # frame of `_under_alarm`; the alarm must not interrupt `_under_alarm` itself


_state = _State()
_other_handler: Any = None  # SIGALRM handler that other code has installed


def guarded(name: str, seconds: float, call: Callable[[], Any]) -> Any:
    """Run `call` and return the value; if `call` returns an awaitable or Steps, wait for the value.

    Raises EnvironmentFault if the call fails or takes more than `seconds`. In the main thread, an
    alarm interrupts the call after `seconds`, unless the call is blocked inside C code.
    """
    begun, outer_deadline, pid = time.monotonic(), _state.deadline, os.getpid()
    _state.deadline = begun + seconds
    result, fault = None, None
    try:
        steps = steps_of(call)
        is_main = threading.current_thread() is threading.main_thread()
        result = _under_alarm(seconds, steps) if is_main else run_steps(steps)
        if os.getpid() != pid:
            end_child()
    except CallTimeout:
        fault = too_long(name, seconds)
    except BaseException as error:
        if os.getpid() != pid:
            end_child(error)
        fault = fault_of(error, name)
    finally:
        _state.deadline = outer_deadline
    if time.monotonic() - begun > seconds:  # drop the result or the fault of a late call
        fault = too_long(name, seconds)
    if fault is not None:
        raise fault
    return result


def _alarm(number: int, frame: Any) -> None:
    """Interrupt the call in `guarded`; if no call runs, pass SIGALRM on to other code's handler."""
    if _state.frame is None:
        if callable(_other_handler):
            _other_handler(number, frame)
    elif _state.interruptible and frame is not _state.frame:
        raise CallTimeout


def _in_child() -> None:
    """Give SIGALRM back, in a process that was forked during a call."""
    if _signal.getsignal(signal.SIGALRM) is _alarm:
        signal.signal(signal.SIGALRM, _other_handler or signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_child)


def _under_alarm(seconds: float, steps: Steps[Any]) -> Any:
    """Run a call; an alarm interrupts the call after `seconds`, then again every REPEAT_S seconds.

    A timer that other code has set continues after the call. After the call, `_alarm` stays the
    handler of SIGALRM, because installing a handler takes longer than most calls.
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
    """Return `value`, or the awaited result if `value` is awaitable."""
    return run_steps(awaited(value))


def awaited(value: Any) -> Steps[Any]:
    """Return Steps whose result is `value`, or the awaited result if `value` is awaitable."""
    if inspect.isawaitable(value):
        value = yield value
    return value


def steps_of(call: Callable[[], Any]) -> Steps[Any]:
    """Return Steps that make a call; the call may return Steps, an awaitable or a value."""
    value = call()
    if inspect.isgenerator(value):
        return (yield from value)
    return (yield from awaited(value))


def first_step(steps: Steps[Any]) -> tuple[Awaitable[Any] | None, Any]:
    """Run `steps` until the first awaitable; return (awaitable, None), or else (None, result)."""
    try:
        return next(steps), None
    except StopIteration as end:
        return None, end.value


def run_steps(steps: Steps[Value]) -> Value:
    """Run `steps` in the calling thread until the first awaitable; an event loop runs the rest.

    All environments share one event loop, so that a network client keeps working from call to call.
    A coroutine is cancelled at the deadline that `guarded` has set.
    """
    result: Value
    awaitable, result = first_step(steps)
    if awaitable is None:
        return result
    interruptible, _state.interruptible = _state.interruptible, False  # `wait` needs no alarm
    try:
        future = environment_loop.run(finish(steps, awaitable))
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


async def finish_or_fault(
    name: str, steps: Steps[Any], awaitable: Awaitable[Any] | None
) -> tuple[Any, Any]:
    """Return the result of `finish`, with an exception replaced by an EnvironmentFault."""
    result, error = await finish(steps, awaitable)
    return result, None if error is None else fault_of(error, name)


def _cut_off(name: str) -> EnvironmentFault:
    return EnvironmentFault(f"CallTimeout: {name} did not end before rollout_timeout", name)


def fault_of(error: BaseException, name: str) -> EnvironmentFault:
    text, outage = describe(only_faults(error)), is_outage(error)
    if text == "CancelledError":  # raised by no line of code: its task was cancelled
        text += ": code that shares its event loop cancelled it; cancel only your own tasks"
    wait_s = None if outage else wait_of(error)  # who raises an Outage has waited
    return EnvironmentFault(text, name, outage=outage, wait_s=wait_s)


class Guard(Protocol):
    """Makes a call with a deadline; the call gets no thread if `method` is a coroutine function."""

    async def __call__(self, name: str, call: Callable[[], Any], method: Any = None) -> Any: ...


Work = Callable[[Guard], Coroutine[Any, Any, None]]  # coroutine function that calls one environment
Key = tuple[str, str]  # (domain, task id)


@dataclass(frozen=True)
class Background:
    """Work in the background; a call waits for its end. Raises EnvironmentFault if it failed."""

    key: Key
    future: Future[None]
    calls: "Calls"

    def __call__(self) -> None:
        self.calls.on_call("/".join(self.key))
        self.calls.wait([self])
        self.future.result()


class Calls:
    """Runs functions that call environments; each call may take at most `seconds`.

    `on_call` gets "domain/task" before each call that runs in the calling thread, and before an
    answer from the background is taken, and "" in each second of waiting. After MAX_HANGS late
    calls of a domain in a row, each further call of the domain fails immediately. So a broken
    service delays a rollout by only a few deadlines.
    """

    def __init__(self, seconds: float, on_call: Callable[[str], None]) -> None:
        self.seconds, self.on_call = seconds, on_call
        self._threads = asyncio.Semaphore(MAX_THREADS)
        self._background: set[Future[None]] = set()
        # domain -> (number of late calls in a row, deadline of the late call that was counted last)
        self._hangs: dict[str, tuple[int, float]] = defaultdict(lambda: (0, -math.inf))

    def here(self, key: Key, work: Work) -> None:
        """Run `work` in the calling thread; raises EnvironmentFault if a call fails."""

        async def guard(name: str, call: Callable[[], Any], method: Any = None) -> Any:
            self.on_call("/".join(key))
            return guarded(name, self.seconds, call)

        begun = time.monotonic()
        self._check(key)
        try:
            work(guard).send(None)  # the coroutine runs to the end, because `guard` never waits
        except StopIteration:
            self._note(key, None, begun)
        except EnvironmentFault as fault:
            self._note(key, fault, begun)
            raise

    def beside(self, key: Key, work: Work, until: float = math.inf) -> Background:
        """Start `work` in the background; a call after `until` (by the monotonic clock) is late.

        Each synchronous call runs in a new daemon thread; coroutines run in an event loop. A late
        call ends `work`, and the thread of the late call no longer counts against MAX_THREADS.
        """
        begun = 0.0

        async def guard(name: str, call: Callable[[], Any], method: Any = None) -> Any:
            nonlocal begun
            steps, awaitable = steps_of(call), None
            is_async = inspect.iscoroutinefunction(method)
            async with nullcontext() if is_async else self._threads:
                self._check(key)
                begun = time.monotonic()
                if begun >= until:
                    raise _cut_off(name)
                if not is_async:
                    first = partial(guarded, name, self.seconds, partial(first_step, steps))
                    awaitable, result = await self._in_time(name, begun, until, in_thread(first))
                    if awaitable is None:
                        return result
            rest = environment_loop.run(finish_or_fault(name, steps, awaitable))
            try:
                result, fault = await self._in_time(name, begun, until, rest)
            except EnvironmentFault:
                await environment_loop.replace_if_blocked()
                raise
            if fault is not None:
                raise fault
            return result

        async def noted() -> None:
            try:
                await work(guard)
            except EnvironmentFault as fault:
                self._note(key, fault, begun)
                raise
            self._note(key, None, begun)

        future = work_loop.run(noted())
        self._background.add(future)
        future.add_done_callback(self._background.discard)
        return Background(key, future, self)

    def wait(self, works: Sequence[Background], for_all: bool = False) -> None:
        """Wait until one of the works has ended, or until all have ended."""
        futures, enough = [work.future for work in works], all if for_all else any
        while not enough(future.done() for future in futures):
            done, rest = wait(futures, TICK_S, ALL_COMPLETED if for_all else FIRST_COMPLETED)
            if rest and (for_all or not done):
                self.on_call("")

    async def _in_time(self, name: str, begun: float, until: float, call: Future[Value]) -> Value:
        deadline = min(begun + self.seconds, until)
        fault = too_long(name, self.seconds) if deadline < until else _cut_off(name)
        try:
            async with asyncio.timeout_at(deadline):  # `asyncio.wait_for` may lose a cancellation
                result = await asyncio.wrap_future(call)
        except TimeoutError:
            raise fault from None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # `forget` cancels this work
                raise
            raise fault_of(error, name) from None
        if time.monotonic() > deadline:
            raise fault
        return result

    def pause(self, seconds: float) -> None:
        """Wait, with a sign of progress in each second."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.on_call("")
            time.sleep(min(left, TICK_S))

    def forget(self) -> None:
        """Cancel all background work, and set every domain's count of late calls to zero."""
        for future in list(self._background):
            future.cancel()
        self._hangs.clear()

    def _note(self, key: Key, fault: BaseException | None, begun: float) -> None:
        """Count a domain's late calls in a row; late calls that overlap in time count as one."""
        count, deadline = self._hangs[key[0]]
        if not (isinstance(fault, EnvironmentFault) and fault.timed_out):
            self._hangs[key[0]] = 0, deadline
        elif begun >= deadline:
            self._hangs[key[0]] = count + 1, begun + self.seconds

    def _check(self, key: Key) -> None:
        count, _ = self._hangs[key[0]]
        if count >= MAX_HANGS:
            raise EnvironmentFault(
                f"CallTimeout: {key[0]} is not called again in this rollout, after {count} "
                f"times in a row that took more than {self.seconds:g} s",
                "call",
                timed_out=True,
                outage=True,
            )
