"""Messages on standard error, and warnings about failures that do not end the run."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.files.untrusted import printable, reason_of


def say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


@contextmanager
def may_fail(what: str, advice: str) -> Iterator[None]:
    """Turn an exception of work after training, such as a report, into a warning with advice."""
    try:
        yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {reason_of(error)} ({frame.filename}, line {frame.lineno})"
        print(f"warning: {what}: {why}; what was trained is whole; {advice}", flush=True)
