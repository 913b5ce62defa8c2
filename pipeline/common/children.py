"""Child processes of a rank: those that user code forks, and rehearsals.

Graders of code and mathematics fork. A child has copies of the rank's signal handlers and pipes:
it would ignore SIGTERM, report signals that it gets as the rank's, and keep the rank's sentinel
alive. So it lets go of them first of all, and it ends with its rank. Programs that are executed
have none of these.

A rehearsal is work on untrusted files in a child with limits of time and memory. A chat template
can take hours, or gigabytes, inside C code that nothing in the same process can interrupt. The
kernel ends a child that passes a limit.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from pipeline.common.errors import UserError

# Signals that ranks handle; SLURM sends SIGUSR1.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
HANDLED = (*STOPS, signal.SIGALRM)
_in_children: list[Callable[[], None]] = []  # what a child of this process does first
_is_rank = False  # a rank's descendants count as the rank
_forking = threading.local()

MAX_CPU_S = 10.0
MAX_WAIT_S = 120.0  # for a child that waits for a lock of another thread, which it has not
MAX_START_S = 5.0  # until a child runs
STARTED = "\n"  # what a child writes first
MAX_BYTES = 512 << 20  # of memory, beyond what the process has before the rehearsal
_TOO_MUCH_MEMORY = 3  # exit code of a child


def call_in_children(call: Callable[[], None]) -> Callable[[], None]:
    """Let each forked child, not its own children, call `call` first.

    Returns a function that ends this.
    """
    global _is_rank
    _is_rank = True
    _in_children.append(call)
    return lambda: _in_children.remove(call)


def end_child(error: BaseException | None = None) -> NoReturn:
    """End this process, which user code has forked, and which has left the call of that code.

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


def rehearse(what: str, call: Callable[[], Any], remedy: str) -> None:
    """Make a call in a forked child, which does not change this process.

    Raises UserError if the call raises UserError, passes a limit or ends the child. Other
    exceptions, and a call that only waits, are left to the call itself, which follows in this
    process.
    """
    pid, read_end = _started(call)
    try:
        with open(read_end, encoding="utf-8") as pipe:
            if not select.select([pipe], [], [], MAX_WAIT_S)[0]:
                os.kill(pid, signal.SIGKILL)
                return
            problem = pipe.read().removeprefix(STARTED)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == -signal.SIGPROF:
        problem = f"{what} takes more than {MAX_CPU_S:g} s of CPU time; {remedy}"
    elif code == _TOO_MUCH_MEMORY:
        problem = f"{what} takes more than {MAX_BYTES >> 20} MiB of memory; {remedy}"
    elif code:
        problem = f"{what} ends the process with {signal.Signals(-code).name}; {remedy}"
    if problem:
        raise UserError(problem)


def _started(call: Callable[[], Any]) -> tuple[int, int]:
    """Fork a child that makes the call; return its number and the end of its pipe.

    In Python 3.11, a child never starts if a thread that Python has not made, such as one of a
    collective, held a lock of the interpreter at the fork. Another child then takes its place.
    """
    for last in (False, False, True):
        read_end, write_end = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: there are threads
            pid = os.fork()
        if pid == 0:
            _rehearse_here(call, write_end)
        os.close(write_end)
        if select.select([read_end], [], [], MAX_START_S)[0]:
            os.read(read_end, len(STARTED))
            break
        if last:  # as a call that only waits
            break
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read_end)
    return pid, read_end


def _rehearse_here(call: Callable[[], Any], write_end: int) -> None:
    code = _TOO_MUCH_MEMORY
    try:
        end_with_the_parent()
        os.write(write_end, STARTED.encode())
        _limit()
        with open(os.devnull, "w") as silence:  # the call itself will say what it has to say
            sys.stdout = sys.stderr = silence
            os.dup2(silence.fileno(), 1)
            os.dup2(silence.fileno(), 2)
            warnings.simplefilter("ignore")
            call()
        code = 0
    except UserError as error:
        os.write(write_end, str(error).encode(errors="replace"))
        code = 0
    except MemoryError:
        code = _TOO_MUCH_MEMORY
    except Exception:
        code = 0
    finally:
        os._exit(code)


def _limit() -> None:
    """Let the kernel end this process after MAX_CPU_S, and refuse it more than MAX_BYTES."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MAX_BYTES
    with suppress(ValueError):  # the machine's own limit is lower
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
