"""Embedding: the file job, from an input to committed partitions."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import random
import resource
import time
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import psutil
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.transforms.window import GlobalWindow
from apache_beam.typehints import KV
from apache_beam.utils.windowed_value import WindowedValue

from surge_beam.policy.costs import CostModel
from surge_beam.policy.superbatch import Limits, memory_bound
from surge_beam.records import (
    BadInputError,
    DeadLetter,
    EncoderConfig,
    SuperBatchPlan,
    pack,
    unpack,
)
from surge_beam.transforms import manifest
from surge_beam.transforms.exchange import SCATTER_LIMIT, Bucket, Exchange, spread, stretch
from surge_beam.transforms.files import (
    InputFile,
    Store,
    absolute,
    absolute_model,
    digest,
    list_input,
)
from surge_beam.transforms.guard import UnreadableFileError, shared_guard
from surge_beam.transforms.metric_ids import keep_metric_ids_apart
from surge_beam.transforms.overlap import Overlap
from surge_beam.transforms.plan import PlanChunk, Planner, SplitPartition
from surge_beam.transforms.read import (
    ReadConfig,
    ReadSegment,
    Scanner,
    SuperBatchReader,
    first_contact,
    record_json,
    write_unreadable,
)
from surge_beam.transforms.superbatch import refuse_dask
from surge_beam.transforms.write import Committer, EncodedSegment, WriteConfig, publish, read_json

NAMESPACE = "surge_beam"
PLAN = "_surge/plan.json"
FLOOR_ROWS = 1024
SAMPLE_FILES = 64
SAMPLE_TEXTS = 256
SAMPLE_TEXTS_OF_A_FILE = 16
COSTS = "_surge/costs.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """A file job, whole: what is read, how it is encoded, and where it goes.

    Attributes:
      input: file, folder or glob.
      output: the output folder.
      run: name of this run; orders manifest entries, so later runs need later names.
      read, encoder, write: the parts' own settings.
      min_rows: rows a SuperBatch reaches; None measures the device and applies the cost model.
      max_rows, max_bytes: what a SuperBatch never passes.
      model_handler: a Beam ModelHandler in place of the encoder.
      accelerator: Beam resource hint of the encode step.
      prune: remove the output of inputs that are gone.
    """

    input: str
    output: str
    run: str
    read: ReadConfig = dataclasses.field(default_factory=ReadConfig)
    encoder: EncoderConfig = dataclasses.field(default_factory=EncoderConfig)
    write: WriteConfig = dataclasses.field(default_factory=WriteConfig)
    min_rows: int | None = None
    max_rows: int = 32_768
    max_bytes: int = 64 << 20
    model_handler: Any = None
    accelerator: str = "type:nvidia-l4;count:1;install-nvidia-driver"
    prune: bool = False

    def __post_init__(self) -> None:
        # a worker's working directory is not the submitter's
        object.__setattr__(self, "input", absolute(self.input))
        object.__setattr__(self, "output", absolute(self.output))
        encoder = dataclasses.replace(self.encoder, model=absolute_model(self.encoder.model))
        object.__setattr__(self, "encoder", encoder)

    def limits(self, model: CostModel | None) -> Limits:
        """The thresholds; with a cost model, B_min = n* / 2.5% within sensible bounds."""
        wanted = self.min_rows
        if wanted is None:
            wanted = FLOOR_ROWS if model is None else model.min_rows(floor=FLOOR_ROWS)
        return Limits(
            min_rows=min(wanted, self.max_rows), max_rows=self.max_rows, max_bytes=self.max_bytes
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
        listed = (
            pipeline
            | "Input" >> beam.Impulse()
            | "List" >> beam.ParDo(_List(config)).with_outputs("about", main="files")
        )
        scanned = (
            listed.files
            | "SpreadFiles" >> beam.Reshuffle()
            | "Scan" >> beam.ParDo(_Scan(config)).with_output_types(tuple[int, bytes])
        )
        calibrate = beam.ParDo(_Calibrate(config))
        if config.min_rows is None:
            calibrate = on_device(calibrate, config)
        about = listed.about | "EncodeCosts" >> calibrate
        planned = (
            scanned
            | "Gather" >> beam.GroupByKey()
            | "Plan"
            >> beam.ParDo(_Plan(config), beam.pvalue.AsSingleton(about)).with_outputs(
                "splits", "buckets", "tasks", main="plans"
            )
        )
        runs = (
            planned.tasks
            | "SpreadTasks" >> beam.Reshuffle()
            | "SortRuns" >> beam.ParDo(_SortRuns(config)).with_output_types(tuple[int, bytes])
        )
        merged = (
            (_keyed(planned.buckets, KV[int, bytes]), runs)
            | "BucketsAndRuns" >> beam.Flatten()
            | "JoinRuns" >> beam.GroupByKey()
            | "Merge" >> beam.ParDo(_Merge(config)).with_output_types(bytes)
        )
        encoded = (
            (planned.plans, merged)
            | "AllPlans" >> beam.Flatten()
            | "SpreadPlans" >> beam.Reshuffle()
            | "Encode"
            >> on_device(beam.ParDo(_Encode(config)).with_outputs("parts", main="headers"), config)
        )
        _ = (
            (
                _keyed(planned.splits, KV[str, bytes]),
                _keyed(encoded.parts, KV[str, bytes]),
            )
            | "SplitsAndParts" >> beam.Flatten()
            | "JoinParts" >> beam.GroupByKey()
            | "Publish" >> beam.ParDo(_Publish(config))
        )
        return encoded.headers


def on_device(transform: beam.PTransform, config: EmbedConfig) -> beam.PTransform:
    """Gives a step the accelerator hint, unless the CPU was asked for."""
    if config.encoder.device == "cpu":
        # a hint of its own keeps the step in an environment, and a process, of its own
        return transform.with_resource_hints(min_ram="2GiB")
    return transform.with_resource_hints(accelerator=config.accelerator)


def _keyed(pairs: beam.PCollection, kind: Any) -> beam.PCollection:
    """Declares the type of an output that carries none, so that its key coder is deterministic."""
    pairs.element_type = kind
    return pairs


class _List(beam.DoFn):
    def __init__(self, config: EmbedConfig):
        self._config = config

    def process(self, _: bytes) -> Iterator[Any]:
        listing = list_input(self._config.input, exclude=self._config.output)
        for file in listing.files:
            yield pack(file)
        plain = [f for f in listing.files if f.format == "parquet" and f.compression is None]
        sample = plain[:: max(1, len(plain) // SAMPLE_FILES)][:SAMPLE_FILES]
        yield beam.pvalue.TaggedOutput("about", (listing.passed_over, pack(sample)))


class _Scan(beam.DoFn):
    def __init__(self, config: EmbedConfig):
        self._config = config

    def setup(self) -> None:
        shared_guard().start()
        self._scanner = Scanner(self._config.read, Store(self._config.output))

    def process(self, file: bytes) -> Iterator[tuple[int, bytes]]:
        # one key, since planning needs the runs of all files in one place
        for runs in self._scanner.scan(unpack(file)):
            yield 0, runs


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
        costs = calibrate(worker, _sample_texts(sample, self._config.read.text_column))
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


class _Plan(beam.DoFn):
    def __init__(self, config: EmbedConfig):
        self._config = config

    def process(
        self,
        grouped: tuple[int, Iterable[bytes]],
        about: tuple[int, CostModel | None],
    ) -> Iterator[Any]:
        passed_over, costs = about
        store = Store(self._config.output)
        limits = self._config.limits(costs)
        planner = Planner(grouped[1], manifest.load(store))
        scattered = planner.scattered(limits)
        splits: list[SplitPartition] = []
        chunks = self._chunks(planner, limits, splits)
        if scattered <= SCATTER_LIMIT:
            yield from map(pack, chunks)
        else:
            plans = (plan for chunk in chunks for plan in chunk.plans())
            yield from self._exchange(plans, stretch(planner.bytes_per_row))
        for split in splits:
            yield beam.pvalue.TaggedOutput("splits", (split.fingerprint, pack(split)))
        planner.tidy(store, self._config.run, prune=self._config.prune)
        plan = {
            **dataclasses.asdict(planner.summary),
            **dataclasses.asdict(limits),
            "run": self._config.run,
            "passed_over": passed_over,
            "scattered": round(scattered, 2),
            "tau": costs.tau if costs else None,
            "c": costs.c if costs else None,
        }
        store.put(PLAN, json.dumps(plan, indent=1).encode())

    @staticmethod
    def _chunks(
        planner: Planner, limits: Limits, splits: list[SplitPartition]
    ) -> Iterator[PlanChunk]:
        for item in planner.chunks(limits):
            if isinstance(item, SplitPartition):
                splits.append(item)
            else:
                yield item

    @staticmethod
    def _exchange(plans: Iterator[SuperBatchPlan], stretch_rows: int) -> Iterator[Any]:
        buckets = 0
        for item in spread(plans, stretch_rows=stretch_rows):
            if isinstance(item, Bucket):
                yield beam.pvalue.TaggedOutput("buckets", (buckets, pack(item)))
                buckets += 1
            else:
                yield beam.pvalue.TaggedOutput("tasks", pack(item))


class _Exchanging(beam.DoFn):
    """Opens what both sides of the exchange work with."""

    def __init__(self, config: EmbedConfig):
        self._config = config

    def setup(self) -> None:
        store = Store(self._config.output)
        self._reader = SuperBatchReader(self._config.read, store)
        self._exchange = Exchange(store, self._reader)

    def teardown(self) -> None:
        self._reader.close()


class _SortRuns(_Exchanging):
    def process(self, task: bytes) -> Iterator[tuple[int, bytes]]:
        for bucket, run in self._exchange.sort(unpack(task)):
            yield bucket, pack(run)


class _Merge(_Exchanging):
    def process(self, joined: tuple[int, Iterable[bytes]]) -> Iterator[bytes]:
        """Merges a bucket: among the values are the bucket itself and its shares of runs."""
        values = list(map(unpack, joined[1]))
        runs = [value for value in values if not isinstance(value, Bucket)]
        for bucket in values:
            if isinstance(bucket, Bucket):
                for plan in self._exchange.merge(bucket, runs):
                    yield pack(plan)


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

    def start_bundle(self) -> None:
        self._overlap.reset()

    def process(self, data: bytes) -> Iterator[Any]:
        work = unpack(data)
        for plan in work.plans() if isinstance(work, PlanChunk) else (work,):
            for header in self._overlap.push(plan):
                yield from self._outputs(header)

    def finish_bundle(self) -> Iterator[WindowedValue]:
        window = GlobalWindow()
        for header in self._overlap.drain():
            for output in self._outputs(header):
                if isinstance(output, beam.pvalue.TaggedOutput):
                    value = WindowedValue(output.value, window.max_timestamp(), [window])
                    yield beam.pvalue.TaggedOutput(output.tag, value)
                else:
                    yield WindowedValue(output, window.max_timestamp(), [window])

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
        column = read.table.column(self._config.read.text_column)
        if not column.null_count:
            return []
        null = column.is_null().to_numpy()
        letters = [
            self._letter(plan, read, row, "read", "NullText", "the text is null", 1)
            for row in np.flatnonzero(null).tolist()
        ]
        read.table, read.origin = read.table.filter(pa.array(~null)), read.origin[~null]
        return letters

    def _letter(
        self,
        plan: SuperBatchPlan,
        read: ReadSegment,
        row: int,
        stage: str,
        error: str,
        message: str,
        attempts: int,
    ) -> DeadLetter:
        file, number = read.origin[row].tolist()
        source = plan.files[file]
        if self._config.read.fail_on_bad_input:
            where = "line" if source.format != "parquet" else "row"
            raise BadInputError(f"{source.url}, {where} {number}: {message}")
        return DeadLetter(
            stage=stage,
            error=error,
            message=message,
            file=source.url,
            row=number,
            partition=read.segment.folder,
            record=record_json(read.table, row, read.segment),
            attempts=attempts,
        )

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
                        self._letter(read.plan, segment, row, "encode", error, message, attempts)
                    )
                table, matrix = table.filter(pa.array(keep)), matrix[keep]
            segments.append(
                EncodedSegment(segment.segment, table, matrix, letters, segment.unreadable)
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
            "peak_memory": _peak_rss(),
        }
        self._committer.commit(read.plan.id, segments, header)
        return header, sorted({s.segment.fingerprint for s in segments if s.segment.parts > 1})

    def _memory_bound(self) -> int:
        """Bytes: the process as it stood with its model loaded, and what SuperBatches may add."""
        limits = self._config.limits(None)
        added = memory_bound(limits, self._worker.dimension) + self._worker.cache_bytes
        return self._base_rss + added


def _peak_rss() -> int:
    """Bytes this process had resident at most; getrusage would count a parent's before exec."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            peak = next(line for line in status if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _text_chunks(column: pa.ChunkedArray) -> list[pa.Array]:
    if column.type != pa.string():
        column = column.cast(pa.string())
    return column.chunks


class _Publish(beam.DoFn):
    """Publishes the split partitions all of whose parts are committed."""

    def __init__(self, config: EmbedConfig):
        self._config = config

    def start_bundle(self) -> None:
        self._store = Store(self._config.output)
        self._parts: dict[str, list[dict]] | None = None

    def process(self, joined: tuple[str, Iterable[bytes]]) -> None:
        fingerprint, values = joined
        # the others say that a part is committed
        for data in filter(None, values):
            split = unpack(data)
            if self._parts is None:
                self._parts = manifest.parts_under_way(self._store)
            parts = [p for p in self._parts.get(fingerprint, []) if p["parts"] == split.parts]
            if len(parts) == split.parts:
                publish(self._store, self._config.run, split.folder, fingerprint, parts)
