"""Where a run starts: its folder, its state and its weights, afresh or from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.checkpoint import SavedState, TrainState
from pipeline.checkpoints.checkpointer import Checkpointer
from pipeline.checkpoints.manifest import problem
from pipeline.checkpoints.run_folder import Opened, open_folder
from pipeline.config.settings import Config, ModelSettings
from pipeline.data.curriculum import Stage
from pipeline.distributed.ranks import Ranks
from pipeline.errors import UserError
from pipeline.models import lora
from pipeline.models.loading import load_folder, load_model


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


def load_start(config: Config, tokenizer: Any, path: Path | None) -> tuple[SavedState, Any]:
    """A fresh model without a state, or those of the checkpoint to resume from."""
    if path is None:
        return SavedState(), load_model(config.model, tokenizer, config.run.seed)
    state = checkpoint.load_state(path)
    if state.get("step") and lora.is_adapter(path) != config.model.use_peft:
        held = "LoRA adapters" if lora.is_adapter(path) else "a whole model"
        got = str(config.model.use_peft).lower()
        raise UserError(f"use_peft: got {got}, but {path.name} holds {held}; resume with its value")
    if state.get("step") and config.model.use_peft:
        lora.check_settings(path, config.model)
    return state, load_folder(lora.base_of(path) if lora.is_adapter(path) else path, config.model)


def base_of_adapters(
    model: Any, settings: ModelSettings, ranks: Ranks, checkpointer: Checkpointer
) -> str:
    """The folder or hub id of the model that adapters belong to, written now if it is nowhere."""
    folder, name = checkpointer.folder, settings.model
    if (folder / "warm-start").is_dir():
        return str(_whole(folder / "warm-start").resolve())
    if name != "tiny" and not lora.is_adapter(name):
        return str(Path(name).resolve()) if Path(name).is_dir() else name
    if ranks.is_main and not (folder / "base").is_dir():
        checkpointer.write("base", model)
    ranks.barrier("base model")
    return str((folder / "base").resolve())


def folder_of_reference(
    folder: Path, state: TrainState, stages: Sequence[Stage], sync_ref_model: bool
) -> Path | None:
    """The checkpoint with the weights of the reference; None for the model as it came."""
    under_way = next((s.index for s in stages if not state.evaluated(s.name)), len(stages))
    if sync_ref_model and under_way > 0:
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
def set_weights(model: Any, folder: Path | None, config: Config, tokenizer: Any) -> None:
    """Give the model, or its adapters, the weights of a checkpoint; None: as the model came."""
    if config.model.use_peft:
        if folder is not None and lora.is_adapter(folder):
            lora.load(model, folder)
        return  # fresh adapters change nothing
    if folder is None:
        loaded = load_model(config.model, tokenizer, config.run.seed)
    else:
        loaded = load_folder(folder, config.model)
    for own, other in zip(model.parameters(), loaded.parameters(), strict=True):
        own.copy_(other)
