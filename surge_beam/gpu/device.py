"""Which device and number format a model runs in."""

from __future__ import annotations

import dataclasses
import os

import torch

from surge_beam.gpu.host import usable_cores
from surge_beam.records import EncoderConfig, EngineConfig, SurgeError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Device:
    """Attributes:
    name: ``cpu`` or ``cuda``.
    dtype_name: the number format of the weights.
    torch: the device.
    compute: the number format of weights and activations while computing.
    round_to: what weights are rounded to before they are widened to ``compute``, or None.
    """

    name: str
    dtype_name: str
    torch: torch.device
    compute: torch.dtype
    round_to: torch.dtype | None


def choose_device(config: EncoderConfig | EngineConfig) -> Device:
    """Resolves ``auto`` and checks that what was asked for is there.

    A CPU without AVX512_BF16 or AMX multiplies bfloat16 8 times slower than float32, and float16
    no better; there a 16-bit format means weights rounded to it and float32 arithmetic.

    Raises:
      SurgeError: if CUDA was asked for and there is none, or the names are unknown.
    """
    if config.device not in ("auto", "cpu", "cuda"):
        raise SurgeError(f"device must be auto, cpu or cuda, not {config.device!r}")
    there = torch.cuda.is_available()
    if not there and (config.device == "cuda" or config.require_accelerator):
        raise SurgeError(
            "this step asks for CUDA and this worker has none; give it a GPU, "
            "or ask for device='cpu' without require_accelerator"
        )
    if config.device == "cpu" and config.require_accelerator:
        raise SurgeError("device='cpu' and require_accelerator exclude each other")
    name = "cuda" if there and config.device != "cpu" else "cpu"
    dtype_name = config.dtype
    if dtype_name == "auto":
        dtype_name = "bfloat16" if name == "cuda" else "float32"
    if dtype_name not in _DTYPES:
        raise SurgeError(f"dtype must be auto or one of {', '.join(_DTYPES)}, not {dtype_name!r}")
    dtype = _DTYPES[dtype_name]
    if name == "cuda" or dtype == torch.float32 or _computes_fast(dtype):
        return Device(name, dtype_name, torch.device(name), dtype, None)
    return Device(name, dtype_name, torch.device(name), torch.float32, dtype)


def use_all_cores() -> None:
    """Gives torch the cores this process may use, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = usable_cores()
        if torch.get_num_threads() != cores:
            torch.set_num_threads(cores)


def _computes_fast(dtype: torch.dtype) -> bool:
    """True if this CPU has matrix instructions for a 16-bit format."""
    probes = {
        torch.bfloat16: ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
        torch.float16: ("_is_amx_fp16_supported",),
    }[dtype]
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
