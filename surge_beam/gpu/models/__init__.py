"""Model families that run on packed sequences, one a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surge_beam.gpu.device import Device
from surge_beam.gpu.models import bert, modernbert, mpnet, qwen3
from surge_beam.gpu.models.weights import Weights

_FAMILIES: tuple[tuple[Any, Any], ...] = (
    (bert, bert.Bert),
    (mpnet, mpnet.MPNet),
    (modernbert, modernbert.ModernBert),
    (qwen3, qwen3.Qwen3),
)


def build_model(config: Any, folder: Path, device: Device) -> Any:
    """The packed model of a transformers config with the folder's weights; None if none fits."""
    for module, family in _FAMILIES:
        if module.supports(config):
            weights = Weights(
                folder,
                dtype=device.compute,
                device=device.torch,
                round_to=device.round_to,
                prefixes=module.PREFIXES,
            )
            return family(config, weights)
    return None
