"""Writing a pipeline's rows as a hive-partitioned Parquet dataset."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.metrics import Metrics
from apache_beam.transforms.window import BoundedWindow, GlobalWindow, GlobalWindows
from apache_beam.utils.windowed_value import PaneInfo

from surge_beam.policy.superbatch import Limits
from surge_beam.records import SurgeError
from surge_beam.transforms.embed import NAMESPACE
from surge_beam.transforms.files import Store
from surge_beam.transforms.partitions import METADATA_KEY, KeyRuns
from surge_beam.transforms.superbatch import (
    MAX_BYTES,
    MAX_ROWS,
    FormInBundle,
    RecordBatchCoder,
    join_batches,
    refuse_dask,
    split,
)
from surge_beam.transforms.write import part_name, vectors_to_arrow

# a file is written in row groups of about this size, so that a large one needs no more memory
MAX_BUFFER_BYTES = 32 << 20


class WriteResult(NamedTuple):
    """What ``WritePartitions`` gives.

    Attributes:
      files: PCollection[dict], one a file: ``path`` below the output and ``rows``.
    """

    files: beam.PCollection[dict]


class WritePartitions(beam.PTransform):
    """Writes rows or Arrow batches as a hive-partitioned Parquet dataset.

    Rows are dicts, ``beam.Row`` or named tuples; batches ``pa.RecordBatch`` or ``pa.Table``. The
    dataset is what the file job writes: ``output/key=value/part-00000.parquet``, key columns in
    the folder names alone, their exact values in each file's metadata under ``surge.partition``,
    vectors as ``fixed_size_list<float>[d]``. Arrow slices are shuffled by partition, so the order
    of rows across slices is not kept. Columns that some rows lack are null there.

    Bounded input gives one file a partition, whatever its windows; a retry or a second run writes
    the same name anew. Unbounded input gives one file a partition, window and pane,
    ``part-<window's start>-<pane>.parquet``; give it windows, or a trigger that discards what it
    has fired. A file appears whole or not at all.

    Args:
      output: the output folder, on any fsspec file system.
      partition_by: the key columns.
      vector_column: the column of vectors, which all rows must have; None where there is none.
      output_dtype: ``float32`` or ``float16``, the vectors' type in the files.

    Raises:
      ValueError: no key columns, or another ``output_dtype``.
      SurgeError: on DaskRunner; while running, a missing key or vector column, a key of a type
        that cannot name a folder, vectors of several sizes, or rows of one partition whose
        columns cannot be brought together.
    """

    def __init__(
        self,
        *,
        output: str,
        partition_by: Sequence[str],
        vector_column: str | None = "embedding",
        output_dtype: str = "float32",
    ) -> None:
        super().__init__()
        if isinstance(partition_by, str) or not partition_by:
            raise ValueError("partition_by names at least one key column, in a sequence")
        if output_dtype not in ("float32", "float16"):
            raise ValueError(f"output_dtype must be float32 or float16, not {output_dtype!r}")
        if vector_column in partition_by:
            raise ValueError(f"{vector_column!r} cannot be a key and the vectors")
        self._config = _Config(
            output=output,
            partition_by=tuple(partition_by),
            vector_column=vector_column,
            output_dtype=output_dtype,
        )

    def expand(self, pcoll: beam.PCollection) -> WriteResult:
        refuse_dask(pcoll.pipeline)
        if pcoll.is_bounded:
            pcoll = pcoll | "OneWindow" >> beam.WindowInto(GlobalWindows())
        limits = Limits(min_rows=MAX_ROWS, max_rows=MAX_ROWS, max_bytes=MAX_BYTES)
        files = (
            pcoll
            | "FormBatches" >> beam.ParDo(FormInBundle(limits)).with_output_types(pa.RecordBatch)
            | "Slice"
            >> beam.ParDo(_Slice(self._config)).with_output_types(tuple[str, tuple[str, bytes]])
            | "GroupByPartition" >> beam.GroupByKey()
            | "Write"
            >> beam.ParDo(_Write(self._config, windowed=not pcoll.is_bounded)).with_output_types(
                dict
            )
        )
        return WriteResult(files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    output: str
    partition_by: tuple[str, ...]
    vector_column: str | None
    output_dtype: str


class _Slice(beam.DoFn):
    """Cuts batches by partition: folder, exact key values as JSON, Arrow slice without the keys."""

    def __init__(self, config: _Config) -> None:
        self._config = config

    def process(self, batch: pa.RecordBatch) -> Iterator[tuple[str, tuple[str, bytes]]]:
        config = self._config
        for name in (*config.partition_by, config.vector_column):
            if name is not None and batch.schema.names.count(name) != 1:
                raise SurgeError(
                    f"rows to write need one column {name!r}; they have"
                    f" {', '.join(map(repr, batch.schema.names))}"
                )
        keys = pa.Table.from_batches([batch.select(list(config.partition_by))])
        partitions, which, starts = KeyRuns(list(config.partition_by)).runs(keys)
        batch = batch.drop_columns(list(config.partition_by))
        if config.vector_column is not None:
            batch = _with_vectors(batch, config.vector_column, config.output_dtype)
        of_row = np.repeat(which, np.diff(np.append(starts, batch.num_rows)))
        order = np.argsort(of_row, kind="stable")
        edges = np.searchsorted(of_row[order], np.arange(len(partitions) + 1))
        batch = batch.take(pa.array(order))
        coder = RecordBatchCoder()
        for (folder, values), low, high in zip(partitions, edges[:-1], edges[1:], strict=True):
            for piece in split(batch.slice(low, high - low), MAX_ROWS, MAX_BYTES):
                yield folder, (values, coder.encode(piece))


def _with_vectors(batch: pa.RecordBatch, name: str, dtype: str) -> pa.RecordBatch:
    """Puts the vectors last, as a ``fixed_size_list`` of the dtype.

    Raises:
      SurgeError: no lists of numbers, or not all of one size.
    """
    column = batch.column(name)
    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not (lists or pa.types.is_fixed_size_list(kind)) or column.null_count:
        raise SurgeError(f"column {name!r} must hold a vector in every row; it is {kind}")
    flat = column.flatten()
    size = len(flat) // batch.num_rows
    if flat.null_count or (lists and set(column.value_lengths().to_pylist()) != {size}):
        raise SurgeError(f"column {name!r} must hold vectors of one size, without nulls")
    numbers = np.ascontiguousarray(flat.to_numpy(zero_copy_only=False), dtype)
    vectors = vectors_to_arrow(numbers.reshape(batch.num_rows, size))
    return batch.drop_columns([name]).append_column(name, vectors)


class _Write(beam.DoFn):
    """Streams the slices of a partition to one file."""

    def __init__(self, config: _Config, *, windowed: bool) -> None:
        self._config = config
        self._windowed = windowed
        self._rows = Metrics.counter(NAMESPACE, "rows_written")
        self._files = Metrics.counter(NAMESPACE, "files_written")

    def setup(self) -> None:
        self._store = Store(self._config.output)

    def process(
        self,
        group: tuple[str, Iterable[tuple[str, bytes]]],
        window: Any = beam.DoFn.WindowParam,
        pane: Any = beam.DoFn.PaneInfoParam,
    ) -> Iterator[dict[str, Any]]:
        folder, slices = group
        name = _file_name(window, pane) if self._windowed else part_name(0)
        path = f"{folder}/{name}"
        rows = write_slices(self._store, path, slices, self._config.vector_column)
        self._rows.inc(rows)
        self._files.inc()
        yield {"path": path, "rows": rows}


def _file_name(window: BoundedWindow, pane: PaneInfo) -> str:
    if isinstance(window, GlobalWindow):
        start = "global"
    else:
        moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(
            microseconds=window.start.micros
        )
        start = moment.strftime("%Y%m%dT%H%M%S.%fZ")
    return f"part-{start}-{max(pane.index, 0):05d}.parquet"


def write_slices(
    store: Store,
    path: str,
    slices: Iterable[tuple[str, bytes]],
    vector_column: str | None,
    max_bytes: int = MAX_BUFFER_BYTES,
) -> int:
    """Writes the slices of a partition, read once, as one Parquet file.

    Args:
      slices: the key values as JSON, and an Arrow batch as ``RecordBatchCoder`` encodes it.
      max_bytes: Arrow bytes of a row group; two of them are held at a time.

    Returns:
      Rows written.

    Raises:
      SurgeError: columns, vector sizes or key values that cannot be brought together.
    """
    tables = _tables(slices, path, vector_column, max_bytes)
    first = next(tables)
    second = next(tables, None)
    if second is None:
        sink = pa.BufferOutputStream()
        rows = _write_parquet(sink, [first], path, vector_column)
        store.put(path, sink.getvalue())
        return rows
    with _whole_file(store, path) as target:
        return _write_parquet(target, itertools.chain([first, second], tables), path, vector_column)


def _tables(
    slices: Iterable[tuple[str, bytes]], path: str, vector_column: str | None, max_bytes: int
) -> Iterator[pa.Table]:
    """Tables of about ``max_bytes``, with the key values in their metadata."""
    coder, values, held = RecordBatchCoder(), "", 0
    batches: list[pa.RecordBatch] = []

    def table() -> pa.Table:
        joined = list(join_batches(batches))
        if len(joined) > 1:
            raise SurgeError(f"{path}: rows of several schemas cannot be brought together")
        if vector_column is not None:
            kind = joined[0].schema.field(vector_column).type
            if not pa.types.is_fixed_size_list(kind):
                raise SurgeError(f"{path}: its vectors are of several sizes")
        metadata = {METADATA_KEY: values.encode()}
        return pa.Table.from_batches(joined).replace_schema_metadata(metadata)

    for of_slice, data in slices:
        values = _agreed(values, of_slice, path)
        batch = coder.decode(data)
        if batches and held + batch.nbytes > max_bytes:
            yield table()
            batches, held = [], 0
        batches.append(batch)
        held += batch.nbytes
    if batches:
        yield table()


def _write_parquet(
    sink: Any, tables: Iterable[pa.Table], path: str, vector_column: str | None
) -> int:
    rows, writer, schema = 0, None, None
    try:
        for table in tables:
            if writer is None:
                schema = table.schema
                plain = [n for n in schema.names if n != vector_column]
                writer = pq.ParquetWriter(
                    sink,
                    schema,
                    compression={n: "ZSTD" if n in plain else "NONE" for n in schema.names},
                    use_dictionary=plain,
                    write_statistics=plain,
                )
            writer.write_table(_as_schema(table, schema, path))
            rows += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    return rows


def _as_schema(table: pa.Table, schema: pa.Schema, path: str) -> pa.Table:
    if table.schema.equals(schema):
        return table
    with contextlib.suppress(pa.ArrowException):
        both = pa.concat_tables([schema.empty_table(), table], promote_options="permissive")
        if both.schema.equals(schema):
            return both
    raise SurgeError(
        f"{path}: the partition is too large to hold, and its rows differ in schema:"
        f" {table.schema.to_string()} after {schema.to_string()}"
    )


@contextlib.contextmanager
def _whole_file(store: Store, path: str) -> Iterator[str]:
    """A local file to write, which becomes ``path`` of the output when all went well."""
    if store.local:
        temporary = store.temporary()
        try:
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            store.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.remove(temporary)
            raise
    else:
        with tempfile.TemporaryDirectory(prefix="surge-") as folder:
            file_name = os.path.join(folder, "part.parquet")
            yield file_name
            store.fs.put_file(file_name, store.path(path))


def _agreed(values: str, others: str, path: str) -> str:
    """The key values of two slices; an all-null column of a slice may have had no type."""
    if values in ("", others):
        return others
    left, right = json.loads(values), json.loads(others)
    if any(left[name]["value"] != right[name]["value"] for name in left):
        raise SurgeError(f"{path}: the same folder for different key values, {values} and {others}")
    for name, key in right.items():
        if left[name]["type"] == "null":
            left[name] = key
    return json.dumps(left, ensure_ascii=False)
