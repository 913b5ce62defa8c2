"""Imports: of large libraries without garbage collection, and of the user's modules."""

import gc
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType


@contextmanager
def importing() -> Iterator[None]:
    """Disable the garbage collector, so that an import of torch takes a seventh less time.

    Later garbage collections skip the imported objects, which live until the process ends.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def user_module(name: str) -> ModuleType:
    """Import a module of the user; the current folder is searched last, after installed packages.

    If no module of this name exists, the ModuleNotFoundError names the searched folders.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        libraries = tuple({sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")})
        own = [path or here for path in sys.path if not path.startswith(libraries)]
        folders = ", ".join(dict.fromkeys(path for path in own if os.path.isdir(path)))
        why = f"No module named {error.name!r} in {folders} or the installed packages"
        raise ModuleNotFoundError(why, name=error.name) from None
