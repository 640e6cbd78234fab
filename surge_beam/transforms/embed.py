"""Embedding within a pipeline: rows or Arrow batches in, the same with a vector column out."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.window import BoundedWindow
from apache_beam.utils.shared import Shared
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from surge_beam.records import DeadLetter, EncoderConfig, SurgeError
from surge_beam.transforms.columns import is_text
from surge_beam.transforms.files import absolute_model
from surge_beam.transforms.metric_ids import keep_metric_ids_apart
from surge_beam.transforms.overlap import Overlap
from surge_beam.transforms.superbatch import (
    MAX_BYTES,
    MAX_ROWS,
    MIN_ROWS,
    PACKED,
    FormSuperBatches,
    Row,
    as_dict,
    refuse_dask,
    split,
)
from surge_beam.transforms.write import vectors_to_arrow

NAMESPACE = "surge_beam"
ACCELERATOR = "type:nvidia-l4;count:1;install-nvidia-driver"
LETTERS = "dead_letters"


class EmbedResult(NamedTuple):
    """What ``Embed`` gives.

    Attributes:
      rows: what came in, with the vector.
      dead_letters: PCollection[DeadLetter], the rows that could not be embedded.
    """

    rows: beam.PCollection
    dead_letters: beam.PCollection[DeadLetter]


class Embed(beam.PTransform):
    """Embeds the text of rows or of Arrow batches.

    Rows (dicts, ``beam.Row``, named tuples) come out as dicts with all they held, whatever its
    type, and their vector as a float32 array [d]. Batches (``pa.RecordBatch``, ``pa.Table``) come
    out as ``pa.RecordBatch``, cut anew, with a last column ``fixed_size_list<float>[d]`` that
    shares the encoder's memory. A column of the vector's name is replaced. Rows keep their order
    within a bundle and their window; their timestamp is that of their batch's first row.

    A text that is null, missing or no text, and a row on which the encoder fails, is a dead
    letter. Per batch, rows in = rows out + dead letters.

    Args:
      model: a sentence-transformers folder, a Hugging Face name, or ``dummy:D``.
      text_column, vector_column: what is embedded, and what is added.
      prompt: text put before every row; None takes the model's own default prompt.
      dtype: ``auto`` (float32 on CPU, bfloat16 on CUDA), ``float32``, ``bfloat16``, ``float16``.
      device: ``auto`` (CUDA where there is one), ``cpu``, or ``cuda``, which fails without one.
      truncate_dim: keep the first N dimensions.
      dedupe: encode identical texts of a batch once.
      max_padded_tokens: tokens in one forward pass; None chooses by device.
      model_handler: a Beam ModelHandler of texts that takes the place of the model; ``model``,
        ``prompt``, ``dtype``, ``device`` and ``truncate_dim`` are then its own business.
      accelerator: Beam's resource hint for the encode step; unused with ``device="cpu"`` and
        where the handler has hints of its own. None gives no hint.
      min_rows, max_rows, max_bytes, max_delay_secs: see ``FormSuperBatches``. Batches that come
        out keep to ``max_bytes`` too.
      as_rows: True gives dicts and False gives batches, whatever came in; None gives what came.

    Raises:
      ValueError: settings that contradict each other.
      SurgeError: on DaskRunner; while running, a model that cannot be loaded, a device that is
        missing, or an encoder that does not give a vector for every text.
    """

    def __init__(
        self,
        *,
        model: str = EncoderConfig.model,
        text_column: str = "text",
        vector_column: str = "embedding",
        prompt: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        truncate_dim: int | None = None,
        dedupe: bool = True,
        max_padded_tokens: int | None = None,
        model_handler: Any = None,
        accelerator: str | None = ACCELERATOR,
        min_rows: int = MIN_ROWS,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_BYTES,
        max_delay_secs: float = 10.0,
        as_rows: bool | None = None,
    ) -> None:
        super().__init__()
        if model_handler is not None and (prompt is not None or truncate_dim is not None):
            raise ValueError("a model_handler takes no prompt and no truncate_dim")
        if text_column == vector_column:
            raise ValueError(f"text_column and vector_column are both {text_column!r}")
        self._form = FormSuperBatches(
            min_rows=min_rows,
            max_rows=max_rows,
            max_bytes=max_bytes,
            max_delay_secs=max_delay_secs,
        )
        self._config = _Config(
            encoder=EncoderConfig(
                model=absolute_model(model),
                dtype=dtype,
                device=device,
                prompt=prompt,
                truncate_dim=truncate_dim,
                max_padded_tokens=max_padded_tokens,
                dedupe=dedupe,
                require_accelerator=device == "cuda" and model_handler is None,
            ),
            handler=model_handler,
            text_column=text_column,
            vector_column=vector_column,
            max_bytes=max_bytes,
            as_rows=as_rows,
        )
        self._hints = _resource_hints(device, accelerator, model_handler)

    def expand(self, pcoll: beam.PCollection) -> EmbedResult:
        refuse_dask(pcoll.pipeline)
        packed = pcoll | "Pack" >> beam.ParDo(_Pack(self._config)).with_outputs(
            LETTERS, main="elements"
        )
        encode = beam.ParDo(_Encode(self._config)).with_output_types(self._row_type(pcoll))
        if self._hints:
            encode = encode.with_resource_hints(**self._hints)
        encoded = (
            packed.elements
            | "FormSuperBatches" >> self._form
            | "Encode" >> encode.with_outputs(LETTERS, main="rows")
        )
        letters = (packed[LETTERS], encoded[LETTERS]) | "DeadLetters" >> (
            beam.Flatten().with_output_types(DeadLetter)
        )
        return EmbedResult(encoded.rows, letters)

    def _row_type(self, pcoll: beam.PCollection) -> Any:
        if self._config.as_rows is not None:
            return dict if self._config.as_rows else pa.RecordBatch
        given = pcoll.element_type
        return pa.RecordBatch if given in (pa.RecordBatch, pa.Table) else Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    encoder: EncoderConfig
    handler: Any
    text_column: str
    vector_column: str
    max_bytes: int
    as_rows: bool | None


def _resource_hints(device: str, accelerator: str | None, handler: Any) -> dict[str, Any]:
    hints = dict(handler.get_resource_hints()) if handler is not None else {}
    if hints:
        return hints
    if device == "cpu":
        # a hint of its own keeps the step in an environment, and a process, of its own
        return {"min_ram": "2GiB"}
    return {"accelerator": accelerator} if accelerator else {}


class _Pack(beam.DoFn):
    """Puts rows that come out as rows, pickled, beside their text: Arrow changes nothing then."""

    def __init__(self, config: _Config) -> None:
        self._config = config
        self._letters = Metrics.counter(NAMESPACE, "dead_letters")

    def process(self, element: Any) -> Iterator[Any]:
        if isinstance(element, (pa.RecordBatch, pa.Table)):
            yield element
            return
        row = as_dict(element)
        if self._config.as_rows is False:
            yield row
            return
        problem = _problem(row, self._config.text_column)
        if problem is None:
            text = str(row[self._config.text_column])
            yield {self._config.text_column: text, PACKED: pickle.dumps(row, protocol=5)}
        else:
            self._letters.inc()
            yield TaggedOutput(LETTERS, _letter(*problem, row))


def _problem(row: Row, column: str) -> tuple[str, str] | None:
    """Kind and message of what keeps a row from being embedded."""
    text = row.get(column)
    if text is None:
        if column in row:
            return "NullText", "the text is null"
        return "MissingText", f"the row has no column {column!r}"
    if not isinstance(text, str):
        return "NotText", f"column {column!r} holds a {type(text).__name__}, not text"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return "NotText", f"column {column!r} is not valid Unicode: {error.reason}"
    return None


def _letter(error: str, message: str, row: Row, attempts: int = 1) -> DeadLetter:
    stage = "read" if error in ("NullText", "MissingText", "NotText") else "encode"
    try:
        record = json.dumps(row, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        record = str(row)
    # what UTF-8 lacks could not be written later
    record = record.encode("utf-8", "replace").decode()
    return DeadLetter(stage=stage, error=error, message=message, record=record, attempts=attempts)


@dataclasses.dataclass
class _Work:
    """A batch on its way.

    Attributes:
      keep: int64 [n], the rows that have a text.
      problems: kind, message and attempts, by row, of those that have none or failed.
      prepared: what the worker made of the texts.
      matrix: float32 [n, d], the vectors of ``keep``.
    """

    batch: pa.RecordBatch
    window: BoundedWindow
    timestamp: Timestamp
    keep: np.ndarray
    problems: dict[int, tuple[str, str, int]]
    prepared: Any = None
    matrix: Any = None
    stats: Any = None


class _Encode(beam.DoFn):
    """While one batch is on the device, the next is tokenized and the one before is made rows."""

    def __init__(self, config: _Config) -> None:
        self._config = config
        self._shared = Shared()
        self._rows = Metrics.counter(NAMESPACE, "rows")
        self._letters = Metrics.counter(NAMESPACE, "dead_letters")
        self._tokens = Metrics.counter(NAMESPACE, "tokens")
        self._padding = Metrics.counter(NAMESPACE, "padding_tokens")
        self._duplicates = Metrics.counter(NAMESPACE, "duplicate_rows")
        self._batch_rows = Metrics.distribution(NAMESPACE, "superbatch_rows")
        self._encode_ms = Metrics.distribution(NAMESPACE, "superbatch_encode_msec")

    def setup(self) -> None:
        keep_metric_ids_apart()
        self._worker = self._load()
        self._overlap = Overlap(self._prepare, self._encode, self._outputs)

    def _load(self) -> Any:
        from surge_beam.gpu.handler import ModelHandlerEncoder
        from surge_beam.gpu.worker import EncodeWorker, shared_worker

        config = self._config
        if config.handler is None:
            return shared_worker(config.encoder)
        return self._shared.acquire(
            lambda: EncodeWorker(ModelHandlerEncoder(config.handler), config=config.encoder)
        )

    def start_bundle(self) -> None:
        self._overlap.reset()

    def process(
        self,
        batch: pa.RecordBatch,
        window: Any = beam.DoFn.WindowParam,
        timestamp: Any = beam.DoFn.TimestampParam,
    ) -> Iterator[Any]:
        for done in self._overlap.push((batch, window, timestamp)):
            yield from self._count(*done)

    def finish_bundle(self) -> Iterator[Any]:
        for done in self._overlap.drain():
            yield from self._count(*done)

    def teardown(self) -> None:
        self._overlap.close()

    def _count(self, work: _Work, outputs: list[Any]) -> list[Any]:
        self._rows.inc(work.batch.num_rows - len(work.problems))
        self._letters.inc(len(work.problems))
        self._tokens.inc(work.stats.tokens)
        self._padding.inc(work.stats.padded_tokens - work.stats.tokens)
        self._duplicates.inc(work.stats.rows - work.stats.unique_rows)
        self._batch_rows.update(work.batch.num_rows)
        self._encode_ms.update(int(work.stats.seconds * 1000))
        return outputs

    def _prepare(self, element: tuple[pa.RecordBatch, BoundedWindow, Timestamp]) -> _Work:
        batch, window, timestamp = element
        texts, keep, problem = _texts(batch, self._config.text_column)
        left_out = np.setdiff1d(np.arange(batch.num_rows), keep)
        work = _Work(batch, window, timestamp, keep, dict.fromkeys(left_out.tolist(), problem))
        work.prepared = self._worker.prepare(texts)
        return work

    def _encode(self, work: _Work) -> _Work:
        encoded = self._worker.encode(work.prepared)
        if len(encoded.matrix) != len(work.keep):
            raise SurgeError(f"{len(encoded.matrix)} vectors came of {len(work.keep)} texts")
        work.prepared = None
        work.matrix, work.stats = encoded.matrix, encoded.stats
        failed = sorted(encoded.failures)
        for at in failed:
            work.problems[int(work.keep[at])] = encoded.failures[at]
        if failed:
            work.keep = np.delete(work.keep, failed)
            work.matrix = np.delete(work.matrix, failed, axis=0)
        return work

    def _outputs(self, work: _Work) -> tuple[_Work, list[Any]]:
        rows = list(self._rows_of(work))
        out = sum(x.num_rows if isinstance(x, pa.RecordBatch) else 1 for x in rows)
        if out + len(work.problems) != work.batch.num_rows:
            raise SurgeError(
                f"{work.batch.num_rows} rows came in, but {out} rows and {len(work.problems)}"
                " dead letters came out"
            )
        bad = sorted(work.problems)
        records = _as_rows(work.batch.take(pa.array(bad, pa.int64())))
        letters = [
            _letter(error, message, record, attempts)
            for record, (error, message, attempts) in zip(
                records, (work.problems[row] for row in bad), strict=True
            )
        ]

        def placed(value: Any) -> WindowedValue:
            return WindowedValue(value, work.timestamp, (work.window,))

        return work, [
            *map(placed, rows),
            *(TaggedOutput(LETTERS, placed(letter)) for letter in letters),
        ]

    def _rows_of(self, work: _Work) -> Iterator[Row | pa.RecordBatch]:
        name, batch = self._config.vector_column, work.batch
        if len(work.keep) < batch.num_rows:
            batch = batch.take(pa.array(work.keep))
        if PACKED in batch.schema.names or self._config.as_rows:
            for row, vector in zip(_as_rows(batch), work.matrix, strict=True):
                # a view would keep the whole matrix alive
                yield {**row, name: vector.copy()}
        elif len(work.keep):
            if name in batch.schema.names:
                batch = batch.drop_columns([name])
            batch = batch.append_column(name, vectors_to_arrow(work.matrix))
            yield from split(batch, batch.num_rows, self._config.max_bytes)


def _texts(batch: pa.RecordBatch, name: str) -> tuple[pa.Array, np.ndarray, tuple[str, str, int]]:
    """The texts of a batch, the rows they stand in, and what is wrong with the others."""
    nothing = pa.array([], pa.string()), np.zeros(0, np.int64)
    if batch.schema.names.count(name) != 1:
        found = batch.schema.names.count(name)
        return *nothing, ("MissingText", f"the batch has {found or 'no'} columns {name!r}", 1)
    column = batch.column(name)
    if not is_text(column.type) and not pa.types.is_null(column.type):
        return *nothing, ("NotText", f"column {name!r} holds {column.type}, not text", 1)
    if not pa.types.is_large_string(column.type):
        column = column.cast(pa.string())
    keep = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    return column.drop_null(), keep, ("NullText", "the text is null", 1)


def _as_rows(batch: pa.RecordBatch) -> list[Row]:
    """Rows as they came: packed ones are unpickled, others made of Arrow values."""
    if PACKED in batch.schema.names:
        return [pickle.loads(data.as_buffer()) for data in batch.column(PACKED)]
    rows: list[Row] = batch.to_pylist()
    return rows
