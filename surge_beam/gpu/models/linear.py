"""Linear layers over weights laid out once for the device."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from surge_beam.gpu.buffer import Buffer
from surge_beam.gpu.kernels.compiled import kernel, load_kernels

_PACK_ROWS = 32
_LARGEST_STEP = 64


def narrowed(weight: Tensor) -> Tensor:
    """A float32 tensor in bfloat16 if all its numbers are numbers of that; else as it is."""
    narrow = weight.bfloat16()
    return narrow if torch.equal(narrow.float(), weight) else weight


class Linear:
    """``x W^T + b`` for x of shape [T, in_features].

    Args:
      weight: [out_features, in_features], on its device and in its dtype.
      bias: [out_features] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.weight = self._laid_out(weight)

    def _laid_out(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    @staticmethod
    def padded(rows: int) -> int:
        """The number of rows to call it with, rows of filling included."""
        return rows

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] to [T, out_features]."""
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The projection of x plus ``residual`` [T, out_features]."""
        return self(x).add_(residual)


class PackedLinear(Linear):
    """See ``Linear``; the weight is kept only in oneDNN's packed layout."""

    def _laid_out(self, weight: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        return packed

    @staticmethod
    def padded(rows: int) -> int:
        """``rows`` rounded up by less than an eighth, to one of 64 sizes up to 1024.

        oneDNN keeps half a megabyte a layer shape for every number of rows it has met.
        """
        step = min(_LARGEST_STEP, 1 << max(0, (rows - 1).bit_length() - 4))
        return -(-rows // step) * step

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return torch.ops.mkldnn._linear_pointwise.default(
            x, self.weight, self.bias, "none", [], "none"
        )


class CompiledLinear(Linear):
    """See ``Linear``; float32 on a CPU, by this package's kernel (kernels/linear.cpp).

    A row's result depends on no other row, nor on how many there are, nor on the threads. A weight
    whose numbers are all numbers of bfloat16, as of most models that are published, is kept in
    that, which changes no result: few rows take as long as reading the weight does.

    Args:
      library: what ``load_kernels`` gave.
      weight, bias: see ``Linear``.
      buffer: for the results; none gives each its own memory.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor,
        bias: Tensor | None = None,
        buffer: Buffer | None = None,
    ) -> None:
        self._buffer = buffer
        self._columns = int(library.surge_panel_columns())
        super().__init__(weight, None if bias is None else self._whole(bias))
        types = [ctypes.c_int64] * 4 + [ctypes.c_void_p] * 4
        self._multiply = kernel(library, "linear", self.weight.dtype, *types)

    def _whole(self, x: Tensor) -> Tensor:
        """Its first dimension filled up with zeros to whole panels."""
        filling = -len(x) % self._columns
        return F.pad(x, (*(0, 0) * (x.ndim - 1), 0, filling)).contiguous()

    def _laid_out(self, weight: Tensor) -> Tensor:
        """[panels, in_features, columns of a panel]"""
        whole = self._whole(narrowed(weight))
        return whole.view(-1, self._columns, self.in_features).transpose(1, 2).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        x = x.contiguous()
        out = (self._buffer or Buffer()).empty(len(x), self.out_features)
        self._multiply(
            *(len(x), self.in_features, self.out_features, torch.get_num_threads()),
            *(x.data_ptr(), self.weight.data_ptr()),
            *(None if self.bias is None else self.bias.data_ptr(), out.data_ptr()),
        )
        return out


def make_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kernels: str,
    buffer: Buffer | None = None,
) -> Linear:
    """The fastest layer for a weight.

    Args:
      weight, bias: see ``Linear``.
      kernels: ``auto``, or ``torch`` for torch's own operations.
      buffer: where a layer that can may put its results.
    """
    if weight.device.type != "cpu":
        return Linear(weight, bias)
    if kernels == "auto" and weight.dtype == torch.float32:
        library = load_kernels()
        if library is not None:
            return CompiledLinear(library, weight, bias, buffer)
    return PackedLinear(weight, bias) if packing_available() else Linear(weight, bias)


def packing_available() -> bool:
    """True if oneDNN's packed linear operators exist in this torch."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
