"""What a run writes while it runs: the metrics files and the trackers.

`metrics.jsonl` holds only what the seed determines, `timings.jsonl` the rest. These files are the
truth; trackers get the numbers of every line under the same names, and a resumed run sends the
lines that a tracker lacks. Imports no torch, and a tracker's package only if the settings name it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pipeline.config.former import read_metrics
from pipeline.config.settings import Config
from pipeline.errors import UserError
from pipeline.files.console import say
from pipeline.files.durable import LinesFile, finite, sync
from pipeline.files.layout import METRICS, TIMINGS
from pipeline.files.untrusted import reason_of
from pipeline.tracking import wandb as feed
from pipeline.tracking.wandb import Record, WandbFeed, numbers


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


class RunLog:
    """The metrics files of a run folder and their trackers; only rank 0 writes.

    Every record has `kind`, `stage` and `step`, the number of GRPO optimizer steps done; a line of
    timings gets the `time` at which it is written. Make it on every rank and after the Accelerator,
    which Accelerate's trackers need. `state` is the `state_dict()` in the checkpoint from which the
    run resumes: the files are cut back to its sizes. Without it they start empty. Raises OSError if
    a file cannot be written; a tracker that fails gets nothing more, after one warning. Raises
    UserError on every rank if a tracker's package is missing, and on rank 0 if W&B cannot start a
    fresh run.
    """

    def __init__(
        self, folder: Path, config: Config, *, is_main: bool, state: Record | None = None
    ) -> None:
        self._folder = folder
        self._results: Path | None = None
        self._files: dict[str, LinesFile] = {}
        self._trackers: list[TensorBoard | WandbFeed] = []
        for package in config.tracking.report_to:
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f"report_to: got {package}, which is not installed; "
                    f"pip install {package}, or report to none"
                )
        if not is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        sizes = (state or {}).get("sizes", {})
        for name in (METRICS, TIMINGS):
            self._files[name] = LinesFile(folder / name, sizes.get(name, 0))
        sync(folder)
        if state is None:
            (folder / feed.ID_FILE).unlink(missing_ok=True)
        elif state.get("tracker_run_id") and feed.known_id(folder) is None:
            feed.remember_id(folder, state["tracker_run_id"])
        for package in config.tracking.report_to:
            if package == "wandb" and "WANDB_MODE" not in os.environ and not feed.has_wandb_key():
                say(
                    "W&B: no API key, so nothing is sent; once there is one, "
                    f"bash scripts/wandb_sync.sh {folder} sends this run"
                )
                continue
            tracker = WandbFeed if package == "wandb" else TensorBoard
            try:
                self._trackers.append(tracker(folder, config, *read_metrics(folder)))
            except Exception as error:
                if state is None:
                    raise
                _warn(tracker, error)

    @property
    def tracker_run_id(self) -> str | None:
        """W&B's id of the run, which a resumed run keeps."""
        return feed.known_id(self._folder)

    def metrics(self, record: Record) -> None:
        """Append a line that the seed determines."""
        self._write(METRICS, record)

    def timings(self, record: Record) -> None:
        """Append a line of times, memory or hosts."""
        self._write(TIMINGS, {**record, "time": time.time()})

    def sync(self) -> None:
        """Sync the files to the disk."""
        for file in self._files.values():
            file.sync()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: the bytes of each file, all on disk, and W&B's id."""
        self.sync()
        sizes = {name: file.size for name, file in self._files.items()}
        return {"sizes": sizes, "tracker_run_id": self.tracker_run_id}

    def finish_with(self, folder: Path) -> None:
        """Make `close` send the results in the run folder to the trackers."""
        self._results = folder

    def close(self, failed: bool = False) -> None:
        """Finish trackers and files; harmless when repeated."""
        self._feed("close", failed, self._results)
        self._trackers = []
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _write(self, name: str, record: Record) -> None:
        if name in self._files:
            assert "step" in record, f"{name}: a record without a step: {dict(record)}"
            clean = finite(record)
            self._files[name].append(json.dumps(clean, allow_nan=False))
            self._feed(name.removesuffix(".jsonl"), clean)

    def _feed(self, method: str, *arguments: object) -> None:
        for tracker in list(self._trackers):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:
                self._trackers.remove(tracker)
                _warn(tracker, error)


def _warn(tracker: Any, error: Exception) -> None:
    """Warn that the tracker gets nothing more until the next start; the run goes on."""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    say(
        f"warning: {tracker.name}: {kind}{reason_of(error)}; the run goes on, the files are whole"
        f"{tracker.advice}"
    )
