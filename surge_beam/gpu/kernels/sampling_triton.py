"""Triton kernels that choose tokens where the logits are, by the rules of ``sampling``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_BLOCK = 4096  # ids of a program of the first stage of argmax
_SUMMED = 128  # ids whose weights are one sum, as in ``sampling``
_SUMS_AT_ONCE = 32
_NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _first_largest(values: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Largest value and the lowest id that has it; NaN counts as largest, _NOWHERE as absent."""
    absent = ids == _NOWHERE
    unordered = (values != values) & (ids != _NOWHERE)
    first_unordered = tl.min(tl.where(unordered, ids, _NOWHERE), 0)
    ordered = tl.where(unordered | absent, float("-inf"), values)
    largest = tl.max(ordered, 0)
    first = tl.min(tl.where(ordered == largest, ids, _NOWHERE), 0)
    has_unordered = first_unordered != _NOWHERE
    return (
        tl.where(has_unordered, float("nan"), largest),
        tl.where(has_unordered, first_unordered, first),
    )


@triton.jit
def block_argmax_kernel(
    logits: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    logits_row: tl.tensor,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    there = at < VOCABULARY
    score = tl.load(logits + row * logits_row + at, mask=there, other=float("-inf"))
    value, first = _first_largest(score.to(tl.float32), tl.where(there, at, _NOWHERE))
    place = row * tl.num_programs(1) + block
    tl.store(values + place, value)
    tl.store(ids + place, first)


@triton.jit
def row_argmax_kernel(
    block_values: tl.tensor,
    block_ids: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < COUNT
    value = tl.load(block_values + row * COUNT + at, mask=there, other=float("-inf"))
    first = tl.load(block_ids + row * COUNT + at, mask=there, other=_NOWHERE)
    value, first = _first_largest(value, first)
    tl.store(values + row, value)
    tl.store(ids + row, first.to(tl.int64))


@triton.jit
def _weights(
    logits: tl.tensor, best: tl.tensor, temperature: tl.tensor, there: tl.tensor
) -> tl.tensor:
    """exp((logit - best) / temperature) in float64, 0 where nothing is."""
    score = tl.load(logits, mask=there, other=float("-inf")).to(tl.float32).to(tl.float64)
    return tl.where(there, tl.exp((score - best) / temperature), 0.0)


@triton.jit
def _first_or_last(possible: tl.tensor, wanted: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Lowest of ``at`` that is possible and wanted, or else the highest that is possible."""
    first = tl.min(tl.where(possible & wanted, at, _NOWHERE), 0)
    last = tl.max(tl.where(possible, at, 0), 0)
    return tl.minimum(first, last)


@triton.jit
def block_sums_kernel(
    logits: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    sums: tl.tensor,
    logits_row: tl.tensor,
    VOCABULARY: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
    SUMMED: tl.constexpr,
) -> None:
    """Grid (rows, groups of BLOCKS blocks)."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    if heat <= 0.0:
        return
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * SUMMED + tl.arange(0, SUMMED)[None, :]
    largest = tl.load(best + row).to(tl.float64)
    weights = _weights(logits + row * logits_row + at, largest, heat, at < VOCABULARY)
    tl.store(sums + row * COUNT + block, tl.sum(weights, 1), mask=block < COUNT)


@triton.jit
def draw_kernel(
    logits: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    uniform: tl.tensor,
    sums: tl.tensor,
    ids: tl.tensor,
    logits_row: tl.tensor,
    VOCABULARY: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMMED: tl.constexpr,
) -> None:
    """Grid (rows). Writes the ids of rows with a temperature and finite logits."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    largest = tl.load(best + row).to(tl.float64)
    # Neither NaN nor infinite: only such a number less itself is 0.
    if (heat <= 0.0) | (largest - largest != 0.0):
        return
    at = tl.arange(0, BLOCK)
    block_sums = tl.load(sums + row * COUNT + at, mask=at < COUNT, other=0.0)
    edges = tl.cumsum(block_sums, 0)
    target = tl.load(uniform + row) * tl.max(edges, 0)
    # A sum taken in parallel may step back by its last bit, or the target may round up to the
    # whole: what has no weight is never drawn all the same.
    block = _first_or_last(block_sums > 0.0, edges > target, at)
    before = tl.sum(tl.where(at == block - 1, edges, 0.0), 0)

    inside = tl.arange(0, SUMMED)
    token = block * SUMMED + inside
    weights = _weights(logits + row * logits_row + token, largest, heat, token < VOCABULARY)
    running = before + tl.cumsum(weights, 0)
    offset = _first_or_last(weights > 0.0, running > target, inside)
    tl.store(ids + row, (block * SUMMED + offset).to(tl.int64))


def argmax_options(vocabulary: int) -> tuple[dict[str, int], dict[str, int]]:
    """Compile-time arguments of the two argmax kernels, with the warps of a program."""
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(vocabulary))
    count = triton.cdiv(vocabulary, block)
    return (
        {"VOCABULARY": vocabulary, "BLOCK": block, "num_warps": 8},
        {"COUNT": count, "BLOCK": triton.next_power_of_2(count), "num_warps": 1},
    )


def draw_options(vocabulary: int) -> tuple[dict[str, int], dict[str, int]]:
    """Compile-time arguments of the two draw kernels, with the warps of a program."""
    count = triton.cdiv(vocabulary, _SUMMED)
    shared = {"VOCABULARY": vocabulary, "COUNT": count, "SUMMED": _SUMMED}
    return (
        {**shared, "BLOCKS": min(_SUMS_AT_ONCE, triton.next_power_of_2(count)), "num_warps": 4},
        {**shared, "BLOCK": triton.next_power_of_2(count), "num_warps": 4},
    )


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit of each row and the lowest id that has it; NaN counts as largest.

    Args:
      logits: float32, bfloat16 or float16 [R, V], rows contiguous.

    Returns:
      values float32 [R], and ids int64 [R].
    """
    rows, vocabulary = logits.shape
    values = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        first, second = argmax_options(vocabulary)
        count = second["COUNT"]
        block_values = values.new_empty(rows, count)
        block_ids = torch.empty(rows, count, dtype=torch.int32, device=logits.device)
        block_argmax_kernel[(rows, count)](
            logits, block_values, block_ids, logits.stride(0), **first
        )
        row_argmax_kernel[(rows,)](block_values, block_ids, values, ids, **second)
    return values, ids


def draw(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The next token of each row: of all tokens by their probabilities, or the likeliest.

    The token is where the running sum of ``exp((logit - largest) / temperature)`` by id first
    exceeds the uniform number times the whole sum; in float64, summed in blocks of 128 ids.

    Args:
      logits: float32, bfloat16 or float16 [R, V], rows contiguous.
      temperature: float64 [R]; at 0 the row takes its likeliest token.
      uniform: float64 [R], numbers in [0, 1).

    Returns:
      values and ids as ``argmax`` gives them, ids replaced by those drawn in rows that have a
      temperature and whose largest logit is finite.
    """
    rows, vocabulary = logits.shape
    values, ids = argmax(logits)
    if rows:
        first, second = draw_options(vocabulary)
        count = first["COUNT"]
        sums = torch.empty(rows, count, dtype=torch.float64, device=logits.device)
        block_sums_kernel[(rows, triton.cdiv(count, first["BLOCKS"]))](
            logits, values, temperature, sums, logits.stride(0), **first
        )
        draw_kernel[(rows,)](
            logits, values, temperature, uniform, sums, ids, logits.stride(0), **second
        )
    return values, ids
