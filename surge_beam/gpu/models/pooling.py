"""From hidden states of tokens to one vector a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from surge_beam.gpu.models.batch import PackedBatch


def pool(hidden: Tensor, batch: PackedBatch, modes: tuple[str, ...], skip: int = 0) -> Tensor:
    """Pools every sequence of a packed batch, as sentence-transformers does.

    Args:
      hidden: hidden states, [T, width].
      batch: where the sequences begin and end.
      modes: ``cls``, ``mean``, ``max``, ``mean_sqrt_len_tokens``, ``weightedmean`` or
        ``lasttoken``; several are put side by side.
      skip: tokens of the prompt at the front that are left out.

    Returns:
      [n, width * len(modes)], float32.
    """
    parts = []
    for run in batch.runs:
        tokens = hidden[run.start : run.stop].view(run.rows, run.length, -1).float()
        parts.append(torch.cat([_pool_run(tokens, mode, skip) for mode in modes], dim=1))
    return torch.cat(parts)


def _pool_run(tokens: Tensor, mode: str, skip: int) -> Tensor:
    """[rows, length, width] to [rows, width]."""
    length = tokens.shape[1]
    kept = tokens[:, skip:] if skip < length else tokens[:, :0]
    count = max(kept.shape[1], 1)
    if mode == "cls":
        return tokens[:, skip if skip < length else 0]
    if mode == "lasttoken":
        return tokens[:, -1] if skip < length else torch.zeros_like(tokens[:, 0])
    if mode == "max":
        if skip >= length:
            return torch.full_like(tokens[:, 0], float("-inf"))
        return kept.amax(1)
    if mode == "mean":
        return kept.sum(1) / count
    if mode == "mean_sqrt_len_tokens":
        return kept.sum(1) / count**0.5
    if mode == "weightedmean":
        weights = torch.arange(1, length + 1, dtype=torch.float32, device=tokens.device)[skip:]
        return torch.einsum("nlw,l->nw", kept, weights) / weights.sum().clamp(min=1e-9)
    raise ValueError(f"unknown pooling mode {mode!r}")
