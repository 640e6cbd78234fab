"""Ranges over the prefix paths of a dataset, and superbatches of prompts that share them."""

from __future__ import annotations

import itertools
import pickle
import random
import tempfile
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.policy.prefix_digests import CHUNK
from surge_beam.policy.prefix_ranges import tokens_saved
from surge_beam.records import SamplingParams, unpack
from surge_beam.transforms.prefix_partition import (
    BatchLimits,
    FormPrefixBatches,
    PartitionByPrefix,
    _BottomK,
    _Sample,
    kv_bytes,
    superbatches,
)
from surge_beam.transforms.prompt_batch import (
    decode,
    encode,
    join,
    prefix_paths,
    prompt_batch,
    prompt_tokens,
    sampling_json,
)


def batch_of(prompts: Sequence[Sequence[int]], most: Sequence[int | None] = ()) -> pa.RecordBatch:
    numbers = range(len(prompts))
    sampling = [SamplingParams(max_tokens=most[i] if most else 4) for i in numbers]
    return prompt_batch(
        [f"owner {i % 3}" for i in numbers],
        list(numbers),
        [f"id {i}" for i in numbers],
        prompts,
        [sampling_json(s) for s in sampling],
    )


def workload(rows: int, hot: float, seed: int = 0) -> list[list[int]]:
    """Prompts of which a share has one instruction, and the others many small ones."""
    rng = random.Random(seed)
    prefixes = [[1000 + k] * (CHUNK * rng.randrange(1, 5)) for k in range(40)]
    found = []
    for i in range(rows):
        prefix = [7] * (8 * CHUNK) if rng.random() < hot else rng.choice(prefixes)
        found.append([*prefix, i, *([i % 50] * rng.randrange(CHUNK))])
    return found


# One token repeated, so that prompts share much and tokens are few to draw.
PROMPTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4 * CHUNK), st.integers(0, 3)).map(
        lambda x: [x[0]] * x[1] + [9] * x[2]
    ),
    max_size=25,
)


@settings(max_examples=80)
@given(
    PROMPTS,
    st.integers(1, 9),
    st.integers(1, 6 * CHUNK),
    st.integers(1, 8 * CHUNK),
    st.none() | st.integers(1, 30),
)
def test_superbatches_hold_every_row_once_within_limits(
    prompts: list[list[int]], rows: int, tokens: int, kv: int, most: int | None
) -> None:
    limits = BatchLimits(
        rows=rows, tokens=tokens, kv_bytes=kv * 10, kv_bytes_per_token=10, default_output=20
    )
    batch = batch_of(prompts, [most] * len(prompts))
    found = list(superbatches(batch, limits))
    numbers = [n for b in found for n in b.column("row").to_pylist()]
    assert sorted(numbers) == list(range(len(prompts)))
    given_rows = {row["row"]: row for row in batch.to_pylist()}
    predicted = min(most, 20) if most is not None else 20
    for part in found:
        assert part.num_rows
        assert all(row == given_rows[row["row"]] for row in part.to_pylist())
        lengths = prompt_tokens(part)
        sizes = [part.num_rows, lengths.sum(), (lengths + predicted).sum() * 10]
        assert kv_bytes(part, limits).sum() == sizes[2]
        limit = [limits.rows, limits.tokens, limits.kv_bytes]
        assert part.num_rows == 1 or all(s <= m for s, m in zip(sizes, limit, strict=True))
    paths = [path for part in found for path in prefix_paths(part)]
    assert paths == sorted(paths), "a depth-first walk"


@settings(max_examples=30)
@given(PROMPTS, st.randoms(use_true_random=False))
def test_superbatches_do_not_depend_on_arrival(
    prompts: list[list[int]], rng: random.Random
) -> None:
    batch = batch_of(prompts)
    order = list(range(len(prompts)))
    rng.shuffle(order)
    moved = batch.take(pa.array(order, pa.int64()))
    limits = BatchLimits(rows=3, tokens=200)
    one, two = ([b.to_pylist() for b in superbatches(x, limits)] for x in (batch, moved))
    assert one == two


