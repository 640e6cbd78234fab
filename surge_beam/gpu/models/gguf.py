"""Weights of a GGUF file."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surge_beam.gpu.gguf_file import GgufFile
from surge_beam.gpu.models.weights import TensorSource

_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


class GgufWeights(TensorSource):
    """Weights of a GGUF file under the names that transformers gives them, without ``model.``."""

    def __init__(
        self,
        file: GgufFile,
        config: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
        round_to: torch.dtype | None = None,
    ) -> None:
        super().__init__(dtype=dtype, device=device, round_to=round_to)
        self.file = file
        self._heads: dict[str, int] = {}
        if file.architecture == "llama":
            self._heads = {
                "self_attn.q_proj": config.num_attention_heads,
                "self_attn.k_proj": config.num_key_value_heads,
            }

    def find(self, name: str) -> Tensor | None:
        """The tensor of a name, or None."""
        head, _, tail = name.rpartition(".")
        layer = _LAYER.fullmatch(head)
        inner = layer[2] if layer else head
        stored = _NAMES.get(inner)
        if stored is None:
            return None
        found = self.file.read(f"blk.{layer[1]}.{stored}.{tail}" if layer else f"{stored}.{tail}")
        if found is None:
            return None
        if inner in self._heads:
            heads = self._heads[inner]
            if len(found) % (2 * heads):
                raise self.file.broken(f"{name} has {len(found)} rows for {heads} heads")
            found = _halves(found, heads)
        return self.cast(torch.from_numpy(found))


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of query or key heads, from turning neighbours to turning the halves of a head.

    llama.cpp turns coordinates 2i and 2i + 1 of a head together and stores the rows that way;
    transformers turns i and i + d / 2.
    """
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)
