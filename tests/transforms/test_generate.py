from __future__ import annotations

import datetime
import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing import test_stream
from apache_beam.testing.util import assert_that
from apache_beam.transforms.resources import AcceleratorHint, MinRamHint
from apache_beam.transforms.trigger import AccumulationMode, AfterCount, Repeatedly
from apache_beam.transforms.window import (
    FixedWindows,
    GlobalWindow,
    IntervalWindow,
    Sessions,
    SlidingWindows,
    TimestampedValue,
)
from apache_beam.utils.timestamp import Timestamp
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam import (
    BatchLimits,
    DeadLetter,
    FormPrefixBatches,
    Generate,
    PartitionByPrefix,
    SamplingParams,
    SurgeError,
)
from surge_beam.records import unpack
from surge_beam.transforms.generate import _Block, _Named, _Pack, _record, prompt_of
from surge_beam.transforms.prefix_partition import _FormAsTheyCome
from surge_beam.transforms.prompt_batch import decode, encode, prompt_batch, sampling_json
from surge_beam.transforms.prompts import PromptConfig, Refusal
from tests.whole import only_whole

FN_API = ("--runner=FnApiRunner",)
ADDED = ("completion", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens")
STEM = "Summarise what follows in one line, and say nothing else but that line, please: "
FEW = SamplingParams(max_tokens=6)


class Document(NamedTuple):
    prompt: str
    number: int


class Unbounded(beam.PTransform):
    """Says of a bounded input that it is not, for runners without TestStream."""

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        out = pcoll | beam.Map(lambda x: x)
        out.is_bounded = False
        return out


def expected(prompt: str, max_tokens: int = 6) -> tuple[str, str, int]:
    """Completion, finish reason and number of tokens of the dummy model, decoded greedily."""
    ids, out = list(prompt.encode()), list[int]()
    while len(out) < max_tokens:
        seen = np.array([*ids, *out], np.int32).tobytes()
        out.append(xxhash.xxh3_64_intdigest(seen) % 256)
        if out[-1] == 0:
            break
    text = "".join(chr(0x100 + i) for i in out if i)
    return text, "length" if out[-1] else "stop", len(out)


def generate(**options: Any) -> Generate:
    return Generate(**{"model": "dummy", "device": "cpu", "sampling": FEW, **options})


KEPT: dict[str, list[Any]] = {}


def _keep(name: str, found: list[Any]) -> None:
    """A matcher, found by its name where it runs, that keeps what there is to see."""
    KEPT[name] = list(found)


def _none(found: list[Any]) -> None:
    assert found == [], found


def run(
    elements: list[Any],
    rows: Callable[[Any], None],
    letters: Callable[[Any], None] = _none,
    arguments: Iterable[str] = FN_API,
    unbounded: bool = False,
    **options: Any,
) -> Any:
    p = beam.Pipeline(options=PipelineOptions(list(arguments)))
    given = p | beam.Create(elements, reshuffle=False)
    if unbounded:
        given = given | Unbounded()
    result = given | generate(**options)
    assert_that(result.rows, rows, label="Rows")
    assert_that(result.dead_letters, letters, label="Letters")
    done = p.run()
    done.wait_until_finish()
    return done


def completed(rows: list[dict[str, Any]], prompt: str = "prompt") -> Callable[[Any], None]:
    """A matcher of rows with the completions that belong to them, in any order."""

    def check(found: list[dict[str, Any]]) -> None:
        kept = [{k: v for k, v in row.items() if k not in ADDED} for row in found]
        assert sorted(map(repr, kept)) == sorted(map(repr, rows))
        for row in found:
            text, reason, tokens = expected(row[prompt])
            assert (row["completion"], row["finish_reason"]) == (text, reason)
            assert row["completion_tokens"] == tokens
            assert row["prompt_tokens"] == len(row[prompt].encode())
            assert 0 <= row["cached_tokens"] < row["prompt_tokens"]

    return check


def letters_are(*errors: str) -> Callable[[Any], None]:
    def check(found: list[DeadLetter]) -> None:
        assert sorted(x.error for x in found) == sorted(errors), found

    return check


# Kinds of elements


def test_texts_become_rows() -> None:
    run(["one", "two"], completed([{"prompt": "one"}, {"prompt": "two"}]))


def test_rows_keep_all_they_hold_whatever_its_type() -> None:
    rows = [{"q": f"{STEM}{i % 7}", "tags": frozenset({i}), "id": i} for i in range(40)]
    done = run(rows, completed(rows, "q"), prompt_column="q")
    counted = {c.key.metric.name: c.committed for c in done.metrics().query()["counters"]}
    assert (counted["rows"], counted["completions"]) == (40, 40)
    assert counted["prefix_tokens_saved"] > 30 * (len(STEM) // 16 * 16)


def test_other_kinds_of_rows_become_dicts() -> None:
    run([beam.Row(prompt="b", number=2)], completed([{"prompt": "b", "number": 2}]))
    run([Document("c", 3)], completed([{"prompt": "c", "number": 3}]))


def test_what_is_no_row_is_an_error() -> None:
    with pytest.raises(Exception, match="a int is no row"):
        run([1], _none)


def test_batches_come_out_as_batches_in_order() -> None:
    day = pa.array([datetime.date(2026, 1, 1)] * 2, pa.date32())
    first = pa.record_batch({"prompt": ["a", "b"], "completion": ["old", "old"], "day": day})
    table = pa.table({"prompt": pa.array(["c", "a"]).dictionary_encode(), "n": [1, 2]})

    def check(found: list[pa.RecordBatch]) -> None:
        with_day, other = sorted(found, key=lambda batch: "day" not in batch.schema.names)
        assert with_day.schema.names == ["prompt", "day", *ADDED]
        assert with_day.column("day").type == pa.date32()
        assert other.schema.names == ["prompt", "n", *ADDED]
        assert other.column("prompt").type == table.schema.field("prompt").type
        assert other.column("n").to_pylist() == [1, 2]
        for batch in found:
            completed([{k: v for k, v in r.items() if k not in ADDED} for r in batch.to_pylist()])(
                batch.to_pylist()
            )

    run([first, table, pa.record_batch({"prompt": pa.array([], pa.string())})], check)


def test_a_long_batch_is_cut_and_keeps_its_order() -> None:
    def check(found: list[pa.RecordBatch]) -> None:
        numbers = [batch.column("n").to_pylist() for batch in found]
        assert all(part == list(range(part[0], part[0] + len(part))) for part in numbers)
        assert sorted(n for part in numbers for n in part) == list(range(600))

    prompts = [f"{STEM}{i % 3}" for i in range(600)]
    run([pa.record_batch({"n": range(600), "prompt": prompts})], check)


def test_batch_rows_without_a_prompt_are_dead_letters() -> None:
    def kept(found: list[pa.RecordBatch]) -> None:
        assert [batch.column("id").to_pylist() for batch in found] == [[1, 3]]

    def check(letters: list[DeadLetter]) -> None:
        found = {json.loads(x.record or "")["id"]: x.error for x in letters}
        assert found == {2: "NullPrompt", 4: "MissingPrompt", 5: "NotText"}

    batches = [
        pa.record_batch({"id": [1, 2, 3], "prompt": ["a", None, "b"]}),
        pa.record_batch({"id": [4]}),
        pa.record_batch({"id": [5], "prompt": [1.5]}),
    ]
    run(batches, kept, check)


# Where prompts come from


def test_a_template_over_a_rows_columns() -> None:
    rows = [{"name": "<Ada>", "n": {"m": 1}}, {"name": "Bob"}]

    def check(found: list[dict[str, Any]]) -> None:
        (row,) = found
        assert row["completion"] == expected("Hi <Ada> 1")[0]

    run(rows, check, letters_are("TemplateError"), template="Hi {{ name }} {{ n.m }}")
    run(["x"], completed([{"prompt": "x"}]), template="{{ prompt }}")


def test_messages_as_lists_or_as_json_text() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    rendered = "user: Hello\nassistant: "

    def check(found: list[dict[str, Any]]) -> None:
        assert [row["completion"] for row in found] == [expected(rendered)[0]] * 3
        assert all("chat" in row for row in found)

    elements = [{"chat": messages}, {"chat": json.dumps(messages)}, json.dumps(messages)]
    surrogate = json.dumps([{"role": "user", "content": "\ud800"}])
    bad = [{"chat": "[1"}, {"chat": []}, {"chat": surrogate}]
    run(
        [*elements, *bad],
        check,
        letters_are("InvalidMessages", "InvalidMessages", "NotText"),
        messages_column="chat",
    )


def test_rows_without_a_prompt_are_dead_letters() -> None:
    def check(letters: list[DeadLetter]) -> None:
        found = sorted((json.loads(x.record or "")["id"], x.error, x.stage) for x in letters)
        assert found == [
            (1, "MissingPrompt", "read"),
            (2, "NullPrompt", "read"),
            (3, "NotText", "read"),
            (4, "EmptyPrompt", "read"),
            (5, "context_length_exceeded", "read"),
        ]
        assert all(x.message and (x.record or "").encode() for x in letters)

    bad: list[dict[str, Any]] = [
        {"id": 1},
        {"id": 2, "prompt": None},
        {"id": 3, "prompt": 3.5},
        {"id": 4, "prompt": ""},
        {"id": 5, "prompt": "x" * 60},
    ]
    good = [{"id": 7, "prompt": " "}, {"id": 8, "prompt": "x" * 40}]
    run([*bad, *good], completed(good), check, max_context=60)


def test_what_is_no_unicode_and_records_that_are_no_json() -> None:
    for row in ({"prompt": "\ud800"}, {"id": "\udcff", "prompt": "a"}):
        config = PromptConfig(column="prompt", id_column="id" if "id" in row else None)
        refused = prompt_of(config, row, "name")
        assert isinstance(refused, Refusal) and "valid Unicode" in refused.message
    assert _record({"prompt": "a\ud800"}) == '{"prompt": "a?"}'
    assert _record({"prompt": {(1, 2): 3}}) == "{'prompt': {(1, 2): 3}}"


def test_a_row_on_which_the_engine_fails_is_a_dead_letter() -> None:
    def check(letters: list[DeadLetter]) -> None:
        (letter,) = letters
        assert (letter.stage, letter.error) == ("decode", "capacity_exceeded")
        assert json.loads(letter.record or "") == {"prompt": "x" * 600}

    # a pool of 32 pages of 16 tokens of 4 bytes
    run(["x" * 600, "y"], completed([{"prompt": "y"}]), check, kv_bytes=32 * 16 * 4)


def test_an_id_column() -> None:
    good = [{"id": 5, "prompt": "a"}, {"id": "x", "prompt": "b"}, {"id": "x", "prompt": "a"}]
    bad: list[dict[str, Any]] = [
        {"id": None, "prompt": "a"},
        {"id": "", "prompt": "a"},
        {"prompt": "a"},
    ]
    run([*good, *bad], completed(good), letters_are(*["EmptyId"] * 3), id_column="id")


# Names and random numbers


def drawn(elements: list[Any], **options: Any) -> list[str]:
    """Completions of one prompt, sorted, of rows as they are sampled."""
    sampling = SamplingParams(max_tokens=12, temperature=1.0)
    run(elements, functools.partial(_keep, "drawn"), sampling=sampling, **options)
    return sorted(row["completion"] for row in KEPT.pop("drawn"))


def test_equal_rows_draw_apart_and_the_same_in_every_run() -> None:
    first = drawn(["same"] * 5)
    assert len(set(first)) == 5
    assert set(first) < set(drawn(["other", *["same"] * 5]))
    assert set(drawn(["same"] * 5, seed=1)).isdisjoint(first)
    assert len(set(drawn(["same"] * 5, unbounded=True, max_delay_secs=1))) == 5


def test_an_id_is_what_a_row_draws_by() -> None:
    def rows(*ids: str) -> list[dict[str, str]]:
        return [{"id": name, "prompt": "same", "other": str(i)} for i, name in enumerate(ids)]

    a, b = drawn(rows("a", "b"), id_column="id")
    assert a != b
    assert drawn(rows("x", "b", "a"), id_column="id") != [a, b]
    assert {a, b} < set(drawn(rows("x", "b", "a"), id_column="id"))
    # equal ids take turns, and draw alike
    assert len(set(drawn(rows("a", "a", "a"), id_column="id"))) == 1


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=40), st.randoms())
def test_names_do_not_depend_on_the_order_of_a_group(texts: list[str], random: Any) -> None:
    pack = _Pack(PromptConfig(column="prompt"))
    values = [
        data for text in texts for _, data in pack.process(text, GlobalWindow(), Timestamp(0))
    ]
    shuffled = random.sample(values, len(values))

    def named(given: list[bytes]) -> list[tuple[str, bytes]]:
        blocks: list[_Named] = [unpack(data) for data in _Block().process((0, given))]
        return [x for b in blocks for x in zip(b.names, b.items, strict=True)]

    found = named(values)
    assert named(shuffled) == found
    assert len({name for name, _ in found}) == len(texts)
    assert sorted(item for _, item in found) == sorted(values)


