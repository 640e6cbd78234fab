"""Measuring tau and c of the SURGE cost model on the worker's own device."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Sequence

import pyarrow as pa

from surge_beam.gpu.worker import EncodeWorker
from surge_beam.policy.costs import CostModel, fit

CALLS = (1, 2, 5)
SECONDS = 0.02
MAX_ROWS = 4096
REPEATS = 3


def calibrate(worker: EncodeWorker, texts: Sequence[str], *, rows: int = 32) -> CostModel:
    """Encodes some texts in 1, 2 and 5 calls and fits T = C * tau + N * c.

    Each measurement takes texts of its own as far as they last, and N is weighed by tokens, since
    texts differ in length. Nothing is deduplicated or cached while measuring: a repeated text that
    costs nothing would say nothing about c. Where encoding them takes long, the worker keeps the
    vectors, so that it was not in vain. A device on which ``rows`` texts take less than
    ``SECONDS`` is given more, and measured three times, of which the best counts.

    Args:
      texts: a sample of the corpus; repeated where it is short.
      rows: texts of each measurement, at least.
    """
    plain = EncodeWorker(
        worker.encoder, cache_bytes=0, config=dataclasses.replace(worker.config, dedupe=False)
    )
    supply = itertools.cycle(texts)

    def measure(sample: list[str], calls: int) -> tuple[float, int]:
        """Seconds and tokens of ``calls`` calls over the sample."""
        column = pa.array(sample, pa.string())
        edges = [len(sample) * i // calls for i in range(calls + 1)]
        began = time.perf_counter()
        done = [
            plain.encode(plain.prepare(column.slice(lo, hi - lo)))
            for lo, hi in itertools.pairwise(edges)
        ]
        seconds = time.perf_counter() - began
        if seconds >= SECONDS:
            for lo, encoded in zip(edges, done, strict=False):
                worker.remember(sample[lo : lo + encoded.stats.rows], encoded)
        return seconds, sum(encoded.stats.tokens for encoded in done)

    measure(list(itertools.islice(supply, min(16, rows))), 1)
    once, _ = measure(list(itertools.islice(supply, rows)), 1)
    repeats = REPEATS if once < SECONDS else 1
    while once < SECONDS and rows < MAX_ROWS:
        rows = min(MAX_ROWS, int(rows * min(16.0, max(2.0, SECONDS / max(once, 1e-9)))))
        once, _ = measure(list(itertools.islice(supply, rows)), 1)
    samples = _alike(list(itertools.islice(supply, rows * len(CALLS))), len(CALLS))
    found = [
        min(measure(sample, calls) for _ in range(repeats))
        for sample, calls in zip(samples, CALLS, strict=True)
    ]
    tokens = [n for _, n in found]
    share = rows * len(CALLS) / max(1, sum(tokens))
    weighed = [n * share for n in tokens] if min(tokens) > 0 else [float(rows)] * len(CALLS)
    return fit(CALLS, weighed, [seconds for seconds, _ in found])


def _alike(texts: list[str], count: int) -> list[list[str]]:
    """Samples of as many texts each, and of about the same lengths, in no order."""
    by_length = sorted(texts, key=len)
    samples = [by_length[i::count] for i in range(count)]
    for sample in samples:
        random.Random(0).shuffle(sample)
    return samples
