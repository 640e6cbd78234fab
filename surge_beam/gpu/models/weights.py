"""Weights of a model by name; those of a folder, read from safetensors only."""

from __future__ import annotations

import abc
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from surge_beam.gpu.buffer import Buffer
from surge_beam.gpu.models.linear import Linear, make_linear
from surge_beam.records import SurgeError

_OLD_NAMES = {"weight": "gamma", "bias": "beta"}


class TensorSource(abc.ABC):
    """Tensors by name, cast to the dtype and put on the device when they are read.

    Args:
      dtype: of the tensors handed out.
      device: of the tensors handed out.
      round_to: a narrower dtype that values are rounded to first, or None.
    """

    def __init__(
        self, *, dtype: torch.dtype, device: torch.device, round_to: torch.dtype | None = None
    ) -> None:
        self.dtype, self.device, self.round_to = dtype, device, round_to

    @abc.abstractmethod
    def find(self, name: str) -> Tensor | None:
        """The tensor of a name, or None. Raises SurgeError if it cannot be read."""

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name. Raises SurgeError if there is none."""
        found = self.find(name)
        if found is None:
            raise SurgeError(f"the model's weights have no tensor named {name!r}")
        return found

    def linear(self, *names: str, kernels: str = "torch", buffer: Buffer | None = None) -> Linear:
        """Projections of the same input, stacked into one; a missing bias is none or zero.

        ``kernels`` and ``buffer`` as in ``make_linear``.
        """
        weights = [self.tensor(f"{name}.weight") for name in names]
        biases = [self.find(f"{name}.bias") for name in names]
        for name, weight, bias in zip(names, weights, biases, strict=True):
            if weight.ndim != 2 or weight.shape[1] != weights[0].shape[-1]:
                raise SurgeError(f"the weights of {name} have the shape {list(weight.shape)}")
            if bias is not None and bias.shape != weight.shape[:1]:
                raise SurgeError(f"the bias of {name} has the shape {list(bias.shape)}")
        stacked: Tensor | None = None
        if any(b is not None for b in biases):
            stacked = torch.cat(
                [
                    b if b is not None else w.new_zeros(w.shape[0])
                    for w, b in zip(weights, biases, strict=True)
                ]
            )
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return make_linear(weight, stacked, kernels=kernels, buffer=buffer)

    def cast(self, tensor: Tensor) -> Tensor:
        """The tensor rounded, in the dtype and on the device."""
        if self.round_to is not None and tensor.is_floating_point():
            tensor = tensor.to(self.round_to)
        return tensor.to(device=self.device, dtype=self.dtype)


class Weights(TensorSource):
    """Tensors of a folder.

    Args:
      folder: holds ``model.safetensors`` or ``model.safetensors.index.json`` and its shards.
      prefixes: heads of names that may be left out when asking, such as ``bert.``.

    Raises:
      SurgeError: if the folder has no safetensors, or one of them is broken.
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
        super().__init__(dtype=dtype, device=device, round_to=round_to)
        files = _files(folder)
        for file in files:
            if not file.is_file():
                raise SurgeError(
                    f"weights file {file.name} is missing in the model folder {folder}"
                )
        self._where: dict[str, tuple[Any, str, Path]] = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise _unreadable(file, error) from error
            for key in list(handle.keys()):
                self._where[key] = (handle, key, file)
                for prefix in prefixes:
                    if key.startswith(prefix):
                        self._where.setdefault(key[len(prefix) :], (handle, key, file))

    def find(self, name: str) -> Tensor | None:
        """The tensor of a name, or None."""
        head, _, tail = name.rpartition(".")
        where = self._where.get(name) or self._where.get(f"{head}.{_OLD_NAMES.get(tail, tail)}")
        if where is None:
            return None
        handle, key, file = where
        try:
            return self.cast(handle.get_tensor(key))
        except (SafetensorError, OSError) as error:
            raise _unreadable(file, error) from error


def _files(folder: Path) -> list[Path]:
    """The weights files that a folder should have."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        return [folder / Path(name).name for name in sorted(names)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(index, error) from error


def _unreadable(file: Path, error: Exception) -> SurgeError:
    return SurgeError(f"the weights file {file} cannot be read: {error}")
