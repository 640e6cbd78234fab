"""Bringing prompts that share a prefix together: ranges over the prefix paths, then superbatches.

Elements are Arrow batches of ``prompt_batch.SCHEMA``, encoded by ``prompt_batch.encode``. Columns
beside those of the schema travel along, if all batches have them.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import xxhash
from apache_beam.coders import BytesCoder, PickleCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from surge_beam.policy.prefix_digests import path_key
from surge_beam.policy.prefix_ranges import (
    form_superbatches,
    leading_key,
    range_cuts,
    range_of,
)
from surge_beam.records import pack, unpack
from surge_beam.transforms.prompt_batch import (
    decode,
    encode,
    join,
    prefix_paths,
    prompt_tokens,
    rows_where,
)

SAMPLE_ROWS = 100_000
SAMPLE_BYTES = 64 << 20
# int32 tokens of a range are sorted in one worker's memory
RANGE_TOKENS = 4_000_000
MAX_RANGES = 4096
UNBOUNDED_CHUNKS = 1
MAX_DELAY_SECS = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """What a superbatch of prompts never passes, but for a row that does so alone.

    Attributes:
      rows: prompts.
      tokens: tokens of all prompts.
      kv_bytes: predicted keys and values of prompts and outputs.
      kv_bytes_per_token: of the model.
      default_output: tokens decoded that are predicted for a row without ``max_tokens``.
    """

    rows: int = 1024
    tokens: int = 262_144
    kv_bytes: int = 16 << 30
    kv_bytes_per_token: int = 1 << 15
    default_output: int = 256


def id_digest(custom_id: str, seed: int = 0) -> int:
    """64-bit digest of an id."""
    return xxhash.xxh3_64_intdigest(custom_id.encode("utf-8", "surrogatepass"), seed)


class PartitionByPrefix(beam.PTransform):
    """Keys prompts by a range of the prefix tree of the whole dataset.

    Of bounded input the cuts are weighted quantiles over (prefix path, id), so that ranges have
    equal tokens and neighbours stay together: a prefix that many rows share is spread over as many
    ranges as it needs, and rare ones pool (``policy.prefix_ranges.range_cuts``). Unbounded input
    has no quantiles; there the key is a digest of the leading chunk.

    Takes a PCollection of prompt batches, as ``pa.RecordBatch`` or as the bytes of
    ``prompt_batch.encode``, and gives PCollection[KV[int, bytes]]: parts of them by range, encoded.
    Windows are kept; the ranges are those of all windows together::

        prompts = prompt_batch(["a", "a"], [0, 1], ["id-0", "id-1"], token_ids, sampling)
        (
            p
            | beam.Create([prompts])
            | PartitionByPrefix(ranges=8)
            | FormPrefixBatches(BatchLimits(rows=512))
            | beam.Map(prompt_batch.decode)
        )

    Args:
      ranges: how many; None takes one for every ``RANGE_TOKENS`` tokens.
      shards: keys of unbounded input.

    Raises:
      ValueError: if ``ranges`` or ``shards`` is below 1.
    """

    def __init__(self, ranges: int | None = None, shards: int = 64):
        super().__init__()
        if ranges is not None and ranges < 1:
            raise ValueError(f"ranges must be at least 1, not {ranges}")
        if shards < 1:
            raise ValueError(f"shards must be at least 1, not {shards}")
        self._ranges = ranges
        self._shards = shards

    def expand(self, batches: beam.PCollection) -> beam.PCollection:
        if not batches.is_bounded:
            return batches | "ByLeadingChunk" >> beam.ParDo(
                ByLeadingChunk(self._shards)
            ).with_output_types(tuple[int, bytes])
        cuts = (
            batches
            | "Sample" >> beam.ParDo(_Sample()).with_output_types(bytes)
            | "AllWindows" >> beam.WindowInto(GlobalWindows())
            | "BottomK" >> beam.CombineGlobally(_BottomK(SAMPLE_ROWS))
            | "Cuts" >> beam.Map(_cuts, self._ranges).with_output_types(bytes)
        )
        return batches | "ByRange" >> beam.ParDo(
            _ByRange(), beam.pvalue.AsSingleton(cuts)
        ).with_output_types(tuple[int, bytes])


def _batch(element: pa.RecordBatch | bytes) -> pa.RecordBatch:
    return element if isinstance(element, pa.RecordBatch) else decode(element)


# a drawn number, a path, tokens
_Sampled = tuple[int, bytes, int]


class _Sample(beam.DoFn):
    """A number drawn from its id, the path and the tokens of every prompt."""

    def process(self, element: pa.RecordBatch | bytes) -> Iterator[bytes]:
        batch = _batch(element)
        # not the digest that ends the path, or the sample would be one end of every path; and
        # within 63 bits, which is what Beam's integers hold
        drawn = [id_digest(x, seed=1) >> 1 for x in batch.column("custom_id").to_pylist()]
        rows = zip(drawn, _row_paths(batch), prompt_tokens(batch).tolist(), strict=True)
        yield pack(list(rows))


class _BottomK(beam.CombineFn):
    """The rows with the smallest numbers, which are a sample that a retry draws again; and how
    many tokens there are in all.
    """

    def __init__(self, size: int):
        super().__init__()
        self._size = size

    def create_accumulator(self) -> tuple[int, list[_Sampled]]:
        return 0, []

    def add_input(
        self, accumulator: tuple[int, list[_Sampled]], sampled: bytes
    ) -> tuple[int, list[_Sampled]]:
        total, rows = accumulator
        more = unpack(sampled)
        rows.extend(more)
        total += sum(tokens for _, _, tokens in more)
        return total, rows if len(rows) <= 2 * self._size else self._smallest(rows)

    def merge_accumulators(
        self, accumulators: Iterable[tuple[int, list[_Sampled]]]
    ) -> tuple[int, list[_Sampled]]:
        total, rows = 0, list[_Sampled]()
        for more, others in accumulators:
            total, rows = total + more, self._smallest([*rows, *others])
        return total, rows

    def compact(self, accumulator: tuple[int, list[_Sampled]]) -> tuple[int, list[_Sampled]]:
        return accumulator[0], self._smallest(accumulator[1])

    def _smallest(self, rows: list[_Sampled]) -> list[_Sampled]:
        rows = heapq.nsmallest(self._size, rows)
        held = np.cumsum([len(path) for _, path, _ in rows])
        return rows[: max(1, int(np.searchsorted(held, SAMPLE_BYTES, side="right")))]

    def extract_output(self, accumulator: tuple[int, list[_Sampled]]) -> bytes:
        total, rows = accumulator
        return pack((total, self._smallest(rows)))


def _cuts(sampled: bytes, ranges: int | None) -> bytes:
    total, rows = unpack(sampled)
    wanted = ranges or min(MAX_RANGES, -(-total // RANGE_TOKENS)) or 1
    return pack(range_cuts([(path, tokens) for _, path, tokens in rows], wanted))


def _row_paths(batch: pa.RecordBatch) -> list[bytes]:
    """Prefix paths that end with the row's id, so that rows of one prompt can be cut apart."""
    ids = batch.column("custom_id").to_pylist()
    paths = zip(prefix_paths(batch), ids, strict=True)
    return [path + path_key([id_digest(custom_id)]) for path, custom_id in paths]


