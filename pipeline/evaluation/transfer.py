"""The transfer numbers of a run, or of several seeds of one curriculum, from `results.json`.

The accuracy matrix R has a row for each evaluation point (0: before GRPO, t: after stage t of T)
and a column for each domain, task family or tool. The metrics follow GEM (Lopez-Paz and Ranzato
2017, arXiv 1706.08840, section 3) and Chaudhry et al. 2018 (arXiv 1801.10112, section 3).

Every number is a list [value, low, high] with the bounds of the 95 % interval. A bound without a
value is null. Intervals are percentile bootstraps (Efron and Tibshirani 1993, chapter 13) over
tasks and seeds. A bootstrap sample that draws a task takes all trials of the task at all evaluation
points. For two curricula with equal tasks and numbers of runs, the same tasks are drawn:
differences are paired.

Letters in shapes: B samples (the first is the estimate), S seeds, P points, N tasks, C columns.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from math import comb, sqrt
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.common.errors import UserError
from pipeline.config.settings import LAST_STAGES
from pipeline.data.curriculum import BEFORE_GRPO
from pipeline.data.rng import stream_key
from pipeline.data.tasks import HELD_OUT, MODULE
from pipeline.rollout.trajectory import is_graded, succeeded

RESAMPLES = 2000
Z95 = 1.959964
MIN_TASKS = 5  # fewer tasks give an interval that is too narrow to call a fall
JOINING = {*LAST_STAGES.values()}  # stages that make one model of experts
KINDS = {"tasks": "sampled", "greedy_tasks": "greedy"}  # key in `results.json` -> name in reports

Floats = NDArray[np.float64]
Number = list[float | None]  # [value, low, high]
Stages = Sequence[Collection[int]]  # the columns that each stage trained, except replayed columns
Results = Mapping[str, Any]  # the content of `results.json`


def pass_at_k(num_successes: int, num_trials: int, k: int) -> float:
    """Return pass@k (Chen et al. 2021, arXiv 2107.03374, equation 1), for 1 <= k <= num_trials."""
    return 1 - comb(num_trials - num_successes, k) / comb(num_trials, k)


def pass_hat_k(num_successes: int, num_trials: int, k: int) -> float:
    """Return pass^k (tau-bench, arXiv 2406.12045, section 5), for 1 <= k <= num_trials."""
    return comb(num_successes, k) / comb(num_trials, k)


def estimate(samples: Floats | None) -> Number | None:
    """Return [value, low, high] from samples [B], or None if the first sample is not finite.

    The value is the first sample. The finite later samples give the 95 % interval; the bounds are
    None if no later sample is finite. The success rate of a tool without calls is NaN.
    """
    if samples is None or not np.isfinite(samples[0]):
        return None
    rest = samples[1:][np.isfinite(samples[1:])]
    low_high = np.percentile(rest, [2.5, 97.5]).tolist() if len(rest) else [None, None]
    return [None if x is None else round(x, 6) for x in (float(samples[0]), *low_high)]


def mean(samples: Iterable[Floats]) -> Floats | None:
    """Return the element-wise mean of arrays [B], or None if there are no arrays."""
    samples = list(samples)
    return np.asarray(np.mean(samples, axis=0)) if samples else None


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval (Wilson 1927) of a share of `count` independent trials."""
    spread = Z95 * sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    scale = 1 + Z95**2 / count
    centre = share + Z95**2 / (2 * count)
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def resampled(totals: Floats, counts: Floats, name: str, over_seeds: bool = True) -> Floats:
    """Return samples [B, P] of sum(totals) / sum(counts) over resampled tasks, averaged over seeds.

    Args:
        totals: [S, P, N], for example each task's success rate, or a tool's successful calls.
        counts: [S, P, N], the divisors: 1 for a task, 0 for a task of another family, the number of
            calls for a tool. If fewer than two tasks have a divisor above 0, all samples except
            the first are NaN.
        name: the key of the random numbers; equal names and numbers of tasks give equal draws.
        over_seeds: whether seeds are resampled as well.
    """
    num_seeds, _, num_tasks = totals.shape
    tasks = _weights(num_tasks, "tasks", name)
    seeds = _weights(num_seeds, "seeds", num_seeds) if over_seeds else np.ones((1, num_seeds))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.einsum("spn,bn->bsp", totals, tasks) / np.einsum("spn,bn->bsp", counts, tasks)
    if (counts > 0).any((0, 1)).sum() < 2:
        ratios[1:] = np.nan
    ratios = np.where(seeds[:, :, None] > 0, ratios, 0.0)  # a seed of weight 0 may have a NaN ratio
    return np.asarray(np.einsum("bsp,bs->bp", ratios, seeds / num_seeds))


@lru_cache(maxsize=32)
def _weights(count: int, *key: int | str) -> Floats:
    generator = np.random.default_rng(stream_key("bootstrap", *key))
    weights = generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return np.vstack([np.ones(count), weights.astype(np.float64)])


def column_metrics(
    matrix: Floats, own: Stages, origins: Sequence[int] | None = None
) -> dict[str, dict[int, Floats]]:
    """Return metrics of each column c, [B], from the matrix R [B, P, C].

    `origins` has, for each stage and for the end of the run, the evaluation point whose policy goes
    on there; default: the point before. Experts go on from point 0, and so does the end of a run
    that has not merged them. What needs another origin is left out.

    `backward_transfer` is R[T, c] - R[i, c], where i < T is the last stage that trained c. The mean
    over columns is GEM's BWT. If stage T trained c, or no stage did, c has no `backward_transfer`.
    `forward_transfer` is R[origin of i, c] - R[0, c], where i is the first stage that trained c, or
    T + 1 if no stage trained c, and its origin is not 0. The mean over columns is GEM's FWT, but
    GEM subtracts the accuracy of a random initialisation, not R[0, c].
    `forgetting` is max over t < T of R[t, c], minus R[T, c], for columns with `backward_transfer`
    (Chaudhry et al. 2018, equation 3, but from t = 0). The maximum of noisy numbers is biased
    upwards, so only the interval of `backward_transfer` can show that a policy has forgotten.
    """
    end = len(own)
    origins = origins or range(end + 1)
    names = ("backward_transfer", "forward_transfer", "forgetting")
    found: dict[str, dict[int, Floats]] = {name: {} for name in names}
    for c in range(matrix.shape[-1]):
        accuracy = matrix[..., c]
        stages = [t for t, columns in enumerate(own, 1) if c in columns]
        first = min(stages, default=end + 1)
        last = max(stages, default=end)
        if origins[first - 1] > 0:
            found["forward_transfer"][c] = accuracy[:, origins[first - 1]] - accuracy[:, 0]
        if last < end == origins[end]:
            found["backward_transfer"][c] = accuracy[:, end] - accuracy[:, last]
            found["forgetting"][c] = accuracy[:, :end].max(-1) - accuracy[:, end]
    return found


def stage_gains(
    matrix: Floats, own: Stages, origins: Sequence[int] | None = None
) -> list[list[Floats]]:
    """Return R[t, c] - R[origin of t, c], [B], for each stage t and every column that t trained."""
    origins = origins or range(len(own) + 1)
    return [
        [matrix[:, t, c] - matrix[:, origins[t - 1], c] for c in sorted(columns)]
        for t, columns in enumerate(own, 1)
    ]


