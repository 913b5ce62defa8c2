"""A process beside a rank: ends it where its watchdog's thread says nothing for too long.

    python sentinel.py PID TICKS

It gets a byte on its standard input at least twice a second while Python runs in the rank, and
leaves when that is closed. It counts ticks of its own, not time: while both are suspended nothing
is counted, and neither is while the rank alone is. SIGABRT makes `faulthandler` in the rank print
its stacks, for which it needs no Python there. Imports nothing of ours, to be small.
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
    except OSError:  # no Linux, or it has ended, which closes standard input as well
        return False


if __name__ == "__main__":
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it ends with its rank
        signal.signal(stop, signal.SIG_IGN)
    main(int(sys.argv[1]), int(sys.argv[2]))
