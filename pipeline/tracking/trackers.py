"""Trackers: the interface that W&B and TensorBoard share, and TensorBoard through Accelerate.

The metrics files are the truth, and trackers show them: a resumed run sends what a tracker lacks.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pipeline.config.settings import Config

Record = Mapping[str, Any]


class Tracker(Protocol):
    """Takes the lines of a run."""

    name: str
    advice: str  # what to do if it failed

    def metrics(self, record: Record) -> None: ...
    def timings(self, record: Record) -> None: ...
    def close(self, failed: bool, results: Path | None) -> None: ...


def numbers(record: Record) -> dict[str, float]:
    """The numbers of a record that trackers get: their names have a group, as in `train/loss`."""
    return {key: v for key, v in record.items() if "/" in key and isinstance(v, int | float)}


class TensorBoard:
    """TensorBoard in the run folder; `metrics` and `timings` are the lines that a resume kept."""

    name = "TensorBoard"
    advice = ""

    def __init__(
        self, folder: Path, config: Config, metrics: Sequence[Record], timings: Sequence[Record]
    ) -> None:
        from accelerate.tracking import TensorBoardTracker  # it needs an Accelerator

        # TensorBoard hides the points from `purge_step` on, so the kept ones of it are sent again.
        last = max((record["step"] for record in metrics), default=0)
        self._tracker = TensorBoardTracker("tensorboard", folder, purge_step=last)
        self._tracker.start()
        for record in (*metrics, *timings):
            if record["step"] == last:
                self.metrics(record)

    def metrics(self, record: Record) -> None:
        self._tracker.log(numbers(record), step=record["step"])

    timings = metrics

    def close(self, failed: bool, results: Path | None) -> None:
        self._tracker.finish()
