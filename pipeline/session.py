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
from transformers.utils import logging as transformers_logging

from pipeline import checkpoint, lora
from pipeline.chat import Chat
from pipeline.check import refuse_changed_logits, validate, why_generate
from pipeline.checkpoint import TrainState
from pipeline.config import Config, RolloutSettings, UserError
from pipeline.curriculum import describe
from pipeline.distributed import Ranks
from pipeline.generate_sampler import GenerateSampler
from pipeline.policy import load_folder, load_model, on_gpu, uses_bf16
from pipeline.prepare import Prepared
from pipeline.rollout import Rollout
from pipeline.run_folder import find_checkpoint, open_folder
from pipeline.sampler import Sampler
from pipeline.tracking import RunLog
from pipeline.trajectory import RunRecord
from pipeline.updater import Updater


@dataclass(kw_only=True)
class Run:
    """Everything that a run holds on one rank."""

    config: Config
    folder: Path
    accelerator: Accelerator
    ranks: Ranks
    parts: Prepared
    model: Any
    rollout: Rollout
    log: RunLog
    state: TrainState
    updater: Updater | None = None  # made when training starts
    warned_of_gap: bool = False
    # Of this rank's training episodes in the stage.
    records: list[RunRecord] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)


def connect(config: Config) -> tuple[Accelerator, Ranks]:
    """Meet the other ranks; raises UserError where they were launched for something else."""
    transformers_logging.disable_progress_bar()
    # Accelerate knows the old name of this setting only, torch 2.13 warns of it.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
    accelerator = Accelerator(
        mixed_precision="bf16" if uses_bf16(config.model) else "no",
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=config.run.timeout)),
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


def start(config: Config) -> Run:
    """Connect the ranks, open the run folder, load tasks and model."""
    accelerator, ranks = connect(config)
    parts = validate(config)
    opened = ranks.all_gather_objects(open_folder(config) if ranks.is_main else None, "run folder")
    folder = opened[0]
    assert folder is not None
    config = config.model_copy(update={"run": config.run.model_copy(update={"output_dir": folder})})
    state, model = load_start(config, parts, ranks)
    model.to(accelerator.device)
    dtype = torch.bfloat16 if uses_bf16(config.model) else torch.float32
    sampler = make_sampler(model, parts.chat, config.rollout, dtype, ranks.is_main)
    log = RunLog(
        folder,
        config,
        is_main=ranks.is_main,
        resumed_at=state.step if config.run.resume_from_checkpoint else None,
        evaluated=[evaluation["after"] for evaluation in state.evaluations],
    )
    log.timings({"kind": "machine", "stage": state.stage, "step": state.step, **machine(ranks)})
    if ranks.is_main:
        stages = json.dumps(curriculum(config, parts), indent=1)
        checkpoint.write_text(folder / "curriculum.json", stages)
        print(f"run folder: {folder}", flush=True)
        _say_short_steps(config, parts)
        _say_learning_rate(config)
    deterministic = config.run.deterministic
    rollout = Rollout(sampler, parts.chat, parts.environments, config.rollout, deterministic)
    return Run(
        config=config,
        folder=folder,
        accelerator=accelerator,
        ranks=ranks,
        parts=parts,
        model=model,
        rollout=rollout,
        log=log,
        state=state,
    )


def make_sampler(
    model: Any, chat: Chat, settings: RolloutSettings, dtype: torch.dtype, is_main: bool
) -> Sampler | GenerateSampler:
    """The sampler that can serve the model; the main rank says so where it is the slower one."""
    refuse_changed_logits(model)
    why = why_generate(model)
    end, top_k, top_p = chat.end_of_turn_id, settings.top_k, settings.top_p
    if why is None:
        return Sampler(model, end, settings.temperature, dtype, top_k=top_k, top_p=top_p)
    sampler = GenerateSampler(model, end, settings.temperature, dtype, top_k=top_k, top_p=top_p)
    if is_main:
        beside = "" if sampler.pads else ", beside others of equal length only"
        print(
            f"warning: {type(model).__name__} is sampled through generate, every message from the "
            f"start again{beside}, which is slower than one cache over all turns; {why}",
            flush=True,
        )
    return sampler


def _say_short_steps(config: Config, parts: Prepared) -> None:
    """A step takes no task twice, so few tasks make it smaller than the recipe says."""
    wanted = config.rollout.tasks_per_step
    short = {
        s.name: sum(s.groups.values()) for s in parts.stages if sum(s.groups.values()) < wanted
    }
    if short and config.grpo.use_grpo:
        print(f"tasks_per_step: {wanted}, but there are fewer tasks; groups per step: {short}")


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


def curriculum(config: Config, parts: Prepared) -> dict[str, Any]:
    return describe(parts.stages, config.curriculum.replay)


def load_start(config: Config, parts: Prepared, ranks: Ranks) -> tuple[TrainState, Any]:
    """A fresh model and state, or those of the checkpoint to resume from."""
    if config.run.resume_from_checkpoint is None:
        return TrainState(), load_model(config.model, parts.tokenizer, config.run.seed)
    assert config.run.output_dir is not None
    path = find_checkpoint(config.run.output_dir, config.run.resume_from_checkpoint)
    state = checkpoint.load_state(path)
    if ranks.is_main:
        print(f"resuming from {path.name}: {state.step} steps done")
    if state.step and lora.is_adapter(path) != config.model.use_peft:
        held = "LoRA adapters" if lora.is_adapter(path) else "a whole model"
        got = str(config.model.use_peft).lower()
        raise UserError(f"use_peft: got {got}, but {path.name} holds {held}; resume with its value")
    if state.step and config.model.use_peft:
        lora.check_settings(path, config.model)
    return state, load_folder(lora.base_of(path) if lora.is_adapter(path) else path, config.model)
