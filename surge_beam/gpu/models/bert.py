"""BERT, RoBERTa and XLM-RoBERTa encoders over packed sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surge_beam.gpu.models.attention import PackedAttention, compiled_kernel
from surge_beam.gpu.models.batch import PackedBatch
from surge_beam.gpu.models.elementwise import ACTIVATIONS, LayerNorm
from surge_beam.gpu.models.weights import Weights

MODEL_TYPES = ("bert", "roberta", "xlm-roberta", "camembert")
PREFIXES = ("bert.", "roberta.")
_OFFSET_TYPES = ("roberta", "xlm-roberta", "camembert")


def supports(config: Any) -> bool:
    """True if a transformers config is one this file computes."""
    return (
        config.model_type in MODEL_TYPES
        and getattr(config, "position_embedding_type", "absolute") in ("absolute", None)
        and not getattr(config, "is_decoder", False)
        and config.hidden_act in ACTIVATIONS
    )


class Bert:
    """Post-norm encoder with learned positions.

    Attributes:
      width: size of a token's hidden state.
      max_positions: tokens a sequence may have.
    """

    def __init__(self, config: Any, weights: Weights) -> None:
        self.width = int(config.hidden_size)
        self.heads = int(config.num_attention_heads)
        eps = float(config.layer_norm_eps)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.pad_id: int | None = None
        self.words = weights.tensor("embeddings.word_embeddings.weight")
        places = weights.tensor("embeddings.position_embeddings.weight")
        if config.model_type in _OFFSET_TYPES:
            self.pad_id = int(config.pad_token_id)
        self.first_position = 0 if self.pad_id is None else self.pad_id + 1
        kinds = weights.find("embeddings.token_type_embeddings.weight")
        self.places = places if kinds is None else places + kinds[0]
        self.max_positions = len(places) - self.first_position
        self.norm = LayerNorm(weights, "embeddings.LayerNorm", eps)
        self.kernel = compiled_kernel(weights.dtype, weights.device)
        self.layers = [
            _Layer(self, weights, f"encoder.layer.{i}.", eps)
            for i in range(config.num_hidden_layers)
        ]

    def __call__(self, batch: PackedBatch) -> Tensor:
        """Hidden states of the last layer, [T, width]."""
        x = F.embedding(batch.ids, self.words)
        x += F.embedding(positions(batch, self.pad_id), self.places)
        x = self.norm(x)
        attend = PackedAttention(batch, self.kernel)
        for layer in self.layers:
            x = layer(x, attend)
        return x


def positions(batch: PackedBatch, pad_id: int | None) -> Tensor:
    """Rows of the position table, int64 [T].

    RoBERTa's families count from ``pad_id + 1`` and give every pad token, also one that was
    written in the text, the place ``pad_id`` without counting it.
    """
    if pad_id is None:
        return batch.positions
    real = batch.ids != pad_id
    if bool(real.all()):
        return batch.positions + (pad_id + 1)
    counted = torch.cumsum(real, 0)
    bounds = batch.offsets.long()
    before = torch.cat([counted.new_zeros(1), counted])[bounds[:-1]]
    before = torch.repeat_interleave(before, bounds.diff())
    counted[: len(before)] -= before
    counted[len(before) :] = 0
    return counted * real + pad_id


class _Layer:
    def __init__(self, model: Bert, weights: Weights, at: str, eps: float) -> None:
        self.model = model
        own = f"{at}attention.self."
        self.qkv = weights.linear(f"{own}query", f"{own}key", f"{own}value")
        self.out = weights.linear(f"{at}attention.output.dense")
        self.attention_norm = LayerNorm(weights, f"{at}attention.output.LayerNorm", eps)
        self.up = weights.linear(f"{at}intermediate.dense")
        self.down = weights.linear(f"{at}output.dense")
        self.norm = LayerNorm(weights, f"{at}output.LayerNorm", eps)

    def __call__(self, x: Tensor, attend: PackedAttention) -> Tensor:
        query, key, value = self.qkv(x).view(len(x), 3, self.model.heads, -1).unbind(1)
        x = self.attention_norm(self.out(attend(query, key, value)), x)
        return self.norm(self.down(self.model.activation(self.up(x))), x)
