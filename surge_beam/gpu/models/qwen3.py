"""Qwen3 decoders used as embedders: causal, grouped queries, normed heads, rotary positions."""

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
    return (
        config.model_type == "qwen3"
        and set(config.layer_types) == {"full_attention"}
        and config.hidden_act in ACTIVATIONS
        and (config.rope_parameters or {}).get("rope_type") in FIXED_TYPES
    )


class Qwen3:
    """Pre-norm decoder.

    Attributes:
      width: size of a token's hidden state.
    """

    def __init__(self, config: Any, weights: Weights) -> None:
        self.width = int(config.hidden_size)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_width = int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.eps = float(config.rms_norm_eps)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.words = weights.tensor("embed_tokens.weight")
        self.rope = rope_from_config(config, config.rope_parameters, self.head_width)
        self.kernel = compiled_kernel(weights.dtype, weights.device)
        self.layers = [
            _Layer(self, weights, f"layers.{i}.") for i in range(config.num_hidden_layers)
        ]
        self.norm = weights.tensor("norm.weight")

    def __call__(self, batch: PackedBatch) -> Tensor:
        """Hidden states after the last norm, [T, width]."""
        x = F.embedding(batch.ids, self.words)
        cos, sin = self.rope.tables(batch.positions, x.dtype)
        attend = PackedAttention(batch, self.kernel, causal=True)
        for layer in self.layers:
            x = layer(x, attend, cos, sin)
        return F.rms_norm(x, (self.width,), self.norm, self.eps)


class _Layer:
    def __init__(self, model: Qwen3, weights: Weights, at: str) -> None:
        self.model = model
        own, mlp = f"{at}self_attn.", f"{at}mlp."
        self.input_norm = weights.tensor(f"{at}input_layernorm.weight")
        self.qkv = weights.linear(f"{own}q_proj", f"{own}k_proj", f"{own}v_proj")
        self.query_norm = weights.tensor(f"{own}q_norm.weight")
        self.key_norm = weights.tensor(f"{own}k_norm.weight")
        self.out = weights.linear(f"{own}o_proj")
        self.mlp_norm = weights.tensor(f"{at}post_attention_layernorm.weight")
        self.gate_and_up = weights.linear(f"{mlp}gate_proj", f"{mlp}up_proj")
        self.down = weights.linear(f"{mlp}down_proj")

    def __call__(self, x: Tensor, attend: PackedAttention, cos: Tensor, sin: Tensor) -> Tensor:
        model, shape, heads = self.model, (self.model.width,), (self.model.head_width,)
        qkv = self.qkv(F.rms_norm(x, shape, self.input_norm, model.eps))
        query, key, value = qkv.view(len(x), -1, model.head_width).split(
            (model.heads, model.kv_heads, model.kv_heads), dim=1
        )
        query = rotate(F.rms_norm(query, heads, self.query_norm, model.eps), cos, sin)
        key = rotate(F.rms_norm(key, heads, self.key_norm, model.eps), cos, sin)
        x = self.out.add(attend(query, key, value), x)
        gate, up = self.gate_and_up(F.rms_norm(x, shape, self.mlp_norm, model.eps)).chunk(2, -1)
        return self.down.add(model.activation(gate).mul_(up), x)