class _ByRange(beam.DoFn):
    def process(
        self, element: pa.RecordBatch | bytes, packed: bytes
    ) -> Iterator[tuple[int, bytes]]:
        batch, cuts = _batch(element), unpack(packed)
        yield from _by_key(batch, [range_of(cuts, path, 0) for path in _row_paths(batch)])


class ByLeadingChunk(beam.DoFn):
    """Keys the rows of a batch by a digest of their first chunk."""

    def __init__(self, shards: int):
        self._shards = shards

    def process(self, element: pa.RecordBatch | bytes) -> Iterator[tuple[int, bytes]]:
        batch = _batch(element)
        leading = [leading_key(path, UNBOUNDED_CHUNKS) for path in prefix_paths(batch)]
        yield from _by_key(batch, [xxhash.xxh3_64_intdigest(x) % self._shards for x in leading])


def _by_key(batch: pa.RecordBatch, keys: list[int]) -> Iterator[tuple[int, bytes]]:
    which = np.array(keys, np.int64)
    for key in np.unique(which).tolist():
        yield key, encode(rows_where(batch, which == key))


class FormPrefixBatches(beam.PTransform):
    """Forms superbatches of prompts that share prefixes.

    Takes PCollection[KV[int, bytes]] as ``PartitionByPrefix`` gives it (there is the example). A
    range is sorted by prefix path, which is a depth-first walk of its prefix tree, and cut where
    neighbours share least within the limits. Gives PCollection[bytes], encoded prompt batches,
    each a superbatch of one window. They are shuffled, so that they are decoded side by side and a
    retry sees the same ones.

    A range of bounded input is grouped as a whole. Of unbounded input a key's prompts are held in
    state until they reach one of the limits, until the window ends, or until ``max_delay_secs``
    after the first of them, whatever the input's trigger; windows that merge are not to be had
    there.

    Args:
      limits: of a superbatch, all at once.
      max_delay_secs: seconds a prompt of unbounded input waits at most, in processing time.

    Raises:
      ValueError: if ``max_delay_secs`` is not above 0.
    """

    def __init__(self, limits: BatchLimits | None = None, max_delay_secs: float = MAX_DELAY_SECS):
        super().__init__()
        if max_delay_secs <= 0:
            raise ValueError(f"max_delay_secs must be above 0, not {max_delay_secs}")
        self._limits = limits or BatchLimits()
        self._max_delay_secs = max_delay_secs

    def expand(self, keyed: beam.PCollection) -> beam.PCollection:
        if keyed.is_bounded:
            formed = (
                keyed
                | "GroupRange" >> beam.GroupByKey()
                | "Form" >> beam.ParDo(_Form(self._limits)).with_output_types(bytes)
            )
        else:
            formed = keyed | "FormAsTheyCome" >> beam.ParDo(
                _FormAsTheyCome(self._limits, self._max_delay_secs)
            ).with_output_types(bytes)
        return formed | "SpreadBatches" >> beam.Reshuffle()


