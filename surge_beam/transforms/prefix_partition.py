"""Bringing prompts that share a prefix together: ranges over the prefix paths, then superbatches.

Elements are Arrow batches of ``prompt_batch.SCHEMA``, encoded by ``prompt_batch.encode``.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
from collections.abc import Iterable, Iterator

import apache_beam as beam
import numpy as np
import pyarrow as pa
import xxhash

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
# int32 tokens of a range are sorted in one worker's memory
RANGE_TOKENS = 4_000_000
MAX_RANGES = 4096
UNBOUNDED_CHUNKS = 1


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


def id_digest(custom_id: str) -> int:
    """64-bit digest of an id, which places rows of one prompt."""
    return xxhash.xxh3_64_intdigest(custom_id.encode("utf-8", "surrogatepass"))


class PartitionByPrefix(beam.PTransform):
    """Keys prompts by a range of the prefix tree of the whole dataset.

    Of bounded input the cuts are weighted quantiles over (prefix path, id), so that ranges have
    equal tokens and neighbours stay together: a prefix that many rows share is spread over as many
    ranges as it needs, and rare ones pool (``policy.prefix_ranges.range_cuts``). Unbounded input
    has no quantiles; there the key is a digest of the leading chunk.

    Takes PCollection[bytes], encoded prompt batches, and gives PCollection[KV[int, bytes]]: parts
    of them by range.

    Args:
      ranges: how many; None takes one for every ``RANGE_TOKENS`` tokens.
      shards: keys of unbounded input.
    """

    def __init__(self, ranges: int | None = None, shards: int = 64):
        super().__init__()
        if ranges is not None and ranges < 1:
            raise ValueError(f"ranges must be at least 1, not {ranges}")
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
            | "BottomK" >> beam.CombineGlobally(_BottomK(SAMPLE_ROWS))
            | "Cuts" >> beam.Map(_cuts, self._ranges).with_output_types(bytes)
        )
        return batches | "ByRange" >> beam.ParDo(
            _ByRange(), beam.pvalue.AsSingleton(cuts)
        ).with_output_types(tuple[int, bytes])


class _Sample(beam.DoFn):
    """Id digest, path and tokens of every prompt."""

    def process(self, data: bytes) -> Iterator[bytes]:
        batch = decode(data)
        ids = map(id_digest, batch.column("custom_id").to_pylist())
        rows = zip(ids, prefix_paths(batch), prompt_tokens(batch).tolist(), strict=True)
        yield pack(list(rows))


class _BottomK(beam.CombineFn):
    """The rows with the smallest digests, which are a sample that a retry draws again; and how
    many tokens there are in all.
    """

    def __init__(self, size: int):
        super().__init__()
        self._size = size

    def create_accumulator(self) -> bytes:
        # packed, since 64-bit digests are more than Beam's own integers hold
        return pack((0, []))

    def add_input(self, accumulator: bytes, sampled: bytes) -> bytes:
        rows = unpack(sampled)
        return self.merge_accumulators([accumulator, pack((sum(r[2] for r in rows), rows))])

    def merge_accumulators(self, accumulators: Iterable[bytes]) -> bytes:
        total, rows = 0, list[tuple[int, bytes, int]]()
        for more, others in map(unpack, accumulators):
            total += more
            rows += others
        return pack((total, heapq.nsmallest(self._size, rows)))

    def extract_output(self, accumulator: bytes) -> bytes:
        return accumulator


def _cuts(sampled: bytes, ranges: int | None) -> bytes:
    total, rows = unpack(sampled)
    wanted = ranges or min(MAX_RANGES, -(-total // RANGE_TOKENS)) or 1
    return pack(range_cuts([(path, tokens) for _, path, tokens in rows], wanted))


class _ByRange(beam.DoFn):
    def process(self, data: bytes, packed: bytes) -> Iterator[tuple[int, bytes]]:
        batch, cuts = decode(data), unpack(packed)
        ids = map(id_digest, batch.column("custom_id").to_pylist())
        keys = [range_of(cuts, p, i) for p, i in zip(prefix_paths(batch), ids, strict=True)]
        yield from _by_key(batch, keys)


class ByLeadingChunk(beam.DoFn):
    """Keys the rows of a batch by a digest of their first chunk."""

    def __init__(self, shards: int):
        self._shards = shards

    def process(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        batch = decode(data)
        leading = [leading_key(path, UNBOUNDED_CHUNKS) for path in prefix_paths(batch)]
        yield from _by_key(batch, [xxhash.xxh3_64_intdigest(x) % self._shards for x in leading])


def _by_key(batch: pa.RecordBatch, keys: list[int]) -> Iterator[tuple[int, bytes]]:
    which = np.array(keys, np.int64)
    for key in np.unique(which).tolist():
        yield key, encode(rows_where(batch, which == key))


class FormPrefixBatches(beam.PTransform):
    """Forms superbatches of prompts that share prefixes.

    Takes PCollection[KV[int, bytes]] as ``PartitionByPrefix`` gives it. A range is sorted by
    prefix path, which is a depth-first walk of its prefix tree, and cut where neighbours share
    least within the limits. Gives PCollection[bytes], encoded prompt batches, each a superbatch.
    They are shuffled, so that they are decoded side by side and a retry sees the same ones.

    Args:
      limits: of a superbatch, all at once.
    """

    def __init__(self, limits: BatchLimits):
        super().__init__()
        self._limits = limits

    def expand(self, keyed: beam.PCollection) -> beam.PCollection:
        return (
            keyed
            | "GroupRange" >> beam.GroupByKey()
            | "Form" >> beam.ParDo(_Form(self._limits)).with_output_types(bytes)
            | "SpreadBatches" >> beam.Reshuffle()
        )


class _Form(beam.DoFn):
    def __init__(self, limits: BatchLimits):
        self._limits = limits

    def process(self, grouped: tuple[int, Iterable[bytes]]) -> Iterator[bytes]:
        for batch in superbatches(join(map(decode, grouped[1])), self._limits):
            yield encode(batch)


def superbatches(batch: pa.RecordBatch, limits: BatchLimits) -> Iterator[pa.RecordBatch]:
    """Cuts the prompts of a range into superbatches, in path order."""
    paths, ids = prefix_paths(batch), batch.column("custom_id").to_pylist()
    order = sorted(range(batch.num_rows), key=lambda i: (paths[i], id_digest(ids[i]), ids[i]))
    batch = rows_where(batch, np.array(order, np.int64))
    tokens = prompt_tokens(batch)
    outputs = np.array([_outputs(text, limits) for text in batch.column("sampling").to_pylist()])
    cut = form_superbatches(
        [paths[i] for i in order],
        tokens,
        (tokens + outputs) * limits.kv_bytes_per_token,
        max_rows=limits.rows,
        max_tokens=limits.tokens,
        max_kv_bytes=limits.kv_bytes,
    )
    for rows in cut:
        yield batch.slice(rows.start, len(rows))


def _outputs(sampling: str, limits: BatchLimits) -> int:
    most = json.loads(sampling)["max_tokens"]
    return limits.default_output if most is None else min(most, limits.default_output)
