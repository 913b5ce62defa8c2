"""What a run writes while it runs: the metrics files, the trackers, the progress on the terminal.

`metrics.jsonl` holds only what the seed determines and `timings.jsonl` the rest. They are the
truth: trackers get the numbers of every line under the same names. This module imports no torch;
Accelerate's trackers are loaded only when one is asked for.
"""

from __future__ import annotations

import importlib.util
import json
import math
import netrc
import os
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from pipeline.config import Config, UserError

METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"

Record = Mapping[str, Any]


class RunLog:
    """The metrics files of a run folder and the trackers fed with them; on other ranks a no-op.

    Every record carries `kind`, `stage` and `step`, the number of GRPO optimizer steps done. Make
    it on every rank and after the Accelerator, which Accelerate's trackers need. `resumed_at` is
    the step of the checkpoint that the run goes on from and `evaluated` the evaluations done by
    then: what was written later is dropped first. Raises UserError on every rank when a tracker's
    package is missing, and on rank 0 when W&B cannot start.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        *,
        is_main: bool,
        resumed_at: int | None = None,
        evaluated: Collection[str] = (),
    ) -> None:
        self._folder, self._is_main = folder, is_main
        self._wandb: Any = None
        self._tensorboard: Any = None
        report_to = config.tracking.report_to
        require_packages(report_to)
        if not is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if resumed_at is not None:
            cut_back(folder, resumed_at, evaluated)
        if "wandb" in report_to:
            self._wandb = _start_wandb(folder, config)
            if resumed_at is not None and self._wandb.tracker.offline:
                self._send_again()
        if "tensorboard" in report_to:
            self._tensorboard = _start_tensorboard(folder, resumed_at)

    def metrics(self, record: Record) -> None:
        """Append a line that the seed determines."""
        self._write(METRICS, record)

    def timings(self, record: Record) -> None:
        """Append a line of times, memory or hosts."""
        self._write(TIMINGS, record)

    def close(self, failed: bool = False) -> None:
        """Finish the trackers; harmless when repeated."""
        if self._wandb is not None:
            import wandb

            self._wandb.tracker.finish(exit_code=int(failed))
            wandb.teardown()  # finish() may return before W&B's service has written its file
        if self._tensorboard is not None:
            self._tensorboard.finish()
        self._wandb = self._tensorboard = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=kind is not None)

    def _write(self, name: str, record: Record) -> None:
        if not self._is_main:
            return
        assert "step" in record, f"{name}: a record without a step: {dict(record)}"
        clean = finite(record)
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean, allow_nan=False) + "\n")
        if self._wandb is not None:
            self._wandb.log(_row(clean))
        if self._tensorboard is not None:
            self._tensorboard.log(numbers(clean), step=clean["step"])

    def _send_again(self) -> None:
        """W&B writes a resumed offline run to a new file: make it whole with the lines kept."""
        for name in (METRICS, TIMINGS):
            for record in read_records(self._folder / name):
                self._wandb.log(_row(record))


def finite(value: Any) -> Any:
    """The value with null for numbers that JSON does not know (NaN and the infinities)."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def numbers(record: Record) -> dict[str, float]:
    """What trackers get of a record: the numbers whose names have a group, as in `train/loss`."""
    return {key: v for key, v in record.items() if "/" in key and isinstance(v, int | float)}


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file, if there is one, without a last line that a crash cut short."""
    if not path.is_file():
        return []
    *lines, last = path.read_text(encoding="utf-8").split("\n")
    records = [json.loads(line) for line in lines]
    with suppress(json.JSONDecodeError):
        records.append(json.loads(last))
    return records


def cut_back(folder: Path, step: int, evaluated: Collection[str]) -> None:
    """Drop what a resumed run writes again: lines past `step`, evaluations not in `evaluated`.

    The files are replaced in one move each; a line cut short by a crash goes too.
    """
    for name in (METRICS, TIMINGS):
        path = folder / name
        kept = [
            record
            for record in read_records(path)
            if record["step"] <= step and ("after" not in record or record["after"] in evaluated)
        ]
        if path.is_file():
            aside = folder / f".{name}.writing"
            with aside.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in kept)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)


def require_packages(report_to: Collection[str]) -> None:
    """Raises UserError when the package of a tracker is not installed."""
    for name in report_to:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"report_to: got {name}, which is not installed; "
                f"pip install {name}, or report to none"
            )


def _row(record: Record) -> dict[str, float]:
    """A line as a row of W&B: its numbers and its step.

    W&B's own steps must rise, one row each, or rows are lost. Evaluations, validations and training
    share steps here, so W&B counts the rows by itself and `step` is the axis of every plot.
    """
    return {**numbers(record), "step": record["step"]}


def _start_wandb(folder: Path, config: Config) -> Any:
    import wandb
    from accelerate.tracking import WandBTracker

    settings = config.tracking
    no_key = "WANDB_MODE" not in os.environ and not has_wandb_key()
    run_id = folder / "wandb" / "run-id"  # a resumed run goes on under the same id
    tracker = WandBTracker(
        settings.project,
        name=settings.run_name or folder.resolve().name,
        tags=settings.tags,
        config=config.model_dump(mode="json"),
        dir=str(folder),
        mode="offline" if no_key else None,
        id=run_id.read_text(encoding="utf-8").strip() if run_id.is_file() else None,
        resume="allow" if run_id.is_file() else None,
        settings=wandb.Settings(silent=True, console="off"),
    )
    try:
        tracker.start()
    except wandb.errors.Error as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"report_to: W&B did not start ({reason}); set WANDB_MODE=offline or report_to none"
        ) from None
    run_id.parent.mkdir(exist_ok=True)
    run_id.write_text(tracker.run.id + "\n", encoding="utf-8")
    tracker.run.define_metric("*", step_metric="step")
    if no_key:
        _say(
            "W&B: no API key, so this run is kept offline; to upload it: "
            f"wandb sync {Path(tracker.run.dir).parent}"
        )
    elif tracker.run.url:
        _say(f"W&B: {tracker.run.url}")
    return tracker


def _start_tensorboard(folder: Path, resumed_at: int | None) -> Any:
    from accelerate.tracking import TensorBoardTracker

    # Hides what the cut-off lines have left there.
    purge = None if resumed_at is None else resumed_at + 1
    tracker = TensorBoardTracker("tensorboard", folder, purge_step=purge)
    tracker.start()
    return tracker


def has_wandb_key() -> bool:
    """Whether W&B can log in without asking: by its environment variables or a netrc entry."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    asked = os.environ.get("NETRC")
    for path in [Path(asked)] if asked else [Path("~/.netrc"), Path("~/_netrc")]:
        try:
            if netrc.netrc(path.expanduser()).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue  # W&B cannot log in with such a file either
    return False


