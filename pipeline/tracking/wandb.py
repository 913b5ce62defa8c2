"""W&B, replayed from the files of a run: a row for each line of `metrics.jsonl`, sent once.

The number of a line is W&B's own step (`_step`), so that the server says, whatever was killed when,
which line is the next. `timings.jsonl` adds to the row of the line before. The x axis of every plot
is the run's step. At the end W&B gets what wandb_results.py names, of which nothing is a row.

    python -m pipeline.tracking.wandb RUN_FOLDER

sends what the server lacks of a run that has ended; scripts/wandb_sync.sh calls it. Imports no
torch.
"""

from __future__ import annotations

import fcntl
import netrc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.config.recipe import load_recipe
from pipeline.config.settings import Config
from pipeline.errors import UserError
from pipeline.files.console import say
from pipeline.files.durable import read_records, write_text
from pipeline.files.layout import METRICS, RUN_SETTINGS, TIMINGS
from pipeline.files.untrusted import masked, masked_tree, reason_of
from pipeline.tracking.wandb_results import group_of, send_results

FINISH_S = 20.0  # for the last upload
GRACE_S = 10.0  # beyond that, for W&B's service itself
FAILED_S = 5.0  # for both after a failure, which other ranks wait to hear of
MAX_JOB_TYPE = 64  # characters that W&B's server takes

Record = Mapping[str, Any]


class WandbFeed:
    """A run of W&B that nothing in training waits for: one thread hands the rows over.

    `metrics` and `timings` are the lines that a resumed run has kept: those that W&B lacks are sent
    first, and lines written again that it has are not sent. `metrics=None` is a fresh run with an
    id of its own. Without a key nothing is sent, and `run_id` is None. Raises UserError where W&B
    cannot start. A failure in the thread is raised by the next call.
    """

    name = "W&B"
    advice = "; send them later with scripts/wandb_sync.sh"

    def __init__(
        self,
        folder: Path,
        config: Config,
        metrics: Sequence[Record] | None = None,
        timings: Sequence[Record] = (),
    ) -> None:
        if metrics is None:
            _id_file(folder).unlink(missing_ok=True)
        self._row: dict[str, float] = {}  # the last one; it may still get timings
        self._line = -1  # its number
        self._results: Path | None = None  # the folder that holds them
        self._error: Exception | None = None
        self._run: Any = None
        if "WANDB_MODE" not in os.environ and not has_wandb_key():
            say(
                "W&B: no API key, so nothing is sent; once there is one, "
                f"bash scripts/wandb_sync.sh {folder} sends this run"
            )
            return
        self._run = _start(folder, config)
        # An offline run asks no server: it gets what is new, as W&B itself would do it.
        online = not (self._run.offline or self._run.disabled)
        self._sent = self._run.starting_step if online else len(metrics or ())
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wandb")
        for row in rows_of(metrics or (), timings):
            self._add(row)

    @property
    def run_id(self) -> str | None:
        return None if self._run is None else str(self._run.id)

    def metrics(self, record: Record) -> None:
        """The next line of `metrics.jsonl`."""
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
        if self._run is None:
            return
        self._send_row()
        if self._results is not None and not (failed or self._run.disabled):
            self._call(_send_results, self._run, self._results)
        self._call(self._run.finish, exit_code=int(failed))
        given_s = self._run.settings.finish_timeout
        timeout = FAILED_S if failed else given_s + GRACE_S if given_s else None
        done = self._thread.submit(_tear_down)
        try:
            done.result(timeout)
        except TimeoutError:
            _kill_service()  # everything that waits for it goes on
            with suppress(Exception):
                done.result(timeout=5)
            raise TimeoutError(f"it did not finish in {timeout:g} s") from None
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._raise_error()

    def _add(self, row: dict[str, float]) -> None:
        self._raise_error()
        self._send_row()
        self._row, self._line = row, self._line + 1

    def _send_row(self) -> None:
        if self._run is not None and self._line >= self._sent:
            self._call(self._run.log, self._row, step=self._line)

    def _call(self, function: Callable[..., object], *arguments: Any, **options: Any) -> None:
        def call() -> None:
            if self._error is None:
                try:
                    function(*arguments, **options)
                except Exception as error:
                    self._error = error
                    with suppress(Exception):  # nothing may wait for W&B when the process ends
                        _tear_down(exit_code=1)

        self._thread.submit(call)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _tear_down(exit_code: int | None = None) -> None:
    """Wait for W&B's service; finish() may return before it has sent everything."""
    import wandb

    wandb.teardown(exit_code)


def _send_results(run: Any, folder: Path) -> None:
    for name, error in send_results(run, folder).items():
        reason = f"{type(error).__name__}: {reason_of(error)}"
        say(f"warning: W&B did not get {name} ({reason}); the run folder has them")


def _id_file(folder: Path) -> Path:
    return folder / "wandb" / "run-id"


def remember_id(folder: Path, run_id: str) -> None:
    """Go on under this id, unless the run folder knows one."""
    path = _id_file(folder)
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


def _start(folder: Path, config: Config) -> Any:
    import wandb

    tree = masked_tree(config.model_dump(mode="json"))
    tracking = tree["tracking"]
    known = _id_file(folder)
    own: dict[str, Any] = {"silent": True, "console": "off", "finish_timeout_raises": True}
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
                id=known.read_text(encoding="utf-8").strip() if known.is_file() else None,
                resume="allow",
                settings=wandb.Settings(git_remote_url=_git_remote(folder), **own),
            )
    except wandb.errors.Error as error:
        raise UserError(
            f"report_to: W&B did not start ({reason_of(error)}); set WANDB_MODE=offline or "
            "report_to none"
        ) from None
    if run.disabled:
        return run
    remember_id(folder, run.id)
    # All, whatever groups there are; the summary keeps the last value. Of the largest it would make
    # a tree of its own, {"max": ..}.
    run.define_metric("*", step_metric="step")
    run.define_metric("step", hidden=True)
    if not run.offline:
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


# Sending a run that has ended


def main(argv: list[str]) -> int:
    """Send what W&B's server lacks; returns the exit code: 0, 1 a fault, 2 the user's mistake."""
    try:
        say(_send(_folder_in(argv)))
    except UserError as error:
        say(f"error: {error}")
        return 2
    except Exception as error:
        say(f"error: W&B: {type(error).__name__}: {reason_of(error)}; try again")
        return 1
    return 0


def _folder_in(argv: list[str]) -> Path:
    if len(argv) != 1:
        raise UserError(f"RUN_FOLDER: got {len(argv)} arguments; give one run folder")
    folder = Path(argv[0])
    if not ((folder / METRICS).is_file() and (folder / RUN_SETTINGS).is_file()):
        raise UserError(f"RUN_FOLDER: {folder} holds no run; give the folder of one")
    if not has_wandb_key():
        raise UserError("W&B: no API key; run `wandb login`, or set WANDB_API_KEY")
    if os.environ.get("WANDB_MODE", "online") != "online":
        raise UserError("WANDB_MODE: W&B's server is needed; unset it, or set it to online")
    return folder


def _send(folder: Path) -> str:
    with (folder / ".lock").open("a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"RUN_FOLDER: the run in {folder} is still alive; send it when it has ended"
            ) from None
        metrics, timings = (read_records(folder / name) for name in (METRICS, TIMINGS))
        feed = WandbFeed(folder, load_recipe(folder / RUN_SETTINGS), metrics, timings)
        feed.finish_with(folder)
        feed.close()
    return f"W&B has all {len(metrics)} lines of {METRICS}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
