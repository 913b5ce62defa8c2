"""Real rank processes on this machine, for proofs and tests."""

import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context, set_start_method
from multiprocessing.connection import wait
from typing import Any

import torch

# A server process imports the modules once, and ranks fork from the server.
FORKSERVER = get_context("forkserver")
FORKSERVER.set_forkserver_preload(["scripts.proofs.preload"])


def play_ranks(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, timeout_s: float = 120
) -> list[Any]:
    """Run `function(*arguments)` in `num_ranks` processes; return the results by rank.

    Each process has the environment variables of `accelerate launch`. The result of a rank that
    raises is the text of its traceback. All processes are ended after `timeout_s` seconds without
    any result.
    """
    port = free_port()
    pipes: list[Any] = []
    processes: list[Any] = []
    scratch = tempfile.TemporaryDirectory(prefix="ranks-")  # temporary files of the ranks
    for rank in range(num_ranks):
        receiver, sender = FORKSERVER.Pipe(duplex=False)
        place = (rank, num_ranks, port, scratch.name)
        process = FORKSERVER.Process(target=_rank, args=(sender, function, place, arguments))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results: list[Any] = [f"rank {rank} said nothing" for rank in range(num_ranks)]
    open_pipes = list(pipes)
    while open_pipes:
        ready = wait(open_pipes, timeout=timeout_s)
        if not ready:
            break
        for pipe in ready:
            try:
                results[pipes.index(pipe)] = pipe.recv()  # type: ignore[arg-type, union-attr]
            except EOFError:
                open_pipes.remove(pipe)
    for process in processes:
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()
    scratch.cleanup()
    return results


def free_port() -> int:
    """A port of this machine that no process uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _rank(
    sender: Any, function: Callable[..., Any], place: tuple[int, int, int, str], arguments: Any
) -> None:
    rank, size, port, tempfile.tempdir = place
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    set_start_method("fork", force=True)  # as in a run; other locks are left behind by os._exit
    try:
        result = function(*arguments)
    except Exception:
        result = traceback.format_exc()
    sender.send(result)
    os._exit(0)  # An open gloo group may abort a normal exit.
