"""How this process is called, what it prints, and how it imports libraries and users' modules."""

import gc
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from pipeline.common.errors import UserError
from pipeline.common.untrusted import one_line, printable, reason_of

# Name of the environment variable for how the user calls the commands; ranks inherit the variable.
STARTED_AS = "PIPELINE_STARTED_AS"
USER_PACKAGES = set[str]()  # top-level names of the user's modules, which may be installed
STYLES = {"bold": 1, "dim": 2, "cyan": 36}  # ANSI codes
WARNING = "warning: "  # how a line begins that `kept_warnings` keeps
_kept = list[str]()  # lines that are in no file yet
_files = list[Path]()


def command(name: str) -> str:
    """Return the words that call a command such as `train`, in the form that the user used."""
    form = os.environ.get(STARTED_AS)
    if form is None and name == "train":
        return "python pipeline/run.py"
    return f"{form or 'python -m pipeline'} {name}"


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line on stderr, or on another stream; keep a line that begins with WARNING."""
    line = printable(line)
    print(line, file=stream or sys.stderr, flush=True)
    if line.startswith(WARNING):
        text = one_line(line.removeprefix(WARNING))
        _kept.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        _keep()


def _keep() -> None:
    for file in _files:
        with suppress(OSError), file.open("a", encoding="utf-8") as lines:
            lines.writelines(_kept)
            _kept.clear()


@contextmanager
def kept_warnings(file: Path) -> Iterator[None]:
    """Append the warnings of this process to a file: those of the context, and those before."""
    _files.append(file)
    _keep()
    try:
        yield
    finally:
        _files.remove(file)


def styled(text: str, style: str) -> str:
    """Return a text in a style, or the plain text if stdout is no terminal or has no colours."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return text
    return f"\033[{STYLES[style]}m{text}\033[0m"


def in_words(seconds: float) -> str:
    """Return a duration such as `12 s`, `3 min` or `1.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def may_fail(what: str, advice: str) -> Iterator[None]:
    """Print a warning with advice if work after training, such as a report, raises an exception."""
    try:
        yield
    except Exception as error:
        say(f"warning: {what}: {fault_and_place(error)}; what was trained is whole; {advice}")


def fault_and_place(error: Exception) -> str:
    """Return an exception's class, message and place as one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {reason_of(error)} ({frame.filename}, line {frame.lineno})"


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


def installed(module: str, install: str) -> Any:
    """Import a module of a package that the user chose; `install` says how to install it.

    Raises UserError if the package, or one that it needs, is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed; {install}") from None


def user_module(name: str) -> ModuleType:
    """Import a module of the user; the current folder is searched last, after installed packages.

    If no module of this name exists, the ModuleNotFoundError says where it was searched.
    """
    package = name.partition(".")[0]
    if package != __name__.partition(".")[0]:
        USER_PACKAGES.add(package)
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package that the user's module imports
        raise ModuleNotFoundError(
            f"No module named {error.name!r} in {here} or the installed packages", name=error.name
        ) from None
