"""The checkpoints of a folder: their wholeness, their order, and their removal.

A checkpoint's `manifest.json` holds the size and the SHA-256 of each of its files, and its number
in the run. It is written last, so a folder without one is not a checkpoint. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.files.durable import sync

MANIFEST = "manifest.json"
# Prefixes of hidden folders: checkpoints that a resume does not continue, and unfinished saves.
ASIDE, WRITING = ".aside-", ".writing-"
PREVIOUS = ".previous"  # ends the name of a checkpoint that is being replaced


def write_manifest(folder: Path, number: int) -> None:
    """Describe all files below `folder`; `number` counts the saves of a run."""
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"number": number, "files": files}
    text = json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if every byte is as it was written.

    Libraries load any file in a folder, so a file must be in the manifest, unless it is hidden or a
    note (*.md). Links may lead outside, so they are refused.
    """
    if (manifest := read_manifest(folder)) is None:
        exists = (folder / MANIFEST).is_file()
        return f"{MANIFEST} is damaged" if exists else f"it has no {MANIFEST}"
    if folder.is_symlink():
        return "it is a link"
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            return f"{name} is a link"
        is_loaded = path.is_file() and path.suffix.lower() != ".md" and path.name[0] != "."
        if is_loaded and name not in (MANIFEST, *manifest["files"]):
            return f"{name} is not in its {MANIFEST}"
    for name, written in manifest["files"].items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _sha256(folder / name) != written["sha256"]:
            return f"{name} is not what was written (its SHA-256 differs)"
    return None


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint; None if it is missing or damaged."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        digest = manifest.pop("sha256")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return manifest if digest == _digest(manifest) else None


def number_of(folder: Path) -> int:
    """The number of a checkpoint in its run; -1 if its manifest cannot be read."""
    manifest = read_manifest(folder)
    return -1 if manifest is None else int(manifest["number"])


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in a folder, damaged ones included; first those without a number."""
    numbers = {path: number_of(path) for path in folder.glob("[!.]*") if path.is_dir()}
    return sorted(numbers, key=lambda p: (numbers[p] < 0, numbers[p], p.name), reverse=True)


def put_aside(folder: Path, kept: Path | None) -> None:
    """Hide the checkpoints after `kept` (None: all) and the ones without a number.

    They stay on disk until the run has written its next checkpoint.
    """
    last = -1 if kept is None else number_of(kept)
    for path in newest_first(folder):
        if not 0 <= number_of(path) <= last:
            aside = path.with_name(f"{ASIDE}{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    if folder.is_dir():
        sync(folder)


def prune(folder: Path, limit: int, latest: Path) -> None:
    """Remove useless checkpoints after `latest` was written.

    These are hidden and replaced ones, unfinished saves, and all but the `limit` newest ones inside
    stages. Checkpoints at the ends of stages are kept.
    """
    useless = [path for path in newest_first(folder) if path.name.startswith("step-")][limit:]
    for pattern in (f"{ASIDE}*", f"{WRITING}*", f"*{PREVIOUS}"):
        useless += folder.glob(pattern)
    for path in useless:
        if path.name != latest.name:
            shutil.rmtree(path, ignore_errors=True)
