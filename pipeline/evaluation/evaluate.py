"""Evaluation on held-out tasks, validation inside a stage, and what is made of the episodes.

A trial whose environment fails is played again. A run stops if too many episodes of a domain end in
environment errors. Validations also estimate how far the policy has moved since earlier stages.
`results.json` is written from the data in the checkpoints.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, mode
from typing import Any

import torch

from pipeline.checkpoints.checkpoint import TrainState
from pipeline.common.console import command, may_fail, say
from pipeline.common.durable import write_text
from pipeline.common.errors import RunError, UserError
from pipeline.config.settings import Config, RolloutSettings
from pipeline.data.curriculum import Stage, describe_stages, on_plateau
from pipeline.data.rng import stream_key
from pipeline.data.tasks import Task
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.transfer import pass_hat_k, summary, tool_counts, worse
from pipeline.rollout.rollout import Progress, Rollout, RolloutRequest
from pipeline.rollout.trajectory import (
    FAILED,
    EpisodeRecord,
    StopReason,
    Trajectory,
    grouped,
    is_graded,
    succeeded,
)
from pipeline.training.micro_batches import make_micro_batches
from pipeline.training.updater import Updater

Success = dict[str, Any]  # success rates of a domain, family or branch in `results.json`
MOST_K = 4  # the largest k of pass^k, as in tau-bench
ATTEMPTS = 3  # maximum number of attempts at a trial whose environment fails
# Of the episodes that a KL probe keeps.
KEPT = ("domain", "task_id", "trial", "prompt_ids", "completion_ids", "loss_mask", "logprobs")
RATE_NAMES = {"mean": "success"} | {n: n for n in ("greedy", "reward", "greedy_reward")}


def evaluate(
    rollout: Rollout,
    tasks: Sequence[Task],
    num_trials: int,
    seed: int,
    ranks: Ranks,
    *,
    greedy: bool = False,
    progress: Progress | None = None,
) -> tuple[list[EpisodeRecord], list[Trajectory]]:
    """Run `num_trials` episodes of each task; every rank runs a share of the tasks.

    Returns the records of all ranks, in order of tasks and trials, and this rank's trajectories.
    Random numbers depend on seed, task and trial only. A trial whose environment fails is run
    again, at most ATTEMPTS times in total; not if a reward function failed, which has had its
    attempts. Raises Interrupted if a signal stops the run.
    """
    requests = [
        RolloutRequest(task=task, trial=k, key=stream_key(seed, "evaluation", *task.key, k))
        for task in (tasks[index] for index in ranks.shard(len(tasks)))
        for k in range(num_trials)
    ]
    trajectories = rollout(requests, greedy, progress)
    for attempt in range(1, ATTEMPTS + 1):
        ranks.agree("end of evaluation")
        mine = [t.record() for t in trajectories]
        records = list(chain(*ranks.all_gather_objects(mine, "evaluation")))
        if attempt == ATTEMPTS or not any(map(_may_succeed, records)):
            break
        failed = [i for i, record in enumerate(mine) if _may_succeed(record)]
        again = rollout([requests[i] for i in failed], greedy, progress)
        for i, trajectory in zip(failed, again, strict=True):
            trajectories[i] = trajectory
    by_trial = {(r.domain, r.task_id, r.trial): r for r in records}
    wanted = [(*task.key, trial) for task in tasks for trial in range(num_trials)]
    assert len(records) == len(wanted), "a trial was lost or played twice"
    return [by_trial[key] for key in wanted], trajectories


def failed_trials(records: Iterable[EpisodeRecord]) -> list[EpisodeRecord]:
    return [record for record in records if record.stop_reason == StopReason.ENVIRONMENT_ERROR]


def _may_succeed(record: EpisodeRecord) -> bool:
    """Return whether a trial has failed that another attempt may mend."""
    return record.stop_reason == StopReason.ENVIRONMENT_ERROR and record.left_out != "reward"


def unscored_trials(records: Iterable[EpisodeRecord]) -> list[EpisodeRecord]:
    """Return the trials that were played and got no reward, because each function gave None."""
    failed = StopReason.ENVIRONMENT_ERROR
    return [r for r in records if r.left_out == "reward" and r.stop_reason != failed]


def refuse_failed_trials(records: Sequence[EpisodeRecord], when: str) -> None:
    """Raise RunError, on every rank, if a trial's environment failed in each attempt.

    Raises UserError if a trial has no reward. If such trials counted as a reward of 0, the policy
    would seem to have forgotten tasks. Errors of a user's loop or agent do count as 0, because
    what the model says may be their cause.
    """
    if failed := failed_trials(records):
        raise RunError(
            f"{len(failed)} of {len(records)} trials {when} ended in environment errors in each "
            f"attempt (the first: {failed[0].domain}/{failed[0].task_id}), so nothing is scored"
            f"{commonest(failed)}; mend what failed and resume"
        )
    if unscored := unscored_trials(records):
        raise UserError(
            f"reward_funcs: {len(unscored)} of {len(records)} trials {when} have no reward (the "
            f"first: {unscored[0].domain}/{unscored[0].task_id}), because every function returned "
            "None, so nothing is scored; let a function return a number for each held-out task"
        )


def success(
    sampled: Sequence[EpisodeRecord],
    greedy: Sequence[EpisodeRecord],
    num_trials: int,
    threshold: float = 1.0,
) -> dict[str, Success]:
    """Return each domain's success rates in a sampled and in a greedy evaluation.

    An episode is a success if its reward is at least `threshold`. For a domain with a reward other
    than 0 and 1, the result also has the domain's mean rewards. `pass^k` lists pass^1, pass^2, ...,
    at most pass^MOST_K (see `pass_hat_k`). With reward functions, `rewards` has the mean sampled
    reward of each source by name, without weights. Without greedy episodes, nothing is said of
    them.
    """

    def rates(sampled: Sequence[EpisodeRecord], greedy: Sequence[EpisodeRecord]) -> Success:
        return {
            "mean": fmean(succeeded(record.reward, threshold) for record in sampled),
            **({"greedy": fmean(succeeded(r.reward, threshold) for r in greedy)} if greedy else {}),
            "num_tasks": len({record.task_id for record in sampled}),
        }

    def of_domain(sampled: Sequence[EpisodeRecord], greedy: Sequence[EpisodeRecord]) -> Success:
        def by(*names: str) -> dict[str, Success]:
            of_greedy = grouped(greedy, *names)
            groups = sorted(grouped(sampled, *names).items())
            named = ((key, of) for key, of in groups if key not in ("", "/"))
            return {key: rates(of, of_greedy.get(key, ())) for key, of in named}

        found = rates(sampled, greedy)
        tasks = grouped(sampled, "task_id")
        if is_graded(record.reward for record in (*sampled, *greedy)):
            found["reward"] = fmean(record.reward for record in sampled)
            if greedy:
                found["greedy_reward"] = fmean(record.reward for record in greedy)
        by_name: dict[str, list[float]] = {}
        for name, reward in chain(*(record.rewards.items() for record in sampled)):
            by_name.setdefault(name, []).extend([] if reward is None else [reward])
        if by_name:
            found["rewards"] = {name: fmean(of) for name, of in by_name.items() if of}
        solved = [[succeeded(r.reward, threshold) for r in of] for of in tasks.values()]
        ks = range(1, min(MOST_K, *map(len, solved)) + 1)
        tools: dict[str, dict[str, list[int]]] = {}
        for task, records in tasks.items():
            for tool, counts in tool_counts(record.tools for record in records).items():
                tools.setdefault(tool, {})[task] = counts
        return {
            **found,
            "num_trials": num_trials,
            "pass^k": [fmean(pass_hat_k(sum(of), len(of), k) for of in solved) for k in ks],
            "tasks": {task: [record.reward for record in of] for task, of in tasks.items()},
            **({"greedy_tasks": {r.task_id: r.reward for r in greedy}} if greedy else {}),
            "tools": dict(sorted(tools.items())),
            "families": by("family"),
            "branches": by("family", "branch"),
        }

    of_greedy = grouped(greedy, "domain")
    return {d: of_domain(of, of_greedy.get(d, ())) for d, of in grouped(sampled, "domain").items()}


def evaluation_metrics(rates: Mapping[str, Success]) -> dict[str, float]:
    """Return the `eval/` metrics from the success rates of each domain."""
    found = [(d, key) for key in RATE_NAMES for d, of in rates.items() if key in of]
    return {f"eval/{domain}/{RATE_NAMES[key]}": rates[domain][key] for domain, key in found}


def success_in_words(rates: Mapping[str, Success]) -> str:
    """Return a text such as `airline 0.41  retail 0.38`, and the mean rewards in `rates`."""
    return "  ".join(
        f"{d} {r['mean']:.2f}" + (f" (mean reward {r['reward']:.4g})" if "reward" in r else "")
        for d, r in rates.items()
    )


# Validation: one sampled trial of each validation task


def scored(records: Sequence[EpisodeRecord]) -> dict[str, dict[str, float]]:
    """Return rewards by domain and task; a domain with a failed trial is left out."""
    return {
        domain: {record.task_id: record.reward for record in of}
        for domain, of in grouped(records, "domain").items()
        if not failed_trials(of) and not unscored_trials(of)
    }


def _rate(rewards: Mapping[str, float], threshold: float) -> float:
    return fmean(succeeded(reward, threshold) for reward in rewards.values())


def mean_success(
    rewards: Mapping[str, Mapping[str, float]], domains: Sequence[str], threshold: float
) -> float | None:
    """Return the mean success rate of `domains` in a validation; None if a domain is missing."""
    if not set(domains) <= set(rewards):
        return None
    return fmean(_rate(rewards[domain], threshold) for domain in domains)


def validation_metrics(
    rewards: Mapping[str, Mapping[str, float]], kl: Mapping[str, float], threshold: float
) -> dict[str, float]:
    """Return the `validation/` metrics from each domain's rewards and KL estimate."""
    graded = {d: fmean(of.values()) for d, of in rewards.items() if is_graded(of.values())}
    return {
        **{f"validation/{d}/success": _rate(of, threshold) for d, of in rewards.items()},
        **{f"validation/{d}/reward": value for d, value in graded.items()},
        **{f"validation/{d}/kl": value for d, value in kl.items()},
    }


