"""Compiles the C++ kernels of this folder for the CPU they run on, once a machine and version."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from surge_beam.gpu.user_cache import cache_folder

_log = logging.getLogger(__name__)

SOURCES = ("attention.cpp", "elementwise.cpp", "linear.cpp")
_HEADERS = ("vectors.h",)
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# By what torch says the processor has (and ATEN_CPU_CAPABILITY may lower).
_FLAGS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
    "AVX2": ("-mavx2", "-mfma"),
}
_COMMON = ("-O3", "-std=c++17", "-fopenmp", "-Wno-psabi")


@functools.cache
def load_kernels(capability: str | None = None) -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be compiled, said once as a warning.

    They are plain C functions, compiled by ``torch.utils.cpp_extension`` with the machine's C++
    compiler and ninja, and kept in the user's cache by a digest of sources, flags and torch.

    Args:
      capability: instruction set, as ``torch.backends.cpu.get_cpu_capability`` names it; None
        asks it.
    """
    capability = capability or torch.backends.cpu.get_cpu_capability()
    flags = (*_COMMON, *_FLAGS.get(capability, ()))
    target = cache_folder() / "kernels" / f"surge_kernels_{_digest(flags)}.so"
    try:
        if not target.is_file():
            _compile(flags, target)
        return ctypes.CDLL(str(target))
    except (OSError, RuntimeError, ImportError, subprocess.SubprocessError) as error:
        _log.warning(
            "the CPU kernels could not be compiled, so torch's own operations are used, which are "
            "slower; a C++ compiler and the package ninja are what it takes: %s",
            str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
        )
        return None


def kernel(
    library: ctypes.CDLL, name: str, dtype: torch.dtype, *types: type
) -> Callable[..., None]:
    """A kernel of a library for tensors of a dtype, with the C types of its arguments.

    Args:
      dtype: one of ``DTYPES``.
    """
    found: Callable[..., None] = getattr(library, f"surge_{name}_{DTYPES[dtype]}")
    found.argtypes, found.restype = types, None  # type: ignore[attr-defined]
    return found


def _digest(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((flags, torch.__version__, platform.machine())).encode())
    for name in (*SOURCES, *_HEADERS):
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:32]


def _compile(flags: tuple[str, ...], target: Path) -> None:
    """Into a folder of its own: a process that is killed leaves no lock that others wait for."""
    from torch.utils import cpp_extension

    if not shutil.which(os.environ.get("CXX", "c++")):
        raise RuntimeError("no C++ compiler")
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = os.environ.get("PATH", "")
    try:
        # where pip puts ninja, which need not be on the path of a process of this environment
        os.environ["PATH"] = os.pathsep.join([path, str(Path(sys.executable).parent)])
        with tempfile.TemporaryDirectory(prefix="compiling-", dir=target.parent) as folder:
            # The linker gets no -fopenmp, so that torch's OpenMP threads run the kernels.
            cpp_extension.load(
                name=target.stem,
                sources=[str(Path(__file__).parent / name) for name in SOURCES],
                extra_cflags=list(flags),
                build_directory=folder,
                is_python_module=False,
                with_cuda=False,
            )
            # torch numbers the name when it is told to build it again
            (built,) = Path(folder).glob("*.so")
            os.replace(built, target)
    finally:
        os.environ["PATH"] = path
