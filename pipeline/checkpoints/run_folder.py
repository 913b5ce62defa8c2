"""Chooses, checks and locks the folder of a run, and finds the checkpoint to resume."""

import errno
import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

import yaml

from pipeline.checkpoints.manifest import newest_first, problem, put_aside
from pipeline.config.recipe import SETTINGS, dump
from pipeline.config.settings import Config
from pipeline.errors import UserError
from pipeline.files.durable import write_text
from pipeline.files.layout import RUN_SETTINGS, run_of_checkpoint
from pipeline.models.files import problem_of_name

# Settings that a resumed run may change, because no result depends on them.
HARMLESS = {"trust_remote_code", "call_timeout", "max_error_rate", "max_skipped_steps"}
HARMLESS |= {"shard_optimizer", "max_sampling_logp_difference", "rollout_timeout", "tau2"}
HARMLESS |= {"customer_url", "customer_key", "max_customer_calls", "max_customer_tokens"}
HARMLESS |= {"start_report_tasks", *(name for _, name in SETTINGS if "agent_" in name)}
HARMLESS |= {name for section, name in SETTINGS if section in ("run", "tracking")}
HARMLESS -= {"seed", "deterministic"}
FORMAT = 1  # version of a checkpoint's format, which changes with any field or setting in it

FULL = (errno.ENOSPC, errno.EDQUOT)  # error numbers of a full disk and of a full quota


class Opened(NamedTuple):
    """A run folder that this process has locked, and the checkpoint to continue from."""

    folder: Path
    checkpoint: Path | None  # None for a new run
    notes: list[str]  # lines to print for the user
    lock: IO[str]  # the open lock file; closing the file unlocks the folder


def folder_of(config: Config) -> Path:
    """Return the run folder: `output_dir`, the folder of the run to resume, or a new path."""
    if config.run.output_dir is not None:
        return config.run.output_dir
    name = config.run.resume_from_checkpoint
    if (folder := run_of_checkpoint(name)) is not None:
        return folder
    if name == "latest":
        raise UserError("resume_from_checkpoint: needs the run's folder; give --output-dir as well")
    begun_s: float | None = None
    if "TORCHELASTIC_RUN_ID" in os.environ:  # A restart by torchrun must keep the folder.
        import psutil

        begun_s = psutil.Process(os.getppid()).create_time()
    begun = time.strftime("%Y%m%d-%H%M%S", time.localtime(begun_s))
    return Path("runs") / f"{config.recipe}-{begun}"


def restarted(config: Config) -> Config:
    """Return `config`, with `resume_from_checkpoint: auto` if torchrun restarted this process."""
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not is_restart or config.run.resume_from_checkpoint is not None:
        return config
    run = config.run.model_copy(update={"resume_from_checkpoint": "auto"})
    return config.model_copy(update={"run": run})


def take_model_of_run(config: Config) -> tuple[Config, list[str]]:
    """Replace a run folder as `model` by the run's newest undamaged checkpoint.

    Returns the settings, and lines to print for the user. Raises UserError for a run folder without
    an undamaged checkpoint.
    """
    name = config.model.model
    folder = Path(config.model.model)
    is_run = os.path.isfile(folder / RUN_SETTINGS) or os.path.isdir(folder / "checkpoints")
    if name == "tiny" or not (is_run and problem_of_name(name)):
        return config, []
    path, notes = find_checkpoint(folder, "auto")
    if path is None:
        why = notes[0].removeprefix("warning: ") if notes else "it holds none"
        remedy = "resume the run up to its first checkpoint, or give another model"
        raise UserError(f"model: got {name!r}, a run without a whole checkpoint ({why}); {remedy}")
    notes.append(f"model: {path}, the latest checkpoint of its run")
    model = config.model.model_copy(update={"model": str(path)})
    return config.model_copy(update={"model": model}), notes


def check_folder(config: Config) -> None:
    """Raise UserError if the folder is unusable, in use, holds a run or lacks the checkpoint."""
    folder = folder_of(config)
    name = config.run.resume_from_checkpoint
    parent = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not (os.path.isdir(parent) and os.access(parent, os.W_OK)):
        why = f"'{parent}' is no folder that can be written to"
        raise UserError(f"output_dir: got '{folder}', but {why}; name another folder")
    if os.path.exists(folder / ".lock"):
        _lock(folder).close()
    if name is not None:
        _candidates(folder, name)
    elif holds_a_run(folder):
        remedy = "resume it with --resume-from-checkpoint latest, or name another folder"
        raise UserError(f"output_dir: {folder} holds a run; {remedy}")


