"""The files of a run folder as values, for reports and plots. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from pipeline.config.former import read_metrics, translated
from pipeline.errors import UserError
from pipeline.evaluation.transfer import BEFORE_GRPO, summary, threshold_of

Evaluation = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The content of a run folder; a run that was interrupted has less."""

    folder: Path
    config: dict[str, Any]
    results: dict[str, Any]
    stages: list[dict[str, Any]]  # as in curriculum.json, those with training steps
    replay: float
    train: list[dict[str, Any]]  # lines of metrics.jsonl, in order of steps
    validation: list[dict[str, Any]]
    timings: list[dict[str, Any]]  # lines of timings.jsonl of training steps
    transfer: dict[str, Any]  # `transfer.summary`; empty without evaluations

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return list(self.results["evaluations"])

    @property
    def domains(self) -> list[str]:
        return domains_of(self.evaluations) or list(self.config["data"]["domains"])

    @property
    def points(self) -> list[str]:
        """Names of the evaluations behind the transfer numbers."""
        return [after_name(after) for after in self.transfer.get("points", [])]

    @property
    def step_s(self) -> list[float]:
        return [record["perf/step_s"] for record in self.timings if "perf/step_s" in record]

    @property
    def success_threshold(self) -> float:
        """The reward from which a trial is a success."""
        return threshold_of([self.results])

    def is_graded(self, domain: str) -> bool:
        """Whether the domain's rewards are not all 0 or 1."""
        means = [record.get(f"reward/{domain}") for record in self.train]
        outside = any(mean is not None and not 0 <= mean <= 1 for mean in means)
        return outside or domain in self.transfer.get("rewards", {})

    def of_stage(self, stage: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [record for record in self.train if record["stage"] == stage["name"]]


def load_run(folder: Path) -> RunData:
    """Read a run folder; UserError if it holds no run."""
    if not (folder / "config.yaml").is_file():
        raise UserError(f"report: {folder} holds no run (no config.yaml); give a run folder")
    curriculum = _read_json(folder / "curriculum.json", stages=[], replay=0.0)
    results = _read_json(folder / "results.json", evaluations=[])
    results.setdefault("baselines", results.get("floors", {}))  # their name in earlier versions
    metrics, timings = read_metrics(folder)
    train = _of_training(metrics)
    trained = {record["stage"] for record in train}
    return RunData(
        folder=folder,
        config=translated(yaml.safe_load((folder / "config.yaml").read_text("utf-8"))),
        results=results,
        stages=[stage for stage in curriculum["stages"] if stage["name"] in trained],
        replay=curriculum["replay"],
        train=train,
        validation=[record for record in metrics if record["kind"] == "validation"],
        timings=_of_training(timings),
        transfer=results.get("transfer") or _transfer(results),
    )


def _read_json(path: Path, **missing: Any) -> dict[str, Any]:
    try:
        return {**missing, **(json.loads(path.read_text("utf-8")) if path.is_file() else {})}
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"report: {path} is not what a run writes; restore it") from None


def _of_training(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last line of each training step, in order of steps."""
    lines = {record["step"]: record for record in records if record["kind"] == "train"}
    return [lines[step] for step in sorted(lines)]


def _transfer(results: dict[str, Any]) -> dict[str, Any]:
    """The transfer numbers, if the results hold the rewards of each trial and the stages."""
    successes = [of for e in results["evaluations"] for of in e["success"].values()]
    rewards = [task for of in successes for task in of.get("tasks", {"": None}).values()]
    per_trial = all(isinstance(task, list) for task in rewards)
    return summary([results]) if successes and per_trial and "curriculum" in results else {}


def transcripts_in(folder: Path) -> dict[tuple[str, int], list[Path]]:
    """Transcripts of all ranks by stage or `evaluation-<after>`, and step, in order of time."""
    files: dict[tuple[str, int], list[Path]] = {}
    for path in sorted((folder / "trajectories").glob("*/step-*.jsonl.gz")):
        step = int(path.name.split(".")[0].removeprefix("step-"))
        files.setdefault((path.parent.name, step), []).append(path)

    def order(key: tuple[str, int]) -> tuple[int, int]:
        after = key[0].removeprefix("evaluation-")
        is_before = after in BEFORE_GRPO
        return (-1, BEFORE_GRPO.index(after)) if is_before else (key[1], int(key[0] != after))

    return {key: files[key] for key in sorted(files, key=order)}


def domains_of(evaluations: Iterable[Evaluation]) -> list[str]:
    return list(dict.fromkeys(domain for e in evaluations for domain in e["success"]))


def before_and_after(
    evaluations: Sequence[Evaluation],
) -> tuple[Evaluation | None, Evaluation | None]:
    """The last evaluation before GRPO and the last one after it began, if there are any."""
    before = [e for e in evaluations if e["after"] in BEFORE_GRPO]
    after = [e for e in evaluations if e["after"] not in BEFORE_GRPO]
    return before[-1] if before else None, after[-1] if after else None


def rate(evaluation: Evaluation | None, domain: str, kind: str) -> float | None:
    """Success of a domain, or of all (`mean`); `kind` is `mean` (sampled) or `greedy`."""
    success = evaluation["success"] if evaluation else {}
    if domain == "mean":
        return fmean(of[kind] for of in success.values()) if success else None
    return success[domain][kind] if domain in success else None


def after_name(after: str) -> str:
    names = {"start": "at the start", "warm_start": "after the warm start"}
    return names.get(after, f"after {after}")


def number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"
