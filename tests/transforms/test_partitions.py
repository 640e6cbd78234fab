"""Partition values: folder names, exact values, runs of equal keys."""

from __future__ import annotations

import decimal
import json
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from surge_beam.records import SurgeError
from surge_beam.transforms.partitions import (
    MAX_NAME_BYTES,
    NULL_FOLDER,
    KeyRuns,
    encode_name,
    file_folder,
    first_rows,
    hive_values,
    key_folder,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


def folder_of(value: Any, column: str = "k") -> str:
    return key_folder([column], [("string", value)])[0]


@given(TEXT)
@example("../../x")
@example(".")
@example("\0")
@example(NULL_FOLDER)
@example("")
@example("a%2Fb+c~d")
@settings(max_examples=300, deadline=None)
def test_a_value_is_one_safe_folder_that_gives_it_back(value: str) -> None:
    folder = folder_of(value)
    assert "/" not in folder and "\0" not in folder and folder.startswith("k=")
    assert len(folder.encode()) <= MAX_NAME_BYTES
    if "~" not in folder:
        assert unquote(folder[2:], errors="strict") == value
        assert hive_values(f"{folder}/part-0.parquet") == {"k": value}


@given(TEXT, TEXT)
@settings(max_examples=200, deadline=None)
def test_two_values_have_two_folders(one: str, other: str) -> None:
    assert (folder_of(one) == folder_of(other)) == (one == other)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=150), TEXT)
@settings(max_examples=200, deadline=None)
def test_odd_columns_too(column: str, value: str) -> None:
    folder = folder_of(value, column)
    name, equals, _ = folder.partition("=")
    assert equals and "/" not in folder and folder[0] not in "_."
    assert len(folder.encode()) <= MAX_NAME_BYTES
    if "~" not in name:
        assert unquote(name) == column


def test_null_empty_and_the_null_folder_s_own_name_are_three() -> None:
    assert len({folder_of(None), folder_of(""), folder_of(NULL_FOLDER)}) == 3
    assert folder_of(None) == f"k={NULL_FOLDER}"


@pytest.mark.parametrize("char", ["x", "é", "漢", "😀", "/", "\u0301"])
def test_a_long_value_is_cut_between_characters(char: str) -> None:
    folders = {folder_of(char * 300 + end) for end in ("", "1", "2")}
    assert len(folders) == 3
    for folder in folders:
        assert 230 < len(folder.encode()) <= MAX_NAME_BYTES
        kept = folder[2:].rpartition("~")[0]
        assert set(unquote(kept, errors="strict")) == {char}


def test_a_value_that_looks_cut_is_not_taken_for_one() -> None:
    cut = folder_of("x" * 300)[2:]
    assert folder_of(cut) != folder_of("x" * 300)


@given(st.lists(st.text(st.characters(exclude_characters="/\0"), min_size=1), min_size=1))
@settings(max_examples=100, deadline=None)
def test_a_file_s_folder_stays_below_the_output(parts: list[str]) -> None:
    folder, values = file_folder("/".join(parts))
    for part in folder.split("/"):
        assert part not in ("", ".", "..") and part[0] not in "_." and "=" not in part
        assert len(part.encode()) <= MAX_NAME_BYTES
    json.loads(values.encode())


def test_hive_folders_that_are_not_encoded_stay_as_they_are() -> None:
    assert hive_values("a=50%/b=%FF/c=x%20y/d=/e==/_x=1/x.parquet") == {
        "a": "50%", "b": "%FF", "c": "x y", "d": "", "e": "=", "_x": "1",
    }  # fmt: skip
    assert hive_values("a/=b/c=d.parquet") == {}
    odd = b"k=\xff".decode("utf-8", "surrogateescape")
    value = hive_values(f"{odd}/x.parquet")["k"]
    assert value == "\\xff" and folder_of(value).encode()


