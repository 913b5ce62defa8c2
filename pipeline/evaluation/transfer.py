"""The transfer numbers of a run, or of several seeds of one curriculum, from its `results.json`.

`transfer_metrics.py` defines the numbers; here evaluations become its arrays. Every number is a
list [value, low, high]: low and high are its 95 % interval, null where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from pipeline.errors import UserError
from pipeline.evaluation import transfer_metrics
from pipeline.evaluation.transfer_metrics import (
    Floats,
    Stages,
    estimate,
    is_graded,
    resampled,
    succeeded,
)

BEFORE_GRPO = ("start", "warm_start")
SUCCESS = 1.0  # the threshold of runs from before it was a setting

Results = Mapping[str, Any]
Number = list[float | None]
# Of a task's results at one point: a sum, and what it is divided by.
Pair = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Samples of the accuracy matrix, [B, P, C], of domains, families or tools."""

    names: list[str]
    points: list[str]  # after what
    samples: Floats
    stages: Stages
    num_episodes: int  # of training, on average over seeds
    num_tasks: list[int]  # that count for a column

    def metrics(self) -> dict[str, Floats | None]:
        """Samples of every number of the whole matrix, [B]; None where it is not defined."""
        found: dict[str, Floats | None] = {
            "average_accuracy": transfer_metrics.average_accuracy(self.samples, self.stages)
        }
        if self.stages.last:
            args = (self.samples, self.stages)
            found["total_gain"] = transfer_metrics.total_gain(*args)
            found["stage_gain"] = transfer_metrics.stage_gain(*args)
            found["backward_transfer"] = transfer_metrics.backward_transfer(*args)
            found["forward_transfer"] = transfer_metrics.forward_transfer(*args)
            found["forgetting"] = transfer_metrics.forgetting(*args)
            if self.num_episodes:
                found["learning_efficiency"] = transfer_metrics.learning_efficiency(
                    *args, self.num_episodes
                )
        return found


def summary(runs: Sequence[Results], over_seeds: bool = True) -> dict[str, Any]:
    """All transfer numbers of a run, or of runs that differ in their seed only.

    Intervals are over tasks and, unless told otherwise, over seeds.
    Raises UserError where runs have other points, domains or tasks.
    """
    if not any(run["evaluations"] for run in runs):
        return {}
    kinds = ("domains", "families", "tools")
    matrices = {kind: matrix_of(runs, kind, over_seeds) for kind in kinds}
    whole = matrices["domains"]
    curves = _areas(runs)
    metrics = {name: number(samples) for name, samples in whole.metrics().items()}
    metrics["area_under_curve"] = number(
        np.asarray(np.mean(list(curves.values()), axis=0)) if curves else None
    )
    return {
        "points": whole.points,
        "num_seeds": len(runs),
        "episodes": whole.num_episodes,
        "metrics": {name: value for name, value in metrics.items() if value is not None},
        **{kind: _of_columns(matrix) for kind, matrix in matrices.items()},
        "stages": _of_stages(runs, whole),
        "area_under_curve": {domain: number(samples) for domain, samples in curves.items()},
        "passes": _passes(runs, whole),
        "rewards": _mean_rewards(runs, whole, over_seeds),
    }


def _of_columns(matrix: Matrix) -> dict[str, Any]:
    samples, stages, columns = matrix.samples, matrix.stages, range(len(matrix.names))
    by_column: dict[str, Any] = {}
    for name, metric in (
        ("backward_transfer", transfer_metrics.backward_transfer),
        ("forward_transfer", transfer_metrics.forward_transfer),
        ("forgetting", transfer_metrics.forgetting),
    ):
        found = {matrix.names[c]: number(metric(samples, stages, c)) for c in columns}
        by_column[name] = {c: value for c, value in found.items() if value is not None}
    return {
        "names": matrix.names,
        "gain": {
            matrix.names[c]: number(samples[:, stages.last, c] - samples[:, 0, c])
            for c in (columns if stages.last else ())
        },
        "matrix": [
            [_cell(samples[:, p, c], matrix.num_tasks[c]) for c in columns]
            for p in range(samples.shape[1])
        ],
        "effects": [
            [number(samples[:, t, c] - samples[:, t - 1, c]) for c in columns]
            for t in range(1, samples.shape[1])
        ],
        **by_column,
    }


def _cell(samples: Floats, num_tasks: int) -> Number | None:
    """Where all tasks came out alike, at 0 or 1, resamples have no width: Wilson's interval."""
    found = number(samples)
    if found is None or found[0] not in (0, 1) or found[1] is None or found[1] != found[2]:
        return found
    return [found[0], *(round(bound, 6) for bound in transfer_metrics.wilson(found[0], num_tasks))]


def _of_stages(runs: Sequence[Results], matrix: Matrix) -> list[dict[str, Any]]:
    """Of each stage: its own domains' gain, and that per thousand episodes."""
    found = []
    for t, own in enumerate(matrix.stages.own, 1):
        gains = [matrix.samples[:, t, c] - matrix.samples[:, t - 1, c] for c in sorted(own)]
        episodes = fmean(_episodes(run, matrix.points[t]) for run in runs)
        gain = np.asarray(np.mean(gains, axis=0))
        per_thousand = number(gain / (episodes / 1000)) if episodes else None
        found.append(
            {
                "name": matrix.points[t],
                "own": [matrix.names[c] for c in sorted(own)],
                "episodes": episodes,
                "gain": number(gain),
                "efficiency": per_thousand,
            }
        )
    return found


