"""The embedding worker: SuperBatch in, matrix out, whatever single rows or memory do."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from apache_beam.internal import pickler

from surge_beam.gpu.device_errors import free_device_memory, is_fatal, is_out_of_memory
from surge_beam.gpu.encoder import Encoder, load_encoder
from surge_beam.gpu.handler import ModelHandlerEncoder
from surge_beam.gpu.vector_cache import VectorCache, text_keys
from surge_beam.policy.microbatch import micro_batches
from surge_beam.records import EncoderConfig, SurgeError

DEFAULT_CACHE_BYTES = 64 << 20
_PADDED_TOKENS = {"cpu": 2048, "cuda": 16384}
_BLOCK = 4096


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A SuperBatch's texts, ready for the device.

    Attributes:
      tokens: the encoder's tokens of the distinct texts.
      keys: digests of the distinct texts; None if nothing is cached.
      inverse: the distinct text of every row, int64 [rows]; None if each row is its own.
      rows: rows of the SuperBatch.
    """

    tokens: Any
    keys: list[bytes] | None
    inverse: np.ndarray | None
    rows: int


@dataclasses.dataclass(frozen=True)
class EncodeStats:
    """What one ``encode`` did.

    Attributes:
      rows: rows of the SuperBatch.
      unique_rows: distinct texts among them (all rows where nothing is deduplicated).
      cached_rows: distinct texts whose vector was known from an earlier SuperBatch.
      tokens: tokens that went through the model.
      padded_tokens: tokens the same micro-batches would have had with padding.
      micro_batches: forward passes that succeeded.
      seconds: wall time on the device, without waiting for it.
      oom_ceiling: padded tokens at most, by power-of-two bucket of the longest length; empty
        as long as memory sufficed.
    """

    rows: int
    unique_rows: int
    cached_rows: int
    tokens: int
    padded_tokens: int
    micro_batches: int
    seconds: float
    oom_ceiling: dict[int, int]


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Attributes:
    matrix: vectors of all rows, float32 [rows, dimension], C-contiguous; failed rows are zero.
    failures: for each failed row the error's class name, its message and how often it was tried.
    stats: what it took.
    """

    matrix: np.ndarray
    failures: dict[int, tuple[str, str, int]]
    stats: EncodeStats


class EncodeWorker:
    """Runs one encoder; several threads may use it, the device serves one ``encode`` at a time.

    Args:
      config_or_encoder: a recipe, or an encoder that is loaded already.
      cache_bytes: room for vectors kept across SuperBatches; 0 keeps none, as does
        ``dedupe=False``.
      config: limits to go with a loaded encoder.

    Raises:
      SurgeError: if the model cannot be loaded or the device that was asked for is missing.
    """

    def __init__(
        self,
        config_or_encoder: EncoderConfig | Encoder,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        config: EncoderConfig | None = None,
    ) -> None:
        if isinstance(config_or_encoder, EncoderConfig):
            self.config = config_or_encoder
            self.encoder = load_encoder(config_or_encoder)
        else:
            self.config = config or EncoderConfig()
            self.encoder = config_or_encoder
            if self.config.require_accelerator and self.encoder.device != "cuda":
                raise SurgeError(
                    f"this step asks for CUDA; its encoder is on {self.encoder.device}"
                )
        self.dimension = self.encoder.dimension
        self.max_padded_tokens = self.config.max_padded_tokens or _PADDED_TOKENS.get(
            self.encoder.device, _PADDED_TOKENS["cuda"]
        )
        if self.encoder.device == "cpu":
            # The model has the cores; the tokenizer's own threads would only fight it for them.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.device, self.dtype = self.encoder.device, self.encoder.dtype
        self.cache_bytes = keep = cache_bytes if self.config.dedupe else 0
        self._cache = VectorCache(keep, self.dimension) if keep >= 4 * self.dimension else None
        self._ceiling: dict[int, int] = {}
        self._device_lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()

    def prepare(self, texts: pa.Array | pa.ChunkedArray) -> Prepared:
        """Deduplicates and tokenizes; needs no device, so a reader thread may run it.

        Args:
          texts: string or large_string without nulls.

        Raises:
          ValueError: if there are nulls or the type is no string.
        """
        if texts.null_count:
            raise ValueError(f"{texts.null_count} texts are null; take them out first")
        if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
            raise ValueError(f"texts must be string or large_string, not {texts.type}")
        inverse = None
        distinct: list[str]
        if self.config.dedupe:
            distinct, inverse = _distinct(texts)
        else:
            distinct = texts.to_pylist()
        keys = text_keys(distinct) if self._cache is not None else None
        with self._tokenizer_lock:
            tokens = self.encoder.tokenize(distinct)
        return Prepared(tokens, keys, inverse, len(texts))

    def encode(self, prepared: Prepared) -> Encoded:
        """Vectors of a prepared SuperBatch.

        Raises:
          SurgeError: if the encoder broke its contract.
          RuntimeError: if the device itself has failed; the process must then be replaced.
        """
        with self._device_lock:
            begin = time.perf_counter()
            matrix = np.zeros((prepared.rows, self.dimension), np.float32)
            distinct = len(prepared.tokens)
            first = _first_rows(prepared.inverse, distinct)
            todo = np.arange(distinct)
            if self._cache is not None and prepared.keys is not None:
                known, vectors = self._cache.lookup(prepared.keys)
                matrix[first[known]] = vectors
                todo = np.delete(todo, known)
            run = _Run(self, prepared.tokens, matrix, first)
            simulate = getattr(self.encoder, "simulate_call", None)
            if simulate is not None:
                simulate(len(todo))
            run.encode(todo)
            if self._cache is not None and prepared.keys is not None:
                fresh = [row for row in todo.tolist() if row not in run.failures]
                for at in range(0, len(fresh), _BLOCK):  # what is inserted is copied
                    rows = fresh[at : at + _BLOCK]
                    self._cache.insert([prepared.keys[row] for row in rows], matrix[first[rows]])
            failures = self._copy_duplicates(prepared, matrix, first, run.failures)
            stats = EncodeStats(
                rows=prepared.rows,
                unique_rows=distinct,
                cached_rows=distinct - len(todo),
                tokens=run.tokens,
                padded_tokens=run.padded_tokens,
                micro_batches=run.passes,
                seconds=time.perf_counter() - begin,
                oom_ceiling=dict(self._ceiling),
            )
        return Encoded(matrix, failures, stats)

    def remember(self, texts: Sequence[str], encoded: Encoded) -> None:
        """Keeps vectors that another worker of the same encoder made, a row a text."""
        if self._cache is None:
            return
        rows = {text: row for row, text in enumerate(texts) if row not in encoded.failures}
        with self._device_lock:
            self._cache.insert(text_keys(list(rows)), encoded.matrix[list(rows.values())])

    @staticmethod
    def _copy_duplicates(
        prepared: Prepared,
        matrix: np.ndarray,
        first: np.ndarray,
        failed: dict[int, tuple[str, str, int]],
    ) -> dict[int, tuple[str, str, int]]:
        """Gives every row its text's vector, and the failures by row."""
        if prepared.inverse is None or len(first) == prepared.rows:
            return {int(first[text]): failure for text, failure in sorted(failed.items())}
        source = first[prepared.inverse]
        copies = np.flatnonzero(source != np.arange(prepared.rows))
        matrix[copies] = matrix[source[copies]]
        if not failed:
            return {}
        bad = np.flatnonzero(np.isin(prepared.inverse, list(failed)))
        return {int(row): failed[int(prepared.inverse[row])] for row in bad}