def plateau(validations: Sequence[Mapping[str, Any]], stage: Stage, config: Config) -> float | None:
    """Return a stage's best validation success rate, or None while the success rate still rises."""
    threshold = config.evaluation.success_threshold
    of_stage = (v["success"] for v in validations if stage.has(v))
    means = (mean_success(of, stage.own, threshold) for of in of_stage)
    history = [mean for mean in means if mean is not None]
    return max(history) if on_plateau(history, config.curriculum.plateau_patience) else None


class KLProbe:
    """KL estimates between the current policy and the policies at the end of earlier stages.

    At the end of a stage, the policy runs episodes of a few validation tasks of the stage's
    domains, which are kept in `kl_probe/`. Later validations estimate KL(policy at the end of the
    stage || current policy), per token, on the tokens that were sampled at the end of the stage.
    One that `trains` has training tasks and the folder `learned/`; its episodes are for the loss.
    """

    def __init__(self, folder: Path, config: Config, ranks: Ranks, *, trains: bool = False) -> None:
        self._folder = folder / ("learned" if trains else "kl_probe")
        self._config = config
        self._ranks = ranks
        self._trains = trains
        self.episodes: dict[str, list[Trajectory]] = {}  # by domain
        self.is_wanted = (
            min(config.evaluation.kl_probe_tasks, config.evaluation.validation_steps) > 0
            and not config.curriculum.is_separate  # an expert has no earlier domains
        )
        if trains:
            is_sequence = config.curriculum.curriculum == "sequential"
            self.is_wanted = is_sequence and config.grpo.learned_beta > 0

    def keep(self, stage: Stage, tasks: Sequence[Task], rollout: Rollout) -> None:
        """Run one episode of each task at the stage's end; every rank keeps all episodes."""
        _, mine = evaluate(rollout, tasks, 1, self._config.run.seed, self._ranks)
        episodes = [{name: getattr(t, name) for name in KEPT} for t in mine if any(t.loss_mask)]
        gathered = chain(*self._ranks.all_gather_objects(episodes, "KL probe"))
        by_task = {(episode["domain"], episode["task_id"]): episode for episode in gathered}
        ordered = [by_task[task.key] for task in tasks if task.key in by_task]
        if self._ranks.is_main:
            self._folder.mkdir(exist_ok=True)
            write_text(self._folder / f"{stage.name}.json", json.dumps(ordered))
        self._ranks.barrier("KL probe")
        self._add(ordered)

    def load(self, stages: Sequence[Stage]) -> None:
        """Read the episodes of stages; raises UserError if those of the loss cannot be read."""
        for stage in stages if self.is_wanted else ():
            path = self._folder / f"{stage.name}.json"
            try:
                self._add(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError, LookupError, RecursionError):
                state = "damaged" if path.is_file() else "gone"
                if self._trains:
                    raise UserError(
                        f"learned_beta: {path} is {state}, whose episodes the loss needs; restore "
                        "it, or start anew"
                    ) from None
                if self._ranks.is_main:
                    say(f"warning: {path} is {state}, so there is no KL of {stage.name}")

    def _add(self, episodes: Sequence[dict[str, Any]]) -> None:
        self.episodes |= grouped((Trajectory(**episode) for episode in episodes), "domain")

    def divergences(self, updater: Updater) -> dict[str, float]:
        """Return the KL estimate (nats per token) of each domain that has kept episodes.

        The estimator is k3 of Schulman (2020), as in the loss. The order of summation does not
        depend on the number of ranks.
        """
        episodes = [*chain(*self.episodes.values())]
        if not episodes:
            return {}
        mine = [episodes[i] for i in self._ranks.shard(len(episodes))]
        shards = self._ranks.all_gather_numbers(self._sums(mine, updater))
        sums = [0.0] * len(episodes)
        for rank, shard in enumerate(shards):
            sums[rank :: len(shards)] = shard
        left = iter(sums)
        return {
            domain: sum(next(left) for _ in of) / sum(t.num_sampled_tokens for t in of)
            for domain, of in self.episodes.items()
        }

    @torch.no_grad()
    def _sums(self, trajectories: Sequence[Trajectory], updater: Updater) -> list[float]:
        order = sorted(range(len(trajectories)), key=lambda i: -trajectories[i].num_tokens)
        # With one episode per pass, the shapes of tensors do not depend on the number of ranks.
        budget = 1 if self._config.run.deterministic else updater.max_tokens_per_microbatch
        items = [(trajectories[i], 0.0, 0.0) for i in order]
        sums = list[float]()
        batches = make_micro_batches(items, budget, updater.pad_id)
        for batch, counts in updater.passes(batches):
            batch = batch.to(updater.accelerator.device)
            with updater.accelerator.autocast():
                logprobs, _ = updater.module(batch)
            if not counts:
                continue
            ratio = (logprobs - batch.old_logprobs).double()
            terms = (torch.expm1(ratio) - ratio).cpu()  # on a GPU, index_add adds in no fixed order
            zeros = terms.new_zeros(len(batch.lengths))
            sums += zeros.index_add(0, batch.sequences.cpu(), terms).tolist()
        return [value for _, value in sorted(zip(order, sums, strict=True))]


