"""The metrics files of a run, and the trackers that get the same numbers: TensorBoard and W&B.

`metrics.jsonl` holds the numbers that the seed determines; `timings.jsonl` holds times, memory and
hosts. A resumed run sends each tracker the lines that the tracker lacks. This module does not
import torch, and imports the package of a tracker only if the settings name the tracker.
"""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.config.settings import Config
from pipeline.errors import UserError
from pipeline.files.console import may_fail, say
from pipeline.files.durable import LinesFile, finite, sync, write_text
from pipeline.files.layout import METRICS, TIMINGS
from pipeline.files.untrusted import masked, masked_tree, reason_of
from pipeline.tracking.run_files import COLUMNS, episode_rows, final_numbers, read_metrics

FINISH_S = 20.0  # timeout of the last upload to W&B
ID_FILE = Path("wandb", "run-id")  # path in the run folder
RESULTS = ("report.html", "report.md", "results.json", "curriculum.json", "config.yaml")
Line = Mapping[str, Any]  # a line of metrics.jsonl or timings.jsonl


def numbers(line: Line) -> dict[str, float]:
    """Return the numeric fields of a line with a `/` in the field's name, such as `train/loss`."""
    return {key: v for key, v in line.items() if "/" in key and isinstance(v, int | float)}


class TensorBoard:
    """TensorBoard in the run folder; `metrics` and `timings` are the lines already in the files."""

    name = "TensorBoard"
    advice = ""

    def __init__(
        self, folder: Path, config: Config, metrics: Sequence[Line], timings: Sequence[Line]
    ) -> None:
        from accelerate.tracking import TensorBoardTracker  # the class needs an Accelerator

        # TensorBoard hides the points of `purge_step` and later steps, so send the last step again.
        last = max((line["step"] for line in metrics), default=0)
        self._tracker = TensorBoardTracker("tensorboard", folder, purge_step=last)
        self._tracker.start()
        for line in (*metrics, *timings):
            if line["step"] == last:
                self.metrics(line)

    def metrics(self, line: Line) -> None:
        self._tracker.log(numbers(line), step=line["step"])

    timings = metrics

    def close(self, failed: bool, results: Path | None) -> None:
        self._tracker.finish()


class WandbFeed:
    """A run in W&B: each line of `metrics.jsonl` becomes one row, sent once.

    `metrics` and `timings` are the lines in the files; the lines that W&B lacks are sent. The index
    of a line is W&B's own step (`_step`), so the server's last step shows the next line to send.
    The x axis of every plot is the step of the run.
    """

    name = "W&B"
    advice = "; send them later with scripts/wandb_sync.sh"

    def __init__(
        self, folder: Path, config: Config, metrics: Sequence[Line], timings: Sequence[Line]
    ) -> None:
        self._run = _start(folder, config)
        # The index of the first line to send. An offline run gets new lines only.
        self._next = self._run.starting_step if self._run.url else len(metrics)
        self._line = -1  # the index of the newest line
        for row in rows_of(metrics, timings):
            self.metrics(row)

    def metrics(self, line: Line) -> None:
        self._line += 1
        self._log(_row(line))

    def timings(self, line: Line) -> None:
        self._log(numbers(line))

    def close(self, failed: bool = False, results: Path | None = None) -> None:
        """Send the results and wait for W&B. Raises TimeoutError if it takes too long."""
        if results is not None and not (failed or self._run.disabled):
            with may_fail("W&B did not get all results", "the run folder has them"):
                send_results(self._run, results)
        self._run.finish(exit_code=int(failed))

    def _log(self, row: dict[str, float]) -> None:
        if self._line >= self._next:
            self._run.log(row, step=self._line)


def known_id(folder: Path) -> str | None:
    path = folder / ID_FILE
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _row(line: Line) -> dict[str, float]:
    return {**numbers(line), "step": line["step"]}


def rows_of(metrics: Sequence[Line], timings: Sequence[Line]) -> list[dict[str, float]]:
    """Return a row for each line of metrics, joined with timings of the same evaluation or step."""
    rows = [_row(line) for line in metrics]

    def key(line: Line) -> tuple[Any, ...]:
        return line.get("kind"), line["step"], line.get("after")

    of_line = {key(line): row for line, row in zip(metrics, rows, strict=True)}
    of_step = {row["step"]: row for row in rows}
    for line in timings:
        row = of_line.get(key(line)) or of_step.get(line["step"], {})
        row |= numbers(line)
    return rows


def _start(folder: Path, config: Config) -> Any:
    import wandb

    tree = masked_tree(config.model_dump(mode="json"))
    tracking = tree["tracking"]
    order = config.curriculum.order or config.data.domains
    group = f"{config.curriculum.curriculum} {'-'.join(order)}"
    settings = wandb.Settings(
        silent=True,
        console="off",
        finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT", FINISH_S)),
        finish_timeout_raises=True,
        git_remote_url="",  # the URL of a git repository may hold a token
    )
    argv = sys.argv
    sys.argv = [masked(argument) for argument in sys.argv]  # W&B stores sys.argv
    try:
        run = wandb.init(
            project=tracking["project"],
            name=tracking["run_name"] or folder.resolve().name,
            group=os.environ.get("WANDB_RUN_GROUP", group[:128]),  # the server refuses longer names
            job_type=os.environ.get("WANDB_JOB_TYPE", tree["recipe"][:64]),
            tags=tracking["tags"],
            id=known_id(folder),
            config=tree,
            dir=str(folder),
            resume="allow",
            settings=settings,
        )
    finally:
        sys.argv = argv
    (folder / ID_FILE).parent.mkdir(exist_ok=True)
    write_text(folder / ID_FILE, run.id + "\n")
    run.define_metric("*", step_metric="step")  # the x axis of every plot
    run.define_metric("step", hidden=True)
    if run.url:
        say(f"W&B: {run.url}")
    return run


