"""Writes and checks manifests of checkpoints; orders and removes checkpoints.

A manifest holds the number of the checkpoint in the run, and the size and SHA-256 of each file. A
save writes the manifest last, so a folder without a manifest is no checkpoint.
"""

import hashlib
import json
import shutil
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from pipeline.files.durable import sync

MANIFEST = "manifest.json"
ASIDE = ".aside-"  # prefix of the name of a checkpoint that a resumed run does not use
WRITING = ".writing-"  # prefix of the name of an unfinished checkpoint
PREVIOUS = ".previous"  # suffix of the name of a checkpoint that a save replaces


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
        exists = (folder / MANIFEST).is_file()
        return f"{MANIFEST} is damaged" if exists else f"it has no {MANIFEST}"
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
