"""Counter-based random numbers: a draw depends on a key and a counter, never on rank or order.

A key is the first 8 bytes of BLAKE2b (RFC 7693) over the parts that name a stream, such as
(seed, stage, step, domain, task, sample). The number at a counter is SplitMix64 (Steele, Lea and
Flood 2014, OOPSLA) of that key, so a batch of any shape, on any rank, gets the same numbers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)

Part = int | str


def stream_key(*parts: Part) -> int:
    """The 64-bit key of the stream that `parts` name, the same in every process."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 53 bits, one for each (key, position); the shapes broadcast."""
    with np.errstate(over="ignore"):
        state = keys.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX1
        state = (state ^ (state >> np.uint64(27))) * _MIX2
        state = state ^ (state >> np.uint64(31))
    drawn: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn


def generator(*parts: Part) -> random.Random:
    """Python's generator, seeded with a stream's key, for tasks and demonstrations."""
    return random.Random(stream_key(*parts))


def permutation(count: int, *parts: Part) -> list[int]:
    """An order of range(count): the indices sorted by their draws from the stream."""
    keys = np.full(count, stream_key(*parts), dtype=np.uint64)
    order: list[int] = np.argsort(uniforms(keys, np.arange(count)), kind="stable").tolist()
    return order


def choose(items: Sequence[str], weights: Sequence[float], number: float) -> str:
    """The item that `number` (in [0, 1)) selects if each item has its share of the weights."""
    total = sum(weights)
    for item, weight in zip(items, weights, strict=True):
        number -= weight / total
        if number < 0:
            return item
    return items[-1]
