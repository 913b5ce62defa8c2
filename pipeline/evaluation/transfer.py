"""The transfer numbers of a run, or of several seeds of one curriculum, from its `results.json`.

`transfer_metrics.py` defines the numbers; here evaluations become its arrays. Every number is a
list [value, low, high]: low and high are its 95 % interval, or null if it has no interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from pipeline.errors import UserError
from pipeline.evaluation import transfer_metrics as metrics
from pipeline.evaluation.transfer_metrics import Floats, Number, estimate, resampled, succeeded

BEFORE_GRPO = ("start", "warm_start")
SUCCESS = 1.0  # the threshold of old runs, which had no such setting

Results = Mapping[str, Any]
Evaluations = Sequence[Sequence[Mapping[str, Any]]]  # `points_of` of each run


class Matrix(NamedTuple):
    """Samples of the accuracy matrix, [B, P, C]; its columns are domains, families or tools."""

    names: list[str]  # of the columns
    points: list[str]  # the stage, or part of the run, before each evaluation
    samples: Floats
    own: list[set[int]]  # the columns that each stage trained, without replayed ones
    num_tasks: list[int]  # the number of tasks that count for each column
    num_episodes: int  # of training, on average over seeds

    def numbers(self) -> dict[str, Floats]:
        """Samples of every number of the whole matrix that is defined, [B]."""
        return metrics.of_matrix(self.samples, self.own, self.num_episodes)


def summary(runs: Sequence[Results], over_seeds: bool = True) -> dict[str, Any]:
    """All transfer numbers of a run, or of runs that differ in their seed only.

    Intervals are over tasks and, by default, over seeds. Raises UserError if the runs have
    different points, domains, tasks or thresholds.
    """
    if not any(run["evaluations"] for run in runs):
        return {}
    kinds = ("domains", "families", "tools")
    matrices = {kind: _matrix(runs, kind, over_seeds) for kind in kinds}
    of_domains, areas, threshold = matrices["domains"], _areas(runs), threshold_of(runs)
    area = {"area_under_curve": metrics.mean(areas.values())}
    evaluations, passes, rewards = [points_of(run) for run in runs], {}, {}
    for domain in of_domains.names:
        passes[domain] = _passes(evaluations, domain, threshold)
        if _by_task(evaluations, domain, lambda of, t: metrics.is_graded(of["tasks"][t])).any():
            means = _by_task(evaluations, domain, lambda of, t: fmean(of["tasks"][t]))
            rewards[domain] = _means(means, domain, over_seeds)
    return {
        "points": of_domains.points,
        "num_seeds": len(runs),
        "episodes": of_domains.num_episodes,
        "metrics": _estimates({**of_domains.numbers(), **area}),
        **{kind: _of_columns(matrix) for kind, matrix in matrices.items()},
        "stages": _of_stages(runs, of_domains),
        "area_under_curve": _estimates(areas),
        "passes": passes,
        "rewards": rewards,
    }


def _of_columns(matrix: Matrix) -> dict[str, Any]:
    """The matrix, the differences of its rows, and the metrics of its columns by their names."""
    names, points, samples, own, num_tasks, _ = matrix
    columns = range(len(names))
    gain, steps = samples[:, len(own)] - samples[:, 0], np.diff(samples, axis=1)
    return {
        "names": names,
        "gain": {names[c]: estimate(gain[:, c]) for c in columns if own},
        "matrix": [
            [_cell(samples[:, p, c], num_tasks[c]) for c in columns] for p in range(len(points))
        ],
        "effects": [[estimate(of[:, c]) for c in columns] for of in np.moveaxis(steps, 1, 0)],
        **{
            metric: _estimates({names[c]: of for c, of in found.items()})
            for metric, found in metrics.of_columns(samples, own).items()
        },
    }


def _estimates(samples: Mapping[str, Floats | None]) -> dict[str, Number]:
    """The estimates of all numbers that are defined."""
    return {name: number for name, of in samples.items() if (number := estimate(of)) is not None}


def _cell(samples: Floats, num_tasks: int) -> Number | None:
    """An estimate. Wilson's interval if all or no tasks are solved: resamples would not differ."""
    number = estimate(samples)
    if number is None or number[0] not in (0, 1) or number[1] is None or number[1] != number[2]:
        return number
    return [number[0], *(round(bound, 6) for bound in metrics.wilson(number[0], num_tasks))]