def matrix_of(runs: Sequence[Results], kind: str = "domains", over_seeds: bool = True) -> Matrix:
    """The accuracy matrix of runs that differ in their seed only; `kind` as in `summary`."""
    evaluations = [points_of(run) for run in runs]
    points = [entry["after"] for entry in evaluations[0]]
    domains = list(evaluations[0][0]["success"]) if points else []
    threshold = threshold_of(runs)
    for entries in evaluations:
        if [entry["after"] for entry in entries] != points:
            raise UserError(
                f"report: runs with other stages cannot be put together ({', '.join(points)}; "
                f"{', '.join(entry['after'] for entry in entries)}); give seeds of one curriculum"
            )
    names: list[str] = []
    columns: list[Floats] = []
    domain_of: list[str] = []
    num_tasks: list[int] = []
    for domain in domains:
        tasks = _tasks(evaluations, domain)
        for name, pair in _columns(runs, evaluations, kind, domain, threshold):
            pairs = np.array(
                [
                    [[pair(entry["success"][domain], task) for task in tasks] for entry in entries]
                    for entries in evaluations
                ]
            ).reshape(len(runs), len(points), len(tasks), 2)
            columns.append(resampled(pairs[..., 0], pairs[..., 1], domain, over_seeds))
            names.append(name)
            domain_of.append(domain)
            num_tasks.append(int((pairs[..., 1] > 0).any((0, 1)).sum()))
    own = [_own(runs[0], point) for point in points[1:]]
    stages = Stages(
        num_columns=len(names),
        own=[frozenset(c for c, d in enumerate(domain_of) if d in domains) for domains in own],
    )
    episodes = fmean(sum(_episodes(run, point) for point in points[1:]) for run in runs)
    empty = np.zeros((transfer_metrics.RESAMPLES + 1, len(points), 0))
    samples = np.stack(columns, axis=-1) if columns else empty
    return Matrix(
        names=names,
        points=points,
        samples=samples,
        stages=stages,
        num_episodes=round(episodes),
        num_tasks=num_tasks,
    )


def points_of(results: Results) -> list[dict[str, Any]]:
    """The evaluations that make the matrix: the last before GRPO, and each after a stage."""
    evaluations = list(results["evaluations"])
    before = [e for e in evaluations if e["after"] in BEFORE_GRPO]
    return [*before[-1:], *(e for e in evaluations if e["after"] not in BEFORE_GRPO)]


def _own(results: Results, stage: str) -> list[str]:
    rows = {row["name"]: row["own"] for row in results["curriculum"]["stages"]}
    if stage not in rows:
        raise UserError(
            f"report: stage {stage} was evaluated but is not in the curriculum, whose settings "
            "were changed on a resume; there are no transfer numbers for such a run"
        )
    return list(rows[stage])


def _episodes(results: Results, stage: str) -> int:
    return int(results.get("training", {}).get(stage, {}).get("episodes", 0))


def _tasks(evaluations: Sequence[Sequence[Mapping[str, Any]]], domain: str) -> list[str]:
    """The tasks of a domain, which all points of all runs must have."""
    found = [entry["success"].get(domain, {}).get("tasks", {}) for e in evaluations for entry in e]
    if any(set(tasks) != set(found[0]) for tasks in found):
        raise UserError(
            f"report: runs with other held-out tasks of {domain} cannot be put together; give runs "
            "with the same domains, task_seed, split and number of tasks"
        )
    return sorted(found[0])


def _columns(
    runs: Sequence[Results],
    evaluations: Sequence[Sequence[Mapping[str, Any]]],
    kind: str,
    domain: str,
    threshold: float,
) -> list[tuple[str, Callable[[Mapping[str, Any], str], Pair]]]:
    """The columns of a domain: name, and what a task adds to its sums."""
    if kind == "domains":
        return [(domain, partial(_solved, threshold))]
    if kind == "families":
        families = runs[0].get("task_families", {}).get(domain, {})
        names = sorted({family for family in families.values() if family})
        return [(f"{domain}/{n}", partial(_of_family, families, n, threshold)) for n in names]
    names = sorted(
        {
            tool
            for entries in evaluations
            for entry in entries
            for tool in entry["success"][domain].get("tools", {})
        }
    )
    return [(f"{domain}/{name}", partial(_good_calls, name)) for name in names]


def threshold_of(runs: Sequence[Results]) -> float:
    """The reward from which a trial is a success; UserError where runs differ in it."""
    found = sorted({float(run.get("success_threshold", SUCCESS)) for run in runs})
    if len(found) > 1:
        raise UserError(
            f"report: runs with other success thresholds ({', '.join(f'{t:g}' for t in found)}) "
            "cannot be put together; give runs with the same success_threshold"
        )
    return found[0]


