"""Attention over the paged KV pool by the compiled CPU kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surge_beam.gpu.attention_plan import AttentionPlan, Ints, offsets, ranges

# Query rows of a unit, each with all query heads of a KV head: what is computed for one block of
# keys stays in the first two caches.
UNIT_ROWS = 16
# Keys of a unit of an item with few rows, so that a long prefix occupies all cores. A constant, so
# that the order of a row's sums does not depend on the machine.
UNIT_KEYS = 512
_FEW_ROWS = 64


class _Units(ctypes.Structure):
    """``AttentionUnits`` of kernels/attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kv_heads", "group", "dim", "slots", "page_size")),
        *((name, ctypes.c_int64) for name in ("window", "tokens", "units", "threads")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("new_slots", "positions", "unit_row")),
        *((name, ctypes.c_void_p) for name in ("unit_row_count", "unit_key", "unit_key_count")),
        *((name, ctypes.c_void_p) for name in ("unit_page", "rows", "places", "pages")),
        *((name, ctypes.c_void_p) for name in ("part_offsets", "outputs", "log_sums")),
    )


class CompiledAttention:
    """Runs a plan as ``TorchAttention`` does, by compiled kernels.

    The plan's items are cut into units of at most ``UNIT_ROWS`` query rows, and of ``UNIT_KEYS``
    keys where an item has few rows; threads take units from the most expensive one on. A unit
    reads its keys from their pages and keeps a running softmax (online softmax, arXiv 2205.14135);
    rows of several units are merged by log-sum-exp. Equal calls give bit-equal results.
    """

    def __init__(
        self,
        attend: Callable[..., None],
        plan: AttentionPlan,
        keys: Tensor,
        *,
        heads: int,
        scale: float,
    ) -> None:
        """See ``TorchAttention``; ``attend`` is the kernel for the keys' dtype."""
        kv_heads, slots, dim = keys.shape
        self._attend = attend
        self._width, self._dim = heads * dim, dim
        row, row_count, key, key_count, page = _units(plan)
        place_rows = plan.rows[ranges(row, row_count)]
        parts = np.bincount(place_rows, minlength=len(plan.positions))
        # Results of rows with several units, row after row.
        parts[parts == 1] = 0
        part_offsets = offsets(parts)
        order = np.argsort(place_rows, kind="stable")
        merged = order[parts[place_rows[order]] > 0]
        places = np.full(len(place_rows), -1, np.int64)
        places[merged] = np.arange(len(merged))
        self._outputs = torch.empty(len(merged), heads, dim)
        self._log_sums = torch.empty(len(merged), heads)
        arrays: dict[str, Ints] = {
            "new_slots": plan.slots,
            "positions": plan.positions,
            "unit_row": offsets(row_count)[:-1],
            "unit_row_count": row_count,
            "unit_key": key,
            "unit_key_count": key_count,
            "unit_page": page,
            "rows": place_rows,
            "places": places,
            "pages": plan.pages,
            "part_offsets": part_offsets,
        }
        self._held = {name: np.ascontiguousarray(a, np.int64) for name, a in arrays.items()}
        self._units = _Units(
            kv_heads=kv_heads,
            group=heads // kv_heads,
            dim=dim,
            slots=slots,
            page_size=plan.page_size,
            window=plan.window or 0,
            tokens=len(plan.positions),
            units=len(row),
            threads=torch.get_num_threads(),
            scale=scale,
            outputs=self._outputs.data_ptr(),
            log_sums=self._log_sums.data_ptr(),
            **{name: a.ctypes.data for name, a in self._held.items()},
        )

    def run(
        self, keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """See ``TorchAttention.run``."""
        out = query.new_empty(len(query), self._width)
        self._attend(
            ctypes.byref(self._units),
            ctypes.c_void_p(keys.data_ptr()),
            ctypes.c_void_p(values.data_ptr()),
            *_rows(query, self._dim),
            *_rows(key, self._dim),
            *_rows(value, self._dim),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out


def _rows(x: Tensor, dim: int) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    """Address and numbers from row to row of [T, heads, dim], its heads lying side by side."""
    if x.stride(2) != 1 or x.stride(1) != dim:
        raise ValueError("heads of a row must lie side by side")
    return ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.stride(0))


def _units(plan: AttentionPlan) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """First place in the plan's rows, rows, first key, keys, and place of position 0's page."""
    row_counts = np.diff(plan.row_offsets)
    row_blocks = -(-row_counts // UNIT_ROWS)
    splits = np.where(row_counts <= _FEW_ROWS, -(-plan.keys // UNIT_KEYS), 1)
    span = np.where(row_counts <= _FEW_ROWS, UNIT_KEYS, plan.keys)
    units = row_blocks * splits
    item = np.repeat(np.arange(len(units)), units)
    number = ranges(np.zeros_like(units), units)
    block, split = number // splits[item], number % splits[item]
    row = plan.row_offsets[:-1][item] + block * UNIT_ROWS
    row_count = np.minimum(UNIT_ROWS, row_counts[item] - block * UNIT_ROWS)
    key = plan.first_key[item] + split * span[item]
    key_count = np.minimum(span[item], plan.keys[item] - split * span[item])
    page = (plan.page_offsets[:-1] - plan.first_key // plan.page_size)[item]
    # A later block of a causal item sees more keys.
    order = np.argsort(-(row_count * key_count), kind="stable")
    found: tuple[Any, ...] = (row, row_count, key, key_count, page)
    return tuple(array[order] for array in found)  # type: ignore[return-value]
