"""Digests of prompt prefixes: equal digests at a level mean, but for collisions, equal prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

CHUNK = 64
DIGEST_BYTES = 8

UInt64s = np.ndarray[Any, np.dtype[np.uint64]]
Int64s = np.ndarray[Any, np.dtype[np.int64]]


def prefix_digests(
    tokens: npt.ArrayLike, offsets: npt.ArrayLike, chunk: int = CHUNK
) -> tuple[UInt64s, Int64s]:
    """Digests of every row's prefixes that end with a full chunk.

    Digest i of a row is xxh3-64 of its chunk i, seeded with digest i - 1 (the first with 0), so it
    stands for all tokens up to there, as in the Chunked Hash Tree of Feather (arXiv 2605.06046).
    What is left behind the last full chunk has none.
    xxHash withstands nobody who looks for collisions: a digest is a hint, and whoever shares KV
    compares tokens.

    Args:
      tokens: token ids of all rows, int32 [t].
      offsets: [n + 1]; row i is ``tokens[offsets[i]:offsets[i + 1]]``. An Arrow list<int32> array
        gives both.
      chunk: tokens of a chunk; a multiple of the KV page.

    Returns:
      Digests of all rows, uint64 [d], and their offsets, int64 [n + 1].

    Raises:
      ValueError: if ``chunk`` is below 1, tokens are not int32, or offsets fall or leave them.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}")
    flat = np.ascontiguousarray(tokens)
    if flat.dtype != np.int32 or flat.ndim != 1:
        raise ValueError(f"tokens must be int32 [t], not {flat.dtype} {list(flat.shape)}")
    bounds = np.asarray(offsets, dtype=np.int64)
    lengths = np.diff(bounds)
    if bounds.ndim != 1 or not bounds.size or bounds[0] < 0 or bounds[-1] > flat.size:
        raise ValueError("offsets must be [n + 1] and lie within the tokens")
    if (lengths < 0).any():
        raise ValueError("offsets must not fall")
    counts = lengths // chunk
    found: list[int] = []
    # one object for all tokens: a slice of it is what costs most beside the digest itself
    data, size = flat.view(np.uint8).data, chunk * flat.itemsize
    begins = (bounds[:-1] * flat.itemsize).tolist()
    for begin, count in zip(begins, counts.tolist(), strict=True):
        _chain(found, data, range(begin, begin + count * size, size), 0)
    ends = np.zeros(bounds.size, np.int64)
    np.cumsum(counts, out=ends[1:])
    return np.array(found, np.uint64), ends


def extend_chain(
    digests: list[int], tokens: npt.NDArray[np.int32], chunk: int, chunks: int
) -> list[int]:
    """Digests of the first ``chunks`` prefixes of one row, as ``prefix_digests`` has them.

    Args:
      digests: those that are known already; it is extended, and returned.
      tokens: of the row from its start, int32 [n], contiguous, ``chunks`` chunks at least.
    """
    size = chunk * tokens.itemsize
    begins = range(len(digests) * size, chunks * size, size)
    _chain(digests, tokens.view(np.uint8).data, begins, digests[-1] if digests else 0)
    return digests


def _chain(found: list[int], data: memoryview, begins: range, digest: int) -> None:
    """Appends the digests of chunks that follow each other, the first seeded with ``digest``."""
    digest_of, append, size = xxhash.xxh3_64_intdigest, found.append, begins.step
    for at in begins:
        digest = digest_of(data[at : at + size], digest)
        append(digest)


def path_key(digests: Sequence[int] | UInt64s) -> bytes:
    """A row's digests as bytes, eight each, big-endian.

    Rows sorted by it walk the dataset's prefix tree depth first: those that share a prefix lie
    side by side, and a prompt that is a prefix of others right before them.
    """
    return np.asarray(digests, dtype=np.uint64).astype(">u8").tobytes()


def path_keys(digests: UInt64s, offsets: Int64s) -> list[bytes]:
    """``path_key`` of every row of what ``prefix_digests`` returned."""
    data = path_key(digests)
    bounds = (np.asarray(offsets) * DIGEST_BYTES).tolist()
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


def shared_chunks(a: bytes, b: bytes) -> int:
    """Chunks that two paths have in common from their start.

    A digest stands for all before it, so one comparison a halving is enough.
    """
    low, high = 0, min(len(a), len(b)) // DIGEST_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        part = slice((middle - 1) * DIGEST_BYTES, middle * DIGEST_BYTES)
        if a[part] == b[part]:
            low = middle
        else:
            high = middle - 1
    return low
