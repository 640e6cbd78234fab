"""What may go in: formats, folders, globs, names, hive folders, and the order of rows."""

from __future__ import annotations

import base64
import bz2
import gzip
import json
import lzma
import os
import shutil
import tempfile
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import zstandard
from fsspec.implementations.local import LocalFileSystem
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from surge_beam.records import SurgeError
from surge_beam.transforms import plan_files
from surge_beam.transforms.columns import UNTYPED_KEY
from surge_beam.transforms.files import list_input
from tests.pipelines.harness import (
    conserved,
    dead_letters,
    read_output,
    report,
    run_here,
    write_rows,
)

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
JSONL = b"""\xef\xbb\xbf{"text": "one", "k": 1, "n": 1}\r
\r
{"text": "two\\nlines", "k": true, "n": 2.5}

{"text": null, "k": "a"}
{"text": "three", "k": null}
{"text": 4, "k": 2}
{"text": ["five"]}
not json
{"text": "\xff"}
[1]
{"text": "\\ud800"}
{"text": "six", "k": {"a": [1]}, "n": null}
{"text": "", "k": 2}
{"k": 3}
{"text": "seven", "n": 7}"""
JSONL_ROWS = {
    "text": ["one", "two\nlines", "three", "six", "", "seven"],
    "k": ["1", "true", None, '{"a":[1]}', "2", None],
    "n": [1.0, 2.5, None, None, None, 7.0],
}
JSONL_BAD = {
    5: "NullText", 7: "NonTextValue", 8: "NonTextValue", 9: "InvalidJson", 10: "InvalidUtf8",
    11: "NotAnObject", 12: "InvalidUtf8", 15: "NullText",
}  # fmt: skip
CSV = b'''\xef\xbb\xbftext,k\r
one,1\r
"two
lines, ""quoted""",2

three,
four
five,1,2
s\xffx,1
"six" x,1
,7
seven,"a
b"
eight,8'''
CSV_ROWS = {
    "text": ["one", 'two\nlines, "quoted"', "three", "", "seven", "eight"],
    "k": ["1", "2", "", "7", "a\nb", "8"],
}
CSV_BAD = {7: "WrongFieldCount", 8: "WrongFieldCount", 9: "InvalidUtf8", 10: "InvalidCsv"}


def rows_of(table: pa.Table) -> dict[str, list]:
    return table.drop_columns(["embedding"]).to_pydict()


def test_text_files_plain_and_compressed(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for ending, pack in PACK.items():
        (folder / f"a.jsonl{ending}").write_bytes(pack(JSONL))
        (folder / f"a.NDJSON{ending}").write_bytes(pack(JSONL))
        (folder / f"a.csv{ending}").write_bytes(pack(CSV))
    # two members in a row, as appending leaves them
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(JSONL[:40]) + gzip.compress(JSONL[40:]))
    assert run_here(input=folder, output=tmp_path / "out") == 0
    output = read_output(tmp_path / "out")
    csv = {**CSV_ROWS, "n": [None] * len(CSV_ROWS["text"])}
    assert output.keys() == {path.name for path in folder.iterdir()}
    for name, table in output.items():
        assert rows_of(table) == (csv if ".csv" in name else JSONL_ROWS), name
    found: dict[str, dict[int, str]] = {}
    for letter in dead_letters(tmp_path / "out").to_pylist():
        assert (letter["stage"], letter["attempts"]) == ("read", 1)
        assert json.loads(letter["record"]) is not None
        found.setdefault(Path(letter["file"]).name, {})[letter["row"]] = letter["error"]
    assert found == {n: CSV_BAD if ".csv" in n else JSONL_BAD for n in output}
    assert conserved(tmp_path / "out")["files_passed_over"] == 0


MIXED = {
    "a": [{"n": 1, "none": None, "tags": [], "late": None}, {"n": None, "none": None}],
    "b": [{"n": 2.5, "tags": [7], "more": "m", "flag": True}],
    "c": [{"n": 3, "none": 1, "late": {"x": 1}, "flag": 2}],
}


