"""Files that cannot be read, or are odd, among good ones."""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_beam.transforms import plan_files
from surge_beam.transforms.exchange import Exchange
from tests.pipelines.harness import (
    conserved,
    dead_letters,
    read_output,
    run_here,
    run_job,
    write_rows,
)

T = ["a", "b", "c"]
GOOD = {f"{name}.parquet": [f"{name} {i}" for i in range(50)] for name in ("a", "m", "z")}


def write_good(folder: Path, column: str = "text") -> None:
    for name, texts in GOOD.items():
        write_rows(folder / name, {column: texts})


def check_good(output: Path, column: str = "text") -> None:
    found = read_output(output)
    for name, texts in GOOD.items():
        assert found[name].column(column).to_pylist() == texts
        vectors = found[name].column("embedding").combine_chunks().flatten().to_numpy()
        assert np.isfinite(vectors).all() and len(vectors) == 16 * len(texts)


def letters_of(output: Path) -> dict[str, list[dict[str, Any]]]:
    """File name -> its dead letters."""
    found = collections.defaultdict(list)
    for letter in dead_letters(output).to_pylist():
        found[Path(letter["file"]).name].append(letter)
    return found


@pytest.fixture(scope="module")
def hostile(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """Good files, and below ``bad`` every hostile one, with its names."""
    folder = tmp_path_factory.mktemp("hostile") / "in"
    write_good(folder)
    bad = folder / "bad"
    bad.mkdir()
    for path in (shared_data / "bad_parquet").glob("*.parquet*"):
        shutil.copy(path, bad / path.name.removesuffix(".encrypted"))
    with gzip.open(shared_data / "arrow_fuzz_inputs" / "cases.jsonl.gz", "rt") as lines:
        for case in map(json.loads, lines):
            name = f"{case['kind']}-{case['name'].replace('/', '_')}"
            ending = ".csv" if case["kind"] == "csv" else ".parquet"
            (bad / (name + ending)).write_bytes(base64.b64decode(case["content_base64"]))
    names = {path.name for path in bad.iterdir()}
    assert len(names) == 29 + 279
    return folder, names


@pytest.mark.parametrize("glob", [False, True])
def test_every_hostile_file_is_one_dead_letter(
    hostile: tuple[Path, set[str]], tmp_path: Path, glob: bool
) -> None:
    folder, names = hostile
    write_rows(tmp_path / "in" / "good.parquet", {"text": T})
    done = run_job(input=f"{folder}/**/*.*" if glob else folder, output=tmp_path / "out")
    assert done.stdout.strip().splitlines()[-1] == f"{len(names)} dead letters"
    check_good(tmp_path / "out")
    letters = letters_of(tmp_path / "out")
    assert letters.keys() == names
    for found in letters.values():
        (letter,) = found
        assert letter["stage"] == "read" and letter["row"] is None and letter["attempts"] == 1
        assert len(letter["message"]) > 10 and "Traceback" not in letter["message"]
    report = conserved(tmp_path / "out")
    assert report["files_failed"] == report["partitions_failed"] == len(names)
    assert report["partitions_encoded"] == len(GOOD)


@pytest.mark.parametrize("column", ["no_dict", "c_customer_id"])
def test_hostile_files_that_do_have_the_text_column(
    hostile: tuple[Path, set[str]], tmp_path: Path, column: str
) -> None:
    folder, _ = hostile
    write_good(tmp_path / "in", column)
    for path in (folder / "bad").glob("parquet-*"):
        (tmp_path / "in" / path.name).symlink_to(path)
    assert run_here(input=tmp_path / "in", output=tmp_path / "out", text_column=column) == 0
    check_good(tmp_path / "out", column)
    letters, output = letters_of(tmp_path / "out"), read_output(tmp_path / "out")
    assert any(x[0]["error"] == "UnreadableRowGroup" for x in letters.values())
    for path in (folder / "bad").glob("parquet-*"):
        assert len(letters[path.name]) == 1 or path.name in output, path.name
    report = conserved(tmp_path / "out")
    assert report["partitions_encoded"] == len(output)
    assert report["partitions_failed"] == sum(1 for n in letters if n not in output)


def corrupt_group(path: Path, group: int) -> None:
    """Overwrites a piece of a page of the first column."""
    data = bytearray(path.read_bytes())
    at = pq.read_metadata(path).row_group(group).column(0).data_page_offset + 200
    data[at : at + 20] = b"\xff" * 20
    path.write_bytes(bytes(data))


def grouped(path: Path) -> Path:
    """A file of three row groups of 1,000 rows, the second of them corrupt."""
    texts = [f"row {i} {'x' * 50}{i * 7919 % 1000}" for i in range(3000)]
    write_rows(
        path,
        {"text": texts, "k": [i % 4 for i in range(3000)]},
        row_group_size=1000,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    corrupt_group(path, 1)
    return path


def _footer(folder: Path) -> list[str]:
    (folder / "n.parquet").write_bytes(b"PAR1 and no more")
    return ["n.parquet"]


def _column(folder: Path) -> list[str]:
    write_rows(folder / "n.parquet", {"other": T})
    return ["n.parquet", "no column 'text'"]


def _null(folder: Path) -> list[str]:
    write_rows(folder / "n.parquet", {"text": ["a"] * 30 + [None]})
    return ["n.parquet, row 30: the text is null"]


def _line(folder: Path) -> list[str]:
    (folder / "n.jsonl").write_text('{"text": "a"}\n\n{"text": \n')
    return ["n.jsonl, line 3: "]


def _null_line(folder: Path) -> list[str]:
    (folder / "n.jsonl").write_text('{"text": "a"}\n\n{"text": null}\n')
    return ["n.jsonl, line 3: the text is null"]


def _group(folder: Path) -> list[str]:
    grouped(folder / "n.parquet")
    return ["n.parquet: "]


def _gone(folder: Path) -> list[str]:
    (folder / "n.parquet").symlink_to(folder / "nothing")
    return ["n.parquet"]


def _odd_name(folder: Path) -> list[str]:
    write_rows(folder / "n\n o.parquet", {"other": T})
    return ["n\\n o.parquet", "no column 'text'"]


@pytest.mark.parametrize(
    "make", [_footer, _column, _null, _line, _null_line, _group, _gone, _odd_name]
)
def test_fail_names_the_file_and_row(
    make: Callable[[Path], list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_good(tmp_path / "in")
    wanted = make(tmp_path / "in")
    options = {"input": tmp_path / "in", "output": tmp_path / "out", "on_bad_input": "fail"}
    if make is _null:
        done = run_job(check=False, **options)
        assert done.returncode == 1
        last = done.stderr.strip().split("\n")[-1]
    else:
        assert run_here(**options) == 1
        last = capfd.readouterr().err.strip().split("\n")[-1]
    for text in wanted:
        assert text in last
    for name, table in read_output(tmp_path / "out").items():
        assert table.column("text").to_pylist() == GOOD[name]


KEPT: dict[str, pa.Array] = {
    "list": pa.array([["a"], [], None]),
    "nested": pa.array([[["a"]], [], None]),
    "struct": pa.array([{"p": 1, "q": "z"}, None, {"p": 2, "q": None}]),
    "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64())),
    "list_of_struct": pa.array([[{"a": 1}], [], None]),
    "large_list": pa.array([["a"], [], None], pa.large_list(pa.string())),
    "fixed_list": pa.array([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
    "ms": pa.array([1, None, -1], pa.timestamp("ms")),
    "us": pa.array([1, None, -1], pa.timestamp("us")),
    "ns": pa.array([2**63 - 1, None, -(2**63)], pa.timestamp("ns")),
    "zone": pa.array([1, None, -1], pa.timestamp("us", "Europe/Paris")),
    "decimal": pa.array([decimal.Decimal("1.10"), None, decimal.Decimal(-2)], pa.decimal128(9, 2)),
    "decimal256": pa.array([decimal.Decimal("1.10"), None, None], pa.decimal256(50, 2)),
    "date": pa.array([0, None, 10**7], pa.date32()),
    "time": pa.array([0, None, 5], pa.time64("ns")),
    "duration": pa.array([0, None, 5], pa.duration("us")),
    "half": pa.array(np.array([1, 2, 3], np.float16)),
    "infinite": pa.array([1e300, None, float("inf")]),
    "binary": pa.array([b"\xff", None, b""]),
    "fixed_binary": pa.array([b"\xffa", None, b"bb"], pa.binary(2)),
    "dictionary": pa.array(["x", None, "x"]).dictionary_encode(),
    "large_string": pa.array(["x", None, "x"], pa.large_string()),
    "string_view": pa.array(["x", None, "x"], pa.string_view()),
    "binary_view": pa.array([b"x", None, b"x"], pa.binary_view()),
    "views": pa.array([["a"], [], None], pa.list_(pa.string_view())),
    "unsigned": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "bool": pa.array([True, None, False]),
    "null": pa.nulls(3),
}


@pytest.mark.parametrize("keyed", [False, True])
def test_kept_columns_come_out_as_they_were(tmp_path: Path, keyed: bool) -> None:
    """With keys, whose rows are interleaved, each partition is taken out of its file."""
    for name, column in KEPT.items():
        rows = pa.table({"text": T, "x": column, "k": [f"{name} 0", f"{name} 1", f"{name} 0"]})
        write_rows(tmp_path / "in" / f"{name}.parquet", rows)
    keys = {"partition_by": "k"} if keyed else {}
    assert run_here(input=tmp_path / "in", output=tmp_path / "out", min_rows=1, **keys) == 0
    output = read_output(tmp_path / "out")
    for name in KEPT:
        # as Parquet gives it back: it has no timestamps in seconds, for one
        wanted = pq.ParquetFile(tmp_path / "in" / f"{name}.parquet").read()
        if keyed:
            wanted = wanted.drop_columns(["k"])
        found = output[f"k={name}%200" if keyed else f"{name}.parquet"].drop_columns(["embedding"])
        # Arrow cannot take rows of a view, so that it comes out as plain text or binary
        assert found.schema == wanted.schema or "view" in name
        wanted = wanted.cast(found.schema)
        assert found.equals(wanted.take([0, 2]) if keyed else wanted), name


def test_kept_columns_through_the_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []

    def merge(self: Exchange, *args: Any) -> Any:
        for plan in original(self, *args):
            moved.append(plan.files[0].url)
            yield plan

    original = Exchange.merge
    monkeypatch.setattr(Exchange, "merge", merge)
    monkeypatch.setattr(plan_files, "SCATTER_LIMIT", 0.0)
    rows = pa.table({"text": T, "k": ["x", "y", "x"], **KEPT})
    for name in ("a", "b"):
        write_rows(tmp_path / "in" / f"{name}.parquet", rows)
    assert run_here(input=tmp_path / "in", output=tmp_path / "out", partition_by="k") == 0
    assert moved and all("bucket-" in url for url in moved)
    wanted = pq.ParquetFile(tmp_path / "in" / "a.parquet").read().drop_columns(["k"])
    for folder, chosen in (("k=x", [0, 2]), ("k=y", [1])):
        found = read_output(tmp_path / "out")[folder].drop_columns(["embedding"])
        one = wanted.cast(found.schema).take(chosen)
        assert found.equals(pa.concat_tables([one, one]))


def odd_files(folder: Path) -> dict[str, list[str] | str | None]:
    """Writes odd files; name -> the texts that come out of it, or a piece of its dead letter."""
    wanted: dict[str, list[str] | str | None] = {}

    def put(name: str, rows: Any, result: list[str] | str | None) -> None:
        if isinstance(rows, bytes):
            (folder / name).write_bytes(rows)
        else:
            write_rows(folder / name, rows)
        wanted[name] = result

    folder.mkdir(parents=True)
    for name, column in {
        "large": pa.array(T, pa.large_string()),
        "view": pa.array(T, pa.string_view()),
        "dictionary": pa.array(T).dictionary_encode(),
    }.items():
        put(f"text-{name}.parquet", {"text": column}, T)
    for name, column in {
        "int": pa.array([1, 2, 3]),
        "binary": pa.array([b"a", b"b", b"c"]),
        "list": pa.array([["a"], ["b"], ["c"]]),
        "struct": pa.array([{"a": 1}] * 3),
        "bool": pa.array([True] * 3),
        "date": pa.array([datetime.date(2020, 1, 1)] * 3),
    }.items():
        put(f"text-{name}.parquet", {"text": column}, "not text")
    good = write_rows(folder / "good.parquet", {"text": T}).read_bytes()
    wanted["good.parquet"] = T
    put("empty.parquet", b"", "0 bytes")
    put("head.parquet", good[: len(good) // 2], "")
    put("tail.parquet", good[len(good) // 2 :], "")
    put("none.parquet", {"other": T}, "no column 'text'; the file has 'other'")
    put("embedding.parquet", {"text": T, "embedding": [1, 2, 3]}, "'embedding'")
    put("reserved.parquet", {"text": T, "__surge_row": [1, 2, 3]}, "reserved")
    put("places.parquet", {"text": T, "__surge_place": [1, 2, 3]}, "reserved")
    packed = gzip.compress((folder / "reserved.parquet").read_bytes())
    put("reserved.parquet.gz", packed, "reserved")
    put("reserved.jsonl", b'{"text": "a", "__surge_file": 1}\n', "reserved")
    twice = pa.Table.from_arrays([pa.array(T)] * 3, ["text", "a", "a"])
    put("twice.parquet", twice, "column 'a' occurs more than once")
    texts = pa.Table.from_arrays([pa.array(T)] * 2, ["text", "text"])
    put("texts.parquet", texts, "column 'text' occurs more than once")
    dots = [pa.array(T), pa.array(["x"] * 3), pa.array([{"b": 1, "text": "y"}] * 3)]
    put("dots.parquet", pa.Table.from_arrays(dots, ["text", "a.b", "a"]), T)
    put("unnamed.parquet", pa.Table.from_arrays(dots[:2], ["text", ""]), T)
    put("zero.parquet", {"text": pa.array([], pa.string())}, None)
    pq.ParquetWriter(folder / "groupless.parquet", pa.schema([("text", pa.string())])).close()
    wanted["groupless.parquet"] = None
    put("csv.csv", b"", "empty")
    put("other.csv", b"a,b\n1,2\n", "'text'")
    put("other.jsonl", b'{"a": 1}\n{"b": "x"}\n', "'text'")
    put("blank.jsonl", b"\n\n", None)
    put("gone.jsonl.gz", gzip.compress(b'{"text": "a"}\n')[:-9], "")
    put("plain.jsonl.gz", b'{"text": "a"}\n', "")
    put("plain.parquet.gz", gzip.compress(b"hello"), "not a Parquet file")
    put("packed.parquet.gz", gzip.compress(good), T)
    (folder / "dangling.parquet").symlink_to(folder / "nothing")
    wanted["dangling.parquet"] = "No such file"
    (folder / "link.parquet").symlink_to(folder / "good.parquet")
    wanted["link.parquet"] = T
    return wanted


def test_odd_files(tmp_path: Path) -> None:
    wanted = odd_files(tmp_path / "in")
    write_rows(tmp_path / "in" / "nulls.parquet", {"text": pa.nulls(3), "x": [1, 2, 3]})
    inner = tmp_path / "in" / "folder.parquet"
    write_rows(inner / "inner.parquet", {"text": T})
    assert run_here(input=tmp_path / "in", output=tmp_path / "out") == 0
    output, letters = read_output(tmp_path / "out"), letters_of(tmp_path / "out")
    for name, result in wanted.items():
        if isinstance(result, str):
            (letter,) = letters[name]
            assert result in letter["message"] and letter["row"] is None, (name, letter)
            assert letter["error"] in ("UnreadableFileError", "UnusableFileError")
            assert name not in output
        else:
            assert not letters.get(name), name
            found = output.get(name)
            assert (found and found.column("text").to_pylist()) == result, name
    assert [(x["row"], x["error"]) for x in letters["nulls.parquet"]] == [
        (i, "NullText") for i in range(3)
    ]
    assert json.loads(letters["nulls.parquet"][1]["record"]) == {"text": None, "x": 2}
    assert output["folder.parquet/inner.parquet"].column("text").to_pylist() == T
    report = conserved(tmp_path / "out")
    bad = sum(isinstance(x, str) for x in wanted.values())
    assert report["files_failed"] == bad and report["dead_letters"] == bad + 3
    assert report["partitions_failed"] == bad + 1


@pytest.mark.parametrize(("keyed", "scatter"), [(False, 8.0), (True, 1e9), (True, 0.0)])
def test_the_sound_row_groups_of_a_file_come_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keyed: bool, scatter: float
) -> None:
    monkeypatch.setattr(plan_files, "SCATTER_LIMIT", scatter)
    path = grouped(tmp_path / "in" / "n.parquet")
    write_good(tmp_path / "in")
    texts = [f"row {i} {'x' * 50}{i * 7919 % 1000}" for i in range(3000)]
    sound = [i for i in range(3000) if not 1000 <= i < 2000]
    keys = {"partition_by": "k"} if keyed else {}
    if keyed:
        for name in GOOD:
            (tmp_path / "in" / name).unlink()
    for _ in range(2):
        assert run_here(input=tmp_path / "in", output=tmp_path / "out", **keys) == 0
        output = read_output(tmp_path / "out")
        if keyed:
            for k in range(4):
                wanted = [texts[i] for i in sound if i % 4 == k]
                assert output[f"k={k}"].column("text").to_pylist() == wanted
        else:
            check_good(tmp_path / "out")
            assert output["n.parquet"].column("text").to_pylist() == [texts[i] for i in sound]
        (letter,) = dead_letters(tmp_path / "out").to_pylist()
        assert letter["file"] == str(path) and letter["error"] == "UnreadableRowGroup"
        assert conserved(tmp_path / "out")["dead_letters"] == 1


def test_files_of_one_partition_whose_schemas_differ(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    date = datetime.date(2020, 1, 2)
    write_rows(folder / "a.parquet", {"text": ["0"], "k": ["p"], "x": [1], "y": [[1]], "z": [1]})
    write_rows(
        folder / "b.parquet",
        {"text": pa.array(["1"]).dictionary_encode(), "k": ["p"], "x": ["q"], "y": [["a"]]},
    )
    write_rows(folder / "c.parquet", {"x": [date], "k": ["p"], "new": [date], "text": ["2"]})
    (folder / "d.jsonl").write_text('{"text": "3", "k": "p", "z": 2.5}\n')
    write_rows(folder / "e.parquet", {"text": pa.array(["4"], pa.string_view()), "k": ["p"]})
    write_rows(folder / "f.parquet", {"text": pa.nulls(1), "k": ["p"]})
    assert run_here(input=folder, output=tmp_path / "out", partition_by="k") == 0
    (found,) = read_output(tmp_path / "out").values()
    assert found.drop_columns(["embedding"]).to_pydict() == {
        "text": ["0", "1", "2", "3", "4"],
        "x": ["1", "q", "2020-01-02", None, None],
        "y": ["[1]", '["a"]', None, None, None],
        "z": [1.0, None, None, 2.5, None],
        "new": [None, None, date, None, None],
    }
    (letter,) = dead_letters(tmp_path / "out").to_pylist()
    assert letter["file"].endswith("f.parquet") and letter["row"] == 0
    conserved(tmp_path / "out")


@pytest.mark.parametrize("scatter", [8.0, 0.0])
def test_the_columns_of_a_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scatter: float
) -> None:
    monkeypatch.setattr(plan_files, "SCATTER_LIMIT", scatter)
    folder = tmp_path / "in"
    write_rows(
        folder / "a.parquet",
        {
            "text": ["x", None, "poison", None],
            "k": ["p/q", None, "p/q", None],
            "when": pa.array([0, 10**7, None, 1], pa.date32()),
            "share": [0.5, float("nan"), 1.0, None],
            "raw": [b"", b"\xff", b"", None],
        },
    )
    (folder / "b.jsonl").write_text('{"text": "y", "k": 1}\n\n[1]\n{"text": 5}\n{"k": true}\n')
    model = "dummy:16:poison=poison"
    assert run_here(input=folder, output=tmp_path / "out", partition_by="k", model=model) == 0
    found = dead_letters(tmp_path / "out")
    assert found.schema.names == [
        "stage", "error", "message", "file", "row", "partition", "record", "attempts"
    ]  # fmt: skip
    by_place = {(Path(x["file"]).name, x["row"]): x for x in found.to_pylist()}
    assert sorted(by_place) == [
        ("a.parquet", 1), ("a.parquet", 2), ("a.parquet", 3),
        ("b.jsonl", 3), ("b.jsonl", 4), ("b.jsonl", 5),
    ]  # fmt: skip
    null = by_place["a.parquet", 1]
    assert (null["stage"], null["error"], null["attempts"]) == ("read", "NullText", 1)
    assert null["partition"] == "k=__HIVE_DEFAULT_PARTITION__"
    record = json.loads(null["record"], parse_constant=pytest.fail)
    assert (record["k"], record["text"], record["share"]) == (None, None, "nan")
    assert "29349-01-26" in record["when"] and record["raw"] == "\\xff"
    poison = by_place["a.parquet", 2]
    assert (poison["stage"], poison["partition"]) == ("encode", "k=p%2Fq")
    assert json.loads(poison["record"])["k"] == "p/q" and poison["attempts"] >= 1
    assert by_place["b.jsonl", 3]["error"] == "NotAnObject"
    assert json.loads(by_place["b.jsonl", 3]["record"]) == "[1]"
    assert by_place["b.jsonl", 4]["error"] == "NonTextValue"
    assert by_place["b.jsonl", 5]["partition"] == "k=true"
    conserved(tmp_path / "out")


def test_int96_far_from_now_is_what_it_was(tmp_path: Path) -> None:
    """64 bits of nanoseconds hold no year 9999, the usual open end."""
    far = [datetime.datetime(9999, 12, 31), datetime.datetime(1, 1, 1), None]
    rows = pa.table({"text": T, "until": pa.array(far, pa.timestamp("us"))})
    write_rows(tmp_path / "in" / "a.parquet", rows, use_deprecated_int96_timestamps=True)
    assert run_here(input=tmp_path / "in", output=tmp_path / "kept") == 0
    assert read_output(tmp_path / "kept")["a.parquet"]["until"].to_pylist() == far
    assert run_here(input=tmp_path / "in", output=tmp_path / "key", partition_by="until") == 0
    named = {
        json.loads(t.schema.metadata[b"surge.partition"])["until"]["value"]: t["text"].to_pylist()
        for t in read_output(tmp_path / "key").values()
    }
    assert {k and k[:10]: v for k, v in named.items()} == {
        "9999-12-31": ["a"],
        "0001-01-01": ["b"],
        None: ["c"],
    }


def test_a_column_without_nulls_that_another_file_lacks(tmp_path: Path) -> None:
    """As DuckDB writes constants."""
    schema = pa.schema([("text", pa.string()), pa.field("version", pa.int32(), nullable=False)])
    folder = tmp_path / "in" / "day=1"
    write_rows(folder / "a.parquet", pa.table([["a"], [1]], schema=schema))
    write_rows(folder / "b.parquet", {"text": ["b"]})
    write_rows(folder / "c.parquet", pa.table([["c"], [3]], schema=schema))
    assert run_here(input=tmp_path / "in", output=tmp_path / "out") == 0
    assert read_output(tmp_path / "out")["day=1"]["version"].to_pylist() == [1, None, 3]


@pytest.mark.parametrize("partition_by", ["", "other"])
def test_a_column_that_contradicts_its_folder_is_a_dead_letter(
    tmp_path: Path, partition_by: str
) -> None:
    def write(folder: str, values: object) -> None:
        rows = {"text": T, "other": T, "service": values}
        write_rows(tmp_path / "in" / folder / "x.parquet", rows, row_group_size=2)

    write("service=a", ["a", "a", "b"])
    write("service=b", ["b", None, "b"])
    write("service=01", pa.array([1, 1, 1], pa.int64()))
    write("service=2", pa.array([2, 2, 3], pa.int64()))
    write("service=3", pa.array([4.5, 3, 3]))
    options = {"partition_by": partition_by} if partition_by else {}
    assert run_here(input=tmp_path / "in", output=tmp_path / "out", **options) == 0
    letters = dead_letters(tmp_path / "out").to_pylist()
    said = sorted((x["file"].split("/")[-2], x["message"].split(" and ")[0]) for x in letters)
    assert said == [
        ("service=2", "the column 'service' holds 3"),
        ("service=a", "the column 'service' holds 'b'"),
    ]
    assert conserved(tmp_path / "out")["rows_out"] == 9


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"id;text\n1;x\n", "no row has a column 'text'; the file has 'id;text': its"),
        ("a.csv", b"id, text\n1,x\n", "the file has 'id', ' text': there is a blank"),
        ("a.jsonl", b'{"body": "x"}\n', "no row has a column 'text'; the file has 'body'"),
        ("a.tsv", b"id\ttext\n1\tx\n", "read as Parquet, since its name does not tell"),
    ],
)
def test_what_a_file_has_in_place_of_the_text_is_said(
    tmp_path: Path,
    name: str,
    content: bytes,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_bytes(content)
    assert run_here(input=tmp_path / name, output=tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert words in said and "1 of 1 files could not be used, such as " in said
    assert "none of the files can be used" in said
    assert words in dead_letters(tmp_path / "out")["message"][0].as_py()


def test_a_csv_with_the_index_of_pandas(tmp_path: Path) -> None:
    pd.DataFrame({"text": T, "n": [1, 2, 3]}).to_csv(tmp_path / "a.csv")
    assert run_here(input=tmp_path / "a.csv", output=tmp_path / "out") == 0
    found = read_output(tmp_path / "out")["a.csv"]
    assert found.column_names[:3] == ["Unnamed: 0", "text", "n"]
    assert found["Unnamed: 0"].to_pylist() == ["0", "1", "2"]
