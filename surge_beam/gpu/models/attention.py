"""Self-attention over packed sequences: one batch a run of equal lengths, nothing padded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from surge_beam.gpu.models.batch import PackedBatch


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: PackedBatch,
    *,
    causal: bool = False,
    window: int | None = None,
    bias: Mapping[int, Tensor] | None = None,
) -> Tensor:
    """Scaled dot-product attention inside every sequence of a packed batch.

    Args:
      query: [T, heads, d]; strided views of a fused projection are fine.
      key, value: [T, kv_heads, d], heads being a multiple of kv_heads.
      batch: where the sequences begin and end.
      causal: a token sees itself and what is before it.
      window: a token sees others at most this far away; None sees all.
      bias: added to the scores, [1, heads, L, L] by the length L of a sequence.

    Returns:
      [T, heads * d], contiguous; zero for filling.
    """
    if query.is_cuda and bias is None and query.dtype in (torch.float16, torch.bfloat16):
        return _attend_varlen(query, key, value, batch, causal, window)
    tokens, heads, width = query.shape
    out = torch.empty(tokens, heads * width, dtype=query.dtype, device=query.device)
    out[batch.runs[-1].stop :] = 0
    for run in batch.runs:
        part = slice(run.start, run.stop)
        q, k, v = (
            x[part].view(run.rows, run.length, x.shape[1], width).transpose(1, 2)
            for x in (query, key, value)
        )
        if k.shape[1] != heads:
            k = k.repeat_interleave(heads // k.shape[1], dim=1)
            v = v.repeat_interleave(heads // v.shape[1], dim=1)
        mask = None if bias is None else bias[run.length]
        whole = causal
        if window is not None and run.length > window + 1:
            mask = _window_mask(run.length, window, causal, query.device)
            whole = False
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=whole)
        out[part].view(run.rows, run.length, heads, width).copy_(attended.transpose(1, 2))
    return out


def _window_mask(length: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """True where a token sees another, bool [length, length]."""
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    seen = distance.abs() <= window
    return seen & (distance >= 0) if causal else seen


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, causal: bool, window: int | None
) -> Tensor:
    """One flash-attention call for all sequences (CUDA, 16-bit)."""
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if window is None else window
    longest = batch.longest
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        batch.offsets,
        batch.offsets,
        longest,
        longest,
        window_size=(left, 0 if causal else left),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(out, Tensor)
    return out.reshape(query.shape[0], -1)
