"""Columns of files that differ."""

from __future__ import annotations

import datetime
import decimal

import pyarrow as pa
import pytest

from surge_beam.transforms import columns
from surge_beam.transforms.columns import (
    as_read,
    common_columns,
    fill_untyped,
    join_tables,
    mark_untyped,
    pack_columns,
    typed,
    unpack_columns,
    without_type,
)

Columns = list[tuple[str, pa.DataType]]


def common(*files: Columns, inferred: bool = False) -> dict[str, pa.DataType]:
    packed = common_columns(pack_columns(pa.schema(file), inferred=inferred) for file in files)
    return {field.name: field.type for field in unpack_columns(packed)} if packed else {}


def test_a_column_whose_types_disagree_becomes_text() -> None:
    date = datetime.date(2020, 1, 2)
    tables = [
        pa.table({"t": ["a"], "x": [1], "y": [[1]], "z": [1], "m": [2**62]}),
        pa.table({"t": pa.array(["b"]).dictionary_encode(), "x": ["q"], "y": [["a"]], "z": [2.5]}),
        pa.table({"t": pa.array(["c"], pa.large_string()), "y": [date], "m": [1.5]}),
    ]
    assert join_tables(tables).to_pydict() == {
        "t": ["a", "b", "c"],
        "x": ["1", "q", None],
        "y": ["[1]", '["a"]', "2020-01-02"],
        "z": [1.0, 2.5, None],
        "m": [str(2**62), None, "1.5"],
    }


def test_files_that_agree_have_nothing_to_agree_on() -> None:
    one = pa.schema([pa.field("x", pa.int64(), False, {"k": "v"}), ("y", pa.null())], {"m": "n"})
    two = pa.schema([("x", pa.int64()), ("y", pa.null())])
    packed = [pack_columns(schema, inferred=False) for schema in (one, two)]
    assert packed[0] == packed[1] and common_columns(packed) == b""
    assert common_columns([]) == b""
    assert common([("x", pa.int64())], inferred=True) == {}


NULLS = pa.list_(pa.null())
STRUCT = pa.struct([pa.field("a", pa.int64(), nullable=False)])


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([pa.int64(), pa.float64()], pa.float64()),
        ([pa.int32(), pa.int64(), pa.null()], pa.int64()),
        ([pa.null(), pa.list_(pa.null()), pa.list_(pa.int64())], pa.list_(pa.int64())),
        ([pa.string(), pa.large_string()], pa.large_string()),
        ([pa.decimal128(10, 2), pa.decimal128(12, 4)], pa.decimal128(12, 4)),
        ([STRUCT, pa.null()], pa.struct([("a", pa.int64())])),
        ([pa.string(), pa.dictionary(pa.int8(), pa.string())], pa.string()),
        ([pa.decimal128(10, 2), pa.int64()], pa.decimal128(21, 2)),
        ([pa.decimal128(38, 0), pa.uint8()], pa.decimal128(38, 0)),
        ([pa.list_(pa.float32(), 2), pa.null()], pa.list_(pa.float32())),
        ([pa.uuid(), pa.null()], pa.uuid()),
    ],
)
def test_a_type_that_holds_every_file_s(kinds: list[pa.DataType], expected: pa.DataType) -> None:
    for order in (kinds, kinds[::-1]):
        assert common(*([("x", kind)] for kind in order)) == {"x": expected}


@pytest.mark.parametrize(
    "kinds",
    [
        [pa.date32(), pa.timestamp("us", "UTC")],
        [pa.bool_(), pa.int64()],
        [pa.string(), pa.binary()],
        [pa.list_(pa.string()), pa.list_(pa.binary())],
        [pa.decimal128(10, 2), pa.float64()],
    ],
)
def test_types_that_were_written_down_are_left_where_they_would_lose(
    kinds: list[pa.DataType],
) -> None:
    files = [[("x", kind)] for kind in kinds] + [[("y", pa.int8())]]
    packed = common_columns(pack_columns(pa.schema(f), inferred=False) for f in files)
    for kind in kinds:
        table = pa.table({"x": pa.array([None], kind)})
        assert typed(table, packed).schema.field("x").type == kind
    # one that lacks it has to have some type
    assert typed(pa.table({"y": [1]}), packed).schema.field("x").type == kinds[0]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([pa.null()], pa.string()),
        ([pa.list_(pa.null())], pa.list_(pa.string())),
        ([pa.null(), pa.list_(pa.null())], pa.list_(pa.string())),
        ([pa.null(), pa.int64(), pa.float64()], pa.float64()),
        ([pa.bool_(), pa.int64()], pa.string()),
        ([pa.list_(pa.int64()), pa.int64()], pa.string()),
    ],
)
def test_types_that_were_inferred_become_text_at_last(
    kinds: list[pa.DataType], expected: pa.DataType
) -> None:
    for order in (kinds, kinds[::-1]):
        assert common(*([("x", kind)] for kind in order), inferred=True) == {"x": expected}


def test_what_was_written_down_does_not_become_text_for_a_guess() -> None:
    guessed = pack_columns(pa.schema([("x", pa.string()), ("y", pa.null())]), inferred=True)
    written = pack_columns(pa.schema([("x", pa.int64()), ("y", pa.int8())]), inferred=False)
    found = unpack_columns(common_columns([guessed, written]))
    assert found == pa.schema([("x", pa.string()), ("y", pa.int8())])
    assert found.field("x").metadata and not found.field("y").metadata


