"""Two asyncio event loops, each in a thread: for environment code, and for the pipeline's code."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from pipeline.distributed.forks import end_child

GRACE_S = 5.0  # seconds until a blocked event loop is replaced

Value = TypeVar("Value")
# A generator for one call of an environment, which yields awaitables and receives the results.
Steps = Generator[Awaitable[Any], Any, Value]


async def finish(
    steps: Steps[Any], awaitable: Awaitable[Any] | None = None
) -> tuple[Any, BaseException | None]:
    """Run the generator `steps` in an event loop; return (result, None), or (None, exception)."""
    pid = os.getpid()
    try:
        if awaitable is None:
            awaitable = next(steps)
        while True:
            try:
                result = await awaitable
                if os.getpid() != pid:
                    end_child()
            except BaseException as error:
                if os.getpid() != pid:
                    end_child(error)
                awaitable = steps.throw(error)
            else:
                awaitable = steps.send(result)
    except StopIteration as end:
        return end.value, None
    except BaseException as error:  # an uncaught SystemExit would end the event loop
        return None, error


def in_thread(call: Callable[[], Value]) -> Future[Value]:
    future: Future[Value] = Future()
    future.set_running_or_notify_cancel()  # makes `future.cancel` ineffective

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="environment", daemon=True).start()
    return future


class _EventLoop:
    """An asyncio event loop in a daemon thread. The first call of `run` starts the thread."""

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
        """Replace the event loop if a coroutine blocks the event loop for GRACE_S seconds."""
        thread, probe = self._thread, asyncio.wrap_future(self.run(asyncio.sleep(0)))
        await asyncio.wait([probe], timeout=GRACE_S)
        if not probe.done() and self._thread is thread:
            self._thread = threading.Thread()

    def _serve(self) -> None:
        loop = self._loop
        while not loop.is_closed():
            with suppress(BaseException):  # a SystemExit in an asyncio task ends `run_forever`
                loop.run_forever()


environment_loop = _EventLoop()  # runs the coroutines of environments
work_loop = _EventLoop()  # runs the pipeline's coroutines, which never block
