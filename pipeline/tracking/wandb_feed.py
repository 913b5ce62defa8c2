"""W&B, fed from the lines of the metrics files: a row for each line of `metrics.jsonl`, sent once.

The number of the line is W&B's own step (`_step`), so that W&B's files (offline) or its server
(online) say, whatever was killed when, which line is the next. `timings.jsonl` adds to the row of
the line before. The x axis of every plot is the run's step. At the end of a run W&B gets what
wandb_extras.py names, of which nothing is a row. Imports no torch.
"""

from __future__ import annotations

import json
import netrc
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.config.settings import Config
from pipeline.errors import UserError
from pipeline.files.console import say
from pipeline.files.durable import write_text
from pipeline.files.untrusted import masked, reason_of
from pipeline.tracking.wandb_extras import group_of, send_extras
from pipeline.tracking.wandb_parts import all_parts, close_parts

CURSOR, RUN_ID = "cursor.json", "run-id"
FINISH_S = 20.0  # for the last upload; what is not sent by then is kept on disk
GRACE_S = 10.0  # beyond that, for the service itself
MAX_JOB_TYPE = 64  # characters; W&B's server refuses more, which an offline run hears too late
FAILED_S = 5.0  # for everything, where the run has failed and others wait to hear why

Record = Mapping[str, Any]


class WandbFeed:
    """A run of W&B that nothing in training waits for: a thread of its own hands the rows over.

    `metrics` and `timings` are the lines that a resumed run has kept: those of them that W&B lacks
    are sent first, and lines written again that it has are not sent. `metrics=None` is a fresh run,
    with an id of its own; what an earlier attempt left is put aside, in `wandb/abandoned`. Raises
    UserError where W&B cannot start. A failure in the thread is raised by the next call.
    """

    name = "W&B"
    advice = "; send them later with scripts/wandb_sync.sh"

    def __init__(
        self,
        folder: Path,
        config: Config,
        metrics: Sequence[Record] | None = None,
        timings: Sequence[Record] = (),
        mode: str | None = None,
    ) -> None:
        self._folder = folder / "wandb"
        if metrics is None:
            _put_aside(self._folder)
        self._sent = max(_read_cursor(self._folder), close_parts(self._folder))
        self._run = _start(folder, config, mode)
        self._is_online = not (self._run.offline or self._run.disabled)
        if self._is_online:  # the server knows best, and gets what offline parts hold as well
            self._sent = self._run.starting_step
            _put_aside(self._folder, only_offline=True)
        self._write_cursor()
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._row: dict[str, float] = {}  # may still get timings
        self._line = -1  # its number
        self._results: Path | None = None  # the folder that holds them
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._hand_over, name="wandb-feed", daemon=True)
        self._thread.start()
        for row in rows_of(metrics or (), timings):
            self._add(row)

    @property
    def run_id(self) -> str:
        return str(self._run.id)

    def metrics(self, record: Record) -> None:
        """The next line of `metrics.jsonl`."""
        self._raise_error()
        self._add({**numbers(record), "step": record["step"]})

    def timings(self, record: Record) -> None:
        """A line of `timings.jsonl`."""
        self._raise_error()
        self._row |= numbers(record)

    def finish_with(self, folder: Path) -> None:
        """The run folder holds the run's results, which W&B gets when it is closed."""
        self._results = folder

    def close(self, failed: bool = False) -> None:
        """Send what is left and finish the run; raises TimeoutError where W&B does not answer."""
        self._send()
        if self._results is not None and not (failed or self._run.disabled):
            self._calls.put(partial(_send_extras, self._run, self._results))
        self._calls.put(partial(self._run.finish, exit_code=int(failed)))
        self._calls.put(None)
        given_s = self._run.settings.finish_timeout
        timeout = FAILED_S if failed else given_s + GRACE_S if given_s else None
        self._thread.join(timeout)
        if self._thread.is_alive():
            _kill_service()  # everything that waits for it goes on
            self._thread.join(timeout=5)
            raise TimeoutError(f"it did not finish in {timeout:g} s")
        self._raise_error()
        self._sent = max(
            self._sent, self._line + 1 if self._is_online else close_parts(self._folder)
        )
        self._write_cursor()

    def _add(self, row: dict[str, float]) -> None:
        self._send()
        self._row, self._line = row, self._line + 1

    def _send(self) -> None:
        if self._line >= self._sent:
            self._calls.put(partial(self._run.log, self._row, step=self._line))

    def _hand_over(self) -> None:
        import wandb

        try:
            while (call := self._calls.get()) is not None:
                call()
            wandb.teardown()  # finish() may return before the service has written its file
        except Exception as error:
            self._error = error
            with suppress(Exception):  # nothing may wait for it when the process ends
                wandb.teardown(exit_code=1)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_cursor(self) -> None:
        """Keep what is known to be sent; for the case that somebody removes parts."""
        if not self._run.disabled:
            state = {"run_id": self.run_id, "lines": self._sent}
            write_text(self._folder / CURSOR, json.dumps(state) + "\n")


