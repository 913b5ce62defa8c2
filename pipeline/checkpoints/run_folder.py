"""The folder of a run: one process writes to it, and a resumed run continues in it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeline.checkpoints.manifest import newest_first, problem, put_aside
from pipeline.config import former
from pipeline.config.recipe import SETTINGS, dump
from pipeline.config.settings import Config
from pipeline.errors import MachineError, UserError
from pipeline.files.durable import write_text
from pipeline.files.layout import RUN_SETTINGS, run_of_checkpoint

# Settings that a resume may change, because no computed number depends on them.
HARMLESS = {"trust_remote_code", "call_timeout", "max_error_rate", "max_skipped_steps"}
HARMLESS |= {"shard_optimizer", "max_sampling_logp_difference"}
HARMLESS |= {name for section, name in SETTINGS if section in ("run", "tracking")}
HARMLESS -= {"seed", "deterministic"}
# The format of state.json. A new number is needed only if older code would misread newer files;
# missing fields have defaults.
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A run folder that this process has locked, and the checkpoint to continue from."""

    folder: Path
    checkpoint: Path | None  # None for a fresh start
    notes: list[str]  # lines for the user
    lock: IO[str]  # closing this file ends the lock


def folder_of(config: Config) -> Path:
    """`output_dir`, the folder of the checkpoint to resume from, or runs/<recipe>-<time>."""
    if config.run.output_dir is not None:
        return config.run.output_dir
    name = config.run.resume_from_checkpoint
    if (folder := run_of_checkpoint(name)) is not None:
        return folder
    if name == "latest":
        raise UserError("resume_from_checkpoint: needs the run's folder; give --output-dir as well")
    begun_s: float | None = None
    if "TORCHELASTIC_RUN_ID" in os.environ:  # ranks that torchrun restarts must find the folder
        import psutil

        begun_s = psutil.Process(os.getppid()).create_time()
    begun = time.strftime("%Y%m%d-%H%M%S", time.localtime(begun_s))
    return Path("runs") / f"{config.recipe}-{begun}"


def restarted(config: Config) -> Config:
    """The settings with `auto` resume where torchrun has restarted the ranks (`--max_restarts`)."""
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not is_restart or config.run.resume_from_checkpoint is not None:
        return config
    run = config.run.model_copy(update={"resume_from_checkpoint": "auto"})
    return config.model_copy(update={"run": run})


def check_folder(config: Config) -> None:
    """Refuse a folder that cannot be used, holds another run, or has no checkpoint to resume.

    It checks only names, so a mistake is reported before anything is loaded.
    """
    folder, name = folder_of(config), config.run.resume_from_checkpoint
    parent = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not (os.path.isdir(parent) and os.access(parent, os.W_OK)):
        why = f"'{parent}' is no folder that can be written to"
        raise UserError(f"output_dir: got '{folder}', but {why}; name another folder")
    if name is not None:
        _candidates(folder, name)
    elif os.path.exists(folder / RUN_SETTINGS):
        remedy = "resume it with --resume-from-checkpoint latest, or name another folder"
        raise UserError(f"output_dir: {folder} holds a run; {remedy}")


def _candidates(folder: Path, name: str) -> list[Path]:
    """The checkpoints that `name` may stand for, newest first; UserError if there is none."""
    checkpoints = newest_first(folder / "checkpoints")
    if name == "auto" or (name == "latest" and checkpoints):
        return checkpoints
    inside = folder / "checkpoints" / name
    path = inside if inside.is_dir() else Path(name)
    known = ", ".join(sorted(path.name for path in checkpoints)) or "none"
    why = f"got {name!r}; checkpoints here: {known}"
    if name == "latest":
        why = f"{folder} holds no checkpoint; check --output-dir, or remove it and start anew"
    elif path.is_dir():
        if path.resolve().parent == (folder / "checkpoints").resolve():
            return [path]
        why = f"got {name!r}, which is no checkpoint of {folder}; for a new run, give it as --model"
    raise UserError(f"resume_from_checkpoint: {why}")


