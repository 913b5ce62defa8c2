"""The transfer numbers of a run, or of several seeds of one curriculum, from `results.json`.

`transfer_metrics.py` computes the numbers from arrays; this file makes the arrays. Every number
is a list [value, low, high] with the bounds of the 95 % interval. A bound without a value is null.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from pipeline.data.curriculum import BEFORE_GRPO
from pipeline.data.tasks import HELD_OUT, MODULE
from pipeline.errors import UserError
from pipeline.evaluation import transfer_metrics as metrics
from pipeline.evaluation.transfer_metrics import Floats, Number, estimate, resampled, succeeded

Results = Mapping[str, Any]  # the content of `results.json`


class Runs:
    """The evaluations of runs on the same tasks. Letters in shapes: see `transfer_metrics.py`.

    Raises UserError if the runs have different tasks or thresholds.
    """

    def __init__(self, runs: Sequence[Results], over_seeds: bool = True) -> None:
        self.runs = runs
        self.over_seeds = over_seeds
        self.threshold = threshold_of(runs)
        self.evaluations = [points_of(run) for run in runs]
        self.tasks: dict[str, list[str]] = {}
        hashes = [of.get("made_of", {}) for of in runs]
        for what in {what for of in hashes for what in of if what.startswith(MODULE)}:
            if over_seeds and len({of[what] for of in hashes if what in of}) > 1:
                raise UserError(
                    f"report: runs with other versions of the {what} are no seeds of one run; "
                    "run them again with one version"
                )
        every = [evaluation["success"] for of in self.evaluations for evaluation in of]
        for domain in dict.fromkeys(domain for success in every for domain in success):
            first, *others = [set(of.get(domain, {}).get("tasks", {})) for of in every]
            changed = {of[what] for of in hashes if (what := HELD_OUT + domain) in of}
            if any(tasks != first for tasks in others) or len(changed) > 1:
                raise UserError(
                    f"report: runs with other held-out tasks of {domain} cannot be put together; "
                    "give runs with the same domains, tasks, task_seed, split and number of tasks"
                )
            self.tasks[domain] = sorted(first)

    def by_task(self, domain: str, pair: Callable[..., Sequence[float]]) -> Floats:
        """Return two numbers from `pair` for each run, evaluation point and task, [2, S, P, N]."""
        pairs = [
            [[pair(e["success"][domain], task) for task in self.tasks[domain]] for e in evaluations]
            for evaluations in self.evaluations
        ]
        return np.moveaxis(np.array(pairs, dtype=np.float64), -1, 0)

    def successes(self, domain: str) -> Floats:
        """Return the numbers of successes and trials for each run, point and task, [2, S, P, N]."""

        def counts(success: Any, task: str) -> tuple[int, int]:
            rewards = success["tasks"][task]
            return sum(succeeded(reward, self.threshold) for reward in rewards), len(rewards)

        return self.by_task(domain, counts)

    def means(self, domain: str, totals: Floats) -> list[Number | None]:
        samples = resampled(totals, np.ones_like(totals), domain, self.over_seeds)
        return [*map(estimate, samples.T)]

    def num_episodes(self, stages: Sequence[str]) -> float:
        """Return the number of training episodes in all `stages`, averaged over the runs."""
        training = [run.get("training", {}) for run in self.runs]
        return fmean(sum(of.get(s, {}).get("episodes", 0) for s in stages) for of in training)


class Matrix(NamedTuple):
    """Bootstrap samples of the accuracy matrix, [B, P, C]. A column is a domain, family or tool."""

    names: list[str]  # column names
    points: list[str]  # for each evaluation: the last of BEFORE_GRPO, or the stage that had ended
    samples: Floats
    own: list[set[int]]  # for each stage, its trained columns, except those of replayed domains
    num_tasks: list[int]  # number of tasks in the mean of each column
    num_episodes: int  # number of training episodes, averaged over the runs

    def numbers(self) -> dict[str, Floats]:
        return metrics.of_matrix(self.samples, self.own, self.num_episodes)


def summary(results: Sequence[Results], over_seeds: bool = True) -> dict[str, Any]:
    """Return all transfer numbers of a run, or of runs that differ in their seed only.

    The intervals come from resampled tasks and, by default, resampled seeds. Raises UserError if
    the runs have different evaluation points, domains, tasks or success thresholds.
    """
    if not any(of["evaluations"] for of in results):
        return {}
    runs = Runs(results, over_seeds)
    rewards = {}
    matrices = {kind: _matrix(runs, kind) for kind in ("domains", "families", "tools")}
    of_domains = matrices["domains"]
    areas = _areas(runs)
    for domain in of_domains.names:
        means, graded = runs.by_task(
            domain, lambda of, t: (fmean(of["tasks"][t]), metrics.is_graded(of["tasks"][t]))
        )
        if graded.any():
            rewards[domain] = runs.means(domain, means)
    area = {"area_under_curve": metrics.mean(areas.values())}
    return {
        "points": of_domains.points,
        "num_seeds": len(results),
        "episodes": of_domains.num_episodes,
        "metrics": _estimates({**of_domains.numbers(), **area}),
        **{kind: _of_columns(matrix) for kind, matrix in matrices.items()},
        "stages": _of_stages(runs, of_domains),
        "area_under_curve": _estimates(areas),
        "passes": {domain: _passes(runs, domain) for domain in of_domains.names},
        "rewards": rewards,
    }


def _of_columns(matrix: Matrix) -> dict[str, Any]:
    names, _, samples, own, num_tasks, _ = matrix
    gain = zip(names, (samples[:, len(own)] - samples[:, 0]).T, strict=True)
    rows = np.moveaxis(samples, 0, -1)
    steps = np.diff(np.moveaxis(samples, 0, -1), axis=0)
    return {
        "names": names,
        "gain": {name: estimate(of) for name, of in gain if own},
        "matrix": [[*map(_cell, row, num_tasks)] for row in rows],
        "effects": [[*map(estimate, row)] for row in steps],
        **{
            metric: _estimates({names[c]: of for c, of in found.items()})
            for metric, found in metrics.of_columns(samples, own).items()
        },
    }


def _estimates(samples: Mapping[str, Floats | None]) -> dict[str, Number]:
    return {name: number for name, of in samples.items() if (number := estimate(of)) is not None}


def _cell(samples: Floats, num_tasks: int) -> Number | None:
    """Return an estimate; if all samples are 0 or all samples are 1, the interval is Wilson's."""
    number = estimate(samples)
    if number is None or number[0] not in (0, 1) or number[1] is None or number[1] != number[2]:
        return number
    return [number[0], *(round(bound, 6) for bound in metrics.wilson(number[0], num_tasks))]


