"""Opens the files and datasets that the setting `tasks` lists, without importing torch.

A dataset cannot make the pipeline read files outside the dataset's folder.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from pipeline.common.children import rehearse
from pipeline.common.errors import UserError
from pipeline.common.hub import hub_reachable
from pipeline.common.untrusted import (
    is_inside,
    link_out_of,
    parse_json,
    read_file,
    reason_of,
    shown,
)
from pipeline.data.rows import DatasetRows, JoinedRows, rows_of_dataset_file
from pipeline.data.tasks import Tasks, load_tasks, tasks_of

FORMATS = ("json", "parquet", "csv", "arrow")  # formats whose rows cannot refer to other files
CARDS = ("README.md", ".huggingface.yaml")  # files that name a dataset's data files
HUB = "hf://datasets/"  # start of the names of files on the hub
MAX_STATE_BYTES = 8 << 20
MAX_CARD_BYTES = 8 << 20


def open_tasks(
    domain: str,
    source: str,
    split: str,
    has_columns: bool = False,
    setting: str = "tasks",
) -> Tasks:
    """Return the tasks of a domain's file or dataset. Raises UserError for an invalid task."""
    path = Path(source)
    if path.suffix in (".parquet", ".arrow", ".csv") and path.is_file():
        got = f"got {shown(source)}, a file of a dataset"
        raise UserError(f"{setting}: {domain}: {got}; give its folder, or a JSON Lines file")
    if path.is_file():
        return load_tasks(path, domain, has_columns)
    where = f"{setting}: {domain}: got {shown(source)}, which is no file"
    if not path.is_dir() and (path.suffix in (".json", ".jsonl") or os.path.lexists(source)):
        raise UserError(f"{where}; give an existing file")
    try:
        dataset, name = _dataset(source, split)
        if not isinstance(dataset, JoinedRows):
            dataset.data.validate(full=True)  # a read from a damaged Arrow file may crash
    except Exception as error:  # `datasets` raises errors of many types
        reason = reason_of(error.__cause__ or error)
        fault = f"can be loaded with the split {split} ({reason})"
        split_setting = f"dataset_{'test' if setting == 'eval_tasks' else 'train'}_split"
        remedy = f"give a file, a folder or a hub id, or set {split_setting}"
        raise UserError(f"{where}, nor a dataset that {fault}; {remedy}") from None
    rows = dataset if isinstance(dataset, JoinedRows) else DatasetRows(dataset, name)
    return tasks_of(rows, domain, has_columns)


def has_split(source: str, split: str) -> bool:
    """Return whether a source is a dataset with the split `split`.

    A file and a folder from `Dataset.save_to_disk` have no splits.
    """
    if Path(source).is_file() or (Path(source) / "state.json").is_file():
        return False
    try:
        _dataset(source, split)
    except Exception:  # `datasets` raises errors of many types
        return False
    return True


def _dataset(source: str, split: str) -> tuple[Any, str]:
    """Return a dataset from `save_to_disk` or `load_dataset`, and a name for error messages."""
    from datasets import config, disable_progress_bars, load_from_disk

    path = Path(source)
    disable_progress_bars()
    if not path.is_dir() and not hub_reachable():
        config.HF_HUB_OFFLINE = True  # otherwise `datasets` retries the hub for half a minute
    splits = _named(path / "dataset_dict.json", "splits")
    if link := link_out_of(path, ("", *splits)):
        raise ValueError(f"{shown(link)} is a link that leads out of it")
    for name in ("", *splits):
        _named(path / name / "state.json", "_data_files")
    if (path / "state.json").is_file():
        return load_from_disk(source), source
    if (path / "dataset_dict.json").is_file():
        datasets = load_from_disk(source)
        if split not in datasets:
            raise ValueError(f"it has no split {split!r} but {', '.join(map(str, datasets))}")
        return datasets[split], f"{source}, {split}"
    return _load_dataset(source, split), f"{source}, {split}"


def _named(path: Path, key: str) -> list[str]:
    """Return the file names under `key` in a JSON file. Raises ValueError if a name is a path."""
    if not path.is_file():
        return []
    state = parse_json(read_file(path, MAX_STATE_BYTES).decode())
    items: Any = state.get(key) if isinstance(state, dict) else None
    items = items if isinstance(items, list) else [items]
    names: list[Any] = [item.get("filename") if isinstance(item, dict) else item for item in items]
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{path.name} names {shown(name)}, which is no file of its folder")
    return names


