"""Evaluation: the same held-out tasks, before the first stage and after each.

Runs in training and stand-alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from pipeline.data.rng import stream_key
from pipeline.data.tasks import Task
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.transfer_metrics import is_graded, succeeded
from pipeline.rollout.rollout import Rollout, Start
from pipeline.rollout.trajectory import RunRecord, StopReason, Trajectory

Success = dict[str, Any]
ATTEMPTS = 3  # to play a trial whose environment fails
FAILED = (StopReason.ENVIRONMENT_ERROR,)


def evaluate(
    rollout: Rollout,
    tasks: Sequence[Task],
    num_trials: int,
    seed: int,
    ranks: Ranks,
    greedy: bool = False,
) -> tuple[list[RunRecord], list[Trajectory]]:
    """Play every task `num_trials` times, the tasks spread over the ranks, without any gradient.

    Returns the records of all ranks, in order of tasks and trials, and this rank's trajectories.
    The draws depend on task and trial alone, so two evaluations differ by the policy only. A trial
    whose environment fails is played again; see `failed_trials` for what is left of these. Raises
    RuntimeError when a trial is missing or double, and Interrupted where the run is to stop.
    """
    mine = [tasks[index] for index in ranks.shard(len(tasks))]
    starts = [
        Start(task=task, trial=k, key=stream_key(seed, "evaluation", *task.key, k))
        for task in mine
        for k in range(num_trials)
    ]
    trajectories = rollout(starts, greedy=greedy)
    ranks.agree("end of evaluation")
    for attempt in range(1, ATTEMPTS + 1):
        gathered = ranks.all_gather_objects([t.record() for t in trajectories], "evaluation")
        if attempt == ATTEMPTS or not failed_trials(record for part in gathered for record in part):
            break
        failed = [i for i, t in enumerate(trajectories) if t.stop_reason in FAILED]
        again = rollout([starts[i] for i in failed], greedy=greedy)
        ranks.agree("end of evaluation")
        for i, trajectory in zip(failed, again, strict=True):
            trajectories[i] = trajectory
    found = {(r.domain, r.task_id, r.trial): r for records in gathered for r in records}
    total = sum(map(len, gathered))
    wanted = [(*task.key, trial) for task in tasks for trial in range(num_trials)]
    if total != len(wanted) or set(found) != set(wanted):
        raise RuntimeError(
            f"evaluation: {len(wanted)} trials expected, {total} came, {len(found)} different; "
            "nothing is scored"
        )
    return [found[key] for key in wanted], trajectories


def failed_trials(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Trials that could not be played to their end, so that their reward says nothing."""
    return [record for record in records if record.stop_reason in FAILED]


def refuse_failed_trials(records: Sequence[RunRecord], when: str) -> None:
    """Raise RuntimeError, on every rank, where a trial could not be played.

    Its reward is unknown: scored as a failure, it would pass for something that was forgotten.
    """
    failed = failed_trials(records)
    if not failed:
        return
    raise RuntimeError(
        f"{len(failed)} of {len(records)} trials {when} ended in environment errors {ATTEMPTS} "
        f"times (the first: {failed[0].domain}/{failed[0].task_id}), so nothing is scored; mend "
        "the environment and resume"
    )


def evaluation_metrics(rates: Mapping[str, Success]) -> dict[str, float]:
    """What is logged of an evaluation."""
    metrics = {f"eval/{d}/success": rate["mean"] for d, rate in rates.items()}
    metrics |= {f"eval/{d}/greedy": rate["greedy"] for d, rate in rates.items()}
    for name in ("reward", "greedy_reward"):
        metrics |= {f"eval/{d}/{name}": rate[name] for d, rate in rates.items() if name in rate}
    return metrics


def in_words(rates: Mapping[str, Success]) -> str:
    """`airline 0.41  retail 0.38`, with mean rewards where they are not all 0 or 1."""
    return "  ".join(
        f"{d} {r['mean']:.2f}" + (f" (mean reward {r['reward']:.4g})" if "reward" in r else "")
        for d, r in rates.items()
    )


def success(
    sampled: Sequence[RunRecord],
    greedy: Sequence[RunRecord],
    num_trials: int,
    threshold: float = 1.0,
) -> dict[str, Success]:
    """Success of each domain, as `results.json` holds it.

    Sampled and greedy stand side by side, never mixed; per family and per branch of each decision
    as well. An episode is a success with a reward of `threshold` or more; where a domain's rewards
    are not all 0 or 1, their means stand there too. Raises ValueError where a trial failed to run,
    or a task has not `num_trials` of them.
    """
    if failed_trials([*sampled, *greedy]):
        raise ValueError("trials that failed to run cannot be scored")
    counts = Counter((record.domain, record.task_id) for record in sampled)
    if set(counts.values()) - {num_trials}:
        raise ValueError(f"each task needs {num_trials} trials, got {sorted(set(counts.values()))}")
    domains = list(dict.fromkeys(record.domain for record in sampled))
    return {
        domain: {
            **_rates(_of(sampled, domain=domain), _of(greedy, domain=domain), threshold),
            **_mean_rewards(_of(sampled, domain=domain), _of(greedy, domain=domain)),
            "num_trials": num_trials,
            "tasks": _rewards(sampled, domain),
            "tools": _tools(sampled, domain),
            "families": _by(sampled, greedy, domain, lambda r: r.family, threshold),
            "branches": _by(sampled, greedy, domain, lambda r: f"{r.family}/{r.branch}", threshold),
        }
        for domain in domains
    }


def _rewards(sampled: Sequence[RunRecord], domain: str) -> dict[str, list[float]]:
    """The rewards of each task's trials: what paired comparisons and pass^k need."""
    rewards: dict[str, list[float]] = {}
    for record in sampled:
        if record.domain == domain:
            rewards.setdefault(record.task_id, []).append(record.reward)
    return rewards


def _tools(sampled: Sequence[RunRecord], domain: str) -> dict[str, dict[str, list[int]]]:
    """Of each tool, by task: its calls in all trials, and those answered with an error."""
    tools: dict[str, dict[str, list[int]]] = {}
    for record in sampled:
        for name, counts in record.tools.items() if record.domain == domain else ():
            sums = tools.setdefault(name, {}).setdefault(record.task_id, [0, 0])
            sums[:] = [a + b for a, b in zip(sums, counts, strict=True)]
    return dict(sorted(tools.items()))


def _of(records: Iterable[RunRecord], domain: str) -> list[RunRecord]:
    return [record for record in records if record.domain == domain]


def _rates(sampled: Sequence[RunRecord], greedy: Sequence[RunRecord], threshold: float) -> Success:
    return {
        "mean": fmean(succeeded(record.reward, threshold) for record in sampled),
        "greedy": fmean(succeeded(record.reward, threshold) for record in greedy),
        "num_tasks": len({record.task_id for record in sampled}),
    }


def _mean_rewards(sampled: Sequence[RunRecord], greedy: Sequence[RunRecord]) -> Success:
    if not is_graded(record.reward for record in (*sampled, *greedy)):
        return {}
    names = {"reward": sampled, "greedy_reward": greedy}
    return {name: fmean(record.reward for record in of) for name, of in names.items()}


def _by(
    sampled: Sequence[RunRecord],
    greedy: Sequence[RunRecord],
    domain: str,
    name: Any,
    threshold: float,
) -> dict[str, Success]:
    names = sorted({name(record) for record in sampled if record.domain == domain} - {"", "/"})
    return {
        key: _rates(
            [r for r in sampled if r.domain == domain and name(r) == key],
            [r for r in greedy if r.domain == domain and name(r) == key],
            threshold,
        )
        for key in names
    }