class _Form(beam.DoFn):
    def __init__(self, limits: BatchLimits):
        self._limits = limits

    def process(self, grouped: tuple[int, Iterable[bytes]]) -> Iterator[bytes]:
        yield from _superbatches(grouped[1], self._limits)


@dataclasses.dataclass(frozen=True)
class _Held:
    """What a key holds in state.

    Attributes:
      sizes: int64 [3]: rows, tokens, bytes of keys and values.
      earliest: of the timestamps.
      due: seconds since 1970 at which it leaves.
    """

    sizes: np.ndarray
    earliest: Timestamp
    due: float


class _FormAsTheyCome(beam.DoFn):
    """Holds the prompts of a key in state; every flush empties it."""

    PARTS = beam.DoFn.StateParam(BagStateSpec("parts", BytesCoder()))
    HELD = beam.DoFn.StateParam(ReadModifyWriteStateSpec("held", PickleCoder()))
    WINDOW_END = TimerSpec("window_end", TimeDomain.WATERMARK)
    DELAY = TimerSpec("delay", TimeDomain.REAL_TIME)
    SET_WINDOW_END = beam.DoFn.TimerParam(WINDOW_END)
    SET_DELAY = beam.DoFn.TimerParam(DELAY)

    def __init__(self, limits: BatchLimits, max_delay_secs: float):
        self._limits = limits
        self._most = np.array([limits.rows, limits.tokens, limits.kv_bytes])
        self._max_delay_secs = max_delay_secs

    def process(
        self,
        element: tuple[int, bytes],
        window: Any = beam.DoFn.WindowParam,
        timestamp: Any = beam.DoFn.TimestampParam,
        parts: Any = PARTS,
        held: Any = HELD,
        window_end: Any = SET_WINDOW_END,
        delay: Any = SET_DELAY,
    ) -> Iterator[WindowedValue]:
        batch = decode(element[1])
        sizes = np.array(
            [batch.num_rows, prompt_tokens(batch).sum(), kv_bytes(batch, self._limits).sum()]
        )
        found: _Held | None = held.read()
        if found is not None and (found.sizes + sizes > self._most).any():
            yield from self._flush(window, parts, held, delay)
            found = None
        if found is None:
            found = _Held(np.zeros(3, np.int64), timestamp, time.time() + self._max_delay_secs)
            # DirectRunner never fires the other one if it stands alone
            window_end.set(window.max_timestamp())
            delay.set(found.due)
        elif timestamp < found.earliest:
            # the timer holds the watermark where it was set
            delay.set(found.due)
        found = _Held(found.sizes + sizes, min(found.earliest, timestamp), found.due)
        parts.add(element[1])
        held.write(found)
        if (found.sizes >= self._most).any():
            yield from self._flush(window, parts, held, delay)

    @on_timer(WINDOW_END)
    def at_window_end(
        self,
        window: Any = beam.DoFn.WindowParam,
        parts: Any = PARTS,
        held: Any = HELD,
        delay: Any = SET_DELAY,
    ) -> Iterator[WindowedValue]:
        yield from self._flush(window, parts, held, delay)

    @on_timer(DELAY)
    def after_delay(
        self,
        window: Any = beam.DoFn.WindowParam,
        parts: Any = PARTS,
        held: Any = HELD,
        delay: Any = SET_DELAY,
    ) -> Iterator[WindowedValue]:
        yield from self._flush(window, parts, held, delay)

    def _flush(self, window: Any, parts: Any, held: Any, delay: Any) -> Iterator[WindowedValue]:
        found: _Held | None = held.read()
        if found is None:
            return
        data = list(parts.read())
        parts.clear()
        held.clear()
        delay.clear()
        for batch in _superbatches(data, self._limits):
            yield WindowedValue(batch, found.earliest, (window,))


