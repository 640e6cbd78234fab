"""Measuring tau and c of the SURGE cost model on the worker's own device."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence

import pyarrow as pa

from surge_beam.gpu.worker import EncodeWorker
from surge_beam.policy.costs import CostModel, fit

CALLS = (1, 2, 4, 8, 16)
SECONDS = 0.1
MAX_ROWS = 4096
REPEATS = 3


def calibrate(worker: EncodeWorker, texts: Sequence[str], *, rows: int = 64) -> CostModel:
    """Encodes the same rows in 1, 2, 4, 8 and 16 calls and fits T = C * tau + N * c.

    The texts are encoded without the worker's cache and deduplication, since a repeated text that
    costs nothing would say nothing about c. Where ``rows`` of them take less than a tenth of a
    second more are taken, and every measurement is the best of three.

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

    measure(16, 1)
    while (once := measure(rows, 1)) < SECONDS and rows < MAX_ROWS:
        rows = min(MAX_ROWS, int(rows * min(16.0, max(2.0, SECONDS / once))))
    repeats = REPEATS if once < 10 * SECONDS else 1
    seconds = [min(measure(rows, calls) for _ in range(repeats)) for calls in CALLS]
    return fit(CALLS, [rows] * len(CALLS), seconds)
