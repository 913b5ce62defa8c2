"""A key-value cache for sequences of different lengths, with one row for each sequence.

Letters in shapes: B sequences, T tokens.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

# Numbers of rows are rounded up to a multiple of ROWS, and lengths to a multiple of LENGTHS, so
# that the rounding errors of a row seldom depend on the number of rows in the batch.
ROWS = 4
LENGTHS = 16


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention outputs, [B, T, heads, size of a value].

    Queries are [B, heads, T, size]; keys and values are [B, key heads, length, size]. Query heads
    that share a key head become extra queries of one head, so that no key is copied.
    """
    batch, heads, num_queries, size = query.shape
    shared = heads // key.shape[1]
    mask = attention_mask
    if shared > 1 and num_queries > 1:
        mask = mask[:, :, None].expand(-1, -1, shared, -1, -1).flatten(2, 3)
    stacked = query.reshape(batch, key.shape[1], shared * num_queries, size)
    output = nn.functional.scaled_dot_product_attention(
        stacked, key, value, attn_mask=mask.to(query.dtype), scale=scaling
    )
    return output.reshape(batch, heads, num_queries, -1).transpose(1, 2), None


AttentionInterface.register("row_cache", attend)


class _RowLayer(CacheLayerMixin):
    """The keys and the values of one layer, each [rows, heads, positions, size]."""

    keys: Any
    values: Any

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self.cache: RowCache = weakref.proxy(cache)  # a cycle would keep the memory for a while

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # In latent attention, keys and values have different sizes, so each has its own tensor.
        empty = (x.new_zeros((0, x.shape[1], 0, x.shape[3])) for x in (key_states, value_states))
        self.keys, self.values = empty
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [B, heads, T, size]; return the part of the cache to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.grow()
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, held: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        cache = self.cache
        held.transpose(1, 2)[cache.rows[:, None], cache.positions] = states.transpose(1, 2)
        if cache.first_rows:
            return held[: len(states), :, : cache.length]
        return held[:, :, : cache.length].index_select(0, cache.rows)

    def grow(self) -> None:
        """Enlarge the keys and the values to the cache's numbers of rows and positions."""
        rows = self.cache.num_rows - self.keys.shape[0]
        positions = self.cache.capacity - self.keys.shape[2]
        if rows > 0 or positions > 0:
            padding = (0, 0, 0, positions, 0, 0, 0, rows)
            states = [nn.functional.pad(x, padding) for x in (self.keys, self.values)]
            self.keys, self.values = states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """A key-value cache; each row holds one sequence of up to `capacity` tokens.

    The first forward pass allocates `num_rows` rows. Only a larger `num_rows` allocates again.
    """

    layers: list[Any]

    def __init__(self, num_layers: int, capacity: int, dtype: torch.dtype = torch.float32) -> None:
        self.num_rows = 0
        self.capacity = -(-capacity // LENGTHS) * LENGTHS
        self.length = 0
        self.dtype = dtype
        super().__init__(layers=[_RowLayer(self) for _ in range(num_layers)])

    @property
    def num_bytes(self) -> int:
        made = [layer for layer in self.layers if layer.is_initialized]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in made)

    def need_rows(self, number: int) -> None:
        """Let the next forward pass allocate at least `number` rows."""
        self.num_rows = max(self.num_rows, -(-number // ROWS) * ROWS)

    def place(
        self, rows: torch.Tensor, positions_BT: torch.Tensor, end: int, first_rows: bool
    ) -> torch.Tensor:
        """Set the rows and the positions (below `end`) that the next forward pass writes.

        `first_rows` means that `rows` is 0, 1, 2, ...; attention then reads the cache without a
        copy. Returns the additive attention mask, [B, 1, T, self.length] of the type `dtype`.
        """
        self.rows = rows
        self.positions = positions_BT
        self.first_rows = first_rows
        self.length = -(-end // LENGTHS) * LENGTHS
        if self.capacity < self.length:  # no sampler with `max_tokens` comes here
            self.capacity = max(self.length, self.capacity + self.capacity // 4)
        visible = torch.arange(self.length, device=positions_BT.device)
        hidden = (visible > positions_BT[:, :, None])[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, -math.inf)

    def copy_rows(self, source: list[int], target: list[int], length: int) -> None:
        """Copy `length` positions of the rows `source` to `target`; a GPU gets the indices once."""
        rows = torch.tensor([source, target], dtype=torch.int64).to(self.rows.device)
        for layer in self.layers:
            layer.grow()
            for held in (layer.keys, layer.values):
                held[rows[1], :, :length] = held[rows[0], :, :length]
