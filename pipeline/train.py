"""The run: evaluate, warm-start, then train stage by stage.

A stage is the loop of rollouts and updates, with an evaluation after it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import torch

from pipeline.checkpoints.run_folder import machine_fault
from pipeline.collect import (
    collect_records,
    evaluate_and_record,
    finish,
    resume_counts,
    save_checkpoint,
    save_trajectories,
    save_when_due,
    stop,
    stop_on_errors,
)
from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage
from pipeline.data.rng import permutation
from pipeline.distributed.ranks import Interrupted
from pipeline.distributed.watchdog import Watchdog
from pipeline.evaluation.validation import ends_early, keep_anchors, load_anchors, validate_when_due
from pipeline.grpo.algorithm import dead_groups, group_advantages, in_baseline
from pipeline.grpo.dynamic_sampling import PlayedStep, left_out, play_step
from pipeline.grpo.updater import learning_rate_at
from pipeline.learner import make_updater, start_stage
from pipeline.models.loading import load_folder
from pipeline.models.rotary import fix_rotary
from pipeline.rollout.trajectory import Trajectory
from pipeline.session import Run, connect, start
from pipeline.sft import warm_start
from pipeline.tracking.profiling import Timer, profiled
from pipeline.tracking.progress import StageProgress
from pipeline.tracking.step_metrics import over_iterations, rollout_metrics, warn_of_gap


def main(config: Config) -> int:
    """Run on this rank, which was launched together with the others; returns the exit code."""
    accelerator, ranks = connect(config)
    with Watchdog(ranks, config.run.timeout) as watchdog:
        run = start(config, accelerator, ranks, watchdog)
        with run.log:
            try:
                code = _whole(run)
            except Exception as error:
                if (fault := machine_fault(error, run.folder, run.lock)) is None:
                    raise
                raise fault from None
        if code == 0:
            accelerator.end_training()
    return code


def _whole(run: Run) -> int:
    """All of a run, or up to where it is told to stop; returns the exit code."""
    try:
        before_training(run)
        if run.config.grpo.use_grpo:
            train(run)
        finish(run)
    except Interrupted:
        return stop(run)
    return 0


def train(run: Run) -> None:
    """The loop: for each stage, for each optimizer step."""
    run.updater = make_updater(run)
    load_anchors(run)
    gc.freeze()  # what is there now stays: no collection need go through it again
    for index in range(len(run.parts.stages)):
        stage = run.stages[index]  # which begins where the one before it ended
        if run.state.evaluated(stage.name):
            continue
        first = max(stage.first_step, run.state.step)
        done, is_main = first - stage.first_step, run.ranks.is_main
        start_stage(run, stage)
        resume_counts(run, stage)
        validate_when_due(run, stage)  # it may be what was interrupted
        with StageProgress(stage.name, stage.num_steps, is_main=is_main, done=done) as progress:
            for step in range(first, stage.last_step):
                if ends_early(run, stage):
                    break
                with profiled(run, step + 1), Timer(run) as timer:
                    played = play_step(run, stage, step)
                    advantages, kept = advantages_of(run, played, rewards_of(run, played, step))
                    statistics = update(run, stage, played.trajectories, advantages, kept)
                run.state.step, run.state.stage = step + 1, stage.name
                metrics = {**statistics, **rollout_metrics(run, played, run.errors)}
                keys = {"kind": "train", "stage": stage.name, "step": step + 1}
                run.log.metrics({**keys, **metrics})
                run.log.timings({**keys, **timer.timings(played)})
                progress.step(metrics)
                save_trajectories(run, stage.name, played.trajectories, advantages)
                stop_on_errors(run, run.errors)
                validate_when_due(run, stage)
                save_when_due(run, stage)
        collect_records(run, stage)
        keep_anchors(run, stage)
        evaluate_and_record(run, stage.name)
        save_checkpoint(run, f"stage-{stage.index + 1}-{stage.name}")


def before_training(run: Run) -> None:
    """Evaluate the model as it came, give it the warm start, evaluate again."""
    if not run.state.evaluated("start"):
        evaluate_and_record(run, "start")
    if not run.config.grpo.use_grpo or run.config.warm_start.steps == 0:
        return
    if run.state.stage == "start":
        give_warm_start(run)
    if not run.state.evaluated("warm_start"):
        evaluate_and_record(run, "warm_start")


def give_warm_start(run: Run) -> None:
    """Train on demonstrations, save the first checkpoint, and go on from it with a fresh model."""
    begun, parts, is_main = time.perf_counter(), run.parts, run.ranks.is_main
    num_steps = run.config.warm_start.steps
    progress = StageProgress("warm start", num_steps, is_main=is_main)
    with progress, run.ranks.phase("warm start"):
        loss = warm_start(
            run.config,
            run.model,
            parts.tokenizer,
            parts.chat,
            parts.domains,
            run.ranks.num_ranks,
            lambda: _warm_start_step(run, progress),
            run.ranks.alive,
        )
    keys = {"kind": "warm_start", "stage": "warm_start", "step": 0}
    run.log.timings({**keys, "perf/warm_start_s": time.perf_counter() - begun})
    run.log.metrics({**keys, "warm_start/loss": loss})
    run.state.stage = "warm_start"
    save_checkpoint(run, "warm-start")
    run.model = load_folder(run.folder / "checkpoints" / "warm-start", run.config.model)
    fix_rotary(run.model, run.config.rollout.max_tokens)
    run.model.to(run.accelerator.device)
    run.rollout.sampler.load_weights(run.model)
    gc.collect()  # the trainer's optimizer hangs in reference cycles
    if run.accelerator.device.type == "cuda":
        torch.cuda.empty_cache()


def _warm_start_step(run: Run, progress: StageProgress) -> None:
    progress.step({})
    run.ranks.alive()
    if run.ranks.stop_wanted:  # there is nothing to save before its end
        raise Interrupted


def rewards_of(run: Run, played: PlayedStep, step: int) -> torch.Tensor:
    """The rewards that train: the episodes' own; in the control, those of others of the step."""
    rewards = [trajectory.reward for trajectory in played.trajectories]
    if run.config.grpo.permute_rewards:
        rewards = permuted(run, played, rewards, step)
    return torch.tensor(rewards, dtype=torch.float64)


