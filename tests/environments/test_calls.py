"""Calls of code that is not ours end in time or are given up; whatever they raise is a fault.

A call "hangs" where it waits for an event that the test sets only at its end.
"""

import asyncio
import gc
import linecache
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from pipeline.environments import calls
from pipeline.environments.calls import Calls, awaited, guarded, run_coroutine
from pipeline.environments.faults import CallTimeout, EnvironmentFault
from tests.support import ROOT

LONG_S = 60  # what is expected comes much sooner
SHORT_S = 0.2  # the deadline where nothing but the call that hangs has to be faster
DEADLINE_S = 0.5  # where other calls have to be
LATE = r"^CallTimeout: look .* 0\.2 s$"


@pytest.fixture
def never():
    """An event that is set when the test is over, so that nothing waits for it any longer."""
    event = threading.Event()
    yield event
    event.set()


# One call


def test_a_call_that_swallows_exceptions_is_interrupted_all_the_same(never, monkeypatch):
    monkeypatch.setattr(calls, "REPEAT_S", 0.05)
    swallowed = []

    def swallow():
        while True:
            try:
                never.wait()
            except Exception as error:
                swallowed.append(error)

    def swallow_once():
        try:
            never.wait()
        except BaseException as error:
            swallowed.append(error)
        never.wait()

    with pytest.raises(EnvironmentFault, match=LATE):
        guarded("look", SHORT_S, swallow)
    assert swallowed == []
    with pytest.raises(EnvironmentFault, match=LATE):
        guarded("look", SHORT_S, swallow_once)
    assert [type(error) for error in swallowed] == [CallTimeout]


def test_no_alarm_reaches_code_after_its_call():
    for seconds in [1e-6, 1e-5, 3e-5, 1e-4] * 500:  # the alarm comes as the call ends
        with pytest.raises(EnvironmentFault, match="CallTimeout"):
            guarded("look", seconds, lambda seconds=seconds: time.sleep(seconds))
    assert signal.getitimer(signal.ITIMER_REAL)[1] != calls.REPEAT_S


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def deeper(depth=0):
    return deeper(depth + 1)


def raises(error):
    def function():
        raise error

    return function


def fails():
    pytest.fail("no")


def place(function):
    """Of the line that raises, the one below the innermost `def`."""
    line = function.__code__.co_firstlineno + 1
    source = linecache.getline(__file__, line).strip()
    return f" (test_calls.py, line {line}: {source})"


def awaits(function):
    async def later():
        return function()

    return lambda: awaited(later())


@pytest.mark.parametrize("kind", [lambda function: function, awaits], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("function", "text", "last"),
    [
        (raises(KeyError("x")), "KeyError: 'x'", raises(None)),
        (raises(RuntimeError), "RuntimeError", raises(None)),
        (raises(MemoryError("no room")), "MemoryError: no room", raises(None)),
        (deeper, "RecursionError: maximum recursion depth exceeded", deeper),
        (raises(SystemExit(3)), "SystemExit: 3", raises(None)),
        (raises(GeneratorExit()), "GeneratorExit", raises(None)),
        (raises(asyncio.CancelledError()), "CancelledError", raises(None)),
        (fails, "Failed: no", fails),
        (raises(Unspeakable()), "Unspeakable: its text cannot be made", raises(None)),
        (
            raises(ValueError("two\nlines and half a \ud800")),
            "ValueError: two lines and half a ?",
            raises(None),
        ),
        (raises(ValueError("x" * 1000)), "ValueError: " + "x" * 500, raises(None)),
    ],
)
def test_whatever_a_call_raises_is_a_fault_of_one_line(function, text, last, kind):
    if function is deeper:
        gc.collect()  # garbage of other tests must not be collected at the depth limit
    with pytest.raises(EnvironmentFault) as caught:
        guarded("look", LONG_S, kind(function))
    assert str(caught.value) == text + place(last)
    assert (caught.value.call, caught.value.timed_out) == ("look", False)


def test_a_person_at_the_keyboard_is_heard():
    with pytest.raises(KeyboardInterrupt):
        guarded("look", LONG_S, raises(KeyboardInterrupt()))


# Calls in the background


def beside(calls, function, is_async=False, **given):
    """A call of a function in the background."""
    return calls.beside(("desk", "t1"), "look", function, is_async=is_async, **given)


@pytest.mark.parametrize("is_async", [True, False], ids=["in the loop", "from a thread"])
def test_coroutines_in_the_background_may_be_hostile(is_async, never, monkeypatch):
    monkeypatch.setattr(calls, "GRACE_S", 0.1)
    refuses = threading.Event()

    async def block():
        never.wait()

    async def refuse():
        while not refuses.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def leave():
        sys.exit(3)

    async def answer():
        return "seen"

    def look_at(function):
        # A plain function may return a coroutine as well.
        call = function if is_async else lambda: awaited(function())
        return run_coroutine(beside(Calls(SHORT_S), call, is_async))

    try:
        for late in (refuse, block):
            with pytest.raises(EnvironmentFault, match=LATE) as caught:
                look_at(late)
            assert caught.value.timed_out
        with pytest.raises(EnvironmentFault, match=r"^SystemExit: 3 \(test_calls\.py, line"):
            look_at(leave)
        assert look_at(answer) == "seen"
    finally:
        refuses.set()


def test_what_came_in_time_counts_while_the_calling_thread_was_busy():
    ended = threading.Event()

    async def look():
        await asyncio.sleep(0.05)
        ended.set()
        return "seen"

    async def play(is_async):
        call = look if is_async else lambda: (time.sleep(0.05), ended.set(), "seen")[-1]
        task = asyncio.create_task(beside(Calls(DEADLINE_S), call, is_async))
        await asyncio.sleep(0)
        assert ended.wait(LONG_S)
        time.sleep(2 * DEADLINE_S)  # as a pass of the sampler
        return await task

    for is_async in (True, False):
        ended.clear()
        assert run_coroutine(play(is_async)) == "seen"


def test_a_call_that_never_returns_does_not_keep_the_process_from_ending():
    code = """
import threading
from pipeline.environments.calls import Calls, run_coroutine
try:
    look = threading.Event().wait
    run_coroutine(Calls(0.2, print).beside(("bank", "t1"), "look", look, is_async=False))
except Exception as fault:
    print(fault)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LONG_S
    )
    assert re.match(LATE, done.stdout.strip())
    assert (done.returncode, done.stderr) == (0, "")


# Event loops of others


def test_synchronous_code_may_run_an_event_loop_of_its_own():
    async def answer():
        return "seen"

    async def play():
        return Calls(LONG_S).here(("desk", "t1"), "look", lambda: asyncio.run(answer()))

    assert run_coroutine(play()) == "seen"


def test_a_rollout_may_run_where_an_event_loop_runs_already():
    """As in a notebook."""

    async def notebook():
        return run_coroutine(asyncio.sleep(0, "seen")), asyncio.get_running_loop().is_running()

    assert asyncio.run(notebook()) == ("seen", True)