def _of_stages(runs: Runs, matrix: Matrix) -> list[dict[str, Any]]:
    stages = []
    gains = metrics.stage_gains(matrix.samples, matrix.own)
    for name, own, of_domains in zip(matrix.points[1:], matrix.own, gains, strict=True):
        episodes = runs.num_episodes([name])
        gain = np.asarray(np.mean(of_domains, axis=0))
        efficiency = estimate(gain / (episodes / 1000)) if episodes else None
        stage = {"name": name, "own": [matrix.names[c] for c in sorted(own)], "episodes": episodes}
        stages.append({**stage, "gain": estimate(gain), "efficiency": efficiency})
    return stages


def _matrix(runs: Runs, kind: str) -> Matrix:
    points, *others = [[entry["after"] for entry in entries] for entries in runs.evaluations]
    if different := [names for names in others if names != points]:
        raise UserError(
            f"report: runs with other stages cannot be put together ({', '.join(points)}; "
            f"{', '.join(different[0])}); give seeds of one curriculum"
        )
    stages = runs.runs[0]["curriculum"]["stages"] if points[1:] else ()
    own = {stage["name"]: stage["own"] for stage in stages}
    if unknown := [point for point in points[1:] if point not in own]:
        raise UserError(
            f"report: stage {unknown[0]} was evaluated but is not in the curriculum, whose "
            "settings were changed on a resume; there are no transfer numbers for such a run"
        )
    columns = [(d, *column) for d in runs.tasks for column in _columns(runs, kind, d)]
    samples = np.zeros((metrics.RESAMPLES + 1, len(points), len(columns)))
    for c, (domain, _, totals, counts) in enumerate(columns):
        samples[..., c] = resampled(totals, counts, domain, runs.over_seeds)
    return Matrix(
        names=[name for _, name, _, _ in columns],
        points=points,
        samples=samples,
        own=[{c for c, (d, *_) in enumerate(columns) if d in own[p]} for p in points[1:]],
        num_tasks=[int((counts > 0).any((0, 1)).sum()) for *_, counts in columns],
        num_episodes=round(runs.num_episodes(points[1:])),
    )


def _columns(runs: Runs, kind: str, domain: str) -> Iterator[tuple[str, Floats, Floats]]:
    if kind == "tools":
        tools = [e["success"][domain].get("tools", {}) for of in runs.evaluations for e in of]
        for tool in sorted(set[str]().union(*tools)):
            calls, errors = runs.by_task(
                domain, lambda of, t, tool=tool: of.get("tools", {}).get(tool, {}).get(t, (0, 0))
            )
            yield f"{domain}/{tool}", calls - errors, calls
        return
    solved = np.divide(*runs.successes(domain))
    if kind == "domains":
        yield domain, solved, np.ones_like(solved)
        return
    families = runs.runs[0].get("task_families", {}).get(domain, {})
    of_tasks = np.array([families.get(task, "") for task in runs.tasks[domain]])
    for family in sorted(set(families.values()) - {""}):
        counts = np.broadcast_to(of_tasks == family, solved.shape).astype(np.float64)
        yield f"{domain}/{family}", solved * counts, counts


