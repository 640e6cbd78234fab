"""What the suite leaves to ``SURGE_WHOLE=1``, so that it takes less than twenty minutes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WHOLE = bool(os.environ.get("SURGE_WHOLE"))
only_whole = pytest.mark.skipif(not WHOLE, reason="SURGE_WHOLE=1 runs it")


def kept(name: str, compute: Callable[[], Any]) -> Any:
    """What an oracle says, as JSON; kept between runs in the folder that SURGE_ORACLES names."""
    folder = os.environ.get("SURGE_ORACLES")
    if not folder:
        return compute()
    file = Path(folder, f"{name}.json")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(compute()))
    return json.loads(file.read_text())
