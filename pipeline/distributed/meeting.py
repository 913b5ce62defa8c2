"""The meeting of the ranks at their key-value store: a failure is one line with the address."""

import os
import platform
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, TypeVar

from pipeline.distributed.watchdog import GRACE_S
from pipeline.errors import RunError, UserError
from pipeline.files.untrusted import printable, reason_of

Met = TypeVar("Met")
LATE_S = 5.0  # after the deadline, torch has this long to raise: gloo may wait without an end
INTERFACES = (
    "give every machine the name of the network interface (as `ip addr` shows it) that reaches the "
    "others: GLOO_SOCKET_IFNAME=eth0, with GPUs also NCCL_SOCKET_IFNAME=eth0; and let firewalls "
    "pass all ports between them"
)


def meets(connect: Callable[[Any], Met]) -> Callable[[Any], Met]:
    """Return `connect`, a function of the settings, inside the context `meeting`."""

    @wraps(connect)
    def connected(config: Any) -> Met:
        with meeting(config.run.timeout + GRACE_S):
            return connect(config)

    return connected


@contextmanager
def meeting(timeout_s: float) -> Iterator[None]:
    """Inside this context the ranks connect. A failure to do so becomes a UserError or RunError.

    A rank that still waits LATE_S seconds after the deadline prints the line and exits with 1.
    """
    ended = threading.Event()
    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    about = (timeout_s, ended, address, _resolved(address))
    threading.Thread(target=_give_up, args=about, daemon=True).start()
    try:
        yield
    except RuntimeError as error:
        raise named(error, timeout_s) or error from None
    finally:
        ended.set()


def named(
    error: Exception, timeout_s: float, kind: Literal["rank", "machine"] = "rank"
) -> UserError | RunError | None:
    """Return one line for a failure to meet, or None if `error` is another one.

    A `rank` meets the others at MASTER_ADDR, the launcher of a `machine` at PET_MASTER_ADDR.
    """
    environ = os.environ
    text = str(error)
    of = "PET_" if kind == "machine" else ""
    reason = re.sub(r"\[/\S+\] ", "", reason_of(error))  # without paths of gloo's sources
    number = environ.get("PET_NODE_RANK" if of else "RANK", "0")
    own = f"{kind} {number} on {platform.node()}"
    first = f"{kind} 0"
    port = environ.get(f"{of}MASTER_PORT", "29500")
    where = f"{environ.get(f'{of}MASTER_ADDR', '?')}:{port}"
    same = f"the same {of}MASTER_ADDR and {of}MASTER_PORT on all machines"
    if "EADDRINUSE" in text or "launch distributed communication on port" in text:
        why = f"{own} cannot listen on {port}, which is in use (ss -ltnp shows by what)"
        return UserError(f"{of}MASTER_PORT: {why}; give all machines another one")
    if found := re.search(r"(\d+)/(\d+) clients joined", text):
        came = f"{found[1]} of {found[2]} {kind}s came to {own} at {where} in {timeout_s:.0f} s"
        return RunError(f"connection: {came}; start the command on every machine, with {same}")
    if "client socket" in text:
        why = f"{own} did not reach {first} at {where} in {timeout_s:.0f} s ({reason})"
        remedy = f"is {first} started there, and does its firewall let the port pass"
        return RunError(f"connection: {why}; give {same}; {remedy}?")
    if "wait timeout" in text:
        why = f"{own} met {first} at {where}, but not all {kind}s came in {timeout_s:.0f} s"
        return RunError(
            f"connection: {why}; {first} tells how many; start all machines, with {same}"
        )
    if of and type(error).__name__.startswith("Dist"):
        why = f"{own} lost {first} at {where} ({reason})"
        return RunError(f"connection: {why}; start the command on every machine again")
    if type(error).__name__.startswith("Dist") or "gloo" in text.lower():
        why = f"{own} met the others at {where}, but does not reach them"
        return RunError(f"connection: {why} ({reason}); {INTERFACES}")
    return None


def _resolved(address: tuple[str, int]) -> tuple[Any, ...] | None:
    """The family and the address of a socket, or None while the name is not known."""
    try:
        host, port = address
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return found[0][0], found[0][4]


def _give_up(
    timeout_s: float,
    ended: threading.Event,
    address: tuple[str, int],
    resolved: tuple[Any, ...] | None,
) -> None:
    until = time.monotonic() + timeout_s + LATE_S
    reached = False
    reason = f"gloo still waits after {timeout_s + LATE_S:.0f} s"
    why = ""
    while not ended.is_set():
        is_late = time.monotonic() >= until
        # Resolving a name reads the environment, and Accelerate sets variables as it starts: at
        # the same time both would crash. So a name is resolved before, or after the deadline.
        resolved = _resolved(address) if is_late and resolved is None else resolved
        # Asked at once and often: rank 0 may end within 0.1 s after this rank has met it.
        if not reached:
            try:
                if resolved is None:
                    raise OSError(f"{address[0]} is no known name")
                family, place = resolved
                with socket.socket(family) as asking:
                    asking.settimeout(2.0)
                    asking.connect(place)
                reached = True
            except OSError as error:
                why = f"client socket: {error}"
        if is_late:
            line = named(RuntimeError(reason if reached else why), timeout_s)
            print(f"error: {printable(str(line))}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)
        ended.wait(0.1)
