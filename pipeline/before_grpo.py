"""What a run does before GRPO: evaluations, warm start, rejection fine-tuning, start report."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints.resume import base_of_adapters, set_weights
from pipeline.common.console import may_fail
from pipeline.data.curriculum import num_drawn, tasks_of_source
from pipeline.data.tasks import Task
from pipeline.distributed.ranks import Phase
from pipeline.environments.language_models.language_model import LanguageModel
from pipeline.evaluation.advice import gathered_groups, groups_of, start_report
from pipeline.evaluation.agents import agent_rollout, evaluate_agent
from pipeline.evaluation.evaluate import error_counts, stop_on_errors, success_in_words
from pipeline.report.progress import StageProgress, episode_progress
from pipeline.report.write import start_block
from pipeline.rollout.trajectory import Trajectory
from pipeline.run_state import Run, evaluate_held_out
from pipeline.training.collect import RolloutBatch, play_groups
from pipeline.training.rft import (
    examples_of,
    kept_of,
    metrics_of,
    round_in_words,
    schedule_of_round,
    summary_of,
)
from pipeline.training.sft import fine_tune, sft_examples, warm_start_schedule


def before_training(run: Run) -> None:
    """Evaluate the given model; do the warm start and RFT, and evaluate after each."""
    config = run.config
    state = run.state
    if config.agent.url is not None:
        play_agent(run, str(config.agent.model))
    # A resume may ask for what an earlier start left out.
    is_untrained = state.stage == "start" and not state.warm_start
    if config.evaluation.eval_on_start and is_untrained and not state.evaluated("start"):
        evaluate_held_out(run, "start")
    if not config.grpo.use_grpo:
        return
    if config.model.use_peft and config.is_supervised:
        attach_adapters(run, run.checkpointer.resumed)
    is_bare = config.model.use_peft and not config.is_supervised  # has no adapters yet
    if not is_bare:
        run.save_if_needed()
    if config.warm_start.steps:
        if state.stage == "start":
            warm_start(run)
        if not state.evaluated("warm_start"):
            evaluate_held_out(run, "warm_start")
            run.save("warm-start")
    if config.rft.rft_rounds and state.step == 0:
        rft(run)
    if config.evaluation.start_report_tasks and config.grpo.max_steps and state.step == 0:
        play_for_report(run)


def attach_adapters(run: Run, folder: Path | None = None) -> None:
    """Add LoRA adapters to the model, those of the checkpoint `folder` if it has any."""
    learner = run.learner
    learner.attach(
        base_of_adapters(learner.model, run.config.model, run.checkpointer, run.further_state())
    )
    set_weights(learner.model, run.config, run.parts.tokenizer, folder)
    learner.renew_sampler()


def play_agent(run: Run, name: str) -> None:
    """Let the endpoint at `agent_url` play the held-out tasks, unless it has done so.

    Its failure does not end the run; a resumed run tries again, and pays no call twice.
    """
    config = run.config
    ranks = run.ranks
    if "success" in run.state.agents.get(name, {}):
        return
    if ranks.is_main:  # an agent that failed may have had other ranks
        shutil.rmtree(run.folder / "trajectories" / "agent", ignore_errors=True)
    temperature = config.agent.temperature
    if temperature is None:
        temperature = config.rollout.temperature
    model = LanguageModel(
        "agent", config.agent, config.rollout.call_timeout, run.folder, ranks, as_written=True
    )
    with closing(model):
        agent = agent_rollout(run.learner.rollout, model, temperature)
        tasks = [task for tasks in run.parts.held_out.values() for task in tasks]
        evaluation = config.evaluation
        trials = evaluation.eval_trials + evaluation.eval_greedy
        count = len(ranks.shard(len(tasks))) * trials
        shown = episode_progress(f"agent {name}", count, ranks)
        with ranks.phase("evaluate", run.state.stage, run.state.step), shown as progress:
            entry, played = evaluate_agent(agent, tasks, config, ranks, progress)
    run.check_language_models()
    run.drain_logged("")  # forgets the metrics of reward functions
    run.save_transcripts("agent", played)
    run.state.agents[name] = entry
    if why := entry.get("failed"):
        run.say(f"warning: agent {name} failed: {why}")
    else:
        run.say(f"agent {name}: success sampled  {success_in_words(entry['success'])}")


def warm_start(run: Run) -> None:
    """Train on demonstrations, with checkpoints by time, and save the result."""
    begun = time.perf_counter()
    config = run.config
    parts = run.parts
    ranks = run.ranks
    unfinished = run.state.warm_start
    done = len(unfinished.get("losses", ()))
    with _supervised(run, "warm start", config.warm_start.steps, done) as on_step:

        def keep(loss: float, optimizer: torch.optim.Optimizer) -> None:
            on_step(loss)
            if run.checkpointer.is_late:
                run.save(optimizer=optimizer)

        examples = sft_examples(config, parts.chat, parts.demonstrations, ranks.alive)
        schedule = warm_start_schedule(config)
        loss = fine_tune(
            config,
            run.accelerator,
            ranks,
            run.learner.model,
            examples,
            schedule,
            sharded=run.learner.sharded,
            state=unfinished,
            resumed=run.checkpointer.resumed,
            on_step=keep,
        )
    run.state.warm_start = {}
    keys = {"kind": "warm_start", "stage": "warm_start", "step": 0}
    run.log.timings({**keys, "perf/warm_start_s": time.perf_counter() - begun})
    run.log.metrics({**keys, "warm_start/loss": loss})
    run.state.stage = "warm_start"
    run.save("warm-start")
    run.learner.sync_weights()


def rft(run: Run) -> None:
    """Do the rounds of RFT that are missing, with a checkpoint after each, and evaluate.

    A checkpoint before the first round keeps what came before, so that a killed run repeats at
    most one round.
    """
    for number in range(len(run.state.rft) + 1, run.config.rft.rft_rounds + 1):
        run.state.stage = "rft"
        run.save_if_needed("rft")
        _rft_round(run, number)
        run.save("rft")
        run.learner.sync_weights()
    if not run.state.evaluated("rft"):
        evaluate_held_out(run, "rft")
        run.save("rft")


def _rft_round(run: Run, number: int) -> None:
    begun = time.perf_counter()
    name = f"rft-{number}"
    config = run.config
    ranks = run.ranks
    limits = config.rollout
    threshold = config.evaluation.success_threshold
    if ranks.is_main:  # an interrupted round may have had other ranks
        shutil.rmtree(run.folder / "trajectories" / name, ignore_errors=True)
    tasks = tasks_to_play(run, config.rft.rft_tasks, number - 1, "rft")
    played = _play(run, tasks, f"rft round {number}", "rft", number)
    run.save_transcripts(name, played)
    mine = [t.record() for t in played], kept_of(played, limits.num_generations, threshold)
    gathered = ranks.all_gather_objects(mine, name)
    records, kept = ([*chain(*shares)] for shares in zip(*gathered, strict=True))
    stop_on_errors(ranks, error_counts(records), limits, played, f"in rft round {number}")
    entry = summary_of(number, records, kept, threshold)
    if kept:
        examples = examples_of(kept, config.warm_start.batch_size, config.run.seed, name)
        schedule = schedule_of_round(config, len(examples))
        entry["steps"] = schedule.num_steps
        with _supervised(run, f"rft round {number}", entry["steps"]) as on_step:
            entry["loss"] = fine_tune(
                config,
                run.accelerator,
                ranks,
                run.learner.model,
                examples,
                schedule,
                sharded=run.learner.sharded,
                on_step=on_step,
            )
    run.say(round_in_words(entry))
    run.state.rft.append(entry)
    keys = {"kind": "rft", "stage": "rft", "step": 0}
    run.log.timings({**keys, "perf/rft_s": time.perf_counter() - begun})
    run.log.metrics(run.with_logged("rft/", {**keys, **metrics_of(entry)}))


@contextmanager
def _supervised(
    run: Run, name: str, num_steps: int, done: int = 0
) -> Iterator[Callable[..., None]]:
    """Show the progress of supervised training; yields a function to call after each step."""
    progress = StageProgress(name, num_steps, is_main=run.ranks.is_main, done=done)
    steps = iter(range(done + 1, num_steps + 1))

    def on_step(loss: float, *_: Any) -> None:
        progress.step({"loss": loss})
        run.ranks.current = Phase(name, f"step {next(steps)} of {num_steps}")

    with progress, run.ranks.phase(name):
        yield on_step


def tasks_to_play(run: Run, count: int, part: int, *key: int | str) -> list[Task]:
    """Return at most `count` training tasks of each domain that a stage trains.

    Every rank returns the same tasks. Parts 0, 1, ... of the same `key` have other tasks until
    all tasks have been returned. The difficulty is that of the domain's first stage.
    """
    tasks = list[Task]()
    first = {domain: stage for stage in reversed(run.parts.stages) for domain in stage.own}
    for domain in [domain for domain in run.config.data.domains if domain in first]:
        source = run.parts.sources(first[domain])[domain]
        most = min(count, num_drawn(source))
        tasks += tasks_of_source(source, most, part, run.config.run.seed, *key, domain)
    return tasks


def _play(run: Run, tasks: Sequence[Task], name: str, *key: int | str) -> list[Trajectory]:
    """Return this rank's groups of episodes of `tasks`; `key` names the random numbers."""
    ranks = run.ranks
    size = run.config.rollout.num_generations
    mine = [tasks[index] for index in ranks.shard(len(tasks))]
    shown = episode_progress(name, len(mine) * size, ranks)
    with ranks.phase("sample", name), shown as progress:
        return play_groups(
            run.learner.rollout, ranks, mine, size, run.config.run.seed, *key, progress=progress
        )


def play_for_report(run: Run) -> None:
    """Play `start_report_tasks` groups of each domain for the start report."""
    key = "start report"
    tasks = tasks_to_play(run, run.config.evaluation.start_report_tasks, 0, key)
    played = _play(run, tasks, key, key)
    run.start_groups += groups_of(played, run.config.rollout.num_generations)
    run.drain_logged("")  # forgets the metrics of reward functions


def report_start(run: Run, batch: RolloutBatch) -> None:
    """Make and print the start report. Every rank must call this after the first step."""
    run.start_groups += groups_of(batch.first, run.config.rollout.num_generations)
    groups = gathered_groups(run.start_groups, run.ranks)
    run.start_groups = []
    if run.ranks.is_main:
        with may_fail("start report", "the run goes on without it"):
            evaluation = next(reversed(run.state.evaluations), None)
            run.state.start_report = start_report(groups, evaluation, run.config, run.baselines)
            for line in start_block(run.state.start_report).splitlines():
                run.say(line)
