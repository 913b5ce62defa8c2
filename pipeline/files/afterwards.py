"""What follows training: reports, plots and trackers may fail, the run that is trained may not."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.files.untrusted import reason_of


@contextmanager
def may_fail(what: str, advice: str) -> Iterator[None]:
    """Around what the run can do without: an exception becomes one line, with what to do then."""
    try:
        yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        print(
            f"warning: {what}: {type(error).__name__}: {reason_of(error)} ({frame.filename}, line "
            f"{frame.lineno}); what was trained is whole; {advice}",
            flush=True,
        )
