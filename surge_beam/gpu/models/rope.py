"""Rotary positions over packed sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FIXED_TYPES = ("default", "linear", "llama3", "yarn")


class Rope:
    """Turns pairs of coordinates by an angle that grows with the position.

    Args:
      frequencies: angle a position, [d / 2].
      scale: factor on sine and cosine.
    """

    def __init__(self, frequencies: Tensor, scale: float = 1.0) -> None:
        self.frequencies, self.scale = frequencies.float(), scale

    def to(self, device: torch.device) -> Rope:
        """With its frequencies on a device, so that its tables need no copy."""
        return Rope(self.frequencies.to(device), self.scale)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine for integer positions [T], both [T, 1, d / 2]."""
        angles = positions.float()[:, None, None] * self.frequencies.to(positions.device)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, d] with its halves turned against each other."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def default_frequencies(theta: float, width: int) -> Tensor:
    """Angles a position of the original rope, float32 [width / 2]."""
    return 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


def rope_from_config(config: Any, parameters: dict[str, Any], width: int, **layer: Any) -> Rope:
    """The rope that a transformers config asks for.

    Types beyond ``FIXED_TYPES`` come out as they are for a sequence no longer than the model was
    trained on.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return Rope(default_frequencies(parameters["rope_theta"], width))
    return Rope(*ROPE_INIT_FUNCTIONS[kind](config, None, **layer))
