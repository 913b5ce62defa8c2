"""Evaluations, records and checkpoints: what the ranks bring together and rank 0 writes."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Sequence

from pipeline import checkpoint, report
from pipeline.curriculum import Stage
from pipeline.distributed import whole_state
from pipeline.evaluate import evaluate, floors, success
from pipeline.session import Run, curriculum
from pipeline.trajectory import StopReason, Trajectory


def validate_when_due(run: Run, stage: Stage) -> None:
    """A quick look at validation tasks inside a stage."""
    every, step = run.config.evaluation.eval_steps, run.state.step
    if not every or step % every:
        return
    tasks = [task for tasks in run.parts.validation.values() for task in tasks]
    records, _ = evaluate(run.rollout, tasks, 1, run.config.run.seed, run.ranks)
    rates = success(records, records, 1)
    metrics = {f"validation/{domain}/success": rates[domain]["mean"] for domain in rates}
    run.log.metrics({"kind": "validation", "stage": stage.name, "step": step, **metrics})


def evaluate_and_record(run: Run, after: str) -> None:
    """Evaluate all domains on held-out tasks, sampled and greedy, and write `results.json` anew."""
    begun = time.perf_counter()
    trials, seed = run.config.evaluation.eval_trials, run.config.run.seed
    tasks = [task for tasks in run.parts.held_out.values() for task in tasks]
    with run.ranks.phase("evaluate", run.state.stage, run.state.step):
        sampled, trajectories = evaluate(run.rollout, tasks, trials, seed, run.ranks)
        greedy, _ = evaluate(run.rollout, tasks, 1, seed, run.ranks, greedy=True)
    rates = success(sampled, greedy, trials)
    run.state.evaluations.append({"after": after, "step": run.state.step, "success": rates})
    metrics = {f"eval/{d}/success": rate["mean"] for d, rate in rates.items()}
    metrics |= {f"eval/{d}/greedy": rate["greedy"] for d, rate in rates.items()}
    keys = {"kind": "eval", "after": after, "stage": run.state.stage, "step": run.state.step}
    run.log.metrics({**keys, **metrics})
    run.log.timings({**keys, "perf/evaluation_s": time.perf_counter() - begun})
    save_trajectories(run, f"evaluation-{after}", trajectories)
    if run.ranks.is_main:
        shown = "  ".join(f"{d} {r['mean']:.2f}" for d, r in rates.items())
        print(f"evaluation after {after}: success sampled  {shown}", flush=True)
        write_results(run)


def write_results(run: Run) -> None:
    results = {
        "recipe": run.config.recipe,
        "seed": run.config.run.seed,
        "num_ranks": run.ranks.num_ranks,
        "split": run.config.data.eval_split,
        "temperature": run.config.rollout.temperature,
        "evaluations": run.state.evaluations,
        "floors": floors(run.parts.environments, run.parts.held_out),
        "training": run.state.training,
        "curriculum": curriculum(run.config, run.parts),
        "wall_s": time.perf_counter() - run.started,
    }
    checkpoint.write_text(run.folder / "results.json", json.dumps(results, indent=1))


def save_trajectories(run: Run, name: str, trajectories: Sequence[Trajectory]) -> None:
    """This rank's transcripts of a step, one JSON object per episode."""
    folder = run.folder / "trajectories" / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{run.state.step:06d}.rank-{run.ranks.rank}.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        for trajectory in trajectories:
            row = {
                **trajectory.record().as_dict(),
                "error": trajectory.error,
                "messages": trajectory.messages,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def collect_records(run: Run, stage: Stage) -> None:
    """Bring one record per training episode of the stage to rank 0, which keeps their summary."""
    gathered = run.ranks.all_gather_objects(run.records, f"records of stage {stage.name}")
    records = [record for shard in gathered for record in shard]
    run.records = []
    if not records:
        return
    stops = {str(r): sum(record.stop_reason == r for record in records) for r in StopReason}
    run.state.training[stage.name] = {
        "episodes": len(records),
        "episodes_per_rank": [len(shard) for shard in gathered],
        "reward": {
            d: sum(r.reward for r in records if r.domain == d) / sum(r.domain == d for r in records)
            for d in dict.fromkeys(record.domain for record in records)
        },
        "stop_reasons": {reason: count for reason, count in stops.items() if count},
    }


def save_when_due(run: Run, stage: Stage) -> None:
    every, step = run.config.run.save_steps, run.state.step
    if every and step % every == 0 and step != stage.last_step:
        save_checkpoint(run, f"step-{step:06d}")
        if run.ranks.is_main:
            checkpoint.prune(run.folder / "checkpoints", run.config.run.save_total_limit)


def save_checkpoint(run: Run, name: str) -> None:
    """Compare parameters over the ranks; rank 0 writes, all wait."""
    with run.ranks.phase("checkpoint", run.state.stage, run.state.step):
        run.ranks.check_same_parameters(run.model.named_parameters(), f"at checkpoint {name}")
        updater = run.updater
        optimizer = None if updater is None else whole_state(updater.optimizer, run.ranks.rank)
        if run.ranks.is_main:
            folder = run.folder / "checkpoints"
            checkpoint.save(folder, name, run.model, run.parts.tokenizer, run.state, optimizer)
        run.ranks.barrier(f"checkpoint {name}")


def finish(run: Run) -> None:
    """Rank 0 writes the results and the report and prints the table."""
    if run.ranks.is_main:
        write_results(run)
        report.write_report(run.folder)
        results = json.loads((run.folder / "results.json").read_text(encoding="utf-8"))
        print(report.final_table(results))
        print(f"report, plots and checkpoints: {run.folder}")
    run.ranks.barrier("end")