def points_of(results: Results) -> list[dict[str, Any]]:
    """Return the last evaluation before GRPO, and the evaluation after each stage."""
    before = [e for e in results["evaluations"] if e["after"] in BEFORE_GRPO]
    return [*before[-1:], *(e for e in results["evaluations"] if e["after"] not in BEFORE_GRPO)]


def rate(evaluation: Mapping[str, Any], domain: str, kind: str, threshold: float) -> Number | None:
    """Return [value, low, high] of a domain's success rate, or of the `mean` over all domains.

    `kind` is `mean` (sampled) or `greedy`. The numbers of sampled trials are those of `summary`.
    Returns None for a domain that was not evaluated.
    """
    success = evaluation["success"]
    used = {d: of for d, of in success.items() if domain in (d, "mean")}
    if not used:
        return None
    samples = []
    for name, of in used.items():
        solved = np.arange(len(of["tasks"])) < round(of["greedy"] * len(of["tasks"]))
        if kind == "mean":
            trials = [of["tasks"][task] for task in sorted(of["tasks"])]
            solved = [fmean(succeeded(reward, threshold) for reward in task) for task in trials]
        totals = np.array([[solved]], dtype=np.float64)
        samples.append(resampled(totals, np.ones_like(totals), name)[:, 0])
    return _cell(np.mean(samples, axis=0), sum(len(of["tasks"]) for of in used.values()))


def mean_over_tasks(values: Sequence[float], name: str) -> Number | None:
    """Return [value, low, high] of the mean of one value per task, or None without tasks.

    `name` is the key of the random numbers of the bootstrap.
    """
    if not values:
        return None
    totals = np.array([[values]], dtype=np.float64)
    return _cell(resampled(totals, np.ones_like(totals), name)[:, 0], len(values))


def threshold_of(runs: Sequence[Results]) -> float:
    """Return the least reward of a success. Raises UserError if runs have different thresholds."""
    first, *others = sorted({float(run.get("success_threshold", 1.0)) for run in runs})
    if others:
        raise UserError(
            "report: runs with other success thresholds "
            f"({', '.join(f'{t:g}' for t in (first, *others))}) cannot be put together; "
            "give runs with the same success_threshold"
        )
    return first


def _areas(runs: Runs) -> dict[str, Floats]:
    areas = {}
    validations = [{v["step"]: v["success"] for v in of.get("validations", [])} for of in runs.runs]
    for domain in dict.fromkeys(d for run in validations for of in run.values() for d in of):
        steps_of_runs = [{step for step, of in run.items() if domain in of} for run in validations]
        steps = sorted(set.intersection(*steps_of_runs))
        rewards = [[run[step][domain] for step in steps] for run in validations]
        # A resume may have changed the domain's validation tasks.
        if len(steps) < 2 or len({frozenset(of) for run in rewards for of in run}) > 1:
            continue
        tasks = sorted(rewards[0][0])
        of_tasks = np.array([[[of[task] for task in tasks] for of in run] for run in rewards])
        solved = succeeded(of_tasks, runs.threshold).astype(np.float64)
        curve = resampled(solved, np.ones_like(solved), f"validation {domain}")
        areas[domain] = metrics.area_under_curve(curve, steps)
    return areas


def _passes(runs: Runs, domain: str) -> dict[str, list[Number | None]]:
    successes, num_trials = runs.successes(domain).astype(int)
    estimators = {"@": np.vectorize(metrics.pass_at_k), "^": np.vectorize(metrics.pass_hat_k)}

    def rates(totals: Floats) -> list[Number | None]:
        samples = resampled(totals, np.ones_like(totals), domain, runs.over_seeds)
        return [_cell(of, len(runs.tasks[domain])) for of in samples.T]

    return {
        f"pass{sign}{k}": rates(estimator(successes, num_trials, k))
        for sign, estimator in estimators.items()
        for k in range(1, num_trials.min() + 1)
    }


def differences(
    runs: Sequence[Results], others: Sequence[Results], over_seeds: bool = True
) -> dict[str, Number]:
    """Return each metric of `runs` minus the same metric of `others`, paired by task and seed.

    Raises UserError if the tasks or the success thresholds of the runs differ.
    """
    Runs([*runs, *others])  # raises UserError
    mine, theirs = (_matrix(Runs(of, over_seeds), "domains").numbers() for of in (runs, others))
    return _estimates({name: mine[name] - theirs[name] for name in mine if name in theirs})
