"""Vectors of texts seen before, least recently used first out."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


def text_keys(texts: Sequence[str]) -> list[bytes]:
    """A 128-bit digest of every text's UTF-8 form."""
    blake2b = hashlib.blake2b
    return [blake2b(text.encode(), digest_size=16).digest() for text in texts]


class VectorCache:
    """A bounded map from text digest to vector; not safe for use by several threads at once.

    Args:
      capacity_bytes: room for vectors; 0 keeps none.
      dimension: size of a vector, float32.
    """

    def __init__(self, capacity_bytes: int, dimension: int) -> None:
        self.capacity = capacity_bytes // (4 * dimension)
        self._vectors = np.empty((self.capacity, dimension), np.float32)
        self._slots: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slots)

    def lookup(self, keys: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Positions in keys that are here, int64 [h], and their vectors, float32 [h, d]."""
        slots, get, touch = self._slots, self._slots.get, self._slots.move_to_end
        hits, where = [], []
        for at, key in enumerate(keys):
            slot = get(key)
            if slot is not None:
                touch(key)
                hits.append(at)
                where.append(slot)
        if not slots or not hits:
            return np.empty(0, np.int64), np.empty((0, self._vectors.shape[1]), np.float32)
        return np.array(hits, np.int64), self._vectors[where]

    def insert(self, keys: Sequence[bytes], vectors: np.ndarray) -> None:
        """Keeps vectors float32 [n, d] of n different keys, the last ones if not all fit."""
        if not self.capacity:
            return
        if len(keys) > self.capacity:
            keys, vectors = keys[-self.capacity :], vectors[-self.capacity :]
        slots = self._slots
        where = []
        for key in keys:
            slot = slots.pop(key, None)
            if slot is None:
                full = len(slots) == self.capacity
                slot = slots.popitem(last=False)[1] if full else len(slots)
            slots[key] = slot
            where.append(slot)
        self._vectors[where] = vectors