def matrix_metrics(
    matrix: Floats, own: Stages, num_episodes: int, origins: Sequence[int] | None = None
) -> dict[str, Floats]:
    """Return the metrics [B] of the whole matrix [B, P, C], without metrics that have no value.

    - average_accuracy: mean over columns of R[T, c] (GEM's ACC)
    - total_gain: mean over columns of R[T, c] - R[0, c]
    - stage_gain: mean of `stage_gains`
    - learning_efficiency: total gain per thousand training episodes
    - backward_transfer, forward_transfer, forgetting: means of `column_metrics`
    """
    end = matrix[:, len(own)]
    found: dict[str, Floats | None] = {"average_accuracy": np.asarray(end.mean(-1))}
    if own:
        found["total_gain"] = gain = np.asarray((end - matrix[:, 0]).mean(-1))
        gains = stage_gains(matrix, own, origins)
        found["stage_gain"] = mean(of for of_stage in gains for of in of_stage)
        columns = column_metrics(matrix, own, origins)
        found |= {name: mean(of.values()) for name, of in columns.items()}
        is_whole = num_episodes and (origins is None or origins[-1] > 0)
        found["learning_efficiency"] = gain / (num_episodes / 1000) if is_whole else None
    return {name: samples for name, samples in found.items() if samples is not None}


def area_under_curve(curve: Floats, steps: Sequence[int]) -> Floats:
    """Return the mean of a curve [B, P] over the steps by the trapezoidal rule, [B]."""
    return np.asarray(np.trapezoid(curve, steps, axis=1) / (steps[-1] - steps[0]))


class Runs:
    """The evaluations of runs on the same tasks.

    Raises UserError if the runs have different tasks or thresholds.
    """

    def __init__(self, runs: Sequence[Results], over_seeds: bool = True) -> None:
        self.runs = runs
        self.over_seeds = over_seeds
        self.threshold = threshold_of(runs)
        self.is_separate = runs[0].get("curriculum", {}).get("curriculum") == "separate"
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
    origins: list[int]  # see `column_metrics`

    def numbers(self) -> dict[str, Floats]:
        return matrix_metrics(self.samples, self.own, self.num_episodes, self.origins)


def summary(results: Sequence[Results], over_seeds: bool = True) -> dict[str, Any]:
    """Return all transfer numbers of a run, or of runs that differ in their seed only.

    The intervals come from resampled tasks and, by default, resampled seeds. Raises UserError if
    the runs have different evaluation points, domains, tasks or success thresholds. Without an
    evaluation before GRPO, there are no numbers.
    """
    if not any(entry["after"] in BEFORE_GRPO for of in results for entry in points_of(of)):
        return {}
    runs = Runs(results, over_seeds)
    rewards = {}
    matrices = {kind: _matrix(runs, kind) for kind in ("domains", "families", "tools")}
    of_domains = matrices["domains"]
    areas, sizes = _areas(runs)
    for domain in of_domains.names:
        means, graded = runs.by_task(
            domain, lambda of, t: (fmean(of["tasks"][t]), is_graded(of["tasks"][t]))
        )
        if graded.any():
            samples = resampled(means, np.ones_like(means), domain, over_seeds)
            rewards[domain] = [*map(estimate, samples.T)]
    area = {"area_under_curve": mean(areas.values())}
    rates = {
        "average_accuracy": sum(of_domains.num_tasks),
        "area_under_curve": sum(sizes.values()),
    }
    return {
        "points": of_domains.points,
        "num_seeds": len(results),
        "episodes": of_domains.num_episodes,
        "metrics": _estimates({**of_domains.numbers(), **area}, rates),
        **{kind: _of_columns(matrix) for kind, matrix in matrices.items()},
        "stages": _of_stages(runs, of_domains),
        "area_under_curve": _estimates(areas, sizes),
        "passes": {domain: _passes(runs, domain) for domain in of_domains.names},
        "rewards": rewards,
    }


def _of_columns(matrix: Matrix) -> dict[str, Any]:
    names, _, samples, own, num_tasks, _, origins = matrix
    gain = zip(names, (samples[:, len(own)] - samples[:, 0]).T, strict=True)
    rows = np.moveaxis(samples, 0, -1)
    return {
        "names": names,
        "gain": {name: estimate(of) for name, of in gain if own},
        "matrix": [[*map(_cell, row, num_tasks)] for row in rows],
        "effects": [[*map(estimate, rows[t] - rows[origins[t - 1]])] for t in range(1, len(rows))],
        **{
            metric: _estimates({names[c]: of for c, of in found.items()}, {})
            for metric, found in column_metrics(samples, own, origins).items()
        },
    }


