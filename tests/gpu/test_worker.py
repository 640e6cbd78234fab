"""EncodeWorker: failures of rows, memory, duplicates, the cache, threads."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.gpu.dummy import DummyEncoder
from surge_beam.gpu.worker import (
    EncodeWorker,
    forget_workers,
    shared_worker,
)
from surge_beam.records import EncoderConfig, SurgeError


def dummy(options="", width=8, **settings):
    return EncoderConfig(model=f"dummy:{width}{options}", **settings)


def run(worker, texts):
    return worker.encode(worker.prepare(pa.array(texts, pa.string())))


def plain(texts, width=8):
    encoder = DummyEncoder(dummy(width=width))
    return encoder.forward(encoder.tokenize(texts), np.arange(len(texts)))


class Scripted(DummyEncoder):
    """A dummy whose forward first calls ``script(rows)``, which may raise."""

    def __init__(self, script, width=8):
        super().__init__(dummy(width=width))
        self.script, self.calls = script, []

    def forward(self, tokens, rows):
        self.calls.append((int(tokens.lengths[rows].max()), len(rows)))
        self.script(rows)
        return super().forward(tokens, rows)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=12), max_size=60), st.booleans(), st.integers(1, 60))
def test_every_row_has_its_texts_vector(texts, dedupe, budget):
    texts = [t for t in texts if not any(0xD800 <= ord(c) <= 0xDFFF for c in t)]
    worker = EncodeWorker(dummy(dedupe=dedupe, max_padded_tokens=budget))
    encoded = run(worker, texts)
    assert encoded.matrix.dtype == np.float32 and encoded.matrix.flags.c_contiguous
    assert np.array_equal(encoded.matrix, plain(texts)) and not encoded.failures
    stats = encoded.stats
    assert stats.rows == len(texts)
    assert stats.unique_rows == (len(set(texts)) if dedupe else len(texts))
    assert stats.tokens <= stats.padded_tokens or not texts


def test_chunked_and_large_strings():
    texts = ["a", "b", "a", "c"]
    worker = EncodeWorker(dummy())
    for array in (
        pa.chunked_array([texts[:2], texts[2:]], pa.string()),
        pa.chunked_array([texts[:1], texts[1:]], pa.large_string()),
        pa.array(texts, pa.large_string()),
        pa.array(["x", *texts])[1:],
    ):
        assert np.array_equal(worker.encode(worker.prepare(array)).matrix, plain(texts))
    empty = worker.encode(worker.prepare(pa.chunked_array([], pa.string())))
    assert empty.matrix.shape == (0, 8)


@pytest.mark.parametrize("array", [pa.array(["a", None]), pa.array([1, 2]), pa.array([b"a"])])
def test_refuses_nulls_and_other_types(array):
    with pytest.raises(ValueError):
        EncodeWorker(dummy()).prepare(array)


@pytest.mark.parametrize("dedupe", [True, False])
def test_poison_rows_are_isolated(dedupe):
    texts = [f"text {n}" for n in range(40)]
    for at in (3, 17, 39):
        texts[at] = "BAD row"
    worker = EncodeWorker(dummy(":poison=BAD", dedupe=dedupe))
    encoded = run(worker, texts)
    assert sorted(encoded.failures) == [3, 17, 39]
    for kind, message, attempts in encoded.failures.values():
        assert kind == "ValueError" and "poisoned" in message and attempts > 3
    good = [n for n in range(40) if n not in encoded.failures]
    assert np.array_equal(encoded.matrix[good], plain(texts)[good])
    assert not encoded.matrix[[3, 17, 39]].any()


def test_not_a_number_is_a_failure_and_not_cached():
    worker = EncodeWorker(dummy(":nan=odd"))
    for _ in range(2):
        encoded = run(worker, ["fine", "odd", "fine too", "odd"])
        assert sorted(encoded.failures) == [1, 3]
        assert encoded.failures[1][0] == "NonFiniteEmbedding"
        assert not encoded.matrix[[1, 3]].any() and encoded.matrix[[0, 2]].all()


def test_out_of_memory_halves_and_remembers():
    encoder = Scripted(lambda rows: _raise(MemoryError()) if len(rows) > 10 else None)
    worker = EncodeWorker(encoder, config=EncoderConfig(max_padded_tokens=400), cache_bytes=0)
    texts = [f"{n:08d}" for n in range(100)]
    encoded = run(worker, texts)
    assert np.array_equal(encoded.matrix, plain(texts)) and not encoded.failures
    assert encoded.stats.oom_ceiling == {4: 4 * 6}
    encoder.calls.clear()
    again = run(worker, texts)
    assert not again.failures
    assert max(rows for _, rows in encoder.calls) == 6
    assert again.stats.oom_ceiling == encoded.stats.oom_ceiling


def test_ceilings_are_kept_by_length():
    encoder = Scripted(lambda rows: _raise(MemoryError()) if len(rows) > 4 else None)
    worker = EncodeWorker(encoder, config=EncoderConfig(max_padded_tokens=300), cache_bytes=0)
    run(worker, ["x" * 200 + str(n) for n in range(20)])
    assert set(worker._ceiling) == {64}
    encoder.script = lambda rows: None
    encoder.calls.clear()
    run(worker, [f"{n:04d}" for n in range(100)])
    assert [rows for _, rows in encoder.calls] == [100]


def test_one_row_too_large_for_memory_fails_alone():
    encoder = Scripted(lambda rows: _raise(RuntimeError("CUDA out of memory")) if 2 in rows else 0)
    worker = EncodeWorker(encoder, cache_bytes=0)
    encoded = run(worker, ["a", "b", "c", "d"])
    assert list(encoded.failures) == [2]
    assert encoded.failures[2][0] == "OutOfMemory"


def test_oom_option_of_the_dummy():
    encoded = run(EncodeWorker(dummy(":oom=3")), [str(n) for n in range(50)])
    assert not encoded.failures and encoded.stats.micro_batches >= 17


def test_a_lost_device_is_not_a_bad_row():
    error = RuntimeError("CUDA error: device-side assert triggered")
    worker = EncodeWorker(Scripted(lambda rows: _raise(error)))
    with pytest.raises(RuntimeError, match="device-side assert"):
        run(worker, ["a", "b"])


def test_a_broken_contract_is_not_a_bad_row():
    worker = EncodeWorker(Scripted(lambda rows: _raise(SurgeError("too few results"))))
    with pytest.raises(SurgeError):
        run(worker, ["a", "b"])


def test_cache_serves_later_superbatches():
    encoder = Scripted(lambda rows: None)
    worker = EncodeWorker(encoder)
    first = run(worker, ["a", "b", "b", "c"])
    assert first.stats.cached_rows == 0
    second = run(worker, ["c", "d", "a", "c"])
    assert second.stats.cached_rows == 2 and second.stats.unique_rows == 3
    assert np.array_equal(second.matrix, plain(["c", "d", "a", "c"]))
    assert [rows for _, rows in encoder.calls] == [3, 1]


@pytest.mark.parametrize("settings", [{"cache_bytes": 0}, {"config": EncoderConfig(dedupe=False)}])
def test_no_cache(settings):
    worker = EncodeWorker(Scripted(lambda rows: None), **settings)
    run(worker, ["a", "b"])
    assert run(worker, ["a", "b"]).stats.cached_rows == 0


def test_cache_forgets_the_least_recently_used():
    worker = EncodeWorker(dummy(), cache_bytes=3 * 8 * 4)
    run(worker, ["a", "b", "c"])
    assert run(worker, ["a"]).stats.cached_rows == 1
    run(worker, ["d"])
    assert run(worker, ["b"]).stats.cached_rows == 0
    assert run(worker, ["a"]).stats.cached_rows == 1
    texts = [str(n) for n in range(20)]
    assert np.array_equal(run(worker, texts).matrix, plain(texts))
    assert run(worker, texts[-3:]).stats.cached_rows == 3


def test_cache_costs_less_than_10_us_a_text():
    texts = pa.array([f"some text of an ordinary length, number {n}" for n in range(20_000)])
    seconds = {}
    for size in (0, 64 << 20):
        worker = EncodeWorker(dummy(width=64), cache_bytes=size)
        best = 1e9
        for _ in range(3):
            begin = time.process_time()
            worker.encode(worker.prepare(texts))
            best = min(best, time.process_time() - begin)
        seconds[size] = best
    assert seconds[64 << 20] - seconds[0] < 10e-6 * len(texts)


def test_threads_share_a_worker():
    forget_workers()
    config = dummy(":tau=0.02")
    workers, results, inside = [], {}, []

    class Watch(DummyEncoder):
        def forward(self, tokens, rows):
            inside.append(1)
            assert len(inside) == 1
            time.sleep(0.001)
            inside.pop()
            return super().forward(tokens, rows)

    watched = EncodeWorker(Watch(config), config=config)

    def bundle(number):
        workers.append(shared_worker(config))
        texts = [f"{number} {n}" for n in range(50)]
        results[number] = np.array_equal(run(watched, texts).matrix, plain(texts))

    threads = [threading.Thread(target=bundle, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, workers))) == 1 and len(results) == 6 and all(results.values())
    assert shared_worker(config, key="other") is not workers[0]
    forget_workers()
    assert shared_worker(config) is not workers[0]


def test_simulated_costs():
    worker = EncodeWorker(dummy(":tau=0.05:c=1e-3"), cache_bytes=0)
    assert run(worker, [str(n) for n in range(50)]).stats.seconds >= 0.1


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"require_accelerator": True}])
def test_no_silent_cpu(settings):
    with pytest.raises(SurgeError, match="CUDA"):
        EncodeWorker(dummy(**settings))
    with pytest.raises(SurgeError, match="CUDA"):
        EncodeWorker(DummyEncoder(dummy()), config=EncoderConfig(require_accelerator=True))


def test_importing_and_the_dummy_load_no_torch():
    code = """
import sys
import surge_beam.gpu.worker, surge_beam.gpu.encoder, surge_beam.gpu.dummy, surge_beam.gpu.handler
import pyarrow as pa
from surge_beam.records import EncoderConfig
worker = surge_beam.gpu.worker.shared_worker(EncoderConfig(model="dummy:4:oom=1"))
assert worker.encode(worker.prepare(pa.array(["a", "b", "a"]))).matrix.shape == (3, 4)
bad = {"torch", "transformers", "sentence_transformers"} & set(sys.modules)
assert not bad, bad
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def _raise(error):
    raise error