def find_checkpoint(folder: Path, name: str) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint that `name` may stand for, and notes on damaged ones.

    `auto` gives None if there is none, other names raise UserError.
    """
    notes: list[str] = []
    for path in _candidates(folder, name):
        if not (why := problem(path)):
            return path, notes
        notes.append(f"warning: checkpoint {path.name} is passed over: {why}")
    if name == "auto":
        return None, notes
    why = notes[0].removeprefix("warning: checkpoint ")
    raise UserError(
        f"resume_from_checkpoint: got {name!r}, but {folder} holds no whole checkpoint of that "
        f"name ({why}); give latest or an earlier one, or start anew"
    )


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The content of a checkpoint's state.json, with settings of earlier versions translated.

    Raises UserError if its format is newer than FORMAT.
    """
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    if (number := state.get("format", 1)) > FORMAT:
        raise UserError(
            f"resume_from_checkpoint: {checkpoint.name} has format {number}, and this version of "
            f"the pipeline reads formats up to {FORMAT}; resume it with the version that wrote it, "
            "or a newer one"
        )
    return {**state, "config": former.translated(state.get("config", {}))}


def open_folder(config: Config) -> Opened:
    """On rank 0: make or reopen the folder and lock it; `begin` writes into it.

    Raises UserError if the folder or the settings do not fit.
    """
    check_folder(config)
    folder, name = folder_of(config), config.run.resume_from_checkpoint
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a", encoding="utf-8")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        why = "is in use by a run that is still alive; end it first, or"
        raise UserError(f"output_dir: {folder} {why} name another folder") from None
    except OSError as error:
        why = f"cannot be written to ({error.strerror or error});"
        raise UserError(f"output_dir: {folder} {why} name another folder") from None
    checkpoint, notes = find_checkpoint(folder, name) if name else (None, [])
    if checkpoint is not None:
        notes += refuse_changes(config, read_state(checkpoint)["config"], checkpoint.name)
    return Opened(folder=folder, checkpoint=checkpoint, notes=notes, lock=lock)


def begin(opened: Opened, config: Config, step: int, evaluated: set[str]) -> None:
    """Write the settings; hide later checkpoints, and remove transcripts of later steps.

    `evaluated` names the evaluations of the checkpoint. Call it after the last check.
    """
    folder = opened.folder
    put_aside(folder / "checkpoints", opened.checkpoint)
    transcripts = folder / "trajectories"
    for part in transcripts.glob("evaluation-*"):
        if part.name.removeprefix("evaluation-") not in evaluated:
            shutil.rmtree(part)
    for path in transcripts.glob("*/step-*"):
        if int(path.name[5:].partition(".")[0]) > step:
            path.unlink()
    now = {"output_dir": folder, "resume_from_checkpoint": None, "override": False}
    kept = config.model_copy(update={"run": config.run.model_copy(update=now)})
    write_text(folder / RUN_SETTINGS, dump(kept))


def refuse_changes(config: Config, old: dict[str, Any], name: str) -> list[str]:
    """Refuse settings that differ from the checkpoint's and are not harmless.

    With `override`, returns a note on them instead.
    """
    new, defaults = config.model_dump(mode="json"), Config().model_dump(mode="json")
    changes = []
    for section, setting in SETTINGS:
        before = old.get(section, {}).get(setting, defaults[section][setting])
        now = new[section][setting]
        if before != now and setting not in HARMLESS:
            changes.append(f"{setting} {json.dumps(before)} -> {json.dumps(now)}")
    if not changes:
        return []
    if config.run.override:
        return [f"overridden since {name}: {', '.join(changes)}"]
    raise UserError(
        f"resume_from_checkpoint: {name} was made with other settings ({', '.join(changes)}); "
        "resume with its settings, or add --override"
    )


def check_still_there(folder: Path, lock: IO[str] | None) -> None:
    """MachineError if the folder was removed or replaced; rank 0 passes its open lock file."""
    with suppress(FileNotFoundError):
        current = os.stat(folder / ".lock")
        if lock is None or os.path.samestat(current, os.fstat(lock.fileno())):
            return
    why = "was removed or replaced during the run, which ends; start again"
    raise MachineError(f"output_dir: {folder} {why}")


def machine_fault(error: BaseException, folder: Path, lock: IO[str] | None) -> MachineError | None:
    """The fault of the machine that caused `error`: a missing folder, a full disk; None if neither.

    safetensors and tokenizers give the system's error number only in their messages.
    """
    try:
        check_still_there(folder, lock)
    except MachineError as gone:
        return gone
    messages = f"{error} {error.__cause__} {error.__context__}"
    for number in (errno.ENOSPC, errno.EDQUOT):
        if f"[Errno {number}]" in messages or f"(os error {number})" in messages:
            why = f"the disk of {folder} is full ({os.strerror(number)})"
            remedy = "free some space, then resume with --resume-from-checkpoint latest"
            return MachineError(f"output_dir: {why}; the last whole checkpoint stands; {remedy}")
    return None
