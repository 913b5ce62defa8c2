"""A process beside a rank: it ends the rank if the watchdog's thread is silent for too long.

    python sentinel.py PID TICKS

While Python runs in the rank, the thread writes a byte to this process at least twice a second. The
sentinel counts ticks instead of time, and no ticks while the rank is suspended. It sends SIGABRT:
`faulthandler` then prints the rank's stacks, also if Python is stuck. It exits when the pipe is
closed. It imports no other module of the package, to be small.
"""

import os
import select
import signal
import sys

TICK_S = 0.5


def main(pid: int, ticks: int) -> None:
    silent = 0
    while silent < ticks:
        ready, _, _ = select.select([0], [], [], TICK_S)
        if ready and not os.read(0, 4096):
            return
        if ready:
            silent = 0
        elif not _is_suspended(pid):
            silent += 1
    text = f"rank process {pid} shows no sign of Python for {ticks * TICK_S:.0f} s and is ended\n"
    os.write(2, text.encode())
    os.kill(pid, signal.SIGABRT)


def _is_suspended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:  # no Linux, or the process has ended, which also closes standard input
        return False


if __name__ == "__main__":
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ends with its rank
        signal.signal(stop, signal.SIG_IGN)
    main(int(sys.argv[1]), int(sys.argv[2]))
