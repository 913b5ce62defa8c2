"""Trackers through Accelerate: TensorBoard and trackio, both kept in the run folder.

They show a run; what is true stands in the metrics files, of which a resumed run gives them again
what they lack. Their packages are loaded only when one is asked for. Imports no torch.
"""

from __future__ import annotations

import io
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from pipeline.config.settings import Config
from pipeline.errors import UserError
from pipeline.files.console import say
from pipeline.tracking.wandb_extras import group_of, variable
from pipeline.tracking.wandb_feed import Record, masked_tree, numbers

REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")  # trackio's variables that send it elsewhere


class Tracker(Protocol):
    """What is fed with the lines."""

    name: str
    advice: str  # what to do where it failed

    def metrics(self, record: Record) -> None: ...
    def timings(self, record: Record) -> None: ...
    def finish_with(self, folder: Path) -> None: ...
    def close(self, failed: bool) -> None: ...


class _Accelerated:
    """A tracker of Accelerate's, which needs an Accelerator."""

    name: str
    advice = ""
    _tracker: Any

    def metrics(self, record: Record) -> None:
        self._tracker.log(numbers(record), step=record["step"])

    timings = metrics

    def finish_with(self, folder: Path) -> None:
        """Results are in the run folder, as is the tracker."""

    def close(self, failed: bool) -> None:
        self._tracker.finish()


class TensorBoard(_Accelerated):
    """TensorBoard; `kept` are the lines of both files on a resume."""

    name = "TensorBoard"

    def __init__(
        self, folder: Path, config: Config, kept: Sequence[Sequence[Record]] | None
    ) -> None:
        from accelerate.tracking import TensorBoardTracker

        # TensorBoard hides, from a step on, what was there. Of that step some lines are kept.
        last = max((record["step"] for record in kept[0]), default=0) if kept else 0
        self._tracker = TensorBoardTracker("tensorboard", folder, purge_step=last)
        self._tracker.start()
        for record in (record for lines in kept or () for record in lines):
            if record["step"] == last:
                self.metrics(record)


class Trackio(_Accelerated):
    """trackio, in `trackio/` of the run folder and never on the network; `kept` as above.

    trackio can only append, so its files are made anew at each start, from the lines that are kept:
    each line is there once. It looks for its folder once in a process, so that a process has one
    run with it. A line that it could not write it leaves out with a Python warning of its own.
    """

    name = "trackio"

    def __init__(
        self, folder: Path, config: Config, kept: Sequence[Sequence[Record]] | None
    ) -> None:
        from accelerate.tracking import TrackioTracker

        place = folder.resolve() / "trackio"
        settings = config.tracking
        self._tracker = TrackioTracker(
            settings.project,
            name=settings.run_name or folder.resolve().name,
            group=group_of(config),
            config=masked_tree(config.model_dump(mode="json")),
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        shutil.rmtree(place, ignore_errors=True)
        with _local(place), redirect_stdout(io.StringIO()):
            self._tracker.start()
        shown = f"trackio show --project {shlex.quote(settings.project)}"
        say(f"trackio: TRACKIO_DIR={shlex.quote(str(place))} {shown}")
        for record in (record for lines in kept or () for record in lines):
            self.metrics(record)

    def close(self, failed: bool) -> None:
        from trackio import context_vars

        with redirect_stdout(io.StringIO()):
            super().close(failed)
        context_vars.current_run.set(None)  # it would be finished once more, and aloud, at the exit


@contextmanager
def _local(place: Path) -> Iterator[None]:
    """Load trackio such that it writes to this folder and asks the Hub for no user's name."""
    for name in REMOTE:
        if name in os.environ:
            raise UserError(
                f"report_to: trackio stays in the run folder, but {name} is set; unset it, and "
                "send the run there afterwards with `trackio sync`"
            )
    if "TRACKIO_DIR" in os.environ:
        say(f"warning: TRACKIO_DIR is not used; trackio stays in the run folder, in {place}")
    with variable("TRACKIO_DIR", str(place)):
        import trackio
    from huggingface_hub import constants

    used = trackio.utils.TRACKIO_DIR
    assert used == place, f"trackio writes to {used} in this process; start another one"
    was_offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline
