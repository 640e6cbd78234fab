"""Weights of a model folder, read from safetensors only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from surge_beam.gpu.models.linear import Linear
from surge_beam.records import SurgeError

_OLD_NAMES = {"weight": "gamma", "bias": "beta"}


class Weights:
    """Tensors of a folder by name, cast to the dtype and put on the device when they are read.

    Args:
      folder: holds ``model.safetensors`` or ``model.safetensors.index.json`` and its shards.
      dtype: of the tensors handed out.
      device: of the tensors handed out.
      round_to: a narrower dtype that values are rounded to first, or None.
      prefixes: heads of names that may be left out when asking, such as ``bert.``.

    Raises:
      SurgeError: if the folder has no safetensors.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        round_to: torch.dtype | None = None,
        prefixes: tuple[str, ...] = (),
    ) -> None:
        self.dtype, self.device, self.round_to = dtype, device, round_to
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            files = [folder / Path(name).name for name in names]
        else:
            files = [folder / "model.safetensors"]
        for file in files:
            if not file.is_file():
                raise SurgeError(
                    f"weights file {file.name} is missing in the model folder {folder}"
                )
        self._where: dict[str, tuple[Any, str]] = {}
        for file in files:
            handle = safe_open(file, framework="pt", device="cpu")
            for key in list(handle.keys()):
                self._where[key] = (handle, key)
                for prefix in prefixes:
                    if key.startswith(prefix):
                        self._where.setdefault(key[len(prefix) :], (handle, key))

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name. Raises SurgeError if there is none."""
        found = self.find(name)
        if found is None:
            raise SurgeError(f"the model's weights have no tensor named {name!r}")
        return found

    def find(self, name: str) -> Tensor | None:
        """The tensor of a name, or None."""
        head, _, tail = name.rpartition(".")
        where = self._where.get(name) or self._where.get(f"{head}.{_OLD_NAMES.get(tail, tail)}")
        if where is None:
            return None
        handle, key = where
        return self._cast(handle.get_tensor(key))

    def linear(self, *names: str) -> Linear:
        """Projections of the same input, stacked into one; a missing bias is none or zero."""
        weights = [self.tensor(f"{name}.weight") for name in names]
        biases = [self.find(f"{name}.bias") for name in names]
        bias: Tensor | None = None
        if any(b is not None for b in biases):
            bias = torch.cat(
                [
                    b if b is not None else w.new_zeros(w.shape[0])
                    for w, b in zip(weights, biases, strict=True)
                ]
            )
        return Linear(torch.cat(weights) if len(weights) > 1 else weights[0], bias)

    def _cast(self, tensor: Tensor) -> Tensor:
        if self.round_to is not None and tensor.is_floating_point():
            tensor = tensor.to(self.round_to)
        return tensor.to(device=self.device, dtype=self.dtype)