def _of_stages(runs: Sequence[Results], matrix: Matrix) -> list[dict[str, Any]]:
    """The gain of each stage's own domains, and the same per thousand episodes."""
    rows = []
    gains = metrics.stage_gains(matrix.samples, matrix.own)
    for name, own, of_domains in zip(matrix.points[1:], matrix.own, gains, strict=True):
        episodes, gain = _episodes(runs, [name]), np.asarray(np.mean(of_domains, axis=0))
        row = {"name": name, "own": [matrix.names[c] for c in sorted(own)], "episodes": episodes}
        per_thousand = estimate(gain / (episodes / 1000)) if episodes else None
        rows.append({**row, "gain": estimate(gain), "efficiency": per_thousand})
    return rows


def _matrix(runs: Sequence[Results], kind: str, over_seeds: bool) -> Matrix:
    """The accuracy matrix of runs that differ in their seed only; `kind` as in `summary`."""
    evaluations = [points_of(run) for run in runs]
    points, *others = [[entry["after"] for entry in entries] for entries in evaluations]
    if different := [names for names in others if names != points]:
        raise UserError(
            f"report: runs with other stages cannot be put together ({', '.join(points)}; "
            f"{', '.join(different[0])}); give seeds of one curriculum"
        )
    own = {row["name"]: row["own"] for row in runs[0]["curriculum"]["stages"]} if points[1:] else {}
    if unknown := [point for point in points[1:] if point not in own]:
        raise UserError(
            f"report: stage {unknown[0]} was evaluated but is not in the curriculum, whose "
            "settings were changed on a resume; there are no transfer numbers for such a run"
        )
    domains = list(evaluations[0][0]["success"])
    columns = [(d, *column) for d in domains for column in _columns(runs, evaluations, kind, d)]
    samples = np.zeros((metrics.RESAMPLES + 1, len(points), len(columns)))
    for c, (domain, _, totals, counts) in enumerate(columns):
        samples[..., c] = resampled(totals, counts, domain, over_seeds)
    return Matrix(
        names=[name for _, name, _, _ in columns],
        points=points,
        samples=samples,
        own=[{c for c, (d, *_) in enumerate(columns) if d in own[p]} for p in points[1:]],
        num_tasks=[int((counts > 0).any((0, 1)).sum()) for *_, counts in columns],
        num_episodes=round(_episodes(runs, points[1:])),
    )


def _columns(
    runs: Sequence[Results], evaluations: Evaluations, kind: str, domain: str
) -> Iterator[tuple[str, Floats, Floats]]:
    """The columns of a domain: name, totals and counts (see `resampled`)."""
    if kind == "tools":
        successes = [entry["success"][domain] for entries in evaluations for entry in entries]
        for tool in sorted({tool for of in successes for tool in of.get("tools", {})}):
            calls = _by_task(
                evaluations,
                domain,
                lambda of, task, tool=tool: of.get("tools", {}).get(tool, {}).get(task, (0, 0)),
            )
            yield f"{domain}/{tool}", calls[..., 0] - calls[..., 1], calls[..., 0]
        return
    successes, num_trials = _successes(evaluations, domain, threshold_of(runs))
    solved = successes / num_trials
    if kind == "domains":
        yield domain, solved, np.ones_like(solved)
        return
    families = runs[0].get("task_families", {}).get(domain, {})
    of_tasks = np.array([families.get(task, "") for task in _tasks(evaluations, domain)])
    for family in sorted(set(families.values()) - {""}):
        counts = np.broadcast_to(of_tasks == family, solved.shape).astype(np.float64)
        yield f"{domain}/{family}", solved * counts, counts


def points_of(results: Results) -> list[dict[str, Any]]:
    """The evaluations that make the matrix: the last before GRPO, and each after a stage."""
    before = [e for e in results["evaluations"] if e["after"] in BEFORE_GRPO]
    return [*before[-1:], *(e for e in results["evaluations"] if e["after"] not in BEFORE_GRPO)]


def _episodes(runs: Sequence[Results], stages: Sequence[str]) -> float:
    """The training episodes of these stages, on average over the runs."""
    of_runs = [run.get("training", {}) for run in runs]
    return fmean(sum(of.get(stage, {}).get("episodes", 0) for stage in stages) for of in of_runs)


