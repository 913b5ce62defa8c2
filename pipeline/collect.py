"""Evaluations, records and checkpoints: what the ranks bring together and rank 0 writes."""

from __future__ import annotations

import gzip
import json
import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.manifest import prune
from pipeline.checkpoints.run_folder import check_still_there
from pipeline.data.curriculum import Stage, describe
from pipeline.distributed.gradients import whole_state
from pipeline.errors import INTERRUPTED, SHUTDOWN_TIMEOUT, UserError
from pipeline.evaluation import error_rates as error_shares
from pipeline.evaluation.baselines import floors
from pipeline.evaluation.error_rates import ErrorShares
from pipeline.evaluation.evaluate import ATTEMPTS, evaluate, failed_trials, success
from pipeline.evaluation.transfer import summary
from pipeline.files.afterwards import may_fail
from pipeline.files.durable import sync, write_text
from pipeline.files.untrusted import reason_of
from pipeline.report import write as report
from pipeline.rollout.trajectory import RunRecord, StopReason, Trajectory
from pipeline.session import Run


def stop_on_errors(
    run: Run,
    errors: ErrorShares,
    trajectories: Sequence[Trajectory] = (),
    when: str = "since the stage began",
) -> None:
    """Raise RuntimeError, on every rank, where a domain's environment fails too often."""
    errors.remember(trajectories)
    limits = run.config.rollout
    error_shares.stop_on_errors(
        run.ranks, errors, limits.max_error_share, 2 * limits.num_generations, when
    )


def evaluate_and_record(run: Run, after: str) -> None:
    """Evaluate all domains on held-out tasks, sampled and greedy, and write `results.json` anew."""
    begun = time.perf_counter()
    trials, seed = run.config.evaluation.eval_trials, run.config.run.seed
    tasks = [task for tasks in run.parts.held_out.values() for task in tasks]
    with run.ranks.phase("evaluate", run.state.stage, run.state.step):
        sampled, trajectories = evaluate(run.rollout, tasks, trials, seed, run.ranks)
        greedy, _ = evaluate(run.rollout, tasks, 1, seed, run.ranks, greedy=True)
    when = f"in the evaluation after {after}"
    if failed_trials([*sampled, *greedy]):
        _save_steps(run)
    stop_on_errors(run, ErrorShares.of(sampled), trajectories, when)
    _refuse_failed_trials([*sampled, *greedy], when)
    rates = success(sampled, greedy, trials, run.config.evaluation.success_threshold)
    run.state.evaluations.append({"after": after, "step": run.state.step, "success": rates})
    metrics = {f"eval/{d}/success": rate["mean"] for d, rate in rates.items()}
    metrics |= {f"eval/{d}/greedy": rate["greedy"] for d, rate in rates.items()}
    for name in ("reward", "greedy_reward"):
        metrics |= {f"eval/{d}/{name}": rate[name] for d, rate in rates.items() if name in rate}
    keys = {"kind": "eval", "after": after, "stage": run.state.stage, "step": run.state.step}
    run.log.metrics({**keys, **metrics})
    run.log.timings({**keys, "perf/evaluation_s": time.perf_counter() - begun})
    save_trajectories(run, f"evaluation-{after}", trajectories)
    if run.ranks.is_main:
        shown = [
            f"{d} {r['mean']:.2f}" + (f" (mean reward {r['reward']:.4g})" if "reward" in r else "")
            for d, r in rates.items()
        ]
        print(f"evaluation after {after}: success sampled  {'  '.join(shown)}", flush=True)
        write_results(run)


def _save_steps(run: Run) -> None:
    """Save what was trained, before a run stops that cannot be evaluated."""
    if run.updater is not None and run.saved != run.position:
        save_checkpoint(run, f"step-{run.state.step:06d}")


def _refuse_failed_trials(records: Sequence[RunRecord], when: str) -> None:
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


def write_results(run: Run) -> None:
    """Write `results.json` and `curriculum.json`; a checkpoint holds what they are made from."""
    again = f"--output-dir {run.folder} --resume-from-checkpoint latest writes them again"
    with may_fail("results.json", again):
        _write_results(run)


