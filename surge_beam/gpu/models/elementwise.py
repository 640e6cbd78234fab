"""What stands between the products of an encoder layer: activations, and layer norms.

On a CPU in float32 by a compiled kernel each, in one pass over its numbers, where torch takes two
or three times as long.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from surge_beam.gpu.kernels.compiled import kernel, load_kernels
from surge_beam.gpu.models.weights import TensorSource
from surge_beam.records import SurgeError

_LANES = 4  # numbers of the narrowest vector
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p
_TYPES = {
    "gelu": (_INT, _INT, _POINTER),
    "add_layer_norm": (*[_INT] * 3, ctypes.c_float, *[_POINTER] * 4),
}


@functools.cache
def _compiled(name: str) -> Callable[..., None] | None:
    """One of the kernels of ``_TYPES``; None without a compiler."""
    library = load_kernels()
    return None if library is None else kernel(library, name, torch.float32, *_TYPES[name])


def _computed_here(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous()


def _gelu(x: Tensor) -> Tensor:
    """In place: x times the normal distribution function, by the error function."""
    if _computed_here(x) and x.numel() % _LANES == 0:
        run = _compiled("gelu")
        if run is not None:
            run(x.numel(), torch.get_num_threads(), x.data_ptr())
            return x
    return torch._C._nn.gelu_(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# What they are given may be changed.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


class LayerNorm:
    """Layer norm over the last dimension, with weight and bias.

    Args:
      weights: where ``NAME.weight`` and ``NAME.bias`` [width] are.
      name: NAME.
      eps: added to the variance.

    Raises:
      SurgeError: if one of them is not there, or they are not of one size.
    """

    def __init__(self, weights: TensorSource, name: str, eps: float) -> None:
        self.weight, self.bias = weights.tensor(f"{name}.weight"), weights.tensor(f"{name}.bias")
        if self.weight.ndim != 1 or self.bias.shape != self.weight.shape:
            raise SurgeError(
                f"the norm {name} has weights of the shape {list(self.weight.shape)}"
                f" and a bias of {list(self.bias.shape)}"
            )
        self.eps = eps

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """The norm of x [T, width], or of ``x + added``; x may be changed."""
        given = (x,) if added is None else (x, added)
        width = len(self.weight)
        # the kernel takes their sizes on trust
        if width % _LANES == 0 and all(
            _computed_here(y) and y.shape == (len(x), width) for y in given
        ):
            run = _compiled("add_layer_norm")
            if run is not None:
                run(
                    *(len(x), width, torch.get_num_threads(), self.eps, x.data_ptr()),
                    None if added is None else added.data_ptr(),
                    *(self.weight.data_ptr(), self.bias.data_ptr()),
                )
                return x
        if added is not None:
            x.add_(added)
        return F.layer_norm(x, (width,), self.weight, self.bias, self.eps)
