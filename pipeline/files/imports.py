"""Large imports without the garbage collector."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Around imports of torch and what needs it.

    What they make stays, and yet the collector would look through it again and again, for a
    seventh of their time. While they are new, it is taken out of later collections, too.
    """
    was_enabled, is_first = gc.isenabled(), "transformers" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if is_first:
            gc.freeze()
        if was_enabled:
            gc.enable()
