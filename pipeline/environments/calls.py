"""Calls of environment code, each with a deadline. A call that passes the deadline is late.

There are three places for a call. No one of them can take all calls:

- The main thread, for calls that do not wait. An alarm (SIGALRM) interrupts a late call, and Python
  can interrupt no other thread: in a worker thread, an endless loop would slow the run down to its
  end. Such code may call `asyncio.run`, so `_no_running_loop` hides the rollout's event loop.
- A thread for each call that waits and is not async. A late call continues; its result is dropped.
- One event loop in a thread of its own, for coroutines: they go on while the main thread samples,
  and a coroutine that blocks does not stop the run. A late coroutine is cancelled.
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
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

from pipeline.common.children import end_child
from pipeline.environments.faults import (
    CallTimeout,
    EnvironmentFault,
    describe,
    is_outage,
    only_faults,
    too_long,
    wait_of,
)

REPEAT_S = 1.0  # seconds between alarms; a late call may catch the first alarm's CallTimeout
MAX_THREADS = 512  # largest number of threads for synchronous calls in the background
TICK_S = 1.0  # seconds between two signs of progress while the calling thread waits
GRACE_S = 5.0  # seconds until a blocked event loop is replaced
MAX_HANGS = 3  # a rollout stops calling a domain after this number of late calls in a row

Value = TypeVar("Value")
Key = tuple[str, str]  # (domain, task id)


class _State(threading.local):  # for each thread, the state of the call that `guarded` runs
    deadline = math.inf
    interruptible = False  # whether the alarm may interrupt the call now
    frame: Any = None  # frame of `_under_alarm`; the alarm must not interrupt `_under_alarm` itself


_state = _State()
_other_handler: Any = None  # SIGALRM handler that other code has installed


def guarded(name: str, seconds: float, call: Callable[[], Any]) -> Any:
    """Call a function as `run_here` does, and return its value.

    Raises EnvironmentFault if the call fails or takes more than `seconds`. In the main thread, an
    alarm interrupts the call after `seconds`, unless the call is blocked inside C code.
    """
    begun = time.monotonic()
    outer_deadline = _state.deadline
    pid = os.getpid()
    _state.deadline = begun + seconds
    result = None
    fault = None
    try:
        # Synchronous code may call `asyncio.run`, which no running event loop may surround.
        with _no_running_loop():
            if threading.current_thread() is threading.main_thread():
                result = _under_alarm(seconds, call)
            else:
                result = run_here(call)
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
    if signal.getsignal(signal.SIGALRM) is _alarm:
        signal.signal(signal.SIGALRM, _other_handler or signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_child)


def _under_alarm(seconds: float, call: Callable[[], Any]) -> Any:
    """Run a call; an alarm interrupts the call after `seconds`, then again every REPEAT_S seconds.

    A timer that other code has set continues after the call. After the call, `_alarm` stays the
    handler of SIGALRM, because installing a handler takes longer than most calls.
    """
    global _other_handler
    if (handler := signal.getsignal(signal.SIGALRM)) is not _alarm:
        _other_handler = handler
        signal.signal(signal.SIGALRM, _alarm)
    begun = time.monotonic()
    _state.frame = sys._getframe()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)
    try:
        _state.interruptible = True
        return run_here(call)
    finally:
        _state.interruptible = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        _state.frame = None
        if left:
            left -= time.monotonic() - begun
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-6), interval)


@contextmanager
def _no_running_loop() -> Iterator[None]:
    """Inside this context, asyncio sees no running event loop in this thread."""
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(running)


def run_coroutine(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """Run a coroutine in this thread, also where an event loop runs already (in a notebook).

    Unlike `asyncio.run`, this function leaves Ctrl-C to the present handler.
    """
    loop = asyncio.new_event_loop()
    try:
        return run_in(loop, coroutine)
    finally:
        end_loop(loop)


def run_in(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Value]) -> Value:
    """Run a coroutine in this thread; other tasks of the loop may be left for the next call."""
    with _no_running_loop():
        return loop.run_until_complete(coroutine)


def end_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is left in a loop, and close it."""
    with _no_running_loop():
        if left := asyncio.all_tasks(loop):  # Ctrl-C leaves tasks behind
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left))
        loop.close()


# Coroutines of environments


