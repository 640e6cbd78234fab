"""Linear layers over weights laid out once for the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PACK_ROWS = 32
_LARGEST_STEP = 64


def padded_rows(rows: int) -> int:
    """``rows`` rounded up by less than an eighth, to one of 64 sizes up to 1024.

    oneDNN keeps half a megabyte a layer shape for every number of rows it has met.
    """
    step = min(_LARGEST_STEP, 1 << max(0, (rows - 1).bit_length() - 4))
    return -(-rows // step) * step


def packing_available() -> bool:
    """True if oneDNN's packed linear operators exist in this torch."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


class Linear:
    """``x W^T + b`` for x of shape [T, in_features], on packed weights where they help.

    On a CPU the weight is kept only in oneDNN's packed layout; elsewhere it stays as it is.

    Args:
      weight: [out_features, in_features], on its device and in its dtype.
      bias: [out_features] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = weight.device.type == "cpu" and packing_available()
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
            if self.packed
            else weight.contiguous()
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] to [T, out_features]."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.default(
                x, self.weight, self.bias, "none", [], "none"
            )
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The projection of x plus ``residual`` [T, out_features]."""
        return self(x).add_(residual)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """The projection of x through an activation of ``ACTIVATIONS``."""
        return ACTIVATIONS[activation](self(x))


def _gelu(x: Tensor) -> Tensor:
    return torch._C._nn.gelu_(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}
