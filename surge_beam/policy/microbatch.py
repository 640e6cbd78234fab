"""Micro-batches: which rows go through the model together in one forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def micro_batches(
    lengths: npt.ArrayLike, max_padded_tokens: int
) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Cuts rows, sorted by length, where ``longest length x rows`` would pass the budget.

    The longest rows come first, so memory peaks in the first micro-batch; rows of equal length
    keep their order. A row longer than the budget travels alone. A length of 0 counts as 1.

    Args:
      lengths: tokens of every row, integers of shape [n].
      max_padded_tokens: budget of one micro-batch in padded tokens, at least 1.

    Returns:
      Arrays of row indices, none empty; together they hold every row exactly once.

    Raises:
      ValueError: if the budget is below 1, or lengths is not one-dimensional or has a negative.
    """
    if max_padded_tokens < 1:
        raise ValueError(f"max_padded_tokens must be at least 1, not {max_padded_tokens}")
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.ndim != 1:
        raise ValueError(f"lengths must have one dimension, not {sizes.ndim}")
    if sizes.size and int(sizes.min()) < 0:
        raise ValueError("lengths must not be negative")
    order = np.argsort(-sizes, kind="stable")
    longest_first = np.maximum(sizes[order], 1)
    rows_that_fit = np.maximum(max_padded_tokens // longest_first, 1).tolist()
    batches = []
    start = 0
    while start < order.size:
        stop = start + rows_that_fit[start]
        batches.append(order[start:stop])
        start = stop
    return batches
