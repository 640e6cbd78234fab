"""Bringing scattered partitions together, through sorted runs in the output's staging folder.

Where the rows of a partition lie all over large files, reading them SuperBatch by SuperBatch
would decode the input many times over. Then a stretch of a file at a time is sorted by where its
rows belong and written as a run (an Arrow file with one record batch a bucket), and the runs'
shares of a bucket, some SuperBatches together, are merged into one Parquet file, from which the
SuperBatches are read in order. Runs and buckets are bounded, so memory is; what passes through
Beam are names.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from surge_beam.records import (
    Slice,
    SourceFile,
    SuperBatchPlan,
    SurgeError,
    pack,
    unpack,
)
from surge_beam.transforms.columns import fill_untyped
from surge_beam.transforms.files import Store, digest
from surge_beam.transforms.read import (
    FILE_COLUMN,
    ROW_COLUMN,
    STAGING,
    SuperBatchReader,
    write_unreadable,
)

# decoding a row this many times costs about as much as writing and reading it once more
SCATTER_LIMIT = 8.0
# of a run and of a bucket, each held in memory once or twice while it is made
STRETCH_ROWS = 65_536
STRETCH_BYTES = 64 << 20
ROW_GROUP_ROWS = 8_192
PLACE_COLUMN = "__surge_place"
SOURCE_KEY = b"surge.source"


@dataclasses.dataclass(frozen=True)
class SortTask:
    """Row ranges of one file and where they belong.

    Attributes:
      source: the file.
      ranges: int64 [R, 4], ascending: start, rows, bucket, place of the first row in the bucket.
    """

    source: SourceFile
    ranges: np.ndarray


@dataclasses.dataclass(frozen=True)
class Bucket:
    """SuperBatches that are merged into one file; places count through all their rows."""

    plans: tuple[SuperBatchPlan, ...]

    @property
    def name(self) -> str:
        return digest(*[plan.id for plan in self.plans])


def scatter(superbatch: np.ndarray, file: np.ndarray, start: np.ndarray, rows: np.ndarray) -> float:
    """How often a row would be decoded if every SuperBatch read its span of every file.

    Args:
      superbatch, file, start, rows: int64 [R], of each run of rows.
    """
    if not len(rows):
        return 0.0
    order = np.lexsort((start, file, superbatch))
    superbatch, file, start, rows = superbatch[order], file[order], start[order], rows[order]
    new = (np.diff(superbatch, prepend=-1) != 0) | (np.diff(file, prepend=-1) != 0)
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(rows)) - 1
    spans = start[last] + rows[last] - start[first]
    return float(spans.sum() / max(1, rows.sum()))


def stretch(bytes_per_row: float) -> int:
    """Rows of a run or a bucket: as many as stay within both limits."""
    return int(min(STRETCH_ROWS, max(1, STRETCH_BYTES / max(1.0, bytes_per_row))))


def spread(
    plans: Iterable[SuperBatchPlan], *, stretch_rows: int = STRETCH_ROWS
) -> Iterator[Bucket | SortTask]:
    """Buckets of the plans, in order, then the tasks that fill them.

    Args:
      stretch_rows: a bucket closes when it has reached so many rows, and a run before.
    """
    ranges: dict[str, list[np.ndarray]] = {}
    sources: dict[str, SourceFile] = {}
    waiting: list[SuperBatchPlan] = []
    number = 0
    for plan in plans:
        waiting.append(plan)
        if sum(p.rows for p in waiting) >= stretch_rows:
            yield _bucket(number, waiting, ranges, sources)
            waiting, number = [], number + 1
    if waiting:
        yield _bucket(number, waiting, ranges, sources)
    for name in sorted(ranges):
        table = np.concatenate(ranges.pop(name))
        table = table[np.argsort(table[:, 0], kind="stable")]
        upto = np.cumsum(table[:, 1])
        edges = np.unique(np.searchsorted(upto, np.arange(stretch_rows, upto[-1], stretch_rows)))
        for piece in np.split(table, edges):
            if len(piece):
                yield SortTask(sources[name], piece)


def _bucket(
    number: int,
    plans: list[SuperBatchPlan],
    ranges: dict[str, list[np.ndarray]],
    sources: dict[str, SourceFile],
) -> Bucket:
    place = 0
    found: dict[str, list[tuple[int, int, int, int]]] = {}
    for plan in plans:
        for segment in plan.segments:
            for x in segment.slices:
                source = plan.files[x.file]
                sources[source.name] = source
                found.setdefault(source.name, []).append((x.start, x.rows, number, place))
                place += x.rows
    for name, own in found.items():
        ranges.setdefault(name, []).append(np.array(own, np.int64))
    return Bucket(tuple(plans))


class Exchange:
    """Runs the tasks and merges the buckets of one job."""

    def __init__(self, store: Store, reader: SuperBatchReader):
        self._store = store
        self._reader = reader

    def sort(self, task: SortTask) -> Iterator[tuple[int, tuple[str, int, int]]]:
        """Writes the run of a task.

        Yields:
          Each bucket in it, with the run's name, the bucket's record batch in the run (-1 for
          none), and the rows of the bucket that could not be decoded.
        """
        ranges = task.ranges
        owner = np.arange(len(ranges))
        found = self._reader.read_rows(task.source, np.column_stack([ranges[:, :2], owner]))
        if found.reason is not None:
            write_unreadable(self._store, task.source, found.reason)
        lost = np.zeros(int(ranges[:, 2].max()) + 1, np.int64)
        np.add.at(lost, ranges[found.lost[:, 1], 2], found.lost[:, 0])
        bucket = ranges[found.owner, 2]
        place = ranges[found.owner, 3] + found.positions - ranges[found.owner, 0]
        order = np.lexsort((place, bucket))
        bucket = bucket[order]
        table = found.table.take(pa.array(order)).combine_chunks()
        table = table.append_column(ROW_COLUMN, pa.array(found.numbers[order]))
        table = table.append_column(PLACE_COLUMN, pa.array(place[order]))
        table = table.replace_schema_metadata({SOURCE_KEY: pack(task.source)})
        edges = np.flatnonzero(np.diff(bucket, prepend=-1, append=-1)).tolist()
        name = f"{STAGING}/run-{digest(task.source.fingerprint, ranges.tobytes())}.arrow"
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_file(sink, table.schema, options=options) as writer:
            for lo, hi in itertools.pairwise(edges):
                writer.write_table(table.slice(lo, hi - lo), max_chunksize=hi - lo)
        self._store.put(name, sink.getvalue())
        index = {int(bucket[lo]): i for i, lo in enumerate(edges[:-1])}
        for number in np.unique(ranges[:, 2]).tolist():
            yield number, (name, index.get(number, -1), int(lost[number]))

    def merge(
        self, bucket: Bucket, runs: Iterable[tuple[str, int, int]]
    ) -> Iterator[SuperBatchPlan]:
        """Writes the file of a bucket; yields its plans, which now read that file.

        A bucket whose files differ in their columns is left where it is: its plans read the
        input, so that a partition's texts do not depend on the files of another.

        Raises:
          SurgeError: rows are missing that no run reported as lost.
        """
        tables, sources, lost = [], [], 0
        for name, index, gone in sorted(runs):
            lost += gone
            if index >= 0:
                table = self._batch(name, index)
                sources.append(unpack(table.schema.metadata[SOURCE_KEY]))
                tables.append(table.replace_schema_metadata(None))
        tables = fill_untyped(tables)
        if not tables or any(t.schema != tables[0].schema for t in tables):
            yield from bucket.plans
            return
        files = sorted(set(sources), key=lambda source: source.name)
        number = {source: i for i, source in enumerate(files)}
        for i, (table, source) in enumerate(zip(tables, sources, strict=True)):
            of_file = pa.array(np.full(table.num_rows, number[source], np.int64))
            tables[i] = table.append_column(FILE_COLUMN, of_file)
        merged = pa.concat_tables(tables)
        del tables
        place = merged.column(PLACE_COLUMN).to_numpy()
        order = np.argsort(place, kind="stable")
        place = place[order]
        planned = sum(plan.rows for plan in bucket.plans)
        if len(place) + lost != planned or (len(place) > 1 and (np.diff(place) < 1).any()):
            raise SurgeError(
                f"{planned} rows of a bucket were planned, {len(place)} came and {lost} are lost"
            )
        merged = merged.drop_columns([PLACE_COLUMN]).take(pa.array(order))
        name = f"{STAGING}/bucket-{bucket.name}.parquet"
        sink = pa.BufferOutputStream()
        pq.write_table(merged, sink, compression="lz4", row_group_size=ROW_GROUP_ROWS)
        self._store.put(name, sink.getvalue())
        source = SourceFile(self._store.url_of(name), "", name, bucket.name, "parquet", None)
        yield from _moved(bucket.plans, (source, *files), place)

    def _batch(self, name: str, index: int) -> pa.Table:
        with (
            self._store.fs.open(self._store.path(name), "rb") as file,
            pa.ipc.open_file(file) as reader,
        ):
            return pa.Table.from_batches([reader.get_batch(index)])


def _moved(
    plans: tuple[SuperBatchPlan, ...], files: tuple[SourceFile, ...], place: np.ndarray
) -> Iterator[SuperBatchPlan]:
    """The plans with their slices in the bucket's file, whose rows hold the given places."""
    first = 0
    for plan in plans:
        segments = []
        for segment in plan.segments:
            lo, hi = np.searchsorted(place, [first, first + segment.rows]).tolist()
            slices = (Slice(0, lo, hi - lo),) if hi > lo else ()
            lost = segment.rows - (hi - lo)
            segments.append(dataclasses.replace(segment, slices=slices, lost=lost))
            first += segment.rows
        yield SuperBatchPlan(plan.id, files, tuple(segments))
