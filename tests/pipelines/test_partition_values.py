"""Any value as a partition: what stands on disk, and what the usual readers make of it."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from tests.pipelines.harness import conserved, listing, read_output, run_here, write_rows

NULL = "__HIVE_DEFAULT_PARTITION__"
LONG = {"x": 300, "é": 200, "漢": 120, "😀": 90, "/": 100}
VALUES: list[str | None] = [
    None, "", NULL, NULL.lower(), "%5F" + NULL[1:], "null", "NULL", "/", ".", "..", "../../x",
    "a/b", "/etc/passwd", "a\0b", "\0", "new\nline", "\r\n", "\t", " ", "a b", "trailing.", "aux ",
    "a=b", "=", "k=v/z", "%", "%2F", "%%41", "+", "a+b", "~", "a~b", "~root", "$HOME", "_x", ".x",
    "\\", "*", "?", "[a]", "{a}", "'", '"', ";", "é", "e\u0301", "ﬁ", "fi", "Å", "\u212b", "ß",
    "\u2028", "\x85", "\ufeff", "\u202e", "true", "1", "01", "1.0", "nan", "2020-01-01",
    *[char * count + end for char, count in LONG.items() for end in ("", "1", "2")],
]  # fmt: skip


def metadata(output: Path) -> dict[str, dict[str, Any]]:
    """Partition folder -> its exact values."""
    found = {}
    for path in sorted(output.rglob("part-*.parquet")):
        name = path.parent.relative_to(output).as_posix()
        if not name.startswith("_surge"):
            schema = pq.read_schema(path)
            found[name] = json.loads(schema.metadata[b"surge.partition"])
            assert schema.names[-1] == "embedding"
    return found


def hive(output: Path, **types: pa.DataType) -> ds.Partitioning:
    return ds.partitioning(pa.schema(list(types.items())), flavor="hive")


@pytest.fixture(scope="module")
def values(shared_data: Path) -> list[str | None]:
    naughty = json.loads((shared_data / "naughty_strings" / "blns.json").read_text())
    return list(dict.fromkeys([*VALUES, *naughty]))


@pytest.fixture(scope="module")
def by_value(values: list[str | None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a corpus whose partitions, and texts, are those values."""
    root = tmp_path_factory.mktemp("values")
    texts = ["null" if v is None else v for v in values]
    rows = {"k": values, "text": texts, "i": list(range(len(values)))}
    write_rows(root / "in" / "a.parquet", rows, row_group_size=100)
    # every value again, in another order and file
    write_rows(root / "in" / "b.parquet", {n: column[::-1] for n, column in rows.items()})
    assert run_here(input=root / "in", output=root / "out", partition_by="k") == 0
    assert {path.name for path in root.iterdir()} == {"in", "out"}
    return root / "out"


def test_each_value_is_a_folder_with_its_exact_value(
    by_value: Path, values: list[str | None]
) -> None:
    exact, output = metadata(by_value), read_output(by_value)
    assert {p.name for p in by_value.iterdir()} == {*exact, "_surge"}
    found = {}
    for folder, table in output.items():
        first, second = table.column("i").to_pylist()
        assert first == second and table.column_names == ["text", "i", "embedding"]
        found[first] = exact[folder]["k"]
        assert len(folder.encode()) <= 255
        text = "null" if values[first] is None else values[first]
        assert table.column("text").to_pylist() == [text, text]
    assert found == {i: {"type": "string", "value": v} for i, v in enumerate(values)}
    assert conserved(by_value)["partitions_encoded"] == len(values)


def cut(by_value: Path) -> set[int]:
    """Values whose folder name is cut, so that readers cannot give them back."""
    output = read_output(by_value)
    return {t.column("i")[0].as_py() for folder, t in output.items() if "~" in folder}


def check(found: dict[int, Any], values: list[str | None], cut_: set[int], *but: str) -> None:
    assert found.keys() == set(range(len(values)))
    for i, value in enumerate(values):
        if i in cut_:
            assert found[i].rpartition("~")[0] == value[: len(found[i].rpartition("~")[0])]
        elif value not in but:
            assert found[i] == value, value


def test_pyarrow_gives_the_values_back(by_value: Path, values: list[str | None]) -> None:
    table = ds.dataset(
        by_value, partitioning=hive(by_value, k=pa.string()), format="parquet"
    ).to_table(columns=["i", "k"])
    found = dict(zip(table["i"].to_pylist(), table["k"].to_pylist(), strict=True))
    # it decodes first, and takes what comes out for the null folder
    check(found, values, cut(by_value), NULL)
    assert table.num_rows == 2 * len(values)


