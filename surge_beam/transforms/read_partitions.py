"""Reading partitions into a pipeline, as Arrow batches with their key columns."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.metrics import Metrics
from apache_beam.pvalue import TaggedOutput

from surge_beam.records import DeadLetter, SourceFile, SurgeError, pack, unpack
from surge_beam.transforms.embed import LETTERS, NAMESPACE
from surge_beam.transforms.files import filesystem, list_input
from surge_beam.transforms.guard import UnreadableFileError
from surge_beam.transforms.parquet_probe import INT96_UNIT
from surge_beam.transforms.partitions import hive_values
from surge_beam.transforms.read import (
    ROW_COLUMN,
    UNREADABLE,
    ReadConfig,
    check_schema,
    describe,
    first_contact,
    source_of,
)
from surge_beam.transforms.superbatch import MAX_BYTES, MAX_ROWS, split

BATCH_ROWS = 4096
FILE_COLUMN = "file"


class ReadResult(NamedTuple):
    """What ``ReadPartitions`` gives.

    Attributes:
      rows: PCollection[pa.RecordBatch], each of one file.
      dead_letters: PCollection[DeadLetter]: files, row groups and lines that cannot be read.
    """

    rows: beam.PCollection[pa.RecordBatch]
    dead_letters: beam.PCollection[DeadLetter]


class ReadPartitions(beam.PTransform):
    """Reads Parquet, JSONL or CSV files, plain or compressed, from any fsspec file system.

    Key columns are ordinary columns of the batches, with their exact types, so that
    ``WritePartitions(partition_by=...)`` puts the rows back where they belong: the columns of
    ``partition_by``, else those of the hive folders (text), else ``file``, the file's path below
    the input's root. Rows of a file keep their order within a batch; batches come in any order.

    Files are first met by a helper process, so that none of them can take the worker down. One
    that cannot be read, or lacks a column, is one dead letter; a row group that does not decode
    is one, and the file's other row groups are read.

    Args:
      input: file, folder or glob; listed when the pipeline runs.
      text_column: the column to embed, which every file must have, as text.
      partition_by: key columns, in the files or in the names of their hive folders.
      keep_columns: columns to read besides the text and the keys; None means all.
      batch_bytes: what a batch never passes, unless a single row does.

    Raises:
      SurgeError: while running, where nothing is at ``input``.
    """

    def __init__(
        self,
        *,
        input: str,
        text_column: str = "text",
        partition_by: Sequence[str] = (),
        keep_columns: Sequence[str] | None = None,
        batch_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__()
        if isinstance(partition_by, str) or isinstance(keep_columns, str):
            raise ValueError("partition_by and keep_columns are sequences of names")
        if batch_bytes < 1:
            raise ValueError(f"batch_bytes must be at least 1: {batch_bytes}")
        self._input = input
        self._batch_bytes = batch_bytes
        self._config = ReadConfig(
            text_column=text_column,
            partition_by=tuple(partition_by),
            keep_columns=None if keep_columns is None else tuple(keep_columns),
            added_columns=(),
        )

    def expand(self, pipeline: beam.Pipeline) -> ReadResult:
        read = (
            pipeline
            | "Input" >> beam.Create([self._input])
            | "List" >> beam.ParDo(_List()).with_output_types(bytes)
            | "SpreadFiles" >> beam.Reshuffle()
            | "Read"
            >> beam.ParDo(_Read(self._config, self._batch_bytes))
            .with_output_types(pa.RecordBatch)
            .with_outputs(LETTERS, main="rows")
        )
        letters = (read[LETTERS],) | "DeadLetters" >> beam.Flatten().with_output_types(DeadLetter)
        return ReadResult(read.rows, letters)


class _List(beam.DoFn):
    def process(self, pattern: str) -> Iterator[bytes]:
        for file in list_input(pattern).files:
            yield pack(source_of(file))


class _Read(beam.DoFn):
    def __init__(self, config: ReadConfig, batch_bytes: int) -> None:
        self._config = config
        self._batch_bytes = batch_bytes
        self._rows = Metrics.counter(NAMESPACE, "rows_read")
        self._letters = Metrics.counter(NAMESPACE, "dead_letters")

    def process(self, packed: bytes) -> Iterator[Any]:
        source: SourceFile = unpack(packed)
        try:
            for item in read_file(source, self._config):
                if isinstance(item, DeadLetter):
                    yield self._letter(item)
                    continue
                for batch in split(item, MAX_ROWS, self._batch_bytes):
                    self._rows.inc(batch.num_rows)
                    yield batch
        except SurgeError as error:
            yield self._letter(_file_letter(source, error))

    def _letter(self, letter: DeadLetter) -> TaggedOutput:
        self._letters.inc()
        return TaggedOutput(LETTERS, letter)


def read_file(source: SourceFile, config: ReadConfig) -> Iterator[pa.RecordBatch | DeadLetter]:
    """Batches of a file with its key columns, and dead letters of what cannot be read.

    Raises:
      UnreadableFileError: the file is unusable as a whole; nothing was yielded then.
      SurgeError: it lacks a column, or has one of the wrong type; likewise.
    """
    with _as_parquet(source, config) as (url, letters):
        schema, about = describe(url)
        hive = hive_values(source.name)
        check_schema(schema, hive, config)
        for name in config.keep_columns or ():
            if name not in schema.names and name not in hive:
                raise SurgeError(f"no column {name!r}, which keep_columns asks for")
        added = _added_columns(source, schema, hive, config)
        columns = _columns(schema, added, config)
        yield from letters
        fs, path = filesystem(url)
        with (
            fs.open(path, "rb") as handle,
            pq.ParquetFile(handle, coerce_int96_timestamp_unit=INT96_UNIT) as file,
        ):
            for group, rows in enumerate(about["row_group_rows"]):
                if not rows:
                    continue
                try:
                    first_contact("verify_row_group", source=url, row_group=group, columns=columns)
                except UnreadableFileError as error:
                    yield _file_letter(source, error, kind=UNREADABLE)
                    continue
                for batch in file.iter_batches(
                    BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False
                ):
                    yield _with_columns(batch.replace_schema_metadata(None), added)


@contextlib.contextmanager
def _as_parquet(source: SourceFile, config: ReadConfig) -> Iterator[tuple[str, list[DeadLetter]]]:
    """A Parquet file with the source's rows, a temporary one where needed, and its bad lines."""
    if not source.staged:
        yield source.url, []
        return
    with tempfile.TemporaryDirectory(prefix="surge-") as folder:
        path = Path(folder, "staged.parquet")
        staged = first_contact(
            "stage_text",
            source=source.url,
            destination=str(path),
            format=source.format,
            compression=source.compression,
            text_column=config.text_column,
            key_columns=config.partition_by,
        )
        bad = pq.read_table(f"{path}.bad").to_pylist() if staged["bad_rows"] else []
        yield str(path), [DeadLetter(**letter) for letter in bad]


