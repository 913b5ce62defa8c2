"""Checkpoints: written aside, synced, renamed, and only then pointed at by `latest`.

A checkpoint is a folder that `from_pretrained` loads (model, or LoRA adapters, and tokenizer), with
`optimizer.pt` and `state.json`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from pipeline import lora


@dataclass(kw_only=True)
class TrainState:
    """Where a run stands."""

    stage: str = "start"
    step: int = 0  # optimizer steps done
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # as in results.json
    # Summaries of finished stages.
    training: dict[str, dict[str, Any]] = field(default_factory=dict)

    def evaluated(self, after: str) -> bool:
        return any(evaluation["after"] == after for evaluation in self.evaluations)


def save(
    folder: Path,
    name: str,
    model: Any,
    tokenizer: Any,
    state: TrainState,
    optimizer_state: dict[str, Any] | None = None,
) -> Path:
    """Write `folder/name` and point `latest` at it; of a model with LoRA, the adapters alone.

    An interrupted call leaves every earlier checkpoint as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{name}.writing"
    shutil.rmtree(aside, ignore_errors=True)
    if isinstance(model, PeftModel):
        lora.save(model, aside)
    else:
        model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    if optimizer_state is not None:
        torch.save(optimizer_state, aside / "optimizer.pt")
    (aside / "state.json").write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
    for path in aside.rglob("*"):
        _sync(path)
    _sync(aside)
    final = folder / name
    if final.exists():  # from before a resume; the name stays free for a moment only
        old = folder / f".{name}.old"
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        aside.rename(final)
        shutil.rmtree(old)
    else:
        aside.rename(final)
    write_text(folder / "latest", name + "\n")
    return final


def write_text(path: Path, text: str) -> None:
    """Replace a small file in one step."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text, encoding="utf-8")
    _sync(aside)
    aside.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prune(folder: Path, limit: int) -> None:
    """Remove all but the newest `limit` checkpoints of `save_steps`.

    Those of stages and `latest` are kept.
    """
    latest = (folder / "latest").read_text(encoding="utf-8").strip()
    for path in sorted(folder.glob("step-*"))[:-limit]:
        if path.name != latest:  # newer ones may stand there from before a resume
            shutil.rmtree(path)


def load_state(path: Path) -> TrainState:
    return TrainState(**json.loads((path / "state.json").read_text(encoding="utf-8")))


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """Restore the optimizer if the checkpoint has one (that of the warm start has none)."""
    if (path / "optimizer.pt").is_file():
        optimizer.load_state_dict(
            torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
        )