@pytest.mark.parametrize("partition_by", ["", "part"])
def test_files_of_other_columns_and_types_make_one_dataset(
    tmp_path: Path, partition_by: str
) -> None:
    """JSON lines leave out what they have no value for, and write 2.0 as 2."""
    for name, rows in MIXED.items():
        texts = [{"part": i % 2, "text": f"{name} {i}", **row} for i, row in enumerate(rows)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, texts)))
    out = tmp_path / "out"
    options = {"partition_by": partition_by} if partition_by else {}
    assert run_here(input=f"{tmp_path}/*.jsonl", output=out, min_rows=1, **options) == 0
    conserved(out)
    expected = {
        "a 0": (1.0, None, [], None, None, None),
        "a 1": (None, None, None, None, None, None),
        "b 0": (2.5, None, [7], None, "m", "true"),
        "c 0": (3.0, 1, None, '{"x":1}', None, "2"),
    }
    names = ("n", "none", "tags", "late", "more", "flag")
    found = read_output(out)
    (kinds,) = {
        frozenset((field.name, field.type) for field in table.schema if field.name in names)
        for table in found.values()
    }
    assert dict(kinds) == {
        "n": pa.float64(), "none": pa.int64(), "tags": pa.list_(pa.int64()),
        "late": pa.string(), "more": pa.string(), "flag": pa.string(),
    }  # fmt: skip
    pattern = f"{out}/{'*=*/**' if partition_by else '[!_]*'}/*.parquet"
    by_arrow = ds.dataset(str(out), exclude_invalid_files=False).to_table().to_pylist()
    by_duckdb = (
        duckdb.sql(f"select * from read_parquet('{pattern}')").arrow().read_all().to_pylist()
    )
    for rows in (by_arrow, by_duckdb):
        assert {r["text"]: tuple(r[n] for n in names) for r in rows} == expected


@pytest.mark.parametrize("said", [b'["n", "text"]', b"{", b'["nowhere"]'])
def test_a_file_s_own_metadata_is_not_ours(tmp_path: Path, said: bytes) -> None:
    table = pa.table({"text": ["a"], "n": [1]}).replace_schema_metadata({UNTYPED_KEY: said})
    write_rows(tmp_path / "in" / "a.parquet", table)
    (tmp_path / "in" / "b.parquet.gz").write_bytes(
        gzip.compress((tmp_path / "in" / "a.parquet").read_bytes())
    )
    assert run_here(input=tmp_path / "in", output=tmp_path / "out") == 0
    for found in read_output(tmp_path / "out").values():
        assert rows_of(found) == {"text": ["a"], "n": [1]}
    assert conserved(tmp_path / "out")["dead_letters"] == 0


def test_lines_with_keys(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    (tmp_path / "b.csv").write_bytes(CSV)
    options = {"output": tmp_path / "out", "partition_by": "k"}
    assert run_here(input=f"{tmp_path}/*.*", **options) == 0
    output = read_output(tmp_path / "out")
    texts = {folder: table.column("text").to_pylist() for folder, table in output.items()}
    assert texts == {
        "k=1": ["one", "one"],
        "k=2": ["", 'two\nlines, "quoted"'],
        "k=true": ["two\nlines"],
        "k=__HIVE_DEFAULT_PARTITION__": ["three", "seven"],
        "k=%7B%22a%22%3A%5B1%5D%7D": ["six"],
        "k=": ["three"],
        "k=7": [""],
        "k=8": ["eight"],
        "k=a%0Ab": ["seven"],
    }
    partitions = {x["row"]: x["partition"] for x in dead_letters(tmp_path / "out").to_pylist()}
    assert partitions[5] == "k=a" and partitions[15] == "k=3"
    conserved(tmp_path / "out")


def test_json_parsing_cases_as_lines(shared_data: Path, tmp_path: Path) -> None:
    lines, kinds = [], []
    with gzip.open(shared_data / "json_parsing_cases" / "cases.jsonl.gz", "rt") as cases:
        for case in map(json.loads, cases):
            content = base64.b64decode(case["content_base64"])
            if content.strip() and b"\n" not in content:
                lines += [content, b'{"text": "x", "v": ' + content + b"}"]
                kinds += ["", case["expect"]]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines) + b'\n{"text": "last"}\n')
    options = {"input": tmp_path / "in.jsonl", "output": tmp_path / "out", "keep_columns": "text"}
    assert run_here(**options) == 0
    (table,) = read_output(tmp_path / "out").values()
    letters = {x["row"] for x in dead_letters(tmp_path / "out").to_pylist()}
    assert table.num_rows + len(letters) == len(lines) + 1
    assert table.column("text").to_pylist()[-1] == "last"
    for line, kind in enumerate(kinds, 1):
        if kind == "accept":
            assert line not in letters, lines[line - 1]
        elif kind == "reject":
            # two cases that closing braces make whole
            assert line in letters or json.loads(lines[line - 1]), lines[line - 1]
        elif not kind:
            assert line in letters
    conserved(tmp_path / "out")


