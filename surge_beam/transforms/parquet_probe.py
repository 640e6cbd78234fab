"""What the helper process asks of a Parquet file: its footer, and whether a row group is sound."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute  # what the first take would load, while the parent waits
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from surge_beam.transforms.partitions import first_rows
from surge_beam.transforms.textfiles import (
    SourceFile,
    no_tick,
    parsing,
    resolve,
)

# As nanoseconds, which is how INT96 is read otherwise, 64 bits hold no date before 1677 or after
# 2262, such as the 9999-12-31 of open ends; they would come out as others.
INT96_UNIT = "us"
FIRST_ROW = "__surge_first_row"
_BATCH_ROWS = 8_192
_KEY_ROWS = 131_072
_SAMPLE_ROWS = 1_024
_BATCH_BYTES = 8 << 20
_LOCAL_BUFFER = 1 << 20
_REMOTE_BUFFER = 8 << 20


class ParquetProbe:
    """Answers about Parquet files; keeps the last file open for its next row group."""

    def __init__(self) -> None:
        self._key: object = None
        self._file: pq.ParquetFile | None = None
        self._source: SourceFile | None = None
        self._content: Any = None

    def describe_parquet(
        self,
        source: str,
        storage_options: dict[str, Any] | None = None,
        columns: list[str] | None = None,
        tick: Callable[[], None] = no_tick,
    ) -> dict[str, Any]:
        """The footer.

        Args:
          source: local path or fsspec URL.
          storage_options: for its filesystem.
          columns: the columns whose bytes are counted; None for all, absent ones count nothing.
          tick: called on every sign of progress.

        Returns:
          ``num_rows``, ``row_group_rows`` and ``row_group_bytes`` of every row group, ``schema``
          (a serialized Arrow schema) and ``created_by``. Bytes are what the columns decode to: the
          footer's uncompressed size, and of repeated texts, which the file holds once, an estimate.

        Raises:
          UnreadableFileError: not a sound Parquet footer.
          OSError: the file cannot be opened or fetched.
        """
        self.close()
        with self._open(source, storage_options, tick) as file:
            footer = file.metadata
            paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
            wanted = [i for i, path in enumerate(paths) if _is_within(path, columns)]
            rows, sizes = [], []
            for index in range(footer.num_row_groups):
                group = footer.row_group(index)
                rows.append(group.num_rows)
                sizes.append(sum(group.column(i).total_uncompressed_size for i in wanted))
            # Some writers leave the footer's own total at 0.
            if min(rows + sizes, default=0) < 0 or footer.num_rows not in (0, sum(rows)):
                raise ValueError("the footer's row and byte counts contradict each other")
            factor = _expansion(file, wanted, tick)
            return {
                "num_rows": sum(rows),
                "row_group_rows": rows,
                "row_group_bytes": [int(size * factor) for size in sizes],
                "schema": file.schema_arrow.serialize().to_pybytes(),
                "created_by": footer.created_by,
            }

    def verify_row_group(
        self,
        source: str,
        row_group: int,
        columns: list[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        tick: Callable[[], None] = no_tick,
    ) -> int:
        """Decodes a row group in full, page checksums and UTF-8 included.

        Returns:
          Its rows.

        Raises:
          UnreadableFileError: it does not decode, or not to the rows the footer says.
          OSError: the file cannot be opened or fetched.
        """
        with self._open(source, storage_options, tick) as file:
            return sum(batch.num_rows for batch in _batches(file, row_group, columns, tick))

    def key_runs(
        self,
        source: str,
        row_groups: list[int],
        columns: list[str],
        storage_options: dict[str, Any] | None = None,
        tick: Callable[[], None] = no_tick,
    ) -> bytes:
        """Where key columns change, as an Arrow IPC stream of the rows at which they do.

        Texts are read as dictionary codes, without a string a row. A run of equal rows may begin
        anew at any row, and does at every row group.

        Returns:
          The columns of the first row of every run, texts dictionary-encoded, and a column
          ``FIRST_ROW`` with that row's number, counted from the first of the row groups.

        Raises:
          UnreadableFileError: they do not decode, or not to the rows the footer says.
          OSError: the file cannot be opened or fetched.
        """
        with self._open(source, storage_options, tick) as whole:
            footer = whole.metadata
            paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
            wanted = [i for i, path in enumerate(paths) if path in columns]
            coded = [paths[i] for i in wanted]
            heads, first = [], 0
            with self._parquet(metadata=footer, read_dictionary=coded) as file:
                for group in row_groups:
                    about = footer.row_group(group)
                    nbytes = sum(about.column(i).total_uncompressed_size for i in wanted)
                    for batch in _batches(file, group, columns, tick, _KEY_ROWS, nbytes):
                        keys = batch.select(columns)
                        at = first_rows(keys.columns)
                        head = keys.take(_int64(at))
                        heads.append(head.append_column(FIRST_ROW, _int64(at + first)))
                        first += batch.num_rows
            table = pa.Table.from_batches(heads).unify_dictionaries().combine_chunks()
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            return sink.getvalue().to_pybytes()

    def first_texts(
        self,
        source: str,
        column: str,
        rows: int,
        storage_options: dict[str, Any] | None = None,
        tick: Callable[[], None] = no_tick,
    ) -> list[str]:
        """The texts among the first rows of a file.

        Raises:
          UnreadableFileError: they do not decode, or are no texts.
          OSError: the file cannot be opened or fetched.
        """
        with self._open(source, storage_options, tick) as file:
            if file.schema_arrow.names.count(column) != 1:
                raise ValueError(f"it has no one column named {column!r}")
            for batch in file.iter_batches(rows, columns=[column], use_threads=False):
                batch.validate(full=True)
                texts = batch.column(column).cast(pa.string()).to_pylist()
                return [text for text in texts if text is not None]
            return []

    def close(self) -> None:
        """Closes the file that is held open."""
        if self._file is not None:
            with contextlib.suppress(Exception):
                self._file.close(force=True)
        self._key = self._file = self._source = self._content = None

    def _parquet(self, **options: Any) -> pq.ParquetFile:
        local = self._source is None
        return pq.ParquetFile(
            self._content,
            buffer_size=_LOCAL_BUFFER if local else _REMOTE_BUFFER,
            pre_buffer=False,
            page_checksum_verification=True,
            coerce_int96_timestamp_unit=INT96_UNIT,
            **options,
        )

    @contextlib.contextmanager
    def _open(
        self, source: str, storage_options: dict[str, Any] | None, tick: Callable[[], None]
    ) -> Iterator[pq.ParquetFile]:
        filesystem, path = resolve(source, storage_options)
        key: tuple[object, ...] = (source, repr(storage_options))
        local = isinstance(filesystem, LocalFileSystem)
        if local:
            stat = os.stat(path)
            key += (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if key != self._key:
            self.close()
            if not local:
                handle = filesystem.open(path, "rb", cache_type="none")
                self._source = SourceFile(handle, tick)
        try:
            with parsing(source, self._source):
                if self._file is None:
                    self._content = path if local else self._source
                    self._file = self._parquet()
                    self._key = key
                yield self._file
        except BaseException:
            self.close()
            raise


def _int64(values: np.ndarray) -> pa.Array:
    # pa.array would load pandas, half a second, to see whether this is of its own
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])


def _expansion(file: pq.ParquetFile, wanted: list[int], tick: Callable[[], None]) -> float:
    """How much larger the dictionary-coded columns are decoded, from some rows of a row group."""
    footer = file.metadata
    filled = [g for g in range(footer.num_row_groups) if footer.row_group(g).num_rows > 0]
    if not filled:
        return 1.0
    group = footer.row_group(filled[0])
    coded = [
        i
        for i in wanted
        if group.column(i).physical_type == "BYTE_ARRAY"
        and any("DICTIONARY" in encoding for encoding in group.column(i).encodings)
    ]
    names = sorted({footer.schema.column(i).path.partition(".")[0] for i in coded})
    stored = sum(group.column(i).total_uncompressed_size for i in wanted)
    if not names or not stored:
        return 1.0
    try:
        batch = next(file.iter_batches(_SAMPLE_ROWS, row_groups=filled[:1], columns=names))
        tick()
    except (pa.ArrowException, OSError, ValueError, StopIteration):
        # what does not decode is found when it is verified
        return 1.0
    coded_bytes = sum(group.column(i).total_uncompressed_size for i in coded)
    decoded = batch.nbytes / max(1, batch.num_rows) * group.num_rows
    return max(1.0, (stored - coded_bytes + decoded) / stored)


def _is_within(path: str, columns: list[str] | None) -> bool:
    return columns is None or any(path == c or path.startswith(c + ".") for c in columns)


def _batches(
    file: pq.ParquetFile,
    index: int,
    columns: list[str] | None,
    tick: Callable[[], None],
    most_rows: int = _BATCH_ROWS,
    nbytes: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """Validated batches of some megabytes of one row group.

    Args:
      most_rows: of a batch.
      nbytes: bytes of the columns in the row group; None takes those of all its columns.

    Raises:
      ValueError: a column is missing, or the rows are not as many as the footer says.
    """
    names = file.schema_arrow.names
    for name in columns or ():
        if names.count(name) != 1:
            raise ValueError(f"it has {names.count(name)} columns named {name!r}")
    group = file.metadata.row_group(index)
    expected, total = group.num_rows, max(1, group.total_byte_size if nbytes is None else nbytes)
    size = max(1, min(most_rows, _BATCH_BYTES * max(1, expected) // total))
    rows = 0
    for batch in file.iter_batches(size, row_groups=[index], columns=columns, use_threads=False):
        tick()
        batch.validate(full=True)
        rows += batch.num_rows
        if rows > expected:
            break
        yield batch
    if rows != expected:
        raise ValueError(f"row group {index} does not hold the {expected} rows its footer says")