def holds_a_run(folder: Path) -> bool:
    """Return whether a folder holds more than a start that failed.

    Without a checkpoint there is nothing to resume. What only evaluates has results alone.
    """
    settings = folder / RUN_SETTINGS
    if not os.path.isfile(settings):
        return False
    if newest_first(folder / "checkpoints"):
        return True
    try:
        is_trained = yaml.safe_load(settings.read_text(encoding="utf-8"))["grpo"]["use_grpo"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return True  # not a file that a run has written
    return not is_trained and (folder / "results.json").is_file()


def resumable(config: Config) -> list[Path]:
    """Return the checkpoints that the run may continue from, or [] for a new run."""
    name = config.run.resume_from_checkpoint
    return [] if name is None else _candidates(folder_of(config), name)


def _candidates(folder: Path, name: str) -> list[Path]:
    checkpoints = newest_first(folder / "checkpoints")
    if name == "auto" or (name == "latest" and checkpoints):
        return checkpoints
    inside = folder / "checkpoints" / name
    path = inside if inside.is_dir() else Path(name)
    known = ", ".join(sorted(path.name for path in checkpoints)) or "none"
    why = f"got {name!r}; checkpoints here: {known}"
    if name == "latest":
        why = (
            f"{folder} holds no checkpoint; check --output-dir, or leave the flag out to start anew"
        )
    elif path.is_dir():
        if path.resolve().parent == (folder / "checkpoints").resolve():
            return [path]
        why = f"got {name!r}, which is no checkpoint of {folder}; for a new run, give it as --model"
    raise UserError(f"resume_from_checkpoint: {why}")


def find_checkpoint(folder: Path, name: str) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint that matches `name`, and warnings to print.

    If all checkpoints are damaged: return None if `name` is `auto`, raise UserError otherwise.
    """
    notes: list[str] = []
    for path in _candidates(folder, name):
        if not (why := problem(path)):
            return path, notes
        notes.append(f"warning: checkpoint {path.name} is passed over: {why}")
    if name == "auto":
        return None, notes
    why = f"{folder} holds no whole checkpoint of that name ({notes[0]})"
    remedy = "give latest or an earlier one, or start anew"
    raise UserError(f"resume_from_checkpoint: got {name!r}, but {why}; {remedy}")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of state.json. Raises UserError for a format other than FORMAT."""
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    if (number := state.get("format")) != FORMAT:
        why = f"got {checkpoint.name} with format {number}, but this version reads {FORMAT}"
        raise UserError(f"checkpoint: {why}; use the version of the package that wrote it")
    return state


def open_folder(config: Config) -> Opened:
    """Make and lock the run folder, and find the checkpoint to resume.

    Raises UserError, or OSError for a full disk.
    """
    check_folder(config)
    folder = folder_of(config)
    name = config.run.resume_from_checkpoint
    lock = _lock(folder)
    checkpoint, notes = find_checkpoint(folder, name) if name else (None, [])
    if checkpoint is not None:
        notes += refuse_changes(config, read_state(checkpoint)["config"], checkpoint.name)
    return Opened(folder=folder, checkpoint=checkpoint, notes=notes, lock=lock)


def _lock(folder: Path) -> IO[str]:
    """Make and lock a run folder; return the open lock file.

    The kernel unlocks the file when the process ends. Raises UserError if another run has locked
    it, or OSError for a full disk.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a", encoding="utf-8")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in FULL:
            raise
        why = f"cannot be written to ({error.strerror or error});"
        if isinstance(error, BlockingIOError):
            why = "is in use by a run that is still alive; end it and wait, or"
        raise UserError(f"output_dir: {folder} {why} name another folder") from None
    return lock


def begin(opened: Opened, config: Config, step: int, evaluated: set[str]) -> None:
    """Write the settings; hide or remove all files that are newer than the resumed checkpoint."""
    folder = opened.folder
    put_aside(folder / "checkpoints", opened.checkpoint)
    drop_newer(folder, step, evaluated)
    now = {"output_dir": folder, "resume_from_checkpoint": None, "override": False}
    kept = config.model_copy(update={"run": config.run.model_copy(update=now)})
    write_text(folder / RUN_SETTINGS, dump(kept))


def drop_newer(folder: Path, step: int, evaluated: set[str]) -> None:
    """Remove transcripts of later steps than `step`, and of evaluations not in `evaluated`."""
    transcripts = folder / "trajectories"
    for part in transcripts.glob("evaluation-*"):
        if part.name.removeprefix("evaluation-") not in evaluated:
            shutil.rmtree(part)
    for path in transcripts.glob("*/step-*"):
        if int(path.name[5:].partition(".")[0]) > step:
            path.unlink()


def refuse_changes(config: Config, old: dict[str, Any], name: str) -> list[str]:
    """Raise UserError if a changed setting affects results; with `override`, return a note."""
    new = config.model_dump(mode="json")
    changes = []
    for section, setting in SETTINGS:
        before = old.get(section, {}).get(setting)
        now = new[section][setting]
        if before != now and setting not in HARMLESS:
            changes.append(f"{setting} {json.dumps(before)} -> {json.dumps(now)}")
    if not changes:
        return []
    if config.run.override:
        return [f"overridden since {name}: {', '.join(changes)}"]
    why = f"{name} was made with other settings ({', '.join(changes)})"
    raise UserError(f"resume_from_checkpoint: {why}; resume with its settings, or add --override")