def test_naughty_texts_come_out_unchanged(shared_data: Path, tmp_path: Path) -> None:
    texts = json.loads((shared_data / "naughty_strings" / "blns.json").read_text())
    write_rows(tmp_path / "in" / "a.parquet", {"text": texts})
    lines = [json.dumps({"text": t}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts)]
    (tmp_path / "in" / "b.jsonl").write_text("\n".join(lines))
    assert run_here(input=tmp_path / "in", output=tmp_path / "out") == 0
    found = read_output(tmp_path / "out")
    for table in found.values():
        assert table.column("text").to_pylist() == texts
    assert found["a.parquet"].column("embedding").equals(found["b.jsonl"].column("embedding"))
    assert report(tmp_path / "out")["dead_letters"] == 0


def texts_of(output: Path) -> dict[str, list[str]]:
    return {f: t.column("text").to_pylist() for f, t in read_output(output).items()}


def test_a_folder_means_its_files_with_a_known_ending(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    good = ["a.parquet", "B.PARQUET", "sub/c.parquet", "sub/x=y.parquet", "sp ace/ü%41.parquet",
            "a::b.parquet", "#?.parquet", "[x].parquet", "new\nline.parquet", "~.parquet",
            "sub/-.parquet", "'\".parquet", "\\.parquet"]  # fmt: skip
    passed = ["_SUCCESS", "_hidden.parquet", ".hidden.parquet", "_meta/a.parquet",
              ".git/a.parquet", "sub/_x/a.parquet", "readme.md", "info.json", "noending",
              "a.parquet.crc", "a.parquet.sha.gz", "x.txt"]  # fmt: skip
    for name in good + passed:
        write_rows(folder / name, {"text": [name]})
    (folder / "linked.parquet").symlink_to(folder / "a.parquet")
    (folder / "linked").symlink_to(folder / "sub")
    (folder / "empty.parquet").mkdir()
    os.mkfifo(folder / "pipe.parquet")
    listings = [list_input(x) for x in (str(folder), f"{folder}/", f"file://{folder}")]
    assert listings[0] == listings[1] == listings[2]
    assert [f.name for f in listings[0].files] == sorted([*good, "linked.parquet"])
    # and the folder that is a symbolic link, and the pipe
    assert listings[0].passed_over == len(passed) + 2
    out = tmp_path / "out"
    assert run_here(input=folder, output=out) == 0
    found = texts_of(out)
    assert sorted(t for (t,) in found.values()) == sorted([*good, "a.parquet"])
    assert found["sub/x%3Dy.parquet"] == ["sub/x=y.parquet"]
    assert found["sp%20ace/ü%2541.parquet"] == ["sp ace/ü%41.parquet"]
    assert found["linked.parquet"] == ["a.parquet"]
    assert conserved(out)["files_passed_over"] == len(passed) + 2


def test_a_glob_means_what_it_matches(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for name in ("a.parquet", "_b.parquet", "c.data", "sub/d.parquet", "sub/e.txt", "[1].parquet"):
        write_rows(folder / name, {"text": [name]})
    (folder / "f.json").write_text('{"text": "f.json"}\n')
    (folder / "g.md").write_text("# nothing\n")
    cases = {
        "*": ["[1].parquet", "_b.parquet", "a.parquet", "c.data", "f.json", "g.md"],
        "**/*.parquet": ["[1].parquet", "_b.parquet", "a.parquet", "sub/d.parquet"],
        "sub/*": ["d.parquet", "e.txt"],
        "s*/*.txt": ["sub/e.txt"],
        "?.[dp]a*": ["a.parquet", "c.data"],
        "c.data": ["c.data"],
        "[1].parquet": ["[1].parquet"],
    }
    for glob, wanted in cases.items():
        listing = list_input(f"{folder}/{glob}")
        assert ([f.name for f in listing.files], listing.passed_over) == (wanted, 0), glob
    os.mkfifo(folder / "pipe.parquet")
    listing = list_input(f"{folder}/*")
    assert ([f.name for f in listing.files], listing.passed_over) == (cases["*"], 1)
    out = tmp_path / "out"
    assert run_here(input=f"{folder}/*", output=out) == 0
    assert texts_of(out) == {n.replace("[1]", "%5B1%5D").replace("_b", "%5Fb"): [n]
                             for n in cases["*"][:-1]}  # fmt: skip
    (letter,) = dead_letters(out).to_pylist()
    assert letter["file"] == f"{folder}/g.md" and conserved(out)["files_passed_over"] == 1


@pytest.mark.parametrize("name", ["nothing", "*.nothing", "empty", "_only"])
def test_an_input_of_nothing_is_said(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    write_rows(tmp_path / "_only" / "_x.parquet", {"text": ["a"]})
    assert run_here(input=tmp_path / name, output=tmp_path / "out") != 0
    last = capfd.readouterr().err.strip().split("\n")[-1]
    assert name in last and ("no such input" in last or "no input files" in last)
    assert not read_output(tmp_path / "out")


def test_a_folder_that_may_not_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not pass for an empty one."""
    write_rows(tmp_path / "in" / "a.parquet", {"text": ["a"]})
    write_rows(tmp_path / "in" / "sub" / "b.parquet", {"text": ["b"]})
    listed = LocalFileSystem.ls

    def ls(self: LocalFileSystem, path: str, *args: Any, **kwargs: Any) -> Any:
        if path.rstrip("/").endswith("sub"):
            raise PermissionError(13, "Permission denied", path)
        return listed(self, path, *args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "ls", ls)
    with pytest.raises(SurgeError, match="Permission denied"):
        list_input(str(tmp_path / "in"))


def hive_corpus(folder: Path) -> None:
    for service, year in (("compute", 1), ("a b/c", 1), ("compute", 2), (None, 2)):
        part = "__HIVE_DEFAULT_PARTITION__" if service is None else service
        name = f"service={part.replace(' ', '%20').replace('/', '%2F')}/year={year}"
        for i in range(2):
            texts = [f"{service} {year} {i} {j}" for j in range(3)]
            write_rows(folder / name / f"{i}.parquet", {"text": texts, "owner": ["x", "y", "x"]})


def test_hive_folders_are_the_partitions(tmp_path: Path) -> None:
    hive_corpus(tmp_path / "in")
    assert run_here(input=tmp_path / "in", output=tmp_path / "out") == 0
    found = read_output(tmp_path / "out")
    assert {f: t.column("text").to_pylist() for f, t in found.items()} == {
        f"service={folder}/year={year}": [f"{s} {year} {i} {j}" for i in range(2) for j in range(3)]
        for folder, s, year in (
            ("compute", "compute", 1), ("a%20b%2Fc", "a b/c", 1), ("compute", "compute", 2),
            ("__HIVE_DEFAULT_PARTITION__", None, 2),
        )
    }  # fmt: skip
    assert {tuple(t.column_names) for t in found.values()} == {("text", "owner", "embedding")}
    # a glob above the hive folders means the same
    glob = f"{tmp_path}/in/*/year=1/*.parquet"
    assert run_here(input=glob, output=tmp_path / "glob") == 0
    assert read_output(tmp_path / "glob").keys() == {f for f in found if "year=1" in f}


def test_partition_by_a_hive_column_keeps_the_others(tmp_path: Path) -> None:
    hive_corpus(tmp_path / "in")
    options = {"input": tmp_path / "in", "output": tmp_path / "out"}
    assert run_here(partition_by="owner,service", **options) == 0
    found = read_output(tmp_path / "out")
    table = found["owner=x/service=compute"]
    assert table.column_names == ["text", "year", "embedding"]
    assert table.column("text").to_pylist() == [
        f"compute {year} {i} {j}" for year in (1, 2) for i in range(2) for j in (0, 2)
    ]
    assert table.column("year").to_pylist() == ["1"] * 4 + ["2"] * 4
    assert found["owner=y/service=__HIVE_DEFAULT_PARTITION__"].num_rows == 2
    dataset = ds.dataset(tmp_path / "out", partitioning="hive", format="parquet")
    assert dataset.count_rows() == conserved(tmp_path / "out")["rows_out"] == 24


def test_files_without_keys_are_partitions_that_readers_find(tmp_path: Path) -> None:
    for name in ("a.parquet", "x/a.parquet", "x/y/b.parquet"):
        write_rows(tmp_path / "in" / name, {"text": [name]})
    out = tmp_path / "out"
    assert run_here(input=tmp_path / "in", output=out) == 0
    assert texts_of(out) == {n: [n] for n in ("a.parquet", "x/a.parquet", "x/y/b.parquet")}
    assert ds.dataset(out, format="parquet").count_rows() == 3
    rows = duckdb.sql(f"select text from read_parquet('{out}/[!_]*/**/part-*.parquet')").fetchall()
    assert len(rows) == 3


def test_the_output_may_lie_in_the_input(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", {"text": ["a"]})
    for source in (tmp_path, f"{tmp_path}/**"):
        assert run_here(input=source, output=tmp_path / "out") == 0
        assert texts_of(tmp_path / "out") == {"a.parquet": ["a"]}
        assert report(tmp_path / "out")["files"] == 1


def test_a_changed_target_of_a_link_is_seen(tmp_path: Path) -> None:
    target = write_rows(tmp_path / "store" / "blob", {"text": ["aaa"]})
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.parquet").symlink_to(target)
    options = {"input": tmp_path / "in", "output": tmp_path / "out"}
    assert run_here(**options) == 0
    write_rows(target, {"text": ["bbb"]})
    os.utime(target, (1, 1))
    assert run_here(**options) == 0
    assert texts_of(tmp_path / "out") == {"x.parquet": ["bbb"]}


def test_a_name_that_is_not_utf8_is_said(tmp_path: Path) -> None:
    write_rows(tmp_path / "in" / "a.parquet", {"text": ["a"]})
    odd = os.fsencode(tmp_path / "in") + b"/\xff.parquet"
    shutil.copy(tmp_path / "in" / "a.parquet", odd)
    assert run_here(input=tmp_path / "in", output=tmp_path / "out") == 0
    assert texts_of(tmp_path / "out") == {"a.parquet": ["a"]}
    (letter,) = dead_letters(tmp_path / "out").to_pylist()
    assert letter["file"].endswith("\\xff.parquet") and "not UTF-8" in letter["message"]


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({}, ["text", "a", "k", "embedding"]),
        ({"keep_columns": "a"}, ["a", "embedding"]),
        ({"keep_columns": ","}, ["embedding"]),
        ({"keep_columns": "k,a,text"}, ["k", "a", "text", "embedding"]),
        ({"keep_columns": "k", "partition_by": "k"}, ["embedding"]),
        ({"partition_by": "text"}, ["a", "k", "embedding"]),
        ({"partition_by": "embedding"}, None),
    ],
)
def test_kept_columns(tmp_path: Path, options: dict[str, str], columns: list[str] | None) -> None:
    write_rows(tmp_path / "in" / "x.parquet", {"text": ["a", "b"], "a": [1, 2], "k": ["p", "q"]})
    assert run_here(input=tmp_path / "in", output=tmp_path / "out", **options) == 0
    found = read_output(tmp_path / "out")
    assert sum(t.num_rows for t in found.values()) == (2 if columns else 0)
    assert all(t.column_names == columns for t in found.values())
    assert conserved(tmp_path / "out")["dead_letters"] == (0 if columns else 1)
    if columns is None:
        (letter,) = dead_letters(tmp_path / "out").to_pylist()
        assert "embedding" in letter["message"]


def test_a_kept_column_is_null_where_a_file_lacks_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "in" / "h=1" / "x.parquet", {"text": ["a"], "a": [1], "k": ["p"]})
    write_rows(tmp_path / "in" / "h=1" / "y.parquet", {"text": ["b"], "k": ["q"]})
    (tmp_path / "in" / "z.jsonl").write_text('{"text": "c", "k": "r"}')
    options = {"input": tmp_path / "in", "output": tmp_path / "out", "partition_by": "k"}
    assert run_here(**options, keep_columns="a,h,k") == 0
    assert conserved(tmp_path / "out")["dead_letters"] == 0
    found = {folder: t.to_pylist()[0] for folder, t in read_output(tmp_path / "out").items()}
    kept = {
        folder: {n: v for n, v in row.items() if n != "embedding"} for folder, row in found.items()
    }
    assert kept == {
        "k=p": {"a": 1, "h": "1"},
        "k=q": {"a": None, "h": "1"},
        "k=r": {"a": None, "h": None},
    }
    # what is a folder's name in one place and a column in another
    mixed = {"input": tmp_path / "in", "output": tmp_path / "mixed", "keep_columns": "text,h"}
    (tmp_path / "in" / "z.jsonl").write_text('{"text": "c", "h": "r"}')
    assert run_here(**mixed) == 0
    columns = {folder: t.column_names for folder, t in read_output(tmp_path / "mixed").items()}
    assert columns == {"h=1": ["text", "embedding"], "z.jsonl": ["text", "h", "embedding"]}
    # one that no file has is a slip of the pen, and rows would go out without it
    options["output"] = tmp_path / "none"
    assert run_here(**options, keep_columns="a,nothing") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "failed: SurgeError: no file has a column 'nothing', which keep_columns asks for"
    assert not read_output(tmp_path / "none")


ROW = st.tuples(
    st.sampled_from(["a", "b", "c/d", "", None]), st.sampled_from(["same", "", None, "other"])
)
FILES = st.dictionaries(
    st.sampled_from(["1.parquet", "10.parquet", "2.jsonl", "d/1.parquet", "d.parquet"]),
    st.lists(ROW, max_size=40),
    min_size=1,
)


@given(
    files=FILES,
    group=st.integers(1, 9),
    most=st.integers(4, 30),
    scatter=st.sampled_from([0.0, 8.0]),
)
@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_any_corpus_against_an_oracle(
    files: dict[str, list], group: int, most: int, scatter: float
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name, "in"), Path(name, "out")
        wanted: dict[Any, list[tuple[str, int, str]]] = {}
        bad = 0
        for file, rows in sorted(files.items()):
            path = folder / file
            keys, texts = [k for k, _ in rows], [t for _, t in rows]
            numbers = list(range(len(rows)))
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.endswith(".jsonl"):
                lines = [
                    json.dumps({"k": k, "text": t, "i": i, "file": file}) + "\n"
                    for k, t, i in zip(keys, texts, numbers, strict=True)
                ]
                path.write_text("".join(lines))
            else:
                columns = {
                    "k": pa.array(keys, pa.string()),
                    "text": pa.array(texts, pa.string()),
                    "i": pa.array(numbers, pa.int64()),
                    "file": pa.array([file] * len(rows), pa.string()),
                }
                write_rows(path, columns, row_group_size=group)
            for k, t, i in zip(keys, texts, numbers, strict=True):
                bad += t is None
                if t is not None:
                    wanted.setdefault(k, []).append((file, i, t))
        limits = {"min_rows": min(8, most), "max_rows": most, "model": "dummy:4"}
        with unittest.mock.patch.object(plan_files, "SCATTER_LIMIT", scatter):
            assert run_here(input=folder, output=out, partition_by="k", **limits) == 0
        folders = {"a": "a", "b": "b", "c/d": "c%2Fd", "": "", None: "__HIVE_DEFAULT_PARTITION__"}
        found, vectors = {}, {}
        for partition, table in read_output(out).items():
            rows = table.select(["file", "i", "text"]).to_pylist()
            found[partition] = [tuple(row.values()) for row in rows]
            for row, vector in zip(rows, table.column("embedding").to_pylist(), strict=True):
                assert vectors.setdefault(row["text"], vector) == vector
        assert found == {f"k={folders[k]}": rows for k, rows in wanted.items()}
        assert conserved(out)["dead_letters"] == bad
