"""Opens the files and datasets that settings name as sources of tasks.

No file outside a dataset's folder is read, whatever the folder's own files name. Imports no torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipeline.data.rows import DatasetRows
from pipeline.data.tasks import Tasks, Visit, load_tasks, tasks_of
from pipeline.errors import UserError
from pipeline.files.hub import hub_reachable
from pipeline.files.untrusted import parse_json, read_file, reason_of, shown

KINDS = ("json", "parquet", "csv", "arrow")  # of files whose rows name no further files
MAX_STATE_BYTES = 8 << 20


def open_tasks(domain: str, source: str, split: str, visit: Visit) -> Tasks:
    """The tasks of the file or dataset that `tasks` names for a domain, validated.

    Of a dataset with splits, those of `split`.
    """
    path = Path(source)
    if path.is_file():
        return load_tasks(path, domain, visit)
    is_named_file = path.suffix in (".json", ".jsonl") or os.path.lexists(source)
    if is_named_file and not path.is_dir():
        raise UserError(
            f"tasks: {domain}: got {shown(source)}, which is no file; give an existing file"
        )
    try:
        rows = _dataset(source, split)
    except UserError:
        raise
    except Exception as error:  # `datasets` raises errors of many types
        raise UserError(
            f"tasks: {domain}: got {shown(source)}, which is no file, nor a dataset that can be "
            f"loaded with dataset_train_split {split} ({reason_of(error)}); give a file, a folder "
            "or a hub id"
        ) from None
    return tasks_of(rows, domain, visit)


def _dataset(source: str, split: str) -> DatasetRows:
    """The rows of a folder made by `save_to_disk`, or of what `load_dataset` takes.

    A folder of one `Dataset` is taken whole; of a dataset with splits, `split`.
    """
    from datasets import config, disable_progress_bars, load_from_disk

    path = Path(source)
    disable_progress_bars()
    if not path.is_dir() and not hub_reachable():
        config.HF_HUB_OFFLINE = True  # else `datasets` asks the hub for half a minute
    _refuse_files_elsewhere(path)
    if (path / "state.json").is_file():
        return DatasetRows(load_from_disk(source), source)
    if (path / "dataset_dict.json").is_file():
        splits = load_from_disk(source)
        if split not in splits:
            raise ValueError(f"it has no split {split!r} but {', '.join(splits)}")
        return DatasetRows(splits[split], f"{source}, {split}")
    return DatasetRows(_load_dataset(source, split), f"{source}, {split}")


def _load_dataset(source: str, split: str) -> Any:
    from datasets import Features, Json, config, load_dataset, load_dataset_builder

    _refuse_sources_elsewhere(source, load_dataset_builder(source))
    dataset = load_dataset(source, split=split)
    has_structs = isinstance(dataset.features.get("payload"), dict)
    can_be_read_again = Path(source).is_dir() or not config.HF_HUB_OFFLINE
    if has_structs and can_be_read_again and dataset.info.builder_name == "json":
        # Payloads as they were written: a struct would have the keys of all of them.
        features = Features({**dataset.features, "payload": Json()})
        dataset = load_dataset(source, split=split, features=features)
    return dataset


def _refuse_files_elsewhere(folder: Path) -> None:
    """ValueError if a folder made by `save_to_disk` names files that are not its own."""
    for split in _named(folder / "dataset_dict.json", "splits"):
        _refuse_files_elsewhere(folder / split)
    _named(folder / "state.json", "_data_files")


def _named(path: Path, key: str) -> list[str]:
    """The names that a file of a dataset's folder lists; empty if there is no such file.

    Raises ValueError if one is not the plain name of a file or folder.
    """
    if not path.is_file():
        return []
    state = parse_json(read_file(path, MAX_STATE_BYTES).decode())
    if not isinstance(state, dict):
        raise ValueError(f"{path.name} holds no object")
    listed = state.get(key)
    names = []
    for item in listed if isinstance(listed, list) else [listed]:
        name = item.get("filename") if isinstance(item, dict) else item
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{path.name} names {shown(name)}, which is no file of its folder")
        names.append(name)
    return names


def _refuse_sources_elsewhere(source: str, builder: Any) -> None:
    """ValueError if `load_dataset` would read files outside the folder, or off the hub.

    Also for kinds of files whose rows name further files (images, sound).
    """
    if builder.info.builder_name not in KINDS:
        raise ValueError(f"its files are {builder.info.builder_name}, not {' or '.join(KINDS)}")
    for files in (builder.config.data_files or {}).values():
        for file in map(str, files):
            if os.path.isdir(source):
                is_inside = os.path.normpath(file).startswith(os.path.abspath(source) + os.sep)
            else:
                is_inside = file.startswith("hf://datasets/")
            if not is_inside:
                raise ValueError(f"it names the file {shown(file)} outside of it")
