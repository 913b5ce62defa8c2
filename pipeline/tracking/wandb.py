"""W&B gets a run replayed from its files: one row for each line of `metrics.jsonl`, sent once.

The number of a line is W&B's own step (`_step`), so the server's last step shows the next line to
send. The x axis of every plot is the run's step. `python -m pipeline.tracking.wandb RUN_FOLDER`
sends the missing lines of a run that has ended; scripts/wandb_sync.sh calls it. Imports no torch.
"""

from __future__ import annotations

import fcntl
import json
import netrc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import psutil

from pipeline.config.former import read_metrics
from pipeline.config.recipe import load_recipe
from pipeline.config.settings import Config
from pipeline.errors import UserError
from pipeline.files.console import may_fail, say
from pipeline.files.durable import whole_lines, write_text
from pipeline.files.layout import METRICS, RUN_SETTINGS
from pipeline.files.untrusted import masked, masked_tree, reason_of
from pipeline.tracking.run_files import transcripts_in

FINISH_S = 20.0  # for the last upload
FAILED_S = 5.0  # the same after a failure: other ranks wait for the error message
ID_FILE = Path("wandb", "run-id")  # in the run folder
HAS_THEM = "the run folder has them"
MAX_STEPS, MAX_EPISODES = 50, 200  # in the table
FIELDS = ("domain", "family", "task_id", "trial", "reward", "stop_reason", "advantage")
COLUMNS = ["stage", "step", *(name.removesuffix("_id") for name in FIELDS), "conversation"]
FILES = ("report.html", "report.md", "results.json", "curriculum.json", "config.yaml")
Record = Mapping[str, Any]


def numbers(record: Record) -> dict[str, float]:
    """The numbers of a record that trackers get: their names have a group, as in `train/loss`."""
    return {key: v for key, v in record.items() if "/" in key and isinstance(v, int | float)}


class WandbFeed:
    """A run of W&B. A thread sends its rows, so that training never waits for W&B.

    `metrics` and `timings` are the lines in the files; the server gets the lines that it lacks.
    Raises UserError if W&B cannot start. An exception of the thread is raised by the next call.
    """

    name = "W&B"
    advice = "; send them later with scripts/wandb_sync.sh"

    def __init__(
        self, folder: Path, config: Config, metrics: Sequence[Record], timings: Sequence[Record]
    ) -> None:
        self._run = _start(folder, config)
        # The next line to send; a run without a server (offline) gets the new lines only.
        self._next = self._run.starting_step if self._run.url else len(metrics)
        self._line = -1  # the number of the last line
        self._error: Exception | None = None
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._make_calls, daemon=True)
        self._thread.start()
        for row in rows_of(metrics, timings):
            self.metrics(row)

    def metrics(self, record: Record) -> None:
        self._line += 1
        self._log(_row(record))

    def timings(self, record: Record) -> None:
        self._log(numbers(record))

    def close(self, failed: bool = False, results: Path | None = None) -> None:
        """Send the rest and a run's results; raises TimeoutError if W&B does not answer."""
        if results is not None and not (failed or self._run.disabled):
            self._calls.put(partial(send_results, self._run, results))
        self._calls.put(partial(self._run.finish, exit_code=int(failed)))
        self._calls.put(None)
        timeout = FAILED_S if failed else float(os.environ.get("WANDB_FINISH_TIMEOUT", FINISH_S))
        self._thread.join(timeout or None)  # without a timeout if it is 0
        if self._thread.is_alive():
            for process in psutil.Process().children():
                if process.name().startswith("wandb-core"):
                    process.kill()  # which ends every call that waits for it
            self._thread.join(timeout=5)
            self._error = TimeoutError(f"it did not finish in {timeout:g} s")
        if self._error is not None:
            raise self._error

    def _log(self, row: dict[str, float]) -> None:
        """W&B merges rows of the same step; the next step sends the row."""
        if self._error is not None:
            raise self._error
        if self._line >= self._next:
            self._calls.put(partial(self._run.log, row, step=self._line))

    def _make_calls(self) -> None:
        """Make the calls of the queue up to None, or until one fails."""
        import wandb

        try:
            for call in iter(self._calls.get, None):
                call()
            wandb.teardown()  # waits until everything is sent; run.finish() may return before
        except Exception as error:
            self._error = error
            with suppress(Exception):  # else W&B waits for its service when the process ends
                wandb.teardown(exit_code=1)


def known_id(folder: Path) -> str | None:
    path = folder / ID_FILE
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def remember_id(folder: Path, run_id: str) -> None:
    (folder / ID_FILE).parent.mkdir(exist_ok=True)
    write_text(folder / ID_FILE, run_id + "\n")


def _row(record: Record) -> dict[str, float]:
    return {**numbers(record), "step": record["step"]}


def rows_of(metrics: Sequence[Record], timings: Sequence[Record]) -> list[dict[str, float]]:
    """A row for each line of metrics, with the timings of the same evaluation, or else step."""
    keys = [[(r.get("kind"), r["step"], r.get("after")) for r in of] for of in (metrics, timings)]
    rows = [_row(record) for record in metrics]
    of_line, of_step = dict(zip(keys[0], rows, strict=True)), {row["step"]: row for row in rows}
    for key, record in zip(keys[1], timings, strict=True):
        row = of_line.get(key) or of_step.get(record["step"], {})
        row |= numbers(record)
    return rows