def _superbatches(parts: Iterable[bytes], limits: BatchLimits) -> Iterator[bytes]:
    for batch in superbatches(join(map(decode, parts)), limits):
        yield encode(batch)


def superbatches(batch: pa.RecordBatch, limits: BatchLimits) -> Iterator[pa.RecordBatch]:
    """Cuts the prompts of a range into superbatches, in path order."""
    paths, ids = prefix_paths(batch), batch.column("custom_id").to_pylist()
    order = sorted(range(batch.num_rows), key=lambda i: (paths[i], id_digest(ids[i]), ids[i]))
    batch = rows_where(batch, np.array(order, np.int64))
    cut = form_superbatches(
        [paths[i] for i in order],
        prompt_tokens(batch),
        kv_bytes(batch, limits),
        max_rows=limits.rows,
        max_tokens=limits.tokens,
        max_kv_bytes=limits.kv_bytes,
    )
    for rows in cut:
        yield batch.slice(rows.start, len(rows))


def kv_bytes(batch: pa.RecordBatch, limits: BatchLimits) -> np.ndarray:
    """Bytes that keys and values of a prompt and its output are predicted to take, int64 [n]."""
    outputs = [_outputs(text, limits) for text in batch.column("sampling").to_pylist()]
    return (prompt_tokens(batch) + np.array(outputs, np.int64)) * limits.kv_bytes_per_token


def _outputs(sampling: str, limits: BatchLimits) -> int:
    most = json.loads(sampling)["max_tokens"]
    return limits.default_output if most is None else min(most, limits.default_output)
