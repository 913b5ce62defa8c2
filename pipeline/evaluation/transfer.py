"""The transfer numbers of a run, or of several seeds of one curriculum, from its `results.json`.

`transfer_metrics.py` defines the numbers; here evaluations become its arrays. Every number is a
list [value, low, high]: low and high are its 95 % interval, null where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np

from pipeline.errors import UserError
from pipeline.evaluation import transfer_metrics as metrics
from pipeline.evaluation.transfer_metrics import (
    Floats,
    Number,
    Stages,
    estimate,
    is_graded,
    mean,
    resampled,
    succeeded,
)

BEFORE_GRPO = ("start", "warm_start")
SUCCESS = 1.0  # the threshold of runs from before it was a setting

Results = Mapping[str, Any]
Evaluations = Sequence[Sequence[Mapping[str, Any]]]  # of each run, those of `points_of`


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Samples of the accuracy matrix, [B, P, C]; its columns are domains, families or tools."""

    names: list[str]  # of the columns
    points: list[str]  # the stage, or part of the run, before each evaluation
    samples: Floats
    own: list[set[int]]  # the columns that each stage trained, without replayed ones
    num_episodes: int  # of training, on average over seeds
    num_tasks: list[int]  # that count for each column

    def metrics(self) -> dict[str, Floats]:
        """Samples of every number of the whole matrix that is defined, [B]."""
        args = (self.samples, self.own)
        found: dict[str, Floats | None] = {"average_accuracy": metrics.average_accuracy(*args)}
        if self.own:
            found["total_gain"] = metrics.total_gain(*args)
            found["stage_gain"] = mean(chain(*metrics.stage_gains(*args)))
            found |= {name: mean(of(*args).values()) for name, of in OF_COLUMNS.items()}
            if self.num_episodes:
                found["learning_efficiency"] = metrics.learning_efficiency(*args, self.num_episodes)
        return {name: samples for name, samples in found.items() if samples is not None}


OF_COLUMNS: dict[str, Callable[[Floats, Stages], dict[int, Floats]]] = {
    "backward_transfer": metrics.backward_transfer,
    "forward_transfer": metrics.forward_transfer,
    "forgetting": metrics.forgetting,
}


def summary(runs: Sequence[Results], over_seeds: bool = True) -> dict[str, Any]:
    """All transfer numbers of a run, or of runs that differ in their seed only.

    Intervals are over tasks and, by default, over seeds. Raises UserError if the runs have
    different points, domains or tasks.
    """
    if not any(run["evaluations"] for run in runs):
        return {}
    kinds = ("domains", "families", "tools")
    matrices = {kind: matrix_of(runs, kind, over_seeds) for kind in kinds}
    of_domains, areas = matrices["domains"], _areas(runs)
    numbers = {name: estimate(samples) for name, samples in of_domains.metrics().items()}
    numbers["area_under_curve"] = estimate(mean(areas.values()))
    evaluations, domains = [points_of(run) for run in runs], of_domains.names
    entries = list(chain(*evaluations))
    trials = {d: [of for e in entries for of in e["success"][d]["tasks"].values()] for d in domains}
    graded = [domain for domain in domains if is_graded(chain(*trials[domain]))]
    return {
        "points": of_domains.points,
        "num_seeds": len(runs),
        "episodes": of_domains.num_episodes,
        "metrics": {name: number for name, number in numbers.items() if number is not None},
        **{kind: _of_columns(matrix) for kind, matrix in matrices.items()},
        "stages": _of_stages(runs, of_domains),
        "area_under_curve": {domain: estimate(samples) for domain, samples in areas.items()},
        "passes": {d: _passes(evaluations, d, threshold_of(runs)) for d in domains},
        "rewards": {d: _means(evaluations, d, _mean_reward, over_seeds) for d in graded},
    }


def _of_columns(matrix: Matrix) -> dict[str, Any]:
    samples, own, names = matrix.samples, matrix.own, matrix.names
    by_column: dict[str, dict[str, Number]] = {}
    for metric, of_columns in OF_COLUMNS.items():
        numbers = {names[c]: estimate(of) for c, of in of_columns(samples, own).items()}
        by_column[metric] = {name: of for name, of in numbers.items() if of is not None}
    points, columns = range(samples.shape[1]), range(len(names))
    return {
        "names": names,
        "gain": {
            names[c]: estimate(samples[:, len(own), c] - samples[:, 0, c])
            for c in (columns if own else ())
        },
        "matrix": [[_cell(samples[:, p, c], matrix.num_tasks[c]) for c in columns] for p in points],
        "effects": [
            [estimate(samples[:, p, c] - samples[:, p - 1, c]) for c in columns] for p in points[1:]
        ],
        **by_column,
    }


