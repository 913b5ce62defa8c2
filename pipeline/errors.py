"""Errors that end a run, exit codes, and environment variables of its processes."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

# Environment variable: the folder for exit codes of ranks that `pipeline/run.py` started.
STARTED_BY_US = "PIPELINE_STARTED_BY_US"
# torchrun's environment variable: seconds from SIGTERM to SIGKILL (default 30).
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
INTERRUPTED = 75  # exit code: stopped, with a checkpoint to resume from (EX_TEMPFAIL of sysexits.h)


class UserError(ValueError):
    """A mistake of the user: one line (what, the value, what to do). Exit code 2."""

    is_first = False  # True: this rank prints it at once, the others wait


class MachineError(RuntimeError):
    """A fault of the machine, such as a full disk: one line. Exit code 1."""


class CtrlC(KeyboardInterrupt):
    """Ctrl-C at the keyboard; a KeyboardInterrupt may also come from user code."""


def nearest(word: str, names: Iterable[str]) -> str:
    """The name in `names` that is most similar to `word`; empty if none is similar."""
    return next(iter(get_close_matches(word, list(names), n=1)), "")
