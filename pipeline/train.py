"""The run: what comes before GRPO (`before_grpo.py`), then GRPO stage by stage.

A stage consists of steps (rollouts and an update) and an evaluation. `Training.train` is the loop;
the methods that it calls follow in the order of its calls. `run_state.py` has the state of the run.
"""

import gc
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from datetime import timedelta

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import GradientAccumulationPlugin
from transformers.utils import logging as transformers_logging

from pipeline.before_grpo import before_training, report_start
from pipeline.checkpoints.checkpoint import full_disk
from pipeline.checkpoints.run_folder import folder_of
from pipeline.checkpoints.transcripts import read_records
from pipeline.config import variables
from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage, learning_rate_at
from pipeline.data.tasks import Source, Task
from pipeline.distributed.connecting import meet_again, meeting
from pipeline.distributed.launch import CONFIGS
from pipeline.distributed.ranks import Interrupted, Ranks
from pipeline.distributed.watchdog import GRACE_S, Watchdog
from pipeline.errors import INTERRUPTED, RunError, UserError
from pipeline.evaluation.advice import fallen_domains, lost_domains
from pipeline.evaluation.evaluate import (
    ErrorRates,
    evaluate,
    mean_success,
    plateau,
    scored,
    stop_on_errors,
    training_summary,
    validation_metrics,
)
from pipeline.export.folder import push_after_training
from pipeline.files.console import command, may_fail
from pipeline.grpo.collect import RolloutBatch, collect_rollouts, give_advantages
from pipeline.grpo.updater import Updater
from pipeline.models.fitting import fitted
from pipeline.models.loading import on_gpu, uses_bf16
from pipeline.report.write import final_table, write_report
from pipeline.run_state import RunState
from pipeline.tracking.progress import StageProgress
from pipeline.tracking.step_metrics import Meter, over_iterations, profiled, rollout_metrics

# Mean differences of log-probabilities between sampler and training, in nats, above which a run
# warns: 3 times those of healthy runs of SmolLM2-135M in bf16, whose maxima over a step of 3,500
# tokens reach 0.5, and 10 times those in fp32 (docs/results/real_models.md).
GAP_BF16 = 0.1
GAP_FP32 = 1e-4
BATCH_INVARIANT = (8, 0)  # the least compute capability with which vLLM is batch-invariant

UNSCORED_STEPS = 3  # steps in a row without any reward that end a run