def _send_extras(run: Any, folder: Path) -> None:
    for name, error in send_extras(run, folder).items():
        reason = f"{type(error).__name__}: {reason_of(error)}"
        say(f"warning: W&B did not get {name} ({reason}); the run folder has them")


def remember_id(folder: Path, run_id: str) -> None:
    """Go on under this id, unless the run folder knows one."""
    path = folder / "wandb" / RUN_ID
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        write_text(path, run_id + "\n")


def numbers(record: Record) -> dict[str, float]:
    """What trackers get of a record: the numbers whose names have a group, as in `train/loss`."""
    return {key: v for key, v in record.items() if "/" in key and isinstance(v, int | float)}


def rows_of(metrics: Sequence[Record], timings: Sequence[Record]) -> list[dict[str, float]]:
    """A row for each line of metrics, with the timings that were written after it."""
    rows = [{**numbers(record), "step": record["step"]} for record in metrics]
    exact = {_key(record): row for record, row in zip(metrics, rows, strict=True)}
    of_step = {row["step"]: row for row in rows}
    for record in timings:
        row = exact.get(_key(record), of_step.get(record["step"]))
        if row is not None:
            row |= numbers(record)
    return rows


def _key(record: Record) -> tuple[Any, ...]:
    return record.get("kind"), record["step"], record.get("after")


def _start(folder: Path, config: Config, mode: str | None) -> Any:
    import wandb

    tree = masked_tree(config.model_dump(mode="json"))
    tracking = tree["tracking"]
    no_key = mode is None and "WANDB_MODE" not in os.environ and not has_wandb_key()
    run_id = folder / "wandb" / RUN_ID
    known_id = run_id.read_text(encoding="utf-8").strip() if run_id.is_file() else None
    own: dict[str, Any] = {"silent": True, "console": "off"}
    if "WANDB_FINISH_TIMEOUT" not in os.environ:
        own["finish_timeout"] = FINISH_S
    try:
        with _masked_arguments():
            run = wandb.init(
                project=tracking["project"],
                name=tracking["run_name"] or folder.resolve().name,
                group=os.environ.get("WANDB_RUN_GROUP", group_of(config)),
                job_type=os.environ.get("WANDB_JOB_TYPE", tree["recipe"][:MAX_JOB_TYPE]),
                tags=tracking["tags"],
                config=tree,
                dir=str(folder),
                mode="offline" if no_key else mode,  # type: ignore[arg-type]
                id=known_id,
                resume="allow" if known_id else None,
                settings=wandb.Settings(
                    finish_timeout_raises=True, git_remote_url=_git_remote(folder), **own
                ),
            )
    except wandb.errors.Error as error:
        raise UserError(
            f"report_to: W&B did not start ({reason_of(error)}); set WANDB_MODE=offline or "
            "report_to none"
        ) from None
    if not run.disabled:
        remember_id(folder, run.id)
    # All, whatever groups there are; the summary keeps the last value. Of the largest it would make
    # a tree of its own, {"max": ..}, which an offline run does not get.
    run.define_metric("*", step_metric="step")
    run.define_metric("step", hidden=True)
    if no_key:
        say(
            "W&B: no API key, so this run is kept offline; to upload it: "
            f"bash scripts/wandb_sync.sh {folder}"
        )
    elif not (run.offline or run.disabled):
        say(f"W&B: {run.url}")
    return run


@contextmanager
def _masked_arguments() -> Iterator[None]:
    """W&B keeps the command line, where there may be a password."""
    arguments = sys.argv
    sys.argv = [masked(argument) for argument in arguments]
    try:
        yield
    finally:
        sys.argv = arguments


def _git_remote(folder: Path) -> str | None:
    """Where the code comes from, for W&B, which would leave a token before the colon in it."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(folder), "config", "--get", "remote.origin.url"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return masked(found) or None


def masked_tree(value: Any) -> Any:
    """A tree of settings with *** for the passwords and tokens in its texts."""
    if isinstance(value, Mapping):
        return {key: masked_tree(item) for key, item in value.items()}
    if isinstance(value, list):
        return [masked_tree(item) for item in value]
    return masked(value) if isinstance(value, str) else value


def _put_aside(wandb_folder: Path, only_offline: bool = False) -> None:
    """Hide parts that are not to be sent: all of them, or the offline ones not sent so far."""
    for part in all_parts(wandb_folder):
        if not only_offline or (part.is_offline and not part.is_synced):
            abandoned = wandb_folder / "abandoned"
            abandoned.mkdir(exist_ok=True)
            part.folder.rename(abandoned / part.folder.name)
    if not only_offline:
        for name in (RUN_ID, CURSOR):
            (wandb_folder / name).unlink(missing_ok=True)


def _read_cursor(wandb_folder: Path) -> int:
    path = wandb_folder / CURSOR
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["lines"]) if path.is_file() else 0
    except (ValueError, TypeError, KeyError):
        say(f"warning: {path} is damaged; W&B's own files say what was sent")
        return 0


def _kill_service() -> None:
    import psutil

    for process in psutil.Process().children():
        if process.name().startswith("wandb-core"):
            process.kill()


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
