"""Processes that code of the user's forks from a rank: they are no ranks, and end with their rank.

Graders of code and mathematics fork. A child has copies of the rank's signal handlers and pipes:
it would ignore SIGTERM, report signals that it gets as the rank's, and keep the rank's sentinel
alive. So it lets go of them first of all. Programs that are executed have none of these.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

# Signals that ranks handle; SLURM sends SIGUSR1.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
HANDLED = (*STOPS, signal.SIGALRM)
_in_children: list[Callable[[], None]] = []  # what a child of this process does first
_is_rank = False  # a rank's descendants count as the rank
_forking = threading.local()


def call_in_children(call: Callable[[], None]) -> Callable[[], None]:
    """Let each forked child, not its own children, call `call` first.

    Returns a function that ends this.
    """
    global _is_rank
    _is_rank = True
    _in_children.append(call)
    return lambda: _in_children.remove(call)


def end_child(error: BaseException | None = None) -> NoReturn:
    """End this process, which code of the user's has forked, and which has left the user's call.

    It would go on as a second rank.
    """
    code = int(error is not None)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_the_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _before() -> None:
    _forking.by_main_thread = threading.current_thread() is threading.main_thread()
    # A signal to a child that has the rank's handlers yet would be reported as the rank's.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED) if _is_rank else None


def _after_in_child() -> None:
    for call in _in_children:
        call()
    _in_children.clear()
    # The main thread ends with its process. Another thread may end before its children should.
    if _is_rank and _forking.by_main_thread:
        end_with_the_parent()
    _after()


def _after() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


os.register_at_fork(before=_before, after_in_child=_after_in_child, after_in_parent=_after)
