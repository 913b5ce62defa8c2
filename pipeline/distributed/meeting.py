"""The meeting of the ranks at their key-value store: a failure is one line with the address."""

import os
import platform
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

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
    timer = threading.Timer(timeout_s + LATE_S, _give_up, [timeout_s])
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        raise _named(error, timeout_s) or error from None
    finally:
        timer.cancel()


def _named(error: RuntimeError, timeout_s: float) -> UserError | RunError | None:
    environ, text = os.environ, str(error)
    reason = re.sub(r"\[/\S+\] ", "", reason_of(error))  # without paths of gloo's sources
    own = f"rank {environ.get('RANK', '0')} on {platform.node()}"
    port = environ.get("MASTER_PORT", "?")
    where = f"{environ.get('MASTER_ADDR', '?')}:{port}"
    same = "the same MASTER_ADDR and MASTER_PORT on all machines"
    if "EADDRINUSE" in text:
        why = f"{own} cannot listen on {port}, which is in use (ss -ltnp shows by what)"
        return UserError(f"MASTER_PORT: {why}; give all machines another one")
    if found := re.search(r"(\d+)/(\d+) clients joined", text):
        came = f"{found[1]} of {found[2]} ranks came to {own} at {where} in {timeout_s:.0f} s"
        return RunError(f"connection: {came}; start the command on every machine, with {same}")
    if "client socket" in text:
        why = f"{own} did not reach rank 0 at {where} in {timeout_s:.0f} s ({reason})"
        remedy = "is rank 0 started there, and does its firewall let the port pass"
        return RunError(f"connection: {why}; give {same}; {remedy}?")
    if "wait timeout" in text:
        why = f"{own} met rank 0 at {where}, but not all ranks came in {timeout_s:.0f} s"
        return RunError(
            f"connection: {why}; rank 0 tells how many; start all machines, with {same}"
        )
    if type(error).__name__.startswith("Dist") or "gloo" in text.lower():
        why = f"{own} met the others at {where}, but does not reach them"
        return RunError(f"connection: {why} ({reason}); {INTERFACES}")
    return None


def _give_up(timeout_s: float) -> None:
    reason = f"gloo still waits after {timeout_s + LATE_S:.0f} s"
    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    try:
        socket.create_connection(address, 2.0).close()
    except OSError as error:
        reason = f"client socket: {error}"
    line = _named(RuntimeError(reason), timeout_s)
    print(f"error: {printable(str(line))}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)