def _load_dataset(source: str, split: str) -> Any:
    """Return rows of JSON files, or a split of a dataset on the hub or in a folder.

    Raises ValueError for a file outside the dataset's folder, or with a format that FORMATS lacks.
    """
    from datasets import Features, Value, config, load_dataset, load_dataset_builder
    from datasets.download import DownloadManager

    is_folder = os.path.isdir(source)
    is_online = not config.HF_HUB_OFFLINE
    cards = [Path(source, name) for name in CARDS] if is_folder else _cards_of_hub(source)
    for card in filter(Path.is_file, cards):
        allowed = "" if is_folder else HUB
        rehearse(card.name, partial(_check_card, card, allowed), "shorten it")
    builder = load_dataset_builder(source)
    kind = builder.info.builder_name
    if kind not in FORMATS:
        raise ValueError(f"its files are {kind}, not {' or '.join(FORMATS)}")
    named = {str(name): [*map(str, of)] for name, of in (builder.config.data_files or {}).items()}
    for file in chain(*named.values()):
        if not (is_inside(file, source) if is_folder else file.startswith(HUB)):
            raise ValueError(f"it names the file {shown(file)} outside of it")
    if kind == "json" and split in named and (is_folder or is_online):
        # Arrow's types would turn texts into dates and large integers into floats, and would give
        # all objects of a column the same keys.
        manager = DownloadManager()
        unpacked = manager.iter_files(manager.download_and_extract(named[split]))
        paths = [Path(str(path)) for path in unpacked]
        rows = [part for path in paths if (part := rows_of_dataset_file(path)) is not None]
        if len(rows) == len(paths):
            return JoinedRows(rows, named[split])
    dataset = load_dataset(source, split=split)
    if kind == "csv":  # It holds texts alone: "007" is no number, and "NA" is a word.
        texts = Features({name: Value("string") for name in dataset.column_names})
        dataset = load_dataset(source, split=split, features=texts, keep_default_na=False)
    for name, feature in dataset.features.items() if kind == "json" else ():
        if "timestamp" in repr(feature):
            raise ValueError(f"texts of its column {name} became dates; write one row a line")
    return dataset


def _cards_of_hub(name: str) -> Iterator[Path]:
    """Yield the cards of a dataset on the hub."""
    from datasets import config
    from huggingface_hub import errors, hf_hub_download

    for card in CARDS:
        # `datasets` itself says what is wrong with the name of a dataset.
        with suppress(
            errors.EntryNotFoundError,
            errors.RepositoryNotFoundError,
            errors.HFValidationError,
        ):
            offline = config.HF_HUB_OFFLINE
            path = hf_hub_download(name, card, repo_type="dataset", local_files_only=offline)
            yield Path(path)


def _check_card(path: Path, allowed: str) -> None:
    """Raise UserError if a dataset's card names files outside of the dataset, before they are read.

    URLs that begin with `allowed` are no such files.
    """
    import yaml
    from huggingface_hub import DatasetCard

    try:
        text = read_file(path, MAX_CARD_BYTES).decode()
        card = DatasetCard(text).data.to_dict() if path.suffix == ".md" else yaml.safe_load(text)
        repr(card)  # takes gigabytes for some short texts; errors of `datasets` show it
        configs = card.get("configs") or [] if isinstance(card, dict) else []
        names = [*_texts([[of.get(key) for key in ("data_files", "data_dir")] for of in configs])]
    except MemoryError:
        raise
    except Exception as error:  # the libraries raise errors of many types
        raise UserError(f"{path.name} cannot be read ({reason_of(error)})") from None
    for name in names:
        on_hub = bool(allowed) and name.startswith(allowed) and "::" not in name
        if not (on_hub or _is_local(name)):
            raise UserError(f"{path.name} names the file {shown(name)} outside of it")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _is_local(name: str) -> bool:
    is_url = bool(urlparse(name).scheme) or "::" in name
    return not (is_url or os.path.isabs(name) or ".." in Path(name).parts)
