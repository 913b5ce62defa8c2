"""Reads W&B's offline files, for which wandb has no reader in Python."""

import json
import struct
from pathlib import Path
from typing import Any


def history_of(path: Path) -> list[dict[str, Any]]:
    """The rows of an offline file: records in LevelDB's format, in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, place, record, rows = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if (left := 2**15 - place % 2**15) < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        part = data[place + 7 : place + 7 + length]
        place += 7 + length
        if place > len(data):
            break  # still being written
        record = part if kind in (1, 2) else record + part
        if kind in (1, 4):  # a whole record, or its last part
            found = wandb_internal_pb2.Record.FromString(record)
            items = {"/".join(i.nested_key) or i.key: i.value_json for i in found.history.item}
            rows += [{name: json.loads(value) for name, value in items.items()}] if items else []
    return rows
