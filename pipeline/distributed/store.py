"""Notes of the ranks in the key-value store where they met."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist


class Board:
    """Notes that any rank can read, also where collectives fail or hang.

    A board has its own connection to the store, so no other wait delays it. With one rank the
    notes stay in this process.
    """

    def __init__(self, num_ranks: int) -> None:
        store: Any = (  # torch's type stubs lack `clone`
            dist.distributed_c10d._get_default_store() if num_ranks > 1 else dist.HashStore()
        )
        self._store = store.clone()

    def post(self, name: str, item: Any) -> None:
        """Post an item of JSON's types, over the last one of this name."""
        self._store.set(f"note {name}", json.dumps(item))

    def post_first(self, name: str, item: Any) -> Any:
        """Post an item unless the name has one already; returns the first."""
        return json.loads(self._store.compare_set(f"note {name}", "", json.dumps(item)))

    def read(self, *names: str) -> list[Any]:
        """The items of these names; nothing while one of them is missing."""
        keys = [f"note {name}" for name in names]
        if not self._store.check(keys):
            return []
        return [json.loads(text) for text in self._store.multi_get(keys)]

    def wake(self, agreement: str) -> None:
        """End this rank's wait for an agreement that will not come about."""
        self._store.compare_set(agreement, "", "fault")