def _solved(threshold: float, success: Mapping[str, Any], task: str) -> Pair:
    return fmean(succeeded(reward, threshold) for reward in success["tasks"][task]), 1.0


def _of_family(
    families: Mapping[str, str],
    family: str,
    threshold: float,
    success: Mapping[str, Any],
    task: str,
) -> Pair:
    return _solved(threshold, success, task) if families.get(task) == family else (0.0, 0.0)


def _good_calls(tool: str, success: Mapping[str, Any], task: str) -> Pair:
    calls, errors = success.get("tools", {}).get(tool, {}).get(task, (0, 0))
    return float(calls - errors), float(calls)


def _areas(runs: Sequence[Results]) -> dict[str, Floats]:
    """Area under the curve of validation success, [B] of each domain.

    Over the steps that all runs validated at.
    """
    found = {}
    validations = [{v["step"]: v["success"] for v in run.get("validations", [])} for run in runs]
    threshold = threshold_of(runs)
    for domain in dict.fromkeys(d for of in validations for v in of.values() for d in v):
        scored = [{step for step, v in of.items() if domain in v} for of in validations]
        steps = sorted(set.intersection(*scored))
        if len(steps) < 2:
            continue
        tasks = sorted(validations[0][steps[0]][domain])
        if any(sorted(of[s][domain]) != tasks for of in validations for s in steps):
            continue  # their number was changed on a resume
        totals = np.array(
            [
                [[float(succeeded(of[s][domain][t], threshold)) for t in tasks] for s in steps]
                for of in validations
            ]
        )
        curve = resampled(totals, np.ones_like(totals), f"validation {domain}")
        found[domain] = transfer_metrics.area_under_curve(curve, steps)
    return found


def _passes(runs: Sequence[Results], matrix: Matrix) -> dict[str, dict[str, list[Number | None]]]:
    """pass@k and pass^k of each domain at each point, k up to the number of trials."""
    found: dict[str, dict[str, list[Number | None]]] = {}
    evaluations, threshold = [points_of(run) for run in runs], threshold_of(runs)
    for domain in matrix.names:
        tasks = _tasks(evaluations, domain)
        num_trials = min(
            e["success"][domain]["num_trials"] for points in evaluations for e in points
        )
        rewards = [
            [[e["success"][domain]["tasks"][t] for t in tasks] for e in p] for p in evaluations
        ]
        found[domain] = {}
        estimators = {"@": transfer_metrics.pass_at_k, "^": transfer_metrics.pass_hat_k}
        for sign, estimator in estimators.items():
            for k in range(1, num_trials + 1):
                totals = np.array(
                    [
                        [[_passed(estimator, of, k, threshold) for of in p] for p in run]
                        for run in rewards
                    ]
                )
                samples = resampled(totals, np.ones_like(totals), domain)
                points = [number(samples[:, p]) for p in range(samples.shape[1])]
                found[domain][f"pass{sign}{k}"] = points
    return found


def _passed(
    estimator: Callable[[int, int, int], float],
    rewards: Sequence[float],
    k: int,
    threshold: float,
) -> float:
    return estimator(sum(succeeded(reward, threshold) for reward in rewards), len(rewards), k)


def _mean_rewards(
    runs: Sequence[Results], matrix: Matrix, over_seeds: bool
) -> dict[str, list[Number | None]]:
    """The mean reward at each point, of domains whose rewards are not all 0 or 1."""
    found: dict[str, list[Number | None]] = {}
    evaluations = [points_of(run) for run in runs]
    for domain in matrix.names:
        tasks = _tasks(evaluations, domain)
        rewards = [
            [[e["success"][domain]["tasks"][t] for t in tasks] for e in p] for p in evaluations
        ]
        if is_graded(reward for run in rewards for point in run for of in point for reward in of):
            totals = np.array([[[fmean(of) for of in point] for point in run] for run in rewards])
            samples = resampled(totals, np.ones_like(totals), domain, over_seeds)
            found[domain] = [number(samples[:, p]) for p in range(samples.shape[1])]
    return found


def number(samples: Floats | None) -> Number | None:
    """[value, low, high] of samples [B]; None where the number itself is not defined."""
    if samples is None or not math.isfinite(samples[0]):
        return None
    return [x if math.isfinite(x) else None for x in estimate(samples).as_list()]


def differences(
    runs: Sequence[Results], others: Sequence[Results], over_seeds: bool = True
) -> dict[str, Number]:
    """What `runs` have more than `others` of each number, paired over tasks and seeds.

    Raises UserError where they were not evaluated on the same tasks, with the same threshold.
    """
    points, _ = [points_of(run) for run in (*runs, *others)], threshold_of((*runs, *others))
    for domain in dict.fromkeys(d for e in points for entry in e for d in entry["success"]):
        _tasks(points, domain)
    mine, theirs = (matrix_of(of, over_seeds=over_seeds).metrics() for of in (runs, others))
    found = {}
    for name, samples in mine.items():
        other = theirs.get(name)
        if samples is not None and other is not None:
            value = number(samples - other)
            if value is not None:
                found[name] = value
    return found
