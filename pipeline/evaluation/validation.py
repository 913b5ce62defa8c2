"""A quick look inside a stage, every `eval_steps` steps: success, and what has been left behind.

Success is that of one sampled trial of validation tasks of every domain. How far the policy has
moved on what it had learned is a divergence: at the end of each stage it plays a few validation
tasks of the stage's domains, and on these tokens, which stay as they are, later validations
estimate KL(policy at that stage's end || policy now), per token. Nothing is sampled for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from pipeline.collect import stop_on_errors
from pipeline.data.curriculum import Stage, on_plateau
from pipeline.data.tasks import Task, shard_tasks
from pipeline.evaluation.error_rates import ErrorShares
from pipeline.evaluation.evaluate import evaluate, failed_trials
from pipeline.evaluation.transfer_metrics import is_graded, succeeded
from pipeline.files.durable import write_text
from pipeline.grpo.micro_batches import cuts, micro_batch
from pipeline.rollout.trajectory import RunRecord, StopReason, Trajectory
from pipeline.session import Run

ANCHORS = "anchors"  # folder of the run; a file for each stage that is over
KEPT = ("domain", "task_id", "trial", "prompt_ids", "completion_ids", "loss_mask", "logprobs")


def validate_when_due(run: Run, stage: Stage) -> None:
    """Validate, unless this step was before."""
    every, step = run.config.evaluation.eval_steps, run.state.step
    if not every or step % every or run.state.validated(step):
        return
    begun = time.perf_counter()
    tasks = [task for tasks in run.parts.validation.values() for task in tasks]
    with run.ranks.phase("validate", stage.name, step):
        records, trajectories = evaluate(run.rollout, tasks, 1, run.config.run.seed, run.ranks)
        kl = divergences(run)
    rewards, threshold = scored(records), run.config.evaluation.success_threshold
    keys = {"stage": stage.name, "step": step}
    run.state.validations.append({**keys, "success": rewards, "kl": kl})
    metrics = {f"validation/{d}/success": share(of, threshold) for d, of in rewards.items()}
    for domain, of in rewards.items():
        if is_graded(of.values()):
            metrics[f"validation/{domain}/reward"] = fmean(of.values())
    metrics |= {f"validation/{domain}/kl": value for domain, value in kl.items()}
    run.log.metrics({"kind": "validation", **keys, **metrics})
    seconds = {"perf/validation_s": time.perf_counter() - begun}
    run.log.timings({"kind": "validation", **keys, **seconds})
    stop_on_errors(run, ErrorShares.of(records), trajectories, "in a validation")


def scored(records: Sequence[RunRecord]) -> dict[str, dict[str, float]]:
    """Rewards by domain and task, of the domains all of whose trials could be played."""
    failed = {record.domain for record in failed_trials(records)}
    found: dict[str, dict[str, float]] = {}
    for record in records:
        if record.domain not in failed:
            found.setdefault(record.domain, {})[record.task_id] = record.reward
    return found


def share(rewards: Mapping[str, float], threshold: float) -> float:
    """Of tasks whose reward is a success."""
    return fmean(succeeded(reward, threshold) for reward in rewards.values())


def ends_early(run: Run, stage: Stage) -> bool:
    """Whether validations say that the stage is on a plateau, which the state then remembers.

    Decided on records of all ranks, so that all decide alike, and after a resume again.
    """
    settings, threshold = run.config.curriculum, run.config.evaluation.success_threshold
    history = [
        fmean(share(v["success"][d], threshold) for d in stage.own)
        for v in run.state.validations
        if v["step"] >= stage.first_step and set(stage.own) <= set(v["success"])
    ]
    if not on_plateau(history, settings.plateau_patience, settings.plateau_delta):
        return False
    done = run.state.step - stage.first_step
    run.state.ended_early[stage.name] = done
    if run.ranks.is_main:
        print(
            f"stage {stage.name} ends after {done} of {stage.num_steps} steps: "
            f"{settings.plateau_patience} validations without {settings.plateau_delta:g} more "
            f"success (best {max(history):.2f})",
            flush=True,
        )
    return True


def keep_anchors(run: Run, stage: Stage) -> None:
    """At a stage's end, play what later validations compare with; all ranks keep all of it."""
    if not _wants_anchors(run) or stage.index + 1 == len(run.stages):
        return
    count = run.config.evaluation.anchor_tasks
    tasks: list[Task] = []
    for domain in stage.own:
        tasks += run.parts.validation[domain][:count]
    with run.ranks.phase("validate", stage.name, run.state.step):
        _, mine = evaluate(run.rollout, tasks, 1, run.config.run.seed, run.ranks)
        rows = [{name: getattr(t, name) for name in KEPT} for t in mine if t.num_sampled_tokens]
        gathered = run.ranks.all_gather_objects(rows, "anchors")
    found = {(row["domain"], row["task_id"]): row for rows in gathered for row in rows}
    ordered = [found[task.key] for task in tasks if task.key in found]
    if run.ranks.is_main:
        (run.folder / ANCHORS).mkdir(exist_ok=True)
        write_text(_file(run, stage), json.dumps(ordered))
    run.ranks.barrier("anchors")
    run.anchors |= _by_domain(ordered)


