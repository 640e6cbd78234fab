"""ModernBERT encoders: pre-norm, rotary positions, gated MLP, mostly local attention."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from surge_beam.gpu.models.attention import PackedAttention, compiled_kernel
from surge_beam.gpu.models.batch import PackedBatch
from surge_beam.gpu.models.elementwise import ACTIVATIONS
from surge_beam.gpu.models.rope import FIXED_TYPES, rope_from_config, rotate
from surge_beam.gpu.models.weights import Weights

PREFIXES = ("model.",)


def supports(config: Any) -> bool:
    """True if a transformers config is one this file computes."""
    if config.model_type != "modernbert" or config.hidden_activation not in ACTIVATIONS:
        return False
    kinds = set(config.layer_types)
    parameters = config.rope_parameters or {}
    return kinds <= {"full_attention", "sliding_attention"} and all(
        (parameters.get(kind) or {}).get("rope_type") in FIXED_TYPES for kind in kinds
    )


class ModernBert:
    """Pre-norm encoder.

    Attributes:
      width: size of a token's hidden state.
    """

    def __init__(self, config: Any, weights: Weights) -> None:
        self.width = int(config.hidden_size)
        self.heads = int(config.num_attention_heads)
        self.eps = float(config.norm_eps)
        self.activation = ACTIVATIONS[config.hidden_activation]
        window = int(config.local_attention) // 2
        self.windows = {"sliding_attention": window}
        self.words = weights.tensor("embeddings.tok_embeddings.weight")
        self.norm = self._norm(weights, "embeddings.norm")
        self.ropes = {
            kind: rope_from_config(
                config, config.rope_parameters[kind], self.width // self.heads, layer_type=kind
            )
            for kind in set(config.layer_types)
        }
        self.kernel = compiled_kernel(weights.dtype, weights.device)
        self.layers = [
            _Layer(self, weights, f"layers.{i}.", kind, first=i == 0)
            for i, kind in enumerate(config.layer_types[: config.num_hidden_layers])
        ]
        self.final_norm = self._norm(weights, "final_norm")

    def __call__(self, batch: PackedBatch) -> Tensor:
        """Hidden states of the last layer, [T, width]."""
        x = self.normed(F.embedding(batch.ids, self.words), self.norm)
        tables = {kind: rope.tables(batch.positions, x.dtype) for kind, rope in self.ropes.items()}
        attends = {
            kind: PackedAttention(batch, self.kernel, window=self.windows.get(kind))
            for kind in tables
        }
        for layer in self.layers:
            x = layer(x, attends[layer.kind], *tables[layer.kind])
        return self.normed(x, self.final_norm)

    def normed(self, x: Tensor, norm: tuple[Tensor, Tensor | None]) -> Tensor:
        return F.layer_norm(x, (self.width,), *norm, self.eps)

    @staticmethod
    def _norm(weights: Weights, name: str) -> tuple[Tensor, Tensor | None]:
        return weights.tensor(f"{name}.weight"), weights.find(f"{name}.bias")


class _Layer:
    def __init__(
        self, model: ModernBert, weights: Weights, at: str, kind: str, *, first: bool
    ) -> None:
        self.model, self.kind = model, kind
        self.attention_norm = None if first else model._norm(weights, f"{at}attn_norm")
        self.qkv = weights.linear(f"{at}attn.Wqkv")
        self.out = weights.linear(f"{at}attn.Wo")
        self.mlp_norm = model._norm(weights, f"{at}mlp_norm")
        self.up_and_gate = weights.linear(f"{at}mlp.Wi")
        self.down = weights.linear(f"{at}mlp.Wo")

    def __call__(self, x: Tensor, attend: PackedAttention, cos: Tensor, sin: Tensor) -> Tensor:
        model = self.model
        normed = x if self.attention_norm is None else model.normed(x, self.attention_norm)
        query, key, value = self.qkv(normed).view(len(x), 3, model.heads, -1).unbind(1)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        x = self.out.add(attend(query, key, value), x)
        up, gate = self.up_and_gate(model.normed(x, self.mlp_norm)).chunk(2, dim=-1)
        return self.down.add(model.activation(up).mul_(gate), x)
