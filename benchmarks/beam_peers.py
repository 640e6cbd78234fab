"""Beam's own ways to embed: RunInference around sentence-transformers, and MLTransform."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.ml.inference.base import KeyedModelHandler, ModelHandler, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

from benchmarks.peers import (
    Clock,
    Corpus,
    load_sentence_transformer,
    loaded_model,
    model_path,
)

_batches: list[int] = []
_clock: list[Clock] = []
_partitions: list[tuple[Any, list[int], np.ndarray]] = []


class SentenceTransformerHandler(ModelHandler[str, np.ndarray, Any]):
    """What a user writes to run sentence-transformers under RunInference."""

    def load_model(self) -> Any:
        return loaded_model()

    def run_inference(
        self, batch: Any, model: Any, inference_args: dict[str, Any] | None = None
    ) -> Any:
        _batches.append(len(batch))
        return model.encode(list(batch))


class _Collect(beam.DoFn):
    """The user's sink: a partition's rows in order, and their vectors."""

    def process(self, element: tuple[Any, Any]) -> None:
        key, rows = element
        rows = sorted(rows, key=lambda pair: pair[0])
        _partitions.append((key, [row for row, _ in rows], np.array([v for _, v in rows])))
        _clock[0].output()


def _run(
    path: str,
    vectors: str,
    sample: list[int],
    elements: Callable[[Corpus], list[Any]],
    embed: Callable[[beam.PCollection], beam.PCollection],
    reshuffle: bool = True,
) -> dict[str, Any]:
    """A pipeline whose ``embed`` yields ((service, owner), (row, vector))."""
    _partitions.clear()
    _batches.clear()
    _clock[:] = [Clock()]
    corpus = Corpus(path)
    pipeline = beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner"]))
    rows = pipeline | "Rows" >> beam.Create(elements(corpus), reshuffle=reshuffle)
    _ = embed(rows) | "ByPartition" >> beam.GroupByKey() | "Collect" >> beam.ParDo(_Collect())
    pipeline.run().wait_until_finish()
    result = _clock[0].result(
        sum(len(rows) for _, rows, _ in _partitions),
        batches=len(_batches),
        batch_mean=float(np.mean(_batches)) if _batches else None,
    )
    found = {row: v for _, rows, m in _partitions for row, v in zip(rows, m, strict=True)}
    np.save(vectors, np.array([found[row] for row in sample], np.float32))
    return result


def run_inference(
    path: str, model: str, vectors: str, sample: list[int], tuned: bool = False
) -> dict[str, Any]:
    """RunInference over keyed rows; tuned: batches of 512, input sorted by length."""
    load_sentence_transformer(model)
    sizes = {"min_batch_size": 512, "max_batch_size": 512} if tuned else {}
    handler = KeyedModelHandler(SentenceTransformerHandler(**sizes))

    def elements(corpus: Corpus) -> list[Any]:
        rows = [((*d["key"], d["row"]), d["text"]) for d in corpus.dicts()]
        return sorted(rows, key=lambda pair: -len(pair[1])) if tuned else rows

    return _run(
        path,
        vectors,
        sample,
        elements,
        lambda rows: (
            rows
            | "Embed" >> RunInference(handler)
            | "Keys" >> beam.Map(lambda kv: (kv[0][:2], (kv[0][2], kv[1])))
        ),
        reshuffle=not tuned,
    )


def ml_transform(path: str, model: str, vectors: str, sample: list[int]) -> dict[str, Any]:
    from apache_beam.ml.transforms.base import MLTransform
    from apache_beam.ml.transforms.embeddings import huggingface

    load_sentence_transformer(model)
    # it looks the class up when the step is built; the model here is loaded already
    huggingface.SentenceTransformer = loaded_model
    with tempfile.TemporaryDirectory() as artifacts:
        return _run(
            path,
            vectors,
            sample,
            Corpus.dicts,
            lambda rows: (
                rows
                | "Embed"
                >> MLTransform(write_artifact_location=artifacts).with_transform(
                    huggingface.SentenceTransformerEmbeddings(model_path(model), columns=["text"])
                )
                | "Keys" >> beam.Map(lambda d: (tuple(d["key"]), (d["row"], d["text"])))
            ),
        )