def _wants_anchors(run: Run) -> bool:
    settings = run.config.evaluation
    return settings.anchor_tasks > 0 and settings.eval_steps > 0


def load_anchors(run: Run) -> None:
    """After a resume, read those of the stages that are over."""
    for stage in run.stages[:-1]:
        if not (run.state.evaluated(stage.name) and _wants_anchors(run)):
            continue
        if _file(run, stage).is_file():
            run.anchors |= _by_domain(json.loads(_file(run, stage).read_text(encoding="utf-8")))
        elif run.ranks.is_main:
            print(f"warning: {_file(run, stage)} is gone, so there is no KL of {stage.name}")


def _file(run: Run, stage: Stage) -> Path:
    return run.folder / ANCHORS / f"{stage.name}.json"


def _by_domain(rows: Sequence[dict[str, Any]]) -> dict[str, list[Trajectory]]:
    unknown: dict[str, Any] = {"family": "", "branch": "", "reward": 0.0, "num_turns": 0}
    found: dict[str, list[Trajectory]] = {}
    for row in rows:
        trajectory = Trajectory(**row, **unknown, stop_reason=StopReason.COMPLETED)
        found.setdefault(trajectory.domain, []).append(trajectory)
    return found


def divergences(run: Run) -> dict[str, float]:
    """KL per token of each domain that has anchors; k3 of Schulman 2020, as in the loss.

    Each rank computes every num_ranks-th anchor; sums are in the order of anchors.
    """
    anchors = [t for trajectories in run.anchors.values() for t in trajectories]
    if not anchors:
        return {}
    mine = shard_tasks(len(anchors), run.ranks.rank, run.ranks.num_ranks)
    shards = run.ranks.all_gather_numbers(_sums(run, [anchors[i] for i in mine]))
    sums = [0.0] * len(anchors)
    for rank, shard in enumerate(shards):
        for i, value in zip(shard_tasks(len(anchors), rank, len(shards)), shard, strict=True):
            sums[i] = value
    found = {}
    for domain in run.anchors:
        of = [i for i, t in enumerate(anchors) if t.domain == domain]
        num_tokens = sum(anchors[i].num_sampled_tokens for i in of)
        found[domain] = sum(sums[i] for i in of) / num_tokens
    return found


@torch.no_grad()
def _sums(run: Run, trajectories: Sequence[Trajectory]) -> list[float]:
    """The divergence of each episode, added up over its sampled tokens."""
    assert run.updater is not None
    order = sorted(range(len(trajectories)), key=lambda i: -trajectories[i].num_tokens)
    lengths = [trajectories[i].num_tokens for i in order]
    # Alone, the shapes of a forward pass do not depend on the number of ranks.
    budget = 1 if run.config.run.deterministic else run.updater.max_tokens_per_microbatch
    ends, found = cuts(lengths, budget, padding_free=False), [0.0] * len(order)
    for first, last in zip([0, *ends], ends, strict=False):
        places = order[first:last]
        batch = micro_batch([(trajectories[i], 0.0, 0.0) for i in places], run.updater.pad_id)
        batch = batch.to(run.accelerator.device)
        with run.accelerator.autocast():
            logprobs, _ = run.updater.module(batch)
        ratio = (logprobs - batch.old_logprobs).double()
        terms = (torch.expm1(ratio) - ratio).cpu()  # where adding them has one order
        sums = terms.new_zeros(len(places)).index_add(0, batch.sequences.cpu(), terms)
        for place, value in zip(places, sums.tolist(), strict=True):
            found[place] = value
    return found
