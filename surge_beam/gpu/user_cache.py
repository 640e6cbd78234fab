"""Where files that take long to make are kept for the next process of this user."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``surge_beam`` below ``XDG_CACHE_HOME`` or ``~/.cache``; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surge_beam"
