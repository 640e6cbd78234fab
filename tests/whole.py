"""What the suite leaves to ``SURGE_WHOLE=1``, so that it takes less than twenty minutes."""

from __future__ import annotations

import os

import pytest

WHOLE = bool(os.environ.get("SURGE_WHOLE"))
only_whole = pytest.mark.skipif(not WHOLE, reason="SURGE_WHOLE=1 runs it")
