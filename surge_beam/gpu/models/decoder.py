"""Llama, Mistral, Qwen2 and Qwen3 decoders over packed tokens; the caller holds the KV."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surge_beam.gpu.buffer import Buffer
from surge_beam.gpu.kernels.operations import Attention, operations_for
from surge_beam.gpu.models.elementwise import ACTIVATIONS
from surge_beam.gpu.models.linear import Linear, make_linear, narrowed
from surge_beam.gpu.models.rope import FIXED_TYPES, rope_from_config
from surge_beam.gpu.models.weights import TensorSource
from surge_beam.records import SurgeError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
PREFIXES = ("model.",)
_ROPE_TYPES = (*FIXED_TYPES, "dynamic", "longrope")

# Of a layer: how it attends, and its keys and values, [kv_heads, slots, head_dim].
LayerKV = tuple[Attention, Tensor, Tensor]


def unsupported(config: Any) -> str:
    """Why a transformers config is not one this file computes; empty if it is."""
    if config.model_type not in MODEL_TYPES:
        return "the family is not one of " + ", ".join(MODEL_TYPES)
    if getattr(config, "quantization_config", None):
        return "its weights are quantized"
    if config.hidden_act not in ACTIVATIONS:
        return f"its activation is {config.hidden_act!r}"
    rope = config.rope_parameters or {}
    if rope.get("rope_type") not in _ROPE_TYPES:
        return f"its rotary positions are of type {rope.get('rope_type')!r}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its rotary positions cover a part of each head"
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds <= {"full_attention", "sliding_attention"}:
        return f"its layers are of types {', '.join(sorted(kinds))}"
    if config.num_attention_heads % config.num_key_value_heads:
        return (
            f"its {config.num_attention_heads} heads are no multiple of its "
            f"{config.num_key_value_heads} key heads"
        )
    return ""


class Decoder:
    """Pre-norm decoder with rotary positions, grouped queries and a gated MLP.

    Linear layers that like some numbers of rows better (``Linear.padded``) get rows of filling
    inside; callers do not see it. One call at a time: results of layers lie in ``buffers``.

    Attributes:
      layers, heads, kv_heads, head_dim, vocab: sizes.
      width: size of a token's hidden state.
      windows: keys a query sees, itself included, a layer; None sees all.
      scale: factor on the attention scores.
      dtype, device: of keys, values and hidden states.
      kernels: ``auto``, or ``torch`` for torch's own operations.
      padded: ``Linear.padded`` of its layers.
      buffers: memory of the layers' results, by role.
    """

    def __init__(self, config: Any, weights: TensorSource, kernels: str = "auto") -> None:
        """Raises SurgeError if a weight is missing or has another shape than the config says."""
        self.width, self.vocab = int(config.hidden_size), int(config.vocab_size)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = int(getattr(config, "head_dim", None) or self.width // self.heads)
        self.scale = self.head_dim**-0.5
        self.layers = int(config.num_hidden_layers)
        self.windows = _windows(config)
        self.dtype, self.device = weights.dtype, weights.device
        self.eps = float(config.rms_norm_eps)
        self.inner = int(config.intermediate_size)
        self.norms_heads = config.model_type == "qwen3"
        self.activation = config.hidden_act
        self.kernels = kernels
        self.operations = operations_for(
            kernels,
            self.device,
            self.dtype,
            width=self.width,
            inner=self.inner,
            head_dim=self.head_dim,
            group=self.heads // self.kv_heads,
        )
        rope = rope_from_config(config, config.rope_parameters, self.head_dim)
        self.rope = rope.to(self.device)
        self.words = _shaped(weights, "embed_tokens.weight", self.vocab, self.width)
        self.buffers: dict[str, Buffer] = collections.defaultdict(Buffer)
        self.blocks = [_Layer(self, weights, i) for i in range(self.layers)]
        self.norm = _shaped(weights, "norm.weight", self.width)
        tied = bool(config.tie_word_embeddings)
        self.head = make_linear(
            self.words if tied else _shaped(weights, "lm_head.weight", self.vocab, self.width),
            kernels=kernels,
        )
        self.padded = self.head.padded
        if self.device.type == "cpu" and self.dtype == torch.float32:
            self.words = narrowed(self.words)

    def __call__(
        self, ids: Tensor, positions: Tensor, layers: Sequence[LayerKV], rows: Tensor
    ) -> Tensor:
        """One forward pass over packed tokens.

        Args:
          ids: token ids, int64 [T].
          positions: position of each token in its own sequence from 0, integers [T].
          layers: where the new tokens' keys and values go, and what they attend to.
          rows: tokens whose logits are wanted, int64 [R], 0 <= row < T.

        Returns:
          Logits, float32 [R, vocab].
        """
        tokens, wanted = len(ids), len(rows)
        ids, rows = self._filled(ids), self._filled(rows)
        x = F.embedding(ids, self.words).to(self.dtype)
        added = None
        cos, sin = self.rope.tables(positions, x.dtype)
        for number, (block, (attention, keys, values)) in enumerate(
            zip(self.blocks, layers, strict=True), start=1
        ):
            mixed = self.operations.mix(
                attention,
                keys,
                values,
                block.project(x, added)[:tokens],
                cos,
                sin,
                norms=block.head_norms,
                eps=self.eps,
            )
            if number == self.layers:
                if not wanted:
                    return x.new_empty((0, self.vocab), dtype=torch.float32)
                x, mixed = x[rows], mixed[rows]
            elif len(x) > tokens:
                mixed = F.pad(mixed, (0, 0, 0, len(x) - tokens))
            added = block.finish(x, mixed)
        x = self.operations.add_norm(x, added, self.norm, self.eps)
        return self.head(x)[:wanted].float()

    def _filled(self, x: Tensor) -> Tensor:
        filling = self.padded(len(x)) - len(x)
        return F.pad(x, (0, filling)) if filling else x


class _Layer:
    def __init__(self, model: Decoder, weights: TensorSource, index: int) -> None:
        self.model = model
        own, mlp = f"layers.{index}.self_attn.", f"layers.{index}.mlp."
        width, inner = model.width, model.inner
        queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.input_norm = _shaped(weights, f"layers.{index}.input_layernorm.weight", width)
        projections = {f"{own}q_proj": queries, f"{own}k_proj": keys, f"{own}v_proj": keys}
        self.qkv = _linear(model, weights, "qkv", width, projections)
        self.head_norms = self._head_norms(weights, own)
        self.out = _linear(model, weights, "out", queries, {f"{own}o_proj": width})
        self.mlp_norm = _shaped(weights, f"layers.{index}.post_attention_layernorm.weight", width)
        gate_and_up = {f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}
        self.gate_and_up = _linear(model, weights, "gate and up", width, gate_and_up)
        self.down = _linear(model, weights, "down", inner, {f"{mlp}down_proj": width})

    def _head_norms(self, weights: TensorSource, own: str) -> Tensor | None:
        """Weights of Qwen3's norms of query and key heads, [heads + kv_heads, head_dim]."""
        model = self.model
        if not model.norms_heads:
            return None
        query = _shaped(weights, f"{own}q_norm.weight", model.head_dim)
        key = _shaped(weights, f"{own}k_norm.weight", model.head_dim)
        return torch.cat([query.expand(model.heads, -1), key.expand(model.kv_heads, -1)])

    def project(self, x: Tensor, added: Tensor | None) -> Tensor:
        """Adds to hidden states [T, width] in place; their queries, keys and values, [T, (heads +
        2 * kv_heads) * head_dim]."""
        model = self.model
        return self.qkv(model.operations.add_norm(x, added, self.input_norm, model.eps))

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Adds attended values [n, heads * head_dim], projected, to x [n, width] in place; what the
        MLP adds to it."""
        model = self.model
        normed = model.operations.add_norm(x, self.out(mixed), self.mlp_norm, model.eps)
        return self.down(model.operations.gated(self.gate_and_up(normed), model.activation))


def _windows(config: Any) -> tuple[int | None, ...]:
    """Keys a query sees, a layer, as transformers' models of these families mask them."""
    layers = int(config.num_hidden_layers)
    window = None if config.model_type == "llama" else getattr(config, "sliding_window", None)
    if config.model_type == "mistral":
        return (window,) * layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])


def _shaped(weights: TensorSource, name: str, *shape: int) -> Tensor:
    tensor = weights.tensor(name)
    _check(name, tuple(tensor.shape), shape)
    return tensor


def _linear(
    model: Decoder, weights: TensorSource, role: str, inputs: int, outputs: dict[str, int]
) -> Linear:
    buffer = model.buffers[role]  # of all layers: none needs another's result after its own
    layer = weights.linear(*outputs, kernels=model.kernels, buffer=buffer)
    shape = (layer.out_features, layer.in_features)
    _check(" + ".join(outputs), shape, (sum(outputs.values()), inputs))
    return layer


def _check(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise SurgeError(
            f"the weights of {name} have the shape {list(shape)}, and by the model's config "
            f"it should be {list(wanted)}"
        )
