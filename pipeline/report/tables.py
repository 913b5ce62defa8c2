"""The numbers of reports as text and as rows of tables, made only from the files of a run folder.

The success of sampled episodes and the success of greedy episodes are separate measurements;
reports never compare these measurements with each other.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from math import ceil
from statistics import fmean
from typing import Any

from pipeline.evaluation.transfer_metrics import wilson
from pipeline.tracking.run_files import (
    Evaluation,
    RunData,
    before_and_after,
    domains_of,
    number,
    rate,
)

METRICS = {  # key in `results.json` -> name in reports
    "average_accuracy": "average accuracy",
    "total_gain": "total gain",
    "stage_gain": "new-domain gain",
    "backward_transfer": "backward transfer",
    "forward_transfer": "forward transfer",
    "forgetting": "forgetting",
    "learning_efficiency": "learning efficiency",
    "area_under_curve": "area under the learning curve",
}
UNSIGNED = ("average_accuracy", "area_under_curve")
AT_THE_END = ("stage_gain", "backward_transfer", "forward_transfer", "forgetting")
KINDS = {"mean": "sampled", "greedy": "greedy"}  # key in `results.json` -> name in reports
NO_INTERVAL = "-"
HUGE = 1e6  # numbers above this size are written with an exponent

STOP, LEFT_OUT = "rollout/stop/", "rollout/left_out/"
BY_COLUMN = ("backward_transfer", "forward_transfer", "forgetting", "area_under_curve")

Rows = list[list[str]]  # cells of a table; the first row is the header


def shown(number: Sequence[Any] | None, sign: str = "", digits: int = 2) -> str:
    """Format (value, low, high) as `+0.55 [+0.47, +0.63]`, or as a dash if a number is missing."""
    if number is None or None in number:
        return NO_INTERVAL
    rounded = [round(x, digits) + 0.0 for x in number]  # adding zero turns -0.00 into 0.00
    value, low, high = (f"{x:{sign}.{digits}{'g' if abs(x) > HUGE else 'f'}}" for x in rounded)
    return f"{value} [{low}, {high}]"


def metric(number: Sequence[Any] | None, name: str, sign: str = "") -> str:
    """Format (value, low, high) with the sign and the digits for the transfer metric `name`."""
    is_change = name in METRICS and name not in UNSIGNED
    return shown(number, sign or "+" * is_change, 3 if name == "learning_efficiency" else 2)


def number_table(
    title: str, numbers: Mapping[str, Mapping[str, Any]], names: Iterable[str], sign: str = ""
) -> Rows:
    """Return a table with a row per key of `numbers` and a column per name that has numbers."""
    used = [name for name in names if any(of.get(name) for of in numbers.values())]
    rows = [[key, *(metric(of.get(n), n, sign) for n in used)] for key, of in numbers.items()]
    header = [title, *(METRICS.get(name, name) for name in used)]
    return [header, *(row for row in rows if {*row[1:]} - {NO_INTERVAL})]


def change(evaluations: Sequence[Evaluation], transfer: Mapping[str, Any]) -> Rows:
    """Return a table: success before GRPO, success after GRPO, and the change with its interval.

    If all evaluations are before GRPO, or all are after GRPO, the table has no column for a change.
    """
    before, after = before_and_after(evaluations)
    found = [before, after] if before and after else [before or after]
    rates = {
        domain: [number(rate(e, domain, kind)) for kind in KINDS for e in found]
        for domain in [*domains_of(evaluations), "mean"]
    }
    if len(found) < 2:
        return [["success", *KINDS.values()], *([d, *of] for d, of in rates.items())]
    mean = transfer.get("metrics", {}).get("total_gain")
    gains = {**transfer.get("domains", {}).get("gain", {}), "mean": mean}
    kinds = ["sampled before", "sampled after", "change [95 %]", "greedy before", "greedy after"]
    rows = [[d, *of[:2], shown(gains.get(d), "+"), *of[2:]] for d, of in rates.items()]
    return [["success", *kinds], *rows]


def failures(evaluations: Sequence[Evaluation], transfer: Mapping[str, Any]) -> dict[str, str]:
    """Return a sentence for each domain whose success after GRPO is 0 or far below the start.

    Far below means less than half, with an interval of the change that excludes 0.
    """
    before, after = before_and_after(evaluations)
    gains, found = transfer.get("domains", {}).get("gain", {}), dict[str, str]()
    for domain in domains_of(evaluations) if after else ():
        first, last = rate(before, domain, "mean"), rate(after, domain, "mean")
        high = (gains.get(domain) or [None] * 3)[2]
        if last == 0:
            found[domain] = f"{domain} failed: no sampled episode succeeds at the end of the run"
        elif first and last is not None and last < first / 2 and high is not None and high < 0:
            found[domain] = f"{domain} failed: success fell from {first:.2f} to {last:.2f} in GRPO"
    return found


def final_table(results: Mapping[str, Any]) -> str:
    """Return the text for the end of a run: success before and after GRPO, rewards, metrics.

    `(!)` marks a domain that failed, and a line below the table has the reason.
    """
    transfer, evaluations = results.get("transfer", {}), results["evaluations"]
    failed = failures(evaluations, transfer)
    rows = [
        [f"{name} (!)" if name in failed else name, *cells]
        for name, *cells in change(evaluations, transfer)
    ]
    columns = []
    for i, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if i else cell.ljust(width) for cell in column])
    lines = ["  ".join(row) for row in zip(*columns, strict=True)]
    lines += [f"(!) {line}" for line in failed.values()]
    if rewards := transfer.get("rewards", {}):
        ends = {domain: map(shown, [*of[:1], *of[1:][-1:]]) for domain, of in rewards.items()}
        lines += ["", *(f"mean reward {d}  {' -> '.join(of)}" for d, of in ends.items())]
    if len(transfer.get("points", [])) > 2:
        numbers = {name: n for name in AT_THE_END if (n := transfer["metrics"].get(name))}
        width = max((len(METRICS[name]) for name in numbers), default=0)
        lines += ["", *(f"{METRICS[n]:{width}}  {metric(of, n)}" for n, of in numbers.items())]
    return "\n".join(lines)


def data_of(run: RunData) -> dict[str, Any]:
    """Return the variables of the template `run.md.jinja`, except the title."""
    columns: dict[str, dict[str, Any]] = {}
    if transfer := run.transfer:
        area = {"area_under_curve": transfer["area_under_curve"]}
        columns = {"domain": {**transfer["domains"], **area}, "family": transfer["families"]}
    metrics = sorted({key for record in run.train for key, value in record.items() if value})
    return {
        "run": run,
        "ends": [e for e in before_and_after(run.evaluations) if e],
        "kinds": KINDS,
        "change": change(run.evaluations, run.transfer),
        "failures": failures(run.evaluations, run.transfer),
        "transfer_by": [_transfer_by(kind, of) for kind, of in columns.items()],
        "tools": _tools(run),
        "stop_reasons": {key: key.removeprefix(STOP) for key in metrics if key.startswith(STOP)},
        "left_out": _left_out(run),
        "rewards_by_name": _rewards_by_name(run),
        "rate_with_interval": rate_with_interval,
        "rates_of_group": rates_of_group,
    }


def duration(seconds: float) -> str:
    return f"{timedelta(seconds=round(seconds))} h"


def share(records: Iterable[Mapping[str, Any]], key: str) -> str:
    """Return the mean of a metric over training steps, as text, in per cent."""
    return f"{fmean(record.get(key) or 0.0 for record in records):.1%}"


def rate_with_interval(evaluation: Evaluation, domain: str, kind: str) -> str:
    """Format a success rate with Wilson's interval; a mean over domains has no interval."""
    value = rate(evaluation, domain, kind)
    # Older runs have mean rewards instead of success rates; rewards may lie outside 0 to 1.
    if value is None or domain == "mean" or not 0 <= value <= 1:
        return number(value)
    low, high = wilson(value, evaluation["success"][domain]["num_tasks"])
    return f"{value:.3f} [{low:.2f}, {high:.2f}]"


