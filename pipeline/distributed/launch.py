"""The start of the ranks of a run: `--num-gpus N` means N ranks in total, on all nodes.

`accelerate launch` or `torchrun` may start the ranks. If no launcher has started the ranks,
`pipeline/run.py` starts N ranks by the code of torchrun; on each of several nodes, those of the
node, if torchrun's variables PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT say
which it is. Without a GPU, or with ACCELERATE_USE_CPU=true, the ranks run on CPU.
"""

import logging
import os
import signal
import socket
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from pipeline.common.console import command, importing
from pipeline.common.errors import INTERRUPTED, SHUTDOWN_TIMEOUT, STARTED_BY_US, UserError
from pipeline.common.layout import shipped
from pipeline.distributed.main_memory import main_memory, refuse_too_many

RUN = Path(__file__).resolve().parents[1] / "run.py"
CONFIGS = shipped("accelerate_configs")

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SHUTDOWN_TIMEOUT_S = 20  # time from SIGTERM to SIGKILL; many schedulers send SIGKILL after 30 s


class RankLayout(NamedTuple):
    num_ranks: int
    rank: int
    device_type: Literal["cpu", "cuda"]
    num_launched: int  # number of processes that a launcher has started: 1 or num_ranks
    num_nodes: int = 1  # on which `start_ranks` is called


def layout_of_ranks(num_gpus: int | None) -> RankLayout:
    """Return the RankLayout of `num_gpus` ranks, or of the launched ranks if `num_gpus` is None.

    Raises UserError if a launcher started ranks, but not `num_gpus`, if GPUs are too few, or if
    main memory is too small for so many ranks on CPU.
    """
    num_launched = _num_launched()
    num_ranks = num_gpus or num_launched
    if num_launched > 1 and num_ranks != num_launched:
        raise UserError(
            f"--num-gpus: got {num_ranks}, but {num_launched} ranks were launched; "
            f"give --num-gpus {num_launched}, or start them with: {_with_ranks(num_ranks)}"
        )
    num_nodes = _num_nodes(num_ranks) if num_launched == 1 else 1
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
    num_visible = 0 if on_cpu else visible_gpus()
    is_launched = num_launched > 1
    num_here = _integer("LOCAL_WORLD_SIZE", 1) if is_launched else num_ranks // num_nodes
    if 1 <= num_visible < num_here:
        gpus = "1 GPU is" if num_visible == 1 else f"{num_visible} GPUs are"
        raise UserError(
            f"--num-gpus: got {num_here} ranks for this node, but {gpus} visible; "
            f"use: {_with_ranks(num_visible)}, or set ACCELERATE_USE_CPU=true for ranks on CPU"
        )
    if not num_visible:
        has, free = main_memory()
        refuse_too_many(num_here, has if is_launched else free)  # launched ranks take their part
    rank = _integer("RANK", 0) if is_launched else 0
    return RankLayout(num_ranks, rank, "cuda" if num_visible else "cpu", num_launched, num_nodes)


def visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def use_device(layout: RankLayout) -> None:
    """Make Accelerate use the layout's device type; call this before making an Accelerator."""
    if layout.device_type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        if layout.rank == 0:
            ranks = "1 rank" if layout.num_ranks == 1 else f"{layout.num_ranks} ranks, over gloo"
            print(f"running on CPU: {ranks}", file=sys.stderr, flush=True)


def start_ranks(
    layout: RankLayout, argv: list[str], entry: Path | None = None, timeout_s: float = 600.0
) -> int:
    """Start this node's ranks with the arguments `argv`; returns the exit code of the run.

    Every rank runs the script `entry` (default: `pipeline/run.py`). The function changes the
    environment and the signal handlers of this process, and returns when all ranks have ended.
    Raises UserError or RunError if the nodes do not meet within `timeout_s` seconds.
    """
    with importing():
        import psutil
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

        from pipeline.distributed.rendezvous import failure_to_connect

    with TemporaryDirectory(prefix="ranks-") as log_dir:
        _set_environment(layout, log_dir)
        # A signal that `nohup` or the shell's `&` ignores must stay ignored in the launcher.
        handled = [stop.name for stop in STOPS if signal.getsignal(stop) is not signal.SIG_IGN]
        arguments = [
            *("--signals-to-handle", ",".join(handled)),
            *("--nproc-per-node", str(layout.num_ranks // layout.num_nodes)),
            *("--log-dir", log_dir),
            *("--rdzv-conf", f"timeout={round(timeout_s)}"),
        ]
        if layout.num_nodes == 1:  # else the PET_ variables name address and port
            arguments += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
        logging.disable(logging.ERROR)  # the ranks have already printed their errors
        try:
            run(parse_args([*arguments, str(entry or RUN), *argv]))
        except ChildFailedError as error:
            return _exit_code(*error.get_first_failure())
        except SignalException:
            for stop in STOPS:  # a second Ctrl-C must not interrupt the code below
                signal.signal(stop, signal.SIG_IGN)
            return _code_of_ranks(log_dir)
        except RuntimeError as error:
            raise failure_to_connect(error, "node") or error from None
        finally:
            logging.disable(logging.NOTSET)
            # If a signal comes while ranks are starting, the launcher leaves some ranks running.
            for child in psutil.Process().children():
                child.kill()
                child.wait()
    return 0


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _num_nodes(num_ranks: int) -> int:
    number = _integer("PET_NNODES", 1)
    if number == 1:
        return 1
    for name in ("PET_NODE_RANK", "PET_MASTER_ADDR"):
        if not os.environ.get(name):
            raise UserError(f"{name}: got none in the environment, but PET_NNODES is {number}")
    if num_ranks % number:
        raise UserError(
            f"--num-gpus: got {num_ranks}, but PET_NNODES is {number}; "
            f"give the number of ranks of all nodes, a multiple of {number}"
        )
    return number


def _code_of_ranks(log_dir: str) -> int:
    """Return the exit code that the first rank of this node wrote (`run.leave`), else 1."""
    for file in sorted(Path(log_dir).glob("rank-*")):
        return int(file.read_text(encoding="utf-8") or 1)
    print("interrupted; what was saved before stands", file=sys.stderr, flush=True)
    return 1


def _with_ranks(num_ranks: int) -> str:
    return f"{command('train')} --num-gpus {num_ranks}"


def _num_launched() -> int:
    size = _integer("WORLD_SIZE", 1)
    missing = [
        name
        for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if size > 1 and missing:
        raise UserError(
            f"WORLD_SIZE is {size} without {', '.join(missing)}, so the processes would not find "
            f"each other; start the ranks with: {_with_ranks(size)}"
        )
    return size


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UserError(f"{name}: got {text!r} in the environment; unset it") from None


def _set_environment(layout: RankLayout, log_dir: str) -> None:
    # Accelerate's value would bind every rank to the same cores.
    os.environ.pop("KMP_AFFINITY", None)
    os.environ[STARTED_BY_US] = log_dir
    os.environ.setdefault(SHUTDOWN_TIMEOUT, str(SHUTDOWN_TIMEOUT_S))
    if layout.device_type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        num_threads = len(os.sched_getaffinity(0)) * layout.num_nodes // layout.num_ranks
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_threads)))
        # The ranks share the cores, so a waiting thread must not keep a core busy.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _exit_code(rank: int, failure: Any) -> int:
    code: int = failure.exitcode
    if code in (1, 2, INTERRUPTED):
        return code
    end = f"ended with exit code {code}"
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        end = f"was ended by {signal.Signals(-code).name}{hint}"
    print(f"rank {rank} {end}", file=sys.stderr, flush=True)
    return 1
