"""The run: evaluate, warm-start, then train stage by stage.

A stage is the loop of rollouts and updates, with an evaluation after it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import torch

from pipeline.advantages import dead_groups, group_advantages
from pipeline.collect import (
    collect_records,
    evaluate_and_record,
    finish,
    save_checkpoint,
    save_trajectories,
    save_when_due,
    validate_when_due,
)
from pipeline.config import Config
from pipeline.curriculum import Stage, tasks_of_step
from pipeline.draws import permutation, stream_key
from pipeline.learner import make_updater, start_stage
from pipeline.policy import load_folder
from pipeline.rollout import Start
from pipeline.session import Run, start
from pipeline.step_metrics import Timer, over_iterations, rollout_metrics, warn_of_gap
from pipeline.tasks import Task, shard_tasks
from pipeline.tracking import StageProgress
from pipeline.trajectory import Trajectory
from pipeline.updater import learning_rate_at
from pipeline.warm_start import warm_start


def main(config: Config) -> int:
    """Run on this rank, which was launched together with the others; returns the exit code."""
    run = start(config)
    with run.log:
        before_training(run)
        if config.grpo.use_grpo:
            train(run)
        finish(run)
    run.accelerator.end_training()
    return 0


def train(run: Run) -> None:
    """The loop: for each stage, for each optimizer step."""
    run.updater = make_updater(run)
    for stage in run.parts.stages:
        if run.state.evaluated(stage.name):
            continue
        first = max(stage.first_step, run.state.step)
        done, is_main = first - stage.first_step, run.ranks.is_main
        start_stage(run, stage)
        with StageProgress(stage.name, stage.num_steps, is_main=is_main, done=done) as progress:
            for step in range(first, stage.last_step):
                timer = Timer(run.ranks)
                tasks = tasks_of_step(stage, step, run.parts.train, run.config.run.seed)
                trajectories = play_groups(run, stage, step, tasks)
                rewards = rewards_of(run, trajectories, step)
                statistics = update(run, stage, trajectories, rewards)
                run.state.step, run.state.stage = step + 1, stage.name
                metrics = {**statistics, **rollout_metrics(run, trajectories)}
                keys = {"kind": "train", "stage": stage.name, "step": step + 1}
                run.log.metrics({**keys, **metrics})
                run.log.timings({**keys, **timer.timings(metrics)})
                progress.step(metrics)
                save_trajectories(run, stage.name, trajectories)
                validate_when_due(run, stage)
                save_when_due(run, stage)
        collect_records(run, stage)
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
            parts.environments,
            run.ranks.num_ranks,
            lambda: progress.step({}),
        )
    keys = {"kind": "warm_start", "stage": "warm_start", "step": 0}
    run.log.timings({**keys, "perf/warm_start_s": time.perf_counter() - begun})
    run.log.metrics({**keys, "warm_start/loss": loss})
    run.state.stage = "warm_start"
    save_checkpoint(run, "warm-start")
    run.model = load_folder(run.folder / "checkpoints" / "warm-start", run.config.model)
    run.model.to(run.accelerator.device)
    run.rollout.sampler.load_weights(run.model)
    gc.collect()  # the trainer's optimizer hangs in reference cycles
    if run.accelerator.device.type == "cuda":
        torch.cuda.empty_cache()


def play_groups(run: Run, stage: Stage, step: int, tasks: Sequence[Task]) -> list[Trajectory]:
    """Play this rank's groups; siblings stand next to each other."""
    seed, size = run.config.run.seed, run.config.rollout.num_generations
    mine = [tasks[index] for index in shard_tasks(len(tasks), run.ranks.rank, run.ranks.num_ranks)]
    starts = [
        Start(task=task, trial=k, key=stream_key(seed, "rollout", stage.name, step, *task.key, k))
        for task in mine
        for k in range(size)
    ]
    with run.ranks.phase("sample", stage.name, step + 1):
        trajectories = run.rollout(starts)
    run.records += [trajectory.record() for trajectory in trajectories]
    return trajectories


def rewards_of(run: Run, trajectories: Sequence[Trajectory], step: int) -> torch.Tensor:
    """The rewards that train: the episodes' own; in the control, those of others of the step."""
    rewards = [trajectory.reward for trajectory in trajectories]
    if run.config.grpo.permute_rewards:
        size, ranks = run.config.rollout.num_generations, run.ranks
        # Where this rank's episodes stand in the step, whatever the number of ranks.
        groups = [(i // size) * ranks.num_ranks + ranks.rank for i in range(len(rewards))]
        places = [group * size + i % size for i, group in enumerate(groups)]
        shards = ranks.all_gather_objects(dict(zip(places, rewards, strict=True)), "control")
        everything = {place: reward for shard in shards for place, reward in shard.items()}
        order = permutation(len(everything), run.config.run.seed, "permuted rewards", step)
        rewards = [everything[order[place]] for place in places]
    return torch.tensor(rewards, dtype=torch.float32)


def update(
    run: Run, stage: Stage, trajectories: Sequence[Trajectory], rewards: torch.Tensor
) -> dict[str, float]:
    """Advantages and `num_iterations` optimizer updates; then the sampler gets the new weights."""
    assert run.updater is not None
    settings, size = run.config.grpo, run.config.rollout.num_generations
    batch_std = None
    if settings.scale_rewards == "batch":
        shards = run.ranks.all_gather_objects(rewards.tolist(), "rewards")
        # Sorted, so that rounding does not depend on the ranks.
        everything = sorted(reward for shard in shards for reward in shard)
        batch_std = float(torch.tensor(everything, dtype=torch.float64).std())
    advantages = group_advantages(rewards, size, settings.scale_rewards, batch_std).tolist()
    dead = dead_groups(rewards, size).tolist()
    kept = [not (settings.drop_dead_groups and is_dead) for is_dead in dead]
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