def rates_of_group(
    evaluations: Sequence[Evaluation], domain: str, level: str, name: str
) -> list[str]:
    """Return a family's or branch's number of tasks and success rates, for each evaluation."""
    of = [e["success"].get(domain, {}).get(level, {}).get(name, {}) for e in evaluations]
    return [str(of[-1]["num_tasks"]), *(number(group.get(kind)) for kind in KINDS for group in of)]


def _transfer_by(kind: str, of: Mapping[str, Any]) -> Rows:
    numbers = {column: {n: of.get(n, {}).get(column) for n in BY_COLUMN} for column in of["names"]}
    return number_table(kind, numbers, BY_COLUMN)


def _tools(run: RunData) -> list[list[Any]]:
    """Return a row per tool: success of evaluation calls; number and success of training calls."""
    if not run.transfer:
        return []
    tools, ends = run.transfer["tools"], [0, -1] if run.points[1:] else [0]
    calls, errors = Counter[str](), Counter[str]()
    for stage in run.results.get("training", {}).values():
        for domain, of_domain in stage.get("tools", {}).items():
            for tool, (num_calls, num_errors) in of_domain.items():
                calls[f"{domain}/{tool}"] += num_calls
                errors[f"{domain}/{tool}"] += num_errors
    rows = []
    for c, name in enumerate(tools["names"]):
        held_out = [shown(tools["matrix"][p][c]) for p in ends]
        backward = shown(tools["backward_transfer"].get(name), "+")
        solved = f"{1 - errors[name] / calls[name]:.1%}" if calls[name] else "-"
        rows.append([name, *held_out, backward, f"{calls[name]:,}", solved])
    return rows


def _left_out(run: RunData) -> Rows:
    """Return the number of episodes left out of training, by domain and kind of failure."""
    counts = Counter[str]()
    for record in run.train:
        counts.update({k: round(n) for k, n in record.items() if k.startswith(LEFT_OUT)})
    keys = {key: key.removeprefix(LEFT_OUT).split("/", 1) for key in sorted(counts)}
    return [[domain, failure, str(counts[key])] for key, (failure, domain) in keys.items()]


def _rewards_by_name(run: RunData) -> Rows:
    """Return a row per stage and source of rewards: means of the first and last tenth of steps."""
    found = {key.rpartition("/")[0] for line in run.train for key in line}
    ends = [f"{of}, {tenth} tenth" for of in ("mean", "std") for tenth in ("first", "last")]
    rows = [["stage", "reward", *ends]]
    for stage in run.stages:
        lines = run.of_stage(stage)
        tenth = ceil(len(lines) / 10)
        for key in sorted(key for key in found if key.startswith("rewards/")):
            values = [
                [line[name] for line in part if (name := f"{key}/{of}") in line]
                for of in ("mean", "std")
                for part in (lines[:tenth], lines[-tenth:])
            ]
            cells = [f"{fmean(of):.4g}" if of else NO_INTERVAL for of in values]
            if {*cells} != {NO_INTERVAL}:
                rows.append([stage["name"], key.removeprefix("rewards/"), *cells])
    return rows
