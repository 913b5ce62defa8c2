"""The command line: read the settings, start the ranks, train on each rank.

Exit codes: 0 success; 1 fault, with one line of text or a traceback; 2 mistake of the user, with
one line of text; 75 interruption, with a checkpoint to resume from.
"""

import atexit
import errno
import gc
import os
import sys

if __name__ == "__main__":  # replace `pipeline/` on the import path by the repository root
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from pipeline.common.console import importing
from pipeline.common.errors import FULL, LOST_CONNECTION, STARTED_BY_US, CtrlC, RunError, UserError
from pipeline.common.untrusted import one_line, printable, shown
from pipeline.config import environment_variables

# Seconds that a rank waits before it prints an error that another rank may have printed. If the
# other rank has ended, the launcher ends the waiting rank, so that only one rank prints.
SILENT_S = 5.0
END_S = 2.0  # from SIGTERM to SIGKILL, for processes that user code has left
LAUNCHER = os.getppid()


def main(argv: list[str], *, entry: Path | None = None, **hooks: Any) -> int:
    """Run the command line `argv` (without the program's name), and return the exit code.

    `entry` is the script that starts a rank (default: this file). `hooks` are keyword
    arguments of `pipeline.train.main`.
    """
    return exit_code_of(lambda: _run(argv, entry, hooks), argv)


def exit_code_of(call: Callable[[], int], argv: Sequence[str]) -> int:
    """Return the exit code of `call`; print an exception as one line of text or as a traceback.

    An OSError of a path that is in the command line `argv` is the user's mistake.
    """
    is_main = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        with _keyboard(), environment_variables.naming_variable():
            try:
                return call()
            finally:
                if sys.stdout is not None:  # a closed pipe is noticed here
                    sys.stdout.flush()
    except (UserError, RunError) as error:
        if not is_main and not error.is_first:
            time.sleep(SILENT_S)  # most user and machine errors occur on every rank
        print(f"error: {one_line(str(error))}", file=sys.stderr, flush=True)
        if isinstance(error, UserError):
            _end_restarts()
        return error.exit_code
    except CtrlC:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if is_main:
            print("interrupted", file=sys.stderr, flush=True)
        return 1
    except BaseException as error:
        watchdog: Any = sys.modules.get("pipeline.distributed.watchdog")
        if watchdog is not None and isinstance(error, watchdog.ToldElsewhere):
            return int(error.exit_code)
        if isinstance(error, SystemExit) and not hasattr(error, "__notes__"):
            raise  # --help exits without a note; the watchdog adds a note to exits by user code
        if isinstance(error, OSError) and (told := _told(error, argv)) is not None:
            return told
        if any(text in str(error) for text in LOST_CONNECTION):
            time.sleep(SILENT_S)
        rank = os.environ.get("RANK")
        heading = "" if rank is None else f"rank {rank} failed:\n"
        # A single write keeps this traceback apart from the tracebacks of other ranks.
        sys.stderr.write(printable(heading + traceback.format_exc()))
        return 1


def _told(error: OSError, argv: Sequence[str]) -> int | None:
    """Tell an error of the output, or of a path that the user gave; return the exit code or None.

    The end of what reads the output, such as `head`, is no fault; only a run says that it ends.
    """
    if isinstance(error, BrokenPipeError) and _is_unread():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still in Python's buffer
        if "pipeline.train" in sys.modules:
            print("error: what reads the output has ended, so the run ends", file=sys.stderr)
        return 1
    path = os.fspath(error.filename) if isinstance(error.filename, str | os.PathLike) else ""
    given = [part for word in argv for part in (word, word.partition("=")[2]) if part]
    if error.errno in FULL:
        what = f"{path or 'the output'} cannot be written"
        remedy = "make room, then do it again"
    elif error.errno == errno.ENAMETOOLONG or (
        "pipeline.train" not in sys.modules  # in a run, the traceback may be needed
        and any(os.path.join(path, "").startswith(os.path.join(x, "")) for x in given)
    ):
        what = f"got {shown(path)}, which cannot be used"
        remedy = "give another path"
    else:
        return None
    print(f"error: {one_line(f'{what} ({error.strerror}); {remedy}')}", file=sys.stderr, flush=True)
    return 1 if error.errno in FULL else UserError.exit_code