def test_duckdb_gives_the_values_back(by_value: Path, values: list[str | None]) -> None:
    found = duckdb.sql(
        f"select i, k from read_parquet('{by_value}/*=*/**/*.parquet',"
        " hive_partitioning=true, hive_types_autocast=false)"
    ).fetchall()
    check(dict(found), values, cut(by_value))
    assert len(found) == 2 * len(values)


def test_pandas_gives_the_values_back(by_value: Path, values: list[str | None]) -> None:
    """Without more it cannot read any null folder, its own ones included: it makes categories."""
    frame = pd.read_parquet(by_value, partitioning=hive(by_value, k=pa.string()))
    keys = [None if pd.isna(k) else k for k in frame["k"]]
    check(dict(zip(frame["i"], keys, strict=True)), values, cut(by_value), NULL)
    assert len(frame["embedding"].iloc[0]) == 16


def test_pandas_reads_a_corpus_without_nulls_as_it_is(tmp_path: Path) -> None:
    write_rows(tmp_path / "in" / "a.parquet", {"text": ["a", "b", "c"], "k": ["x", "y/z", "x"]})
    assert run_here(input=tmp_path / "in", output=tmp_path / "out", partition_by="k") == 0
    frame = pd.read_parquet(tmp_path / "out")
    rows = sorted(zip(frame["text"], frame["k"].astype(str), strict=True))
    assert rows == [("a", "x"), ("b", "y/z"), ("c", "x")]


TYPES: dict[str, tuple[pa.Array, str, list[Any]]] = {
    "int": (pa.array([-(2**63), 2**63 - 1, None]), "integer", [-(2**63), 2**63 - 1, None]),
    "small": (pa.array([1, None, -1], pa.int8()), "integer", [1, None, -1]),
    "unsigned": (pa.array([2**64 - 1, 0, 1], pa.uint64()), "integer", [2**64 - 1, 0, 1]),
    "date": (
        pa.array([datetime.date(1, 1, 1), datetime.date(9999, 12, 31), None]),
        "date",
        ["0001-01-01", "9999-12-31", None],
    ),
    "bool": (pa.array([True, False, None]), "boolean", [True, False, None]),
    "us": (
        pa.array([0, 1, -1], pa.timestamp("us")),
        "timestamp",
        ["1970-01-01 00:00:00", "1970-01-01 00:00:00.000001", "1969-12-31 23:59:59.999999"],
    ),
    "ns": (
        pa.array([0, 1, None], pa.timestamp("ns")),
        "timestamp",
        ["1970-01-01 00:00:00", "1970-01-01 00:00:00.000000001", None],
    ),
    "zone": (
        pa.array([0, 1500, None], pa.timestamp("ms", "Europe/Paris")),
        "timestamp",
        ["1970-01-01 00:00:00Z", "1970-01-01 00:00:01.5Z", None],
    ),
    "decimal": (
        pa.array([decimal.Decimal("1.10"), decimal.Decimal("-0.01"), None], pa.decimal128(38, 2)),
        "decimal",
        ["1.10", "-0.01", None],
    ),
    "float": (pa.array([0.1, float("nan"), None]), "float", ["0.1", "nan", None]),
}


def test_typed_values(tmp_path: Path) -> None:
    """One file a type, each with keys of another type under the same column name."""
    wanted: dict[str, list[tuple[str, Any]]] = {}
    for name, (column, kind, exact) in TYPES.items():
        rows = {"text": [f"{name} {i}" for i in range(3)], "t": [name] * 3, "k": column}
        write_rows(tmp_path / "in" / f"{name}.parquet", rows)
        wanted[name] = [(kind, value) for value in exact]
    (tmp_path / "in" / "lines.jsonl").write_text(
        '{"text": "lines 0", "t": "lines", "k": 12345678901234567890}\n'
        '{"text": "lines 1", "t": "lines", "k": null}\n'
        '{"text": "lines 2", "t": "lines"}\n'
    )
    (tmp_path / "in" / "flags.jsonl").write_text(
        '{"text": "flags 0", "t": "flags", "k": true}\n'
        '{"text": "flags 1", "t": "flags", "k": false}\n'
        '{"text": "flags 2", "t": "flags", "k": null}\n'
    )
    wanted["lines"] = [("string", "12345678901234567890"), ("string", None)]
    wanted["flags"] = [("boolean", True), ("boolean", False), ("boolean", None)]
    out = tmp_path / "out"
    assert run_here(input=tmp_path / "in", output=out, partition_by="t,k") == 0
    exact, output = metadata(out), read_output(out)
    found: dict[str, dict[str, tuple[str, Any]]] = {}
    for folder, table in output.items():
        for text in table.column("text").to_pylist():
            value = exact[folder]["k"]
            found.setdefault(text.split()[0], {})[text] = (value["type"], value["value"])
        assert exact[folder]["t"] == {"type": "string", "value": text.split()[0]}
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        got = found[name]
        assert [got[f"{name} {i}"] for i in range(len(values))] == values, name
    assert found["lines"]["lines 2"] == ("string", None)
    conserved(out)
    # readers that are told the types give them back
    for name, kind in {"int": pa.int64(), "date": pa.date32(), "bool": pa.bool_()}.items():
        dataset = ds.dataset(out / f"t={name}", partitioning=hive(out, k=kind), format="parquet")
        assert dataset.to_table().sort_by("text")["k"].to_pylist() == TYPES[name][0].to_pylist()
    rows = duckdb.sql(
        f"select text, k from read_parquet('{out}/t=ns/*/*.parquet', hive_partitioning=true,"
        " hive_types={'t': varchar, 'k': timestamp_ns}) order by text"
    ).fetchall()
    assert [k is None for _, k in rows] == [False, False, True]


