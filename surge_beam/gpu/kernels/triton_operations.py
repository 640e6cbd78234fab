"""A decoder layer's operations by the Triton kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from surge_beam.gpu.attention_plan import AttentionPlan
from surge_beam.gpu.kernels import sampling_triton
from surge_beam.gpu.kernels.elementwise_triton import (
    add_rms_norm,
    rope_and_append,
    silu_and_mul,
)
from surge_beam.gpu.kernels.operations import TorchOperations
from surge_beam.gpu.sampling import Chooser
from surge_beam.gpu.triton_attention import TritonAttention


class TritonOperations(TorchOperations):
    """See ``Operations``; for tensors on a GPU that ``triton_attention.refusal`` does not refuse,
    or on a CPU in Triton's interpreter.
    """

    chooser: Chooser | None = sampling_triton
    capturable = True

    def attention(
        self, plan: AttentionPlan, keys: Tensor, *, heads: int, scale: float
    ) -> TritonAttention:
        """See ``Operations``."""
        return TritonAttention(plan, keys, heads=heads, scale=scale)

    def add_norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See ``Operations``."""
        return add_rms_norm(x, added, weight, eps)

    def mix(
        self,
        attention: Any,
        keys: Tensor,
        values: Tensor,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        norms: Tensor | None,
        eps: float,
    ) -> Tensor:
        """See ``Operations``."""
        dim = keys.shape[2]
        heads = qkv.shape[1] // dim - 2 * keys.shape[0]
        query = rope_and_append(
            qkv, cos, sin, attention.slots, keys, values, heads=heads, norms=norms, eps=eps
        )
        return attention.attend(keys, values, query)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """See ``Operations``."""
        if activation not in ("silu", "swish"):
            return super().gated(gate_up, activation)
        return silu_and_mul(gate_up)
