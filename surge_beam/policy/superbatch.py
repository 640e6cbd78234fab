"""Two-threshold SuperBatch planning (SURGE, arXiv 2605.01060, section 5 and Lemma 3).

Whole partitions accumulate in order until a SuperBatch holds ``min_rows``; it never grows past
``max_rows`` or ``max_bytes``; a partition that is larger than either by itself is split into
numbered parts, each a SuperBatch of its own. Boundaries depend on the sizes and the limits alone,
so a repeated run plans the same SuperBatches.

Where ``min_rows`` follows from costs, the first SuperBatches are smaller: the first output need not
wait for a whole one, and reading, encoding and writing overlap sooner. It costs RAMP calls.
"""

from __future__ import annotations

import dataclasses

import numpy as np

RAMP = 3


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows ``[start, start + rows)`` of partition ``partition``: part ``part`` of ``parts``."""

    partition: int
    start: int
    rows: int
    part: int = 0
    parts: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Thresholds of a SuperBatch: rows to reach, rows and bytes of input never to pass.

    With ``ramp`` the first ones reach an eighth, a quarter and half of ``min_rows``.
    """

    min_rows: int
    max_rows: int
    max_bytes: int
    ramp: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.min_rows <= self.max_rows:
            raise ValueError(
                f"min_rows must be from 1 to max_rows ({self.max_rows}), not {self.min_rows}"
            )
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1: {self.max_bytes}")

    def reach(self, number: int) -> int:
        """Rows that SuperBatch ``number``, from 0, reaches."""
        return max(1, self.min_rows >> max(0, RAMP - number)) if self.ramp else self.min_rows


def cut_superbatches(rows: np.ndarray, nbytes: np.ndarray, limits: Limits) -> list[list[Piece]]:
    """Groups partitions, in order, into SuperBatches.

    Args:
      rows: int64 [P], rows of each partition (0 is allowed).
      nbytes: int64 [P], input bytes of each partition, as estimated from footers.
      limits: the thresholds.

    Returns:
      SuperBatches in order, each a non-empty list of pieces; every row of every partition is in
      exactly one piece. No SuperBatch holds more than ``max_rows`` rows; none of more than one
      piece holds more than ``max_bytes`` bytes.
    """
    batches: list[list[Piece]] = []
    open_batch: list[Piece] = []
    open_rows = open_bytes = 0
    for index, (n, size) in enumerate(zip(rows.tolist(), nbytes.tolist(), strict=True)):
        oversize = n > limits.max_rows or size > limits.max_bytes
        if open_batch and (
            oversize or open_rows + n > limits.max_rows or open_bytes + size > limits.max_bytes
        ):
            batches.append(open_batch)
            open_batch, open_rows, open_bytes = [], 0, 0
        if oversize and n > 0:
            batches.extend([piece] for piece in _parts(index, n, size, limits))
            continue
        open_batch.append(Piece(index, 0, n))
        open_rows += n
        open_bytes += size
        if open_rows >= limits.reach(len(batches)):
            batches.append(open_batch)
            open_batch, open_rows, open_bytes = [], 0, 0
    if open_batch:
        batches.append(open_batch)
    return batches


def _parts(index: int, n: int, size: int, limits: Limits) -> list[Piece]:
    count = min(n, max(-(-n // limits.max_rows), -(-size // limits.max_bytes)))
    edges = [n * i // count for i in range(count + 1)]
    return [
        Piece(index, edges[i], edges[i + 1] - edges[i], part=i, parts=count) for i in range(count)
    ]


def memory_bound(
    limits: Limits, dimension: int, *, in_flight: int = 3, text_copies: float = 4.0
) -> int:
    """Bytes that the SuperBatches in a worker may hold at once (SURGE, Lemma 3).

    Args:
      limits: the thresholds; their upper ones bound a SuperBatch.
      dimension: width of an embedding, float32.
      in_flight: SuperBatches alive at once: one being read, one encoded, one written.
      text_copies: input bytes held per input byte: the decoded Arrow columns, the Python strings
        handed to the tokenizer, its token ids, and the columns rebuilt per partition on writing.
    """
    matrix = limits.max_rows * dimension * 4
    return int(in_flight * (limits.max_bytes * text_copies + 2 * matrix))
