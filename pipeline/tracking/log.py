"""What a run writes while it runs: the metrics files and the trackers.

`metrics.jsonl` holds only what the seed determines, `timings.jsonl` the rest. These files are the
truth; trackers get the numbers of every line under the same names. This module imports no torch,
and a tracker's package only if the settings name it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pipeline.config.former import read_metrics
from pipeline.config.settings import Config
from pipeline.errors import UserError
from pipeline.files.console import say
from pipeline.files.durable import LinesFile, finite, sync
from pipeline.files.layout import METRICS, TIMINGS
from pipeline.files.untrusted import reason_of
from pipeline.tracking.trackers import Record, TensorBoard, Tracker
from pipeline.tracking.wandb import ID_FILE, WandbFeed, has_wandb_key, known_id, remember_id


class RunLog:
    """The metrics files of a run folder and their trackers; only rank 0 writes.

    Every record has `kind`, `stage` and `step`, the number of GRPO optimizer steps done; a line of
    timings gets the `time` at which it is written. Make it on every rank and after the Accelerator,
    which Accelerate's trackers need. `state` is the `state_dict()` in the checkpoint from which the
    run resumes: the files are cut back to its sizes. Without it they start empty. Raises OSError if
    a file cannot be written; a tracker that fails is given up with one warning. Raises UserError on
    every rank if a tracker's package is missing, and on rank 0 if W&B cannot start a fresh run.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        *,
        is_main: bool,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = folder
        self._results: Path | None = None
        self._files: dict[str, LinesFile] = {}
        self._trackers: list[Tracker] = []
        for package in config.tracking.report_to:
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f"report_to: got {package}, which is not installed; "
                    f"pip install {package}, or report to none"
                )
        if not is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, TIMINGS):
            self._files[name] = LinesFile(
                folder / name, (state or {}).get("sizes", {}).get(name, 0)
            )
        sync(folder)
        if state is None:
            (folder / ID_FILE).unlink(missing_ok=True)
        elif state.get("tracker_run_id") and known_id(folder) is None:
            remember_id(folder, state["tracker_run_id"])
        for package in config.tracking.report_to:
            self._start(package, config, is_resumed=state is not None)

    @property
    def tracker_run_id(self) -> str | None:
        """W&B's id of the run, which a resumed run keeps."""
        return known_id(self._folder)

    def metrics(self, record: Record) -> None:
        """Append a line that the seed determines."""
        self._write(METRICS, "metrics", record)

    def timings(self, record: Record) -> None:
        """Append a line of times, memory or hosts."""
        self._write(TIMINGS, "timings", {**record, "time": time.time()})

    def sync(self) -> None:
        """Bring what was written to the disk itself."""
        for file in self._files.values():
            file.sync()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: the bytes of each file, all on disk, and W&B's id."""
        self.sync()
        sizes = {name: file.size for name, file in self._files.items()}
        return {"sizes": sizes, "tracker_run_id": self.tracker_run_id}

    def finish_with(self, folder: Path) -> None:
        """The run is over and its results are in the run folder: trackers get them at the end."""
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

    def _write(self, name: str, method: str, record: Record) -> None:
        if name in self._files:
            assert "step" in record, f"{name}: a record without a step: {dict(record)}"
            clean = finite(record)
            self._files[name].append(json.dumps(clean, allow_nan=False))
            self._feed(method, clean)

    def _start(self, name: str, config: Config, *, is_resumed: bool) -> None:
        """Start a tracker; a failure stops a fresh run, but not a resumed one."""
        if name == "wandb" and "WANDB_MODE" not in os.environ and not has_wandb_key():
            say(
                "W&B: no API key, so nothing is sent; once there is one, "
                f"bash scripts/wandb_sync.sh {self._folder} sends this run"
            )
            return
        tracker = WandbFeed if name == "wandb" else TensorBoard
        try:
            self._trackers.append(tracker(self._folder, config, *read_metrics(self._folder)))
        except Exception as error:
            if not is_resumed:
                raise
            _give_up(tracker, error)

    def _feed(self, method: str, *arguments: object) -> None:
        for tracker in list(self._trackers):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:
                self._trackers.remove(tracker)
                _give_up(tracker, error)


def _give_up(tracker: Tracker | type[Tracker], error: Exception) -> None:
    """Warn that the tracker gets nothing more until the next start; the run goes on."""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    say(
        f"warning: {tracker.name}: {kind}{reason_of(error)}; the run goes on, the files are whole"
        f"{tracker.advice}"
    )
