"""Self-attention over packed sequences, nothing padded: by a compiled kernel, or by torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from surge_beam.gpu.attention_plan import AttentionPlan
from surge_beam.gpu.cpu_attention import CompiledAttention, attend_kernel
from surge_beam.gpu.kernels.compiled import load_kernels
from surge_beam.gpu.models.batch import PackedBatch

Kernel = Callable[..., None]


def compiled_kernel(dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """The compiled kernel that ``PackedAttention`` takes; None where torch's own is used.

    Short sequences in float32 cost torch a call for every length and, a token, 2 to 3 times more.
    """
    if device.type != "cpu" or dtype != torch.float32:
        return None
    library = load_kernels()
    return None if library is None else attend_kernel(library, dtype)


class PackedAttention:
    """Scaled dot-product attention inside every sequence of one packed batch, for all layers.

    Args:
      batch: where the sequences begin and end.
      kernel: what ``compiled_kernel`` gave; None leaves it to torch.
      causal: a token sees itself and what is before it.
      window: a token sees others at most this far away; None sees all.
      bias: added to the scores, [1, heads, L, L] by the length L of a sequence.
    """

    def __init__(
        self,
        batch: PackedBatch,
        kernel: Kernel | None,
        *,
        causal: bool = False,
        window: int | None = None,
        bias: Mapping[int, Tensor] | None = None,
    ) -> None:
        if window is not None and batch.longest <= window + 1:
            window = None
        self._batch, self._causal, self._window, self._bias = batch, causal, window, bias
        self._kernel = kernel if bias is None and window is None else None
        self._compiled: CompiledAttention | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends in one layer.

        Args:
          query: [T, heads, d]; strided views of a fused projection are fine.
          key, value: [T, kv_heads, d], heads being a multiple of kv_heads.

        Returns:
          [T, heads * d], contiguous; zero for filling.
        """
        if query.is_cuda and self._bias is None and query.dtype in (torch.float16, torch.bfloat16):
            return self._varlen(query, key, value)
        if self._kernel is not None and query.shape[2] % 4 == 0:
            return self._run_compiled(self._kernel, query, key, value)
        return self._by_length(query, key, value)

    def _run_compiled(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if key.stride() != value.stride():
            key, value = key.contiguous(), value.contiguous()
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        if self._compiled is None:
            self._compiled = CompiledAttention(
                *(kernel, packed_plan(self._batch, causal=self._causal), keys),
                heads=query.shape[1],
                scale=query.shape[2] ** -0.5,
            )
        out = self._compiled.attend(keys, values, query)
        out[self._batch.runs[-1].stop :] = 0
        return out

    def _by_length(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """A call of torch for each run of equal lengths."""
        tokens, heads, width = query.shape
        out = torch.empty(tokens, heads * width, dtype=query.dtype, device=query.device)
        out[self._batch.runs[-1].stop :] = 0
        for run in self._batch.runs:
            part = slice(run.start, run.stop)
            q, k, v = (
                x[part].view(run.rows, run.length, x.shape[1], width).transpose(1, 2)
                for x in (query, key, value)
            )
            if k.shape[1] != heads:
                k = k.repeat_interleave(heads // k.shape[1], dim=1)
                v = v.repeat_interleave(heads // v.shape[1], dim=1)
            mask = None if self._bias is None else self._bias[run.length]
            causal = self._causal
            if self._window is not None and run.length > self._window + 1:
                mask = _window_mask(run.length, self._window, causal, query.device)
                causal = False
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
            out[part].view(run.rows, run.length, heads, width).copy_(attended.transpose(1, 2))
        return out

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One flash-attention call for all sequences (CUDA, 16-bit)."""
        from torch.nn.attention.varlen import varlen_attn

        batch = self._batch
        left = -1 if self._window is None else self._window
        longest = batch.longest
        out = varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            batch.offsets,
            batch.offsets,
            longest,
            longest,
            window_size=(left, 0 if self._causal else left),
            enable_gqa=key.shape[1] != query.shape[1],
        )
        assert isinstance(out, Tensor)
        return out.reshape(query.shape[0], -1)


def packed_plan(batch: PackedBatch, *, causal: bool) -> AttentionPlan:
    """The plan of a batch whose own T keys are the pool, token t's in slot t: nothing is appended.

    A token's position in it is that of the last key it sees.
    """
    bounds = batch.offsets.numpy().astype(np.int64)
    lengths, tokens = np.diff(bounds), np.arange(bounds[-1])
    last = np.zeros(len(batch.ids), np.int64)
    last[: len(tokens)] = (
        batch.positions[: len(tokens)].numpy() if causal else np.repeat(lengths - 1, lengths)
    )
    return AttentionPlan(
        page_size=1,
        window=None,
        positions=last,
        slots=tokens[:0],
        first_key=np.zeros_like(lengths),
        keys=lengths,
        pages=tokens,
        page_offsets=bounds,
        rows=tokens,
        row_offsets=bounds,
        masked=np.full(len(lengths), causal),
        kv_tokens_read=len(tokens),
        kv_tokens_unshared=len(tokens),
    )


def _window_mask(length: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """True where a token sees another, bool [length, length]."""
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    seen = distance.abs() <= window
    return seen & (distance >= 0) if causal else seen
