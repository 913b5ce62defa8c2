"""Chooses, checks and locks the folder of a run; orders, checks and removes its checkpoints.

Each checkpoint has a manifest with the number of the checkpoint in the run, and the size and
SHA-256 of each file. A save writes the manifest last, so a folder without a manifest is no
checkpoint.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

import yaml

from pipeline.common.durable import sync, write_text
from pipeline.common.errors import FULL, UserError
from pipeline.common.layout import METRICS, RUN_SETTINGS, TIMINGS, WARNINGS, run_of_checkpoint
from pipeline.config.recipe import REMOVED, SETTINGS, dump, full_name
from pipeline.config.settings import Config
from pipeline.models.model_files import problem_of_name

PLACE_AND_BUDGET = ("url", "key", "max_calls", "max_tokens")  # of a language model
# Settings that a resumed run may change, because no result depends on them.
HARMLESS = {
    *("trust_remote_code", "call_timeout", "max_error_rate", "max_skipped_steps"),
    *("shard", "reshard_after_forward", "max_sampling_logp_difference", "rollout_timeout", "tau2"),
    *(f"{role}_{name}" for role in ("customer", "judge") for name in PLACE_AND_BUDGET),
    "start_report_tasks",
    *(full_name(*key) for key in SETTINGS if key[0] in ("agent", "run", "tracking")),
} - {"seed", "deterministic"}
TEMPLATE = "tokenizer and chat template"  # a name in `made_of`
FORMAT = 1  # version of a checkpoint's format, which changes with any field or setting in it

MANIFEST = "manifest.json"
ASIDE = ".aside-"  # prefix of the name of a checkpoint that a resumed run does not use
WRITING = ".writing-"  # prefix of the name of an unfinished checkpoint
EARLIER = "earlier-start-"  # prefix of a folder with the results of a run without a checkpoint
RESULTS = "results.json"
TRANSCRIPTS = "trajectories"
PREVIOUS = ".previous"  # suffix of the name of a checkpoint that a save replaces


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
    return config.changed("run", resume_from_checkpoint="auto")


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
        raise UserError(
            f"model: got {name!r}, a run without a whole checkpoint ({why}); resume the run up to "
            "its first checkpoint, or give another model"
        )
    notes.append(f"model: {path}, the latest checkpoint of its run")
    return config.changed("model", model=str(path)), notes


def check_folder(config: Config, folder: Path | None = None) -> None:
    """Raise UserError if the folder is unusable, in use, holds a run or lacks the checkpoint."""
    folder = folder or folder_of(config)
    name = config.run.resume_from_checkpoint
    parent = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        TemporaryDirectory(
            prefix=".tried-", dir=parent
        ).cleanup()  # some folders only seem writable
    except OSError as error:
        raise UserError(
            f"output_dir: got '{folder}', but '{parent}' is no folder that can be written to "
            f"({error.strerror}); name another folder"
        ) from None
    if os.path.exists(folder / ".lock"):
        _lock(folder).close()
    if name is not None:
        _candidates(folder, name)
    elif holds_a_run(folder):
        raise UserError(
            f"output_dir: {folder} holds a run; resume it with --resume-from-checkpoint latest, or "
            "name another folder"
        )


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
    return not is_trained and (folder / RESULTS).is_file()


def resumable(config: Config) -> list[Path]:
    """Return the checkpoints that the run may continue from, or [] for a new run."""
    name = config.run.resume_from_checkpoint
    return [] if name is None else _candidates(folder_of(config), name)


def _candidates(folder: Path, name: str) -> list[Path]:
    checkpoints = newest_first(folder / "checkpoints")
    if name == "auto" or (name == "latest" and checkpoints):
        return checkpoints
    if name == "latest":
        raise UserError(
            f"resume_from_checkpoint: {folder} holds no checkpoint; check --output-dir, or leave "
            "the flag out to start anew"
        )
    inside = folder / "checkpoints" / name
    path = inside if inside.is_dir() else Path(name)
    if path.is_dir() and path.resolve().parent == (folder / "checkpoints").resolve():
        return [path]
    known = ", ".join(sorted(path.name for path in checkpoints)) or "none"
    raise UserError(
        f"resume_from_checkpoint: got {name!r}, which is no checkpoint of {folder}; checkpoints "
        f"here: {known}; for a new run from it, give it as --model"
    )


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
    raise UserError(
        f"resume_from_checkpoint: got {name!r}, but {folder} holds no whole checkpoint of that "
        f"name ({notes[0]}); give latest or an earlier one, or start anew"
    )


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of state.json. Raises UserError for a format other than FORMAT."""
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    if (number := state.get("format")) != FORMAT:
        raise UserError(
            f"checkpoint: got {checkpoint.name} with format {number}, but this version reads "
            f"{FORMAT}; use the version of the package that wrote it"
        )
    return state


def open_folder(config: Config, folder: Path | None = None) -> Opened:
    """Make and lock the run folder, and find the checkpoint to resume.

    Raises UserError, or OSError for a full disk.
    """
    folder = folder or folder_of(config)
    check_folder(config, folder)
    name = config.run.resume_from_checkpoint
    lock = _lock(folder)
    checkpoint, notes = find_checkpoint(folder, name) if name else (None, [])
    if checkpoint is not None:
        notes += refuse_changes(config, read_state(checkpoint), checkpoint.name)
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


