"""What is trained: the policy or its LoRA adapters, the optimizer and the reference policy.

Made when GRPO starts, from the model as it is then, or from the checkpoint to resume from.
"""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.checkpoint import TrainState
from pipeline.checkpoints.manifest import problem
from pipeline.data.curriculum import Stage
from pipeline.errors import UserError
from pipeline.grpo.token_logprobs import TokenLogprobs, refuse_mixed_up_sequences
from pipeline.grpo.updater import Reference, Updater
from pipeline.models import lora
from pipeline.models.layers import recompute_layers
from pipeline.models.loading import load_folder, load_model, uses_bf16
from pipeline.models.weights import trained_weights
from pipeline.rollout.sampler import make_sampler
from pipeline.session import Run


def make_updater(run: Run) -> Updater:
    """The trained module under Accelerate, with optimizer and reference policy."""
    config, resumed = run.config, run.checkpoint
    if config.model.use_peft:
        base = _base_of_adapters(run)
        run.model = lora.attach(run.model, config.model, base, config.run.seed)
        run.model.to(run.accelerator.device)
        dtype = torch.bfloat16 if uses_bf16(config.model) else torch.float32
        del run.rollout.sampler  # its memory is for the one that takes adapters
        run.rollout.sampler = make_sampler(
            run.model, run.parts.chat, config.rollout, dtype, is_main=False
        )
    if config.grpo.gradient_checkpointing:  # after that: what samples recomputes nothing
        recompute_layers(run.model)
    # What is sampled has no dropout, so what is trained, the reference and probes have none.
    module = TokenLogprobs(run.model, config.rollout.temperature).eval()
    if config.grpo.padding_free:
        refuse_mixed_up_sequences(module)
    reference = None
    if config.grpo.beta > 0:
        if resumed is not None:
            _set_weights(run, _folder_of_reference(run))
        reference = Reference(module)
    if resumed is not None and (reference is not None or config.model.use_peft):
        _set_weights(run, resumed)
    pad_id = run.parts.tokenizer.pad_token_id or 0
    updater = Updater(run.accelerator, module, run.ranks, config, pad_id, reference)
    updater.faults_folder = run.folder / "faults"
    if resumed is not None:
        checkpoint.load_optimizer(resumed, updater.optimizer)
        _restore_counters(updater, run.state)
    run.rollout.sampler.load_weights(trained_weights(run.model))
    return updater


def _restore_counters(updater: Updater, state: TrainState) -> None:
    updater.num_skipped = state.num_skipped_steps
    updater.num_skipped_in_a_row = state.num_skipped_in_a_row
    budget = state.max_tokens_per_microbatch or updater.max_tokens_per_microbatch
    updater.max_tokens_per_microbatch = min(budget, updater.max_tokens_per_microbatch)


def start_stage(run: Run, stage: Stage) -> None:
    """At a stage's first step, make the policy the reference where the recipe says so."""
    assert run.updater is not None
    reference = run.updater.reference
    if reference is None:
        return
    if run.config.grpo.sync_ref_model and run.state.step == stage.first_step:
        reference.refresh()
    when = f"of the reference policy in stage {stage.name}"
    run.ranks.check_same_parameters(reference.parameters.items(), when)


def _base_of_adapters(run: Run) -> str:
    """The folder or hub id of the model that adapters belong to, written now if it is nowhere."""
    folder = run.folder / "checkpoints"
    name = run.config.model.model
    if (folder / "warm-start").is_dir():
        return str(_whole(folder / "warm-start").resolve())
    if name != "tiny" and not lora.is_adapter(name):
        return str(Path(name).resolve()) if Path(name).is_dir() else name
    if run.ranks.is_main and not (folder / "base").is_dir():
        run.state.sizes = run.log.sizes()
        checkpoint.save(folder, "base", run.model, run.parts.tokenizer, run.state)
    run.ranks.barrier("base model")
    return str((folder / "base").resolve())


def _folder_of_reference(run: Run) -> Path | None:
    """The checkpoint with the weights of the reference; None for the model as it came."""
    stages, folder = run.stages, run.folder / "checkpoints"
    under_way = next((s.index for s in stages if not run.state.evaluated(s.name)), len(stages))
    if run.config.grpo.sync_ref_model and under_way > 0:
        return _whole(folder / f"stage-{under_way}-{stages[under_way - 1].name}")
    return _whole(folder / "warm-start") if (folder / "warm-start").is_dir() else None


def _whole(path: Path) -> Path:
    """A checkpoint that the one to resume from builds on; UserError where it is damaged."""
    if why := problem(path):
        raise UserError(
            f"resume_from_checkpoint: {path.name}, which the run builds on, is damaged ({why}); "
            "restore it, or start anew"
        )
    return path


@torch.no_grad()
def _set_weights(run: Run, folder: Path | None) -> None:
    """Give the model, or its adapters, the weights of a checkpoint."""
    config = run.config
    if config.model.use_peft:
        if folder is not None and lora.is_adapter(folder):
            lora.load(run.model, folder)
        return  # fresh adapters change nothing
    if folder is None:
        loaded = load_model(config.model, run.parts.tokenizer, config.run.seed)
    else:
        loaded = load_folder(folder, config.model)
    for own, other in zip(run.model.parameters(), loaded.parameters(), strict=True):
        own.copy_(other)
