"""An exit code, names of environment variables, and exceptions that end a run."""

from collections.abc import Iterable

# Name of the environment variable for the folder in which each rank writes the rank's exit code.
STARTED_BY_US = "PIPELINE_STARTED_BY_US"
# Name of torchrun's environment variable for the seconds from SIGTERM to SIGKILL (default 30).
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
# If gloo's error message contains one of these texts, another rank has ended or is late.
LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting")
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


class CtrlC(KeyboardInterrupt):
    """Raised when a person presses Ctrl-C. User code may raise a plain KeyboardInterrupt."""


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the name that `word` misspells, or the only name that `word` begins, or "".

    A misspelled name has up to 2 wrong, missing, extra or swapped characters; a name of up to 5
    characters has 1. Names that are less similar often mean something else.
    """
    known = list(names)
    begun = [name for name in known if name.startswith((f"{word}-", f"{word}_"))]
    most = 1 if len(word) <= 5 else 2
    close = [name for name in known if abs(len(name) - len(word)) <= most]
    found = min(((_distance(word, name), name) for name in close), default=(most + 1, ""))
    return found[1] if found[0] <= most else begun[0] if len(begun) == 1 else ""


def _distance(first: str, second: str) -> int:
    """Return the number of wrong, missing, extra or swapped characters between two texts."""
    rows = [list(range(len(second) + 1))]
    for i, x in enumerate(first):
        row = [i + 1]
        for j, y in enumerate(second):
            row.append(min(rows[i][j + 1] + 1, row[j] + 1, rows[i][j] + (x != y)))
            if i and j and (x, y) == (second[j - 1], first[i - 1]):
                row[j + 1] = min(row[j + 1], rows[i - 1][j - 1] + 1)
        rows.append(row)
    return rows[-1][-1]
