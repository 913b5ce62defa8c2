"""The files that W&B writes on this machine, read back: which rows are really in them.

Each start of a run makes one part: a folder `wandb/offline-run-<time>-<id>` (`run-...` where it is
online) with one file in LevelDB's log format (github.com/google/leveldb, doc/log_format.md; the
checksum is CRC-32) behind a header of 7 bytes. W&B writes a block of 32 KiB when it is full and the
rest every 15 s: a killed process leaves rows out and the last record torn. Imports no torch.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.files.durable import sync

HEADER, BLOCK = 7, 32768
PIECE = struct.Struct("<IHB")  # before each piece of a record: checksum, length, kind
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one start of a run left in its file."""

    file: Path
    begun: float | None  # when, in seconds of the epoch; None where not even that was written
    next_row: int | None  # the W&B step after that of its last row; None where it has no row
    length: int  # bytes of the file up to which every record is sound
    is_ended: bool  # the run said that it is over

    @property
    def folder(self) -> Path:
        return self.file.parent

    @property
    def is_offline(self) -> bool:
        return self.folder.name.startswith("offline-")

    @property
    def is_synced(self) -> bool:
        return self.file.with_name(f"{self.file.name}.synced").exists()


def parts_of(wandb_folder: Path) -> list[Part]:
    """The parts of a run in order of time, without those that hold nothing at all."""
    begun = [(part.begun, part) for part in all_parts(wandb_folder) if part.begun is not None]
    return [part for _, part in sorted(begun, key=lambda pair: pair[0])]


def all_parts(wandb_folder: Path) -> list[Part]:
    """The parts of a run in any order."""
    return [read_part(file) for file in wandb_folder.glob("*run-*/*.wandb")]


def read_part(file: Path) -> Part:
    """Read a file up to its first unsound record or missing row."""
    begun, next_row, length, is_ended = None, None, HEADER, False
    for end, record in records(file.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "run" and begun is None:
            begun = record.run.start_time.ToNanoseconds() / 1e9
        elif kind == "history":
            if next_row is not None and record.history.step.num != next_row:
                break  # W&B could not write a row, on a full disk perhaps
            next_row = record.history.step.num + 1
        is_ended |= kind == "exit"
        length = end
    return Part(file=file, begun=begun, next_row=next_row, length=length, is_ended=is_ended)


def records(data: bytes) -> Iterator[tuple[int, Any]]:
    """The sound records of a file up to the first that is not, each with the place it ends at."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    place, whole = HEADER, b""
    while place + PIECE.size <= len(data):
        if (left := BLOCK - place % BLOCK) < PIECE.size:  # no piece begins so late in a block
            place += left
            continue
        checksum, length, kind = PIECE.unpack_from(data, place)
        piece = data[place + PIECE.size : place + PIECE.size + length]
        sound = len(piece) == length and FULL <= kind <= LAST
        if not sound or zlib.crc32(piece, zlib.crc32(bytes([kind]))) != checksum:
            return
        whole = piece if kind in (FULL, FIRST) else whole + piece
        place += PIECE.size + length
        if kind in (FULL, LAST):
            yield place, Record.FromString(whole)


def close_parts(wandb_folder: Path) -> int:
    """Close what killed processes left open, and return the W&B step of the row to go on with.

    An open part is replaced by its sound beginning: `wandb sync` refuses a torn record, and W&B's
    service, which outlives a killed process by a moment, then writes to a file that nobody reads.
    """
    next_row = 0
    for part in all_parts(wandb_folder):
        if not part.is_ended:
            aside = part.file.with_name(f".{part.file.name}.writing")
            aside.write_bytes(part.file.read_bytes()[: part.length])
            sync(aside)
            aside.replace(part.file)
        next_row = max(next_row, part.next_row or 0)
    return next_row
