from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

# Before any test module imports a library that reads them.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    TQDM_DISABLE="1",
    MPLBACKEND="Agg",
    AWS_EC2_METADATA_DISABLED="true",
)

# The same cases in every run: what a search finds belongs in a test of its own.
hypothesis.settings.register_profile("surge", derandomize=True, deadline=None)
hypothesis.settings.load_profile("surge")

ROOT = Path(__file__).resolve().parent.parent


def _shared() -> Path:
    return Path(os.environ.get("SURGE_SHARED") or ROOT.parent / "shared").resolve()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of shared data sets; the test is skipped where it is absent."""
    folder = _shared() / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}; SURGE_SHARED names the folder that holds data/")
    return folder


@pytest.fixture(scope="session")
def prism_path() -> str:
    """Beam's Prism runner, for --prism_location; the test is skipped where it is absent."""
    binary = _shared() / "tools" / "prism"
    if not os.access(binary, os.X_OK):
        pytest.skip(f"no Prism binary at {binary}; SURGE_SHARED names the folder with tools/prism")
    return str(binary)
