"""The folder of a run: opened once, by rank 0, and never written over."""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.config import Config, UserError
from pipeline.recipe import dump


def folder_of(config: Config) -> Path:
    """`output_dir`, or runs/<recipe>-<time> below the working directory."""
    if config.run.output_dir is not None:
        return config.run.output_dir
    if config.run.resume_from_checkpoint is not None:
        raise UserError("resume_from_checkpoint: needs the run's folder; give --output-dir as well")
    return Path("runs") / f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"


def check_folder(config: Config) -> None:
    """Refuse a folder that holds a run, unless that run is resumed."""
    folder = config.run.output_dir
    if config.run.resume_from_checkpoint is not None:
        find_checkpoint(folder_of(config), config.run.resume_from_checkpoint)
    elif folder is not None and (folder / "config.yaml").exists():
        raise UserError(
            f"output_dir: {folder} holds a run; resume it with --resume-from-checkpoint latest, "
            "remove it, or name another folder"
        )


def find_checkpoint(output_dir: Path, name: str) -> Path:
    """The checkpoint that `--resume-from-checkpoint` names; UserError where there is none."""
    folder = output_dir / "checkpoints"
    if name == "latest":
        pointer = folder / "latest"
        if not pointer.is_file():
            raise UserError(
                f"resume_from_checkpoint: {output_dir} holds no checkpoint; check --output-dir, or "
                "remove the folder and start anew"
            )
        name = pointer.read_text(encoding="utf-8").strip()
    path = folder / name if (folder / name).is_dir() else Path(name)
    if not (path / "state.json").is_file():
        known = sorted(p.name for p in folder.glob("[!.]*") if p.is_dir())
        raise UserError(
            f"resume_from_checkpoint: got {name!r}; checkpoints here: {', '.join(known) or 'none'}"
        )
    return path


def open_folder(config: Config) -> Path:
    """Make the folder and write the resolved configuration into it."""
    check_folder(config)
    folder = folder_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    kept = config.model_copy(update={"run": config.run.model_copy(update={"output_dir": folder})})
    if not (folder / "config.yaml").exists():
        (folder / "config.yaml").write_text(dump(kept), encoding="utf-8")
    return folder
