"""Errors that end a run, exit codes, and environment variables of its processes."""

from collections.abc import Iterable
from difflib import get_close_matches

# Environment variable: the folder for exit codes of ranks that `pipeline/run.py` started.
STARTED_BY_US = "PIPELINE_STARTED_BY_US"
# torchrun's environment variable: seconds from SIGTERM to SIGKILL (default 30).
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
# Parts of gloo's error messages on a rank when another rank has ended or is late.
LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting")
INTERRUPTED = 75  # exit code of an interrupted run with a checkpoint (EX_TEMPFAIL of sysexits.h)


class UserError(ValueError):
    """A mistake of the user, with a message of one line: the mistake, the value, the remedy."""

    exit_code = 2
    is_first = False  # True: this rank prints the message at once; other ranks wait


class MachineError(RuntimeError):
    """A fault of the machine, such as a full disk, with a message of one line."""

    exit_code = 1
    is_first = False


class CtrlC(KeyboardInterrupt):
    """Ctrl-C at the keyboard. A plain KeyboardInterrupt may come from user code."""


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the name that is most similar to `word`, or an empty string if none is similar."""
    return next(iter(get_close_matches(word, list(names), n=1)), "")
