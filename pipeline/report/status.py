"""Where a run is, from the files in its folder; `three-domain-grpo status RUN ...` prints it.

This module imports no torch. Rank 0 writes `ranks.json` each half second; a file that is
older than STALE_S seconds is of a run that was killed, or of one that is stopped or stuck.
"""

import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean, median
from textwrap import wrap
from typing import Any

import psutil
from pydantic import BaseModel

from pipeline.common.console import command
from pipeline.common.durable import finite
from pipeline.common.layout import RANKS, WARNINGS
from pipeline.common.untrusted import printable, read_file
from pipeline.config.cli import Parser
from pipeline.report.comparison import runs_in
from pipeline.report.run_files import RunData, is_finished, load_run, number, reading
from pipeline.report.tables import Rows, aligned
from pipeline.report.write import filled

STALE_S = 15.0
MEANS = ("reward", "success")  # means over the domains that a line of several runs has
MOST_WARNINGS = 5
MOST_BYTES = 1 << 22  # of a file that is read each two seconds
RECENT = 20  # steps that a pace and a mean reward are of
WIDTH = 80
COUNTED = {  # metrics of a step that are no good news if they are above 0
    "train/skipped": "optimizer steps skipped",
    "rollout/environment_errors": "episodes with an environment's error",
    "rollout/left_out": "episodes left out",
}

Status = dict[str, Any]


class Rank(BaseModel):
    """What a rank did when `ranks.json` was written."""

    rank: int
    host: str
    pid: int = 0  # of a run of an earlier version
    phase: str
    waits_for: str
    idle_s: float


class Posted(BaseModel):
    """The content of `ranks.json`."""

    time: float = 0.0
    is_over: bool = False
    why: str = ""
    ranks: list[Rank] = []


def status_of(run: RunData) -> Status:
    """Return where a run is, as `--json` prints it.

    Times are in seconds, memory in MB of the rank with the most. By domain, `reward` is the mean of
    the last RECENT steps, and `success` that of the last evaluation or validation.
    """
    last = run.train[-1] if run.train else {}
    timing = run.timings[-1] if run.timings else {}
    recent = {
        domain: [r for of in run.train[-RECENT:] if (r := of.get(f"reward/{domain}")) is not None]
        for domain in run.domains
    }
    status = {
        "folder": str(run.folder),
        "name": run.folder.resolve().name,
        "is_finished": is_finished(run),
        "stage": last.get("stage"),
        "step": last.get("step", 0),
        "num_steps": run.config["grpo"]["max_steps"] * run.config["grpo"]["use_grpo"],
        "step_s": median(run.step_s[-RECENT:]) if run.step_s else None,
        "tokens_per_s": timing.get("perf/tokens_per_s"),
        "memory_mb": timing.get("perf/peak_memory_mb"),
        "reward": {domain: fmean(rewards) for domain, rewards in recent.items() if rewards},
        "success": _success(run),
        "warnings": [*_warnings(run)],
    }
    return with_ranks(status)


def with_ranks(status: Status) -> Status:
    """Return the status with the state of the run, and what each rank does now.

    The state is running, finished, ended (with `why`), killed, stopped (by a signal), or silent: a
    process that writes nothing, or one on another machine.
    """
    posted = Posted()
    with suppress(OSError, ValueError):  # the run has not begun, or is gone
        path = Path(status["folder"]) / RANKS
        posted = Posted.model_validate_json(read_file(path, MOST_BYTES))
    is_running = not posted.is_over and abs(time.time() - posted.time) < STALE_S
    states = {  # the first that holds
        "running": is_running,
        "ended": posted.why,
        "finished": posted.is_over or status["is_finished"],
        _of_process(posted): True,
    }
    ranks = [rank.model_dump() for rank in posted.ranks] if is_running else []
    steps_left = status["num_steps"] - status["step"]
    return {
        **status,
        "state": next(state for state, holds in states.items() if holds),
        "why": posted.why,
        "place": status["stage"] or (ranks[0]["phase"] if ranks else "before GRPO"),
        "left_s": status["step_s"] * steps_left if status["step_s"] and is_running else None,
        "ranks": ranks,
    }


