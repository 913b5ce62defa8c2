"""Send a run's files to W&B: each line of `metrics.jsonl` becomes one row, sent once.

The index of a line is W&B's own step (`_step`), so the server's last step shows the next line to
send. The x axis of every plot is the step of the run. This module imports no torch.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from pipeline.common.console import may_fail, say
from pipeline.common.errors import UserError
from pipeline.common.untrusted import masked_tree, reason_of
from pipeline.config.settings import Config
from pipeline.report.run_files import COLUMNS, episode_rows, final_numbers
from pipeline.report.trackers import Line, completions_of, keep_id, known_id, numbers

FINISH_S = 20.0  # timeout, in seconds, of a call and of the last upload
TEARDOWN_S = 1.0  # timeout, in seconds, for W&B's end after a failure
ID_FILE = Path("wandb", "run-id")  # path in the run folder
ADVICE = "the run folder has them"
FILES = ("report.html", "report.md", "results.json", "curriculum.json", "config.yaml")


class WandbFeed:
    """A run in W&B.

    `metrics` and `timings` are the lines in the files; the lines that W&B lacks are sent. Raises
    UserError if W&B cannot start.
    """

    name = "W&B"
    advice = "; send them later with scripts/wandb_sync.sh"

    def __init__(
        self, folder: Path, config: Config, metrics: Sequence[Line], timings: Sequence[Line]
    ) -> None:
        self._folder = folder
        self._config = config
        self._run = _start(folder, config)
        # The index of the first line to send. An offline run gets new lines only.
        self._next = self._run.starting_step if self._run.url else len(metrics)
        self._line = -1  # the index of the newest line
        for line, row in zip(metrics, rows_of(metrics, timings), strict=True):
            self.metrics({**line, **row})

    def metrics(self, line: Line) -> None:
        import wandb

        self._line += 1
        if self._line >= self._next:
            rows: list[Any] = completions_of(line, self._folder, self._config)
            table = {"completions": wandb.Table(columns=[*COLUMNS], data=rows)} if rows else {}
            self._log(_row(line) | table)

    def timings(self, line: Line) -> None:
        self._log(numbers(line))

    def close(self, failed: bool = False, results: Path | None = None) -> None:
        """Send the results and wait for W&B. Raises TimeoutError if it takes too long."""

        def finish() -> None:
            if results is not None and not (failed or self._run.disabled):
                send_results(self._run, results)
            self._run.finish(exit_code=int(failed))

        _in_time(finish)

    def _log(self, row: dict[str, Any]) -> None:
        if self._line >= self._next:
            _in_time(lambda: self._run.log(row, step=self._line))


def _in_time(call: Callable[[], object]) -> None:
    """Call W&B in a thread, and leave W&B if the call fails or takes longer than a timeout.

    Raises TimeoutError. WANDB_FINISH_TIMEOUT (0: no timeout) is W&B's own variable.
    """
    import wandb

    timeout_s = float(os.environ.get("WANDB_FINISH_TIMEOUT", FINISH_S))
    answer = _begun(call)
    try:
        answer.result(timeout_s or None)
    except Exception as error:
        is_late = not answer.done() or answer.exception() is not error  # an answer after all
        with suppress(Exception):  # without teardown, W&B waits when this process ends
            _begun(lambda: wandb.teardown(exit_code=1)).result(TEARDOWN_S)
        if is_late:
            raise TimeoutError(f"it did not answer in {timeout_s:g} s") from error
        raise


def _begun(call: Callable[[], object]) -> Future[None]:
    """Begin a call in a thread that does not keep this process alive."""
    answer = Future[None]()

    def work() -> None:
        try:
            call()
        except BaseException as error:
            answer.set_exception(error)
        else:
            answer.set_result(None)

    Thread(target=work, daemon=True).start()
    return answer


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
        finish_timeout=0,  # `_in_time` has one
        x_transaction_log_flush_interval=1.0,  # seconds that a killed run loses of an offline file
        git_remote_url="",  # the URL of a git repository may hold a token
        x_disable_meta=masked_tree(sys.argv) != sys.argv,  # the command line is in W&B's metadata
    )
    try:
        run = wandb.init(
            project=tracking["project"],
            name=tracking["run_name"] or folder.resolve().name,
            group=os.environ.get("WANDB_RUN_GROUP", group[:128]),  # the server refuses longer names
            job_type=os.environ.get("WANDB_JOB_TYPE", tree["recipe"][:64]),
            tags=tracking["tags"],
            id=known_id(folder, ID_FILE),
            config=tree,
            dir=str(folder),
            resume="allow",
            settings=settings,
        )
    except wandb.errors.Error as error:
        raise UserError(
            f"report_to: W&B did not start ({reason_of(error)}); set WANDB_MODE=offline or "
            "report_to none"
        ) from None
    keep_id(folder, ID_FILE, run.id)
    run.define_metric("*", step_metric="step")  # the x axis of every plot
    run.define_metric("step", hidden=True)
    if run.url:
        say(f"W&B: {run.url}")
    return run


def is_wanted() -> bool:
    """Return whether W&B's variables hold a key or a mode, or `wandb login` has stored a key."""
    from requests.utils import get_netrc_auth  # W&B's own way to a stored key

    names = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE")
    server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    return any(map(os.environ.get, names)) or get_netrc_auth(server) is not None


def send_results(run: Any, folder: Path) -> None:
    """Send the results in the run folder; a failure of one part does not stop the other parts."""
    import wandb

    pictures = sorted(folder.glob("*.png"))
    files = [path for path in map(folder.joinpath, FILES) if path.is_file()]
    with may_fail("W&B did not get the final numbers", ADVICE):
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        run.summary.update(final_numbers(results))
    with may_fail("W&B did not get the report and the pictures", ADVICE):
        artifact = wandb.Artifact(f"report-{run.id}", type="report")
        for path in [*pictures, *files]:
            artifact.add_file(str(path.resolve()), policy="immutable")  # W&B makes no copy
        run.log_artifact(artifact)
        run.summary.update({f"plots/{path.stem}": wandb.Image(str(path)) for path in pictures})
    with may_fail("W&B did not get the table of episodes", ADVICE):
        episodes: list[Any] = episode_rows(folder)
        if episodes:
            run.summary["trajectories"] = wandb.Table(columns=[*COLUMNS], data=episodes)
