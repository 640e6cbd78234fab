"""Measuring tau and c of the SURGE cost model on the worker's own device."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence

import pyarrow as pa

from surge_beam.gpu.worker import EncodeWorker
from surge_beam.policy.costs import CostModel, fit

CALLS = (1, 2, 3, 5, 8)
SECONDS = 0.1
MAX_ROWS = 4096
REPEATS = 3


def calibrate(worker: EncodeWorker, texts: Sequence[str], *, rows: int = 32) -> CostModel:
    """Encodes the same rows in 1, 2, 3, 5 and 8 calls and fits T = C * tau + N * c.

    The texts are encoded without the worker's cache and deduplication, since a repeated text that
    costs nothing would say nothing about c. A device on which ``rows`` of them take less than a
    tenth of a second is given more, and measured three times, of which the best counts.

    Args:
      texts: a sample of the corpus; repeated where it is short.
      rows: rows of each measurement, at least.
    """
    plain = EncodeWorker(
        worker.encoder, cache_bytes=0, config=dataclasses.replace(worker.config, dedupe=False)
    )

    def measure(count: int, calls: int) -> float:
        sample = pa.array([texts[i % len(texts)] for i in range(count)], pa.string())
        edges = [count * i // calls for i in range(calls + 1)]
        began = time.perf_counter()
        for lo, hi in itertools.pairwise(edges):
            plain.encode(plain.prepare(sample.slice(lo, hi - lo)))
        return time.perf_counter() - began

    measure(min(16, rows), 1)
    once = measure(rows, 1)
    repeats = REPEATS if once < SECONDS / 2 else 1
    while once < SECONDS / 2 and rows < MAX_ROWS:
        rows = min(MAX_ROWS, int(rows * min(16.0, max(2.0, SECONDS / 2 / max(once, 1e-9)))))
        once = measure(rows, 1)
    seconds = [min(measure(rows, calls) for _ in range(repeats)) for calls in CALLS]
    return fit(CALLS, [rows] * len(CALLS), seconds)
