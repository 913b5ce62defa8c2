"""Work after training, such as reports: its failure does not end the run."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.files.untrusted import reason_of


@contextmanager
def may_fail(what: str, advice: str) -> Iterator[None]:
    """Turn an exception into a warning of one line, with advice on what to do."""
    try:
        yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {reason_of(error)} ({frame.filename}, line {frame.lineno})"
        print(f"warning: {what}: {why}; what was trained is whole; {advice}", flush=True)