def is_wanted() -> bool:
    """Return whether W&B's variables hold a key or a mode, or `wandb login` has stored a key."""
    names = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE")
    if any(map(os.environ.get, names)):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, NetrcParseError):
        return False


def send_results(run: Any, folder: Path) -> None:
    """Send the final numbers, the report, the pictures and a table of episodes of a run folder."""
    import wandb

    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    run.summary.update(final_numbers(results))
    pictures = sorted(folder.glob("*.png"))
    files = [path for path in map(folder.joinpath, RESULTS) if path.is_file()]
    artifact = wandb.Artifact(f"report-{run.id}", type="report")
    for path in [*pictures, *files]:
        artifact.add_file(str(path.resolve()), policy="immutable")  # W&B makes no copy
    run.log_artifact(artifact)
    run.summary.update({f"plots/{path.stem}": wandb.Image(str(path)) for path in pictures})
    if episodes := episode_rows(folder):
        run.summary["trajectories"] = wandb.Table(columns=[*COLUMNS], data=episodes)


def check_trackers(config: Config) -> None:
    """Raise UserError if the package of a tracker is missing."""
    for package in config.tracking.report_to:
        if importlib.util.find_spec(package) is None:
            remedy = f"pip install {package}, or report to none"
            raise UserError(f"report_to: got {package}, which is not installed; {remedy}")


class RunLog(AbstractContextManager["RunLog"]):
    """The metrics files of a run folder and the trackers; only rank 0 writes.

    Every line has `kind`, `stage` and `step`; `step` counts GRPO optimizer steps. Every rank makes
    a RunLog after making the Accelerator. A resumed run passes the checkpoint's `state_dict()` as
    `state`, and the files are cut to the sizes in `state`. Without `state`, the files start empty.
    Raises OSError if a file cannot be written. Raises UserError if a tracker's package is missing,
    or if a tracker of a fresh run cannot start. A tracker that fails during the run gets no more
    lines.
    """

    def __init__(
        self, folder: Path, config: Config, *, is_main: bool, state: Line | None = None
    ) -> None:
        self.results: Path | None = None  # the folder whose results `close` sends to the trackers
        self._files: dict[str, LinesFile] = {}
        self._trackers: list[TensorBoard | WandbFeed] = []
        check_trackers(config)
        if not is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        sizes = (state or {}).get("sizes", {})
        for name in (METRICS, TIMINGS):
            self._files[name] = LinesFile(folder / name, sizes.get(name, 0))
        sync(folder)
        if state is None:
            (folder / ID_FILE).unlink(missing_ok=True)
        for package in config.tracking.report_to:
            if package == "wandb" and not is_wanted():
                say(
                    "W&B: no API key, so nothing is sent; after `wandb login` or with "
                    f"WANDB_API_KEY, bash scripts/wandb_sync.sh {folder} sends this run"
                )
                continue
            tracker = WandbFeed if package == "wandb" else TensorBoard
            try:
                self._trackers.append(tracker(folder, config, *read_metrics(folder)))
            except Exception as error:  # also whatever a broken package raises
                why = f"it did not start ({reason_of(error)})"
                if state is None:
                    remedy = f"set WANDB_MODE=offline, or leave {package} out"
                    raise UserError(f"report_to: got {package}, but {why}; {remedy}") from None
                _warn(tracker, why)

    def metrics(self, line: Line) -> None:
        """Append a line of numbers that the seed determines."""
        clean = self._append(METRICS, line)
        self._feed(lambda tracker: tracker.metrics(clean))

    def timings(self, line: Line) -> None:
        """Append a line of times, memory or hosts, with the current time as `time`."""
        clean = self._append(TIMINGS, {**line, "time": time.time()})
        self._feed(lambda tracker: tracker.timings(clean))

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

    def _append(self, name: str, line: Line) -> dict[str, Any]:
        """Append a line to a file of rank 0; return it as it stands in the file."""
        assert "step" in line, f"{name}: a line without a step: {dict(line)}"
        clean: dict[str, Any] = finite(line)
        if name in self._files:
            self._files[name].append(json.dumps(clean, allow_nan=False))
        return clean

    def _feed(self, give: Callable[[TensorBoard | WandbFeed], None]) -> None:
        for tracker in list(self._trackers):
            try:
                give(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                _warn(tracker, f"{type(error).__name__}: {reason_of(error)}")


def _warn(tracker: Any, why: str) -> None:
    whole = "the run goes on, the files are whole"
    say(f"warning: {tracker.name}: {why}; {whole}{tracker.advice}")