def _tasks(evaluations: Evaluations, domain: str) -> list[str]:
    """The tasks of a domain, which all points of all runs must have."""
    tasks = [e["success"].get(domain, {}).get("tasks", {}) for of in evaluations for e in of]
    if any(set(others) != set(tasks[0]) for others in tasks):
        raise UserError(
            f"report: runs with other held-out tasks of {domain} cannot be put together; give runs "
            "with the same domains, task_seed, split and number of tasks"
        )
    return sorted(tasks[0])


def threshold_of(runs: Sequence[Results]) -> float:
    """The reward from which a trial is a success; UserError if runs have different thresholds."""
    first, *others = sorted({float(run.get("success_threshold", SUCCESS)) for run in runs})
    if others:
        raise UserError(
            "report: runs with other success thresholds "
            f"({', '.join(f'{t:g}' for t in (first, *others))}) cannot be put together; "
            "give runs with the same success_threshold"
        )
    return first


def _by_task(evaluations: Evaluations, domain: str, value: Callable[..., Any]) -> Floats:
    """`value(success, task)` of each run, point and task of a domain, [S, P, N, ...]."""
    tasks = _tasks(evaluations, domain)
    successes = [[entry["success"][domain] for entry in entries] for entries in evaluations]
    values = [[[value(of, task) for task in tasks] for of in entries] for entries in successes]
    return np.array(values, dtype=np.float64)


def _successes(evaluations: Evaluations, domain: str, threshold: float) -> Any:
    """Of each task, the number of successes and the number of trials; both [S, P, N]."""

    def counts(success: Any, task: str) -> tuple[int, int]:
        rewards = success["tasks"][task]
        return sum(succeeded(reward, threshold) for reward in rewards), len(rewards)

    return np.moveaxis(_by_task(evaluations, domain, counts).astype(int), -1, 0)


def _means(totals: Floats, domain: str, over_seeds: bool = True) -> list[Number | None]:
    """The mean over tasks at each point, from [S, P, N]."""
    return [*map(estimate, resampled(totals, np.ones_like(totals), domain, over_seeds).T)]


def _areas(runs: Sequence[Results]) -> dict[str, Floats]:
    """Area under the curve of each domain's validation success, [B].

    The curve consists of the steps at which all runs were validated.
    """
    areas, threshold = {}, threshold_of(runs)
    validations = [{v["step"]: v["success"] for v in run.get("validations", [])} for run in runs]
    for domain in dict.fromkeys(d for run in validations for of in run.values() for d in of):
        steps_of_runs = [{step for step, of in run.items() if domain in of} for run in validations]
        steps = sorted(set.intersection(*steps_of_runs))
        rewards = [[run[step][domain] for step in steps] for run in validations]
        if len(steps) < 2 or len({frozenset(of) for run in rewards for of in run}) > 1:
            continue  # the number of tasks was changed on a resume
        tasks = sorted(rewards[0][0])
        of_tasks = np.array([[[of[task] for task in tasks] for of in run] for run in rewards])
        solved = succeeded(of_tasks, threshold).astype(np.float64)
        curve = resampled(solved, np.ones_like(solved), f"validation {domain}")
        areas[domain] = metrics.area_under_curve(curve, steps)
    return areas


def _passes(
    evaluations: Evaluations, domain: str, threshold: float
) -> dict[str, list[Number | None]]:
    """pass@k and pass^k of a domain at each point, k up to the number of trials."""
    successes, num_trials = _successes(evaluations, domain, threshold)
    estimators = {"@": np.vectorize(metrics.pass_at_k), "^": np.vectorize(metrics.pass_hat_k)}
    return {
        f"pass{sign}{k}": _means(estimator(successes, num_trials, k), domain)
        for sign, estimator in estimators.items()
        for k in range(1, num_trials.min() + 1)
    }


def differences(
    runs: Sequence[Results], others: Sequence[Results], over_seeds: bool = True
) -> dict[str, Number]:
    """For each metric: the value of `runs` minus the value of `others`, paired by task and seed.

    Raises UserError if they were not evaluated on the same tasks, with the same threshold.
    """
    together = [*runs, *others]
    threshold_of(together)
    evaluations = [points_of(run) for run in together]
    for domain in dict.fromkeys(d for of in evaluations for e in of for d in e["success"]):
        _tasks(evaluations, domain)
    mine, theirs = (_matrix(of, "domains", over_seeds).numbers() for of in (runs, others))
    return _estimates({name: mine[name] - theirs[name] for name in mine if name in theirs})
