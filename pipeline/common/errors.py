"""Exit codes, error numbers, names of environment variables, and exceptions that end a run."""

import errno
from collections.abc import Iterable
from difflib import get_close_matches

# Name of the environment variable for the folder in which each rank writes the rank's exit code.
STARTED_BY_US = "PIPELINE_STARTED_BY_US"
# Name of torchrun's environment variable for the seconds from SIGTERM to SIGKILL (default 30).
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
# If gloo's error message contains one of these texts, another rank has ended or is late.
LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting")
# Error numbers of a full disk, of a full quota, and of a file larger than allowed (`ulimit -f`).
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
INTERRUPTED = 75  # exit code of an interrupted run that can be resumed (EX_TEMPFAIL in sysexits.h)


class UserError(ValueError):
    """A mistake of the user. The error message is one line with the mistake, value and remedy."""

    exit_code = 2
    is_first = False  # True on the rank that prints the error at once, while other ranks wait


class RunError(RuntimeError):
    """The end of a run that cannot go on, such as a run whose environments fail; one line."""

    exit_code = 1
    is_first = False


class MachineError(RunError):
    """A fault of the machine, such as a full disk. The error message is one line."""


class EngineError(RunError):
    """A fault of the engine in one rank; the watchdog adds the rank and its phase."""


class CtrlC(KeyboardInterrupt):
    """Raised when a person presses Ctrl-C. User code may raise a plain KeyboardInterrupt."""


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the name that `word` misspells, or the only name that `word` begins, or "".

    A short name may have a wrong, missing or extra character, or two swapped characters; a long
    name may have two. Names that are less similar often mean something else.
    """
    known = list(names)
    begun = [name for name in known if name.startswith((f"{word}-", f"{word}_"))]
    least = min(0.88, 0.999 - 1 / max(2, len(word)))  # the similarity after a swap, at most 0.88
    close = get_close_matches(word, known, 1, least)
    return close[0] if close else begun[0] if len(begun) == 1 else ""
