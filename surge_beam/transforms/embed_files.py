"""Embedding: the file job, from an input to committed partitions."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import random
import time
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import psutil
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.utils.windowed_value import WindowedValue

from surge_beam.policy.costs import CostModel
from surge_beam.policy.superbatch import Limits, memory_bound
from surge_beam.records import DeadLetter, EncoderConfig, SuperBatchPlan, unpack
from surge_beam.transforms.files import InputFile, Store, absolute_model, digest
from surge_beam.transforms.guard import UnreadableFileError, shared_guard
from surge_beam.transforms.memory import give_back_freed_memory
from surge_beam.transforms.metric_ids import keep_metric_ids_apart
from surge_beam.transforms.overlap import Overlap
from surge_beam.transforms.plan_files import (
    NAMESPACE,
    FileJob,
    PlanFiles,
    PublishSplits,
    in_global_window,
    on_device,
    peak_rss,
    plans_of,
)
from surge_beam.transforms.read import (
    ReadSegment,
    SuperBatchReader,
    first_contact,
    row_letter,
    write_unreadable,
)
from surge_beam.transforms.superbatch import refuse_dask
from surge_beam.transforms.write import Committer, OutputSegment, read_json, vectors_to_arrow

FLOOR_ROWS = 1024
SAMPLE_TEXTS = 256
SAMPLE_TEXTS_OF_A_FILE = 16
COSTS = "_surge/costs.json"
GIVE_BACK_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedConfig(FileJob):
    """A file job, whole: what is read, how it is encoded, and where it goes.

    Attributes:
      encoder: the encoder's recipe.
      min_rows: rows a SuperBatch reaches; None measures the device and applies the cost model.
      model_handler: a Beam ModelHandler in place of the encoder.
    """

    encoder: EncoderConfig = dataclasses.field(default_factory=EncoderConfig)
    min_rows: int | None = None
    model_handler: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        encoder = dataclasses.replace(self.encoder, model=absolute_model(self.encoder.model))
        object.__setattr__(self, "encoder", encoder)

    @property
    def text_column(self) -> str:
        """The column to embed."""
        assert self.read.text_column is not None
        return self.read.text_column

    def limits(self, model: CostModel | None) -> Limits:
        """The thresholds; with a cost model, B_min = n* / 2.5% within sensible bounds."""
        wanted = self.min_rows
        if wanted is None:
            wanted = FLOOR_ROWS if model is None else model.min_rows(floor=FLOOR_ROWS)
        return Limits(
            min_rows=min(wanted, self.max_rows),
            max_rows=self.max_rows,
            max_bytes=self.max_bytes,
            ramp=self.min_rows is None,
        )


class EmbedFiles(beam.PTransform):
    """Embeds every partition of an input and commits it below the output.

    Starts from a pipeline. Its result is a PCollection of one small dict a SuperBatch: the
    manifest entry's header.
    """

    def __init__(self, config: EmbedConfig):
        super().__init__()
        self._config = config

    def expand(self, pipeline: beam.pvalue.PBegin) -> beam.PCollection[dict]:
        refuse_dask(pipeline.pipeline)
        config = self._config
        calibrate = beam.ParDo(_Calibrate(config))
        encode = beam.ParDo(_Encode(config)).with_outputs("parts", main="headers")
        device, accelerator = config.encoder.device, config.accelerator
        if config.min_rows is None:
            calibrate = on_device(calibrate, device, accelerator)
        planned = pipeline | "PlanFiles" >> PlanFiles(config, calibrate)
        encoded = (
            planned.plans
            | "SpreadPlans" >> beam.Reshuffle()
            | "Encode" >> on_device(encode, device, accelerator)
        )
        _ = planned.splits | "PublishSplits" >> PublishSplits(config, encoded.parts)
        return encoded.headers


class _Calibrate(beam.DoFn):
    """Adds tau and c to what is known of the input, or None where min_rows is given.

    They are measured where the encoder runs, once for an output and a machine.
    """

    def __init__(self, config: EmbedConfig):
        self._config = config

    def setup(self) -> None:
        shared_guard().start()
        keep_metric_ids_apart()

    def process(self, about: tuple[int, bytes]) -> Iterator[tuple[int, CostModel | None]]:
        passed_over, sample = about
        yield passed_over, self._costs(unpack(sample))

    def _costs(self, sample: list[InputFile]) -> CostModel | None:
        if self._config.min_rows is not None:
            return None
        store, machine = Store(self._config.output), _machine(self._config)
        known = read_json(store, COSTS)
        if known is not None and known["machine"] == machine:
            return CostModel(known["tau"], known["c"], known["error"])
        from surge_beam.gpu.calibrate import calibrate

        worker = load_worker(self._config)
        costs = calibrate(worker, _sample_texts(sample, self._config.text_column))
        found = {"machine": machine, **dataclasses.asdict(costs)}
        store.put(COSTS, json.dumps(found, indent=1).encode())
        return costs


def _machine(config: EmbedConfig) -> str:
    """What a measurement holds for: the recipe, the host, and the devices it is to use."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    handler = type(config.model_handler).__qualname__
    return digest(config.encoder, handler, platform.node(), os.cpu_count(), devices)