# Conservation


anything = st.one_of(
    st.text(max_size=30),
    st.fixed_dictionaries({}, optional={"prompt": st.one_of(st.none(), st.integers(), st.text())}),
    st.lists(st.one_of(st.none(), st.text(max_size=5)), max_size=8).map(
        lambda texts: pa.record_batch({"prompt": pa.array(texts, pa.string())})
    ),
)


@settings(max_examples=6)
@given(
    st.lists(anything.filter(lambda x: x != {}), max_size=30),
    st.booleans(),
    st.sampled_from([1, 3]),
    st.sampled_from([None, 1, 4]),
)
def test_rows_in_are_rows_out_and_dead_letters(
    elements: list[Any], unbounded: bool, rounds: int, ranges: int | None
) -> None:
    wanted, refused = Counter[str](), 0
    for element in elements:
        if isinstance(element, pa.RecordBatch):
            prompts = element.column("prompt").to_pylist()
        else:
            prompts = [element if isinstance(element, str) else element.get("prompt")]
        for prompt in prompts:
            if isinstance(prompt, str) and prompt:
                wanted[prompt] += 1
            else:
                refused += 1

    def rows(found: list[Any]) -> None:
        flat = [r for x in found for r in (x.to_pylist() if hasattr(x, "schema") else [x])]
        assert Counter(row["prompt"] for row in flat) == wanted
        for row in flat:
            assert row["completion"] == expected(row["prompt"])[0]

    def letters(found: list[DeadLetter]) -> None:
        assert len(found) == refused

    run(
        elements,
        rows,
        letters,
        unbounded=unbounded,
        rounds=rounds,
        slice_tokens=2,
        ranges=ranges,
        batch=BatchLimits(rows=7),
        max_delay_secs=1,
    )


