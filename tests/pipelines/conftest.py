from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

SMOLLM = "SmolLM2-135M-Instruct"


@pytest.fixture
def smollm() -> Iterator[Path]:
    """The real model's folder, on one thread; skips the test where it is not installed."""
    from surge_beam.gpu.encoder import model_folder
    from surge_beam.records import SurgeError

    try:
        folder = model_folder(SMOLLM)
    except SurgeError as error:
        pytest.skip(str(error))
    import torch

    threads = torch.get_num_threads()
    # a second thread waits actively for its share of a busy machine
    torch.set_num_threads(1)
    yield folder
    torch.set_num_threads(threads)