def _write_results(run: Run) -> None:
    stages = describe(run.stages, run.config)
    write_text(run.folder / "curriculum.json", json.dumps(stages, indent=1))
    results = {
        "recipe": run.config.recipe,
        "seed": run.config.run.seed,
        "num_ranks": run.ranks.num_ranks,
        "split": run.config.data.eval_split,
        "temperature": run.config.rollout.temperature,
        "success_threshold": run.config.evaluation.success_threshold,
        "evaluations": run.state.evaluations,
        "validations": run.state.validations,
        "task_families": {
            d: {task.id: task.family for task in tasks} for d, tasks in run.parts.held_out.items()
        },
        "floors": floors(run.parts.domains, run.parts.held_out, run.config.rollout.call_timeout),
        "faults": _faults(run),
        "training": run.state.training,
        "curriculum": stages,
        "wall_s": run.wall_s,
    }
    results["transfer"] = {}
    with may_fail("transfer numbers", f"python -m pipeline.report {run.folder} tries again"):
        results["transfer"] = summary([results])
    write_text(run.folder / "results.json", json.dumps(results))


def _faults(run: Run) -> dict[str, int]:
    """What went wrong in training and was dealt with; empty where nothing did."""
    updater = run.updater
    if updater is None:
        return {}
    found = {"skipped_steps": updater.num_skipped}
    if updater.max_tokens_per_microbatch != run.config.grpo.max_tokens_per_microbatch:
        found["max_tokens_per_microbatch"] = updater.max_tokens_per_microbatch
    return {name: count for name, count in found.items() if count}


def save_trajectories(
    run: Run,
    name: str,
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float] | None = None,
) -> None:
    """This rank's transcripts of a step, one JSON object per episode.

    `ids` and `logprobs` are those of the sampled tokens, a list for each assistant message.
    """
    check_still_there(run.folder, run.lock)
    folder = run.folder / "trajectories" / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{run.state.step:06d}.rank-{run.ranks.rank}.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        for i, trajectory in enumerate(trajectories):
            turns = trajectory.sampled_turns()
            row = {
                **trajectory.record().as_dict(),
                "error": trajectory.error,
                "messages": trajectory.messages,
                "advantage": None if advantages is None else round(advantages[i], 4),
                "reward_breakdown": trajectory.reward_breakdown,
                "difference": trajectory.difference,
                "ids": [ids for ids, _ in turns],
                "logprobs": [[round(number, 3) for number in numbers] for _, numbers in turns],
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    run.unsynced.append(path)


def resume_counts(run: Run, stage: Stage) -> None:
    """Count the stage's episodes from where it stands: its start, or what a checkpoint holds."""
    begun = run.state.step > stage.first_step
    run.errors = ErrorShares.from_dict(run.state.error_counts if begun else {})
    run.records = _earlier_records(run, stage) if begun else []


def _earlier_records(run: Run, stage: Stage) -> list[RunRecord]:
    """This rank's share of the stage's records from before a resume, read from the transcripts."""
    paths = sorted((run.folder / "trajectories" / stage.name).glob("step-*.jsonl.gz"))
    records = []
    for path in paths:
        rank = int(path.name.split(".")[1].removeprefix("rank-"))
        if rank % run.ranks.num_ranks == run.ranks.rank:
            records += _records_in(path)
    return records


def _records_in(path: Path) -> list[RunRecord]:
    """Of transcripts that may be of an earlier version, which left some of a record out."""
    names = {field.name for field in fields(RunRecord)}
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line).items() for line in file]
        return [RunRecord(**{name: of for name, of in row if name in names}) for row in rows]
    except (OSError, EOFError, ValueError, TypeError, AttributeError, zlib.error) as error:
        raise UserError(
            f"resume_from_checkpoint: {path} cannot be read as transcripts ({reason_of(error)}); "
            "restore it, or start anew"
        ) from None


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
        "reward": {d: fmean(of) for d, of in _rewards(records).items()},
        "stop_reasons": {reason: count for reason, count in stops.items() if count},
        "tools": _tool_counts(records),
    }


def _rewards(records: Sequence[RunRecord]) -> dict[str, list[float]]:
    """By domain, of episodes that are not left out."""
    found: dict[str, list[float]] = {}
    for record in records:
        if not record.left_out:
            found.setdefault(record.domain, []).append(record.reward)
    return found


def _tool_counts(records: Sequence[RunRecord]) -> dict[str, dict[str, list[int]]]:
    """By domain and tool: calls, and those answered with an error."""
    found: dict[str, dict[str, list[int]]] = {}
    for record in records:
        of_domain = found.setdefault(record.domain, {})
        for name, counts in record.tools.items():
            sums = of_domain.setdefault(name, [0, 0])
            sums[:] = [a + b for a, b in zip(sums, counts, strict=True)]
    return found