# Windows


def in_windows(window: Any, unbounded: bool, **trigger: Any) -> list[tuple[str, float, Any]]:
    """Prompts with timestamp and window, as they come out."""
    times = {"a": 1, "b": 4, "c": 12, "d": 25}
    with beam.Pipeline("FnApiRunner") as p:
        given = p | beam.Create([TimestampedValue(text, at) for text, at in times.items()])
        if unbounded:
            given = given | Unbounded()
        result = given | beam.WindowInto(window, **trigger) | generate(max_delay_secs=1)
        placed = result.rows | beam.Map(
            lambda row, at=beam.DoFn.TimestampParam, window=beam.DoFn.WindowParam: (
                row["prompt"],
                float(at),
                window,
            )
        )
        assert_that(placed, functools.partial(_keep, "placed"))
    return sorted(KEPT.pop("placed"), key=repr)


@pytest.mark.parametrize("unbounded", [False, True])
def test_windows_and_timestamps_are_kept(unbounded: bool) -> None:
    assert in_windows(FixedWindows(10), unbounded) == [
        ("a", 1.0, IntervalWindow(0, 10)),
        ("b", 4.0, IntervalWindow(0, 10)),
        ("c", 12.0, IntervalWindow(10, 20)),
        ("d", 25.0, IntervalWindow(20, 30)),
    ]
    # not merged by what happens inside
    assert in_windows(Sessions(10), unbounded) == [
        ("a", 1.0, IntervalWindow(1, 11)),
        ("b", 4.0, IntervalWindow(4, 14)),
        ("c", 12.0, IntervalWindow(12, 22)),
        ("d", 25.0, IntervalWindow(25, 35)),
    ]
    sliding = in_windows(SlidingWindows(10, 5), unbounded)
    assert [x for x in sliding if x[0] == "c"] == [
        ("c", 12.0, IntervalWindow(10, 20)),
        ("c", 12.0, IntervalWindow(5, 15)),
    ]
    assert len(sliding) == 8


