"""One uniform number a token, from a counter: nothing but (seed, custom_id, position) decides it.

So a sampled row comes out the same whoever its batch mates are, after parking, and in another
process. The mix is the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash


def sequence_key(seed: int, custom_id: str) -> int:
    """64 bits that stand for the pair: XXH3 of ``seed:custom_id``."""
    return xxhash.xxh3_64_intdigest(f"{seed}:{custom_id}".encode("utf-8", "surrogatepass"))


def uniforms(
    keys: Sequence[int], positions: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Numbers in [0, 1), multiples of 2^-53, float64 [n].

    Args:
      keys: of ``sequence_key``, n of them.
      positions: indices of output tokens, from 0, n of them.
    """
    bits = _mix(np.array(keys, dtype=np.uint64) ^ _mix(np.array(positions, dtype=np.uint64)))
    return (bits >> np.uint64(11)) * 2.0**-53


def uniform(seed: int, custom_id: str, position: int) -> float:
    """The number in [0, 1) of one output token."""
    return float(uniforms([sequence_key(seed, custom_id)], [position])[0])


def _mix(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