def _added_columns(
    source: SourceFile, schema: pa.Schema, hive: dict[str, str | None], config: ReadConfig
) -> dict[str, str | None]:
    """Columns that the file's path adds: hive values are keys, and keys win over the file's own."""
    if not hive and not config.partition_by:
        kept = config.keep_columns is None or FILE_COLUMN in config.keep_columns
        if FILE_COLUMN in schema.names and kept:
            raise SurgeError(
                f"column {FILE_COLUMN!r} would be lost, since it names the partition;"
                " leave it out with keep_columns or give partition_by"
            )
        return {FILE_COLUMN: source.name.encode("utf-8", "replace").decode()}
    keys = config.partition_by or tuple(hive)
    keep = hive.keys() if config.keep_columns is None else set(config.keep_columns)
    return {
        name: value
        for name, value in hive.items()
        if name in keys or (name in keep and name not in schema.names)
    }


def _columns(schema: pa.Schema, added: dict[str, str | None], config: ReadConfig) -> list[str]:
    keep = set(schema.names if config.keep_columns is None else config.keep_columns)
    keep |= {config.text_column, *config.partition_by}
    return [n for n in schema.names if n in keep and n not in added and n != ROW_COLUMN]


def _with_columns(batch: pa.RecordBatch, added: dict[str, str | None]) -> pa.RecordBatch:
    for name, value in added.items():
        constant = pa.repeat(pa.scalar(value, pa.string()), batch.num_rows)
        batch = batch.append_column(name, constant)
    return batch


def _file_letter(source: SourceFile, error: Exception, kind: str = "") -> DeadLetter:
    return DeadLetter(
        stage="read", error=kind or type(error).__name__, message=str(error), file=source.url
    )
