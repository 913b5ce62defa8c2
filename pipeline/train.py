"""The run: what comes before GRPO (`before_grpo.py`), then GRPO stage by stage.

A stage consists of steps (rollouts and an update) and an evaluation; see `Training.train`. The file
`trainer.py` has the methods that the training loop calls, and `run_state.py` has the state.
"""

import json
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import GradientAccumulationPlugin
from transformers.utils import logging as transformers_logging

from pipeline.checkpoints.checkpoint import full_disk
from pipeline.checkpoints.run_folder import folder_of
from pipeline.config import variables
from pipeline.config.settings import Config
from pipeline.distributed.launch import CONFIGS
from pipeline.distributed.meeting import meets
from pipeline.distributed.ranks import Interrupted, Ranks
from pipeline.distributed.restarts import meet_again
from pipeline.distributed.watchdog import GRACE_S, Watchdog
from pipeline.errors import INTERRUPTED, UserError
from pipeline.export.hub import push_after_training
from pipeline.files.console import command, may_fail
from pipeline.models.fitting import fitted
from pipeline.models.loading import on_gpu, uses_bf16
from pipeline.report.tables import final_table
from pipeline.report.write import write_report
from pipeline.tracking.progress import StageProgress
from pipeline.trainer import Trainer


class Training(Trainer):
    """A whole run on this rank."""

    def run(self) -> int:
        """Run to the end or until a signal interrupts the run, and return the exit code."""
        try:
            self.before_training()
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

    def finish(self) -> None:
        """Write the results and the report on rank 0, and print the table of results."""
        if self.ranks.is_main:
            self._write_results()
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
        with training.log:
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


@meets
def connect(config: Config) -> tuple[Accelerator, Ranks]:
    """Join the process group; raise UserError for an unsuitable launch configuration."""
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
        if accelerator.device.type != "cpu":
            raise UserError(
                "deterministic: works on CPU ranks only; set ACCELERATE_USE_CPU=true, or leave it"
            )
        torch.set_num_threads(1)
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, config.run.timeout)
    return accelerator, ranks
