"""Calls of environments by a rollout: in its thread, or in the background."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

from pipeline.environments.faults import EnvironmentFault, too_long
from pipeline.environments.timeouts import (
    environment_loop,
    finish_or_fault,
    first_step,
    guarded,
    steps_of,
    work_loop,
)

MAX_THREADS = 64  # that make calls of synchronous code in the background at the same time
MAX_HANGS = 3  # in a row; then a domain is not called again in this rollout

Value = TypeVar("Value")


class Guard(Protocol):
    """Makes a call of `name`; a call of a coroutine function `method` needs no thread."""

    async def __call__(self, name: str, call: Callable[[], Any], method: Any = None) -> Any: ...


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
        self._threads = asyncio.Semaphore(MAX_THREADS)
        self._background: set[Future[None]] = set()
        # Of each domain: late calls in a row, and the deadline of the one that was counted last.
        self._hangs: dict[str, tuple[int, float]] = defaultdict(lambda: (0, -math.inf))

    def here(self, key: Key, work: Work) -> None:
        """Do the work in this thread; raises EnvironmentFault if one of its calls fails."""

        async def guard(name: str, call: Callable[[], Any], method: Any = None) -> Any:
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

        Synchronous code gets a thread; a coroutine waits in the event loop and needs none. A hung
        call keeps its daemon thread, but neither its place among the MAX_THREADS nor the process.
        The work ends at a late call.
        """
        begun = 0.0

        async def guard(name: str, call: Callable[[], Any], method: Any = None) -> Any:
            nonlocal begun
            steps, awaitable = steps_of(call), None
            is_async = inspect.iscoroutinefunction(method)
            async with nullcontext() if is_async else self._threads:
                self._check(key)
                begun = time.monotonic()
                if not is_async:
                    first = partial(guarded, name, self.seconds, partial(first_step, steps))
                    awaitable, result = await self._in_time(name, begun, _in_thread(first))
                    if awaitable is None:
                        return result
            rest = environment_loop.run(finish_or_fault(steps, awaitable))
            try:
                result, fault = await self._in_time(name, begun, rest)
            except EnvironmentFault:
                await environment_loop.replace_if_blocked()
                raise
            if fault is not None:
                raise fault
            return result

        future = work_loop.run(work(guard))
        self._background.add(future)
        future.add_done_callback(self._background.discard)

        def wait_for_it() -> None:
            self.on_call("/".join(key))
            fault = future.exception()
            self._note(key, fault, begun)
            if fault is not None:
                raise fault

        return wait_for_it

    async def _in_time(self, name: str, begun: float, future: Future[Value]) -> Value:
        deadline = begun + self.seconds
        try:
            async with asyncio.timeout_at(deadline):  # unlike `wait_for`, it is always cancelled
                result = await asyncio.wrap_future(future)
        except TimeoutError:
            raise too_long(name, self.seconds) from None
        if time.monotonic() > deadline:
            raise too_long(name, self.seconds)
        return result

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


def _in_thread(call: Callable[[], Value]) -> Future[Value]:
    future: Future[Value] = Future()
    future.set_running_or_notify_cancel()  # a late result is dropped

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="environment", daemon=True).start()
    return future