def test_columns_of_all_files_in_the_order_they_are_met() -> None:
    found = common([("b", pa.int8()), ("a", STRUCT)], [("c", pa.bool_()), ("b", pa.int8())])
    a = pa.struct([("a", pa.int64())])
    assert list(found.items()) == [("b", pa.int8()), ("a", a), ("c", pa.bool_())]


def test_tables_of_other_things_each_keep_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_COMMON", 3)
    files: list[Columns] = [[(f"{i}-{j}", pa.int8()) for j in range(2)] for i in range(2)]
    assert not common(*files)
    files[0].append(("untyped", pa.null()))
    assert common(*files, inferred=True) == {"untyped": pa.string()}


def test_a_partition_as_it_is_written() -> None:
    wanted = pa.schema(
        [
            ("late", pa.list_(pa.int64())),
            ("x", pa.float64()),
            ("t", pa.string()),
            ("big", pa.float64()),
        ]
    )
    table = pa.table({"hive": ["h"], "x": [2], "t": [[1, None]], "big": [2**60 + 1]})
    found = typed(table, pack_columns(wanted, inferred=False))
    assert found.to_pydict() == {
        "late": [None], "x": [2.0], "t": ["[1,null]"], "big": [2**60 + 1], "hive": ["h"],
    }  # fmt: skip
    assert found.column_names == ["late", "x", "t", "big", "hive"]
    # digits are worth more than one type
    assert found.schema.field("big").type == pa.int64()
    assert found.schema.field("late").type == pa.list_(pa.int64())
    keyed = typed(table, pack_columns(wanted, inferred=False), keys=("late",))
    assert keyed == found.drop_columns(["late"])


def test_joining_loses_no_digit() -> None:
    ids = pa.array([b"0123456789abcdef"], pa.binary(16)).cast(pa.uuid())
    tables = [
        pa.table({"d": [decimal.Decimal("1.23")], "b": ["text"], "i": [decimal.Decimal("0.5")]}),
        pa.table({"d": pa.array([0.5], pa.float32()), "b": [b"\xff"], "i": [2**63 - 1], "id": ids}),
    ]
    found = join_tables(tables)
    assert found.to_pydict() == {
        "d": ["1.23", "0.5"],
        "b": ["text", "\\xff"],
        "i": [decimal.Decimal("0.5"), decimal.Decimal(2**63 - 1)],
        "id": [None, *ids.to_pylist()],
    }


def test_lists_of_fixed_size_are_not_null() -> None:
    """Arrow cannot read such a list back from Parquet."""
    vector = pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2))
    tables = [pa.table({"v": vector}), pa.table({"x": [1]}), pa.table({"v": pa.nulls(1)})]
    found = join_tables(tables)
    assert found.column("v").type == pa.list_(pa.float32())
    assert found.column("v").to_pylist() == [[1.0, 2.0], None, None]
    assert join_tables(tables[:1] * 2).column("v").type == vector.type


def test_nulls_alone_take_the_type_of_the_others() -> None:
    tables = [
        pa.table(
            {"x": pa.nulls(1), "l": pa.array([[None]], pa.list_(pa.null())), "m": pa.nulls(1)}
        ),
        pa.table({"x": ["a"], "l": [[1]], "m": [1]}),
        pa.table({"x": ["b"], "l": [[2]], "m": [1.5]}),
    ]
    found = fill_untyped(tables)
    assert [t.to_pydict() for t in found] == [t.to_pydict() for t in tables]
    assert {t.schema.field("x").type for t in found} == {pa.string()}
    assert {t.schema.field("l").type for t in found} == {pa.list_(pa.int64())}
    assert found[0].schema.field("m").type == pa.null()


def test_what_joining_made_text_stays_text() -> None:
    """Of one partition in two files: a text of digits could be parsed again, and lose some."""
    table = join_tables([pa.table({"m": [2**62 + 1]}), pa.table({"m": [1.5]})])
    wanted = pack_columns(pa.schema([("m", pa.float64())]), inferred=False)
    assert typed(table, wanted).to_pydict() == {"m": [str(2**62 + 1), "1.5"]}


def test_values_become_text_as_they_would_be_read() -> None:
    id_ = pa.array([b"0123456789abcdef"], pa.binary(16)).cast(pa.uuid())
    day = datetime.date(2020, 1, 2)
    table = pa.table({"id": id_, "day": [day], "list": [["a"]], "flag": [True]})
    text = pa.schema([(name, pa.string()) for name in table.column_names])
    found = typed(table, pack_columns(text, inferred=False))
    assert found.to_pydict() == {
        "id": ["30313233-3435-3637-3839-616263646566"],
        "day": ["2020-01-02"],
        "list": ['["a"]'],
        "flag": ["true"],
    }


def test_a_guessed_type_gives_way() -> None:
    schema = pa.schema([("n", pa.string()), ("e", pa.list_(pa.string())), ("t", pa.string())])
    marked = mark_untyped(schema, ["e", "n"])
    assert as_read(marked, inferred=True) == pa.schema(
        [("n", pa.null()), ("e", pa.list_(pa.null())), ("t", pa.string())]
    )
    assert as_read(schema, inferred=True) == as_read(marked, inferred=False) == schema
    for guess in (
        pa.array(["", None])[1:],
        pa.array([[None], None, [None, None], []], pa.list_(pa.string()))[1:],
    ):
        assert without_type(guess).to_pylist() == guess.to_pylist()
        assert without_type(guess).type == _guess(guess.type)


def _guess(kind: pa.DataType) -> pa.DataType:
    schema = mark_untyped(pa.schema([("x", kind)]), ["x"])
    return as_read(schema, inferred=True).field("x").type