class _Threads(ThreadPoolExecutor):
    """Runs each call of `asyncio.to_thread` in a thread of its own, so that none waits for one."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return _in_thread(partial(fn, *args, **kwargs))


class _EnvironmentLoop:
    """An asyncio event loop in a daemon thread. The first call of `run` starts the thread.

    All environments share the loop, so that a network client keeps working from call to call.
    """

    _loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = threading.Thread()

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, Value]) -> Future[Value]:
        with self._lock:
            if not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._loop.set_default_executor(_Threads())
                self._thread = threading.Thread(target=self._serve, daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def replace_if_blocked(self) -> None:
        """Replace the event loop if a coroutine blocks the event loop for GRACE_S seconds."""
        thread = self._thread
        probe = self.run(asyncio.sleep(0))
        wait([probe], GRACE_S)
        if not probe.done() and self._thread is thread:
            self._thread = threading.Thread()

    def _serve(self) -> None:
        loop = self._loop
        while not loop.is_closed():
            with suppress(BaseException):  # a SystemExit in an asyncio task ends `run_forever`
                loop.run_forever()


environment_loop = _EnvironmentLoop()


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, or an object that can be called, is async."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def awaited(value: Any) -> Any:
    """Return `value`, or the awaited result if `value` is awaitable.

    In another thread than the event loop's, wait for the event loop, until the deadline of
    `guarded`.
    """
    if inspect.isawaitable(value):
        return await value if environment_loop.is_here else _wait_for(value)
    return value


def run_here(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that awaits nothing but `awaited`, in this thread; return the result."""
    value = function(*arguments)
    if not inspect.iscoroutine(value):
        return value
    try:
        value.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError(f"{function} awaits something other than `awaited`")


def _wait_for(awaitable: Awaitable[Any]) -> Any:
    interruptible = _state.interruptible
    _state.interruptible = False  # `wait` needs no alarm
    try:
        future = environment_loop.run(_ended(awaitable))
        wait([future], min(max(0.0, _state.deadline - time.monotonic()), threading.TIMEOUT_MAX))
        if not future.done():
            future.cancel()
            environment_loop.replace_if_blocked()
            raise CallTimeout
        result, error = future.result()
    finally:
        _state.interruptible = interruptible
    if error is not None:
        raise error
    return result


async def _ended(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Return (result, None), or (None, exception): some exceptions would end the event loop."""
    pid = os.getpid()
    try:
        result = await awaitable
        if os.getpid() != pid:
            end_child()
    except BaseException as error:
        if os.getpid() != pid:
            end_child(error)
        return None, error
    return result, None


async def _in_time(
    call: Callable[[], Awaitable[Any]], name: str, seconds: float | None
) -> tuple[Any, EnvironmentFault | None]:
    """Await a call in the environments' event loop; return (result, None), or (None, fault)."""
    try:
        async with asyncio.timeout(seconds) as limit:
            result, error = await _ended(call())
    except TimeoutError:
        error = None
    except BaseException as failure:  # another coroutine has cancelled this task
        error = failure
    if limit.expired():
        assert seconds is not None
        return None, too_long(name, seconds)
    if error is not None:
        return None, fault_of(error, name)
    return result, None


def _in_thread(call: Callable[[], Value]) -> Future[Value]:
    future: Future[Value] = Future()
    future.set_running_or_notify_cancel()  # makes `future.cancel` ineffective

    def run() -> None:
        try:
            future.set_result(call())
        except StopIteration as error:  # which no future of asyncio takes
            future.set_exception(
                RuntimeError(f"it raised {error!r}").with_traceback(error.__traceback__)
            )
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="environment", daemon=True).start()
    return future


def fault_of(error: BaseException, name: str) -> EnvironmentFault:
    text = describe(only_faults(error))
    outage = is_outage(error)
    if text == "CancelledError":  # raised by no line of code: its task was cancelled
        text += ": code that shares its event loop cancelled it; cancel only your own tasks"
    wait_s = None if outage else wait_of(error)  # who raises an Outage has waited
    return EnvironmentFault(text, name, outage=outage, wait_s=wait_s)


def _cut_off(name: str) -> EnvironmentFault:
    return EnvironmentFault(f"CallTimeout: {name} did not end before rollout_timeout", name)