def _cell(samples: Floats, num_tasks: int) -> Number | None:
    """An estimate; if all tasks are solved, or none, resamples have no width: Wilson's interval."""
    number = estimate(samples)
    if number is None or number[0] not in (0, 1) or number[1] is None or number[1] != number[2]:
        return number
    bounds = metrics.wilson(number[0], num_tasks)
    return [number[0], *(round(bound, 6) for bound in bounds)]


def _of_stages(runs: Sequence[Results], matrix: Matrix) -> list[dict[str, Any]]:
    """The gain of each stage's own domains, and the same per thousand episodes."""
    rows = []
    gains = metrics.stage_gains(matrix.samples, matrix.own)
    for name, own, of_domains in zip(matrix.points[1:], matrix.own, gains, strict=True):
        episodes = fmean(_episodes(run, name) for run in runs)
        gain = np.asarray(np.mean(of_domains, axis=0))
        row = {"name": name, "own": [matrix.names[c] for c in sorted(own)], "episodes": episodes}
        per_thousand = estimate(gain / (episodes / 1000)) if episodes else None
        rows.append({**row, "gain": estimate(gain), "efficiency": per_thousand})
    return rows


def matrix_of(runs: Sequence[Results], kind: str = "domains", over_seeds: bool = True) -> Matrix:
    """The accuracy matrix of runs that differ in their seed only; `kind` as in `summary`."""
    evaluations = [points_of(run) for run in runs]
    names_of_points = [[entry["after"] for entry in entries] for entries in evaluations]
    points = names_of_points[0]
    for others in names_of_points:
        if others != points:
            raise UserError(
                f"report: runs with other stages cannot be put together ({', '.join(points)}; "
                f"{', '.join(others)}); give seeds of one curriculum"
            )
    own = {row["name"]: row["own"] for row in runs[0]["curriculum"]["stages"]} if points[1:] else {}
    if unknown := [point for point in points[1:] if point not in own]:
        raise UserError(
            f"report: stage {unknown[0]} was evaluated but is not in the curriculum, whose "
            "settings were changed on a resume; there are no transfer numbers for such a run"
        )
    columns = [
        (name, domain, _by_task(evaluations, domain, total_and_count))
        for domain in (evaluations[0][0]["success"] if points else ())
        for name, total_and_count in _columns(runs, kind, domain).items()
    ]
    samples = [
        resampled(pairs[..., 0], pairs[..., 1], domain, over_seeds) for _, domain, pairs in columns
    ]
    episodes = fmean(sum(_episodes(run, point) for point in points[1:]) for run in runs)
    empty = np.zeros((metrics.RESAMPLES + 1, len(points), 0))
    return Matrix(
        names=[name for name, _, _ in columns],
        points=points,
        samples=np.stack(samples, axis=-1) if samples else empty,
        own=[{c for c, (_, d, _) in enumerate(columns) if d in own[p]} for p in points[1:]],
        num_episodes=round(episodes),
        num_tasks=[int((pairs[..., 1] > 0).any((0, 1)).sum()) for _, _, pairs in columns],
    )


def points_of(results: Results) -> list[dict[str, Any]]:
    """The evaluations that make the matrix: the last before GRPO, and each after a stage."""
    before = [e for e in results["evaluations"] if e["after"] in BEFORE_GRPO]
    return [*before[-1:], *(e for e in results["evaluations"] if e["after"] not in BEFORE_GRPO)]


def _episodes(results: Results, stage: str) -> int:
    return int(results.get("training", {}).get(stage, {}).get("episodes", 0))


def _tasks(evaluations: Evaluations, domain: str) -> list[str]:
    """The tasks of a domain, which all points of all runs must have."""
    tasks = [e["success"].get(domain, {}).get("tasks", {}) for of in evaluations for e in of]
    if any(set(others) != set(tasks[0]) for others in tasks):
        raise UserError(
            f"report: runs with other held-out tasks of {domain} cannot be put together; give runs "
            "with the same domains, task_seed, split and number of tasks"
        )
    return sorted(tasks[0])


def _columns(
    runs: Sequence[Results], kind: str, domain: str
) -> dict[str, Callable[[Any, str], tuple[float, float]]]:
    """The columns of a domain: for each name, the total and the count of a task (`resampled`)."""
    families, threshold = runs[0].get("task_families", {}).get(domain, {}), threshold_of(runs)

    def solved(success: Any, task: str) -> tuple[float, float]:
        return fmean(succeeded(reward, threshold) for reward in success["tasks"][task]), 1.0

    def of_family(family: str, success: Any, task: str) -> tuple[float, float]:
        return solved(success, task) if families.get(task) == family else (0.0, 0.0)

    def good_calls(tool: str, success: Any, task: str) -> tuple[float, float]:
        calls, errors = success.get("tools", {}).get(tool, {}).get(task, (0, 0))
        return calls - errors, calls

    if kind == "domains":
        return {domain: solved}
    if kind == "families":
        names = sorted(set(families.values()) - {""})
        return {f"{domain}/{name}": partial(of_family, name) for name in names}
    successes = [entry["success"][domain] for run in runs for entry in points_of(run)]
    tools = sorted({tool for success in successes for tool in success.get("tools", {})})
    return {f"{domain}/{name}": partial(good_calls, name) for name in tools}


