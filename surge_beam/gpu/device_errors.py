"""What an error of a device means; loads no torch."""

from __future__ import annotations

import sys

_FATAL = ("device-side assert", "illegal memory access", "misaligned address", "unspecified launch")
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: Exception) -> bool:
    """True if an error says that the device or the host has no memory left."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in _OUT_OF_MEMORY)


def is_fatal(error: Exception) -> bool:
    """True if the CUDA context is lost, so that every later pass would fail too."""
    text = str(error)
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "AcceleratorError"
        or "CUDA error" in text
        or any(part in text for part in _FATAL)
    )


def free_device_memory() -> None:
    """Gives back what torch keeps of a GPU's memory without using it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
