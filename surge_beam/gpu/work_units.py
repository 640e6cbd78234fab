"""A plan's items cut into units of equal size, for programs of a GPU and threads of a CPU, and what
merges their parts.

Numpy alone. A unit is a stretch of an item's keys for a block of its query rows, few enough that
the rows, times the query heads that share a KV head, fill one tile. Long stretches are split, so
that a long sequence keeps more than one program busy (split-KV, as in Flash-Decoding); how, depends
on the item's own numbers of keys and rows alone, so that a row's sums are taken in an order that
its batch mates do not change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from surge_beam.gpu.attention_plan import AttentionPlan, Ints, offsets, ranges

# Keys that a block of rows takes as one part. An item of many blocks has as many programs anyway,
# and takes as many times more.
SPLIT_KEYS = 256
SPLIT_BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class WorkUnits:
    """Units of one plan, those of a tile size together, longest first.

    Unit u lets the query rows ``rows[first_row[u]:first_row[u] + row_count[u]]`` see the pool's
    keys at positions ``[first_key[u], last_key[u])``; position p lies in the page
    ``pages[page_base[u] + p // page_size]``. Its row i is part ``first_part[u] + i``, unless
    ``first_part[u]`` is -1: then its rows have no other part.

    Attributes:
      tile_offsets: int64 [tiles + 1], the units of each tile size.
      first_key, last_key, page_base, first_row, row_count, first_part: int64 [units].
      parts: how many there are.
      merged_rows: int64 [m], the rows that have parts, rising.
      merged_offsets: int64 [m + 1], where each one's lie in ``merged_parts``.
      merged_parts: int64 [parts], numbers of parts.
    """

    tile_offsets: Ints
    first_key: Ints
    last_key: Ints
    page_base: Ints
    first_row: Ints
    row_count: Ints
    first_part: Ints
    parts: int
    merged_rows: Ints
    merged_offsets: Ints
    merged_parts: Ints


def work_units(plan: AttentionPlan, tile_rows: Sequence[int]) -> WorkUnits:
    """Cuts a plan.

    Args:
      plan: of the step.
      tile_rows: query rows that a tile of each size holds, rising; an item takes the smallest that
        holds all of its rows, or the largest.
    """
    sizes = np.diff(plan.row_offsets)
    fitting = np.searchsorted(tile_rows, sizes)
    tile = np.minimum(fitting, len(tile_rows) - 1)
    step = np.asarray(tile_rows, np.int64)[tile]
    block_counts = -(-sizes // step)
    item = np.repeat(np.arange(len(sizes)), block_counts)
    nth = ranges(np.zeros_like(block_counts), block_counts)
    first_row = plan.row_offsets[item] + nth * step[item]
    row_count = np.minimum(step[item], plan.row_offsets[item + 1] - first_row)

    # Keys that no row of a block sees are left out.
    at = plan.positions[plan.rows]
    low = plan.first_key[item]
    if plan.window is not None and len(first_row):
        low = np.maximum(low, np.minimum.reduceat(at, first_row) - plan.window + 1)
    high = plan.first_key[item] + plan.keys[item]
    if len(first_row):
        high = np.minimum(high, np.maximum.reduceat(at, first_row) + 1)

    split = (SPLIT_KEYS * -(-block_counts // SPLIT_BLOCKS))[item]
    first_split = (low - plan.first_key[item]) // split
    splits = (high - 1 - plan.first_key[item]) // split + 1 - first_split
    block = np.repeat(np.arange(len(item)), splits)
    start = plan.first_key[item] + first_split * split
    start = start[block] + ranges(np.zeros_like(splits), splits) * split[block]
    first_key = np.maximum(start, low[block])
    last_key = np.minimum(start + split[block], high[block])

    block_of_entry = np.repeat(np.arange(len(item)), row_count)
    parts_of_row = np.zeros(len(plan.positions), np.int64)
    np.add.at(parts_of_row, plan.rows, splits[block_of_entry])
    alone = np.ones(len(item), bool)
    alone[block_of_entry[parts_of_row[plan.rows] > 1]] = False
    kept = np.where(alone[block], 0, row_count[block])
    first_part = np.where(alone[block], -1, offsets(kept)[:-1])
    row_of_part = plan.rows[ranges(first_row[block], kept)]
    merged_rows, merged_counts = np.unique(row_of_part, return_counts=True)

    page_base = plan.page_offsets[:-1] - plan.first_key // plan.page_size
    unit_tile = tile[item[block]]
    # Programs start in this order: a long one that starts last is waited for alone.
    order = np.lexsort((first_key - last_key, unit_tile))
    return WorkUnits(
        tile_offsets=np.searchsorted(unit_tile[order], np.arange(len(tile_rows) + 1)),
        first_key=first_key[order],
        last_key=last_key[order],
        page_base=page_base[item[block]][order],
        first_row=first_row[block][order],
        row_count=row_count[block][order],
        first_part=first_part[order],
        parts=len(row_of_part),
        merged_rows=merged_rows,
        merged_offsets=offsets(merged_counts),
        merged_parts=np.argsort(row_of_part, kind="stable"),
    )
