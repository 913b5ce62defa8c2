"""A run on one rank: what it holds, and how it starts or resumes."""

from __future__ import annotations

import json
import os
import platform
import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import GradientAccumulationPlugin
from transformers.utils import logging as transformers_logging

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.checkpoint import TrainState
from pipeline.checkpoints.run_folder import Opened, begin, open_folder
from pipeline.config import variables
from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage, describe, one_after_another
from pipeline.distributed.ranks import Ranks, meet_again
from pipeline.distributed.watchdog import GRACE_S, Watchdog
from pipeline.errors import UserError
from pipeline.evaluation.error_rates import ErrorShares
from pipeline.files.durable import write_text
from pipeline.grpo.updater import Updater
from pipeline.models import lora
from pipeline.models.loading import load_folder, load_model, on_gpu, uses_bf16
from pipeline.models.rotary import fix_rotary
from pipeline.preflight.check import validate
from pipeline.preflight.prepare import Prepared
from pipeline.rollout.rollout import Rollout
from pipeline.rollout.sampler import make_sampler
from pipeline.rollout.trajectory import RunRecord, Trajectory
from pipeline.tracking.log import RunLog


@dataclass(kw_only=True)
class Run:
    """Everything that a run holds on one rank."""

    config: Config
    folder: Path
    lock: Any  # the open file that keeps other runs out of the folder; on rank 0
    checkpoint: Path | None  # that the run goes on from
    accelerator: Accelerator
    ranks: Ranks
    watchdog: Watchdog
    parts: Prepared
    model: Any
    rollout: Rollout
    log: RunLog
    state: TrainState
    updater: Updater | None = None  # made when training starts
    warned_of_gap: bool = False
    warned_of_slow_save: bool = False
    # Of this rank's training episodes in the stage.
    records: list[RunRecord] = field(default_factory=list)
    errors: ErrorShares = field(default_factory=ErrorShares)  # of environments, in the stage
    anchors: dict[str, list[Trajectory]] = field(default_factory=dict)  # by learned domain
    unsynced: list[Path] = field(default_factory=list)  # written since the last checkpoint
    saved: tuple[int, int] | None = None  # the position that the last checkpoint holds
    saved_at: float = field(default_factory=time.perf_counter)
    begun: float = field(default_factory=time.perf_counter)

    @property
    def wall_s(self) -> float:
        """Seconds so far, those of the processes before a resume included."""
        return self.state.wall_s + time.perf_counter() - self.begun

    @property
    def stages(self) -> list[Stage]:
        """The stages, after those that ended early."""
        return one_after_another(self.parts.stages, self.state.ended_early)

    @property
    def position(self) -> tuple[int, int]:
        """Steps and evaluations done."""
        return self.state.step, len(self.state.evaluations)


