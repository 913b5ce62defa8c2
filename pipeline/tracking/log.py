"""What a run writes while it runs: the metrics files, the trackers, the progress on the terminal.

`metrics.jsonl` holds only what the seed determines and `timings.jsonl` the rest. They are the
truth: trackers get the numbers of every line under the same names. This module imports no torch;
trackers are loaded only when one is asked for.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pipeline.config.settings import Config
from pipeline.errors import UserError
from pipeline.files.console import say
from pipeline.files.durable import LinesFile, finite, read_records, sync
from pipeline.files.layout import METRICS, TIMINGS
from pipeline.files.untrusted import reason_of
from pipeline.tracking.trackers import TensorBoard, Tracker
from pipeline.tracking.wandb import Record, WandbFeed, remember_id


class RunLog:
    """The metrics files of a run folder and the trackers fed with them; on other ranks a no-op.

    Every record carries `kind`, `stage` and `step`, the number of GRPO optimizer steps done; a line
    of timings gets the `time` it is written at. Make it on every rank and after the Accelerator,
    which Accelerate's trackers need. `state` holds the `state_dict()` of the checkpoint from which
    the run goes on: the files are cut back to its sizes; without, they start empty. A file that
    cannot be written raises OSError; a tracker that fails is given up with one warning. Raises
    UserError on every rank when a tracker's package is missing, and on rank 0 when W&B cannot start
    a fresh run.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        *,
        is_main: bool,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._files: dict[str, LinesFile] = {}
        self._trackers: list[Tracker] = []
        self._wandb: WandbFeed | None = None
        sizes, is_resumed = (state or {}).get("sizes", {}), state is not None
        self._known_id: str | None = (state or {}).get("tracker_run_id")
        require_packages(config.tracking.report_to)
        if not is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, TIMINGS):
            self._files[name] = LinesFile(folder / name, sizes.get(name, 0))
        sync(folder)
        if self._known_id is not None:
            remember_id(folder, self._known_id)
        for name in config.tracking.report_to:
            self._start(name, folder, config, is_resumed=is_resumed)

    @property
    def tracker_run_id(self) -> str | None:
        """W&B's id of the run, which a resumed run keeps."""
        return (self._wandb and self._wandb.run_id) or self._known_id

    def metrics(self, record: Record) -> None:
        """Append a line that the seed determines."""
        self._write(METRICS, record, lambda tracker, line: tracker.metrics(line))

    def timings(self, record: Record) -> None:
        """Append a line of times, memory or hosts."""
        stamped = {**record, "time": time.time()}
        self._write(TIMINGS, stamped, lambda tracker, line: tracker.timings(line))

    def sync(self) -> None:
        """Bring what was written to the disk itself."""
        for file in self._files.values():
            file.sync()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint remembers: the bytes of each file, all on disk, and W&B's id."""
        self.sync()
        sizes = {name: file.size for name, file in self._files.items()}
        return {"sizes": sizes, "tracker_run_id": self.tracker_run_id}

    def finish_with(self, folder: Path) -> None:
        """The run is over and its results are in the run folder: W&B gets them when it closes."""
        self._tell(lambda tracker: tracker.finish_with(folder))

    def close(self, failed: bool = False) -> None:
        """Finish trackers and files; harmless when repeated."""
        self._tell(lambda tracker: tracker.close(failed))
        self._trackers = []
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=kind is not None)

    def _write(self, name: str, record: Record, feed: Callable[[Tracker, Record], None]) -> None:
        if name not in self._files:
            return
        assert "step" in record, f"{name}: a record without a step: {dict(record)}"
        clean = finite(record)
        self._files[name].append(json.dumps(clean, allow_nan=False))
        self._tell(lambda tracker: feed(tracker, clean))

    def _start(self, name: str, folder: Path, config: Config, *, is_resumed: bool) -> None:
        """Start a tracker; one that fails stops a fresh run, but not one that has got somewhere."""
        kept = [read_records(folder / name) for name in (METRICS, TIMINGS)] if is_resumed else None
        try:
            if name == "wandb":
                self._wandb = WandbFeed(folder, config, *(kept or ()))
                self._trackers.append(self._wandb)
            else:
                self._trackers.append(TensorBoard(folder, kept))
        except Exception as error:
            if not is_resumed:
                raise
            tracker = WandbFeed if name == "wandb" else TensorBoard
            give_up(tracker.name, tracker.advice, error)

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                give_up(tracker.name, tracker.advice, error)


def give_up(name: str, advice: str, error: Exception) -> None:
    """No tracker stops a run: it is left alone until the next start."""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    say(f"warning: {name}: {kind}{reason_of(error)}; the run goes on, the files are whole{advice}")


def require_packages(report_to: Collection[str]) -> None:
    """Raises UserError when the package of a tracker is not installed."""
    for name in report_to:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"report_to: got {name}, which is not installed; "
                f"pip install {name}, or report to none"
            )
