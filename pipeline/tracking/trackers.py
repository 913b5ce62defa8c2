"""Trackers: what is fed with the lines of a run, and TensorBoard, through Accelerate.

They show a run; what is true stands in the metrics files, of which a resumed run gives them again
what they lack. Their packages are loaded only when one is asked for. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pipeline.tracking.wandb import Record, numbers


class Tracker(Protocol):
    """What is fed with the lines."""

    name: str
    advice: str  # what to do where it failed

    def metrics(self, record: Record) -> None: ...
    def timings(self, record: Record) -> None: ...
    def finish_with(self, folder: Path) -> None: ...
    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """TensorBoard in the run folder; `kept` are the lines of both files on a resume."""

    name = "TensorBoard"
    advice = ""

    def __init__(self, folder: Path, kept: Sequence[Sequence[Record]] | None) -> None:
        from accelerate.tracking import TensorBoardTracker  # it needs an Accelerator

        # TensorBoard hides, from a step on, what was there. Of that step some lines are kept.
        last = max((record["step"] for record in kept[0]), default=0) if kept else 0
        self._tracker = TensorBoardTracker("tensorboard", folder, purge_step=last)
        self._tracker.start()
        for record in (record for lines in kept or () for record in lines):
            if record["step"] == last:
                self.metrics(record)

    def metrics(self, record: Record) -> None:
        self._tracker.log(numbers(record), step=record["step"])

    timings = metrics

    def finish_with(self, folder: Path) -> None:
        """Results are in the run folder, as is the tracker."""

    def close(self, failed: bool) -> None:
        self._tracker.finish()
