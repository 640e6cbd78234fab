"""Triton kernels of what stands between a decoder's matrix products, each one pass over memory.

All sums are float32, and a result is rounded to its dtype once, at its end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_GATED_AT_ONCE = 1024
_HEADS_AT_ONCE = 4


@triton.jit
def rms_norm_kernel(
    x: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_token: tl.tensor,
    added_token: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """Grid (tokens)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < WIDTH
    row = tl.load(x + token * x_token + at, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        more = tl.load(added + token * added_token + at, mask=there, other=0.0)
        rounded = (row + more.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + token * x_token + at, rounded, mask=there)
        # What later layers see is the rounded sum.
        row = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    factor = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    normed = row * scale * factor
    tl.store(out + token * WIDTH + at, normed.to(out.dtype.element_ty), mask=there)


@triton.jit
def silu_and_mul_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    gate_up_token: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (tokens, blocks of columns)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < WIDTH
    start = gate_up + token * gate_up_token
    gate = tl.load(start + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(start + WIDTH + at, mask=there, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * WIDTH + at, gated.to(out.dtype.element_ty), mask=there)


@triton.jit
def rope_and_append_kernel(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    norms: tl.tensor,
    slots: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    qkv_token: tl.tensor,
    pool_head: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    NORMS: tl.constexpr,
) -> None:
    """Grid (tokens, blocks of heads)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_HALF)
    inside = column < HALF
    there = (head < HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    at = head[:, None] * (2 * HALF) + column[None, :]
    left = tl.load(qkv + token * qkv_token + at, mask=there, other=0.0).to(tl.float32)
    right = tl.load(qkv + token * qkv_token + at + HALF, mask=there, other=0.0).to(tl.float32)

    turned = (head < HEADS + KV_HEADS)[:, None]
    c = tl.load(cos + token * HALF + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * HALF + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    a = left
    b = right
    if NORMS:
        scale = tl.rsqrt(tl.sum(left * left + right * right, 1) / (2 * HALF) + eps)
        weighted = there & turned
        a *= scale[:, None] * tl.load(norms + at, mask=weighted, other=0.0).to(tl.float32)
        b *= scale[:, None] * tl.load(norms + at + HALF, mask=weighted, other=0.0).to(tl.float32)
    left = tl.where(turned, a * c - b * s, left)
    right = tl.where(turned, b * c + a * s, right)

    is_query = there & (head < HEADS)[:, None]
    place = query + token * (HEADS * 2 * HALF) + at
    kind = query.dtype.element_ty
    tl.store(place, left.to(kind), mask=is_query)
    tl.store(place + HALF, right.to(kind), mask=is_query)

    if slot >= 0:
        kind = keys.dtype.element_ty
        is_key = there & ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
        is_value = there & (head >= HEADS + KV_HEADS)[:, None]
        # 64 bits before anything is multiplied by a stride of the pool.
        own = slot * (2 * HALF) + column[None, :]
        place = keys + (head - HEADS).to(tl.int64)[:, None] * pool_head + own
        tl.store(place, left.to(kind), mask=is_key)
        tl.store(place + HALF, right.to(kind), mask=is_key)
        place = values + (head - HEADS - KV_HEADS).to(tl.int64)[:, None] * pool_head + own
        tl.store(place, left.to(kind), mask=is_value)
        tl.store(place + HALF, right.to(kind), mask=is_value)


def rms_norm_options(width: int) -> dict[str, int]:
    """Compile-time arguments of ``rms_norm_kernel``, but for ADDS, with the warps of a program."""
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(16, max(1, block // 256))}


def silu_and_mul_options(width: int) -> dict[str, int]:
    """Compile-time arguments of ``silu_and_mul_kernel``, with the warps of a program."""
    block = min(_GATED_AT_ONCE, triton.next_power_of_2(width))
    return {"WIDTH": width, "BLOCK": block, "num_warps": 4}


def rope_and_append_options(heads: int, kv_heads: int, dim: int) -> dict[str, int]:
    """Compile-time arguments of ``rope_and_append_kernel``, but for NORMS, with the warps."""
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HALF": dim // 2,
        "BLOCK_HALF": triton.next_power_of_2(dim // 2),
        "BLOCK_HEADS": _HEADS_AT_ONCE,
        "num_warps": 1,
    }


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Adds to x in place; returns ``x / sqrt(mean(x^2) + eps) * weight`` a row (Zhang, Sennrich,
    arXiv 1910.07467).

    Args:
      x: [T, width], rows contiguous.
      added: like x; None leaves x as it is.
      weight: [width].
      eps: added to the mean of squares.

    Returns:
      [T, width] in x's dtype, contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        more = x if added is None else added
        rms_norm_kernel[(len(x),)](
            x,
            more,
            weight,
            out,
            x.stride(0),
            more.stride(0),
            eps,
            ADDS=added is not None,
            **rms_norm_options(x.shape[1]),
        )
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` (SwiGLU, arXiv 2002.05202).

    Args:
      gate_up: [T, 2 * inner], gate first, rows contiguous.

    Returns:
      [T, inner] in its dtype, contiguous.
    """
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        options = silu_and_mul_options(width)
        grid = (tokens, triton.cdiv(width, options["BLOCK"]))
        silu_and_mul_kernel[grid](gate_up, out, gate_up.stride(0), **options)
    return out


def rope_and_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    heads: int,
    norms: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Turns queries and keys by their positions, and writes keys and values to the pool.

    Args:
      qkv: [T, (heads + 2 * kv_heads) * head_dim], query heads first, then keys, then values; rows
        contiguous.
      cos, sin: [T, 1, head_dim / 2], contiguous, as ``Rope.tables`` gives them.
      slots: int64 [T]; -1 writes nothing.
      keys, values: the layer's pool, [kv_heads, slots, head_dim], contiguous.
      heads: query heads.
      norms: weights of norms of query and key heads, [heads + kv_heads, head_dim], contiguous, as
        Qwen3 has them; they go before the turn.
      eps: of these norms.

    Returns:
      The queries, [T, heads, head_dim] in qkv's dtype, contiguous.
    """
    kv_heads, _, dim = keys.shape
    query = torch.empty(len(qkv), heads, dim, dtype=qkv.dtype, device=qkv.device)
    if len(qkv):
        options = rope_and_append_options(heads, kv_heads, dim)
        grid = (len(qkv), triton.cdiv(heads + 2 * kv_heads, options["BLOCK_HEADS"]))
        rope_and_append_kernel[grid](
            qkv,
            cos,
            sin,
            qkv if norms is None else norms,
            slots,
            query,
            keys,
            values,
            qkv.stride(0),
            keys.stride(0),
            eps,
            NORMS=norms is not None,
            **options,
        )
    return query