TYPES = {
    "integer": (pa.array([-(2**63), 2**63 - 1, None]), [-(2**63), 2**63 - 1, None]),
    "unsigned": (pa.array([2**64 - 1, 0], pa.uint64()), [2**64 - 1, 0]),
    "date": (
        pa.array([0, -719162, 2932896, 10**7, -(2**31)], pa.date32()),
        ["1970-01-01", "0001-01-01", "9999-12-31", "10000000d", "-2147483648d"],
    ),
    "date64": (pa.array([0, 864 * 10**12], pa.date64()), ["1970-01-01", "10000000d"]),
    "boolean": (pa.array([True, False, None]), [True, False, None]),
    "us": (
        pa.array([1, -1, 2**63 - 1], pa.timestamp("us")),
        ["1970-01-01 00:00:00.000001", "1969-12-31 23:59:59.999999", "9223372036854775807us"],
    ),
    "ns": (
        pa.array([1, 10**9], pa.timestamp("ns")),
        ["1970-01-01 00:00:00.000000001", "1970-01-01 00:00:01"],
    ),
    "zone": (pa.array([0], pa.timestamp("ms", "Europe/Paris")), ["1970-01-01 00:00:00Z"]),
    "decimal": (pa.array([decimal.Decimal("1.10"), None], pa.decimal128(9, 2)), ["1.10", None]),
    "float": (
        pa.array([0.1, -0.0, 0.0, float("nan"), float("inf")]),
        ["0.1", "-0.0", "0.0", "nan", "inf"],
    ),
    "half": (pa.array(np.array([0.5], np.float16)), ["0.5"]),
    "string": (pa.array(["a", None, "b"]), ["a", None, "b"]),
    "dictionary": (pa.array(["a", None, "b"]).dictionary_encode(), ["a", None, "b"]),
    "large": (pa.array(["a", None], pa.large_string()), ["a", None]),
    "view": (pa.array(["a", None], pa.string_view()), ["a", None]),
    "null": (pa.nulls(2), [None]),
}
KINDS = {
    "unsigned": "integer", "date64": "date", "us": "timestamp", "ns": "timestamp",
    "zone": "timestamp", "half": "float", "dictionary": "string", "large": "string",
    "view": "string",
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_values_are_exact_and_typed(name: str) -> None:
    column, wanted = TYPES[name]
    partitions, which, starts = KeyRuns(["k"]).runs(pa.table({"k": column}))
    found = [json.loads(values)["k"] for _, values in partitions]
    assert [found[i]["value"] for i in which] == wanted
    assert {x["type"] for x in found} == {KINDS.get(name, name)}
    assert starts.tolist() == list(range(len(wanted)))


@pytest.mark.parametrize("bits", [32, 64])
def test_narrow_decimals(bits: int) -> None:
    make = getattr(pa, f"decimal{bits}", None)
    if make is None:
        pytest.skip("this pyarrow has no narrow decimals")
    table = pa.table({"k": pa.array([decimal.Decimal("1.5")], make(5, 1))})
    assert KeyRuns(["k"]).runs(table)[0][0][0] == "k=1.5"


@pytest.mark.parametrize(
    "column",
    [pa.array([[1]]), pa.array([{"a": 1}]), pa.array([b"a"]), pa.array([1], pa.time32("s"))],
)
def test_types_without_an_exact_text_are_refused(column: pa.Array) -> None:
    with pytest.raises(SurgeError, match="cannot be a partition key"):
        KeyRuns(["k"]).runs(pa.table({"k": column}))


VALUES = st.one_of(st.none(), st.sampled_from(["a", "b", "", NULL_FOLDER, "a/b"]))


@given(st.lists(st.tuples(VALUES, st.integers(0, 3) | st.none()), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_runs_are_the_equal_neighbours(rows: list[tuple[str | None, int | None]]) -> None:
    finder = KeyRuns(["k", "n"])
    for part in (rows, rows[::-1]):
        table = pa.table(
            {
                "k": pa.array([k for k, _ in part], pa.string()),
                "n": pa.array([n for _, n in part], pa.int64()),
            }
        )
        partitions, which, starts = finder.runs(table)
        assert starts[0] == 0 and len(set(partitions)) == len(partitions)
        stops = [*starts[1:].tolist(), len(part)]
        for run, (start, stop) in enumerate(zip(starts.tolist(), stops, strict=True)):
            assert len(set(part[start:stop])) == 1
            assert run == 0 or part[start] != part[start - 1]
            exact = json.loads(partitions[which[run]][1])
            assert (exact["k"]["value"], exact["n"]["value"]) == part[start]


@given(st.lists(st.tuples(VALUES, st.integers(0, 3) | st.none()), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_first_rows_are_where_a_value_changes(rows: list[tuple[str | None, int | None]]) -> None:
    text = pa.array([k for k, _ in rows], pa.string())
    number = pa.array([n for _, n in rows], pa.int64())
    wanted = [i for i, row in enumerate(rows) if not i or row != rows[i - 1]]
    for column in (text, text.dictionary_encode(), text.dictionary_encode("encode")):
        assert first_rows([column, number]).tolist() == wanted
    shifted = pa.concat_arrays([text[:1], text]).dictionary_encode()[1:]
    assert first_rows([shifted, number, pa.nulls(len(rows))]).tolist() == wanted


def test_runs_may_be_made_to_begin_at_given_rows() -> None:
    table = pa.table({"k": ["a", "a", "a", "b", "b"]})
    _, which, starts = KeyRuns(["k"]).runs(table, np.array([0, 2, 3]))
    assert starts.tolist() == [0, 2, 3] and which.tolist() == [0, 0, 1]


def test_a_name_is_encoded_as_far_as_readers_need() -> None:
    assert encode_name("Größe_漢.x-1") == "Größe_漢.x-1"
    assert encode_name("a b=c/é\u0301ﬁ") == "a%20b%3Dc%2Fé%CC%81%EF%AC%81"
    assert [encode_name(x) for x in (".", "..", "_x", ".x")] == ["%2E", "%2E.", "%5Fx", "%2Ex"]
