"""Keeps the metrics of worker processes apart on a runner that mixes them up."""

from __future__ import annotations

import contextlib
import os

_FIRST = 1 << 52


def keep_metric_ids_apart() -> None:
    """Lets this process name its metrics by numbers that no other process uses.

    A worker names each metric by a number, counted from 1 in every process. Prism (2.77) keeps
    one table of them a job, so with a second worker process, which a step with a resource hint
    gets, it takes one metric for another, and panics where their encodings differ.
    """
    from apache_beam.runners.worker import sdk_worker

    # a private name of Beam: without it, the ids stay as they are
    with contextlib.suppress(AttributeError):
        ids = sdk_worker.SHORT_ID_CACHE
        with ids._lock:
            if ids._last_short_id < _FIRST:
                ids._last_short_id += _FIRST + (int.from_bytes(os.urandom(4), "little") << 20)
