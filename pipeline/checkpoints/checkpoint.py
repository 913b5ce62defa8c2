"""Checkpoints: written aside, synced, described by a manifest, renamed; then older ones go.

A checkpoint is a folder that `from_pretrained` loads (model, or LoRA adapters, and tokenizer), with
`optimizer.pt`, `state.json` and `manifest.json`. The learning-rate schedule and the place in the
tasks are functions of the step and the settings, and every draw has a key of its own, so that
there is no state of a scheduler, a data loader or a random generator to keep.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes that of Python from 3.12 on

from pipeline.checkpoints.manifest import PREVIOUS, WRITING, newest_first, number_of, write_manifest
from pipeline.checkpoints.run_folder import FORMAT, read_state
from pipeline.errors import UserError
from pipeline.files.durable import sync, write_text
from pipeline.files.untrusted import reason_of, shown
from pipeline.models import lora
from pipeline.models.weights import has_adapters


class _Validation(TypedDict):
    """What is read of a validation, whatever else it holds."""

    step: int
    success: dict[str, dict[str, Any]]


class _Evaluation(_Validation):
    after: str


class SavedState(TypedDict, total=False):
    """What `state.json` holds beside format and hash: the `state_dict()` of each owner, joined.

    A name that an earlier version did not write is missing; its owner has a default for it.
    """

    # TrainState's
    stage: str
    step: int
    evaluations: list[_Evaluation]
    validations: list[_Validation]
    ended_early: dict[str, int]
    training: dict[str, dict[str, Any]]
    wall_s: float
    config: dict[str, Any]
    # RunLog's
    sizes: dict[str, int]
    tracker_run_id: str | None
    # Updater's
    max_tokens_per_microbatch: int | None
    num_skipped_steps: int
    num_skipped_in_a_row: int
    # ErrorRates'
    error_counts: dict[str, list[int]]


class Stateful(Protocol):
    """An owner of a part of what a checkpoint holds, as in torch."""

    def state_dict(self) -> dict[str, Any]: ...


@dataclass(kw_only=True)
class TrainState:
    """Where a run stands."""

    stage: str = "start"
    step: int = 0  # optimizer steps done
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # as in results.json
    validations: list[dict[str, Any]] = field(default_factory=list)  # as in results.json
    ended_early: dict[str, int] = field(default_factory=dict)  # steps of stages on a plateau
    # Summaries of finished stages.
    training: dict[str, dict[str, Any]] = field(default_factory=dict)
    wall_s: float = 0.0  # of all the processes that brought it here, up to the last save
    config: dict[str, Any] = field(default_factory=dict)  # the settings of the run, resolved

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


def hash_of(config: Mapping[str, Any]) -> str:
    """SHA-256 of the settings as canonical JSON."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def save(
    folder: Path,
    name: str,
    model: Any,
    tokenizer: Any,
    state: Mapping[str, Any],
    optimizer_state: dict[str, Any] | None = None,
) -> Path:
    """Write `folder/name` and point `latest` at it; of a model with LoRA, the adapters alone.

    An interrupted or failing call leaves every earlier checkpoint as it was. Raises OSError where
    the disk is full; what was written of the new checkpoint is removed then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final, writing = folder / name, folder / f"{WRITING}{name}"
    shutil.rmtree(writing, ignore_errors=True)
    number = 1 + max(map(number_of, newest_first(folder)), default=0)
    try:
        _write(writing, model, tokenizer, state, optimizer_state)
        write_manifest(writing, number)
        for path in writing.rglob("*"):
            sync(path)
        sync(writing)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    if final.exists():  # it stays a checkpoint that can be resumed from until the new one is there
        previous = folder / f"{name}{PREVIOUS}"
        shutil.rmtree(previous, ignore_errors=True)
        final.rename(previous)
    writing.rename(final)
    sync(folder)
    write_text(folder / "latest", name + "\n")
    return final


def _write(
    folder: Path,
    model: Any,
    tokenizer: Any,
    state: Mapping[str, Any],
    optimizer_state: dict[str, Any] | None,
) -> None:
    if has_adapters(model):
        lora.save(model, folder)
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if optimizer_state is not None:
        with (folder / "optimizer.pt").open("wb") as file:  # by name, torch hides a full disk
            torch.save(optimizer_state, file)
    content = {"format": FORMAT, **state, "config_hash": hash_of(state.get("config", {}))}
    (folder / "state.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def load_state(path: Path) -> SavedState:
    """The state of a checkpoint; what an earlier version did not write is missing.

    Raises UserError where the format is newer than FORMAT, or a value of another type.
    """
    content, known = read_state(path), SavedState()
    types: dict[str, Any] = get_type_hints(SavedState)
    for name in types.keys() & content.keys():
        known[name] = value = content[name]  # type: ignore[literal-required]
        try:
            TypeAdapter(types[name]).validate_python(value, strict=True)
        except ValidationError:
            raise UserError(
                f"resume_from_checkpoint: {path.name}: state.json has {name} {shown(value)}, which "
                "is not what a run writes; give another checkpoint"
            ) from None
    return known


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """Restore the optimizer if the checkpoint has one (that of the warm start has none)."""
    file = path / "optimizer.pt"
    if not file.is_file():
        return
    try:
        optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    except (UnpicklingError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"resume_from_checkpoint: {path.name}: optimizer.pt does not fit what is trained "
            f"({reason_of(error)}); give another checkpoint"
        ) from None
