"""Folders of datasets, whose own files say which files are read: none outside the folder.

Imports no torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipeline.files.untrusted import parse_json, read_file, shown

KINDS = ("json", "parquet", "csv", "arrow")  # of files whose rows name no further files
MAX_STATE_BYTES = 8 << 20


def refuse_files_elsewhere(folder: Path) -> None:
    """ValueError where a folder made by `save_to_disk` names files that are not its own."""
    if (folder / "dataset_dict.json").is_file():
        splits = _read(folder / "dataset_dict.json").get("splits")
        for split in _plain_names(splits, folder / "dataset_dict.json"):
            refuse_files_elsewhere(folder / split)
    if (folder / "state.json").is_file():
        files = _read(folder / "state.json").get("_data_files")
        names = [f.get("filename") if isinstance(f, dict) else f for f in _listed(files)]
        _plain_names(names, folder / "state.json")


def _read(path: Path) -> dict[str, Any]:
    found = parse_json(read_file(path, MAX_STATE_BYTES).decode())
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds no object")
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _plain_names(names: Any, path: Path) -> list[str]:
    for name in _listed(names):
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{path.name} names {shown(name)}, which is no file of its folder")
    return _listed(names)


def refuse_sources_elsewhere(source: str, builder: Any) -> None:
    """ValueError where `load_dataset` would read files outside the folder, or off the hub.

    So it is for kinds of files whose rows name further ones (images, sound).
    """
    if builder.info.builder_name not in KINDS:
        raise ValueError(f"its files are {builder.info.builder_name}, not {' or '.join(KINDS)}")
    for files in (builder.config.data_files or {}).values():
        for file in map(str, files):
            if os.path.isdir(source):
                inside = os.path.normpath(file).startswith(os.path.abspath(source) + os.sep)
            else:
                inside = file.startswith("hf://datasets/")
            if not inside:
                raise ValueError(f"it names the file {shown(file)} outside of it")
