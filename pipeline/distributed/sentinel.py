"""The sentinel of a rank: a process that ends the rank if the watchdog's thread stops running.

    Usage: python sentinel.py PID TIMEOUT_S NAME FIRST

Twice a second, the watchdog's thread writes a byte to the sentinel, unless the rank is stuck
outside Python, or waits for the key-value store, which is on the node of the rank FIRST. After
TIMEOUT_S seconds without a byte, the sentinel sends SIGABRT to the rank, and `faulthandler` prints
the stacks of the rank. The sentinel exits when its standard input is closed.
"""

import os
import select
import signal
import sys


def main(pid: int, timeout_s: float, name: str, first: str) -> None:
    while select.select([0], [], [], timeout_s)[0]:
        if not os.read(0, 4096):
            return
    text = (
        f"{name} shows no sign of life for {timeout_s:.0f} s and is ended: it is stuck outside "
        f"Python, or the node of {first} with the key-value store does not answer\n"
    )
    os.write(2, text.encode())
    os.kill(pid, signal.SIGABRT)


if __name__ == "__main__":
    # The sentinel ignores stop signals.
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(stop, signal.SIG_IGN)
    main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:5])
