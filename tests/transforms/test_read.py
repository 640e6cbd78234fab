"""Scanning, planning and reading, without a pipeline: every row once, in order."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.policy.superbatch import Limits
from surge_beam.records import BadInputError, Segment, SuperBatchPlan, unpack
from surge_beam.transforms import manifest, read
from surge_beam.transforms.files import Store, list_input
from surge_beam.transforms.plan import Planner
from surge_beam.transforms.read import ReadConfig, Scanner, SuperBatchReader

LIMITS = Limits(min_rows=5, max_rows=12, max_bytes=1 << 20)


def read_all(
    folder: Path, output: Path, config: ReadConfig, limits: Limits = LIMITS
) -> dict[str, list[tuple[dict[str, Any], str, int]]]:
    """Partition folder -> (row, its file's name, its number there) of all its rows in order."""
    store = Store(str(output))
    scanner, reader = Scanner(config, store), SuperBatchReader(config, store)
    runs = [x for file in list_input(str(folder)).files[::-1] for x in scanner.scan(file)]
    planner = Planner(runs, manifest.load(store))
    parts: dict[str, dict[int, list[tuple[dict[str, Any], str, int]]]] = {}
    for plan in planner.plan(limits):
        if not isinstance(plan, SuperBatchPlan):
            continue
        assert plan.rows <= limits.max_rows
        segments, broken = reader.read(plan)
        assert not broken
        for found in segments:
            assert found.table.num_rows == found.segment.rows == len(found.origin)
            where = [(plan.files[f].name, n) for f, n in found.origin.tolist()]
            rows = [(row, *w) for row, w in zip(found.table.to_pylist(), where, strict=True)]
            parts.setdefault(found.segment.folder, {})[found.segment.part] = rows
    reader.close()
    return {f: [row for _, rows in sorted(p.items()) for row in rows] for f, p in parts.items()}


KEYS = st.sampled_from(["a", "b", "", None, "x/y"])
ROWS = st.lists(st.tuples(KEYS, st.sampled_from([0, 1, None])), max_size=25)
NAMES = ["a.parquet", "a/b.parquet", "a.b.parquet", "z=1/c.parquet", "é.jsonl", "d.csv"]


@given(st.dictionaries(st.sampled_from(NAMES), ROWS, min_size=1), st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_every_row_comes_once_and_in_order(files: dict[str, list], group: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "in")
        wanted: dict[tuple[Any, Any], list[tuple[str, str, int]]] = {}
        for file, rows in sorted(files.items()):
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            texts = [f"{file} {i}" for i in range(len(rows))]
            write_file(path, texts, rows, group)
            csv = file.endswith(".csv")
            text = file.endswith((".csv", ".jsonl"))
            first = 2 if csv else 1 if text else 0
            for i, (k, n) in enumerate(rows):
                key = (k or "", "" if n is None else str(n)) if csv else (k, n)
                wanted.setdefault(key, []).append((texts[i], file, i + first))
        found = read_all(folder, Path(name, "out"), ReadConfig(partition_by=("k", "n")))
    lists = [[(row["text"], *where) for row, *where in rows] for rows in found.values() if rows]
    assert sorted(lists) == sorted(merged(wanted).values())


def merged(wanted: dict[tuple[Any, Any], list]) -> dict[tuple[Any, Any], list]:
    """Keys of equal text are one folder, whatever their type; rows in the order of the input."""
    out: dict[tuple[Any, Any], list] = {}
    for (k, n), rows in wanted.items():
        out.setdefault((k, n if n is None else str(n)), []).extend(rows)
    return {key: sorted(rows, key=lambda r: (r[1], r[2])) for key, rows in out.items()}


def write_file(path: Path, texts: list[str], rows: list[tuple[Any, Any]], group: int) -> None:
    keys, numbers = [k for k, _ in rows], [n for _, n in rows]
    if path.suffix == ".parquet":
        table = pa.table(
            {
                "text": pa.array(texts, pa.string()),
                "k": pa.array(keys, pa.string()),
                "n": pa.array(numbers, pa.int64()),
            }
        )
        pq.write_table(table, path, row_group_size=group)
    elif path.suffix == ".jsonl":
        lines = [
            json.dumps({"text": t, "k": k, "n": n}) + "\n"
            for t, k, n in zip(texts, keys, numbers, strict=True)
        ]
        path.write_text("".join(lines))
    else:
        lines = ["text,k,n\n"]
        for t, k, n in zip(texts, keys, numbers, strict=True):
            lines.append(f"{t},{k or ''},{'' if n is None else n}\n")
        path.write_text("".join(lines))


def test_a_large_partition_is_read_in_parts_over_files_and_row_groups(tmp_path: Path) -> None:
    for i in range(5):
        texts = [f"{i} {j}" for j in range(23)]
        path = tmp_path / "in" / "k=a" / f"{i}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": texts, "j": range(23)}), path, row_group_size=4)
    found = read_all(tmp_path / "in", tmp_path / "out", ReadConfig())
    assert found == {
        "k=a": [
            ({"text": f"{i} {j}", "j": j}, f"k=a/{i}.parquet", j)
            for i in range(5)
            for j in range(23)
        ]
    }


