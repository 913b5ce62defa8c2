"""The folder of a run: one process writes it, a resume goes on in it, nothing is written over."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeline.checkpoints.manifest import newest_first, problem, put_aside
from pipeline.config import former
from pipeline.config.recipe import SETTINGS, Key, dump
from pipeline.config.settings import Config
from pipeline.errors import MachineError, UserError
from pipeline.files.durable import write_text
from pipeline.files.layout import run_of_checkpoint

# Settings that decide nothing that is computed: a resume may change them.
HARMLESS = {
    ("run", name)
    for name in (
        "num_gpus",
        "output_dir",
        "save_steps",
        "save_minutes",
        "save_total_limit",
        "resume_from_checkpoint",
        "override",
        "timeout",
        "profile",
        "doctor",
        "check",
    )
}
HARMLESS |= {(section, name) for section, name in SETTINGS if section == "tracking"}
HARMLESS |= {
    ("model", "trust_remote_code"),
    ("rollout", "call_timeout"),
    ("rollout", "max_error_share"),
    ("grpo", "max_skipped_steps"),
    ("grpo", "shard_optimizer"),
    ("grpo", "logprob_gap_limit"),
}
# Of checkpoints, as their state.json names it; raised only where older code would misread newer
# ones. A field that is added needs no new format: where it is missing, it has its default.
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A run folder that is ours, and where to go on from."""

    folder: Path
    checkpoint: Path | None  # None for a start from the beginning
    notes: list[str]  # what the user should hear
    lock: IO[str]  # held while the run lives


def folder_of(config: Config) -> Path:
    """`output_dir`, that of the checkpoint to resume from, or runs/<recipe>-<time>."""
    if config.run.output_dir is not None:
        return config.run.output_dir
    name = config.run.resume_from_checkpoint
    if (folder := run_of_checkpoint(name)) is not None:
        return folder
    if name == "latest":
        raise UserError("resume_from_checkpoint: needs the run's folder; give --output-dir as well")
    return Path("runs") / f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S', _begun())}"


def _begun() -> time.struct_time:
    """The time of the start; of the launcher's, so that ranks it starts anew find their folder."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return time.localtime()
    import psutil

    return time.localtime(psutil.Process(os.getppid()).create_time())


def restarted(config: Config) -> Config:
    """What a launcher's restart means (torchrun's `--max_restarts`): go on where the run stood."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not again or config.run.resume_from_checkpoint is not None:
        return config
    run = config.run.model_copy(update={"resume_from_checkpoint": "auto"})
    return config.model_copy(update={"run": run})


def check_folder(config: Config) -> None:
    """Refuse, before anything is loaded, a folder that holds another run, or none to resume.

    Whether checkpoints are whole is looked at later, once.
    """
    folder, name = folder_of(config), config.run.resume_from_checkpoint
    if name is None and (folder / "config.yaml").exists():
        raise UserError(
            f"output_dir: {folder} holds a run; resume it with --resume-from-checkpoint latest, "
            "remove it, or name another folder"
        )
    if name == "latest" and not newest_first(folder / "checkpoints"):
        raise UserError(
            f"resume_from_checkpoint: {folder} holds no checkpoint; check --output-dir, or "
            "remove the folder and start anew"
        )
    if name not in (None, "latest", "auto"):
        _named(folder, str(name))


def _named(folder: Path, name: str) -> Path:
    """The checkpoint that is meant by a name or path; UserError where there is none."""
    inside = folder / "checkpoints" / name
    path = inside if inside.is_dir() else Path(name)
    if not path.is_dir():
        known = sorted(path.name for path in newest_first(folder / "checkpoints"))
        raise UserError(
            f"resume_from_checkpoint: got {name!r}; checkpoints here: {', '.join(known) or 'none'}"
        )
    if path.resolve().parent != (folder / "checkpoints").resolve():
        raise UserError(
            f"resume_from_checkpoint: got {name!r}, which is no checkpoint of {folder}; to train "
            "it further in a new run, give it as --model"
        )
    return path


def find_checkpoint(folder: Path, name: str) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, every byte of it verified, and what is wrong with newer ones.

    `latest` is the newest that is whole; with `auto` there may be none. Raises UserError where
    `latest` finds none, and where one that is named is not whole.
    """
    if name not in ("latest", "auto"):
        path = _named(folder, name)
        if why := problem(path):
            raise UserError(
                f"resume_from_checkpoint: {path.name} is damaged ({why}); give latest, which "
                "finds the newest that is whole"
            )
        return path, []
    notes: list[str] = []
    for path in newest_first(folder / "checkpoints"):
        if not (why := problem(path)):
            return path, notes
        notes.append(f"warning: checkpoint {path.name} is passed over: {why}")
    if name == "auto":
        return None, notes
    raise UserError(
        f"resume_from_checkpoint: {folder} holds no whole checkpoint"
        + (f" ({notes[0].removeprefix('warning: checkpoint ')})" if notes else "")
        + "; check --output-dir, or remove the folder and start anew"
    )


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint's state.json holds, `config` among it; UserError where it is not readable.

    The first files named no format. Settings of earlier versions are translated.
    """
    name = f"resume_from_checkpoint: {checkpoint.name}"
    try:
        found = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        number, config = found.get("format", 1), found.setdefault("config", {})
        sound = type(number) is int and isinstance(config, dict)
        sound &= all(isinstance(config.get(section, {}), dict) for section, _ in SETTINGS)
    except (OSError, ValueError, RecursionError, AttributeError):
        sound = False
    if not sound:
        raise UserError(f"{name}: state.json is not that of a run; give another checkpoint")
    if number > FORMAT:
        raise UserError(
            f"{name} has format {number}, and this version of the pipeline reads formats up to "
            f"{FORMAT}; resume it with the version that wrote it, or a newer one"
        )
    settings = {
        section: former.translated(section, values) if isinstance(values, dict) else values
        for section, values in config.items()
    }
    return {**found, "config": settings}


