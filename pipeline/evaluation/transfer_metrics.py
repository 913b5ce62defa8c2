"""Transfer metrics of an accuracy matrix, with bootstrap intervals.

The accuracy matrix R has a row for each evaluation point (0: before GRPO, t: after stage t of T)
and a column for each domain, task family or tool. The metrics follow GEM (Lopez-Paz and Ranzato
2017, arXiv 1706.08840, section 3) and Chaudhry et al. 2018 (arXiv 1801.10112, section 3).

Intervals are percentile bootstraps (Efron and Tibshirani 1993, chapter 13) over tasks and seeds. A
bootstrap sample that draws a task takes all trials of the task at all evaluation points. For two
curricula with equal tasks and numbers of runs, the same tasks are drawn: differences are paired.

Letters in shapes: B samples (the first is the estimate), S seeds, P points, N tasks, C columns.
"""

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
Stages = Sequence[Collection[int]]  # the columns that each stage trained, except replayed columns


def succeeded(reward: Any, threshold: float) -> Any:
    """Return whether a reward, or each reward of an array, is at least the threshold."""
    return reward >= threshold - 1e-9 * abs(threshold)


def is_graded(rewards: Iterable[float]) -> bool:
    """Return whether any reward is a number other than 0 and 1."""
    return any(reward not in (0, 1) for reward in rewards)


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
    """Return the 95 % interval (Wilson 1927) of a share of `count` independent trials.

    Raises ValueError for a share outside [0, 1], such as a mean of rewards.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share: got {share:g}, which is not between 0 and 1")
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
    return np.asarray(np.vstack([np.ones(count), weights]))


def of_columns(matrix: Floats, own: Stages) -> dict[str, dict[int, Floats]]:
    """Return each metric of OF_COLUMNS by column c, [B], from the matrix R [B, P, C].

    `backward_transfer` is R[T, c] - R[i, c], where i < T is the last stage that trained c. The mean
    over columns is GEM's BWT. If stage T trained c, or no stage did, c has no `backward_transfer`.
    `forward_transfer` is R[i - 1, c] - R[0, c], where i > 1 is the first stage that trained c, or
    T + 1 if no stage trained c. The mean over columns is GEM's FWT, but GEM subtracts the accuracy
    of a random initialisation, not R[0, c].
    `forgetting` is max over t < T of R[t, c], minus R[T, c], for columns with `backward_transfer`
    (Chaudhry et al. 2018, equation 3, but from t = 0). The maximum of noisy numbers is biased
    upwards, so only the interval of `backward_transfer` can show that a policy has forgotten.
    """
    end = len(own)
    found: dict[str, dict[int, Floats]] = {name: {} for name in OF_COLUMNS}
    for c in range(matrix.shape[-1]):
        accuracy = matrix[..., c]
        stages = [t for t, columns in enumerate(own, 1) if c in columns]
        first = min(stages, default=end + 1)
        last = max(stages, default=end)
        if first > 1:
            found["forward_transfer"][c] = accuracy[:, first - 1] - accuracy[:, 0]
        if last < end:
            found["backward_transfer"][c] = accuracy[:, end] - accuracy[:, last]
            found["forgetting"][c] = accuracy[:, :end].max(-1) - accuracy[:, end]
    return found


def stage_gains(matrix: Floats, own: Stages) -> list[list[Floats]]:
    """Return R[t, c] - R[t - 1, c], [B], for each stage t and every column c that t trained."""
    return [
        [matrix[:, t, c] - matrix[:, t - 1, c] for c in sorted(columns)]
        for t, columns in enumerate(own, 1)
    ]


def of_matrix(matrix: Floats, own: Stages, num_episodes: int) -> dict[str, Floats]:
    """Return the metrics [B] of the whole matrix [B, P, C], without metrics that have no value.

    - average_accuracy: mean over columns of R[T, c] (GEM's ACC)
    - total_gain: mean over columns of R[T, c] - R[0, c]
    - stage_gain: mean of `stage_gains`
    - learning_efficiency: total gain per thousand training episodes
    - backward_transfer, forward_transfer, forgetting: means of `of_columns`
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
    """Return the mean of a curve [B, P] over the steps by the trapezoidal rule, [B]."""
    return np.asarray(np.trapezoid(curve, steps, axis=1) / (steps[-1] - steps[0]))
