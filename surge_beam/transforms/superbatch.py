"""SuperBatches for ETL code: rows or small Arrow batches in, Arrow batches worth a device call out.

A batch is cut at ``min_rows``, never past ``max_rows`` or ``max_bytes``. Bounded input is batched
within a bundle, without a shuffle. Unbounded input has small bundles, so what a bundle gathers is
joined in keyed state, which a timer flushes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import apache_beam as beam
import numpy as np
import pyarrow as pa
import xxhash
from apache_beam.coders import BytesCoder, Coder, TimestampCoder, VarIntCoder, registry
from apache_beam.options.pipeline_options import StandardOptions
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    CombiningValueStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import BoundedWindow
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from surge_beam.policy.superbatch import Limits
from surge_beam.records import SurgeError
from surge_beam.transforms.columns import is_text

T = TypeVar("T")
Row = dict[str, Any]
Item: TypeAlias = Row | pa.RecordBatch

MIN_ROWS = 4096
MAX_ROWS = 32_768
# Flink's portable batch path fails near 10 MB
MAX_BYTES = 4 << 20
MAX_OPEN_WINDOWS = 16
# Batches that carry rows as they came have this column, and are joined with none that lack it.
PACKED = "__surge_packed_row"


class FormSuperBatches(beam.PTransform):
    """Forms Arrow batches of ``min_rows`` rows from rows or from smaller batches.

    Rows are dicts, ``beam.Row`` or named tuples; batches are ``pa.RecordBatch`` or ``pa.Table``.
    The result is a PCollection of ``pa.RecordBatch``: never empty, never past ``max_rows`` or
    ``max_bytes`` (as Arrow counts ``nbytes``), but for a single row that is larger by itself,
    which travels alone. A key or column that is missing becomes null; types are widened where
    nothing is lost, and where they cannot be brought together the batch is cut. A batch lies in
    the window of its rows, at the timestamp of the first one.

    Bounded input keeps the order of its rows within a bundle, and is not shuffled. Unbounded input
    is joined across bundles, flushed at the window's end and ``max_delay_secs`` after the first
    buffered row.

    Args:
      min_rows: rows at which a batch is cut; the last ones of a bundle or window hold fewer.
      max_rows, max_bytes: what a batch never passes.
      max_delay_secs: seconds a row of unbounded input waits at most, in processing time.
      shards: keys that unbounded input is spread over, each with a buffer of its own.

    Raises:
      ValueError: limits that contradict each other.
      SurgeError: on DaskRunner, which drops what a bundle's end yields; while running, a row that
        Arrow cannot hold.
    """

    def __init__(
        self,
        *,
        min_rows: int = MIN_ROWS,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_BYTES,
        max_delay_secs: float = 10.0,
        shards: int = 8,
    ) -> None:
        super().__init__()
        if max_delay_secs <= 0 or shards < 1:
            raise ValueError(f"{max_delay_secs=} must be above 0, {shards=} at least 1")
        self._limits = Limits(min_rows=min_rows, max_rows=max_rows, max_bytes=max_bytes)
        self._max_delay_secs = max_delay_secs
        self._shards = shards

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection[pa.RecordBatch]:
        refuse_dask(pcoll.pipeline)
        formed = pcoll | "InBundle" >> beam.ParDo(FormInBundle(self._limits)).with_output_types(
            pa.RecordBatch
        )
        if pcoll.is_bounded:
            return formed
        return (
            formed
            | "Shard" >> beam.ParDo(_Shard(self._shards)).with_output_types(tuple[int, bytes])
            | "AcrossBundles"
            >> beam.ParDo(_FormAcrossBundles(self._limits, self._max_delay_secs)).with_output_types(
                pa.RecordBatch
            )
        )


def refuse_dask(pipeline: beam.Pipeline) -> None:
    """Raises SurgeError on DaskRunner: it drops what ``finish_bundle`` yields, without a word."""
    named = str(pipeline.options.view_as(StandardOptions).runner or "")
    if "dask" in f"{named} {type(pipeline.runner).__name__}".lower():
        raise SurgeError(
            "DaskRunner drops what a bundle's end yields, so rows would be lost; use another runner"
        )


def fits(limits: Limits, rows: int, nbytes: int) -> bool:
    """Whether a batch may be that large."""
    return rows <= limits.max_rows and nbytes <= limits.max_bytes


def is_full(limits: Limits, rows: int, nbytes: int) -> bool:
    """Whether a batch is large enough to be cut."""
    return rows >= limits.min_rows or nbytes >= limits.max_bytes


class Accumulator(Generic[T]):
    """Gathers items in order and cuts groups of them; sizes come with the items.

    No group is empty, and none of more than one item passes ``max_rows`` or ``max_bytes``.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._clear()

    def add(self, item: T, rows: int, nbytes: int) -> list[list[T]]:
        """Takes an item and returns the groups, at most two, that it completes."""
        closed = []
        if self._items and not fits(self._limits, self._rows + rows, self._nbytes + nbytes):
            closed.append(self._clear())
        self._items.append(item)
        self._rows += rows
        self._nbytes += nbytes
        if is_full(self._limits, self._rows, self._nbytes):
            closed.append(self._clear())
        return closed

    def flush(self) -> list[list[T]]:
        """The last group, if there is one."""
        return [self._clear()] if self._items else []

    def _clear(self) -> list[T]:
        items = getattr(self, "_items", [])
        self._items: list[T] = []
        self._rows = self._nbytes = 0
        return items


