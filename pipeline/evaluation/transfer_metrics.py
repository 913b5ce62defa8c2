"""What learning one domain did to the others: metrics of an accuracy matrix, with intervals. Pure.

The accuracy matrix R has a row for each evaluation point (0: before GRPO, t: after stage t of T)
and a column for each domain, or task family, or tool. The metrics follow GEM (Lopez-Paz and Ranzato
2017, arXiv 1706.08840, section 3) and Chaudhry et al. 2018 (arXiv 1801.10112, section 3); where
these leave open what a curriculum may do here, the docstrings say what is done.

Intervals are percentile bootstraps (Efron and Tibshirani 1993, chapter 13) over tasks, paired: a
resample takes a task with all its trials at all points, and, where there are several runs, takes
runs (seeds) anew as well. The same tasks and number of runs give the same resamples, so that
differences between two curricula are paired too.

Legend: B samples, the first of them the estimate itself; S seeds, P points, N tasks, C columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, sqrt

import numpy as np
from numpy.typing import NDArray

from pipeline.data.rng import stream_key

RESAMPLES = 2000
Z95 = 1.959964
Floats = NDArray[np.float64]


def succeeded(reward: float, threshold: float) -> bool:
    """Whether a trial with this reward is a success, up to the rounding of a sum of parts."""
    return reward >= threshold - 1e-9 * abs(threshold)


def is_graded(rewards: Iterable[float]) -> bool:
    """Whether they say more than success and failure do: not all are 0 or 1."""
    return any(reward not in (0, 1) for reward in rewards)


def pass_at_k(num_successes: int, num_trials: int, k: int) -> float:
    """The chance that at least one of k trials succeeds, unbiased (Chen et al. 2021, equation 1).

    arXiv 2107.03374. Raises ValueError unless 1 <= k <= num_trials.
    """
    _check(num_successes, num_trials, k)
    return 1 - comb(num_trials - num_successes, k) / comb(num_trials, k)


def pass_hat_k(num_successes: int, num_trials: int, k: int) -> float:
    """pass^k, the chance that all of k trials succeed, unbiased (Yao et al. 2024, tau-bench).

    arXiv 2406.12045, section 5. Raises ValueError unless 1 <= k <= num_trials.
    """
    _check(num_successes, num_trials, k)
    return comb(num_successes, k) / comb(num_trials, k)


def _check(num_successes: int, num_trials: int, k: int) -> None:
    if not 1 <= k <= num_trials or not 0 <= num_successes <= num_trials:
        raise ValueError(f"{num_successes} of {num_trials} trials, k = {k}; k is 1 to {num_trials}")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    def as_list(self) -> list[float]:
        return [round(float(number), 6) for number in (self.value, self.low, self.high)]


def estimate(samples: Floats) -> Estimate:
    """From [B] samples of a number: the first is its value, the rest give the interval.

    Resamples in which it is undefined (NaN: no call of a tool) are left out.
    """
    rest = samples[1:][np.isfinite(samples[1:])]
    low, high = np.percentile(rest, [2.5, 97.5]) if len(rest) else (np.nan, np.nan)
    return Estimate(value=float(samples[0]), low=float(low), high=float(high))


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927) of `count` trials independent of each other.

    Raises ValueError for what is no share, such as a mean of rewards.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share: got {share:g}, which is not between 0 and 1")
    spread = Z95 * sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    scale = 1 + Z95**2 / count
    centre = share + Z95**2 / (2 * count)
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def resampled(totals: Floats, counts: Floats, name: str, over_seeds: bool = True) -> Floats:
    """Ratios of sums over tasks at each point, averaged over seeds, [B, P].

    Args:
        totals: [S, P, N], such as a task's mean reward over its trials, or a tool's good calls.
        counts: [S, P, N], what they are divided by: 1 for tasks, 0 for those of other families,
            the number of calls for tools. With fewer than two tasks that count there is no
            interval: all samples but the first are NaN.
        name: of the tasks: equal names and sizes get the same resamples.
        over_seeds: whether seeds are taken anew as well, or these seeds are all that is meant.
    """
    num_seeds, _, num_tasks = totals.shape
    tasks = _weights(num_tasks, "tasks", name)
    seeds = _weights(num_seeds, "seeds", num_seeds) if over_seeds else np.ones((1, num_seeds))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.einsum("spn,bn->bsp", totals, tasks) / np.einsum("spn,bn->bsp", counts, tasks)
    if (counts > 0).any((0, 1)).sum() < 2:
        ratios[1:] = np.nan
    drawn = np.where(seeds[:, :, None] > 0, ratios, 0.0)  # a seed that is left out may be undefined
    return np.asarray(np.einsum("bsp,bs->bp", drawn, seeds / num_seeds))


@lru_cache(maxsize=32)
def _weights(count: int, *key: int | str) -> Floats:
    """How often each of `count` things is drawn, [B, count]; once each in the first row."""
    generator = np.random.default_rng(stream_key("bootstrap", *key))
    drawn = generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return np.asarray(np.vstack([np.ones(count), drawn]))


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Which columns each stage trained: `own[t - 1]` those of stage t, replayed ones left out."""

    num_columns: int
    own: Sequence[frozenset[int]]

    @property
    def last(self) -> int:
        return len(self.own)

    def stages_of(self, column: int) -> list[int]:
        return [t for t, columns in enumerate(self.own, 1) if column in columns]

    def earlier(self) -> list[int]:
        """Columns that were trained, but not in the last stage: what can be forgotten."""
        return [
            c for c in range(self.num_columns) if (at := self.stages_of(c)) and at[-1] < self.last
        ]

    def later(self) -> list[int]:
        """Columns that others were trained before: what can profit from them."""
        return [c for c in range(self.num_columns) if min([*self.stages_of(c), self.last + 1]) > 1]


