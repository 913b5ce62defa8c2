"""The sentinel of a rank: a process that ends the rank if the watchdog's thread stops running.

    Usage: python sentinel.py PID TICKS

Twice a second, the watchdog's thread writes a byte to the sentinel, unless the rank is stuck
outside Python. After TICKS half seconds without a byte, the sentinel sends SIGABRT to the rank, and
`faulthandler` prints the stacks of the rank. Half seconds while the rank is suspended do not count.
The sentinel exits when its standard input is closed.
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
        if ready:
            if not os.read(0, 4096):
                return
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
    except OSError:  # the system is not Linux, or the process has ended
        return False


if __name__ == "__main__":
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the sentinel ignores stop signals
        signal.signal(stop, signal.SIG_IGN)
    main(int(sys.argv[1]), int(sys.argv[2]))