def _estimates(samples: Mapping[str, Floats | None], rates: Mapping[str, int]) -> dict[str, Number]:
    """Return estimates by name; `rates` has the number of tasks of those that are success rates."""
    numbers = {
        name: _cell(of, rates[name]) if name in rates else estimate(of)
        for name, of in samples.items()
    }
    return {name: number for name, number in numbers.items() if number is not None}


def _cell(samples: Floats | None, num_tasks: int) -> Number | None:
    """Return an estimate; if all samples are 0 or all samples are 1, the interval is Wilson's."""
    number = estimate(samples)
    if number is None or number[0] not in (0, 1) or number[1] is None or number[1] != number[2]:
        return number
    return [number[0], *(round(bound, 6) for bound in wilson(number[0], num_tasks))]


def _of_stages(runs: Runs, matrix: Matrix) -> list[dict[str, Any]]:
    stages = []
    gains = stage_gains(matrix.samples, matrix.own, matrix.origins)
    for name, own, of_domains in zip(matrix.points[1:], matrix.own, gains, strict=True):
        episodes = runs.num_episodes([name])
        gain = mean(of_domains)  # None: the stage merges experts
        has_efficiency = gain is not None and episodes
        efficiency = estimate(gain / (episodes / 1000)) if has_efficiency else None
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
    if runs.is_separate:
        own |= {name: [] for name in JOINING}
    trained = [own[point] for point in points[1:]]
    columns = [(d, *column) for d in runs.tasks for column in _columns(runs, kind, d)]
    samples = np.zeros((RESAMPLES + 1, len(points), len(columns)))
    for c, (domain, _, totals, counts) in enumerate(columns):
        samples[..., c] = resampled(totals, counts, domain, runs.over_seeds)
    return Matrix(
        names=[name for _, name, _, _ in columns],
        points=points,
        samples=samples,
        own=[{c for c, (d, *_) in enumerate(columns) if d in of} for of in trained],
        num_tasks=[int((counts > 0).any((0, 1)).sum()) for *_, counts in columns],
        num_episodes=round(runs.num_episodes(points[1:])),
        origins=_origins(trained) if runs.is_separate else [*range(len(points))],
    )


def _origins(trained: Sequence[Collection[str]]) -> list[int]:
    """Return the origins of experts and of what was made of them; see `column_metrics`.

    `trained` has the domains of each stage, none of the last one. Only parts of rising difficulty
    go on from the part before.
    """
    goes_on = [a == b for a, b in pairwise([[], *trained])]
    is_joined = not trained or not trained[-1]
    return [*(t * of for t, of in enumerate(goes_on)), len(trained) * is_joined]


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
    Returns None for a domain that was not evaluated so.
    """
    rates = {d: of for d, of in evaluation["success"].items() if domain in (d, "mean")}
    used = {d: of for d, of in rates.items() if kind == "mean" or kind in of}
    if not used:
        return None
    samples = []
    for name, of in used.items():
        if kind == "mean":
            solved = [*successes_of(dict(sorted(of["tasks"].items())), threshold).values()]
        else:
            solved = np.arange(len(of["tasks"])) < round(of[kind] * len(of["tasks"]))
        samples.append(mean_samples(solved, name))
    return _cell(np.mean(samples, axis=0), sum(len(of["tasks"]) for of in used.values()))


def mean_over_tasks(values: Sequence[float], name: str) -> Number | None:
    """Return [value, low, high] of the mean of one value per task, or None without tasks.

    `name` is the key of the random numbers of the bootstrap.
    """
    return _cell(mean_samples(values, name), len(values)) if values else None


def mean_samples(values: Sequence[float], name: str) -> Floats:
    """Return the mean of one value per task, and the means of the bootstrap's resamples."""
    totals = np.array([[values]], dtype=np.float64)
    return resampled(totals, np.ones_like(totals), name)[:, 0]


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