# Environment errors


def commonest(failed: Sequence[EpisodeRecord]) -> str:
    """Return the commonest error of failed trials and the first task that had it, or ""."""
    if not failed:
        return ""
    text = mode(record.error for record in failed)
    first = next(record for record in failed if record.error == text)
    return f"; the commonest error, first of {first.domain}/{first.task_id}: {text}"


def error_counts(records: Iterable[EpisodeRecord]) -> dict[str, list[int]]:
    """Return [episodes, errors of environments and agents] of each domain."""
    return {
        domain: [len(episodes), sum(record.stop_reason in FAILED for record in episodes)]
        for domain, episodes in grouped(records, "domain").items()
    }


def stop_on_errors(
    ranks: Ranks,
    counts: Mapping[str, Sequence[int]],
    limits: RolloutSettings,
    records: Sequence[EpisodeRecord] = (),
    when: str = "since the stage began",
) -> None:
    """Raise the same RunError on every rank if a domain has too many environment errors.

    `counts` has [episodes, environment errors] of each domain over all ranks, and `records` are
    those of this rank. Domains with fewer than `2 * num_generations` episodes are not checked.
    Ranks communicate only if the function raises.
    """
    for domain, (episodes, errors) in counts.items():
        if episodes >= 2 * limits.num_generations and errors > limits.max_error_rate * episodes:
            mine = [r for r in records if r.stop_reason in FAILED and r.domain == domain]
            gathered = ranks.all_gather_objects(mine, "environment errors")
            which = commonest([*chain(*gathered)])
            raise RunError(
                f"rollout.max_error_rate: {errors} of {episodes} episodes of {domain} "
                f"({100 * errors / episodes:.0f} %) ended in errors {when}{which}; "
                "mend the environment or the agent, or raise the limit"
            )


