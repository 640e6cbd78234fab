"""Measuring tau and c: what is counted, and what becomes of the vectors."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from surge_beam.gpu.calibrate import CALLS, calibrate
from surge_beam.gpu.worker import EncodeWorker
from surge_beam.records import EncoderConfig

SLOW = "dummy:8:tau=0.02:c=2e-3"


def test_costs_are_those_of_the_encoder() -> None:
    worker = EncodeWorker(EncoderConfig(model=SLOW))
    costs = calibrate(worker, [f"text {i:03d}" for i in range(300)])
    # sleeping takes longer than asked on a busy machine, never less
    assert costs.tau > 0 and costs.c > 0.001


def test_texts_of_unequal_lengths_are_weighed_by_their_tokens() -> None:
    worker = EncodeWorker(EncoderConfig(model=SLOW))
    texts = ["word " * (1 + 40 * (i % 7 == 0)) + str(i) for i in range(300)]
    costs = calibrate(worker, texts)
    assert costs.tau > 0 and costs.c > 0.001


def test_what_was_slow_to_encode_is_not_encoded_again() -> None:
    worker = EncodeWorker(EncoderConfig(model=SLOW))
    texts = [f"text {i}" for i in range(300)]
    calibrate(worker, texts)
    encoded = worker.encode(worker.prepare(pa.array(texts)))
    assert encoded.stats.cached_rows >= 32 * len(CALLS)
    fresh = EncodeWorker(EncoderConfig(model="dummy:8"))
    assert np.array_equal(encoded.matrix, fresh.encode(fresh.prepare(pa.array(texts))).matrix)


def test_a_short_sample_is_repeated() -> None:
    worker = EncodeWorker(EncoderConfig(model="dummy:8"))
    assert calibrate(worker, ["only one"]).c >= 0
    nothing_kept = EncodeWorker(EncoderConfig(model=SLOW, dedupe=False))
    calibrate(nothing_kept, ["only one", ""])
    assert nothing_kept.encode(nothing_kept.prepare(pa.array(["only one"]))).stats.cached_rows == 0