class RecordBatchCoder(Coder):
    """Arrow IPC: unlike a pickle, it writes a slice's rows rather than its parent's buffers."""

    def encode(self, batch: pa.RecordBatch) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return sink.getvalue().to_pybytes()

    def decode(self, data: bytes) -> pa.RecordBatch:
        return pa.ipc.open_stream(data).read_next_batch()

    def is_deterministic(self) -> bool:
        return False

    def to_type_hint(self) -> type:
        return pa.RecordBatch


registry.register_coder(pa.RecordBatch, RecordBatchCoder)


class FormInBundle(beam.DoFn):
    """Batches the elements of a bundle, window by window, whether bounded or not."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def start_bundle(self) -> None:
        self._open: dict[BoundedWindow, Accumulator[tuple[Item, Timestamp]]] = {}

    def process(
        self,
        element: Any,
        window: Any = beam.DoFn.WindowParam,
        timestamp: Any = beam.DoFn.TimestampParam,
    ) -> Iterator[Any]:
        accumulator = self._open.get(window)
        if accumulator is None:
            if len(self._open) >= MAX_OPEN_WINDOWS:
                yield from self._flush(next(iter(self._open)))
            accumulator = self._open[window] = Accumulator(self._limits)
        for item, rows, nbytes in pieces(element, self._limits):
            yield from self._emit(accumulator.add((item, timestamp), rows, nbytes), window)

    def finish_bundle(self) -> Iterator[Any]:
        while self._open:
            yield from self._flush(next(iter(self._open)))

    def _flush(self, window: BoundedWindow) -> Iterator[WindowedValue]:
        yield from self._emit(self._open.pop(window).flush(), window)

    def _emit(
        self, groups: list[list[tuple[Item, Timestamp]]], window: BoundedWindow
    ) -> Iterator[WindowedValue]:
        for group in groups:
            for batch in assemble((item for item, _ in group), self._limits):
                yield WindowedValue(batch, group[0][1], (window,))


class _Shard(beam.DoFn):
    """Keys batches by their content, so that a retry gives the same key."""

    def __init__(self, shards: int) -> None:
        self._shards = shards

    def process(self, batch: pa.RecordBatch) -> Iterator[tuple[int, bytes]]:
        data = RecordBatchCoder().encode(batch)
        yield xxhash.xxh3_64_intdigest(data) % self._shards, data


class _Sum(beam.CombineFn):
    def create_accumulator(self) -> int:
        return 0

    def add_input(self, accumulator: int, value: int) -> int:
        return accumulator + value

    def merge_accumulators(self, accumulators: Iterable[int]) -> int:
        return sum(accumulators)

    def extract_output(self, accumulator: int) -> int:
        return accumulator


class _FormAcrossBundles(beam.DoFn):
    """Joins the small batches of a shard in state; every flush empties the state."""

    BATCHES = beam.DoFn.StateParam(BagStateSpec("batches", BytesCoder()))
    # Where the delay's timer holds the watermark, so that what is flushed is not late.
    FIRST = beam.DoFn.StateParam(ReadModifyWriteStateSpec("first", TimestampCoder()))
    # Reading the bag for its size at every element would be quadratic.
    ROWS = beam.DoFn.StateParam(CombiningValueStateSpec("rows", VarIntCoder(), _Sum()))
    BYTES = beam.DoFn.StateParam(CombiningValueStateSpec("bytes", VarIntCoder(), _Sum()))
    WINDOW_END = TimerSpec("window_end", TimeDomain.WATERMARK)
    DELAY = TimerSpec("delay", TimeDomain.REAL_TIME)
    SET_WINDOW_END = beam.DoFn.TimerParam(WINDOW_END)
    SET_DELAY = beam.DoFn.TimerParam(DELAY)

    def __init__(self, limits: Limits, max_delay_secs: float) -> None:
        self._limits = limits
        self._max_delay_secs = max_delay_secs

    def process(
        self,
        element: tuple[int, bytes],
        window: Any = beam.DoFn.WindowParam,
        timestamp: Any = beam.DoFn.TimestampParam,
        batches: Any = BATCHES,
        first: Any = FIRST,
        rows: Any = ROWS,
        nbytes: Any = BYTES,
        window_end: Any = SET_WINDOW_END,
        delay: Any = SET_DELAY,
    ) -> Iterator[Any]:
        batch = RecordBatchCoder().decode(element[1])
        held, size = rows.read(), nbytes.read()
        if held and not fits(self._limits, held + batch.num_rows, size + batch.nbytes):
            yield from self._flush(window, batches, first, rows, nbytes, delay)
            held = size = 0
        if not held:
            first.write(timestamp)
            # DirectRunner never fires the second one if it stands alone
            window_end.set(window.max_timestamp())
            delay.set(time.time() + self._max_delay_secs)
        batches.add(element[1])
        rows.add(batch.num_rows)
        nbytes.add(batch.nbytes)
        if is_full(self._limits, held + batch.num_rows, size + batch.nbytes):
            yield from self._flush(window, batches, first, rows, nbytes, delay)

    @on_timer(WINDOW_END)
    def at_window_end(
        self,
        window: Any = beam.DoFn.WindowParam,
        batches: Any = BATCHES,
        first: Any = FIRST,
        rows: Any = ROWS,
        nbytes: Any = BYTES,
        delay: Any = SET_DELAY,
    ) -> Iterator[Any]:
        yield from self._flush(window, batches, first, rows, nbytes, delay)

    @on_timer(DELAY)
    def after_delay(
        self,
        window: Any = beam.DoFn.WindowParam,
        batches: Any = BATCHES,
        first: Any = FIRST,
        rows: Any = ROWS,
        nbytes: Any = BYTES,
        delay: Any = SET_DELAY,
    ) -> Iterator[Any]:
        yield from self._flush(window, batches, first, rows, nbytes, delay)

    def _flush(
        self,
        window: BoundedWindow,
        batches: Any,
        first: Any,
        rows: Any,
        nbytes: Any,
        delay: Any,
    ) -> Iterator[WindowedValue]:
        timestamp = first.read()
        held = [RecordBatchCoder().decode(data) for data in batches.read()]
        batches.clear()
        first.clear()
        rows.clear()
        nbytes.clear()
        delay.clear()
        for batch in assemble(held, self._limits):
            yield WindowedValue(batch, timestamp, (window,))


def as_dict(row: Any) -> Row:
    """A dict, ``beam.Row`` or named tuple as a dict.

    Raises:
      SurgeError: for anything else.
    """
    if isinstance(row, dict):
        return row
    if isinstance(row, beam.Row):
        return dict(row.as_dict())
    if isinstance(row, tuple) and hasattr(row, "_asdict"):
        return dict(row._asdict())
    if isinstance(row, Mapping):
        return dict(row)
    raise SurgeError(
        f"a {type(row).__name__} is no row; rows are dicts, beam.Row or named tuples,"
        " batches are pa.RecordBatch or pa.Table"
    )


def pieces(element: Any, limits: Limits) -> Iterator[tuple[Item, int, int]]:
    """An element as items within the limits, each with its rows and (of a row: about) its bytes."""
    if isinstance(element, (pa.RecordBatch, pa.Table)):
        batches = element.to_batches() if isinstance(element, pa.Table) else [element]
        for batch in batches:
            for piece in split(batch, limits.max_rows, limits.max_bytes):
                yield piece, piece.num_rows, piece.nbytes
    else:
        row = as_dict(element)
        yield row, 1, estimated_bytes(row)


def estimated_bytes(value: Any) -> int:
    """About what a value takes in Arrow."""
    if isinstance(value, str):
        return 4 + (len(value) if value.isascii() else len(value.encode("utf-8", "replace")))
    if isinstance(value, (bytes, bytearray)):
        return 4 + len(value)
    if isinstance(value, np.ndarray):
        return int(4 + value.nbytes)
    if isinstance(value, dict):
        return sum(map(estimated_bytes, value.values()))
    if isinstance(value, (list, tuple, set)):
        return 4 + sum(map(estimated_bytes, value))
    return 8


def split(batch: pa.RecordBatch, max_rows: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """Slices of a batch, none empty, each within the limits or a single row."""
    start = 0
    while start < batch.num_rows:
        fit = min(max_rows, batch.num_rows - start)
        if batch.slice(start, fit).nbytes > max_bytes:
            low, high = 1, fit
            while high - low > 1:
                middle = (low + high) // 2
                if batch.slice(start, middle).nbytes <= max_bytes:
                    low = middle
                else:
                    high = middle
            fit = low
        yield batch if fit == batch.num_rows else batch.slice(start, fit)
        start += fit


def assemble(items: Iterable[Item], limits: Limits) -> list[pa.RecordBatch]:
    """Joins rows and batches, in order, into as few batches as schemas and limits allow.

    Raises:
      SurgeError: a row that Arrow cannot hold.
    """
    batches: list[pa.RecordBatch] = []
    for is_row, run in itertools.groupby(items, lambda item: isinstance(item, dict)):
        group: list[Any] = list(run)
        batches.extend(rows_to_batches(group) if is_row else group)
    return [
        piece
        for joined in join_batches(batches)
        for piece in split(joined, limits.max_rows, limits.max_bytes)
    ]


def rows_to_batches(rows: list[Row]) -> list[pa.RecordBatch]:
    """Rows as batches, in order: one, or more where values of a column are of several types.

    Raises:
      SurgeError: a row that Arrow cannot hold.
    """
    names = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    if not names:
        raise SurgeError("a row without columns cannot be put into a batch")
    return _convert(rows, names)


def _convert(rows: list[Row], names: list[str]) -> list[pa.RecordBatch]:
    try:
        columns = [_column([row.get(name) for row in rows]) for name in names]
        return [pa.RecordBatch.from_arrays(columns, names)]
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        if len(rows) == 1:
            raise SurgeError(f"Arrow cannot hold the row: {error}") from error
    middle = len(rows) // 2
    return _convert(rows[:middle], names) + _convert(rows[middle:], names)


def _column(values: list[Any]) -> pa.Array:
    array = pa.array(values)
    if pa.types.is_binary(array.type) and any(isinstance(value, str) for value in values):
        raise TypeError("a column holds both text and bytes")
    return array


def join_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Joins neighbours whose schemas can be unified."""
    group: list[pa.RecordBatch] = []
    schema: pa.Schema | None = None
    for batch in batches:
        both = batch.schema if schema is None else _unify(schema, batch.schema)
        if both is None:
            yield from _concatenate(group)
            group, both = [], batch.schema
        group.append(batch)
        schema = both
    yield from _concatenate(group)


def _unify(left: pa.Schema, right: pa.Schema) -> pa.Schema | None:
    """A schema that holds both, or None."""
    if left.equals(right):
        return left
    if (PACKED in left.names) != (PACKED in right.names):
        return None
    try:
        both = pa.unify_schemas([left, right], promote_options="permissive")
    except pa.ArrowException:
        return None
    # Arrow would widen text to bytes
    text = {f.name for f in [*left, *right] if is_text(f.type)}
    return both if all(is_text(both.field(name).type) for name in text) else None


def _concatenate(group: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if len(group) < 2:
        yield from group
        return
    try:
        if all(batch.schema.equals(group[0].schema) for batch in group):
            table = pa.Table.from_batches(group)
        else:
            tables = [pa.Table.from_batches([_nullable(batch)]) for batch in group]
            table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException:
        # a value that its column's wider type cannot hold, such as 2**60 + 1 as a float
        yield from group
        return
    yield from table.combine_chunks().to_batches()


def _nullable(batch: pa.RecordBatch) -> pa.RecordBatch:
    fields = [field.with_nullable(True) for field in batch.schema]
    return pa.RecordBatch.from_arrays(batch.columns, schema=pa.schema(fields))
