"""Checks which files the card of a dataset names, and how large its packed files are unpacked."""

import bz2
import gzip
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from pipeline.common.children import rehearse
from pipeline.common.errors import UserError
from pipeline.common.untrusted import read_file, reason_of, shown

MAX_UNPACKED = 4 << 30  # bytes, of all packed files of a dataset
MAX_CARD_BYTES = 8 << 20
BLOCK = 4096  # an unpacked file takes at least so many bytes on a disk
CHUNK = 1 << 20
OPENERS: dict[str, Callable[[Path], Any]] = {
    "gzip": gzip.open,
    "bz2": bz2.open,
    "xz": lzma.open,
}


def check_unpacked(paths: Iterable[Path]) -> None:
    """Raise ValueError if packed files would unpack to more than MAX_UNPACKED bytes together."""
    total = 0
    for path in paths:
        for size in _sizes(path):
            total += size
            if total > MAX_UNPACKED:
                most = f"more than {MAX_UNPACKED >> 30} GiB"
                raise ValueError(f"{path.name} unpacks to {most}; unpack it before the run")


def _sizes(path: Path) -> Iterator[int]:
    """Yield the sizes of the unpacked parts of a file; nothing if the file is not packed."""
    from datasets.utils.extract import Extractor

    kind = Extractor.infer_extractor_format(path)
    if kind == "tar":
        with tarfile.open(path) as tar:
            yield from (max(member.size, BLOCK) for member in tar)
    elif kind == "zip":
        # zipfile writes no more of a file than the size that the archive states.
        with zipfile.ZipFile(path) as archive:
            yield from (max(member.file_size, BLOCK) for member in archive.infolist())
    elif kind in OPENERS:
        with OPENERS[kind](path) as unpacked:
            while chunk := unpacked.read(CHUNK):
                yield len(chunk)
    elif kind:
        raise ValueError(f"{path.name} is packed as {kind}; unpack it before the run")


def check_cards(paths: Iterable[Path], allowed: str = "") -> None:
    """Raise UserError if a dataset's card names files outside of the dataset, before they are read.

    URLs that begin with `allowed` are no such files.
    """
    for path in paths:
        rehearse(path.name, partial(_check_card, path, allowed), "shorten it")


def _check_card(path: Path, allowed: str) -> None:
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
