"""What learning one domain did to the others: metrics of an accuracy matrix, with intervals. Pure.

The accuracy matrix R has a row for each evaluation point (0: before GRPO, t: after stage t of T)
and a column for each domain, task family or tool. The metrics follow GEM (Lopez-Paz and Ranzato
2017, arXiv 1706.08840, section 3) and Chaudhry et al. 2018 (arXiv 1801.10112, section 3), which do
not cover every curriculum of this project; the docstrings say how the other cases count.

Intervals are percentile bootstraps (Efron and Tibshirani 1993, chapter 13) over tasks, paired: a
resample takes a task with all its trials at all points. If there are several runs, the runs (seeds)
are resampled as well. The same tasks and number of runs give the same resamples, so that
differences between two curricula are paired too.

Legend: B samples, the first of them the estimate itself; S seeds, P points, N tasks, C columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from math import comb, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.rng import stream_key

RESAMPLES = 2000
Z95 = 1.959964
OF_COLUMNS = ("backward_transfer", "forward_transfer", "forgetting")
Floats = NDArray[np.float64]
Number = list[float | None]  # [value, low, high]
Stages = Sequence[Collection[int]]  # the columns that each stage trained, without replayed ones


def succeeded(reward: Any, threshold: float) -> Any:
    """Whether a reward, or each of an array, reaches the threshold, up to the rounding of sums."""
    return reward >= threshold - 1e-9 * abs(threshold)


def is_graded(rewards: Iterable[float]) -> bool:
    """Whether some reward is neither 0 nor 1."""
    return any(reward not in (0, 1) for reward in rewards)


# Unbiased estimates, for 1 <= k <= num_trials: pass@k of Chen et al. 2021 (arXiv 2107.03374,
# equation 1), and pass^k of Yao et al. 2024 (tau-bench, arXiv 2406.12045, section 5).


def pass_at_k(num_successes: int, num_trials: int, k: int) -> float:
    """The chance that at least one of k trials succeeds."""
    return 1 - comb(num_trials - num_successes, k) / comb(num_trials, k)


def pass_hat_k(num_successes: int, num_trials: int, k: int) -> float:
    """The chance that all of k trials succeed."""
    return comb(num_successes, k) / comb(num_trials, k)


def estimate(samples: Floats | None) -> Number | None:
    """[value, low, high] of a number from its samples [B]: value is the first sample.

    The other samples give the 95 % interval, without samples in which the number is undefined (NaN,
    as for a tool without calls); bounds are None if no sample remains. The result is None if the
    value is undefined.
    """
    if samples is None or not np.isfinite(samples[0]):
        return None
    rest = samples[1:][np.isfinite(samples[1:])]
    low_high = np.percentile(rest, [2.5, 97.5]).tolist() if len(rest) else [None, None]
    return [None if x is None else round(x, 6) for x in (float(samples[0]), *low_high)]


def mean(samples: Iterable[Floats]) -> Floats | None:
    """The mean of samples [B] of several numbers; None if there are none."""
    samples = list(samples)
    return np.asarray(np.mean(samples, axis=0)) if samples else None


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927) of `count` trials independent of each other.

    Raises ValueError for a value outside [0, 1], such as a mean of rewards.
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
        counts: [S, P, N], the divisors: 1 for a task, 0 for a task of another family, the number of
            calls for a tool. If fewer than two tasks count there is no interval: all samples but
            the first are NaN.
        name: of the tasks: equal names and sizes get the same resamples.
        over_seeds: whether seeds are resampled as well; if not, the interval is for these seeds.
    """
    num_seeds, _, num_tasks = totals.shape
    tasks = _weights(num_tasks, "tasks", name)
    seeds = _weights(num_seeds, "seeds", num_seeds) if over_seeds else np.ones((1, num_seeds))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.einsum("spn,bn->bsp", totals, tasks) / np.einsum("spn,bn->bsp", counts, tasks)
    if (counts > 0).any((0, 1)).sum() < 2:
        ratios[1:] = np.nan
    drawn = np.where(seeds[:, :, None] > 0, ratios, 0.0)  # a seed of weight 0 may be NaN
    return np.asarray(np.einsum("bsp,bs->bp", drawn, seeds / num_seeds))


