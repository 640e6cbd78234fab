"""What a pipeline's author imports. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surge_beam.transforms.embed import Embed, EmbedResult
    from surge_beam.transforms.embed_files import EmbedConfig, EmbedFiles
    from surge_beam.transforms.generate import Generate, GenerateResult
    from surge_beam.transforms.generate_files import GenerateConfig, GenerateFiles
    from surge_beam.transforms.prefix_partition import (
        BatchLimits,
        FormPrefixBatches,
        PartitionByPrefix,
    )
    from surge_beam.transforms.read import ReadConfig
    from surge_beam.transforms.read_partitions import ReadPartitions, ReadResult
    from surge_beam.transforms.superbatch import FormSuperBatches
    from surge_beam.transforms.write import WriteConfig
    from surge_beam.transforms.write_partitions import WritePartitions, WriteResult

__all__ = [
    "BatchLimits",
    "Embed",
    "EmbedConfig",
    "EmbedFiles",
    "EmbedResult",
    "FormPrefixBatches",
    "FormSuperBatches",
    "Generate",
    "GenerateConfig",
    "GenerateFiles",
    "GenerateResult",
    "PartitionByPrefix",
    "ReadConfig",
    "ReadPartitions",
    "ReadResult",
    "WriteConfig",
    "WritePartitions",
    "WriteResult",
]

_HOMES = {
    "BatchLimits": "prefix_partition",
    "Embed": "embed",
    "EmbedConfig": "embed_files",
    "EmbedFiles": "embed_files",
    "EmbedResult": "embed",
    "FormPrefixBatches": "prefix_partition",
    "FormSuperBatches": "superbatch",
    "Generate": "generate",
    "GenerateConfig": "generate_files",
    "GenerateFiles": "generate_files",
    "GenerateResult": "generate",
    "PartitionByPrefix": "prefix_partition",
    "ReadConfig": "read",
    "ReadPartitions": "read_partitions",
    "ReadResult": "read_partitions",
    "WriteConfig": "write",
    "WritePartitions": "write_partitions",
    "WriteResult": "write_partitions",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
