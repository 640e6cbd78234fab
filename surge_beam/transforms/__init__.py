"""What a pipeline's author imports. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surge_beam.transforms.embed import Embed, EmbedResult
    from surge_beam.transforms.embed_files import EmbedConfig, EmbedFiles
    from surge_beam.transforms.read import ReadConfig
    from surge_beam.transforms.read_partitions import ReadPartitions, ReadResult
    from surge_beam.transforms.superbatch import FormSuperBatches
    from surge_beam.transforms.write import WriteConfig
    from surge_beam.transforms.write_partitions import WritePartitions, WriteResult

__all__ = [
    "Embed",
    "EmbedConfig",
    "EmbedFiles",
    "EmbedResult",
    "FormSuperBatches",
    "ReadConfig",
    "ReadPartitions",
    "ReadResult",
    "WriteConfig",
    "WritePartitions",
    "WriteResult",
]

_HOMES = {
    "Embed": "embed",
    "EmbedConfig": "embed_files",
    "EmbedFiles": "embed_files",
    "EmbedResult": "embed",
    "FormSuperBatches": "superbatch",
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