def advantages_of(
    run: Run, played: PlayedStep, rewards: torch.Tensor
) -> tuple[list[float], list[bool]]:
    """The advantage of each of this rank's episodes, and whether it is trained on."""
    settings, size = run.config.grpo, run.config.rollout.num_generations
    batch_std = None
    if settings.scale_rewards == "batch":
        batch_std = std_of_step(run, played, rewards)
    counted = in_baseline(left_out(played.trajectories), size)
    scale = settings.scale_rewards
    advantages = group_advantages(rewards, size, scale, batch_std, counted).tolist()
    scales = [settings.domain_advantage_scale.get(t.domain, 1.0) for t in played.trajectories]
    dead = dead_groups(rewards, size, counted)
    kept = (counted & ~dead if settings.drop_dead_groups else counted).tolist()
    return [a * scale for a, scale in zip(advantages, scales, strict=True)], kept


def update(
    run: Run,
    stage: Stage,
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    kept: Sequence[bool],
) -> dict[str, float]:
    """`num_iterations` optimizer updates; then the sampler gets the new weights."""
    assert run.updater is not None
    settings = run.config.grpo
    done, peak = run.state.step - stage.first_step, run.config.peak_learning_rate
    learning_rate = learning_rate_at(done, stage.num_steps, peak, settings)
    with run.ranks.phase("update", stage.name, run.state.step + 1):
        found = [
            run.updater.update_policy(trajectories, advantages, learning_rate, kept)
            for _ in range(settings.num_iterations)
        ]
        run.rollout.sampler.load_weights(run.model)
    statistics = over_iterations(found)
    warn_of_gap(run, statistics)
    return statistics


def permuted(run: Run, played: PlayedStep, rewards: Sequence[float], step: int) -> list[float]:
    """The rewards of all ranks' kept episodes, shuffled among these; other episodes keep theirs."""
    known = zip(played.places, rewards, played.kept, strict=True)
    mine = [number for place, reward, kept in known if kept for number in (place, reward)]
    run.ranks.barrier("control")
    shards = run.ranks.all_gather_numbers(mine)
    found = {p: r for shard in shards for p, r in zip(shard[::2], shard[1::2], strict=True)}
    places = sorted(found)
    order = permutation(len(places), run.config.run.seed, "permuted rewards", step)
    given = {place: found[places[i]] for place, i in zip(places, order, strict=True)}
    return [given.get(place, own) for place, own in zip(played.places, rewards, strict=True)]


def std_of_step(run: Run, played: PlayedStep, rewards: torch.Tensor) -> float:
    """The deviation (unbiased) of the rewards of all ranks' kept episodes; 0 where none is."""
    mine = [reward for reward, kept in zip(rewards.tolist(), played.kept, strict=True) if kept]
    run.ranks.barrier("rewards")
    shards = run.ranks.all_gather_numbers(mine)
    # Sorted, so that rounding does not depend on the ranks.
    everything = sorted(reward for shard in shards for reward in shard)
    return float(torch.tensor(everything, dtype=torch.float64).std()) if everything else 0.0
