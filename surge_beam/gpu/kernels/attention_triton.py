"""Triton kernels of attention over the paged KV pool: append, attend, merge.

One kernel serves decoding, prefill and shared prefixes alike: a program takes one unit of work
(``work_units``) and one KV head, packs the unit's queries with the query heads that share the KV
head into one tile of rows, and walks the unit's keys with an online softmax (FlashAttention-2,
arXiv 2307.08691; the work list is that of FlashInfer, arXiv 2501.01005). Where a row has several
parts they are kept in float32 with their log-sum-exp (natural logarithm) and merged afterwards.

In Triton's interpreter bfloat16 is raw bits, so operands are widened there before they are used.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# int32 numbers of a unit: where its pages lie in the page list, less its first page's number; its
# first key and the one after its last; where its rows lie in the row list, and how many; its first
# part, or -1 where its rows have no other; two of filling.
UNIT_FIELDS = 8

# Larger heads need more registers than a thread has.
MAX_HEAD_DIM = 128


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a launch of ``attend_kernel`` is cut: query rows of a program, keys it takes at once."""

    rows: int
    keys: int
    warps: int
    stages: int


_MERGED_AT_ONCE = 16
_APPENDED_AT_ONCE = 8


def tiles(dtype: torch.dtype, dim: int, capability: int | None) -> tuple[Tile, ...]:
    """The tiles for a pool, smallest first: the largest that spill no registers.

    Args:
      dtype: of the pool.
      dim: head size.
      capability: the GPU's compute capability, times ten; None in the interpreter.
    """
    if dtype == torch.float32:
        # Products run on the ordinary units, out of registers.
        large = Tile(64, 32, 8, 2) if dim <= 64 else Tile(32, 16, 8, 2)
        return Tile(16, large.keys, 4, 2), large
    # Hopper's and the data centre Blackwell's tensor cores take operands from shared memory.
    wide = dim <= 64 or capability in (90, 100, 103)
    keys = 64 if wide else 32
    # A tensor core takes 16 rows at least.
    return Tile(16, 64, 4, 3), Tile(64, keys, 4, 2), Tile(128, keys, 8, 2)


