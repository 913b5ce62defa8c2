"""Ranks that the launcher starts again (`--max_restarts`)."""

import json
import os
import platform
import sys
from datetime import timedelta

import torch.distributed as dist

START_S = 60.0  # seconds that a launcher may need to end ranks and start them again


def meet_again(timeout_s: float, device_type: str) -> None:
    """Make a process group if the launcher has restarted the ranks.

    In torch 2.13, all restarts share a key-value store that still holds addresses of ended ranks,
    so each restart has its own prefix for keys. Accelerate uses the process group of `meet_again`.
    Ranks of other machines may still wait for the ended rank, so it is first named to them. If they
    were still starting, they wait for it for `timeout_s`, and then their launcher starts them, too.
    """
    environ = os.environ
    timeout = timedelta(seconds=2 * timeout_s + START_S)
    attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt == 0 or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    store = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), timeout=timeout)
    rank = int(environ["RANK"])
    text = f"rank {rank} on {platform.node()} (local rank {environ['LOCAL_RANK']}) exited or was "
    text += "killed, and its launcher has started it again"
    fault = json.dumps({"kind": "gone", "rank": rank, "by": rank, "text": text})
    before = "default_pg" if attempt == 1 else f"attempt {attempt - 1}"
    prefix = f"{before}/0/"  # of the keys of the attempt before, in torch 2.13
    if dist.PrefixStore(prefix, store).compare_set("fault", "", fault) == fault.encode():
        print(text, file=sys.stderr, flush=True)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=dist.PrefixStore(f"attempt {attempt}", store),
        rank=rank,
        world_size=int(environ["WORLD_SIZE"]),
        timeout=timeout,
    )