def test_a_trigger_does_not_tear_blocks_apart() -> None:
    early = {
        "trigger": Repeatedly(AfterCount(1)),
        "accumulation_mode": AccumulationMode.ACCUMULATING,
    }
    assert [x[0] for x in in_windows(FixedWindows(10), False, **early)] == ["a", "b", "c", "d"]


# Input without an end


def stream(*events: Any) -> test_stream.TestStream:
    """A stream of elements (lists), watermarks (numbers) and processing time to pass."""
    found = test_stream.TestStream()
    for event in events:
        if isinstance(event, list):
            found = found.add_elements(event)
        elif event == "wait":
            # timers are set by the wall clock, the stream's own clock starts at 0
            found = found.advance_processing_time(int(time.time()) + 1000)
        else:
            found = found.advance_watermark_to(event)
    found = found.advance_processing_time(10 * int(time.time()))
    return found.advance_watermark_to(10_000).advance_watermark_to_infinity()


def streaming() -> beam.Pipeline:
    return beam.Pipeline(options=PipelineOptions(["--runner=DirectRunner", "--streaming"]))


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_stream_without_a_trigger_is_answered(rounds: int) -> None:
    events = stream(["a", "b", ""], [pa.record_batch({"prompt": ["c", None]})], "wait", ["d"])

    def rows(found: list[Any]) -> None:
        flat = [r for x in found for r in (x.to_pylist() if hasattr(x, "schema") else [x])]
        completed([{"prompt": text} for text in "abcd"])(flat)

    with streaming() as p:
        result = p | events | generate(rounds=rounds, slice_tokens=2)
        assert_that(result.rows, rows, label="Rows")
        assert_that(result.dead_letters, letters_are("EmptyPrompt", "NullPrompt"), label="Letters")


