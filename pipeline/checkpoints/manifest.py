"""Which checkpoints of a folder are whole: their manifests, their order, and what is put aside.

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
ASIDE, WRITING = ".aside-", ".writing-"  # hidden: what a resume left behind, and unfinished saves
PREVIOUS = ".previous"  # ends the name of a checkpoint that is being replaced


def write_manifest(folder: Path, number: int) -> None:
    """Describe all files below `folder`; `number` counts the saves of a run."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256(path)}
        for path in paths
    }
    manifest = {"number": number, "files": files}
    text = json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None where every byte is as it was written.

    Libraries load what they find in a folder, so nothing that the manifest does not list may be
    there but notes of people (*.md) and hidden files, and no link, which may lead outside.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        there = (folder / MANIFEST).is_file()
        return f"{MANIFEST} is damaged" if there else f"it has no {MANIFEST}"
    if folder.is_symlink():
        return "it is a link"
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            return f"{name} is a link"
        if not path.is_dir() and name not in (MANIFEST, *manifest["files"]) and _is_read(path):
            return f"{name} is not in its {MANIFEST}"
    for name, wanted in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != wanted["size"]:
            return f"{name} has {path.stat().st_size} bytes of {wanted['size']}"
        if sha256(path) != wanted["sha256"]:
            return f"{name} is not what was written (its SHA-256 differs)"
    return None


def _is_read(path: Path) -> bool:
    """Whether a library could load it; notes of people and hidden files are not loaded."""
    return path.suffix.lower() != ".md" and not path.name.startswith(".")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint; None where it cannot be read as one."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        digest = manifest.pop("sha256")
        names = [Path(name) for name in manifest["files"]]
        sound = "state.json" in manifest["files"] and isinstance(manifest["number"], int)
        sound &= all({"size", "sha256"} <= set(file) for file in manifest["files"].values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    inside = not any(name.is_absolute() or ".." in name.parts for name in names)
    return manifest if sound and inside and digest == _digest(manifest) else None


def number_of(folder: Path) -> int:
    """The number of a checkpoint in its run; -1 where its manifest does not tell."""
    manifest = read_manifest(folder)
    return -1 if manifest is None else int(manifest["number"])


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whole or not; first those that do not tell their number."""
    found = {path: number_of(path) for path in folder.glob("[!.]*") if path.is_dir()}
    return sorted(found, key=lambda p: (found[p] < 0, found[p], p.name), reverse=True)


def put_aside(folder: Path, kept: Path | None) -> None:
    """Hide the checkpoints that are no part of a run which goes on from `kept`, or afresh.

    These are later ones and those whose manifest cannot be read. They stay on disk until the run
    has written its next checkpoint.
    """
    last = -1 if kept is None else number_of(kept)
    for path in newest_first(folder):
        if kept is not None and path.name == kept.name:
            continue
        if number_of(path) > last or number_of(path) < 0:
            aside = path.with_name(f"{ASIDE}{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    if folder.is_dir():
        sync(folder)


def prune(folder: Path, limit: int | None, latest: Path) -> None:
    """Remove what nobody needs once `latest` is written.

    That is what was put aside or replaced, unfinished saves and, given a `limit`, all but so many
    of the newest checkpoints inside stages. Those of stages' ends are kept.
    """
    useless = [
        p for kind in (f"{ASIDE}*", f"{WRITING}*", f"*{PREVIOUS}") for p in folder.glob(kind)
    ]
    steps = [path for path in newest_first(folder) if path.name.startswith("step-")]
    surplus = [] if limit is None else steps[limit:]
    for path in [*useless, *surplus]:
        if path.name != latest.name:
            shutil.rmtree(path, ignore_errors=True)
