"""The command of `wandb_sync.sh`: send to W&B what W&B lacks of a run that has ended."""

import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.common.layout import METRICS, RUN_SETTINGS
from pipeline.common.untrusted import reason_of
from pipeline.config.recipe import load_recipe
from pipeline.report.run_files import read_metrics
from pipeline.report.wandb import WandbFeed


def exit_code_of(command: Callable[[], None]) -> int:
    """Run the command; returns 0, or 2 after a UserError, or 1 after any other exception."""
    try:
        command()
    except UserError as error:
        say(f"error: {error}")
        return 2
    except Exception as error:
        say(f"error: W&B: {type(error).__name__}: {reason_of(error)}; try again")
        return 1
    return 0


def send(*arguments: str) -> None:
    """Send missing lines and results of a run that has ended; the argument is the run folder."""
    folder = Path(*arguments)
    if len(arguments) != 1 or not (folder / METRICS).is_file():
        raise UserError(f"RUN_FOLDER: {folder} holds no run; give one run folder")
    os.environ["WANDB_MODE"] = "online"
    with (folder / ".lock").open("a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"RUN_FOLDER: the run in {folder} is still alive; send it when it has ended"
            ) from None
        lines = read_metrics(folder)
        WandbFeed(folder, load_recipe(folder / RUN_SETTINGS), *lines).close(results=folder)
    say(f"W&B has all {len(lines[0])} lines of {METRICS}")


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: send(*sys.argv[1:])))
