"""Exceptions that end a call of environment code, and their description for the user."""

import math
import signal
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from pipeline.common.console import USER_PACKAGES, say
from pipeline.common.errors import CtrlC

MAX_CHARACTERS = 10_000_000  # largest length of a text that an environment returns
FAULT_CHARACTERS = 500  # largest length of an exception's text in an EnvironmentFault
SOURCE_CHARACTERS = 120  # largest length of a source line in an EnvironmentFault
# Paths of libraries and of this package, except the embedded domains; `describe` names the last
# source line outside these paths, or of an installed package that the user's settings name.
_LIBRARIES = tuple(map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
_ROOMS = [*Path(__file__).parents[1].iterdir(), *Path(__file__).parent.iterdir()]
_LIBRARIES += tuple(str(p) for p in _ROOMS if p.name not in ("environments", "embedded"))


class CallTimeout(BaseException):
    """Interrupts a call that passes the deadline; `except Exception` does not catch CallTimeout."""


class Outage(Exception):
    """The exception that an environment raises if an external service is down.

    `reset`, a tool, the user's `reply` and `get_reward` may raise an Outage. An Outage ends the
    episode, and training leaves the episode out. A mistake of the trained model must never cause an
    Outage.
    """


class EnvironmentFault(Exception):
    """The failure of a call of environment code, with a message of one line.

    `call` names the call, such as `reset` or a tool. `timed_out` is True if the call took too long.
    `outage` is True if a service is down, or if the rollout has stopped calling the domain's
    environments because of late calls. `wait_s` is the result of `wait_of`.
    """

    def __init__(
        self,
        text: str,
        call: str = "",
        timed_out: bool = False,
        outage: bool = False,
        wait_s: float | None = None,
    ) -> None:
        super().__init__(text)
        self.call = call
        self.timed_out = timed_out
        self.outage = outage
        self.wait_s = wait_s


def too_long(name: str, seconds: float) -> EnvironmentFault:
    text = f"CallTimeout: {name} took more than {seconds:g} s"
    return EnvironmentFault(text, name, timed_out=True)


def only_faults(error: BaseException) -> BaseException:
    """Return `error`, but raise `error` again if `error` is a CallTimeout or a person's Ctrl-C."""
    # Ctrl-C raises CtrlC under `run.py`, and KeyboardInterrupt under Python's default handler.
    is_main = threading.current_thread() is threading.main_thread()
    by_python = signal.getsignal(signal.SIGINT) is signal.default_int_handler and is_main
    is_person = isinstance(error, CtrlC) or (isinstance(error, KeyboardInterrupt) and by_python)
    if is_person or isinstance(error, CallTimeout):
        raise error
    return error


def is_outage(error: BaseException) -> bool:
    """Return whether an exception is an Outage or an exception group that contains an Outage."""
    in_group = isinstance(error, BaseExceptionGroup) and error.subgroup(Outage) is not None
    return in_group or isinstance(error, Outage)


def first_of(error: BaseException) -> BaseException:
    """Return an exception, or the first one of a group, as a TaskGroup raises it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe(error: BaseException) -> str:
    """Return one line: an exception's type and text, and the last source line of a user's file.

    Of a group, this is the first exception.
    """
    group, error = error, first_of(error)
    traced = error.__traceback__ or group.__traceback__
    name = type(error).__name__
    text = " ".join(text_of(error)[:FAULT_CHARACTERS].split())
    line = f"{name}: {text}" if text else name
    modules = [f.f_globals.get("__name__", "") for f, _ in traceback.walk_tb(traced)]
    frames = zip(traceback.extract_tb(traced), modules, strict=True)
    if not (own := [frame for frame, module in frames if _is_users(frame.filename, module)]):
        return line
    source = f": {own[-1].line[:SOURCE_CHARACTERS]}" if own[-1].line else ""
    where = f"({Path(own[-1].filename).name}, line {own[-1].lineno}{source})"
    return f"{line} {where}".encode(errors="replace").decode()


def _is_users(file: str, module: str) -> bool:
    is_installed = file.startswith(_LIBRARIES)
    is_named = module.partition(".")[0] in USER_PACKAGES
    return not file.startswith("<") and (is_named or not is_installed)


def text_of(error: BaseException) -> str:
    try:
        return str(error)[:MAX_CHARACTERS].encode(errors="replace").decode()
    except BaseException as failure:  # `__str__` may be environment code
        only_faults(failure)
        return "its text cannot be made"


class FaultLog:
    """Prints the first failure of each call of each domain, and counts all failures.

    `where` returns the current step as text. If several ranks share a key-value store, `is_first`
    returns True on one rank only.
    """

    def __init__(
        self,
        where: Callable[[], str] = lambda: "",
        is_first: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._where = where
        self._is_first = is_first
        self._told = set[str]()
        self.counts = Counter[tuple[str, str]]()  # number of failures by (domain, call)

    def tell_once(self, line: str, about: str) -> None:
        """Print a line, unless a line about the same has been printed."""
        if about not in self._told and self._is_first(about):
            say(f"warning: {line}")
        self._told.add(about)

    def add(self, domain: str, task_id: str, call: str, text: str) -> None:
        self.counts[domain, call] += 1
        if self.counts[domain, call] == 1 and self._is_first(f"fault of {domain}/{call}"):
            where = f" ({at})" if (at := self._where()) else ""
            say(f"warning: {domain}: {call} failed on task {task_id}{where}: {text}")


MAX_WAIT_S = 1e9  # a longer wait is as good as none
BUSY = (408, 425, 429, 500, 502, 503, 504, 529)  # statuses that another attempt may change
# Classes of a lost connection, by name: Python's own, httpx's, aiohttp's and openai's.
AWAY = {"ConnectionError", "TimeoutError", "NetworkError", "RemoteProtocolError"}
AWAY |= {"TimeoutException", "ClientConnectionError", "APIConnectionError"}


def seconds_of(retry_after: str) -> float:
    """Return the seconds that a header Retry-After asks for; 0 if it is empty or unreadable."""
    try:
        seconds = float(retry_after)
    except ValueError:
        pass
    else:
        return min(max(0.0, seconds), MAX_WAIT_S) if math.isfinite(seconds) else 0.0
    try:
        until = parsedate_to_datetime(retry_after)
        # A date without a zone is in UTC.
        until = until.replace(tzinfo=until.tzinfo or UTC)
        return max(0.0, (until - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, what is in it if it is a group, and what it came from."""
    seen = set[int]()
    left = [error]
    while left:
        if id(cause := left.pop()) in seen:
            continue
        seen.add(id(cause))
        yield cause
        left += cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
        left += filter(None, [cause.__cause__ or cause.__context__])


def wait_of(error: BaseException) -> float | None:
    """Return the seconds that a busy service asks to wait, or None if no service is busy.

    Reads `retry_after`, the header Retry-After and the status of an exception, as clients of HTTP
    have them. A busy service that names no time, and a lost connection, give 0.
    """
    asked = [wait for cause in causes_of(error) if (wait := _asked(cause)) is not None]
    return max(asked, default=None)


def _asked(error: Any) -> float | None:
    try:
        response = getattr(error, "response", None)
        names = "status_code", "status", "code"
        statuses = [getattr(of, name, None) for of in (error, response) for name in names]
        headers = getattr(response, "headers", None) or getattr(error, "headers", None) or {}
        header = next((v for k, v in dict(headers).items() if k.lower() == "retry-after"), "")
        asked = getattr(error, "retry_after", None)
        seconds = seconds_of(str(header if asked is None else asked))
    except Exception:  # the exception is the user's code
        return None
    is_away = any(kind.__name__ in AWAY for kind in type(error).__mro__)
    is_busy = is_away or any(status in BUSY for status in statuses)
    return seconds if seconds or is_busy else None