def connect(config: Config) -> tuple[Accelerator, Ranks]:
    """Meet the other ranks; raises UserError where they were launched for something else."""
    transformers_logging.disable_progress_bar()
    # Accelerate knows the old name of this setting only, torch 2.13 warns of it.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
    meet_again(config.run.timeout + GRACE_S, "cuda" if on_gpu() else "cpu")
    mixed_precision = "bf16" if uses_bf16(config.model) else "no"
    variables.pin(mixed_precision)
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        # Without it, ACCELERATE_GRADIENT_ACCUMULATION_STEPS would divide every gradient.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[
            # The watchdog speaks first: it knows more.
            InitProcessGroupKwargs(timeout=timedelta(seconds=config.run.timeout + GRACE_S)),
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
        ],
    )
    if accelerator.distributed_type.value not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise UserError(
            f"accelerate launch: its configuration asks for {accelerator.distributed_type.value}; "
            "use --config_file accelerate_configs/multi_gpu.yaml"
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


def start(config: Config, accelerator: Accelerator, ranks: Ranks, watchdog: Watchdog) -> Run:
    """Open the run folder, load tasks and model: afresh, or where a checkpoint stands."""
    parts = validate(config)
    opened, folder, resumed = open_together(config, ranks)
    watchdog.can_resume = resumed is not None
    config = config.model_copy(update={"run": config.run.model_copy(update={"output_dir": folder})})
    state, model = load_start(config, parts, resumed)
    fix_rotary(model, config.rollout.max_tokens)
    state.config = config.model_dump(mode="json")
    model.to(accelerator.device)
    dtype = torch.bfloat16 if uses_bf16(config.model) else torch.float32
    sampler = make_sampler(model, parts.chat, config.rollout, dtype, ranks.is_main)
    if opened is not None:
        begin(opened, config, state.step, {entry["after"] for entry in state.evaluations})
    log = RunLog(
        folder,
        config,
        is_main=ranks.is_main,
        sizes=state.sizes if resumed else None,
        tracker_run_id=state.tracker_run_id,
    )
    log.timings({"kind": "machine", "stage": state.stage, "step": state.step, **machine(ranks)})
    if opened is not None:
        stages = one_after_another(parts.stages, state.ended_early)
        write_text(folder / "curriculum.json", json.dumps(describe(stages, config), indent=1))
        _say_where_it_starts(opened, state)
        _say_short_steps(config, parts)
        _say_learning_rate(config)
    deterministic = config.run.deterministic
    rollout = Rollout(
        sampler,
        parts.chat,
        parts.environments,
        config.rollout,
        deterministic,
        on_progress=ranks.progress,
    )
    return Run(
        config=config,
        folder=folder,
        lock=None if opened is None else opened.lock,
        checkpoint=resumed,
        accelerator=accelerator,
        ranks=ranks,
        watchdog=watchdog,
        parts=parts,
        model=model,
        rollout=rollout,
        log=log,
        state=state,
        saved=None if resumed is None else (state.step, len(state.evaluations)),
    )


def _say_where_it_starts(opened: Opened, state: TrainState) -> None:
    print(f"run folder: {opened.folder}", flush=True)
    for note in opened.notes:
        print(note, flush=True)
    if opened.checkpoint is not None:
        print(f"resuming from {opened.checkpoint.name}: {state.step} steps done", flush=True)


def open_together(config: Config, ranks: Ranks) -> tuple[Opened | None, Path, Path | None]:
    """The run's folder, which rank 0 opens for all, and the checkpoint to go on from.

    Where it must refuse, every rank raises the UserError: none is left waiting for it.
    """
    opened, mistake = None, ""
    if ranks.is_main:
        try:
            opened = open_folder(config)
        except UserError as error:
            mistake = str(error)
    told = None if opened is None else (opened.folder, opened.checkpoint)
    found, mistake = ranks.all_gather_objects((told, mistake), "run folder")[0]
    if found is None:
        raise UserError(mistake)
    return opened, *found


def _say_short_steps(config: Config, parts: Prepared) -> None:
    """A step takes no task twice, so few tasks make it smaller than the recipe says."""
    wanted = config.rollout.tasks_per_step
    sizes = {s.name: _smallest_step(s) for s in parts.stages}
    short = {name: size for name, size in sizes.items() if size < wanted}
    if short and config.grpo.use_grpo:
        print(f"tasks_per_step: {wanted}, but there are fewer tasks; groups per step: {short}")


def _smallest_step(stage: Stage) -> int:
    return (min if stage.turns else sum)(stage.groups.values())


def _say_learning_rate(config: Config) -> None:
    settings, peak = config.grpo, config.peak_learning_rate
    if settings.use_grpo and settings.scale_lr != "none":
        print(
            f"learning rate: {peak:g} ({settings.learning_rate:g} for "
            f"{settings.reference_tasks_per_step} tasks per step, scale_lr {settings.scale_lr} to "
            f"{config.rollout.tasks_per_step})"
        )


def machine(ranks: Ranks) -> dict[str, Any]:
    """What the times of a run depend on."""
    return {
        "host": platform.node(),
        "device": torch.cuda.get_device_name() if on_gpu() else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "num_ranks": ranks.num_ranks,
        "torch": torch.__version__,
    }


def load_start(config: Config, parts: Prepared, path: Path | None) -> tuple[TrainState, Any]:
    """A fresh model and state, or those of the checkpoint to resume from."""
    if path is None:
        return TrainState(), load_model(config.model, parts.tokenizer, config.run.seed)
    state = checkpoint.load_state(path)
    if state.step and lora.is_adapter(path) != config.model.use_peft:
        held = "LoRA adapters" if lora.is_adapter(path) else "a whole model"
        got = str(config.model.use_peft).lower()
        raise UserError(f"use_peft: got {got}, but {path.name} holds {held}; resume with its value")
    if state.step and config.model.use_peft:
        lora.check_settings(path, config.model)
    return state, load_folder(lora.base_of(path) if lora.is_adapter(path) else path, config.model)