class Training(RunState):
    """A whole run on this rank."""

    sources: Mapping[str, Source]  # the tasks of the present stage by domain; set by `begin_stage`
    peak: float  # the learning rate after the warm-up; set by `begin_grpo`
    _unscored_steps = 0

    def run(self) -> int:
        """Run to the end or until a signal interrupts the run, and return the exit code."""
        try:
            before_training(self)
            if self.config.grpo.use_grpo:
                self.train()
            self.finish()
        except Interrupted:
            return self.stop()
        return 0

    def train(self) -> None:
        """Do GRPO: for each stage and each step, collect rollouts and update the policy."""
        meter = self.begin_grpo()
        for index in range(len(self.parts.stages)):
            stage = self.stages[index]  # after an early end of a stage, later stages begin earlier
            if self.state.evaluated(stage.name):
                continue
            first = self.begin_stage(stage)
            done = first - stage.first_step
            is_main = self.ranks.is_main
            later = self.stages[-1].last_step - stage.last_step
            with StageProgress(
                stage.name, stage.num_steps, is_main=is_main, done=done, num_later=later
            ) as progress:
                for step in range(first, stage.last_step):
                    if self.ends_early(stage):
                        break
                    with self.profiled(step + 1), meter.step():
                        batch = self.collect(stage, step)
                        self.advantages(batch, step)
                        statistics = self.update(stage, batch)
                    metrics = self.record(stage, batch, statistics, meter)
                    progress.step(metrics)
                    self.end_step(stage, batch)
            self.end_stage(stage)

    @property
    def updater(self) -> Updater:
        """What trains the model, from `begin_grpo` on."""
        assert self.learner.updater is not None, "GRPO has not begun"
        return self.learner.updater

    # The stages

    def begin_grpo(self) -> Meter:
        """Make the Updater, and return a Meter that measures the training steps."""
        learner = self.learner
        self.peak = self.config.peak_learning_rate
        updater = learner.make_updater(self.checkpointer, self._saved_state, self.stages)
        self.checkpointer.owners.append(updater)
        self.kl_probe.load([s for s in self.stages[:-1] if self.state.evaluated(s.name)])
        meter = Meter(self.ranks, learner.rollout, updater)
        gc.freeze()  # exempts long-lived objects from garbage collection
        return meter

    def begin_stage(self, stage: Stage) -> int:
        """Prepare a stage; return the index of the stage's next step among all steps of the run."""
        is_inside = self.state.step > stage.first_step
        if (reference := self.updater.reference) is not None:
            if self.config.grpo.reference_per_stage and not is_inside:
                reference.refresh()
            when = f"of the reference policy in stage {stage.name}"
            self.ranks.check_same_parameters(reference.parameters.items(), when)
        self.records = []
        if is_inside:
            folder = self.folder / "trajectories" / stage.name
            self.records = read_records(folder, self.ranks.rank, self.ranks.num_ranks)
        if not is_inside:
            self.errors.load_state_dict({})
            self.dead.load_state_dict({})
            self.decisions.load_state_dict({})
            stages = self.stages[: stage.index + 1]
            evaluations = self.state.evaluations
            for line in lost_domains(evaluations, stages, self.config.evaluation):
                self.say(f"warning: {line}")
        self.sources = self.parts.sources(stage)
        self.validate_when_due(stage)  # a resumed run may have stopped before this validation
        if self.is_best:
            self.save(f"step-{self.state.step:06d}")
        return max(stage.first_step, self.state.step)

    def end_stage(self, stage: Stage) -> None:
        """Summarise and evaluate a stage, keep episodes for KL estimates, and save a checkpoint."""
        gathered = self.ranks.all_gather_objects(self.records, f"records of stage {stage.name}")
        self.records = []
        if any(gathered):
            self.state.training[stage.name] = training_summary(gathered)
        if self.kl_probe.is_wanted and stage.index + 1 < len(self.stages):
            count = self.config.evaluation.kl_probe_tasks
            tasks = list[Task]()
            for domain in stage.own:
                tasks += self.parts.validation[domain][:count]
            with self.ranks.phase("validate", stage.name, self.state.step):
                self.kl_probe.keep(stage, tasks, self.learner.rollout)
        self.evaluate(stage.name)
        self.save(f"stage-{stage.index + 1}-{stage.name}")

    # The steps of a stage

    def profiled(self, step: int) -> AbstractContextManager[None]:
        """Return a context manager that profiles the step if the setting `profile` lists it."""
        device = self.accelerator.device
        folder = self.folder / "profile"
        return profiled(step, self.config.run.profile, folder, self.ranks, device)

    def collect(self, stage: Stage, step: int) -> RolloutBatch:
        """Collect this rank's rollouts for a step."""
        rollout = self.learner.rollout
        batch = collect_rollouts(rollout, self.ranks, self.config, stage, step, self.sources)
        if self.language_models:
            self.check_language_models()
        return batch

    def advantages(self, batch: RolloutBatch, step: int) -> None:
        """Give each episode its advantage, and decide whether the update uses it."""
        give_advantages(batch, self.ranks, self.config, step)

    def update(self, stage: Stage, batch: RolloutBatch) -> dict[str, float]:
        """Train on the batch, load the weights into the sampler, return all ranks' statistics."""
        step = self.state.step
        settings = self.config.grpo
        done = step - stage.first_step
        learning_rate = learning_rate_at(done, stage.num_steps, self.peak, settings)
        with self.ranks.phase("update", stage.name, step + 1):
            self.learner.sampling.sampler.rest()
            found = [
                self.updater.update_policy(
                    batch.trajectories,
                    [sample.advantage for sample in batch.samples],
                    learning_rate,
                    [sample.kept for sample in batch.samples],
                    is_last=iteration == settings.num_iterations,
                )
                for iteration in range(1, settings.num_iterations + 1)
            ]
            self.learner.give_weights()
        statistics = over_iterations(found)
        gap = statistics.get("train/sampling_logp_difference_mean", 0.0)
        default = GAP_BF16 if self.accelerator.mixed_precision == "bf16" else GAP_FP32
        limit = settings.max_sampling_logp_difference or default
        if gap > limit and not self._warned_of_gap and not self.config.corrects_sampling:
            name = "max_sampling_logp_difference"
            where = f"warning: step {step + 1}: train/sampling_logp_difference_mean"
            self.say(f"{where} is {gap:.2g} and above {name} {limit:g}")
            self._warned_of_gap = True
        return statistics

    def record(
        self, stage: Stage, batch: RolloutBatch, statistics: dict[str, float], meter: Meter
    ) -> dict[str, float]:
        """Count a finished step, write the step's metrics and timings, and return the metrics."""
        self.state.step = self.state.step + 1
        self.state.stage = stage.name
        self.records += [trajectory.record() for trajectory in batch.trajectories]
        rewards = self.learner.rollout.rewards
        names = [] if rewards is None else rewards.names(self.parts.environments.values())
        metrics, counts = rollout_metrics(batch, self.ranks, self.config, names)
        for domain, (episodes, errors) in counts.items():
            self.errors.add(domain, episodes, errors)
        self._refuse_unscored(stage, metrics)
        keys = {"kind": "train", "stage": stage.name, "step": self.state.step}
        own = {**keys, **statistics, **metrics}
        self.log.metrics(own if rewards is None else self.with_logged("train/", own))
        self.log.timings({**keys, **meter.timings(batch.trajectories)})
        self.dead.add(stage, metrics)
        self.decisions.add(
            stage,
            self.state.step,
            batch.first,
            self.learner.rollout.environments,
            self.config.evaluation.success_threshold,
            self.ranks,
        )
        for line in self.decisions.messages({**statistics, **metrics}, self.config):
            self.say(f"warning: step {self.state.step}: {line}")
        self._rewards |= {k: v for k, v in metrics.items() if k.startswith("reward/")}
        return {**statistics, **metrics, **self._rewards}

    def _refuse_unscored(self, stage: Stage, metrics: Mapping[str, float]) -> None:
        """Raise UserError if no episode of the last steps has a reward, though none failed."""
        left = sum(metrics.get(f"rollout/left_out/reward/{domain}", 0.0) for domain in stage.groups)
        has_failed = metrics["rollout/stop/environment_error"] > 0
        is_unscored = left == metrics["rollout/episodes"] and not has_failed
        self._unscored_steps = self._unscored_steps + 1 if is_unscored else 0
        if self._unscored_steps == UNSCORED_STEPS:
            raise UserError(
                f"reward_funcs: every function returned None for all {left:.0f} episodes of step "
                f"{self.state.step} and of the {UNSCORED_STEPS - 1} before it, so nothing can be "
                "learned; let a function return a number for each completion"
            )

    def end_step(self, stage: Stage, batch: RolloutBatch) -> None:
        """Write transcripts, report the start, look for faults and dead domains, validate."""
        advantages = [sample.advantage for sample in batch.samples]
        self.save_transcripts(stage.name, batch.trajectories, advantages)
        if self.state.step == 1:
            report_start(self, batch)
        stop_on_errors(self.ranks, self.errors, self.config.rollout, batch.trajectories)
        self.validate_when_due(stage)
        lines = self.dead.messages(stage, self.records, self.ranks)
        is_stopped = bool(lines) and self.config.run.stop_on_dead_domain
        most = self.config.data.max_reward_calls
        called = self.state.num_reward_calls
        is_spent = most is not None and called >= most
        if self.checkpointer.is_due or is_stopped or is_spent or self.is_best:
            self.save(f"step-{self.state.step:06d}")
        if is_stopped:
            raise RunError(f"stop_on_dead_domain: step {self.state.step}: {lines[0]}")
        if is_spent:
            given = f"{most}, and reward functions were called {called} times"
            raise UserError(f"max_reward_calls: got {given}; resume with more and --override")
        for line in lines:
            self.say(f"warning: step {self.state.step}: {line}")

    def validate_when_due(self, stage: Stage) -> None:
        """Validate the policy if `validation_steps` divides the step, but only once per step."""
        every = self.config.evaluation.validation_steps
        step = self.state.step
        if not every or step % every or self.state.validated(step):
            return
        begun = time.perf_counter()
        seed = self.config.run.seed
        tasks = [task for tasks in self.parts.validation.values() for task in tasks]
        with self.ranks.phase("validate", stage.name, step):
            records, trajectories = evaluate(self.learner.rollout, tasks, 1, seed, self.ranks)
            self.check_language_models()
            kl = self.kl_probe.divergences(self.updater)
        rewards = scored(records)
        keys = {"stage": stage.name, "step": step}
        self.state.validations.append({**keys, "success": rewards, "kl": kl})
        threshold = self.config.evaluation.success_threshold
        metrics = validation_metrics(rewards, kl, threshold)
        keys = {"kind": "validation", **keys}
        self.log.metrics(self.with_logged("validation/", {**keys, **metrics}))
        seconds = {"perf/validation_s": time.perf_counter() - begun}
        self.log.timings({**keys, **seconds})
        mean = mean_success(rewards, self.config.data.domains, threshold)
        best = self.state.best
        if self.config.run.keep_best and mean is not None and mean > best.get("success", -1.0):
            name = f"step-{step:06d}"
            self.state.best = {"checkpoint": name, "step": step, "success": mean}
        for line in fallen_domains(self.state.validations, stage, self.config):
            self.say(f"warning: step {step}: {line}")
        rates = ErrorRates(records)
        stop_on_errors(self.ranks, rates, self.config.rollout, trajectories, "in a validation")

    @property
    def is_best(self) -> bool:
        """Whether the present policy is the best so far and has no checkpoint yet."""
        return self.state.best.get("step") == self.state.step and not self.checkpointer.is_current

    def ends_early(self, stage: Stage) -> bool:
        """Return True and store the stage's length if validation success no longer rises."""
        best = plateau(self.state.validations, stage, self.config)
        if best is None:
            return False
        settings = self.config.curriculum
        done = self.state.step - stage.first_step
        self.state.ended_early[stage.name] = done
        self.say(
            f"stage {stage.name} ends after {done} of {stage.num_steps} steps: "
            f"{settings.plateau_patience} validations without {settings.plateau_delta:g} more "
            f"success (best {best:.2f})"
        )
        return True

    # The end

    def finish(self) -> None:
        """Write the results and the report on rank 0, and print the table of results."""
        if self.ranks.is_main:
            self.write_results()
            found = "checkpoints, without a report"
            again = f"{command('report')} {self.folder}"
            with may_fail("report", f"{again} makes it again"):
                write_report(self.folder)
                found = "report, plots and checkpoints"
            self.log.results = self.folder
            with may_fail("table", f"{again} has it"):
                results = json.loads((self.folder / "results.json").read_text(encoding="utf-8"))
                print(final_table(results))
            if best := self.state.best:
                which = f"{best['checkpoint']}, mean validation success {best['success']:.3f}"
                print(f"best checkpoint: {which}; export and chat take it by --checkpoint best")
            print(f"{found}: {self.folder}")
        self.ranks.barrier("end")

    def stop(self) -> int:
        """Save a checkpoint unless the latest checkpoint is current, and return the exit code."""
        if self.state.stage != "start" and not self.checkpointer.is_current:
            self.save(f"step-{self.state.step:06d}")
        if not self.watchdog.can_resume:
            self.say("interrupted before the first checkpoint; start again")
            return 1
        command = f"--output-dir {self.folder} --resume-from-checkpoint latest"
        self.say(f"interrupted after {self.state.step} steps; go on with {command}")
        return INTERRUPTED