# results.json


def write_results(
    folder: Path,
    config: Config,
    state: TrainState,
    stages: Sequence[Stage],
    held_out: Mapping[str, Sequence[Task]],
    facts: Mapping[str, Any],
    *,
    is_final: bool,
) -> None:
    """Write `curriculum.json` and `results.json`; `results.json` also gets the entries of `facts`.

    Transfer numbers are computed only if `is_final`, because the computation takes seconds.
    """
    described = describe_stages(stages, config)
    write_text(folder / "curriculum.json", json.dumps(described, indent=1))
    results = {
        "recipe": config.recipe,
        "seed": config.run.seed,
        "split": config.data.eval_split,
        "temperature": config.rollout.temperature,
        "success_threshold": config.evaluation.success_threshold,
        "evaluations": state.evaluations,
        "validations": state.validations,
        "task_families": {d: {task.id: task.family for task in of} for d, of in held_out.items()},
        "task_branches": {d: {task.id: task.branch for task in of} for d, of in held_out.items()},
        "training": state.training,
        "curriculum": described,
        **facts,
        "transfer": {},
    }
    if is_final:
        with may_fail("transfer numbers", f"{command('report')} {folder} tries again"):
            results["transfer"] = summary([results])
            results["worse"] = worse(results)
    write_text(folder / "results.json", json.dumps(results))


def training_summary(gathered: Sequence[Sequence[EpisodeRecord]]) -> dict[str, Any]:
    """Summarize a stage's training episodes; `gathered` has the records of each rank.

    Mean rewards do not count episodes that are left out of training.
    """
    records = [record for of_rank in gathered for record in of_rank]
    counted = grouped((r for r in records if not r.left_out), "domain")
    stops = Counter(record.stop_reason for record in records)
    return {
        "episodes": len(records),
        "episodes_per_rank": [*map(len, gathered)],
        "reward": {domain: fmean(r.reward for r in of) for domain, of in counted.items()},
        "stop_reasons": {str(reason): stops[reason] for reason in StopReason if stops[reason]},
        "tools": {
            domain: tool_counts(record.tools for record in of)
            for domain, of in grouped(records, "domain").items()
        },
        "sequences": {
            domain: {"episodes": len(of), **sum((Counter(r.new_sequences) for r in of), Counter())}
            for domain, of in grouped(records, "domain").items()
            if any(r.new_sequences for r in of)
        },
    }
