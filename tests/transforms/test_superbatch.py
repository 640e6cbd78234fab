from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing import test_stream
from apache_beam.testing.util import assert_that
from apache_beam.transforms.window import FixedWindows, GlobalWindows, TimestampedValue
from hypothesis import given, settings
from hypothesis import strategies as st

import surge_beam
import surge_beam.transforms
from surge_beam import FormSuperBatches, SurgeError
from surge_beam.policy.superbatch import Limits
from surge_beam.transforms.superbatch import (
    PACKED,
    Accumulator,
    RecordBatchCoder,
    assemble,
    estimated_bytes,
    pieces,
    split,
)

LOOPBACK = ["--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=LOOPBACK"]
WIDE = Limits(min_rows=1000, max_rows=1000, max_bytes=1 << 30)


class Document(NamedTuple):
    text: str
    number: int


class Unbounded(beam.PTransform):
    """Says of a bounded input that it is not, for runners without TestStream."""

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        out = pcoll | beam.Map(lambda x: x)
        out.is_bounded = False
        return out


def batches_are(*expected: list[dict[str, Any]]) -> Any:
    """A matcher of batches as lists of rows, in any order of batches."""

    def check(found: Iterable[pa.RecordBatch]) -> None:
        rows = sorted((batch.to_pylist() for batch in found), key=repr)
        assert rows == sorted(expected, key=repr), rows

    return check


def numbers(*values: int) -> list[dict[str, Any]]:
    return [{"n": value} for value in values]


def run(elements: list[Any], check: Any, **options: Any) -> None:
    with beam.Pipeline("FnApiRunner") as p:
        formed = p | beam.Create(elements, reshuffle=False) | FormSuperBatches(**options)
        assert_that(formed, check)


# The pure core


limits = st.builds(
    lambda low, more, size: Limits(min_rows=low, max_rows=low + more, max_bytes=size),
    st.integers(1, 20),
    st.integers(0, 20),
    st.integers(1, 200),
)


@settings(deadline=None, max_examples=60)
@given(limits, st.lists(st.tuples(st.integers(1, 25), st.integers(0, 250))))
def test_groups_keep_order_and_limits(within: Limits, items: list[tuple[int, int]]) -> None:
    accumulator: Accumulator[tuple[int, int]] = Accumulator(within)
    groups = [group for item in items for group in accumulator.add(item, *item)]
    last = accumulator.flush()
    assert [item for group in groups + last for item in group] == items
    assert accumulator.flush() == []
    for group in groups + last:
        rows, nbytes = sum(r for r, _ in group), sum(b for _, b in group)
        assert group
        assert len(group) == 1 or (rows <= within.max_rows and nbytes <= within.max_bytes)
    for group, following in zip(groups, (groups + last)[1:], strict=False):
        rows, nbytes = sum(r for r, _ in group), sum(b for _, b in group)
        reached = rows >= within.min_rows or nbytes >= within.max_bytes
        next_one = following[0]
        assert (
            reached
            or rows + next_one[0] > within.max_rows
            or nbytes + next_one[1] > within.max_bytes
        ), "cut too early"


texts = st.one_of(st.none(), st.text(alphabet="aé", max_size=30))


@settings(deadline=None, max_examples=60)
@given(st.lists(texts), st.integers(1, 10), st.integers(1, 100))
def test_split_keeps_limits(values: list[str | None], max_rows: int, max_bytes: int) -> None:
    batch = pa.record_batch({"text": pa.array(values, pa.string())})
    parts = list(split(batch, max_rows, max_bytes))
    assert [row for part in parts for row in part.column(0).to_pylist()] == values
    for part in parts:
        assert 0 < part.num_rows <= max_rows
        assert part.num_rows == 1 or part.nbytes <= max_bytes


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.text(max_size=5),
    st.binary(max_size=5),
)
rows_ = st.dictionaries(st.sampled_from("abc"), scalars, min_size=1)


@given(st.lists(rows_, max_size=30), st.integers(1, 10), st.integers(1, 400))
@settings(deadline=None, max_examples=40)
def test_any_rows_come_out_once_in_order_with_their_values(
    rows: list[dict[str, Any]], max_rows: int, max_bytes: int
) -> None:
    within = Limits(min_rows=max_rows, max_rows=max_rows, max_bytes=max_bytes)
    found = assemble(rows, within)
    out = [row for batch in found for row in batch.to_pylist()]
    assert len(out) == len(rows)
    for before, after in zip(rows, out, strict=True):
        for name, value in after.items():
            assert value == before.get(name)
            assert value is None or type(value) is type(before[name])
        assert set(before) <= set(after)
    for batch in found:
        assert 0 < batch.num_rows <= max_rows
        assert batch.num_rows == 1 or batch.nbytes <= max_bytes