def test_equal_text_of_different_types_is_one_partition(tmp_path: Path) -> None:
    write_rows(tmp_path / "in" / "a.parquet", {"text": ["a", "b"], "k": [1, 2]})
    write_rows(tmp_path / "in" / "b.parquet", {"text": ["c", "d"], "k": ["2", "x"]})
    assert run_here(input=tmp_path / "in", output=tmp_path / "out", partition_by="k") == 0
    output = read_output(tmp_path / "out")
    texts = {folder: table.column("text").to_pylist() for folder, table in output.items()}
    assert texts == {"k=1": ["a"], "k=2": ["b", "c"], "k=x": ["d"]}
    assert metadata(tmp_path / "out")["k=2"] == {"k": {"type": "integer", "value": 2}}


def test_odd_column_names(tmp_path: Path) -> None:
    names = ["a b", "c=d", "e/f", "_g", ".h", "ü", "%41", "K", "n" * 120]
    values = {name: [f"{i}/1", None] for i, name in enumerate(names)}
    write_rows(tmp_path / "in" / "a.parquet", {"text": ["x", "y"], **values})
    out = tmp_path / "out"
    assert run_here(input=tmp_path / "in", output=out, partition_by=",".join(names)) == 0
    (tops,) = [[p.name for p in out.iterdir() if p.name != "_surge"]]
    assert sorted(tops) == [f"a%20b={x}" for x in ("0%2F1", NULL)]
    exact = metadata(out)
    assert len(exact) == 2
    for folder, found in exact.items():
        assert len(folder.split("/")) == len(names)
        assert not any(part[0] in "_." or len(part.encode()) > 255 for part in folder.split("/"))
        value = found["a b"]["value"]
        assert found == {
            n: {"type": "string", "value": value and f"{i}/1"} for i, n in enumerate(names)
        }
    # pyarrow decodes the columns' names too, but for the one that is cut
    kinds = dict.fromkeys(names[:-1], pa.string())
    dataset = ds.dataset(out, partitioning=hive(out, **kinds), format="parquet")
    rows = dataset.to_table(columns=["text", *names[:-1]]).sort_by("text").to_pylist()
    assert rows[0] == {"text": "x", **{n: values[n][0] for n in names[:-1]}}


def test_no_value_leads_out_of_the_output(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "c"
    evil = ["..", "../..", "../../../../evil", "/tmp/evil", ".", "a/../../x", "\0/x", "_surge", ""]
    write_rows(root / "in" / "x.parquet", {"text": evil, "k": evil, "_surge": evil})
    write_rows(root / "in" / "k=..%2F..%2Fevil" / "y.parquet", {"text": ["h"], "_surge": ["/"]})
    write_rows(root / "in" / "k=.." / "y.parquet", {"text": ["h"], "_surge": [".."]})
    before = set(listing(tmp_path))
    options = {"input": root / "in", "output": root / "out", "partition_by": "k,_surge"}
    assert run_here(**options) == 0
    outside = {n for n in listing(tmp_path) if not n.startswith("a/b/c/out")}
    assert outside == before
    output = read_output(root / "out")
    assert sum(table.num_rows for table in output.values()) == len(evil) + 2
    exact = metadata(root / "out")
    assert {v["k"]["value"] for v in exact.values()} == {*evil, "../../evil"}
    conserved(root / "out")
