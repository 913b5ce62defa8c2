"""Opens the files and datasets that settings name as sources of tasks.

The own files of a dataset's folder say which files are read: none outside the folder. Imports no
torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipeline.data.rows import DatasetRows
from pipeline.data.tasks import Tasks, Visit, load_tasks, tasks_of
from pipeline.errors import UserError
from pipeline.files.hub import hub_reachable
from pipeline.files.untrusted import one_line, parse_json, read_file, shown

KINDS = ("json", "parquet", "csv", "arrow")  # of files whose rows name no further files
MAX_STATE_BYTES = 8 << 20


def open_tasks(domain: str, source: str, split: str, visit: Visit) -> Tasks:
    """The tasks of the file or dataset that `tasks` names for a domain, validated.

    Of a dataset with splits, those of `split`.
    """
    path = Path(source)
    if os.path.isfile(source):
        return load_tasks(path, domain, visit)
    is_named_file = path.suffix in (".json", ".jsonl") or os.path.lexists(source)
    if is_named_file and not os.path.isdir(source):
        raise UserError(
            f"tasks: {domain}: got {shown(source)}, which is no file; give an existing file"
        )
    return tasks_of(_dataset(f"tasks: {domain}", source, split), domain, visit)


def _dataset(setting: str, source: str, split: str) -> DatasetRows:
    """The rows of a folder made by `save_to_disk`, or of what `load_dataset` takes.

    A folder of one `Dataset` is taken whole; of a dataset with splits, `split`.
    """
    from datasets import config, disable_progress_bars, load_from_disk

    path = Path(source)
    disable_progress_bars()
    if not path.is_dir() and not hub_reachable():
        config.HF_HUB_OFFLINE = True  # or it would be asked for half a minute
    try:
        refuse_files_elsewhere(path)
        if (path / "state.json").is_file():
            return DatasetRows(load_from_disk(source), source)
        if (path / "dataset_dict.json").is_file():
            splits = load_from_disk(source)
            if split not in splits:
                raise ValueError(f"it has no split {split!r} but {', '.join(splits)}")
            return DatasetRows(splits[split], f"{source}, {split}")
        return DatasetRows(_load_dataset(source, split), f"{source}, {split}")
    except UserError:
        raise
    except Exception as error:  # whatever `datasets` says of what it cannot load
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"{setting}: got {shown(source)}, which is no file, nor a dataset that can be loaded "
            f"with dataset_train_split {split} ({one_line(reason).rstrip('.')}); give a file, a "
            "folder or a hub id"
        ) from None


def _load_dataset(source: str, split: str) -> Any:
    from datasets import Features, Json, config, load_dataset, load_dataset_builder

    refuse_sources_elsewhere(source, load_dataset_builder(source))
    found = load_dataset(source, split=split)
    has_structs = isinstance(found.features.get("payload"), dict)
    at_hand = Path(source).is_dir() or not config.HF_HUB_OFFLINE
    if has_structs and at_hand and found.info.builder_name == "json":
        # Payloads as they were written: a struct would have the keys of all of them.
        features = Features({**found.features, "payload": Json()})
        found = load_dataset(source, split=split, features=features)
    return found


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
