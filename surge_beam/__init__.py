"""Apache Beam transforms that stream partitioned text through encoders.

The names are imported when they are first used: a process that reads files imports no Beam.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surge_beam.records import (
        BadInputError,
        Completion,
        DeadLetter,
        EncoderConfig,
        EngineConfig,
        RefusedError,
        Request,
        SamplingParams,
        SurgeError,
    )
    from surge_beam.transforms import (
        BatchLimits,
        Embed,
        EmbedConfig,
        EmbedFiles,
        EmbedResult,
        FormPrefixBatches,
        FormSuperBatches,
        Generate,
        GenerateConfig,
        GenerateFiles,
        GenerateResult,
        PartitionByPrefix,
        ReadConfig,
        ReadPartitions,
        ReadResult,
        WriteConfig,
        WritePartitions,
        WriteResult,
    )

__all__ = [
    "BadInputError",
    "BatchLimits",
    "Completion",
    "DeadLetter",
    "Embed",
    "EmbedConfig",
    "EmbedFiles",
    "EmbedResult",
    "EncoderConfig",
    "EngineConfig",
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
    "RefusedError",
    "Request",
    "SamplingParams",
    "SurgeError",
    "WriteConfig",
    "WritePartitions",
    "WriteResult",
]

_RECORDS = {
    "BadInputError",
    "Completion",
    "DeadLetter",
    "EncoderConfig",
    "EngineConfig",
    "RefusedError",
    "Request",
    "SamplingParams",
    "SurgeError",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "surge_beam.records" if name in _RECORDS else "surge_beam.transforms"
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
