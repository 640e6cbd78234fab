"""Tiny models gain nothing from a second thread, and lose a lot on a busy machine.

Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before Triton is
imported: its own functions are compiled or interpreted from then on.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.whole import WHOLE

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    if WHOLE:  # real models, for an hour
        return
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