def threshold_of(runs: Sequence[Results]) -> float:
    """The reward from which a trial is a success; UserError where runs differ in it."""
    thresholds = sorted({float(run.get("success_threshold", SUCCESS)) for run in runs})
    if len(thresholds) > 1:
        raise UserError(
            f"report: runs with other success thresholds ({', '.join(f'{t:g}' for t in thresholds)}"
            ") cannot be put together; give runs with the same success_threshold"
        )
    return thresholds[0]


def _by_task(evaluations: Evaluations, domain: str, value: Callable[[Any, str], Any]) -> Floats:
    """`value(success, task)` of each run, point and task of a domain, [S, P, N, ...]."""
    tasks = _tasks(evaluations, domain)
    return np.array(
        [
            [[value(entry["success"][domain], task) for task in tasks] for entry in entries]
            for entries in evaluations
        ],
        dtype=np.float64,
    )


def _mean_reward(success: Any, task: str) -> float:
    return fmean(success["tasks"][task])


def _means(
    evaluations: Evaluations,
    domain: str,
    value: Callable[[Any, str], float],
    over_seeds: bool = True,
) -> list[Number | None]:
    """The mean of `value(success, task)` over tasks at each point."""
    totals = _by_task(evaluations, domain, value)
    samples = resampled(totals, np.ones_like(totals), domain, over_seeds)
    return [estimate(samples[:, p]) for p in range(samples.shape[1])]


def _areas(runs: Sequence[Results]) -> dict[str, Floats]:
    """Area under the curve of each domain's validation success, [B].

    The curve has the steps that all runs validated at.
    """
    areas = {}
    validations = [{v["step"]: v["success"] for v in run.get("validations", [])} for run in runs]
    threshold = threshold_of(runs)
    for domain in dict.fromkeys(d for run in validations for of in run.values() for d in of):
        steps_of_runs = [{step for step, of in run.items() if domain in of} for run in validations]
        steps = sorted(set.intersection(*steps_of_runs))
        rewards = [[run[step][domain] for step in steps] for run in validations]
        if len(steps) < 2 or any(
            of.keys() != rewards[0][0].keys() for run in rewards for of in run
        ):
            continue  # the number of tasks was changed on a resume
        tasks = sorted(rewards[0][0])
        totals = np.array(
            [[[float(succeeded(of[t], threshold)) for t in tasks] for of in run] for run in rewards]
        )
        curve = resampled(totals, np.ones_like(totals), f"validation {domain}")
        areas[domain] = metrics.area_under_curve(curve, steps)
    return areas


def _passes(
    evaluations: Evaluations, domain: str, threshold: float
) -> dict[str, list[Number | None]]:
    """pass@k and pass^k of a domain at each point, k up to the number of trials."""

    def passed(
        estimator: Callable[[int, int, int], float], k: int, success: Any, task: str
    ) -> float:
        rewards = success["tasks"][task]
        return estimator(sum(succeeded(r, threshold) for r in rewards), len(rewards), k)

    num_trials = min(e["success"][domain]["num_trials"] for of in evaluations for e in of)
    estimators = {"@": metrics.pass_at_k, "^": metrics.pass_hat_k}
    return {
        f"pass{sign}{k}": _means(evaluations, domain, partial(passed, of, k))
        for sign, of in estimators.items()
        for k in range(1, num_trials + 1)
    }


def differences(
    runs: Sequence[Results], others: Sequence[Results], over_seeds: bool = True
) -> dict[str, Number]:
    """Each number of `runs` minus that of `others`, paired over tasks and seeds.

    Raises UserError if they were not evaluated on the same tasks, with the same threshold.
    """
    evaluations, _ = [points_of(run) for run in (*runs, *others)], threshold_of((*runs, *others))
    for domain in dict.fromkeys(d for of in evaluations for e in of for d in e["success"]):
        _tasks(evaluations, domain)
    mine, theirs = (matrix_of(of, over_seeds=over_seeds).metrics() for of in (runs, others))
    numbers = {name: estimate(mine[name] - theirs[name]) for name in mine if name in theirs}
    return {name: number for name, number in numbers.items() if number is not None}
