"""MPNet encoders (all-mpnet-base-v2): BERT's shape with a relative attention bias."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surge_beam.gpu.models.attention import PackedAttention
from surge_beam.gpu.models.batch import PackedBatch
from surge_beam.gpu.models.bert import positions
from surge_beam.gpu.models.elementwise import ACTIVATIONS, LayerNorm
from surge_beam.gpu.models.weights import Weights

PREFIXES = ("mpnet.",)
_MAX_DISTANCE = 128
_PAD_ID = 1


def supports(config: Any) -> bool:
    """True if a transformers config is one this file computes."""
    return config.model_type == "mpnet" and config.hidden_act in ACTIVATIONS


class MPNet:
    """Post-norm encoder with learned positions and a bias on attention shared by all layers.

    Attributes:
      width: size of a token's hidden state.
      max_positions: tokens a sequence may have.
    """

    def __init__(self, config: Any, weights: Weights) -> None:
        self.width = int(config.hidden_size)
        self.heads = int(config.num_attention_heads)
        eps = float(config.layer_norm_eps)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.words = weights.tensor("embeddings.word_embeddings.weight")
        self.places = weights.tensor("embeddings.position_embeddings.weight")
        self.max_positions = len(self.places) - _PAD_ID - 1
        self.norm = LayerNorm(weights, "embeddings.LayerNorm", eps)
        self._by_bucket = weights.tensor("encoder.relative_attention_bias.weight")
        self._by_distance = self._distances(1)
        self.layers = [
            _Layer(self, weights, f"encoder.layer.{i}.", eps)
            for i in range(config.num_hidden_layers)
        ]

    def __call__(self, batch: PackedBatch) -> Tensor:
        """Hidden states of the last layer, [T, width]."""
        if self._by_distance.shape[1] < 2 * batch.longest - 1:
            self._by_distance = self._distances(batch.longest)
        x = F.embedding(batch.ids, self.words)
        x += F.embedding(positions(batch, _PAD_ID), self.places)
        x = self.norm(x)
        bias = {length: self.bias(length) for length in {run.length for run in batch.runs}}
        attend = PackedAttention(batch, None, bias=bias)
        for layer in self.layers:
            x = layer(x, attend)
        return x

    def bias(self, length: int) -> Tensor:
        """What attention adds between the tokens of a sequence, [1, heads, length, length]."""
        middle = self._by_distance.shape[1] // 2
        line = self._by_distance[:, middle - length + 1 : middle + length]
        return line.unfold(1, length, 1).flip(1)[None]

    def _distances(self, longest: int) -> Tensor:
        """The bias by key position minus query position, [heads, 2 * longest - 1]."""
        distance = torch.arange(1 - longest, longest, device=self._by_bucket.device)
        buckets = relative_buckets(distance, len(self._by_bucket))
        return self._by_bucket[buckets].t().contiguous()


def relative_buckets(distance: Tensor, count: int) -> Tensor:
    """Bucket of each distance (key minus query): exact when near, logarithmic when far."""
    half = count // 2
    exact = half // 2
    far = distance.abs()
    scale = math.log(_MAX_DISTANCE / exact)
    large = exact + (torch.log(far.float().clamp(min=1) / exact) / scale * (half - exact)).long()
    return (distance > 0).long() * half + torch.where(far < exact, far, large.clamp(max=half - 1))


class _Layer:
    def __init__(self, model: MPNet, weights: Weights, at: str, eps: float) -> None:
        self.model = model
        own = f"{at}attention.attn."
        self.qkv = weights.linear(f"{own}q", f"{own}k", f"{own}v")
        self.out = weights.linear(f"{own}o")
        self.attention_norm = LayerNorm(weights, f"{at}attention.LayerNorm", eps)
        self.up = weights.linear(f"{at}intermediate.dense")
        self.down = weights.linear(f"{at}output.dense")
        self.norm = LayerNorm(weights, f"{at}output.LayerNorm", eps)

    def __call__(self, x: Tensor, attend: PackedAttention) -> Tensor:
        query, key, value = self.qkv(x).view(len(x), 3, self.model.heads, -1).unbind(1)
        x = self.attention_norm(self.out(attend(query, key, value)), x)
        return self.norm(self.down(self.model.activation(self.up(x))), x)
