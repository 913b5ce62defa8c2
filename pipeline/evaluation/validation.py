"""Validation inside a stage, every `eval_steps` steps: one sampled trial of validation tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage, on_plateau
from pipeline.evaluation.evaluate import failed_trials
from pipeline.evaluation.transfer_metrics import is_graded, succeeded
from pipeline.rollout.trajectory import RunRecord


def scored(records: Sequence[RunRecord]) -> dict[str, dict[str, float]]:
    """Rewards by domain and task, without domains in which the environment of a trial failed."""
    failed = {record.domain for record in failed_trials(records)}
    rewards: dict[str, dict[str, float]] = {}
    for record in records:
        if record.domain not in failed:
            rewards.setdefault(record.domain, {})[record.task_id] = record.reward
    return rewards


def _success(rewards: Mapping[str, float], threshold: float) -> float:
    return fmean(succeeded(reward, threshold) for reward in rewards.values())


def validation_metrics(
    rewards: Mapping[str, Mapping[str, float]], kl: Mapping[str, float], threshold: float
) -> dict[str, float]:
    """The metrics of a validation."""
    metrics = {f"validation/{d}/success": _success(of, threshold) for d, of in rewards.items()}
    for domain, of in rewards.items():
        if is_graded(of.values()):
            metrics[f"validation/{domain}/reward"] = fmean(of.values())
    return metrics | {f"validation/{domain}/kl": value for domain, value in kl.items()}


def plateau(validations: Sequence[Mapping[str, Any]], stage: Stage, config: Config) -> float | None:
    """The best success of the stage if it is on a plateau, else None.

    It depends on records of all ranks only, so all ranks get the same, also after a resume.
    """
    settings, threshold = config.curriculum, config.evaluation.success_threshold
    history = [
        fmean(_success(v["success"][d], threshold) for d in stage.own)
        for v in validations
        if v["step"] >= stage.first_step and set(stage.own) <= set(v["success"])
    ]
    is_on = on_plateau(history, settings.plateau_patience, settings.plateau_delta)
    return max(history) if is_on else None
