"""Beam ModelHandlers as encoders."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from apache_beam.ml.inference.base import ModelHandler, PredictionResult

from surge_beam.gpu.handler import ModelHandlerEncoder
from surge_beam.gpu.worker import EncodeWorker
from surge_beam.records import EncoderConfig, SurgeError


class Letters(ModelHandler):
    """Vectors of (length, count of a); ``wrap`` shapes the results."""

    def __init__(self, wrap=None, extra=0):
        self.wrap, self.extra = wrap or (lambda text, vector: vector), extra

    def load_model(self):
        return "model"

    def run_inference(self, batch, model, inference_args=None):
        assert model == "model"
        for text in list(batch)[: len(batch) + min(self.extra, 0)]:
            if text == "poison":
                raise ValueError("cannot read this")
            yield self.wrap(text, [float(len(text)), float(text.count("a"))])
        for _ in range(self.extra):
            yield [0.0, 0.0]


def _tensor(text, vector):
    torch = pytest.importorskip("torch")
    return PredictionResult(text, torch.tensor(vector, dtype=torch.bfloat16))


WRAPS = {
    "list": lambda text, vector: vector,
    "array": lambda text, vector: np.array(vector),
    "result": lambda text, vector: PredictionResult(text, np.array(vector, np.float32)),
    "tensor": _tensor,
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_results_of_every_kind(wrap):
    worker = EncodeWorker(ModelHandlerEncoder(Letters(WRAPS[wrap])))
    assert worker.dimension == 2
    encoded = worker.encode(worker.prepare(pa.array(["banana", "", "banana", "kiwi"])))
    assert encoded.matrix.tolist() == [[6, 3], [0, 0], [6, 3], [4, 0]]


@pytest.mark.parametrize("extra", [-1, 1, 5])
def test_a_wrong_number_of_results_is_an_error(extra):
    worker = EncodeWorker(ModelHandlerEncoder(Letters(extra=extra), dimension=2))
    with pytest.raises(SurgeError, match=r"returned \d .*for 3 texts"):
        worker.encode(worker.prepare(pa.array(["a", "b", "c"])))


def test_a_poison_row_stands_alone():
    worker = EncodeWorker(ModelHandlerEncoder(Letters()))
    encoded = worker.encode(worker.prepare(pa.array(["a", "poison", "b"])))
    assert list(encoded.failures) == [1]
    assert encoded.failures[1][:2] == ("ValueError", "cannot read this")


def test_lengths_wrong_dimension_and_accelerator():
    encoder = ModelHandlerEncoder(Letters(), dimension=3)
    assert encoder.tokenize(["", "x" * 40]).lengths.tolist() == [1, 10]
    with pytest.raises(SurgeError, match="shape"):
        encoder.forward(encoder.tokenize(["a"]), np.array([0]))
    with pytest.raises(SurgeError, match="CUDA"):
        EncodeWorker(encoder, config=EncoderConfig(require_accelerator=True))
