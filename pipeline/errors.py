"""What a run says when it cannot go on, its exit codes, and the variables of its processes."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

# An environment variable of ranks that a process of ours has started: the folder of their notes.
STARTED_BY_US = "PIPELINE_STARTED_BY_US"
# Of torchrun: seconds from SIGTERM to SIGKILL; 30 where it is not set.
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
# Parts of what gloo raises on a rank when another rank is gone or late.
LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting")
INTERRUPTED = 75  # exit code: stopped, with a checkpoint to resume from (EX_TEMPFAIL of sysexits.h)


class UserError(ValueError):
    """The user's mistake, in one line: what, got, do this."""

    is_first = False  # of several ranks that found it, this one tells it


class MachineError(RuntimeError):
    """What the machine did to a run, in one line: exit code 1."""


class CtrlC(KeyboardInterrupt):
    """Raised where a person at the keyboard interrupts; code can raise KeyboardInterrupt too."""


def nearest(word: str, names: Iterable[str]) -> str:
    """The one of `names` that was probably meant, or the empty string where none is near."""
    return next(iter(get_close_matches(word, list(names), n=1)), "")
