"""Counter-based random numbers, which depend on neither the rank nor the shape of a batch.

A stream of random numbers is named by parts, such as (seed, stage, step, domain, task, sample).
The key of a stream is the first 8 bytes of the BLAKE2b hash (RFC 7693) of the parts. SplitMix64
(Steele, Lea and Flood 2014, OOPSLA) computes a random number from the key and the counter.
"""

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
    """Return the 64-bit key of the stream that `parts` identify; all processes get the same key."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a random 53-bit number in [0, 1) for each key and position; the arrays broadcast."""
    with np.errstate(over="ignore"):
        state = keys.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX1
        state = (state ^ (state >> np.uint64(27))) * _MIX2
        state = state ^ (state >> np.uint64(31))
    numbers: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def generator(*parts: Part) -> random.Random:
    """Return a `random.Random` whose seed is the key of the stream that `parts` identify."""
    return random.Random(stream_key(*parts))


def permutation(count: int, *parts: Part) -> list[int]:
    """Return a random permutation of range(count) from the stream that `parts` identify."""
    keys = np.full(count, stream_key(*parts), dtype=np.uint64)
    order: list[int] = np.argsort(uniforms(keys, np.arange(count)), kind="stable").tolist()
    return order


def choose(items: Sequence[str], weights: Sequence[float], number: float) -> str:
    """Choose an item with probability proportional to its weight; `number` is random in [0, 1)."""
    total = sum(weights)
    for item, weight in zip(items, weights, strict=True):
        number -= weight / total
        if number < 0:
            return item
    return items[-1]
