"""Messages on standard error."""

from __future__ import annotations

import sys

from pipeline.files.untrusted import printable


def say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)
