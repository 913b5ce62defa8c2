"""`results.json`: the results of a run, written from the data in the checkpoints."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.checkpoints.checkpoint import TrainState
from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage, describe
from pipeline.data.tasks import Task
from pipeline.evaluation.evaluate import grouped, tool_counts
from pipeline.evaluation.transfer import summary
from pipeline.evaluation.worse import worse
from pipeline.files.console import command, may_fail
from pipeline.files.durable import write_text
from pipeline.rollout.trajectory import RunRecord, StopReason


def write_results(
    folder: Path,
    config: Config,
    state: TrainState,
    stages: Sequence[Stage],
    held_out: Mapping[str, Sequence[Task]],
    facts: Mapping[str, Any],
    is_final: bool,
) -> None:
    """Write `curriculum.json` and `results.json`; `results.json` also gets the entries of `facts`.

    Transfer numbers are computed only if `is_final`, because the computation takes seconds.
    """
    described = describe(stages, config)
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


def training_summary(gathered: Sequence[Sequence[RunRecord]]) -> dict[str, Any]:
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
        "tools": {d: tool_counts(of) for d, of in grouped(records, "domain").items()},
    }