def test_columns_are_those_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "h=1"
    folder.mkdir(parents=True)
    rows = {"text": ["t"], "k": ["a"], "x": [1], "x.y": [2], "y": [{"x": 1, "text": 3}]}
    pq.write_table(pa.table(rows), folder / "a.parquet")

    def columns(**config: tuple[str, ...]) -> list[str]:
        (rows,) = read_all(tmp_path / "in", tmp_path / "out", ReadConfig(**config)).values()
        return list(rows[0][0])

    assert columns() == ["text", "k", "x", "x.y", "y"]
    assert columns(partition_by=("k",)) == ["text", "x", "x.y", "y", "h"]
    assert columns(partition_by=("h", "k")) == ["text", "x", "x.y", "y"]
    assert set(columns(partition_by=("k",), keep_columns=("h", "x.y"))) == {"text", "x.y", "h"}
    assert columns(keep_columns=("y",)) == ["text", "y"]
    assert columns(partition_by=("text",)) == ["text", "k", "x", "x.y", "y", "h"]


def test_the_text_s_bytes_count_where_it_is_not_kept(tmp_path: Path) -> None:
    """A SuperBatch is bounded by bytes, and the text is what is read."""
    path = tmp_path / "in" / "a.parquet"
    path.parent.mkdir()
    texts = [f"{i} {'x' * 1000}" for i in range(100)]
    pq.write_table(pa.table({"text": texts, "i": range(100)}), path, use_dictionary=False)
    (file,) = list_input(str(path)).files
    scanner = Scanner(ReadConfig(keep_columns=("i",)), Store(str(tmp_path / "out")))
    (runs,) = map(unpack, scanner.scan(file))
    assert runs.nbytes.sum() > 100_000


def test_a_record_is_json_whatever_the_row_holds() -> None:
    row = {
        "far": pa.array([10**7], pa.date32()),
        "ns": pa.array([1], pa.timestamp("ns")),
        "nan": [float("nan")],
        "inf": [[float("-inf"), 1.0]],
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        "twins": pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]),
        "bytes": [b"\xff\x00"],
        "none": pa.nulls(1),
        "text": ["é\n\u2028"],
    }
    segment = Segment("k=1", '{"k": {"type": "integer", "value": 1}}', "", 0, 1, 1, ())
    record = json.loads(read.record_json(pa.table(row), 0, segment), parse_constant=pytest.fail)
    assert {n: v for n, v in record.items() if n not in ("far", "ns", "twins")} == {
        "k": 1, "nan": "nan", "inf": ["-inf", 1.0], "map": [["a", 1]], "bytes": "\\xff\x00",
        "none": None, "text": "é\n\u2028",
    }  # fmt: skip
    assert "29349-01-26" in record["far"]
    file = Segment("a.parquet", '{"file": {"type": "string", "value": "a"}}', "", 0, 1, 1, ())
    assert json.loads(read.record_json(pa.table({"x": [1]}), 0, file)) == {"x": 1}


def _date_key(path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "k": pa.array([2**31 - 1], pa.date32())}), path)


def _list_key(path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "k": [[1]]}), path)


def _no_key(path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_date_key, None),
        (_list_key, "cannot be a partition key"),
        (_no_key, "no key column 'k'"),
    ],
)
def test_keys_that_cannot_be_used(
    tmp_path: Path, make: Callable[[Path], None], message: str | None
) -> None:
    path = tmp_path / "in" / "a.parquet"
    path.parent.mkdir()
    make(path)
    found = read_all(path.parent, tmp_path / "out", ReadConfig(partition_by=("k",)))
    assert bool(found) == (message is None)
    letters = list((tmp_path / "out" / read.FILE_LETTERS).glob("*"))
    assert len(letters) == (message is not None)
    if message:
        assert message in pq.read_table(letters[0])["message"][0].as_py()
        strict = ReadConfig(partition_by=("k",), fail_on_bad_input=True)
        with pytest.raises(BadInputError, match=message):
            read_all(path.parent, tmp_path / "out", strict)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("numbers") / "i.parquet"
    pq.write_table(pa.table({"i": range(read.BATCH_ROWS * 2 + 100)}), path)
    return path


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_ranges_of_a_row_group(numbers: Path, data: st.DataObject) -> None:
    """Ascending, disjoint ranges that batches of the reader cut anywhere."""
    rows = read.BATCH_ROWS * 2 + 100
    edges = data.draw(
        st.lists(
            st.one_of(st.integers(0, rows), st.sampled_from([4095, 4096, 4097, 8191, 8192, 8193])),
            min_size=2,
            max_size=12,
            unique=True,
        ).map(sorted)
    )
    ranges = np.array(edges[: len(edges) // 2 * 2], np.int64).reshape(-1, 2)
    cursor = read._Cursor(str(numbers), ["i"], inferred=False)
    found = [
        i for b in cursor.read(0, ranges[:, 0], ranges[:, 1]) for i in b.column("i").to_pylist()
    ]
    cursor.close()
    assert found == [i for lo, hi in ranges.tolist() for i in range(lo, hi)]