class _Run:
    """One ``encode``: forward passes with bisection and back-off."""

    def __init__(
        self, worker: EncodeWorker, tokens: Any, matrix: np.ndarray, first: np.ndarray
    ) -> None:
        self.worker, self.all_tokens, self.matrix, self.first = worker, tokens, matrix, first
        self.lengths = np.asarray(tokens.lengths)
        self.failures: dict[int, tuple[str, str, int]] = {}
        self.tokens = self.padded_tokens = self.passes = 0

    def encode(self, todo: np.ndarray) -> None:
        """Fills the matrix for distinct texts ``todo``; what fails is listed in ``failures``."""
        batches = micro_batches(self.lengths[todo], self.worker.max_padded_tokens)
        waiting = [(todo[batch], 1) for batch in reversed(batches)]
        while waiting:
            rows, attempt = waiting.pop()
            longest = max(int(self.lengths[rows].max()), 1)
            fit = self._rows_that_fit(longest)
            if len(rows) > fit:
                parts = [rows[at : at + fit] for at in range(0, len(rows), fit)]
                waiting += [(part, attempt) for part in reversed(parts)]
                continue
            try:
                vectors = self.worker.encoder.forward(self.all_tokens, rows)
            except SurgeError:
                raise
            except Exception as error:
                halves = self._after_failure(error, rows, longest, attempt)
                waiting += [(half, attempt + 1) for half in reversed(halves)]
                continue
            self._accept(rows, vectors, longest, attempt)

    def _accept(self, rows: np.ndarray, vectors: np.ndarray, longest: int, attempt: int) -> None:
        finite = np.isfinite(vectors).all(axis=1)
        if not finite.all():
            for row in rows[~finite].tolist():
                message = "the model returned NaN or an infinity"
                self.failures[row] = ("NonFiniteEmbedding", message, attempt)
            rows, vectors = rows[finite], vectors[finite]
        self.matrix[self.first[rows]] = vectors
        self.passes += 1
        self.tokens += int(self.lengths[rows].sum())
        self.padded_tokens += longest * len(rows)

    def _after_failure(
        self, error: Exception, rows: np.ndarray, longest: int, attempt: int
    ) -> list[np.ndarray]:
        """Halves of a failed micro-batch; none if the row stands alone."""
        memory = is_out_of_memory(error)
        if not memory and is_fatal(error):
            raise error
        if memory:
            free_device_memory()
        if len(rows) == 1:
            kind = "OutOfMemory" if memory else type(error).__name__
            self.failures[int(rows[0])] = (kind, str(error) or kind, attempt)
            return []
        middle = len(rows) // 2
        if memory:
            bucket = _bucket(longest)
            ceiling = self.worker._ceiling
            ceiling[bucket] = min(ceiling.get(bucket, longest * middle), longest * middle)
        return [rows[:middle], rows[middle:]]

    def _rows_that_fit(self, longest: int) -> int:
        ceiling = self.worker._ceiling.get(_bucket(longest))
        return len(self.lengths) if ceiling is None else max(ceiling // longest, 1)


def shared_worker(
    config: EncoderConfig,
    model_handler: Any = None,
    *,
    key: str = "",
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> EncodeWorker:
    """The process's one worker of a recipe, made when it is first asked for.

    Args:
      config: the recipe.
      model_handler: a Beam ModelHandler that takes the place of the recipe's model.
      key: tells workers of the same recipe apart, where there must be several.
      cache_bytes: as of ``EncodeWorker``.

    Raises:
      SurgeError: as ``EncodeWorker``; the next call tries again.
    """
    known = (config, key, None if model_handler is None else pickler.dumps(model_handler))
    with _workers_lock:
        worker = _workers.get(known)
        if worker is None:
            what = config if model_handler is None else ModelHandlerEncoder(model_handler)
            worker = EncodeWorker(what, cache_bytes=cache_bytes, config=config)
            _workers[known] = worker
        return worker


def forget_workers() -> None:
    """Lets go of the process's shared workers, so that their memory can be freed."""
    with _workers_lock:
        _workers.clear()


_workers: dict[tuple[EncoderConfig, str, bytes | None], EncodeWorker] = {}
_workers_lock = threading.Lock()


def _distinct(texts: pa.Array | pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    """Distinct texts in the order of their first row, and each row's place among them."""
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.cast(pa.large_string()).combine_chunks()
        if isinstance(texts, pa.ChunkedArray):
            texts = pa.concat_arrays(texts.chunks) if texts.num_chunks else pa.array([], texts.type)
    encoded = texts.dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)


def _first_rows(inverse: np.ndarray | None, distinct: int) -> np.ndarray:
    """The first row of every distinct text, int64 [distinct]."""
    if inverse is None:
        return np.arange(distinct)
    first = np.empty(distinct, np.int64)
    first[inverse[::-1]] = np.arange(len(inverse) - 1, -1, -1)
    return first


def _bucket(length: int) -> int:
    """The power of two at or above a length."""
    return 1 << (length - 1).bit_length()
