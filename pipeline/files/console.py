"""Prints messages, and turns failures after training into warnings."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.files.untrusted import printable, reason_of

# Name of the environment variable for how the user calls the commands; ranks inherit the variable.
STARTED_AS = "PIPELINE_STARTED_AS"
STYLES = {"bold": 1, "dim": 2, "cyan": 36}  # ANSI codes


def command(name: str) -> str:
    """Return the words that call a command such as `train`, in the form that the user used."""
    form = os.environ.get(STARTED_AS)
    if form is None and name == "train":
        return "python pipeline/run.py"
    return f"{form or 'python -m pipeline'} {name}"


def say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def styled(text: str, style: str) -> str:
    """Return a text in a style, or the plain text if stdout is no terminal or has no colours."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return text
    return f"\033[{STYLES[style]}m{text}\033[0m"


@contextmanager
def may_fail(what: str, advice: str) -> Iterator[None]:
    """Print a warning with advice if work after training, such as a report, raises an exception."""
    try:
        yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {reason_of(error)} ({frame.filename}, line {frame.lineno})"
        print(f"warning: {what}: {why}; what was trained is whole; {advice}", flush=True)
