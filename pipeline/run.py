"""The command line: settings, then the ranks, then the run.

Exit codes: 0 done, 1 fault (with its traceback), 2 the user's mistake (one line), 75 interrupted
with a checkpoint to resume from.
"""

import os
import sys

if __name__ == "__main__":  # sys.path[0] is `pipeline/` here; imports need the repository root
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from pipeline.config.settings import Config
from pipeline.errors import LOST_CONNECTION, STARTED_BY_US, CtrlC, MachineError, UserError
from pipeline.files.imports import importing
from pipeline.files.untrusted import printable

# Seconds that a rank waits before it prints an error that another rank may have printed already.
# In that case the launcher ends this rank during the wait.
SILENT_S = 5.0
LAUNCHER = os.getppid()


def main(argv: list[str], *, entry: Path | None = None, **hooks: Any) -> int:
    """Run the command line `argv` (without the program's name); returns the exit code.

    `entry` is the script that starts a rank; the default is this file. `hooks` are passed to
    `pipeline.train.main`.
    """
    try:
        with _keyboard():
            return _run(argv, entry, hooks)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0" and not error.is_first:
            time.sleep(SILENT_S)  # most mistakes occur on every rank
        print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
        _end_restarts()
        return 2
    except MachineError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(SILENT_S)  # it occurs on every rank of a machine
        print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
        return 1
    except CtrlC:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("interrupted", file=sys.stderr, flush=True)
        return 1
    except BaseException as error:
        watchdog: Any = sys.modules.get("pipeline.distributed.watchdog")
        if watchdog is not None and isinstance(error, watchdog.ToldElsewhere):
            return int(error.exit_code)
        if isinstance(error, SystemExit) and not hasattr(error, "__notes__"):
            raise  # --help exits so; a SystemExit of user code has a note of the watchdog
        if any(text in str(error) for text in LOST_CONNECTION):
            time.sleep(SILENT_S)
        rank = os.environ.get("RANK")
        heading = "" if rank is None else f"rank {rank} failed:\n"
        # One write: tracebacks of several ranks must not mix.
        sys.stderr.write(printable(heading + traceback.format_exc()))
        return 1


@contextmanager
def _keyboard() -> Iterator[None]:
    """Inside this context, Ctrl-C raises CtrlC."""

    def interrupt(*_: object) -> None:
        raise CtrlC

    before = signal.getsignal(signal.SIGINT)
    if (
        before is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def _run(argv: list[str], entry: Path | None, hooks: dict[str, Any]) -> int:
    # Imported late: a mistake in the settings is reported before anything heavy is loaded.
    from pipeline.checkpoints.run_folder import check_folder, restarted
    from pipeline.config import variables
    from pipeline.config.cli import parse
    from pipeline.distributed import launch
    from pipeline.models.files import check_name

    config = restarted(parse(argv))
    variables.refuse()
    if config.run.check:
        return _check(config)
    if os.environ.get("RANK", "0") == "0" and not config.run.doctor:
        check_folder(config)
        check_name("tiny" if config.run.resume_from_checkpoint else config.model.model)
    with importing():
        world = launch.resolve(config.run.num_gpus)
    if world.num_launched < world.num_ranks:
        return launch.start_ranks(world, argv, entry)  # the ranks check tasks and model
    launch.use_device(world)
    run = config.run.model_copy(update={"num_gpus": world.num_ranks})
    config = config.model_copy(update={"run": run})
    if config.run.doctor:
        with importing():
            from pipeline.doctor.main import main as doctor
            from pipeline.train import connect

        return doctor(config, connect)
    with importing():
        from pipeline.train import main as train

    return train(config, **hooks)


def _check(config: Config) -> int:
    """Run `--check` on one process, for any number of launched ranks and any `num_gpus`."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    with importing():
        from pipeline.preflight.check import main as check

    return check(config)


def _end_restarts() -> None:
    """Stop a launcher that would start the ranks again (`--max_restarts`): it would not help."""
    left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    left -= int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if left > 0 and os.getppid() == LAUNCHER:
        os.kill(LAUNCHER, signal.SIGTERM)


def leave(code: int) -> NoReturn:
    """End this process with exit code `code`, also where a process group is still open."""
    if (folder := os.environ.get(STARTED_BY_US)) and "RANK" in os.environ:
        with open(os.path.join(folder, f"rank-{os.environ['RANK']}"), "w") as note:
            note.write(str(code))
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        # Exiting with an open gloo group aborts in about one of three cases (torch 2.13) and hides
        # the exit code. After a failure, closing the group may wait for ranks that have ended.
        if code == 0:
            distributed.destroy_process_group()
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        from pipeline.distributed.launch import end_with_the_launcher

        end_with_the_launcher()
    leave(main(sys.argv[1:]))
