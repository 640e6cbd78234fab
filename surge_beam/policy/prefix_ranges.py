"""Which rows go together: ranges and superbatches over the prefix paths of a whole dataset.

A path is what ``prefix_digests.path_key`` gives. In path order all rows that share a prefix are
neighbours, so any cut of that order into stretches loses at most the prefix that spans each cut.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from surge_beam.policy.prefix_digests import CHUNK, DIGEST_BYTES, shared_chunks

# A row's place in the order: its path, then a 64-bit digest of its id.
RowKey = tuple[bytes, int]

_ID_SPACE = 1 << 64


def range_cuts(
    sample: Iterable[tuple[bytes, float]], ranges: int, tolerance: float = 0.05
) -> list[RowKey]:
    """Cuts rows into ranges of equal tokens, where neighbours share least.

    Weighted quantiles over (path, id). A cut moves by up to ``tolerance`` of a mean range, to
    where the paths before and behind it have the fewest chunks in common; hot prefixes so spread
    over several ranges and rare ones pool. Where one path alone is too heavy it is cut between
    ids, which takes them to be spread evenly. No range of the sample weighs more than
    1 + 2 ``tolerance`` times the mean, a row more or less; how far that holds for the dataset
    depends on the sample: with m sampled rows a range deviates by about sqrt(ranges / m).

    Args:
      sample: (path, tokens) of all rows, of a sample of them, or summed up by path; any order.
      ranges: how many ranges, at least 1.
      tolerance: in [0, 0.5).

    Returns:
      At most ``ranges`` - 1 increasing keys; ``range_of`` looks a row up in them.

    Raises:
      ValueError: if ``ranges`` or ``tolerance`` is out of bounds, or a weight is negative.
    """
    if ranges < 1:
        raise ValueError(f"ranges must be at least 1, not {ranges}")
    _check_tolerance(tolerance, 0.5)
    weights: dict[bytes, float] = {}
    for path, tokens in sample:
        if not tokens >= 0:
            raise ValueError(f"tokens must be 0 or more, not {tokens}")
        if tokens:
            weights[path] = weights.get(path, 0.0) + tokens
    if ranges == 1 or not weights:
        return []
    paths = sorted(weights)
    ends = np.cumsum([weights[path] for path in paths])
    shared = _neighbours_share(paths)
    mean = float(ends[-1]) / ranges
    cuts: list[RowKey] = []
    for k in range(1, ranges):
        target = k * mean
        # border i lies between paths i and i + 1, at ends[i]
        low = int(np.searchsorted(ends, target - tolerance * mean, side="left"))
        high = int(np.searchsorted(ends, target + tolerance * mean, side="right"))
        borders = range(low, min(high, len(paths) - 1))
        inside = min(int(np.searchsorted(ends, target, side="left")), len(paths) - 1)
        border = min(borders, key=lambda i: (shared[i], abs(ends[i] - target)), default=None)
        if border is not None and shared[border] <= len(paths[inside]) // DIGEST_BYTES:
            # no longer than needed, so that rows outside the sample stay with their relatives
            length = (int(shared[border]) + 1) * DIGEST_BYTES
            cuts.append((paths[border + 1][:length], 0))
        else:
            weight = weights[paths[inside]]
            part = (target - (float(ends[inside]) - weight)) / weight
            cuts.append((paths[inside], min(int(part * _ID_SPACE), _ID_SPACE - 1)))
    return cuts


def range_of(cuts: Sequence[RowKey], path: bytes, id_digest: int) -> int:
    """The range, from 0, of a row with this path and 64-bit digest of its id."""
    return bisect.bisect_right(cuts, (path, id_digest))


def leading_key(path: bytes, chunks: int) -> bytes:
    """The key of a row's first chunks: partitions input that has no end and so no quantiles."""
    return path[: chunks * DIGEST_BYTES]


def form_superbatches(
    paths: Sequence[bytes],
    tokens: npt.ArrayLike,
    kv_bytes: npt.ArrayLike,
    *,
    max_rows: int,
    max_tokens: int,
    max_kv_bytes: int,
    tolerance: float = 0.1,
) -> list[range]:
    """Cuts rows in path order into superbatches, where neighbours share least.

    A superbatch takes rows until one of the limits is reached, and then gives back up to
    ``tolerance`` of that to end where the paths before and behind have the fewest chunks in
    common, as late as possible. A row that passes a limit alone travels alone.

    Args:
      paths: of the rows, ascending.
      tokens: prompt tokens of every row, integers [n].
      kv_bytes: bytes that its keys and values are predicted to take, [n].
      max_rows, max_tokens, max_kv_bytes: limits of one superbatch.
      tolerance: in [0, 1).

    Returns:
      Stretches of rows, none empty, together all of them.

    Raises:
      ValueError: if lengths differ, a limit is below 1, a size is negative, paths fall, or
        ``tolerance`` is out of bounds.
    """
    _check_tolerance(tolerance, 1.0)
    if min(max_rows, max_tokens, max_kv_bytes) < 1:
        raise ValueError("limits must be at least 1")
    rows = len(paths)
    sums = [np.arange(rows + 1, dtype=np.int64)]
    for sizes in (np.asarray(tokens, np.int64), np.asarray(kv_bytes, np.int64)):
        if sizes.shape != (rows,) or (sizes < 0).any():
            raise ValueError("tokens and kv_bytes need a size of 0 or more for every path")
        sums.append(np.concatenate([[0], np.cumsum(sizes)]))
    if any(a > b for a, b in itertools.pairwise(paths)):
        raise ValueError("paths must be ascending")
    limits = (max_rows, max_tokens, max_kv_bytes)
    shared = _neighbours_share(paths)
    batches, start = [], 0
    while start < rows:
        stop = _fit(sums, start, limits)
        if stop < rows:
            first = _fit(sums, start, [limit * (1 - tolerance) for limit in limits])
            window = range(stop, max(first, start + 1) - 1, -1)
            # shared[i - 1] is what is lost by a cut before row i; min keeps the latest
            stop = min(window, key=lambda i: shared[i - 1], default=start + 1)
        batches.append(range(start, stop))
        start = stop
    return batches


def tokens_saved(
    paths: Sequence[bytes], groups: Iterable[Sequence[int]], chunk: int = CHUNK
) -> int:
    """Prompt tokens that need no prefill if the rows of each group share all they can.

    In path order that is what each row shares with the one before it: a row's other chunks are
    the ones no earlier row has. One group of all rows gives what a prefix tree over the whole
    dataset saves.

    Args:
      paths: of all rows.
      groups: indices of rows; together they hold a row at most once.
      chunk: tokens of a chunk.
    """
    saved = 0
    for group in groups:
        ordered = sorted(paths[i] for i in group)
        saved += int(_neighbours_share(ordered).sum())
    return saved * chunk


def _neighbours_share(paths: Sequence[bytes]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Chunks in common of each path and the next, int64 [n - 1]."""
    pairs = itertools.pairwise(paths)
    return np.array([shared_chunks(a, b) for a, b in pairs], dtype=np.int64)


def _fit(sums: Sequence[np.ndarray], start: int, limits: Sequence[float]) -> int:
    """The last row, exclusive, up to which rows from ``start`` keep within all limits."""
    return min(
        int(np.searchsorted(total, total[start] + limit, side="right")) - 1
        for total, limit in zip(sums, limits, strict=True)
    )


def _check_tolerance(tolerance: float, bound: float) -> None:
    if not 0.0 <= tolerance < bound:
        raise ValueError(f"tolerance must be in [0, {bound}), not {tolerance}")
