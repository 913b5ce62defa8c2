"""Trackers, which get the numbers of a run: TensorBoard and trackio. W&B has a module of its own.

This module imports the package of a tracker only when the tracker is made, and no torch.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any, Protocol

from pipeline.common.durable import write_text
from pipeline.common.untrusted import masked_tree
from pipeline.config.settings import Config
from pipeline.report.run_files import COLUMNS, rows_of_step

TRACKIO_ID = Path("trackio", "run-id")  # path in the run folder
Line = Mapping[str, Any]  # a line of metrics.jsonl or timings.jsonl


class Tracker(Protocol):
    """What gets the lines of a run; `metrics` and `timings` are the lines already in the files."""

    name: str
    advice: str  # ends the warning that the tracker has failed

    def __init__(
        self, folder: Path, config: Config, metrics: Sequence[Line], timings: Sequence[Line]
    ) -> None: ...

    def metrics(self, line: Line) -> None: ...

    def timings(self, line: Line) -> None: ...

    def close(self, failed: bool, results: Path | None) -> None:
        """Send the results in a folder, and end."""


class TensorBoard:
    """TensorBoard in the run folder; `metrics` and `timings` are the lines already in the files."""

    name = "TensorBoard"
    advice = ""
    _tracker: Any

    def __init__(
        self, folder: Path, config: Config, metrics: Sequence[Line], timings: Sequence[Line]
    ) -> None:
        # TensorBoard hides the points of `purge_step` and later steps, so send the last step again.
        last = max((line["step"] for line in metrics), default=0)
        self._folder = folder
        self._config = config
        self._start(config, metrics, last)
        for line in (*metrics, *timings):
            if line["step"] >= self._first:
                self.metrics(line)

    def _start(self, config: Config, metrics: Sequence[Line], last: int) -> None:
        """Start, and set the first step whose lines are sent again."""
        from accelerate.tracking import TensorBoardTracker  # the class needs an Accelerator

        self._first = last
        self._tracker = TensorBoardTracker("tensorboard", self._folder, purge_step=last)
        self._tracker.start()

    def metrics(self, line: Line) -> None:
        rows = completions_of(line, self._folder, self._config)
        table = {"completions": self._table(rows)} if rows else {}
        self._log(line["step"], numbers(line) | table)

    timings = metrics

    def close(self, failed: bool, results: Path | None) -> None:
        self._tracker.finish()

    def _table(self, rows: Sequence[list[Any]]) -> Any:
        """Return a text: a heading and the conversation of each episode."""
        return "\n\n".join(
            f"**{', '.join(f'{name} {cell}' for name, cell in zip(COLUMNS, cells, strict=False))}**"
            f"\n\n{indent(conversation, 4 * ' ', lambda _: True)}"
            for *cells, conversation in rows
        )

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._tracker.log(values, step=step)


class Trackio(TensorBoard):
    """A run in trackio, which keeps it on this machine unless TRACKIO_SPACE_ID names a Space.

    The numbers and tables that the run lacks are sent.
    """

    name = "trackio"

    def _start(self, config: Config, metrics: Sequence[Line], last: int) -> None:
        from accelerate.tracking import TrackioTracker

        self._first = 0
        known = known_id(self._folder, TRACKIO_ID)
        self._tracker = TrackioTracker(
            config.tracking.project,
            name=config.tracking.run_name or self._folder.resolve().name,
            resume="allow" if metrics and not known else "never",
            config=masked_tree(config.model_dump(mode="json")),
        )
        self._tracker.start()
        storage: Any = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        run = self._tracker.run
        # By itself, trackio goes on in the newest run of this name, which another folder may have.
        run.id = known or run.id
        keep_id(self._folder, TRACKIO_ID, run.id)
        logs = storage.get_logs(config.tracking.project, run_id=run.id) if metrics else []
        # Of a resumed run, also what was sent after the checkpoint, and is now made again.
        self._known = {(log["step"], name) for log in logs for name in log}

    def _table(self, rows: Sequence[list[Any]]) -> Any:
        return importlib.import_module("trackio").Table(columns=[*COLUMNS], data=rows)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        new = {name: value for name, value in values.items() if (step, name) not in self._known}
        if new:
            super()._log(step, new)


def numbers(line: Line) -> dict[str, float]:
    """Return the numeric fields of a line with a `/` in the field's name, such as `train/loss`."""
    return {key: v for key, v in line.items() if "/" in key and isinstance(v, int | float)}


def completions_of(line: Line, folder: Path, config: Config) -> list[list[Any]]:
    """Return the table of episodes that trackers get with a line, or [] for most lines."""
    every = config.tracking.log_completions_steps
    if not every or line["step"] % every or "rollout/episodes" not in line:
        return []
    return rows_of_step(folder, line["stage"], line["step"])


def known_id(folder: Path, file: Path) -> str | None:
    """Return the id that a tracker has given to the run in a folder, or None."""
    path = folder / file
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def keep_id(folder: Path, file: Path, own: str) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    write_text(folder / file, own + "\n")
