"""Rehearses work on untrusted files in a child process, with limits of time and memory.

A chat template or a regular expression can take hours, or gigabytes, inside C code that nothing in
the same process can interrupt. The kernel ends a child that passes a limit.
"""

import os
import resource
import select
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from pipeline.distributed.forks import end_with_the_parent
from pipeline.errors import UserError

MAX_CPU_S = 10.0
MAX_WAIT_S = 120.0  # for a child that waits for a lock of another thread, which it has not
MAX_BYTES = 512 << 20  # of memory, beyond what the process has before the rehearsal
_TOO_MUCH_MEMORY = 3  # exit code of a child


def rehearse(what: str, call: Callable[[], Any], remedy: str) -> None:
    """Make a call in a forked child, which does not change this process.

    Raises UserError if the call raises UserError, passes a limit or ends the child. Other
    exceptions, and a call that only waits, are left to the call itself, which follows in this
    process.
    """
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads
        pid = os.fork()
    if pid == 0:
        _rehearse_here(call, write_end)
    os.close(write_end)
    try:
        with open(read_end, encoding="utf-8") as pipe:
            if not select.select([pipe], [], [], MAX_WAIT_S)[0]:
                os.kill(pid, signal.SIGKILL)
                return
            problem = pipe.read()
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


def _rehearse_here(call: Callable[[], Any], write_end: int) -> NoReturn:
    code = _TOO_MUCH_MEMORY
    try:
        end_with_the_parent()
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