def test_a_stream_keeps_its_windows() -> None:
    events = stream(
        [TimestampedValue("a", 1)], [TimestampedValue("b", 2)], [TimestampedValue("c", 12)]
    )

    def check(found: list[tuple[str, Any]]) -> None:
        assert sorted(found) == [
            ("a", IntervalWindow(0, 10)),
            ("b", IntervalWindow(0, 10)),
            ("c", IntervalWindow(10, 20)),
        ]

    with streaming() as p:
        result = p | events | beam.WindowInto(FixedWindows(10)) | generate()
        placed = result.rows | beam.Map(
            lambda row, window=beam.DoFn.WindowParam: (row["prompt"], window)
        )
        assert_that(placed, check)


def prompts_of(*texts: str, extra: bool = False) -> pa.RecordBatch:
    batch = prompt_batch(
        ["owner"] * len(texts),
        range(len(texts)),
        list(texts),
        [list(text.encode()) for text in texts],
        [sampling_json(FEW)] * len(texts),
    )
    return batch.append_column("score", pa.array([0.5] * len(texts))) if extra else batch


def ids_are(*expected: list[str]) -> Callable[[Any], None]:
    def check(found: list[bytes]) -> None:
        ids = [sorted(decode(data).column("custom_id").to_pylist()) for data in found]
        assert sorted(ids) == sorted(expected)

    return check


