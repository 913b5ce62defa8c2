"""Where a run is, from the files in its folder; `three-domain-grpo status RUN ...` prints it.

This module imports no torch. Rank 0 writes `ranks.json` each half second; a file that is
older than STALE_S seconds is of a run that was killed.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pipeline.files.console import command, in_words
from pipeline.files.layout import RANKS
from pipeline.files.untrusted import printable
from pipeline.report.tables import aligned
from pipeline.tracking.run_files import RunData, is_finished, load_run, number

STALE_S = 15.0
RECENT = 20  # steps that a pace and a mean reward are of
WIDTH = 80
COUNTED = {  # metrics of a step that are no good news if they are above 0
    "train/skipped": "optimizer steps skipped",
    "rollout/environment_errors": "episodes with an environment's error",
    "rollout/left_out": "episodes left out",
}


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where a run is. Times are in seconds, memory in MB of the rank with the most."""

    folder: str
    state: str = ""  # running, finished, ended (with `why`) or killed
    why: str = ""
    is_finished: bool
    stage: str
    step: int
    num_steps: int
    step_s: float | None
    left_s: float | None = None
    memory_mb: float | None
    tokens_per_s: float | None
    reward: dict[str, float]  # by domain, mean of the last steps
    success: dict[str, float]  # by domain, of the last evaluation or validation
    ranks: list[dict[str, Any]] = field(
        default_factory=list
    )  # rank, host, phase, waits_for, idle_s
    warnings: list[str]

    @property
    def name(self) -> str:
        return Path(self.folder).resolve().name


def status_of(run: RunData) -> Status:
    """Return the status of a run whose files were read."""
    last = run.train[-1] if run.train else {}
    timing = run.timings[-1] if run.timings else {}
    status = Status(
        folder=str(run.folder),
        is_finished=is_finished(run),
        stage=last.get("stage", ""),
        step=last.get("step", 0),
        num_steps=run.config["grpo"]["max_steps"] * run.config["grpo"]["use_grpo"],
        step_s=median(run.step_s[-RECENT:]) if run.step_s else None,
        memory_mb=timing.get("perf/peak_memory_mb"),
        tokens_per_s=timing.get("perf/tokens_per_s"),
        reward=dict(_rewards(run)),
        success=_success(run),
        warnings=[*_warnings(run)],
    )
    return with_ranks(status)


def with_ranks(status: Status) -> Status:
    """Return the status with what the ranks do now."""
    posted = _posted(Path(status.folder))
    state = "ended" if posted["is_over"] else "killed"
    if time.time() - posted["time"] < STALE_S and not posted["is_over"]:
        state = "running"
    elif status.is_finished:
        state = "finished"
    ranks = posted["ranks"] if state == "running" else []
    left = status.step_s and status.step_s * (status.num_steps - status.step)
    return replace(
        status,
        state=state,
        why=posted["why"],
        ranks=ranks,
        stage=status.stage or (ranks[0]["phase"] if ranks else "before GRPO"),
        left_s=left if state == "running" else None,
    )


def _posted(folder: Path) -> dict[str, Any]:
    nothing = {"time": 0.0, "is_over": False, "why": "", "ranks": []}
    try:
        return {**nothing, **json.loads((folder / RANKS).read_text("utf-8"))}
    except (OSError, ValueError, TypeError):
        return nothing


def _rewards(run: RunData) -> Iterator[tuple[str, float]]:
    for domain in run.domains:
        values = [line[f"reward/{domain}"] for line in run.train if f"reward/{domain}" in line]
        if recent := [value for value in values[-RECENT:] if value is not None]:
            yield domain, fmean(recent)


def _success(run: RunData) -> dict[str, float]:
    """Return the success of each domain in its last evaluation or validation."""
    found = [
        (line["step"], d, line.get(f"validation/{d}/success"))
        for line in run.validation
        for d in run.domains
    ]
    found += [(e["step"], d, of["mean"]) for e in run.evaluations for d, of in e["success"].items()]
    found.sort(key=lambda of: of[0])
    return {domain: value for _, domain, value in found if value is not None}


def _warnings(run: RunData) -> Iterator[str]:
    for name, words in COUNTED.items():
        values = [line.get(name) or 0 for line in run.train]
        if total := sum(values):
            last = max(line["step"] for line in run.train if line.get(name))
            yield f"{total:g} {words}, last in step {last}"
    for fall in run.results.get("worse", {}).get("found", []):
        yield f"{fall['name']} became worse: {fall['before']:.2f} -> {fall['after']:.2f}"


def place_of(status: Status) -> str:
    """Return the state, the place and the time left as one line."""
    words = f"{status.state}{status.why and f' ({status.why})'}: {status.stage}"
    if status.num_steps:
        words += f", step {status.step} of {status.num_steps}"
    if status.left_s:
        words += f", about {in_words(status.left_s)} left in GRPO's steps"
    return words


def facts_of(status: Status) -> list[str]:
    """Return the speed and the memory in words."""
    facts = [
        (status.step_s, "{:.3g} s a step"),
        (status.tokens_per_s, "{:,.0f} tokens a second"),
        (status.memory_mb, "{:,.0f} MB on the largest rank"),
    ]
    return [words.format(value) for value, words in facts if value]


def domains_of(status: Status) -> list[list[str]]:
    """Return a table of the latest rewards and success of each domain."""
    names = dict.fromkeys((*status.reward, *status.success))
    rows = [[n, number(status.reward.get(n)), number(status.success.get(n))] for n in names]
    return [["", f"reward, last {RECENT} steps", "held-out success"], *rows]


def ranks_of(status: Status) -> list[list[str]]:
    """Return a table of what each rank does."""
    rows = [
        [str(r["rank"]), r["phase"], r["waits_for"] or "-", f"{r['idle_s']:.0f} s", r["host"]]
        for r in status.ranks
    ]
    return [["rank", "phase", "waits for", "quiet", "host"], *rows]


def in_lines(status: Status) -> Iterator[str]:
    """Yield a screen of lines about one run."""
    yield f"{status.name}: {place_of(status)}"
    for rows in (domains_of(status), ranks_of(status)):
        if rows[1:]:
            yield ""
            yield from aligned(rows).splitlines()
    if facts := facts_of(status):
        yield ""
        yield ", ".join(facts)
    yield from (f"warning: {line}" for line in status.warnings)


def in_one_line(status: Status) -> str:
    means = [number(fmean(of.values())) if of else "-" for of in (status.reward, status.success)]
    words = f"{status.step}/{status.num_steps}  reward {means[0]}  success {means[1]}"
    return f"{status.name[:30]:30}  {status.state:8}  {words}"


def main(arguments: Sequence[str]) -> int:
    """Run `status RUN ...`; raises UserError for a folder without a run."""
    parser = argparse.ArgumentParser(prog=command("status"), description="Says where runs are.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each run")
    options = parser.parse_args(arguments)
    found = [status_of(load_run(folder)) for folder in options.folders]
    for status in found:
        if options.json:
            print(json.dumps(asdict(status)))
        else:
            lines = in_lines(status) if len(found) == 1 else [in_one_line(status)]
            print("\n".join(printable(line)[:WIDTH] for line in lines))
    return 0
