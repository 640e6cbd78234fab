"""Tiny models gain nothing from a second thread, and lose a lot on a busy machine.

Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before Triton is
imported: its own functions are compiled or interpreted from then on.
"""

from __future__ import annotations

import os

import pytest
import torch

from surge_beam.gpu.kernels.compiled import load_kernels
from tests.whole import WHOLE

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    if WHOLE:  # real models, for an hour
        return
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture(params=[None, "AVX2", "DEFAULT"])
def library(request):
    """The compiled kernels, of each instruction set that this processor has."""
    if request.param == "AVX2" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    found = load_kernels(request.param)
    if found is None:
        pytest.skip("no C++ compiler here")
    return found
