"""What the decode engine does not compute; loads no torch."""

from __future__ import annotations

from typing import Any

from surge_beam.records import SurgeError


def unsupported_error(name: str, family: Any, why: str) -> SurgeError:
    """The error that refuses a model."""
    return SurgeError(
        f"the decode engine does not compute {name}, of the family {family!r}: {why}; "
        "--engine vllm (the vLLM engine) runs it"
    )