@lru_cache(maxsize=32)
def _weights(count: int, *key: int | str) -> Floats:
    """How often each of `count` items is drawn, [B, count]; once each in the first row."""
    generator = np.random.default_rng(stream_key("bootstrap", *key))
    drawn = generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return np.asarray(np.vstack([np.ones(count), drawn]))


def of_columns(matrix: Floats, own: Stages) -> dict[str, dict[int, Floats]]:
    """The metrics OF_COLUMNS of each column c that has them, [B], from the matrix [B, P, C].

    - backward_transfer: R[T, c] - R[i, c], i the last stage that trained c; their mean is GEM's
      BWT. Only columns that a stage before the last trained, and the last did not, can be forgotten
      and have this number.
    - forward_transfer: R[i - 1, c] - R[0, c], i > 1 the first stage that trained c, or T + 1 if no
      stage did; their mean is GEM's FWT. GEM's baseline is a random initialisation, this one is the
      policy before GRPO.
    - forgetting: max over t < T of R[t, c] minus R[T, c], for the columns of backward transfer
      (Chaudhry et al. 2018, equation 3, with the point before GRPO among t). The maximum of noisy
      numbers is too high on average, in the bootstrap once more: both are above zero without any
      forgetting, so this interval is no test of zero; the interval of backward transfer is.
    """
    end = len(own)
    found: dict[str, dict[int, Floats]] = {name: {} for name in OF_COLUMNS}
    for c in range(matrix.shape[-1]):
        accuracy = matrix[..., c]
        stages = [t for t, columns in enumerate(own, 1) if c in columns]
        first, last = min(stages, default=end + 1), max(stages, default=end)
        if first > 1:
            found["forward_transfer"][c] = accuracy[:, first - 1] - accuracy[:, 0]
        if last < end:
            found["backward_transfer"][c] = accuracy[:, end] - accuracy[:, last]
            found["forgetting"][c] = accuracy[:, :end].max(-1) - accuracy[:, end]
    return found


def stage_gains(matrix: Floats, own: Stages) -> list[list[Floats]]:
    """For each stage t, R[t, c] - R[t - 1, c] of the columns that it trained, [B]."""
    return [
        [matrix[:, t, c] - matrix[:, t - 1, c] for c in sorted(columns)]
        for t, columns in enumerate(own, 1)
    ]


def of_matrix(matrix: Floats, own: Stages, num_episodes: int) -> dict[str, Floats]:
    """The numbers of the whole matrix [B, P, C] that are defined, [B].

    - average_accuracy: mean over columns of R[T, c] (GEM's ACC)
    - total_gain: mean over columns of R[T, c] - R[0, c]
    - stage_gain: mean of `stage_gains`; and the means of `of_columns`
    - learning_efficiency: total gain per thousand training episodes
    """
    end = matrix[:, len(own)]
    found: dict[str, Floats | None] = {"average_accuracy": np.asarray(end.mean(-1))}
    if own:
        found["total_gain"] = gain = np.asarray((end - matrix[:, 0]).mean(-1))
        found["stage_gain"] = mean(of for gains in stage_gains(matrix, own) for of in gains)
        found |= {name: mean(of.values()) for name, of in of_columns(matrix, own).items()}
        found["learning_efficiency"] = gain / (num_episodes / 1000) if num_episodes else None
    return {name: samples for name, samples in found.items() if samples is not None}


def area_under_curve(curve: Floats, steps: Sequence[int]) -> Floats:
    """Mean success from the first point to the last by the trapezoidal rule, [B] from [B, P]."""
    return np.asarray(np.trapezoid(curve, steps, axis=1) / (steps[-1] - steps[0]))
