"""Exceptions of environment code, as one-line faults."""

from __future__ import annotations

import signal
import sysconfig
import threading
import traceback
from pathlib import Path

from pipeline.errors import CtrlC

MAX_CHARACTERS = 10_000_000  # of a text from an environment; longer ones take long to tokenize
FAULT_CHARACTERS = 500  # of the text of a fault
# Files that cannot be the place of a fault: libraries, and this folder.
_LIBRARIES = tuple(map(sysconfig.get_path, ("stdlib", "purelib")))
_LIBRARIES += ("<frozen ", str(Path(__file__).parent))


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


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def too_long(name: str, seconds: float) -> EnvironmentFault:
    return EnvironmentFault(f"CallTimeout: {name} took more than {seconds:g} s", timed_out=True)


def fault_of(error: BaseException) -> EnvironmentFault:
    return EnvironmentFault(describe(only_faults(error)), outage=is_outage(error))


def only_faults(error: BaseException) -> BaseException:
    """Return an exception of environment code; raise a deadline or a person's Ctrl-C again."""
    # For Ctrl-C, `run.py` raises CtrlC and Python's default handler raises KeyboardInterrupt.
    by_python = signal.getsignal(signal.SIGINT) is signal.default_int_handler and in_main_thread()
    is_person = isinstance(error, CtrlC) or (isinstance(error, KeyboardInterrupt) and by_python)
    if is_person or isinstance(error, CallTimeout):
        raise error
    return error


def is_outage(error: BaseException) -> bool:
    """Whether an exception is an Outage, or a group of exceptions that holds one."""
    in_group = isinstance(error, BaseExceptionGroup) and error.subgroup(Outage) is not None
    return in_group or isinstance(error, Outage)


def describe(error: BaseException) -> str:
    """Type and text of an exception in one short line; of a SystemExit also the place."""
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
