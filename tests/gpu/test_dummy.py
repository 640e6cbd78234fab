"""The stand-in encoder."""

from __future__ import annotations

import numpy as np
import pytest

from surge_beam.gpu.dummy import DummyEncoder
from surge_beam.gpu.encoder import Encoder, load_encoder, model_identity
from surge_beam.records import EncoderConfig, SurgeError


def vectors(model, texts, **settings):
    encoder = load_encoder(EncoderConfig(model=model, **settings))
    return encoder.forward(encoder.tokenize(texts), np.arange(len(texts)))


@pytest.mark.parametrize("width", [1, 2, 3, 8, 384])
def test_unit_norm_and_one_vector_a_text(width):
    texts = ["", " ", "é", "\x00", *(f"text {n}" for n in range(5000))]
    found = vectors(f"dummy:{width}", texts)
    assert found.shape == (len(texts), width) and found.dtype == np.float32
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-5
    if width >= 8:
        assert len({row.tobytes() for row in found}) == len(texts)
    assert np.array_equal(found, vectors(f"dummy:{width}", texts))


def test_a_vector_does_not_depend_on_its_batch():
    encoder = load_encoder(EncoderConfig(model="dummy:384"))
    tokens = encoder.tokenize([f"text {n}" for n in range(1000)])
    every = encoder.forward(tokens, np.arange(1000))
    rows = np.array([999, 3, 500])
    assert np.array_equal(encoder.forward(tokens, rows), every[rows])


def test_prompt_and_truncation():
    plain, prompted = vectors("dummy:8", ["a"]), vectors("dummy:8", ["a"], prompt="p: ")
    assert not np.array_equal(plain, prompted)
    short = vectors("dummy:8", ["a"], truncate_dim=3)
    assert short.shape == (1, 3) and abs(np.linalg.norm(short) - 1) < 1e-6


def test_options():
    assert isinstance(load_encoder(EncoderConfig(model="dummy:4")), Encoder)
    with pytest.raises(ValueError, match="poisoned"):
        vectors("dummy:4:poison=x y", ["fine", "not x y fine"])
    with pytest.raises(MemoryError):
        vectors("dummy:4:oom=2", ["a", "b", "c"])
    assert np.isnan(vectors("dummy:4:nan=q", ["a", "q"])).any(axis=1).tolist() == [False, True]


@pytest.mark.parametrize("model", ["dummy", "dummy:", "dummy:x", "dummy:0", "dummy:4:speed=2"])
def test_malformed_names(model):
    with pytest.raises(SurgeError, match="dummy"):
        DummyEncoder(EncoderConfig(model=model))


def test_identity():
    of = [
        EncoderConfig(model="dummy:8"),
        EncoderConfig(model="dummy:9"),
        EncoderConfig(model="dummy:8", prompt="p"),
        EncoderConfig(model="dummy:8", truncate_dim=2),
    ]
    assert len({model_identity(config) for config in of}) == len(of)
    assert model_identity(of[0]) == DummyEncoder(of[0]).identity