def test_missing_keys_are_null_and_types_are_widened() -> None:
    (batch,) = assemble([{"a": 1}, {"b": "x"}, {"a": 2.5, "b": None}], WIDE)
    assert batch.schema == pa.schema([("a", pa.float64()), ("b", pa.string())])
    assert batch.to_pylist() == [
        {"a": 1.0, "b": None},
        {"a": None, "b": "x"},
        {"a": 2.5, "b": None},
    ]


def test_types_that_cannot_be_brought_together_cut_the_batch() -> None:
    found = assemble([{"a": 1}, {"a": 2}, {"a": "x"}, {"a": "y"}, {"a": b"z"}], WIDE)
    assert [batch.column(0).to_pylist() for batch in found] == [[1, 2], ["x", "y"], [b"z"]]
    found = assemble([{"a": 2**60 + 1}, {"a": 0.5}], WIDE)
    assert [batch.column(0).to_pylist() for batch in found] == [[2**60 + 1], [0.5]]


def test_batches_are_joined_with_other_batches_and_rows() -> None:
    strict = pa.schema([pa.field("a", pa.int32(), nullable=False)])
    first = pa.RecordBatch.from_arrays([pa.array([1], pa.int32())], schema=strict)
    (batch,) = assemble([first, pa.record_batch({"b": ["x"]}), {"a": 2**40}], WIDE)
    assert batch.to_pylist() == [
        {"a": 1, "b": None},
        {"a": None, "b": "x"},
        {"a": 2**40, "b": None},
    ]
    assert batch.schema.field("a").nullable
    words = [pa.record_batch({"a": pa.array([x]).dictionary_encode()}) for x in "xyx"]
    (batch,) = assemble(words, WIDE)
    assert batch.column(0).to_pylist() == ["x", "y", "x"]
    assert len(assemble([first, pa.record_batch({PACKED: [b""]})], WIDE)) == 2


def test_a_row_that_arrow_cannot_hold_is_named() -> None:
    with pytest.raises(SurgeError, match="Arrow cannot hold the row"):
        assemble([{"a": 1}, {"a": object()}], WIDE)
    with pytest.raises(SurgeError, match="without columns"):
        assemble([{}], WIDE)
    with pytest.raises(SurgeError, match="a str is no row"):
        list(pieces("text", WIDE))


def test_estimated_bytes_are_about_arrows() -> None:
    rows = [
        {"t": "é" * 50, "n": i, "v": np.zeros(8, np.float32), "l": [1.0] * 4} for i in range(99)
    ]
    (batch,) = assemble(rows, WIDE)
    assert 0.8 < sum(map(estimated_bytes, rows)) / batch.nbytes < 1.3


def test_the_coder_writes_a_slices_rows_alone() -> None:
    batch = pa.record_batch({"t": ["x" * 100] * 1000, "n": list(range(1000))})
    data = RecordBatchCoder().encode(batch.slice(7, 2))
    assert len(data) < 2000
    assert RecordBatchCoder().decode(data).equals(batch.slice(7, 2))
    assert isinstance(beam.coders.registry.get_coder(pa.RecordBatch), RecordBatchCoder)


# Pipelines over bounded input


