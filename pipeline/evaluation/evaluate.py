"""Evaluation: the same held-out tasks, before the first stage and after each.

Runs in training and stand-alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice, product
from statistics import fmean
from typing import Any

from pipeline.config.settings import RolloutSettings
from pipeline.data.rng import stream_key
from pipeline.data.tasks import Task, shard_tasks
from pipeline.distributed.ranks import Ranks
from pipeline.embedded.blind import Trace, blind_baselines, blind_trace
from pipeline.embedded.scripted import CaseEnvironment
from pipeline.environments.calls import Calls, Guard
from pipeline.environments.deadline import alarms
from pipeline.environments.tools import (
    EnvironmentFault,
    answer_call,
    reward_of,
    started,
    tool_schemas,
)
from pipeline.evaluation.transfer_metrics import is_graded, succeeded
from pipeline.rollout.rollout import Rollout, Start
from pipeline.rollout.trajectory import RunRecord, StopReason, Trajectory

Success = dict[str, Any]
ATTEMPTS = 3  # to play a trial whose environment fails
FAILED = (StopReason.ENVIRONMENT_ERROR,)
LOOKUPS = ("find", "get")  # beginnings of tools that change nothing
ID = r"\w*\d\w*"  # a word with a digit
# Of each environment, the tasks of the last call and what their floors are.
_FLOORS: dict[type[Any], tuple[list[Task], dict[str, float]]] = {}


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
    mine = [tasks[index] for index in shard_tasks(len(tasks), ranks.rank, ranks.num_ranks)]
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


def floors(
    environments: Mapping[str, type[Any]],
    tasks: Mapping[str, Sequence[Task]],
    call_timeout: float = RolloutSettings().call_timeout,
) -> dict[str, dict[str, float]]:
    """What policies earn that never read the record of a request.

    They do nothing, always transfer (best single reason; in the embedded domains after the
    lookups), or call every tool in turn. For the embedded domains, also the best of all such
    policies (`environments.blind`). Where an environment fails, or a call of it takes more than so
    many seconds, they earn nothing. Where nothing failed, the same tasks are not played again.
    """
    calls = Calls(call_timeout, lambda _: None)
    with alarms():
        return {domain: _floor(calls, environments[domain], tasks[domain]) for domain in tasks}


def _floor(calls: Calls, environment_class: type[Any], tasks: Sequence[Task]) -> dict[str, float]:
    known = _FLOORS.get(environment_class)
    if known and known[0] == list(tasks):
        return dict(known[1])
    failed: list[Task] = []

    def played(play: Callable[[Task, list[Any], Guard], None]) -> list[Any]:
        """What came of every task; None where it failed."""
        found: list[Any] = []
        for task in tasks:
            outcome: list[Any] = []
            try:
                calls.here(task.key, partial(play, task, outcome))
            except EnvironmentFault:  # as in a rollout
                failed.append(task)
            found.append(outcome[0] if outcome else None)
        return found

    def earned(schemas: Sequence[dict[str, Any]]) -> float:
        return fmean(
            reward or 0.0 for reward in played(partial(_play_blind, environment_class, schemas))
        )

    is_embedded = issubclass(environment_class, CaseEnvironment)
    schemas = [schema["function"] for schema in tool_schemas(environment_class)]
    lookups = [s for s in schemas if is_embedded and s["name"].startswith(LOOKUPS)]
    transfers = [schema for schema in schemas if schema["name"].startswith("transfer")][:1]
    fixed = [{**s, "fixed": reason} for s in transfers for reason in _first_enum(s)]
    found = {
        "nothing": earned([]),
        "transfer": max((earned([*lookups, transfer]) for transfer in fixed), default=0.0),
        "every_tool": earned(schemas),
    }
    if is_embedded:
        found |= blind_baselines(played(partial(_trace, environment_class)), tasks)
    if not failed:
        _FLOORS[environment_class] = (list(tasks), dict(found))
    return found


def _trace(
    environment_class: type[Any], task: Task, outcome: list[Trace | None], guard: Guard
) -> None:
    outcome.append(guard("expert", partial(blind_trace, environment_class, task)))


def _first_enum(schema: dict[str, Any]) -> list[str]:
    for parameter in schema["parameters"]["properties"].values():
        if parameter.get("enum"):
            return list(parameter["enum"])
    return []


def _play_blind(
    environment_class: type[Any],
    schemas: Sequence[dict[str, Any]],
    task: Task,
    rewards: list[float],
    guard: Guard,
) -> None:
    """Call tools in turn, lookups first, then say a closing word.

    Text arguments are ids seen in the request or in results, the newest that the tool accepts; a
    choice is its first option.
    """
    environment, *_ = guard("reset", partial(started, environment_class, task.row()))
    ids = re.findall(ID, task.prompt[-1]["content"]) or ["x"]
    for schema in sorted(schemas, key=lambda s: not s["name"].startswith(LOOKUPS)):
        properties = schema["parameters"]["properties"]
        for known in islice(product(reversed(ids), repeat=len(properties)), 100):
            choices = zip(properties.items(), known, strict=True)
            arguments = {name: p.get("enum", [an_id])[0] for (name, p), an_id in choices}
            fixed = dict.fromkeys(arguments, schema.get("fixed"))
            given, name = fixed if "fixed" in schema else arguments, schema["name"]
            answer = guard(name, partial(answer_call, environment, name, given))
            if "error" not in answer.content:
                ids += [found for found in re.findall(ID, answer.content) if found not in ids]
                break
        if answer.is_last:
            break
    guard("final message", partial(setattr, environment, "final_message", "Done."))
    rewards.append(guard("get_reward", partial(reward_of, environment)))