def _start(folder: Path, config: Config) -> Any:
    import wandb

    tree = masked_tree(config.model_dump(mode="json"))
    tracking, order = tree["tracking"], config.curriculum.order or config.data.domains
    group = f"{config.curriculum.curriculum} {'-'.join(order)}"
    # `close` has a timeout of its own. The address of a repository may hold a token.
    settings = wandb.Settings(silent=True, console="off", finish_timeout=0, git_remote_url="")
    names = {
        "project": tracking["project"],
        "name": tracking["run_name"] or folder.resolve().name,
        "group": os.environ.get("WANDB_RUN_GROUP", group[:128]),  # W&B's server takes no more
        "job_type": os.environ.get("WANDB_JOB_TYPE", tree["recipe"][:64]),
        "tags": tracking["tags"],
        "id": known_id(folder),
    }
    argv, sys.argv = sys.argv, [masked(argument) for argument in sys.argv]  # W&B stores them
    try:
        run = wandb.init(**names, config=tree, dir=str(folder), resume="allow", settings=settings)
    except wandb.errors.Error as error:
        raise UserError(
            f"report_to: W&B did not start ({reason_of(error)}); set WANDB_MODE=offline or "
            "report_to none"
        ) from None
    finally:
        sys.argv = argv
    remember_id(folder, run.id)
    run.define_metric("*", step_metric="step")  # the x axis; the summary has the last values
    run.define_metric("step", hidden=True)
    if run.url:
        say(f"W&B: {run.url}")
    return run


def has_wandb_key() -> bool:
    """Whether W&B can log in without asking: by its environment variables or a netrc entry."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    with suppress(OSError, netrc.NetrcParseError):  # W&B cannot log in with such a file either
        return netrc.netrc(path).authenticators(host) is not None
    return False


# Results at the end of a run; they are no row of the history


def send_results(run: Any, folder: Path) -> None:
    """Send all results that the run folder has; if one kind fails, the others are sent."""
    import wandb

    pictures = sorted(folder.glob("*.png"))
    files = [path for path in map(folder.joinpath, FILES) if path.is_file()]
    with may_fail("W&B did not get the final numbers", HAS_THEM):
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        run.summary.update(final_numbers(results))
    with may_fail("W&B did not get the report and the pictures", HAS_THEM):
        artifact = wandb.Artifact(f"report-{run.id}", type="report")
        for path in [*pictures, *files]:
            artifact.add_file(str(path.resolve()), policy="immutable")  # without a copy
        run.log_artifact(artifact)
        run.summary.update({f"plots/{path.stem}": wandb.Image(str(path)) for path in pictures})
    with may_fail("W&B did not get the table of episodes", HAS_THEM):
        if rows := episode_rows(folder):
            run.summary["trajectories"] = wandb.Table(columns=[*COLUMNS], data=rows)


def final_numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of the last evaluation as `final/<domain>/<name>`, and those of `transfer`."""
    evaluations = results.get("evaluations") or [{"success": {}}]
    names = {"mean": "success", "greedy": "greedy", "reward": "reward"}
    return dict(_flat("transfer", results.get("transfer"))) | {
        f"final/{domain}/{name}": rates[key]
        for domain, rates in evaluations[-1]["success"].items()
        for key, name in names.items()
        if key in rates
    }


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers in a tree of mappings whose leaves are numbers or [number, low, high]."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}/{key}", item)
    elif isinstance(value, list) and len(value) == 3:
        names = (name, f"{name}/low", f"{name}/high")
        yield from ((n, x) for n, x in zip(names, value, strict=True) if isinstance(x, int | float))
    elif isinstance(value, int | float):
        yield name, value


def episode_rows(folder: Path) -> list[list[Any]]:
    """At most MAX_EPISODES rows of the table, evenly from all steps, stages and evaluations."""
    files = transcripts_in(folder)
    steps = list(files)[:: ceil(len(files) / MAX_STEPS) or 1]
    rows = []
    for key in steps:
        lines = [line for path in files[key] for line in whole_lines(path)]
        every = ceil(len(lines) * len(steps) / MAX_EPISODES) or 1
        for episode in map(json.loads, lines[::every]):
            conversation = "\n\n".join(map(_text, episode["messages"]))
            rows.append([*key, *map(episode.get, FIELDS), conversation])
    return rows


def _text(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    lines = [f"{call['name']}({json.dumps(call['arguments'])})" for call in calls]
    return f"{message['role']}: " + "\n".join(filter(None, [message.get("content"), *lines]))


# Runs that have ended


def exit_code_of(command: Callable[[], None]) -> int:
    """Run the command; returns 0 if it is done, 1 after a fault, 2 after a mistake of the user."""
    try:
        command()
    except UserError as error:
        say(f"error: {error}")
        return 2
    except Exception as error:
        say(f"error: W&B: {type(error).__name__}: {reason_of(error)}; try again")
        return 1
    return 0


def send(*arguments: str) -> None:
    """Send the missing lines of a run that has ended; the only argument is its folder."""
    folder = Path(*arguments)
    if len(arguments) != 1 or not (folder / METRICS).is_file():
        raise UserError(f"RUN_FOLDER: {folder} holds no run; give one run folder")
    if not has_wandb_key():
        raise UserError("W&B: no API key; run `wandb login`, or set WANDB_API_KEY")
    os.environ["WANDB_MODE"] = "online"
    with (folder / ".lock").open("a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"RUN_FOLDER: the run in {folder} is still alive; send it when it has ended"
            ) from None
        lines = read_metrics(folder)
        WandbFeed(folder, load_recipe(folder / RUN_SETTINGS), *lines).close(results=folder)
    say(f"W&B has all {len(lines[0])} lines of {METRICS}")


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: send(*sys.argv[1:])))
