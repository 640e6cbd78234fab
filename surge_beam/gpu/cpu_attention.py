"""Attention over the paged KV pool by the compiled CPU kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from surge_beam.gpu.attention_plan import AttentionPlan, Ints
from surge_beam.gpu.buffer import Buffer
from surge_beam.gpu.kernels.compiled import kernel
from surge_beam.gpu.work_units import work_units

# Queries of a unit, that is rows times the query heads of a KV head: what is computed for one block
# of keys stays in the first two caches.
UNIT_QUERIES = 96
UNIT_ROWS = 32
_LISTS = (
    *("new_slots", "positions", "first_key", "last_key", "page_base", "first_row", "row_count"),
    *("first_part", "rows", "pages", "merged_rows", "merged_offsets", "merged_parts"),
)


class _Units(ctypes.Structure):
    """``AttentionUnits`` of kernels/attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kv_heads", "group", "dim")),
        *((name, ctypes.c_int64) for name in ("head_stride", "slot_stride", "page_size")),
        *((name, ctypes.c_int64) for name in ("window", "appended", "units", "merged", "threads")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in (*_LISTS, "outputs", "log_sums")),
    )


def attend_kernel(library: ctypes.CDLL, dtype: torch.dtype) -> Callable[..., None]:
    """The kernel for keys and values of a dtype, float32 or bfloat16.

    Args:
      library: what ``load_kernels`` gave.
    """
    pointer, rows = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int64)
    return kernel(library, "attend", dtype, *[pointer] * 3, *rows, *rows, *rows, pointer)


class CompiledAttention:
    """Runs a plan as ``TorchAttention`` does, by compiled kernels.

    Threads take its units (``work_units``), the longest first. A unit reads its keys from their
    pages and keeps a running softmax (online softmax, arXiv 2205.14135); rows of several units are
    merged by log-sum-exp. Equal calls give bit-equal results.
    """

    def __init__(
        self,
        attend: Callable[..., None],
        plan: AttentionPlan,
        keys: Tensor,
        *,
        heads: int,
        scale: float,
        buffer: Buffer | None = None,
    ) -> None:
        """See ``TorchAttention``.

        Args:
          attend: the kernel for the keys' dtype.
          buffer: for the results; none gives each its own memory.
        """
        self._buffer = buffer
        kv_heads, _, dim = keys.shape
        self._attend = attend
        self._strides = keys.stride()
        self._width, self._dim = heads * dim, dim
        group = heads // kv_heads
        units = work_units(plan, (max(UNIT_ROWS, UNIT_QUERIES // group),))
        self._outputs = torch.empty(units.parts, heads, dim)
        self._log_sums = torch.empty(units.parts, heads)
        arrays: dict[str, Ints] = {
            "new_slots": plan.slots,
            "positions": plan.positions,
            "rows": plan.rows,
            "pages": plan.pages,
        }
        arrays |= {name: getattr(units, name) for name in _LISTS if name not in arrays}
        self._held = {name: np.ascontiguousarray(a, np.int64) for name, a in arrays.items()}
        self._units = _Units(
            kv_heads=kv_heads,
            group=group,
            dim=dim,
            head_stride=keys.stride(0),
            slot_stride=keys.stride(1),
            page_size=plan.page_size,
            window=plan.window or 0,
            appended=len(plan.slots),
            units=len(units.first_key),
            merged=len(units.merged_rows),
            threads=torch.get_num_threads(),
            scale=scale,
            outputs=self._outputs.data_ptr(),
            log_sums=self._log_sums.data_ptr(),
            **{name: a.ctypes.data for name, a in self._held.items()},
        )
        self._address = ctypes.addressof(self._units)

    def run(
        self, keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """See ``TorchAttention.run``."""
        return self._run(keys, values, query, *_rows(key, self._dim), *_rows(value, self._dim))

    def attend(self, keys: Tensor, values: Tensor, query: Tensor) -> Tensor:
        """Attends to what is in the pool; for a plan that appends nothing (no slots).

        Args:
          keys, values: the pool, [kv_heads, slots, head_dim], with the strides of the keys that
            this was made for.
          query: [T, heads, head_dim].

        Raises:
          ValueError: if the strides are others.
        """
        if not keys.stride() == values.stride() == self._strides or self._strides[2] != 1:
            raise ValueError("keys and values must have the strides of the keys it was planned for")
        return self._run(keys, values, query, None, 0, None, 0)

    def _run(self, keys: Tensor, values: Tensor, query: Tensor, *new: int | None) -> Tensor:
        out = (self._buffer or Buffer()).empty(len(query), self._width, query.dtype)
        self._attend(
            *(self._address, keys.data_ptr(), values.data_ptr()),
            *_rows(query, self._dim),
            *new,
            out.data_ptr(),
        )
        return out


def _rows(x: Tensor, dim: int) -> tuple[int, int]:
    """Address and numbers from row to row of [T, heads, dim], its heads lying side by side."""
    if x.stride(2) != 1 or x.stride(1) != dim:
        raise ValueError("heads of a row must lie side by side")
    return x.data_ptr(), x.stride(0)