def begin_folder(
    opened: Opened, config: Config, num_ranks: int, step: int, evaluated: set[str]
) -> None:
    """Write the run's settings; hide or remove all that is newer than the resumed checkpoint."""
    folder = opened.folder
    if opened.checkpoint is None and (earlier := put_start_aside(folder)):
        opened.notes.append(f"note: an earlier start left no checkpoint, but files: {earlier}")
    put_aside(folder / "checkpoints", opened.checkpoint)
    drop_newer(folder, step, evaluated)
    kept = config.changed(
        "run",
        resume_from_checkpoint=None,
        override=False,
        num_gpus=num_ranks,
        output_dir=folder,
    )
    write_text(folder / RUN_SETTINGS, dump(kept))


def put_start_aside(folder: Path) -> Path | None:
    """Move the results of a run that left no checkpoint; return where they are now, or None."""
    metrics = folder / METRICS
    if not (metrics.is_file() and metrics.stat().st_size) and not (folder / TRANSCRIPTS).is_dir():
        (folder / WARNINGS).unlink(missing_ok=True)
        return None
    names = (folder / f"{EARLIER}{number}" for number in count(1))
    earlier = next(path for path in names if not path.exists())
    earlier.mkdir()
    for name in (RUN_SETTINGS, METRICS, TIMINGS, WARNINGS, RESULTS, TRANSCRIPTS):
        with suppress(FileNotFoundError):
            (folder / name).rename(earlier / name)
    return earlier


def drop_newer(folder: Path, step: int, evaluated: set[str]) -> None:
    """Remove transcripts of later steps than `step`, and of evaluations not in `evaluated`."""
    transcripts = folder / TRANSCRIPTS
    for part in transcripts.glob("evaluation-*"):
        if part.name.removeprefix("evaluation-") not in evaluated:
            shutil.rmtree(part)
    for path in transcripts.glob("*/step-*"):
        if int(path.name[5:].partition(".")[0]) > step:
            path.unlink()


def refuse_changes(config: Config, state: Mapping[str, Any], name: str) -> list[str]:
    """Raise UserError if a changed setting affects results; with `override`, return a note."""
    old = state["config"]
    new = config.model_dump(mode="json")
    usual = Config().model_dump(mode="json")
    # What a file contains counts, not its place, where the checkpoint has the hash.
    harmless = HARMLESS | ({"chat_template"} if TEMPLATE in state.get("made_of", {}) else set())
    changes = []
    for section, key in SETTINGS:
        before = old.get(section, {}).get(
            key, usual[section][key]
        )  # it may be of before the setting
        now = new[section][key]
        setting = full_name(section, key)
        if before != now and setting not in harmless:
            changes.append(f"{setting} {json.dumps(before)} -> {json.dumps(now)}")
    for (section, key), now in REMOVED.items():
        before = old.get(section, {}).get(key, now)
        if before != now:
            changes.append(f"{key} {json.dumps(before)} -> {json.dumps(now)}, which is fixed now")
    if not changes:
        return []
    if config.run.override:
        return [f"overridden since {name}: {', '.join(changes)}"]
    raise UserError(
        f"resume_from_checkpoint: {name} was made with other settings ({', '.join(changes)}); "
        "resume with its settings, or add --override"
    )


def write_manifest(folder: Path, number: int) -> None:
    """Write the manifest of a folder's files. Later checkpoints of a run have a larger `number`."""
    files = {
        path.relative_to(folder).as_posix(): {
            "size": path.stat().st_size,
            "sha256": hash_of(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"number": number, "files": files}
    text = json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def problem(folder: Path) -> str | None:
    """Return a text about the first damaged, linked or unknown file of a checkpoint, or None."""
    if (manifest := read_manifest(folder)) is None:
        is_there = (folder / MANIFEST).is_file()
        return f"{MANIFEST} is damaged" if is_there else f"it has no {MANIFEST}"
    if folder.is_symlink():
        return "it is a link"
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            return f"{name} is a link"
        # A library might load a file that the manifest does not list.
        is_loaded = path.is_file() and path.suffix.lower() != ".md" and path.name[0] != "."
        if is_loaded and name not in (MANIFEST, *manifest["files"]):
            return f"{name} is not in its {MANIFEST}"
    for name, written in manifest["files"].items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if hash_of(folder / name) != written["sha256"]:
            return f"{name} is not what was written (its SHA-256 differs)"
    return None


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint; None if the manifest is missing or damaged."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        digest = manifest.pop("sha256")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return manifest if digest == _digest(manifest) else None


def number_of(folder: Path) -> int:
    """Return the number of a checkpoint in the run; -1 if the manifest cannot be read."""
    manifest = read_manifest(folder)
    return -1 if manifest is None else int(manifest["number"])


def newest_first(folder: Path) -> list[Path]:
    """Return a folder's checkpoints: damaged ones, then the others from newest to oldest."""
    numbers = {path: number_of(path) for path in folder.glob("[!.]*") if path.is_dir()}
    return sorted(numbers, key=lambda p: (numbers[p] < 0, numbers[p], p.name), reverse=True)


def put_aside(folder: Path, kept: Path | None) -> None:
    """Rename checkpoints newer than `kept` (None: all checkpoints), so that no run uses them."""
    last = -1 if kept is None else number_of(kept)
    for path in newest_first(folder):
        if not 0 <= number_of(path) <= last:
            aside = path.with_name(f"{ASIDE}{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    if folder.is_dir():
        sync(folder)


def prune(folder: Path, limit: int, kept: Container[str | None]) -> None:
    """Remove old checkpoints, and checkpoints whose names mark them as unused.

    Of the checkpoints with names `step-...`, keep the newest `limit` and the names in `kept`.
    """
    useless = [path for path in newest_first(folder) if path.name.startswith("step-")][limit:]
    for pattern in (f"{ASIDE}*", f"{WRITING}*", f"*{PREVIOUS}"):
        useless += folder.glob(pattern)
    for path in useless:
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)