def _of_process(posted: Posted) -> str:
    """Return the state of a run from the process that wrote `ranks.json`, if it is here."""
    for rank in posted.ranks[:1]:
        if rank.host != platform.node():
            return "silent"
        with suppress(psutil.Error, ValueError, OverflowError):
            process = psutil.Process(rank.pid)
            state = process.status()
            # The number may be another process' by now.
            if state != psutil.STATUS_ZOMBIE and process.create_time() < posted.time:
                return "stopped" if state == psutil.STATUS_STOPPED else "silent"
    return "killed"


def _success(run: RunData) -> dict[str, float]:
    """Return the success of each domain in its last evaluation or validation."""
    found = [
        (line["step"], d, line.get(f"validation/{d}/success"))
        for line in run.validation
        for d in run.domains
    ]
    found += [(e["step"], d, of["mean"]) for e in run.evaluations for d, of in e["success"].items()]
    in_order = sorted(found, key=lambda of: of[0])
    return {domain: value for _, domain, value in in_order if value is not None}


def _warnings(run: RunData) -> Iterator[str]:
    for name, words in COUNTED.items():
        steps = {line["step"]: line[name] for line in run.train if line.get(name)}
        if steps:
            yield f"{sum(steps.values()):g} {words}, last in step {max(steps)}"
    for fall in run.results.get("worse", {}).get("found", []):
        yield f"{fall['name']} became worse: {fall['before']:.2f} -> {fall['after']:.2f}"
    with suppress(OSError, ValueError):  # a run without warnings has no file
        printed = read_file(run.folder / WARNINGS, MOST_BYTES).decode().splitlines()
        yield from [*dict.fromkeys(reversed(printed))][:MOST_WARNINGS]  # the newest first


def variables_of(status: Status) -> dict[str, Any]:
    """Return the variables of the templates `now.md.jinja` and `status.txt.jinja`."""
    names = dict.fromkeys((*status["reward"], *status["success"]))
    domains = [[name, *(number(status[of].get(name)) for of in MEANS)] for name in names]
    ranks = [
        [str(of["rank"]), f"{of['idle_s']:.0f} s", of["waits_for"] or "-", of["host"], of["phase"]]
        for of in status["ranks"]
    ]
    return {
        "status": status,
        "domains": [["", f"reward, last {RECENT} steps", "held-out success"], *domains],
        "ranks": [["rank", "quiet", "waits for", "host", "phase"], *ranks],
    }


def table_of(found: Sequence[Status]) -> Rows:
    """Return a table with a row for each run."""
    rows = [["run", "state", "step", *MEANS]]
    for of in found:
        means = [number(fmean(of[name].values()) if of[name] else None) for name in MEANS]
        rows.append([of["name"][:30], of["state"], f"{of['step']}/{of['num_steps']}", *means])
    return rows


def main(arguments: Sequence[str]) -> int:
    """Run `status RUN ...`; raises UserError for a folder without a run."""
    parser = Parser(prog=command("status"), description="Says where runs are.", allow_abbrev=False)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of runs"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each run")
    options = parser.parse_args(arguments)
    runs = runs_in(options.folders) or options.folders
    with reading(*runs):
        found = [status_of(load_run(folder)) for folder in runs]
        if options.json:
            lines = [json.dumps(finite(status)) for status in found]
        else:
            text = (
                aligned(table_of(found))
                if found[1:]
                else filled("status.txt.jinja", **variables_of(found[0]))
            )
            fitted = partial(wrap, width=WIDTH, subsequent_indent="  ")
            lines = [part for line in printable(text).splitlines() for part in fitted(line) or [""]]
    print("\n".join(lines))
    return 0