def open_folder(config: Config) -> Opened:
    """Make or reopen the folder, and keep others out; on rank 0 alone.

    Nothing in it is changed: see `begin`. Raises UserError for every reason not to.
    """
    check_folder(config)
    folder, name = folder_of(config), config.run.resume_from_checkpoint
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"output_dir: {folder} cannot be written to ({reason}); name another folder"
        ) from None
    checkpoint, notes = find_checkpoint(folder, name) if name else (None, [])
    if checkpoint is not None:
        notes += refuse_changes(config, read_state(checkpoint)["config"], checkpoint.name)
    return Opened(folder=folder, checkpoint=checkpoint, notes=notes, lock=lock)


def begin(opened: Opened, config: Config, step: int, evaluated: set[str]) -> None:
    """Write the settings, and hide or remove what an earlier attempt left beyond `step`.

    Comes once nothing can be refused any more.
    """
    folder = opened.folder
    put_aside(folder / "checkpoints", opened.checkpoint)
    remove_trajectories(folder / "trajectories", step, evaluated)
    now = {"output_dir": folder, "resume_from_checkpoint": None, "override": False}
    kept = config.model_copy(update={"run": config.run.model_copy(update=now)})
    write_text(folder / "config.yaml", dump(kept))


def _lock(folder: Path) -> IO[str]:
    """Hold the folder, as long as the file that is returned stays open, against a second run."""
    lock = (folder / ".lock").open("a", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"output_dir: {folder} is in use by a run that is still alive; end it first, or name "
            "another folder"
        ) from None
    return lock


def refuse_changes(config: Config, old: dict[str, Any], name: str) -> list[str]:
    """Refuse settings that are not those of the checkpoint, unless harmless or overridden.

    Returns what to say of those that are overridden.
    """
    changed = changed_settings(config, old)
    if not changed:
        return []
    texts = [
        f"{key[1]} {_shown(before)} -> {_shown(now)}" for key, (before, now) in changed.items()
    ]
    if config.run.override:
        return [f"overridden since {name}: {', '.join(texts)}"]
    (_, first), (before, now) = next(iter(changed.items()))
    others = f" (and {', '.join(texts[1:])})" if texts[1:] else ""
    raise UserError(
        f"{first}: got {_shown(now)}, but {name} was made with {_shown(before)}{others}; resume "
        "with its settings, or add --override"
    )


def changed_settings(config: Config, old: dict[str, Any]) -> dict[Key, tuple[Any, Any]]:
    """Settings that differ from a checkpoint's and are not harmless: what they were and are."""
    new, defaults = config.model_dump(mode="json"), Config().model_dump(mode="json")
    return {
        (section, name): (before, new[section][name])
        for section, name in SETTINGS
        if (section, name) not in HARMLESS
        and (before := old.get(section, {}).get(name, defaults[section][name]))
        != new[section][name]
    }


def _shown(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


def check_still_there(folder: Path, lock: IO[str] | None) -> None:
    """MachineError where somebody removed the folder under a run, or put another one in its place.

    `lock` is the file that the run holds, if this process does.
    """
    try:
        there = os.stat(folder / ".lock")
        if lock is None or os.path.samestat(there, os.fstat(lock.fileno())):
            return
    except FileNotFoundError:
        pass
    raise MachineError(
        f"output_dir: {folder} was removed or replaced under the run, which ends and writes "
        "nothing anew; start again"
    )


def machine_fault(error: BaseException, folder: Path, lock: IO[str] | None) -> MachineError | None:
    """What of the machine made a run fail: a folder that is gone, or a full disk; None if neither.

    safetensors and tokenizers name the number of the system's error in their text alone.
    """
    try:
        check_still_there(folder, lock)
    except MachineError as gone:
        return gone
    links: list[BaseException | None] = [error, error.__cause__, error.__context__]
    for number in (errno.ENOSPC, errno.EDQUOT):
        said = f"(os error {number})"
        if any(getattr(link, "errno", None) == number or said in str(link) for link in links):
            return MachineError(
                f"output_dir: the disk of {folder} is full ({os.strerror(number)}); the last whole "
                "checkpoint stands: free some space, then resume with --resume-from-checkpoint "
                "latest"
            )
    return None


def remove_trajectories(folder: Path, step: int, evaluated: set[str]) -> None:
    """Remove transcripts that a run which goes on from `step` writes again."""
    for part in folder.glob("*"):
        of_evaluation = part.name.removeprefix("evaluation-")
        if of_evaluation != part.name:
            if of_evaluation not in evaluated:
                shutil.rmtree(part)
            continue
        for path in part.glob("step-*"):
            found = re.match(r"step-(\d+)\.", path.name)
            if found is None or int(found[1]) > step:
                path.unlink()