@pytest.mark.parametrize(
    "options", [{"min_rows": 5, "max_rows": 4}, {"shards": 0}, {"max_bytes": 0}]
)
def test_limits_that_contradict_each_other(options: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        FormSuperBatches(**options)


def test_rows_of_every_kind() -> None:
    rows = [{"text": "a", "number": 1}, beam.Row(text="b", number=2), Document("c", 3)]
    expected = [{"text": "a", "number": 1}, {"text": "b", "number": 2}, {"text": "c", "number": 3}]
    run(rows, batches_are(expected))


def test_batches_and_tables_are_joined_and_cut() -> None:
    table = pa.table({"n": list(range(7))})
    elements = [table, pa.record_batch({"n": [7]}), pa.record_batch({"n": []}), table.slice(0, 0)]
    run(
        elements,
        batches_are(numbers(0, 1, 2), numbers(3, 4, 5), numbers(6, 7)),
        min_rows=3,
        max_rows=3,
    )


def test_an_oversize_row_travels_alone() -> None:
    long = "x" * 500
    rows = [{"t": "a"}, {"t": long}, {"t": "b"}]
    run(rows, batches_are([{"t": "a"}], [{"t": long}], [{"t": "b"}]), max_bytes=100)


def test_empty_input_gives_nothing() -> None:
    run([], batches_are())


def test_windows_are_kept_and_batches_lie_at_their_first_row() -> None:
    rows = [TimestampedValue({"n": i}, i) for i in range(25)]

    class Where(beam.DoFn):
        def process(
            self,
            batch: pa.RecordBatch,
            window: Any = beam.DoFn.WindowParam,
            timestamp: Any = beam.DoFn.TimestampParam,
        ) -> Any:
            yield (
                int(window.start),
                int(timestamp),
                batch.column(0).to_pylist(),
            )

    def check(found: list[Any]) -> None:
        assert sorted(found) == [
            (0, 0, list(range(10))),
            (10, 10, list(range(10, 20))),
            (20, 20, list(range(20, 25))),
        ]

    with beam.Pipeline("FnApiRunner") as p:
        formed = (
            p
            | beam.Create(rows, reshuffle=False)
            | beam.Map(lambda x: x)
            | beam.WindowInto(FixedWindows(10))
            | FormSuperBatches()
            | beam.ParDo(Where())
        )
        assert_that(formed, check)


def test_many_windows_in_a_bundle_lose_nothing() -> None:
    with beam.Pipeline("FnApiRunner") as p:
        total = (
            p
            | beam.Create([TimestampedValue({"n": i}, i % 100) for i in range(500)])
            | beam.Map(lambda x: x)
            | beam.WindowInto(FixedWindows(1))
            | FormSuperBatches()
            | "Rows" >> beam.Map(lambda batch: batch.num_rows)
            | "Global" >> beam.WindowInto(GlobalWindows())
            | beam.CombineGlobally(sum)
        )
        assert_that(total, lambda found: _equal(found, [500]))


def _equal(found: Any, expected: Any) -> None:
    assert found == expected, found


def test_dask_is_refused() -> None:
    class DaskRunner(beam.runners.PipelineRunner):
        pass

    with pytest.raises(SurgeError, match="DaskRunner drops"):
        _ = beam.Pipeline(DaskRunner()) | beam.Create(numbers(1)) | FormSuperBatches()


# Pipelines over unbounded input


@pytest.mark.parametrize(
    "arguments", [["--runner=FnApiRunner"], LOOPBACK, ["--runner=DirectRunner"]]
)
def test_state_flushes_exactly_once(arguments: list[str]) -> None:
    def check(found: list[pa.RecordBatch]) -> None:
        assert sorted(n for batch in found for n in batch.column(0).to_pylist()) == list(range(100))
        assert all(0 < batch.num_rows <= 8 for batch in found)

    with beam.Pipeline(options=PipelineOptions(arguments)) as p:
        formed = (
            p
            | beam.Create(numbers(*range(100)))
            | Unbounded()
            | FormSuperBatches(min_rows=8, max_rows=8, shards=2, max_delay_secs=1)
        )
        assert_that(formed, check)


def stream(*events: Any) -> test_stream.TestStream:
    """A stream of rows (lists), watermarks (numbers) and processing time to pass (``"wait"``)."""
    found = test_stream.TestStream()
    for event in events:
        if isinstance(event, list):
            found = found.add_elements(event)
        elif event == "wait":
            # the timer is set by the wall clock, the stream's own clock starts at 0
            found = found.advance_processing_time(int(time.time()) + 1000)
        else:
            found = found.advance_watermark_to(event)
    # DirectRunner closes what follows at the last watermark before timers that fire then are heard
    found = found.advance_processing_time(10 * int(time.time()))
    return found.advance_watermark_to(10_000).advance_watermark_to_infinity()


def run_stream(
    events: test_stream.TestStream, check: Any, window: Any = None, **options: Any
) -> None:
    flags = PipelineOptions(["--runner=DirectRunner", "--streaming", "--allow_unsafe_triggers"])
    with beam.Pipeline(options=flags) as p:
        rows = p | events
        if window is not None:
            rows = rows | beam.WindowInto(window)
        formed = rows | FormSuperBatches(shards=1, **options)
        assert_that(formed, check)


def test_rows_are_joined_across_bundles_until_the_window_ends() -> None:
    events = stream(
        [TimestampedValue({"n": 0}, 1)],
        [TimestampedValue({"n": 1}, 2)],
        [TimestampedValue({"n": 2}, 12)],
        11,
        [TimestampedValue({"n": 3}, 13)],
    )
    run_stream(events, batches_are(numbers(0, 1), numbers(2, 3)), FixedWindows(10))


def test_rows_wait_no_longer_than_the_delay() -> None:
    # after the wait the stream's clock is ahead of the wall clock, so no delay is left
    events = stream([{"n": 0}], [{"n": 1}], "wait", [{"n": 2}], [{"n": 3}])
    run_stream(events, batches_are(numbers(0, 1), numbers(2), numbers(3)), max_delay_secs=5)


def test_a_full_batch_leaves_at_once_and_limits_hold_across_bundles() -> None:
    events = stream(numbers(0, 1), numbers(2, 3), numbers(4))
    run_stream(events, batches_are(numbers(0, 1), numbers(2, 3, 4)), min_rows=3, max_rows=3)


def test_bytes_are_limited_across_bundles() -> None:
    row = {"t": "x" * 60}
    events = stream([row], [row], [row])
    run_stream(events, batches_are([row], [row], [row]), max_bytes=100)


# The package's face


@pytest.mark.parametrize("module", [surge_beam, surge_beam.transforms])
def test_public_names(module: Any) -> None:
    assert module.__all__ == sorted(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing


def test_the_reading_helper_imports_no_beam(tmp_path: Path) -> None:
    code = (
        "import sys, surge_beam.transforms.guard\n"
        "print([m for m in ('apache_beam', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
