"""The tables of a run's report, from the files of the run folder alone.

Success sampled at the training temperature and success of greedy decoding are two measurements;
they are never compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from statistics import fmean, median
from typing import Any

from pipeline.evaluation.transfer_metrics import wilson
from pipeline.report.numbers import KINDS, Rows, change, number_table, shown
from pipeline.tracking.run_files import (
    Evaluation,
    RunData,
    after_name,
    before_and_after,
    number,
    rate,
)

ZERO_STD = {
    "rollout/all_failed": "all failed",
    "rollout/all_solved": "all solved",
    "rollout/too_few_left": "fewer than two left",
    "rollout/frac_reward_zero_std": "in all",
}
TIMES = {
    "perf/sample_s": "sampling",
    "perf/environment_s": "environment (within sampling)",
    "perf/update_s": "update",
    "perf/wait_s": "waiting for ranks",
    "perf/step_s": "whole step",
    "perf/peak_memory_mb": "peak memory of a rank",
}
STOP, LEFT_OUT = "rollout/stop/", "rollout/left_out/"
BY_COLUMN = ("backward_transfer", "forward_transfer", "forgetting", "area_under_curve")


def tables_of(run: RunData) -> dict[str, Any]:
    """The data of the template `run.md.jinja`, except the run."""
    found = {key for record in run.train for key in record}
    nonzero = {key for record in run.train for key, value in record.items() if value}
    stop_reasons = {key: key.removeprefix(STOP) for key in sorted(nonzero) if key.startswith(STOP)}
    zero_std = {key: name for key, name in ZERO_STD.items() if key in found}
    columns: dict[str, dict[str, Any]] = {}
    if of := run.transfer:
        domains = {**of["domains"], "area_under_curve": of["area_under_curve"]}
        columns = {"domain": domains, "family": of["families"]}
    return {
        "ends": [e for e in before_and_after(run.evaluations) if e],
        "change": change(run.evaluations, run.transfer),
        "transfer_by": [_transfer_by(kind, of) for kind, of in columns.items()],
        "every_evaluation": [_evaluations(run, kind) for kind in KINDS],
        "families": _families(run),
        "tools": _tools(run),
        "stop_reasons": _shares(run, "reason", stop_reasons),
        "left_out": _left_out(run),
        "zero_std": _shares(run, "groups", zero_std),
        "times": _times(run),
    }


def duration(seconds: float) -> str:
    return f"{timedelta(seconds=round(seconds))} h"


def _transfer_by(kind: str, of: Mapping[str, Any]) -> Rows:
    """Transfer of each domain or family."""
    numbers = {column: {n: of.get(n, {}).get(column) for n in BY_COLUMN} for column in of["names"]}
    return number_table(kind, numbers, BY_COLUMN)


def _evaluations(run: RunData, kind: str) -> Rows:
    domains = [*run.domains, "mean"]
    rows = [
        [after_name(e["after"]), str(e["step"]), *(_with_interval(e, d, kind) for d in domains)]
        for e in run.evaluations
    ]
    return [[KINDS[kind], "step", *domains], *rows]


def _with_interval(evaluation: Evaluation, domain: str, kind: str) -> str:
    value = rate(evaluation, domain, kind)
    # Older runs have mean rewards, which may lie outside 0 to 1.
    if value is None or domain == "mean" or not 0 <= value <= 1:
        return number(value)
    low, high = wilson(value, evaluation["success"][domain]["num_tasks"])
    return f"{value:.3f} [{low:.2f}, {high:.2f}]"


def _families(run: RunData) -> Rows:
    """Success rates of each family, and below each family of its branches."""
    found = [e for e in before_and_after(run.evaluations) if e]
    rows = []
    for domain, success in found[-1]["success"].items() if found else ():
        for family in success.get("families", {}):
            levels = [("families", family, [domain, family, "all"])]
            for branch in success.get("branches", {}):
                if branch.startswith(f"{family}/"):
                    levels.append(("branches", branch, ["", "", branch.removeprefix(f"{family}/")]))
            for level, name, words in levels:
                of = [e["success"].get(domain, {}).get(level, {}).get(name, {}) for e in found]
                rates = [number(group.get(kind)) for kind in KINDS for group in of]
                rows.append([*words, str(of[-1]["num_tasks"]), *rates])
    when = [" before", " after"] if len(found) == 2 else [""]
    rates = [f"{kind}{word}" for kind in KINDS.values() for word in when]
    return [["domain", "family", "branch", "tasks", *rates], *rows]


def _tools(run: RunData) -> Rows:
    """Shares of tool calls that returned no error, in held-out episodes and in training."""
    tools, ends = run.transfer.get("tools", {"names": []}), [0, -1] if run.points[1:] else [0]
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
        share = f"{1 - errors[name] / calls[name]:.1%}" if calls[name] else "-"
        rows.append([name, *held_out, backward, f"{calls[name]:,}", share])
    names = ["backward transfer", "training calls", "of them without error"]
    return [["tool", *(run.points[p] for p in ends if run.points), *names], *rows]


def _shares(run: RunData, title: str, names: Mapping[str, str]) -> Rows:
    """Means over the steps of each stage, as shares; `names` maps metrics to table rows."""
    stages = {stage["name"]: run.of_stage(stage) for stage in run.stages}
    rows = [
        [name, *(f"{fmean(r.get(key) or 0.0 for r in of):.1%}" for of in stages.values())]
        for key, name in names.items()
    ]
    return [[title, *stages], *rows]


def _left_out(run: RunData) -> Rows:
    """The number of episodes left out of training, by domain and kind of failure."""
    counts = Counter[str]()
    for record in run.train:
        counts.update({k: round(n) for k, n in record.items() if k.startswith(LEFT_OUT)})
    rows = [
        [*reversed(key.removeprefix(LEFT_OUT).split("/", 1)), str(counts[key])]
        for key in sorted(counts)
    ]
    return [["domain", "failure", "episodes"], *rows]


def _times(run: RunData) -> Rows:
    rows = [["of a training step", "median", "most", "in all"]]
    for key, name in TIMES.items():
        if values := [record[key] for record in run.timings if record.get(key) is not None]:
            text = "{:.2f} s" if key.endswith("_s") else "{:,.0f} MB"
            total = duration(sum(values)) if key.endswith("_s") else "-"
            rows.append([name, text.format(median(values)), text.format(max(values)), total])
    return rows