def save_when_due(run: Run, stage: Stage) -> None:
    """Save every `save_steps` steps, and after `save_minutes` by the clock of rank 0."""
    settings, step = run.config.run, run.state.step
    due = settings.save_steps > 0 and step % settings.save_steps == 0
    if settings.save_minutes is not None:
        late = run.ranks.is_main and time.perf_counter() - run.saved_at > 60 * settings.save_minutes
        due = run.ranks.max(float(due or late)) > 0
    if due:
        save_checkpoint(run, f"step-{step:06d}")


def save_checkpoint(run: Run, name: str) -> None:
    """Compare parameters over the ranks; rank 0 writes, all wait."""
    begun = time.perf_counter()
    with run.ranks.phase("checkpoint", run.state.stage, run.state.step):
        check_still_there(run.folder, run.lock)
        for path in run.unsynced:
            sync(path)
        run.unsynced = []
        run.ranks.check_same_parameters(run.model.named_parameters(), f"at checkpoint {name}")
        updater = run.updater
        optimizer = None if updater is None else whole_state(updater.optimizer, run.ranks.rank)
        if run.ranks.is_main:
            _take_stock(run)
            folder = run.folder / "checkpoints"
            path = checkpoint.save(
                folder, name, run.model, run.parts.tokenizer, run.state, optimizer
            )
            prune(folder, run.config.run.save_total_limit, path)
        run.ranks.barrier(f"checkpoint {name}")
    run.saved, run.saved_at, run.watchdog.can_resume = run.position, time.perf_counter(), True
    save_s = run.saved_at - begun
    keys = {"kind": "checkpoint", "stage": run.state.stage, "step": run.state.step}
    run.log.timings({**keys, "perf/checkpoint_s": save_s})
    _warn_of_slow_save(run, save_s)


def _take_stock(run: Run) -> None:
    """Bring the state up to date with what counts and writes elsewhere."""
    state, updater = run.state, run.updater
    state.sizes, state.tracker_run_id = run.log.sizes(), run.log.tracker_run_id
    state.wall_s, run.begun = run.wall_s, time.perf_counter()
    state.error_counts = run.errors.as_dict()
    if updater is not None:
        budget, wanted = updater.max_tokens_per_microbatch, run.config.grpo
        smaller = budget != wanted.max_tokens_per_microbatch
        state.max_tokens_per_microbatch = budget if smaller else None
        state.num_skipped_steps = updater.num_skipped
        state.num_skipped_in_a_row = updater.num_skipped_in_a_row


def _warn_of_slow_save(run: Run, save_s: float) -> None:
    """Once, where the launcher would end the ranks before a save that a signal asks for is done."""
    given_s = float(os.environ.get(SHUTDOWN_TIMEOUT, 30))
    under_launcher = "TORCHELASTIC_RUN_ID" in os.environ
    if run.ranks.is_main and under_launcher and save_s > given_s and not run.warned_of_slow_save:
        run.warned_of_slow_save = True
        print(
            f"warning: a checkpoint took {save_s:.0f} s, but the launcher ends ranks "
            f"{given_s:.0f} s after SIGTERM; set {SHUTDOWN_TIMEOUT}={2 * save_s:.0f} for it",
            flush=True,
        )


def stop(run: Run) -> int:
    """Save where the run stands, unless a checkpoint holds that; returns the exit code."""
    begun = run.state.stage != "start"
    if begun and run.saved != run.position:
        save_checkpoint(run, f"step-{run.state.step:06d}")
    if not run.watchdog.can_resume:
        if run.ranks.is_main:
            print("interrupted before the first checkpoint; start again", flush=True)
        return 1
    if run.ranks.is_main:
        print(
            f"interrupted after {run.state.step} steps; go on with --output-dir {run.folder} "
            "--resume-from-checkpoint latest",
            flush=True,
        )
    return INTERRUPTED


def finish(run: Run) -> None:
    """Rank 0 writes the results and the report and prints the table."""
    if run.ranks.is_main:
        write_results(run)
        with may_fail("report", f"python -m pipeline.report {run.folder} makes it again"):
            report.write_report(run.folder)
        run.log.finish_with(run.folder)
        with may_fail("table", f"python -m pipeline.report {run.folder} has it"):
            results = json.loads((run.folder / "results.json").read_text(encoding="utf-8"))
            print(report.final_table(results))
        print(f"report, plots and checkpoints: {run.folder}")
    run.ranks.barrier("end")
