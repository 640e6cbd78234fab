"""What a run has done so far, in small files: for the progress line, the report and its page.

They are apart from the manifest, which later runs read, and go when the next run begins.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from surge_beam.transforms.files import Store

FOLDER = "_surge/stats"


def put(store: Store, run: str, header: dict[str, Any]) -> None:
    """Adds what was done in a stretch of time."""
    name = f"{FOLDER}/{run}-{uuid.uuid4().hex}.jsonl"
    store.put(name, (json.dumps({"run": run, **header}) + "\n").encode())


def read(store: Store, run: str) -> Iterator[dict[str, Any]]:
    """Everything that was added for a run."""
    names = [f"{FOLDER}/{name}" for name in store.names(FOLDER) if name.startswith(f"{run}-")]
    for at in range(0, len(names), 64):
        yield from map(json.loads, store.get_many(names[at : at + 64]))
