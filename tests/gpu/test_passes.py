"""Forward passes side by side, each on a core of its own: the results, and what fails."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.gpu.device import one_core_each
from surge_beam.gpu.dummy import DummyEncoder, DummyTokens
from surge_beam.gpu.worker import EncodeWorker
from surge_beam.records import EncoderConfig, SurgeError

CONFIG = EncoderConfig(model="dummy:8", device="cpu")


class Cores(DummyEncoder):
    """A dummy on three cores that notes its passes: threads, and rows of each."""

    cores = 3

    def __init__(self, model: str = CONFIG.model) -> None:
        super().__init__(EncoderConfig(model=model, device="cpu"))
        self.passes: list[tuple[str, list[int]]] = []

    def forward(self, tokens: DummyTokens, rows: np.ndarray) -> np.ndarray:
        self.passes.append((threading.current_thread().name, tokens.lengths[rows].tolist()))
        return super().forward(tokens, rows)

    @property
    def aside(self) -> list[list[int]]:
        """The lengths of each pass that ran on a core of its own."""
        return [lengths for name, lengths in self.passes if name.startswith("surge-core")]

    @property
    def alone(self) -> list[list[int]]:
        """The lengths of each pass that all cores ran."""
        return [lengths for name, lengths in self.passes if not name.startswith("surge-core")]


def encode(encoder: Cores, texts: list[str], **limits: int):  # type: ignore[no-untyped-def]
    config = EncoderConfig(**limits)  # type: ignore[arg-type]
    worker = EncodeWorker(encoder, cache_bytes=0, config=config)
    return worker.encode(worker.prepare(pa.array(texts, pa.string())))


def plain(texts: list[str]) -> np.ndarray:
    encoder = DummyEncoder(CONFIG)
    return encoder.forward(encoder.tokenize(texts), np.arange(len(texts)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 900), max_size=80), st.integers(1, 3000))
def test_every_row_has_its_texts_vector(sizes: list[int], limit: int) -> None:
    texts = [f"{n:04d}" + "x" * size for n, size in enumerate(sizes)]
    encoder = Cores()
    encoded = encode(encoder, texts, max_padded_tokens=limit)
    assert np.array_equal(encoded.matrix, plain(texts)) and not encoded.failures
    share = max(limit // 3, min(512, limit))
    assert all(max(lengths) * len(lengths) <= share for lengths in encoder.aside)
    assert all(
        len(lengths) == 1 or max(lengths) * len(lengths) <= limit for lengths in encoder.alone
    )
    assert sum(len(lengths) for _, lengths in encoder.passes) == len(texts)
    assert encoded.stats.micro_batches == len(encoder.passes)


def test_a_long_text_has_all_cores_and_few_passes_have_them_too() -> None:
    encoder = Cores()
    encode(encoder, ["y" * 8000, *(f"{n:04d}" + "x" * 400 for n in range(40))])
    assert [lengths[0] for lengths in encoder.alone] == [2002] and len(encoder.aside) > 6
    encoder.passes.clear()
    encode(encoder, [f"{n:04d}" + "x" * 400 for n in range(20)])
    assert not encoder.aside and len(encoder.alone) == 2


def test_what_fails_beside_others_is_found_alone() -> None:
    texts = [f"{n:04d}" + "x" * 300 for n in range(100)]
    for at in (5, 50, 99):
        texts[at] = f"{at:04d} BAD " + "x" * 295
    encoder = Cores("dummy:8:poison=BAD")
    encoded = encode(encoder, texts)
    assert sorted(encoded.failures) == [5, 50, 99]
    assert all(attempts > 2 for _, _, attempts in encoded.failures.values())
    good = [n for n in range(100) if n not in encoded.failures]
    assert np.array_equal(encoded.matrix[good], plain(texts)[good])
    assert len(encoder.aside) > 6 and encoder.alone


def test_too_little_memory_beside_others_is_remembered() -> None:
    texts = [f"{n:04d}" + "x" * 300 for n in range(200)]
    encoder = Cores("dummy:8:oom=4")
    worker = EncodeWorker(encoder, cache_bytes=0)
    prepared = worker.prepare(pa.array(texts))
    encoded = worker.encode(prepared)
    assert np.array_equal(encoded.matrix, plain(texts)) and encoded.stats.oom_ceiling
    encoder.passes.clear()
    assert np.array_equal(worker.encode(prepared).matrix, plain(texts))
    assert max(len(lengths) for _, lengths in encoder.passes) <= 4


@pytest.mark.parametrize(
    "error", [SurgeError("too few results"), RuntimeError("CUDA error: device-side assert")]
)
def test_what_is_no_rows_fault_ends_the_superbatch(error: Exception) -> None:
    class Broken(Cores):
        def forward(self, tokens: DummyTokens, rows: np.ndarray) -> np.ndarray:
            raise error

    with pytest.raises(type(error), match=str(error)):
        encode(Broken(), [f"{n:04d}" + "x" * 300 for n in range(100)])


def test_threads_of_one_core_leave_the_others_as_they_are() -> None:
    found: list[int] = []

    def ask() -> None:
        found.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_core_each(2) as pool:
            for _ in range(8):
                pool.submit(ask).result()
            assert found == [1] * 8
            later = threading.Thread(target=ask)
            later.start()
            later.join()
            ask()
        assert found[8:] == [3, 3]
    finally:
        torch.set_num_threads(before)
