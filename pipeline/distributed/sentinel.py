"""The sentinel of a rank: a process that ends the rank if the watchdog's thread stops running.

    Usage: python sentinel.py PID TICKS STORE_TICKS NAME FIRST

Twice a second, the watchdog's thread writes `.` to the sentinel, unless the rank is stuck outside
Python. Before the thread reads the key-value store, which is on the machine of the rank FIRST, it
writes `?`. After TICKS half seconds without a byte (STORE_TICKS if the last byte was `?`), the
sentinel sends SIGABRT to the rank, and `faulthandler` prints the stacks of the rank. Half seconds
while the rank is suspended do not count. The sentinel exits when its standard input is closed.
"""

import os
import select
import signal
import sys

TICK_S = 0.5


def main(pid: int, ticks: int, store_ticks: int, name: str, first: str) -> None:
    silent = 0
    last = b"."
    while silent < (store_ticks if last == b"?" else ticks):
        ready, _, _ = select.select([0], [], [], TICK_S)
        if ready:
            received = os.read(0, 4096)
            if not received:
                return
            silent = 0
            last = received[-1:]
        elif not _is_suspended(pid):
            silent += 1
    seconds = f"for {silent * TICK_S:.0f} s and is ended"
    text = f"rank process {pid} shows no sign of Python {seconds}\n"
    if last == b"?":
        text = f"{name} gets no answer from the key-value store {seconds}: "
        text += f"the machine of {first} is down or cut off\n"
    os.write(2, text.encode())
    os.kill(pid, signal.SIGABRT)


def _is_suspended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:  # the system is not Linux, or the process has ended
        return False


if __name__ == "__main__":
    # The sentinel ignores stop signals.
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(stop, signal.SIG_IGN)
    pid, ticks, store_ticks = map(int, sys.argv[1:4])
    main(pid, ticks, store_ticks, *sys.argv[4:6])
