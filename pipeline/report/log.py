"""The metrics files of a run, and the trackers that get the same numbers.

`metrics.jsonl` holds the numbers that the seed determines; `timings.jsonl` holds times, memory and
hosts. A resumed run sends each tracker the lines that the tracker lacks. This module does not
import torch, and imports the package of a tracker only if the settings name the tracker.
"""

import importlib
import importlib.util
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pipeline.common.console import say
from pipeline.common.durable import LinesFile, finite, sync
from pipeline.common.errors import UserError
from pipeline.common.layout import METRICS, TIMINGS
from pipeline.common.untrusted import reason_of
from pipeline.config.settings import Config
from pipeline.report.run_files import read_metrics
from pipeline.report.trackers import TRACKIO_ID, Line, TensorBoard, Tracker, Trackio
from pipeline.report.wandb import ID_FILE, WandbFeed, is_wanted


def check_trackers(config: Config, by_import: bool = True) -> None:
    """Raise UserError if a tracker's package is missing or, `by_import`, cannot be imported."""
    for package in config.tracking.report_to:
        why = "is not installed" if importlib.util.find_spec(package) is None else ""
        if not why and by_import and _is_fed(package):
            try:
                importlib.import_module(package)
            except Exception as error:  # whatever a broken package raises
                why = f"cannot be imported ({reason_of(error)})"
        if why:
            raise UserError(
                f"report_to: got {package}, which {why}; pip install {package}, or report to none"
            )


def _is_fed(package: str) -> bool:
    """Return whether a tracker gets the numbers: W&B needs a key, or a mode."""
    return package != "wandb" or is_wanted()


TRACKERS: dict[str, type[Tracker]] = {
    "wandb": WandbFeed,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
}


class RunLog(AbstractContextManager["RunLog"]):
    """The metrics files of a run folder and the trackers; only rank 0 writes.

    Every line has `kind`, `stage` and `step`; `step` counts GRPO optimizer steps. Every rank makes
    a RunLog after making the Accelerator. A resumed run passes the checkpoint's `state_dict()` as
    `state`, and the files are cut to the sizes in `state`. Without `state`, the files start empty.
    Raises OSError if a file cannot be written. Raises UserError if a tracker's package cannot be
    imported, or if W&B cannot start a fresh run. A tracker that fails during the run gets no more
    lines.
    """

    def __init__(
        self, folder: Path, config: Config, *, is_main: bool, state: Line | None = None
    ) -> None:
        self._folder = folder
        self.results: Path | None = None  # the folder whose results `close` sends to the trackers
        self._files = dict[str, LinesFile]()
        self._trackers = list[Tracker]()
        check_trackers(config, by_import=is_main)
        if not is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        sizes = (state or {}).get("sizes", {})
        self._files = {n: LinesFile(folder / n, sizes.get(n, 0)) for n in (METRICS, TIMINGS)}
        sync(folder)
        if state is None:
            for file in (ID_FILE, TRACKIO_ID):
                (folder / file).unlink(missing_ok=True)
        for package in config.tracking.report_to:
            if not _is_fed(package):
                say(
                    "W&B: no API key, so nothing is sent; after `wandb login` or with "
                    f"WANDB_API_KEY, bash scripts/wandb_sync.sh {folder} sends this run"
                )
                continue
            tracker = TRACKERS[package]
            try:
                self._trackers.append(tracker(folder, config, *read_metrics(folder)))
            except Exception as error:
                if state is not None:
                    _warn(tracker, error)
                    continue
                if isinstance(error, UserError):
                    raise
                raise UserError(
                    f"report_to: {tracker.name} cannot start ({type(error).__name__}: "
                    f"{reason_of(error)}); mend that, or report to none"
                ) from None

    def metrics(self, line: Line) -> None:
        """Append a line of numbers that the seed determines.

        The transcripts of its step are in the run folder by now, on all ranks.
        """
        line = self._write(METRICS, line)
        self._feed(lambda tracker: tracker.metrics(line))

    def timings(self, line: Line) -> None:
        """Append a line of times, memory or hosts, with the current time as `time`."""
        line = self._write(TIMINGS, {**line, "time": time.time()})
        self._feed(lambda tracker: tracker.timings(line))

    def state_dict(self) -> dict[str, Any]:
        """Write the files to the disk; returns the sizes of the files."""
        for file in self._files.values():
            file.sync()
        return {"sizes": {name: file.size for name, file in self._files.items()}}

    def close(self, failed: bool = False) -> None:
        """Finish the trackers and close the files; a second call does nothing."""
        self._feed(lambda tracker: tracker.close(failed, self.results))
        self._trackers = []
        for file in self._files.values():
            file.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _write(self, name: str, line: Line) -> Line:
        """Append a line with finite numbers to a file, and return it."""
        clean = finite(line)
        if name in self._files:
            assert "step" in line, f"{name}: a line without a step: {dict(line)}"
            self._files[name].append(json.dumps(clean, allow_nan=False))
        return clean

    def _feed(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                _warn(tracker, error)


def _warn(tracker: Tracker | type[Tracker], error: Exception) -> None:
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    say(
        f"warning: {tracker.name}: {kind}{reason_of(error)}; the run goes on, the files are whole"
        f"{tracker.advice}"
    )