class Calls:
    """Calls environments, each call for at most `seconds`.

    `on_call` gets "domain/task" before each call that runs in the calling thread, and before an
    answer from the background is taken, and "" in each second of a pause. After MAX_HANGS late
    calls of a domain in a row, each further call of the domain fails immediately. So a broken
    service delays a rollout by only a few deadlines. `answered` is set when an answer from the
    background is taken. `spent_s` are the seconds of calls in the calling thread.
    """

    def __init__(self, seconds: float, on_call: Callable[[str], None] = lambda key: None) -> None:
        self.seconds = seconds
        self.on_call = on_call
        self.spent_s = 0.0
        self.end_after(None)
        self.begin()

    def end_after(self, timeout_s: float | None) -> None:
        """Let further calls in the background be late after `timeout_s`; try every domain again."""
        self.until = time.monotonic() + (timeout_s or math.inf)
        # domain -> (number of late calls in a row, deadline of the late call that was counted last)
        self._hangs: dict[str, tuple[int, float]] = defaultdict(lambda: (0, -math.inf))

    def begin(self) -> None:
        """Serve another rollout, in an event loop of its own."""
        self.answered = asyncio.Event()
        self._threads = asyncio.Semaphore(MAX_THREADS)
        self._num_beside = 0  # calls in the background that have not ended

    @property
    def is_busy(self) -> bool:
        """Whether a call runs in the background; a user's loop is no call."""
        return self._num_beside > 0

    def here(self, key: Key, name: str, call: Callable[[], Any]) -> Any:
        """Make a call in the calling thread; raises EnvironmentFault if it fails."""
        self.on_call("/".join(key))
        self._check(key)
        begun = time.monotonic()
        try:
            result = guarded(name, self.seconds, call)
        except EnvironmentFault as fault:
            self._note(key, fault, begun)
            raise
        finally:
            self.spent_s += time.monotonic() - begun
        self._note(key, None, begun)
        return result

    async def beside(
        self,
        key: Key,
        name: str,
        call: Callable[[], Any],
        *,
        is_async: bool,
        until: float | None = None,
    ) -> Any:
        """Make a call in the background; after `until` (default: the rollout's), it is late.

        A coroutine runs in the environments' event loop, and any other call in a new daemon thread.
        The thread of a late call no longer counts against MAX_THREADS.
        """
        self._num_beside += 1
        try:
            async with nullcontext() if is_async else self._threads:
                result = await self._made(key, name, call, is_async, until)
        finally:
            self._num_beside -= 1
            self.answered.set()
        self.on_call("/".join(key))
        return result

    async def _made(
        self,
        key: Key,
        name: str,
        call: Callable[[], Any],
        is_async: bool,
        until: float | None,
    ) -> Any:
        self._check(key)
        begun = time.monotonic()
        seconds = min(self.seconds, (self.until if until is None else until) - begun)
        late = too_long(name, self.seconds) if seconds == self.seconds else _cut_off(name)
        try:
            if seconds <= 0:
                raise late
            if is_async:
                future = environment_loop.run(_in_time(call, name, seconds))
                # The loop ends a late call itself, unless the call blocks the loop.
                result, fault = await _answer(future, name, seconds + GRACE_S, late)
                if fault is not None:
                    raise late if fault.timed_out else fault
            else:
                future = _in_thread(partial(guarded, name, seconds, call))
                result = await _answer(future, name, seconds, late)
        except EnvironmentFault as fault:
            self._note(key, fault, begun)
            raise
        self._note(key, None, begun)
        return result

    async def loop(
        self, key: Key, name: str, busy_s: Callable[[], float], call: Callable[[], Awaitable[Any]]
    ) -> Any:
        """Run a user's loop; `busy_s` gives the seconds since it last waited, or 0 while it does.

        The loop is late if it does something else for more than `seconds` without a break.
        """
        self._check(key)
        begun = time.monotonic()
        future = environment_loop.run(_in_time(call, name, None))
        waiting = asyncio.wrap_future(future)
        fault = None
        try:
            while not waiting.done() and fault is None:
                await asyncio.wait({waiting}, timeout=min(TICK_S, self.seconds / 2))
                if not future.done():
                    fault = self._late(name, busy_s())
            if fault is None:
                result, fault = waiting.result()
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the rollout is stopped
                raise
            fault = fault_of(error, name)
        finally:
            self.answered.set()
            future.cancel()
        self._note(key, fault, begun)
        if fault is not None:
            environment_loop.replace_if_blocked()
            raise fault
        self.on_call("/".join(key))
        return result

    def _late(self, name: str, busy_s: float) -> EnvironmentFault | None:
        if busy_s > self.seconds:
            return too_long(name, self.seconds)
        return _cut_off(name) if busy_s and time.monotonic() > self.until else None

    async def pause(self, seconds: float) -> None:
        """Wait, with a sign of progress in each second."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.on_call("")
            await asyncio.sleep(min(left, TICK_S))

    def _note(self, key: Key, fault: EnvironmentFault | None, begun: float) -> None:
        """Count a domain's late calls in a row; late calls that overlap in time count as one."""
        count, deadline = self._hangs[key[0]]
        if fault is None or not fault.timed_out:
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


async def _answer(future: Future[Any], name: str, seconds: float, late: EnvironmentFault) -> Any:
    """Return the result of a call in the background; raise `late` after `seconds`."""
    here = asyncio.wrap_future(future)
    here.add_done_callback(lambda it: it.cancelled() or it.exception())  # `future` raises it
    try:
        await asyncio.wait([here], timeout=seconds)
        # The answer may have come in time while this thread was busy.
        if future.done():
            return future.result()
    except EnvironmentFault as fault:
        raise late if fault.timed_out else fault from None
    except CancelledError as error:  # other code in the event loop has cancelled the call
        raise fault_of(error, name) from None
    finally:
        future.cancel()
    environment_loop.replace_if_blocked()
    raise late
