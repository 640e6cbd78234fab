"""What a decoder layer does besides its matrix products, by backend.

``TorchOperations`` runs everywhere and is the reference; ``CompiledOperations`` are this folder's
C++ kernels; ``TritonOperations`` (triton_operations.py) are its Triton kernels. All give equal
results within the rounding of the number format.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from surge_beam.gpu.attention import TorchAttention
from surge_beam.gpu.attention_plan import AttentionPlan
from surge_beam.gpu.buffer import Buffer
from surge_beam.gpu.cpu_attention import CompiledAttention, attend_kernel
from surge_beam.gpu.kernels.compiled import DTYPES, kernel, load_kernels
from surge_beam.gpu.models.elementwise import ACTIVATIONS
from surge_beam.gpu.models.rope import rotate
from surge_beam.gpu.sampling import Chooser

_log = logging.getLogger(__name__)


class Attention(Protocol):
    """A plan ready to run in every layer of its window."""

    def run(
        self, keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """See ``TorchAttention.run``."""


class Operations(Protocol):
    """Operations on packed tokens.

    Attributes:
      chooser: chooses tokens where the logits are; None leaves it to ``sampling``.
      capturable: whether a CUDA graph can hold all of this but ``attention``.
    """

    chooser: Chooser | None
    capturable: bool

    def attention(
        self, plan: AttentionPlan, keys: Tensor, *, heads: int, scale: float
    ) -> Attention:
        """See ``TorchAttention``."""

    def add_norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Adds ``added`` to x [T, width] in place and returns x's RMS norm times weight [width]."""

    def mix(
        self,
        attention: Attention,
        keys: Tensor,
        values: Tensor,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        norms: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Turns a layer's queries and keys by their positions, appends its keys and values to the
        pool and attends.

        Args:
          attention: what ``attention`` gave for the step.
          keys, values: the layer's pool, [kv_heads, slots, dim], contiguous.
          qkv: [T, (heads + 2 * kv_heads) * dim], query heads first, then keys, then values; rows
            contiguous; may be changed.
          cos, sin: [T, 1, dim / 2].
          norms: weights of norms of query and key heads, [heads + kv_heads, dim], as Qwen3 has
            them; they go before the turn.
          eps: of these norms.

        Returns:
          [T, heads * dim].
        """

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """``activation(gate) * up`` of [T, 2 * inner], which may be changed: [T, inner]."""


class TorchOperations:
    """See ``Operations``."""

    chooser: Chooser | None = None
    capturable = False

    def attention(
        self, plan: AttentionPlan, keys: Tensor, *, heads: int, scale: float
    ) -> Attention:
        """See ``Operations``."""
        return TorchAttention(plan, keys, heads=heads, scale=scale)

    def add_norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See ``Operations``."""
        if added is not None:
            x.add_(added)
        return F.rms_norm(x, weight.shape, weight, eps)

    def mix(
        self,
        attention: Attention,
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
        kv_heads, _, dim = keys.shape
        heads = qkv.view(len(qkv), -1, dim)
        turned, value = heads.tensor_split((heads.shape[1] - kv_heads,), dim=1)
        if norms is not None:
            turned = F.rms_norm(turned, (dim,), None, eps) * norms
        turned = self.rotate(turned, cos, sin)
        query, key = turned.tensor_split((turned.shape[1] - kv_heads,), dim=1)
        return attention.run(keys, values, query, key, value)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary positions of x [T, heads, dim], which may be a view with its heads side by side
        and may be changed; cos and sin [T, 1, dim / 2]."""
        return rotate(x, cos, sin)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """See ``Operations``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)


class CompiledOperations(TorchOperations):
    """See ``Operations``; for tensors on a CPU.

    Args:
      library: what ``load_kernels`` gave.
      dtype: of the tensors, one that ``takes`` knows.
      reuse: whether an operation may write its result over its last one.

    Attributes:
      attend: the attention kernel.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, *, reuse: bool = False) -> None:
        self._dtype = dtype
        self._buffers = {n: Buffer() for n in ("attention", "norm", "gated")} if reuse else {}
        int_, pointer = ctypes.c_int64, ctypes.c_void_p
        self.attend = attend_kernel(library, dtype)
        of = functools.partial(kernel, library)
        self._add_norm = of("add_norm", dtype, *[int_] * 3, ctypes.c_float, *[pointer] * 4)
        self._rotate = of("rotate", dtype, *[int_] * 5, *[pointer] * 3)
        self._silu_mul = of("silu_mul", dtype, *[int_] * 3, *[pointer] * 2)

    @staticmethod
    def takes(dtype: torch.dtype, *sizes: int) -> bool:
        """True if tensors of this dtype with rows of these sizes can be computed."""
        return dtype in DTYPES and all(size % 4 == 0 for size in sizes)

    def attention(
        self, plan: AttentionPlan, keys: Tensor, *, heads: int, scale: float
    ) -> Attention:
        """See ``Operations``."""
        return CompiledAttention(
            *(self.attend, plan, keys),
            heads=heads,
            scale=scale,
            buffer=self._buffers.get("attention"),
        )

    def _empty(self, name: str, rows: int, columns: int) -> Tensor:
        return self._buffers.get(name, Buffer()).empty(rows, columns, self._dtype)

    def add_norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See ``Operations``."""
        out = self._empty("norm", *x.shape)
        self._add_norm(
            *(*x.shape, torch.get_num_threads(), eps, x.data_ptr()),
            None if added is None else added.data_ptr(),
            *(weight.data_ptr(), out.data_ptr()),
        )
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See ``TorchOperations``."""
        tokens, heads, dim = x.shape
        self._rotate(
            *(tokens, heads, dim // 2, x.stride(0), torch.get_num_threads()),
            *(x.data_ptr(), cos.data_ptr(), sin.data_ptr()),
        )
        return x

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """See ``Operations``."""
        if activation not in ("silu", "swish"):
            return super().gated(gate_up, activation)
        rows, width = gate_up.shape
        out = self._empty("gated", rows, width // 2)
        self._silu_mul(
            *(rows, width // 2, torch.get_num_threads()), *(gate_up.data_ptr(), out.data_ptr())
        )
        return out


def operations_for(
    kernels: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    width: int,
    inner: int,
    head_dim: int,
    group: int,
) -> Operations:
    """The fastest operations there are.

    Args:
      kernels: ``auto``, or ``torch`` for torch's own operations.
      device, dtype: of the tensors.
      width, inner, head_dim: sizes of hidden state, MLP and head.
      group: query heads that share a KV head.
    """
    if kernels == "auto" and device.type == "cuda":
        why = _triton_refusal(device, dtype, head_dim, group)
        if not why:
            from surge_beam.gpu.kernels.triton_operations import TritonOperations

            return TritonOperations()
        _say_once(f"torch's own operations are used, which are slower: {why}")
    elif kernels == "auto" and CompiledOperations.takes(dtype, width, inner, head_dim // 2):
        library = load_kernels()
        if library is not None:
            return CompiledOperations(library, dtype, reuse=True)
    return TorchOperations()


def _triton_refusal(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> str:
    """Why the Triton kernels cannot run; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "there is no package triton"
    from surge_beam.gpu.triton_attention import refusal

    return refusal(device, dtype, head_dim, group) or _failed_launch(device)


@functools.cache
def _failed_launch(device: torch.device) -> str:
    """Why a kernel does not run; empty if it does. Compiling one needs a C compiler as well."""
    from surge_beam.gpu.kernels.elementwise_triton import silu_and_mul

    try:
        silu_and_mul(torch.zeros(1, 2, device=device))
    except Exception as error:  # whatever Triton and its compilers raise
        return f"Triton runs no kernel here: {(str(error).splitlines() or [repr(error)])[0]}"
    return ""


@functools.cache
def _say_once(message: str) -> None:
    _log.warning(message)