def _is_unread() -> bool:
    """Return whether stdout is a pipe that nothing reads."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


@contextmanager
def _keyboard() -> Iterator[None]:
    """Inside this context, Ctrl-C raises the exception CtrlC."""

    def interrupt(*_: object) -> None:
        raise CtrlC

    before = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    is_default = before is signal.default_int_handler and in_main_thread
    if is_default:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if is_default and signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def _run(argv: list[str], entry: Path | None, hooks: dict[str, Any]) -> int:
    # Torch is imported only after the settings have been checked.
    from pipeline.checkpoints.run_folder import check_folder, restarted, take_model_of_run
    from pipeline.config.cli import parse
    from pipeline.config.rules import refuse_placeholders
    from pipeline.distributed import launch
    from pipeline.models.model_files import check_name

    config, notes = take_model_of_run(restarted(parse(argv)))
    environment_variables.refuse()
    is_first_rank = os.environ.get("RANK", "0") == "0"
    for note in notes if is_first_rank else ():
        print(note, flush=True)
    if config.run.check:  # one process does the check for all ranks
        if not is_first_rank:
            return 0
        with importing():
            from pipeline.preflight.check import main as check
            from pipeline.report.log import check_trackers

        check_trackers(config)
        return check(config, measures=True)
    refuse_placeholders(config)
    # Rank 0 of several machines checks this when all ranks have met, so that all end.
    is_alone = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    is_alone = is_alone and os.environ.get("PET_NNODES", "1") == "1"
    if is_first_rank and is_alone and not config.run.doctor:
        check_folder(config)
        check_name("tiny" if config.run.resume_from_checkpoint else config.model.model)
    with importing():
        layout = launch.layout_of_ranks(config.run.num_gpus)
    if layout.num_launched < layout.num_ranks:
        taken = ["--model", config.model.model] if notes else []  # the same on every rank
        return launch.start_ranks(layout, [*argv, *taken], entry, config.run.timeout)
    launch.use_device(layout)
    if config.run.doctor:
        with importing():
            from pipeline.preflight.doctor import main as doctor

        return doctor(config)
    with importing():
        from pipeline.train import main as train

    return train(config, **hooks)


def _end_restarts() -> None:
    """Stop a launcher that would start the ranks again after a mistake of the user."""
    most = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    done = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if done < most and os.getppid() == LAUNCHER:
        os.kill(LAUNCHER, signal.SIGTERM)


def leave(code: int) -> NoReturn:
    """End this process with exit code `code`, even if a process group is still open."""
    if (folder := os.environ.get(STARTED_BY_US)) and "RANK" in os.environ:
        with open(os.path.join(folder, f"rank-{os.environ['RANK']}"), "w") as note:
            note.write(str(code))
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        # With an open gloo process group the process may crash at its exit and lose the exit code
        # (torch 2.13). After a failure, closing the group may wait for ranks that have ended.
        if code == 0:
            distributed.destroy_process_group()
        else:
            _end_children()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    gc.unfreeze()  # else libraries print that objects leak
    # At the exit, multiprocessing waits for its children, also for one that ignores SIGTERM.
    late = threading.Timer(END_S, _end_children)
    late.daemon = True
    late.start()
    sys.exit(code)


def _end_children() -> None:
    """End the processes that user code has left, except one that ends by itself."""
    import psutil

    left = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if "resource_tracker" not in " ".join(child.cmdline()):
                child.terminate()
                left.append(child)
    for child in psutil.wait_procs(left, timeout=END_S)[1]:
        with suppress(psutil.Error):
            child.kill()


def start(command: Callable[[list[str]], int]) -> NoReturn:
    """Run `command` with the command line of this process, and end the process."""
    atexit.register(_end_children)  # runs after that of multiprocessing, which comes later
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warnings of c10d hold long stacks
    if "LOCAL_RANK" in os.environ:
        from pipeline.common.children import end_with_the_parent

        end_with_the_parent()  # the launcher
    leave(command(sys.argv[1:]))


if __name__ == "__main__":
    start(main)