class _Kept:
    """Gathers the elements of a collection in a folder."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()

    def step(self) -> beam.PTransform:
        return beam.Map(_keep, self._folder.name)

    def read(self) -> list[Any]:
        return [pickle.loads(path.read_bytes()) for path in Path(self._folder.name).iterdir()]


def _keep(element: Any, folder: str) -> None:
    Path(folder, uuid.uuid4().hex).write_bytes(pickle.dumps(element))


def ranges_of(
    prompts: list[list[int]], ranges: int | None, pieces: int = 7
) -> dict[int, pa.RecordBatch]:
    """Range -> its rows, as the transform keys them on FnApiRunner."""
    batch = batch_of(prompts)
    cuts = np.linspace(0, len(prompts), pieces + 1).astype(int).tolist()
    encoded = [encode(batch.slice(a, b - a)) for a, b in itertools.pairwise(cuts)]
    kept = _Kept()
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        _ = pipeline | beam.Create(encoded) | PartitionByPrefix(ranges) | kept.step()
    found: dict[int, list[pa.RecordBatch]] = {}
    for key, data in kept.read():
        found.setdefault(key, []).append(decode(data))
    return {key: join(parts) for key, parts in found.items()}


@pytest.mark.parametrize("hot", [0.3, 0.9])
def test_ranges_are_balanced_and_hold_every_row_once(hot: float) -> None:
    """Also when one prefix holds nine of ten rows."""
    prompts = workload(4000, hot)
    found = ranges_of(prompts, 8)
    rows = [row for b in found.values() for row in b.to_pylist()]
    assert sorted(row["row"] for row in rows) == list(range(4000))
    assert all(row["prompt_ids"] == prompts[row["row"]] for row in rows)
    loads = [int(prompt_tokens(b).sum()) for b in found.values()]
    assert len(loads) == 8 and max(loads) <= 1.15 * sum(loads) / 8
    # and lose little of what the whole tree saves
    paths = prefix_paths(batch_of(prompts))
    whole = tokens_saved(paths, [range(4000)])
    kept = tokens_saved(paths, [b.column("row").to_pylist() for b in found.values()])
    assert kept >= 0.97 * whole
    shuffled = list(range(4000))
    random.Random(0).shuffle(shuffled)
    assert kept > tokens_saved(paths, [shuffled[i::8] for i in range(8)])


def test_few_tokens_are_one_range() -> None:
    assert list(ranges_of(workload(50, 0.5), None)) == [0]
    assert list(ranges_of([], 4)) == []


def test_more_ranges_than_rows() -> None:
    found = ranges_of([[1, 2], [3]], 16)
    assert Counter(n for b in found.values() for n in b.column("row").to_pylist()) == {0: 1, 1: 1}


def test_the_sample_is_the_same_whoever_draws_it() -> None:
    batch = batch_of(workload(300, 0.5))
    parts = [unpack_one(batch.slice(at, 50)) for at in range(0, 300, 50)]
    combine = _BottomK(40)
    samples = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        left, right = combine.create_accumulator(), combine.create_accumulator()
        for i in order[:3]:
            left = combine.add_input(left, parts[i])
        for i in order[3:]:
            right = combine.add_input(right, parts[i])
        merged = combine.merge_accumulators([right, left])
        samples.append(unpack(combine.extract_output(merged)))
    assert samples[0] == samples[1]
    total, rows = samples[0]
    assert total == prompt_tokens(batch).sum() and len(rows) == 40


def unpack_one(batch: pa.RecordBatch) -> bytes:
    (found,) = _Sample().process(encode(batch))
    return found


def test_the_transforms_together() -> None:
    prompts = workload(200, 0.5)
    limits = BatchLimits(rows=30)
    kept = _Kept()
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        _ = (
            pipeline
            | beam.Create([encode(batch_of(prompts))])
            | PartitionByPrefix(3)
            | FormPrefixBatches(limits)
            | kept.step()
        )
    found = list(map(decode, kept.read()))
    assert sorted(n for b in found for n in b.column("row").to_pylist()) == list(range(200))
    assert all(b.num_rows <= 30 for b in found)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="ranges"):
        PartitionByPrefix(0)
    with pytest.raises(ValueError, match="shards"):
        PartitionByPrefix(shards=0)
    with pytest.raises(ValueError, match="max_delay_secs"):
        FormPrefixBatches(max_delay_secs=0)
