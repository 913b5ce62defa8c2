"""Facts that ranks leave for others, in a key-value store."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class Board:
    """Notes that ranks leave for each other at the store where they met.

    They arrive also where collectives fail or hang. Each board has a connection of its own: one
    that waits does not hold up another. With one rank the notes stay in this process.
    """

    def __init__(self, num_ranks: int) -> None:
        store: Any = (  # torch's type stubs lack `clone`
            dist.distributed_c10d._get_default_store() if num_ranks > 1 else dist.HashStore()
        )
        self._store = store.clone()

    def post(self, name: str, item: Any) -> None:
        self._store.set(f"note {name}", pickle.dumps(item))

    def post_first(self, name: str, item: Any) -> Any:
        """Post an item (of JSON's types) unless there is one; returns what is there then."""
        return json.loads(self._store.compare_set(f"first {name}", "", json.dumps(item)))

    def has_first(self, name: str) -> bool:
        return bool(self._store.check([f"first {name}"]))

    def has(self, name: str) -> bool:
        return bool(self._store.check([f"note {name}"]))

    def wake(self, agreement: str) -> None:
        """End the wait of this process's ranks for an agreement that will not come about."""
        self._store.compare_set(agreement, "", "fault")

    def read_all(self, names: Sequence[str]) -> list[Any]:
        """The items of these names, None where there is none."""
        keys = [f"note {name}" for name in names]
        here = [key for key in keys if self._store.check([key])]
        found = dict(zip(here, self._store.multi_get(here), strict=True)) if here else {}
        return [pickle.loads(found[key]) if key in found else None for key in keys]

    def read(self, name: str, wait_s: float) -> Any:
        """The item, once it is posted; RuntimeError where it is not within `wait_s`."""
        self._store.wait([f"note {name}"], timedelta(seconds=wait_s))
        return pickle.loads(self._store.get(f"note {name}"))