def test_prompts_of_a_stream_wait_for_others_of_their_kind() -> None:
    events = stream(
        [prompts_of("a")],
        [prompts_of("b", "c")],
        "wait",
        [prompts_of("d")],
    )
    with streaming() as p:
        formed = p | events | PartitionByPrefix(shards=1) | FormPrefixBatches(max_delay_secs=5)
        assert_that(formed, ids_are(["a", "b", "c"], ["d"]))


class Cell:
    """A bag, a value or a timer, as a DoFn sees it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.held: list[Any] = []

    def add(self, value: Any) -> None:
        self.held.append(value)

    def write(self, value: Any) -> None:
        self.held = [value]

    set = write


class Bag(Cell):
    def read(self) -> list[Any]:
        return list(self.held)


class Value(Cell):
    def read(self) -> Any:
        return self.held[0] if self.held else None


def test_a_full_superbatch_of_a_stream_leaves_at_once() -> None:
    form = _FormAsTheyCome(BatchLimits(rows=3), 10.0)
    parts, held, window_end, delay = Bag(), Value(), Value(), Value()

    def arrive(at: int, *texts: str) -> list[Any]:
        element = (0, encode(prompts_of(*texts)))
        state = (parts, held, window_end, delay)
        return list(form.process(element, GlobalWindow(), Timestamp(at), *state))

    assert arrive(5, "a") == []
    due = delay.read()
    assert due > time.time()
    assert arrive(3, "bb") == [] and delay.read() == due
    (out,) = arrive(4, "c")
    ids_are(["a", "bb", "c"])([out.value])
    assert out.timestamp == Timestamp(3)
    assert parts.read() == [] and held.read() is None and delay.read() is None


def test_superbatches_of_a_stream_keep_their_limits() -> None:
    for limits, wanted in (
        (BatchLimits(rows=3), (["a", "bb", "cc"], ["dd"])),
        (BatchLimits(tokens=4), (["a"], ["bb", "cc"], ["dd"])),
    ):
        events = stream([prompts_of("a")], [prompts_of("bb", "cc")], [prompts_of("dd")])
        with streaming() as p:
            formed = p | events | PartitionByPrefix(shards=1) | FormPrefixBatches(limits)
            assert_that(formed, ids_are(*wanted))


def test_superbatches_keep_windows_and_further_columns() -> None:
    def check(found: list[tuple[bytes, Any]]) -> None:
        batches = [(decode(data), window) for data, window in found]
        ids = {(name, w) for b, w in batches for name in b.column("custom_id").to_pylist()}
        assert ids == {
            ("a", IntervalWindow(0, 10)),
            ("b", IntervalWindow(0, 10)),
            ("c", IntervalWindow(10, 20)),
        }
        assert all(b.column("score").to_pylist() == [0.5] * b.num_rows for b, _ in batches)

    with beam.Pipeline("FnApiRunner") as p:
        formed = (
            p
            | beam.Create([(1, ["a", "b"]), (12, ["c"])])
            | beam.Map(lambda x: TimestampedValue(prompts_of(*x[1], extra=True), x[0]))
            | beam.WindowInto(FixedWindows(10))
            | PartitionByPrefix(ranges=2)
            | FormPrefixBatches()
            | beam.Map(lambda data, window=beam.DoFn.WindowParam: (data, window))
        )
        assert_that(formed, check)


# Runners and settings


@only_whole
def test_two_worker_processes_give_the_same() -> None:
    rows = [{"prompt": f"{STEM}{i % 9}", "n": i} for i in range(60)]
    two = (
        *FN_API,
        "--direct_running_mode=multi_processing",
        "--direct_num_workers=2",
    )
    run(rows, completed(rows), arguments=two, rounds=2, slice_tokens=3, ranges=4)


def prism(path: str) -> tuple[str, ...]:
    return ("--runner=PrismRunner", f"--prism_location={path}", "--environment_type=LOOPBACK")


def test_a_prism_pipeline_gives_the_same(prism_path: str) -> None:
    rows = [{"prompt": f"{STEM}{i % 9}", "n": i} for i in range(30)]
    run([*rows, {"n": 0}], completed(rows), letters_are("MissingPrompt"), prism(prism_path))


@pytest.mark.parametrize("unbounded", [False, True])
def test_no_row_comes_behind_the_watermark(prism_path: str, unbounded: bool) -> None:
    """Prism drops what is late, which other local runners do not."""

    def check(found: list[tuple[str, list[str]]]) -> None:
        assert sorted(sorted(texts) for _, texts in found) == [["a", "b"], ["c"]]

    early = [TimestampedValue("a", 1), TimestampedValue("b", 2)]
    late = [TimestampedValue("c", 60)]
    source: beam.PTransform = beam.Create([*early, *late])
    if unbounded:
        source = (
            test_stream.TestStream()
            .add_elements(early)
            .advance_watermark_to(50)
            .advance_processing_time(30)
            .add_elements(late)
            .advance_processing_time(30)
            .advance_watermark_to_infinity()
        )
    with beam.Pipeline(options=PipelineOptions([*prism(prism_path), "--streaming"])) as p:
        result = p | source | beam.WindowInto(FixedWindows(10)) | generate(max_delay_secs=2)
        by_prompt = beam.Map(lambda row: ("", row["prompt"]))
        keyed = result.rows | by_prompt.with_output_types(tuple[str, str])
        assert_that(keyed | beam.GroupByKey(), check)


def hinted(transform: Generate) -> dict[str, dict[str, bytes]]:
    """Resource hints by step, of a graph that is not run."""
    p = beam.Pipeline("FnApiRunner")
    _ = p | beam.Create(["a"]) | transform
    components = p.to_runner_api().components
    found = {}
    for step in components.transforms.values():
        if step.spec.urn == "beam:transform:pardo:v1":
            hints = components.environments[step.environment_id].resource_hints
            if hints:
                found[step.unique_name] = dict(hints)
    return found


def test_only_the_decoding_steps_have_hints() -> None:
    on_gpu = hinted(Generate(rounds=2))
    assert len(on_gpu) == 2 and all("/Decode/Round" in name for name in on_gpu)
    for hints in on_gpu.values():
        assert hints == {AcceleratorHint.urn: b"type:nvidia-l4;count:1;install-nvidia-driver"}
    (hints,) = hinted(Generate(device="cpu")).values()
    assert list(hints) == [MinRamHint.urn]
    assert hinted(Generate(accelerator=None)) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_column": "a", "template": "b"}, "give one of"),
        ({"template": "{{"}, "cannot be parsed"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"slice_tokens": 0}, "slice_tokens must be at least 1"),
        ({"ranges": 0}, "ranges must be at least 1"),
        ({"max_delay_secs": 0}, "max_delay_secs must be above 0"),
        ({"engine": "other"}, "engine must be"),
        ({"schedule": "other"}, "schedule must be"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SurgeError, match=message):
        Generate(**options)


def test_cuda_that_is_missing_fails_at_start() -> None:
    with pytest.raises(Exception, match="CUDA"):
        run(["a"], _none, device="cuda")


def test_dask_is_refused() -> None:
    class DaskRunner(beam.runners.PipelineRunner):
        pass

    with pytest.raises(SurgeError, match="DaskRunner"):
        _ = beam.Pipeline(DaskRunner()) | beam.Create(["a"]) | generate()


def test_an_empty_input() -> None:
    run([], _none)
