"""Get an offline run ready for `wandb sync`: what scripts/wandb_sync.sh asks before it sends.

    python -m pipeline.tracking.wandb_sync RUN_FOLDER

prints the folders of the parts that are still to be sent, in order of time. Torn parts are closed
first, and lines of `metrics.jsonl` that are in no part get one of their own, unless the run is
still alive: its last part is then left for later. Of a run that was online, the lines that W&B's
server lacks are sent at once. Imports no torch.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.recipe import load_recipe
from pipeline.errors import UserError
from pipeline.files.console import say
from pipeline.files.durable import read_records
from pipeline.files.layout import METRICS, TIMINGS
from pipeline.files.untrusted import reason_of
from pipeline.tracking.wandb_feed import RUN_ID, WandbFeed, has_wandb_key
from pipeline.tracking.wandb_parts import Part, close_parts, parts_of


def main(argv: list[str]) -> int:
    """Print the parts to send; returns the exit code: 0, 1 a fault, 2 the user's mistake."""
    try:
        folder = _folder_in(argv)
        with _held(folder) as is_free:
            parts = ready(folder) if is_free else _all_but_the_last(folder)
    except UserError as error:
        say(f"error: {error}")
        return 2
    except Exception as error:
        say(f"error: W&B: {type(error).__name__}: {reason_of(error)}; try again")
        return 1
    for part in parts:
        if part.is_offline and not part.is_synced:
            print(part.folder)
    return 0


def ready(folder: Path) -> list[Part]:
    """Close the parts of a run that has ended, and bring what they lack into one more."""
    sent = close_parts(folder / "wandb")
    metrics, timings = (read_records(folder / name) for name in (METRICS, TIMINGS))
    parts = parts_of(folder / "wandb")
    is_offline = not parts or parts[-1].is_offline
    if not is_offline and not has_wandb_key():
        raise UserError("W&B: no API key; run `wandb login`, or set WANDB_API_KEY")
    if not is_offline or len(metrics) > sent:
        mode = "offline" if is_offline else "online"
        config = load_recipe(folder / "config.yaml")
        WandbFeed(folder, config, metrics, timings, mode).close()
        if is_offline:
            say(f"{len(metrics) - sent} lines of {METRICS} were in no part, and are in a new one")
    return parts_of(folder / "wandb")


def _all_but_the_last(folder: Path) -> list[Part]:
    say("the run is still alive: its last part can be sent when it has ended")
    return parts_of(folder / "wandb")[:-1]


def _folder_in(argv: list[str]) -> Path:
    if len(argv) != 1:
        raise UserError(f"RUN_FOLDER: got {len(argv)} arguments; give one run folder")
    folder = Path(argv[0])
    if not (folder / "wandb" / RUN_ID).is_file():
        raise UserError(
            f"RUN_FOLDER: {folder} holds nothing for W&B (no wandb/offline-run-*); give the folder "
            "of a run that was kept offline"
        )
    return folder


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Keep a run from going on in the folder; False where one is alive there."""
    with (folder / ".lock").open("a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