def main(config: Config, make_training: Callable[..., Training] = Training) -> int:
    """Run the training on this rank and return the exit code; all ranks must call this function.

    `make_training` has the signature of `Training`.
    """
    config, lines = fitted(config)
    accelerator, ranks = connect(config)
    with Watchdog(ranks, config.run.timeout) as watchdog:
        try:
            training = make_training(config, accelerator, ranks, watchdog)
        except OSError as error:
            fault = full_disk(folder_of(config), error, "start again in another folder")
            raise fault or error from None
        for line in lines:
            training.say(line)
        with training.log, closing(training.learner):
            try:
                code = training.run()
            except Exception as error:
                if (fault := training.checkpointer.machine_fault(error)) is None:
                    raise
                raise fault from None
        if code == 0:
            accelerator.end_training()
    # An upload may take longer than other ranks would wait.
    if code == 0 and ranks.is_main and config.run.push_to_hub and config.grpo.use_grpo:
        push_after_training(training.folder, config)
    return code


def connect(config: Config) -> tuple[Accelerator, Ranks]:
    """Join the process group; raise UserError for an unsuitable launch configuration."""
    with meeting(config.run.timeout + GRACE_S):
        return _connected(config)


def _connected(config: Config) -> tuple[Accelerator, Ranks]:
    transformers_logging.disable_progress_bar()
    # Accelerate passes `broadcast_buffers` under an old name, and torch 2.13 warns about the name.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
    meet_again(config.run.timeout + GRACE_S, "cuda" if on_gpu() else "cpu")
    mixed_precision = "bf16" if uses_bf16(config.model) else "no"
    variables.pin(mixed_precision)
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        # The plugin overrides the environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[
            # The watchdog has GRACE_S seconds to report a hang before NCCL or gloo times out.
            InitProcessGroupKwargs(timeout=timedelta(seconds=config.run.timeout + GRACE_S)),
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
        ],
    )
    if accelerator.distributed_type.value not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise UserError(
            f"accelerate launch: its configuration asks for {accelerator.distributed_type.value}; "
            f"use --config_file {CONFIGS}/multi_gpu.yaml"
        )
    assert config.run.num_gpus in (None, accelerator.num_processes), "ranks do not know each other"
    if config.run.deterministic:
        be_deterministic(config.rollout.sampler, accelerator.device)
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, config.run.timeout)
    return accelerator, ranks


def be_deterministic(sampler: str, device: torch.device) -> None:
    """Make sums independent of the batch: all of them on CPUs, and those of vLLM on GPUs."""
    if device.type == "cpu":
        torch.set_num_threads(1)
        return
    if sampler != "vllm":
        raise UserError(
            "deterministic: works on CPU ranks, or with sampler vllm; set ACCELERATE_USE_CPU=true, "
            "or leave it"
        )
    if torch.cuda.get_device_capability(device) < BATCH_INVARIANT:
        raise UserError(
            f"deterministic: vLLM needs GPUs of compute capability 8.0 or more; got "
            f"{torch.cuda.get_device_name(device)}; leave it"
        )
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
