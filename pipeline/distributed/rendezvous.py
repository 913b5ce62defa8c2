"""The connection of the ranks through their key-value store, also after a launcher's restart.

A failure is one line with rank, host, address and what to check.
"""

import json
import os
import platform
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from pipeline.common.errors import RunError, UserError
from pipeline.common.untrusted import printable, reason_of

LATE_S = 5.0  # after the deadline, torch has this long to raise: gloo may wait without an end
START_S = 60.0  # seconds that a launcher may need to end ranks and start them again


@contextmanager
def rendezvous(timeout_s: float) -> Iterator[None]:
    """Inside this context the ranks connect. A failure to do so becomes a UserError or RunError.

    A rank that still waits LATE_S seconds after the deadline prints the line and exits with 1.
    """
    ended = threading.Event()
    threading.Thread(target=_give_up, args=(timeout_s + LATE_S, ended), daemon=True).start()
    try:
        yield
    except RuntimeError as error:
        raise failure_to_connect(error) or error from None
    finally:
        ended.set()


def _give_up(seconds: float, ended: threading.Event) -> None:
    if not ended.wait(seconds):
        line = failure_to_connect(dist.DistError(f"gloo still waits after {seconds:.0f} s"))
        print(f"error: {printable(str(line))}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


def failure_to_connect(
    error: Exception, kind: Literal["rank", "node"] = "rank"
) -> UserError | RunError | None:
    """Return one line for a failure to connect, or None if `error` is another one.

    A `rank` connects to MASTER_ADDR, the launcher of a `node` to PET_MASTER_ADDR.
    """
    if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
        return None
    environ = os.environ
    prefix = "PET_" if kind == "node" else ""
    number = environ.get("PET_NODE_RANK" if kind == "node" else "RANK", "0")
    own = f"{kind} {number} on {platform.node()}"
    port = environ.get(f"{prefix}MASTER_PORT", "29500")
    if "EADDRINUSE" in str(error):
        return UserError(
            f"{prefix}MASTER_PORT: {own} cannot listen on {port}, which is in use (ss -ltnp shows "
            "by what); give all nodes another one"
        )
    where = f"{environ.get(f'{prefix}MASTER_ADDR', '?')}:{port}"
    reason = re.sub(r"\[/\S+\] ", "", reason_of(error))  # without paths of gloo's sources
    return RunError(
        f"connection: {own} did not meet all {kind}s at {where} ({reason}); start the command on "
        f"every node, with the same {prefix}MASTER_ADDR and {prefix}MASTER_PORT, and let firewalls "
        "pass all ports between them; where nodes have several network interfaces, name the one "
        "that reaches the others (as `ip addr` shows it): GLOO_SOCKET_IFNAME=eth0, with GPUs also "
        "NCCL_SOCKET_IFNAME=eth0"
    )


def store_of_ranks(timeout: timedelta, attempt: int | None = None) -> dist.Store:
    """Return a new connection to the ranks' key-value store.

    All restarts by a launcher share the store, so each has keys of its own. `attempt` is the number
    of restarts, by default of this process.
    """
    if attempt is None:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"attempt {attempt}", store)


def rendezvous_again(timeout_s: float, device_type: str) -> None:
    """Make a process group if the launcher has restarted the ranks.

    In torch 2.13, the store still holds addresses of ended ranks, so the process group has a part
    of the store of its own. Accelerate uses the process group of `rendezvous_again`.
    Ranks of other nodes may still wait for the ended rank, so it is first named to them. If they
    were still starting, they wait for it for `timeout_s`, and then their launcher starts them, too.
    """
    environ = os.environ
    timeout = timedelta(seconds=2 * timeout_s + START_S)
    attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt == 0 or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    rank = int(environ["RANK"])
    text = (
        f"rank {rank} on {platform.node()} (local rank {environ['LOCAL_RANK']}) exited or was "
        "killed, and its launcher has started it again"
    )
    fault = json.dumps({"kind": "gone", "rank": rank, "by": rank, "text": text})
    before = store_of_ranks(timeout, attempt - 1)
    if before.compare_set("fault", "", fault) == fault.encode():
        print(text, file=sys.stderr, flush=True)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=store_of_ranks(timeout, attempt),
        rank=rank,
        world_size=int(environ["WORLD_SIZE"]),
        timeout=timeout,
    )