class StageProgress:
    """The progress of a stage on rank 0's standard error: a bar, or lines if it is no terminal."""

    def __init__(self, stage: str, num_steps: int, *, is_main: bool, done: int = 0) -> None:
        self._stage, self._num_steps, self._done = stage, num_steps, done
        self._is_main = is_main
        self._start = self._last_line = time.monotonic()
        self._bar: Any = None
        if is_main and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                desc=stage, total=num_steps, initial=done, unit="step", dynamic_ncols=True
            )

    def step(self, record: Record) -> None:
        """One optimizer step is done; `record` is its line of metrics."""
        self._done += 1
        text = rewards(record)
        if record.get("rollout/replaced_groups"):
            text += f"  replaced {record['rollout/replaced_groups']} groups"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif self._is_main and self._is_line_due():
            self._last_line = time.monotonic()
            elapsed = f"{self._last_line - self._start:.1f} s"
            parts = [f"{self._stage} {self._done}/{self._num_steps}", text, elapsed]
            _say("  ".join(part for part in parts if part))

    def _is_line_due(self) -> bool:
        """Some ten lines a stage, and one a minute at least."""
        every = max(10, self._num_steps // 10)
        waited_s = time.monotonic() - self._last_line
        return self._done % every == 0 or self._done == self._num_steps or waited_s > 60

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()


def rewards(record: Record) -> str:
    """`reward airline 0.62 retail 0.41`, of the domains in the record."""
    names = [key for key in record if key.startswith("reward/") and key != "reward/mean"]
    text = "".join(f" {name.removeprefix('reward/')} {record[name]:.2f}" for name in names)
    return f"reward{text}" if text else ""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
