"""Tiny models gain nothing from a second thread, and lose a lot on a busy machine."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
