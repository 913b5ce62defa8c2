"""Atomic checkpoints: written aside, synced, described by a manifest, then renamed.

A checkpoint is a folder that `from_pretrained` loads (model, or LoRA adapters, and tokenizer), with
`optimizer.pt`, `state.json` and `manifest.json`. The learning rate and the order of tasks are
functions of the step and the settings, and each random draw has its own key, so there is no state
of a scheduler, a data loader or a random generator to save.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints.manifest import PREVIOUS, WRITING, newest_first, number_of, write_manifest
from pipeline.checkpoints.run_folder import FORMAT
from pipeline.files.durable import sync, write_text
from pipeline.models import lora
from pipeline.models.weights import has_adapters

# The content of state.json: the joined `state_dict()` of all owners, and `format`, `config_hash`.
# Files of earlier versions lack some names; the owner of a missing name has a default.
SavedState = dict[str, Any]


@dataclass(kw_only=True)
class TrainState:
    """The position of a run, and its results so far."""

    stage: str = "start"
    step: int = 0  # optimizer steps done
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # as in results.json
    validations: list[dict[str, Any]] = field(default_factory=list)  # as in results.json
    ended_early: dict[str, int] = field(default_factory=dict)  # steps of stages on a plateau
    # Summaries of finished stages.
    training: dict[str, dict[str, Any]] = field(default_factory=dict)
    wall_s: float = 0.0  # up to the last save, over all processes before it
    config: dict[str, Any] = field(default_factory=dict)  # the resolved settings of the run

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.__dataclass_fields__.keys() & state.keys():
            setattr(self, name, state[name])

    @property
    def position(self) -> tuple[int, int]:
        """Steps and evaluations done."""
        return self.step, len(self.evaluations)

    def evaluated(self, after: str) -> bool:
        return any(evaluation["after"] == after for evaluation in self.evaluations)

    def validated(self, step: int) -> bool:
        return any(validation["step"] == step for validation in self.validations)


def save(
    folder: Path,
    name: str,
    model: Any,
    tokenizer: Any,
    state: Mapping[str, Any],
    optimizer_state: dict[str, Any] | None = None,
) -> Path:
    """Write `folder/name` and point `latest` at it; of a model with LoRA, only the adapters.

    An interrupted or failing call leaves every earlier checkpoint as it was. Raises OSError if
    the disk is full, and removes the unfinished checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final, writing = folder / name, folder / f"{WRITING}{name}"
    shutil.rmtree(writing, ignore_errors=True)
    number = 1 + max(map(number_of, newest_first(folder)), default=0)
    config = json.dumps(state.get("config", {}), sort_keys=True).encode()
    content = {"format": FORMAT, **state, "config_hash": hashlib.sha256(config).hexdigest()}
    try:
        if has_adapters(model):
            lora.save(model, writing)
        else:
            model.save_pretrained(writing)
        tokenizer.save_pretrained(writing)
        if optimizer_state is not None:
            with (writing / "optimizer.pt").open("wb") as file:  # a path would hide a full disk
                torch.save(optimizer_state, file)
        (writing / "state.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        write_manifest(writing, number)
        for path in (*writing.rglob("*"), writing):
            sync(path)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    if final.exists():  # a resume may start from it until the new one is in its place
        previous = folder / f"{name}{PREVIOUS}"
        shutil.rmtree(previous, ignore_errors=True)
        final.rename(previous)
    writing.rename(final)
    sync(folder)
    write_text(folder / "latest", name + "\n")
    return final


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """Restore the optimizer from a checkpoint; that of the warm start has none."""
    if (file := path / "optimizer.pt").is_file():
        optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