def _areas(runs: Runs) -> tuple[dict[str, Floats], dict[str, int]]:
    """Return the area under each domain's curve of validations, and the number of its tasks."""
    areas = dict[str, Floats]()
    sizes = dict[str, int]()
    kept = [] if runs.is_separate else runs.runs  # experts have no common curve
    validations = [{v["step"]: v["success"] for v in of.get("validations", [])} for of in kept]
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
        areas[domain] = area_under_curve(curve, steps)
        sizes[domain] = len(tasks)
    return areas, sizes


def _passes(runs: Runs, domain: str) -> dict[str, list[Number | None]]:
    successes, num_trials = runs.successes(domain).astype(int)
    estimators = {"@": np.vectorize(pass_at_k), "^": np.vectorize(pass_hat_k)}

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
    return _estimates({name: mine[name] - theirs[name] for name in mine if name in theirs}, {})


def worse(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return what became worse, the largest fall first, and how many were compared.

    Something became worse if the 95 % interval of the change, over the same tasks, is below 0.
    About one of 40 comparisons finds a fall where there is none.
    """
    found = list[dict[str, Any]]()
    num_compared = 0
    threshold = float(results["success_threshold"])
    points = points_of(results)
    if len(points) < 2 or points[0]["after"] not in BEFORE_GRPO:
        return {"compared": 0, "found": []}
    before = points[0]["success"]
    after = points[-1]["success"]
    for domain in before.keys() & after.keys():
        groups = _groups(results, domain)
        for key, kind in KINDS.items():
            first, last = (
                successes_of(of[domain].get(key, {}), threshold) for of in (before, after)
            )
            if first.keys() != last.keys():
                continue  # a run that went on with `override` may have other tasks
            for name, tasks in groups.items():
                tasks = [task for task in tasks if task in first]
                if len(tasks) < MIN_TASKS:
                    continue
                num_compared += 1
                changes = [last[task] - first[task] for task in tasks]
                change = mean_over_tasks(changes, f"worse {name} {kind}")
                if change and change[2] is not None and change[2] < 0:
                    rates = [sum(of[t] for t in tasks) / len(tasks) for of in (first, last)]
                    row = {"name": name, "kind": kind, "num_tasks": len(tasks), "change": change}
                    found.append({**row, "before": rates[0], "after": rates[1]})
    found.sort(key=lambda row: (row["change"][0], row["name"], row["kind"]))
    return {"compared": num_compared, "found": found}


def _groups(results: Mapping[str, Any], domain: str) -> dict[str, list[str]]:
    """Return the tasks of a domain, and of its families and branches, by name."""
    families = results["task_families"].get(domain, {})
    branches = results["task_branches"].get(domain, {})
    groups = defaultdict[str, list[str]](list)
    for task, family in families.items():
        names = [domain, f"{domain}/{family}", f"{domain}/{family}/{branches[task]}"]
        # Without a family or a branch, the names are equal but for slashes at their ends.
        for name in dict.fromkeys(name.rstrip("/") for name in names):
            groups[name].append(task)
    return groups


def tool_counts(counts: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Return the sums of [calls, failed calls] of each tool."""
    sums: dict[str, list[int]] = {}
    for name, (calls, errors) in chain(*(of.items() for of in counts)):
        before = sums.get(name, [0, 0])
        sums[name] = [before[0] + calls, before[1] + errors]
    return sums


def successes_of(tasks: Mapping[str, Any], threshold: float) -> dict[str, float]:
    """Return each task's share of successful trials; a greedy task has one trial."""
    trials = {task: of if isinstance(of, list) else [of] for task, of in tasks.items()}
    return {
        task: sum(succeeded(reward, threshold) for reward in of) / len(of)
        for task, of in trials.items()
    }