def _sample_texts(files: list[InputFile], column: str) -> list[str]:
    """Some hundreds of texts of the files; a stand-in of usual length where none can be read."""
    texts: list[str] = []
    rows = max(SAMPLE_TEXTS_OF_A_FILE, -(-SAMPLE_TEXTS // max(1, len(files))))
    # in no order, since some may be enough; as the texts are, of which a part may be used
    for file in random.Random(0).sample(files, len(files)):
        if len(texts) >= SAMPLE_TEXTS:
            break
        try:
            texts += first_contact("first_texts", file.url, column=column, rows=rows)
        except (UnreadableFileError, OSError):
            continue
    stand_in = "row {}: a text of about the usual length, of a dozen words or so"
    return random.Random(0).sample(texts, len(texts)) or [stand_in.format(i) for i in range(64)]


def load_worker(config: EmbedConfig) -> Any:
    """The process's encode worker; the first call in a process loads the model."""
    from surge_beam.gpu.worker import shared_worker

    return shared_worker(config.encoder, config.model_handler)


@dataclasses.dataclass
class _Read:
    plan: SuperBatchPlan
    segments: list[ReadSegment]
    letters: list[list[DeadLetter]]
    prepared: Any
    seconds: float


class _Encode(beam.DoFn):
    """Reads, encodes and commits SuperBatches, overlapped within a bundle."""

    def __init__(self, config: EmbedConfig):
        self._config = config
        self._rows = Metrics.counter(NAMESPACE, "rows")
        self._letters = Metrics.counter(NAMESPACE, "dead_letters")
        self._partitions = Metrics.counter(NAMESPACE, "partitions")
        self._tokens = Metrics.counter(NAMESPACE, "tokens")
        self._padded = Metrics.counter(NAMESPACE, "padding_tokens")
        self._duplicates = Metrics.counter(NAMESPACE, "duplicate_rows")
        self._batch_rows = Metrics.distribution(NAMESPACE, "superbatch_rows")
        self._encode_ms = Metrics.distribution(NAMESPACE, "superbatch_encode_msec")

    def setup(self) -> None:
        shared_guard().start()
        keep_metric_ids_apart()
        config = self._config
        self._worker = load_worker(config)
        store = Store(config.output)
        self._store = store
        self._reader = SuperBatchReader(config.read, store)
        self._committer = Committer(store, config.write, config.run)
        self._overlap = Overlap(self._read, self._encode, self._commit)
        self._base_rss = psutil.Process().memory_info().rss
        self._freed = 0

    def start_bundle(self) -> None:
        self._overlap.reset()

    def process(self, data: bytes) -> Iterator[Any]:
        for plan in plans_of(data):
            for header in self._overlap.push(plan):
                yield from self._outputs(header)

    def finish_bundle(self) -> Iterator[WindowedValue]:
        for header in self._overlap.drain():
            yield from map(in_global_window, self._outputs(header))

    def teardown(self) -> None:
        self._overlap.close()
        self._reader.close()
        self._committer.close()

    def _outputs(self, result: tuple[dict, list[str]]) -> Iterator[Any]:
        header, parts = result
        self._rows.inc(header["rows"])
        self._letters.inc(header["dead_letters"])
        self._partitions.inc(header["partitions"])
        self._tokens.inc(header["tokens"])
        self._padded.inc(header["padded_tokens"] - header["tokens"])
        self._duplicates.inc(header["texts"] - header["unique_texts"])
        self._batch_rows.update(header["rows"])
        self._encode_ms.update(int(header["seconds"] * 1000))
        yield header
        for fingerprint in parts:
            yield beam.pvalue.TaggedOutput("parts", (fingerprint, b""))

    def _read(self, plan: SuperBatchPlan) -> _Read:
        began = time.monotonic()
        config = self._config.read
        segments, broken = self._reader.read(plan)
        for file, reason in broken.items():
            write_unreadable(self._store, plan.files[file], reason)
        letters = [self._null_texts(plan, segment) for segment in segments]
        texts = pa.chunked_array(
            [c for s in segments for c in _text_chunks(s.table.column(config.text_column))],
            pa.string(),
        )
        prepared = self._worker.prepare(texts)
        return _Read(plan, segments, letters, prepared, time.monotonic() - began)

    def _null_texts(self, plan: SuperBatchPlan, read: ReadSegment) -> list[DeadLetter]:
        """Takes rows without a text out of the segment."""
        config = self._config.read
        column = read.table.column(config.text_column)
        if not column.null_count:
            return []
        null = column.is_null().to_numpy()
        letters = [
            row_letter(config, plan, read, row, "read", "NullText", "the text is null")
            for row in np.flatnonzero(null).tolist()
        ]
        read.table, read.origin = read.table.filter(pa.array(~null)), read.origin[~null]
        return letters

    def _encode(self, read: _Read) -> tuple[_Read, Any]:
        prepared, read.prepared = read.prepared, None
        return read, self._worker.encode(prepared)

    def _commit(self, work: tuple[_Read, Any]) -> tuple[dict, list[str]]:
        read, encoded = work
        segments, offset = [], 0
        failed = np.array(sorted(encoded.failures), np.int64)
        for segment, letters in zip(read.segments, read.letters, strict=True):
            rows = segment.table.num_rows
            lo, hi = np.searchsorted(failed, [offset, offset + rows])
            matrix = encoded.matrix[offset : offset + rows]
            table = segment.table
            if hi > lo:
                letters = list(letters)
                keep = np.ones(rows, bool)
                for at in failed[lo:hi].tolist():
                    error, message, attempts = encoded.failures[at]
                    row = at - offset
                    keep[row] = False
                    letters.append(
                        row_letter(
                            self._config.read,
                            read.plan,
                            segment,
                            row,
                            "encode",
                            error,
                            message,
                            attempts,
                        )
                    )
                table, matrix = table.filter(pa.array(keep)), matrix[keep]
            segments.append(
                OutputSegment(
                    segment.segment, table, self._added(matrix), letters, segment.unreadable
                )
            )
            offset += rows
        stats = encoded.stats
        header = {
            "superbatch": read.plan.id,
            "partitions": sum(s.segment.part == 0 for s in segments),
            "partitions_emptied": sum(
                not s.table.num_rows and bool(s.letters) and s.segment.parts == 1 for s in segments
            ),
            "rows": sum(s.table.num_rows for s in segments),
            "unreadable": sum(s.unreadable for s in segments),
            "dead_letters": sum(len(s.letters) for s in segments),
            "texts": stats.rows,
            "unique_texts": stats.unique_rows,
            "cached_texts": stats.cached_rows,
            "tokens": stats.tokens,
            "padded_tokens": stats.padded_tokens,
            "micro_batches": stats.micro_batches,
            "oom_ceiling": stats.oom_ceiling,
            "seconds": round(stats.seconds, 6),
            "read_seconds": round(read.seconds, 6),
            "device": self._worker.device,
            "dtype": self._worker.dtype,
            "dimension": self._worker.dimension,
            "memory_bound": self._memory_bound(),
            "peak_memory": peak_rss(),
        }
        self._committer.commit(read.plan.id, segments, header)
        self._freed += encoded.matrix.nbytes
        if self._freed >= GIVE_BACK_BYTES:
            give_back_freed_memory()
            self._freed = 0
        return header, sorted({s.segment.fingerprint for s in segments if s.segment.parts > 1})

    def _added(self, matrix: np.ndarray) -> dict[str, pa.Array]:
        write = self._config.write
        kind = np.float16 if write.vector_type == "float16" else np.float32
        return {write.vector_column: vectors_to_arrow(np.ascontiguousarray(matrix, kind))}

    def _memory_bound(self) -> int:
        """Bytes: the process as it stood with its model loaded, and what SuperBatches may add."""
        limits = self._config.limits(None)
        added = memory_bound(limits, self._worker.dimension) + self._worker.cache_bytes
        return self._base_rss + added


def _text_chunks(column: pa.ChunkedArray) -> list[pa.Array]:
    if column.type != pa.string():
        column = column.cast(pa.string())
    return column.chunks