@triton.jit(do_not_specialize=["window"])
def attend_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    log_sums: tl.tensor,
    units: tl.tensor,
    pages: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    query_token: tl.tensor,
    query_head: tl.tensor,
    pool_head: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    OPERAND: tl.constexpr,
) -> None:
    """Grid (units, KV heads). ``scale`` includes log2(e): exponentials here are of base 2."""
    unit = units + tl.program_id(0) * 8
    count = tl.load(unit + 4)
    if count == 0:
        return
    page_base = tl.load(unit)
    first = tl.load(unit + 1)
    last = tl.load(unit + 2)
    row_base = tl.load(unit + 3)
    first_part = tl.load(unit + 5)
    kv_head = tl.program_id(1)

    lane = tl.arange(0, ROWS)
    nth = lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    used = nth < count
    row = tl.load(rows + row_base + nth, mask=used, other=0).to(tl.int64)
    position = tl.load(positions + row, mask=used, other=0)
    lowest = position - window
    dim = tl.arange(0, BLOCK_DIM)
    stored = used[:, None] & (dim < DIM)[None, :]
    at = row[:, None] * query_token + head[:, None] * query_head + dim[None, :]
    q = tl.load(query + at, mask=stored, other=0.0).to(OPERAND)
    # 64 bits before anything is multiplied by a stride of the pool.
    keys += kv_head.to(tl.int64) * pool_head
    values += kv_head.to(tl.int64) * pool_head

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    result = tl.full([ROWS, BLOCK_DIM], 0.0, tl.float32)
    for start in range(first, last, KEYS):
        key = start + tl.arange(0, KEYS)
        held = key < last
        page = tl.load(pages + page_base + key // PAGE, mask=held, other=0).to(tl.int64)
        slot = page * PAGE + key % PAGE
        # A slot that is not held may hold NaN, which a weight of zero would not take away.
        place = slot[:, None] * DIM + dim[None, :]
        there = held[:, None] & (dim < DIM)[None, :]
        k = tl.load(keys + place, mask=there, other=0.0).to(OPERAND)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = held[None, :] & (key[None, :] <= position[:, None])
        seen = seen & (key[None, :] > lowest[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen no key yet: -inf less -inf is NaN.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(values + place, mask=there, other=0.0).to(OPERAND)
        result = result * shrink[:, None]
        result = tl.dot(weights.to(OPERAND), v, result, input_precision="ieee")
        peak = highest

    saw = total > 0.0
    divisor = tl.where(saw, total, 1.0)
    result = result / divisor[:, None]
    heads = tl.num_programs(1) * GROUP
    if first_part < 0:
        at = (row * heads + head)[:, None] * DIM + dim[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=stored)
    else:
        part = (first_part + nth).to(tl.int64) * heads + head
        tl.store(parts + part[:, None] * DIM + dim[None, :], result, mask=stored)
        log_sum = (peak + tl.log2(divisor)) * 0.6931471805599453
        tl.store(log_sums + part, tl.where(saw, log_sum, float("-inf")), mask=used)


@triton.jit
def merge_kernel(
    out: tl.tensor,
    parts: tl.tensor,
    log_sums: tl.tensor,
    merged_rows: tl.tensor,
    merged_offsets: tl.tensor,
    merged_parts: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Grid (merged rows, query heads). A row without parts comes out as zero."""
    row = tl.load(merged_rows + tl.program_id(0)).to(tl.int64)
    if row < 0:
        return
    begin = tl.load(merged_offsets + tl.program_id(0))
    end = tl.load(merged_offsets + tl.program_id(0) + 1)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    dim = tl.arange(0, BLOCK_DIM)

    peak = -float("inf")
    total = 0.0
    result = tl.full([BLOCK_DIM], 0.0, tl.float32)
    for start in range(begin, end, PARTS):
        nth = start + tl.arange(0, PARTS)
        there = nth < end
        part = tl.load(merged_parts + nth, mask=there, other=0).to(tl.int64) * heads + head
        log_sum = tl.load(log_sums + part, mask=there, other=float("-inf"))
        stored = there[:, None] & (dim < DIM)[None, :]
        o = tl.load(parts + part[:, None] * DIM + dim[None, :], mask=stored, other=0.0)
        highest = tl.maximum(peak, tl.max(log_sum, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp(log_sum - base)
        shrink = tl.exp(peak - base)
        total = total * shrink + tl.sum(weights, 0)
        result = result * shrink + tl.sum(weights[:, None] * o, 0)
        peak = highest
    result = result / tl.where(total > 0.0, total, 1.0)
    at = (row * heads + head) * DIM + dim
    tl.store(out + at, result.to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit
def append_kernel(
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    key_token: tl.tensor,
    value_token: tl.tensor,
    pool_head: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
) -> None:
    """Grid (tokens, blocks of KV heads)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_DIM)
    there = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    inside = head[:, None] * DIM + dim[None, :]
    place = head.to(tl.int64)[:, None] * pool_head + slot * DIM + dim[None, :]
    k = tl.load(key + token * key_token + inside, mask=there)
    tl.store(keys + place, k.to(keys.dtype.element_ty), mask=there)
    v = tl.load(value + token * value_token + inside, mask=there)
    tl.store(values + place, v.to(values.dtype.element_ty), mask=there)


# The interpreter's stand-in for a kernel is another class.
INTERPRETED = not isinstance(attend_kernel, triton.JITFunction)

_TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def block_dim(dim: int) -> int:
    """Columns of a tile that holds ``dim`` of them."""
    return max(16, triton.next_power_of_2(dim))


def attend_options(dtype: torch.dtype, group: int, dim: int, page_size: int, tile: Tile) -> Any:
    """Compile-time arguments of ``attend_kernel``."""
    operand = torch.float32 if INTERPRETED else dtype
    return {
        "GROUP": group,
        "DIM": dim,
        "BLOCK_DIM": block_dim(dim),
        "PAGE": page_size,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "OPERAND": _TRITON_TYPES[operand],
    }


def merge_options(dim: int) -> Any:
    """Compile-time arguments of ``merge_kernel``."""
    return {"DIM": dim, "BLOCK_DIM": block_dim(dim), "PARTS": _MERGED_AT_ONCE}


def append_options(kv_heads: int, dim: int) -> Any:
    """Compile-time arguments of ``append_kernel``."""
    block = min(_APPENDED_AT_ONCE, triton.next_power_of_2(kv_heads))
    return {"HEADS": kv_heads, "DIM": dim, "BLOCK_DIM": block_dim(dim), "BLOCK_HEADS": block}


def launch_attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    parts: Tensor,
    log_sums: Tensor,
    units: Tensor,
    pages: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    page_size: int,
    scale: float,
    window: int,
    tile: Tile,
) -> None:
    """Attends the units' rows to their keys.

    Args:
      query: [T, heads, dim], its last dimension contiguous.
      keys, values: [kv_heads, slots, dim], contiguous.
      out: [T, heads * dim], contiguous; rows whose units have no parts are written here.
      parts, log_sums: float32 [parts, heads, dim] and [parts, heads], where the others go.
      units: int32 [units, UNIT_FIELDS], all of which fit the tile; one with no rows does nothing.
      pages, rows, positions: int32, the lists that the units and rows index.
      page_size: slots of a page.
      scale: factor of the scores.
      window: keys that a row sees, itself included; 2**31 - 1 is all.
      tile: rows and keys of a program.
    """
    heads, dim = query.shape[1:]
    kv_heads = keys.shape[0]
    attend_kernel[(len(units), kv_heads)](
        query,
        keys,
        values,
        out,
        parts,
        log_sums,
        units,
        pages,
        rows,
        positions,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        scale * 1.4426950408889634,
        window,
        **attend_options(keys.dtype, heads // kv_heads, dim, page_size, tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def launch_merge(
    out: Tensor,
    parts: Tensor,
    log_sums: Tensor,
    merged_rows: Tensor,
    merged_offsets: Tensor,
    merged_parts: Tensor,
) -> None:
    """Merges the parts of each row of a list into its row of ``out``.

    Args:
      out: [T, heads * dim], contiguous.
      parts, log_sums: float32 [parts, heads, dim] and [parts, heads].
      merged_rows: int32 [rows]; -1 is none.
      merged_offsets: int32 [rows + 1], where each one's parts lie in ``merged_parts``.
      merged_parts: int32, numbers of parts.
    """
    heads, dim = parts.shape[1:]
    merge_kernel[(len(merged_rows), heads)](
        out,
        parts,
        log_sums,
        merged_rows,
        merged_offsets,
        merged_parts,
        **merge_options(dim),
        num_warps=1,
    )


def launch_append(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Writes new keys and values to their slots of the pool.

    Args:
      key, value: [T, kv_heads, dim], each token contiguous.
      keys, values: [kv_heads, slots, dim], contiguous.
      slots: int64 [T]; -1 writes nothing.
    """
    if not len(slots):
        return
    kv_heads, _, dim = keys.shape
    options = append_options(kv_heads, dim)
    append_kernel[(len(slots), triton.cdiv(kv_heads, options["BLOCK_HEADS"]))](
        key,
        value,
        keys,
        values,
        slots,
        key.stride(0),
        value.stride(0),
        keys.stride(0),
        **options,
        num_warps=1,
    )
