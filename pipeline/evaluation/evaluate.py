"""Evaluation: the same held-out tasks, before the first stage and after each, or stand-alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from pipeline.data.rng import stream_key
from pipeline.data.tasks import Task
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.transfer_metrics import is_graded, succeeded
from pipeline.rollout.rollout import Rollout, RolloutRequest
from pipeline.rollout.trajectory import RunRecord, StopReason, Trajectory

Success = dict[str, Any]
ATTEMPTS = 3  # to play a trial whose environment fails


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
    whose environment fails is played again, at most ATTEMPTS times (see `failed_trials`). Raises
    RuntimeError if a trial is missing or double, and Interrupted if the run is told to stop.
    """
    mine = [tasks[index] for index in ranks.shard(len(tasks))]
    requests = [
        RolloutRequest(task=task, trial=k, key=stream_key(seed, "evaluation", *task.key, k))
        for task in mine
        for k in range(num_trials)
    ]
    trajectories = rollout(requests, greedy=greedy)
    ranks.agree("end of evaluation")
    for attempt in range(1, ATTEMPTS + 1):
        gathered = ranks.all_gather_objects([t.record() for t in trajectories], "evaluation")
        if attempt == ATTEMPTS or not failed_trials(record for part in gathered for record in part):
            break
        failed = [i for i, t in enumerate(trajectories) if _has_failed(t)]
        again = rollout([requests[i] for i in failed], greedy=greedy)
        ranks.agree("end of evaluation")
        for i, trajectory in zip(failed, again, strict=True):
            trajectories[i] = trajectory
    by_trial = {(r.domain, r.task_id, r.trial): r for records in gathered for r in records}
    total = sum(map(len, gathered))
    wanted = [(*task.key, trial) for task in tasks for trial in range(num_trials)]
    if total != len(wanted) or set(by_trial) != set(wanted):
        raise RuntimeError(
            f"evaluation: {len(wanted)} trials expected, {total} came, {len(by_trial)} different; "
            "nothing is scored"
        )
    return [by_trial[key] for key in wanted], trajectories


def _has_failed(episode: RunRecord | Trajectory) -> bool:
    return episode.stop_reason == StopReason.ENVIRONMENT_ERROR


def failed_trials(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Trials that ended in an environment error, so that their reward is unknown."""
    return list(filter(_has_failed, records))


def refuse_failed_trials(records: Sequence[RunRecord], when: str) -> None:
    """Raise RuntimeError, on every rank, if the environment of a trial failed each time.

    Scored as a failure of the policy, the trial would count as forgetting.
    """
    if failed := failed_trials(records):
        raise RuntimeError(
            f"{len(failed)} of {len(records)} trials {when} ended in environment errors {ATTEMPTS} "
            f"times (the first: {failed[0].domain}/{failed[0].task_id}), so nothing is scored; "
            "mend the environment and resume"
        )


def evaluation_metrics(rates: Mapping[str, Success]) -> dict[str, float]:
    """The metrics of an evaluation."""
    names = {"mean": "success", "greedy": "greedy", "reward": "reward"}
    names["greedy_reward"] = "greedy_reward"
    return {
        f"eval/{domain}/{name}": rate[key]
        for key, name in names.items()
        for domain, rate in rates.items()
        if key in rate
    }


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

    Sampled and greedy success are separate, also by family and by branch of each decision. An
    episode is a success with a reward of `threshold` or more; if a domain has a reward other than 0
    and 1, the mean rewards are added. Raises ValueError if a trial failed to run, or a task has not
    `num_trials` of them.
    """
    if failed_trials([*sampled, *greedy]):
        raise ValueError("trials that failed to run cannot be scored")
    return {
        domain: _success(sampled_of, greedy_of, num_trials, threshold)
        for domain, sampled_of, greedy_of in _groups(lambda r: r.domain, sampled, greedy)
    }


def _groups(
    name: Callable[[RunRecord], str], sampled: Sequence[RunRecord], greedy: Sequence[RunRecord]
) -> Iterator[tuple[str, list[RunRecord], list[RunRecord]]]:
    """Each name of the sampled records, with its sampled and its greedy records."""
    for key in dict.fromkeys(map(name, sampled)):
        yield key, [r for r in sampled if name(r) == key], [r for r in greedy if name(r) == key]


def _success(
    sampled: Sequence[RunRecord], greedy: Sequence[RunRecord], num_trials: int, threshold: float
) -> Success:
    """The success of one domain, from its records."""
    tasks: dict[str, list[float]] = {}
    tools: dict[str, dict[str, list[int]]] = {}  # by tool and task: calls, and errors among them
    for record in sampled:
        tasks.setdefault(record.task_id, []).append(record.reward)
        for name, counts in record.tools.items():
            add_counts(tools.setdefault(name, {}).setdefault(record.task_id, [0, 0]), counts)
    numbers = sorted({len(rewards) for rewards in tasks.values()})
    if numbers != [num_trials]:
        raise ValueError(f"each task needs {num_trials} trials, got {numbers}")
    rates = _rates(sampled, greedy, threshold)
    if is_graded(record.reward for record in (*sampled, *greedy)):
        rates["reward"] = fmean(record.reward for record in sampled)
        rates["greedy_reward"] = fmean(record.reward for record in greedy)
    return {
        **rates,
        "num_trials": num_trials,
        "tasks": tasks,
        "tools": dict(sorted(tools.items())),
        "families": _by(lambda r: r.family, sampled, greedy, threshold),
        "branches": _by(lambda r: f"{r.family}/{r.branch}", sampled, greedy, threshold),
    }


def add_counts(sums: list[int], counts: Sequence[int]) -> None:
    """Add the calls of a tool, and the errors among them, to `sums`."""
    sums[:] = [a + b for a, b in zip(sums, counts, strict=True)]


def _rates(sampled: Sequence[RunRecord], greedy: Sequence[RunRecord], threshold: float) -> Success:
    return {
        "mean": fmean(succeeded(record.reward, threshold) for record in sampled),
        "greedy": fmean(succeeded(record.reward, threshold) for record in greedy),
        "num_tasks": len({record.task_id for record in sampled}),
    }


def _by(
    name: Callable[[RunRecord], str],
    sampled: Sequence[RunRecord],
    greedy: Sequence[RunRecord],
    threshold: float,
) -> dict[str, Success]:
    groups = sorted(_groups(name, sampled, greedy))
    return {key: _rates(s, g, threshold) for key, s, g in groups if key not in ("", "/")}