def average_accuracy(matrix: Floats, stages: Stages) -> Floats:
    """Mean over columns of R[T, c], [B] from [B, P, C] (GEM's ACC)."""
    return np.asarray(matrix[:, stages.last].mean(-1))


def backward_transfer(matrix: Floats, stages: Stages, column: int | None = None) -> Floats | None:
    """R[T, c] - R[i, c], i the last stage that trained c: its mean over earlier columns, [B].

    GEM's BWT, of one column where it is given; None where nothing was trained before the last
    stage.
    """
    return _mean(
        [
            matrix[:, stages.last, c] - matrix[:, stages.stages_of(c)[-1], c]
            for c in stages.earlier()
            if column in (None, c)
        ]
    )


def forward_transfer(matrix: Floats, stages: Stages, column: int | None = None) -> Floats | None:
    """R[i - 1, c] - R[0, c], i the first stage that trained c: its mean over later columns, [B].

    GEM's FWT, whose baseline is a random initialisation; here it is the policy before GRPO. A
    column that no stage trained counts at the end.
    """
    found = []
    for c in stages.later():
        first = min([*stages.stages_of(c), stages.last + 1])
        if column in (None, c):
            found.append(matrix[:, first - 1, c] - matrix[:, 0, c])
    return _mean(found)


def forgetting(matrix: Floats, stages: Stages, column: int | None = None) -> Floats | None:
    """Max over earlier points of R[t, c] minus R[T, c]: its mean over earlier columns, [B].

    Chaudhry et al. 2018, equation 3, with the point before GRPO among the earlier ones. The maximum
    of noisy numbers is too high on average, and a bootstrap takes it again: both are above zero
    without any forgetting, so that this interval is no test of zero. Backward transfer's is.
    """
    return _mean(
        [
            matrix[:, : stages.last, c].max(-1) - matrix[:, stages.last, c]
            for c in stages.earlier()
            if column in (None, c)
        ]
    )


def stage_gain(matrix: Floats, stages: Stages) -> Floats | None:
    """R[t, c] - R[t - 1, c] of the columns that stage t trained, mean over stages, [B]."""
    return _mean(
        [
            matrix[:, t, c] - matrix[:, t - 1, c]
            for t, columns in enumerate(stages.own, 1)
            for c in sorted(columns)
        ]
    )


def total_gain(matrix: Floats, stages: Stages) -> Floats:
    """Mean over columns of R[T, c] - R[0, c], [B]."""
    return np.asarray((matrix[:, stages.last] - matrix[:, 0]).mean(-1))


def learning_efficiency(matrix: Floats, stages: Stages, num_episodes: int) -> Floats:
    """Mean success gained per thousand training episodes, [B]."""
    return total_gain(matrix, stages) / (num_episodes / 1000)


def area_under_curve(curve: Floats, steps: Sequence[int]) -> Floats:
    """Mean success from the first point to the last by the trapezoidal rule, [B] from [B, P]."""
    assert len(steps) > 1 and curve.shape[1] == len(steps)
    return np.asarray(np.trapezoid(curve, steps, axis=1) / (steps[-1] - steps[0]))


def _mean(found: Sequence[Floats]) -> Floats | None:
    return np.asarray(np.mean(found, axis=0)) if found else None
