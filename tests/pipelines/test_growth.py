"""A finished corpus grows, changes, shrinks and breaks: only what changed is done again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.pipelines.harness import (
    conserved,
    dead_letters,
    listing,
    make_corpus,
    manifest_entries,
    quick_job,
    read_output,
    run_job,
    same_output,
    temporaries,
    texts,
    write_rows,
)


def encoded_by(output: Path) -> list[str]:
    """Partitions that the latest run encoded."""
    run = conserved(output)["run"]
    return sorted(
        line["partition"]
        for _, header, lines in manifest_entries(output, run)
        if "superbatch" in header
        for line in lines
    )


def same_as_anew(corpus: Path, output: Path, **options: object) -> None:
    """Asserts that an output equals that of a job that starts from nothing."""
    fresh = output.with_name("anew")
    shutil.rmtree(fresh, ignore_errors=True)
    quick_job(input=corpus, output=fresh, **options)
    same_output(output, fresh)
    assert dead_letters(output).to_pylist() == dead_letters(fresh).to_pylist()
    for name in ("rows_in", "rows_out", "dead_letters", "partitions_failed"):
        assert conserved(output)[name] == conserved(fresh)[name], name


def test_ten_new_and_three_changed(tmp_path: Path) -> None:
    corpus, output = make_corpus(tmp_path / "in", [7] * 50), tmp_path / "out"
    quick_job(input=corpus, output=output)
    for i in range(50, 60):
        write_rows(corpus / f"service=s{i:03d}" / "data.parquet", {"text": texts(i, 9)})
    changed = [3, 20, 49]
    for i in changed:
        write_rows(corpus / f"service=s{i:03d}" / "data.parquet", {"text": texts(f"new {i}", 5)})
    done = quick_job(input=corpus, output=output)
    assert done.stdout.startswith("13 partitions encoded, 47 skipped, 0 failed; 105 rows in")
    assert encoded_by(output) == [f"service=s{i:03d}" for i in sorted([*changed, *range(50, 60)])]
    report = conserved(output)
    assert (report["partitions_encoded"], report["partitions_skipped"]) == (13, 47)
    assert report["rows_encoded"] == 105
    same_as_anew(corpus, output)


def test_nothing_to_do(tmp_path: Path) -> None:
    corpus, output = make_corpus(tmp_path / "in"), tmp_path / "out"
    quick_job(input=corpus, output=output)
    before = listing(output)
    done = quick_job(input=corpus, output=output)
    assert done.stdout.splitlines()[1:] == [
        "nothing to do: every partition is up to date",
        "0 dead letters",
    ]
    changed = {name for name, about in listing(output).items() if before.get(name) != about}
    assert all(name.startswith("_surge") for name in changed)
    assert not any(name.startswith("_surge/manifest/") for name in changed)
    assert "_surge/costs.json" not in changed, "tau and c are measured once"


def test_growth_with_key_columns(tmp_path: Path) -> None:
    corpus, output = tmp_path / "in", tmp_path / "out"
    keys = ["a", "b", "c", "d", "a", "b"]
    options = {"partition_by": "owner", "keep_columns": "text,id"}
    for i in range(3):
        rows = {"text": texts(i, 6), "id": list(range(6)), "owner": keys}
        write_rows(corpus / f"{i}.parquet", rows)
    write_rows(corpus / "own.parquet", {"text": texts("e", 2), "id": [0, 1], "owner": ["e", "e"]})
    quick_job(input=corpus, output=output, **options)
    assert conserved(output)["partitions_encoded"] == 5

    new = {"text": texts("new", 3), "id": [7, 8, 9], "owner": ["f", "a", "f"]}
    write_rows(corpus / "3.parquet", new)
    quick_job(input=corpus, output=output, **options)
    assert encoded_by(output) == ["owner=a", "owner=f"]
    same_as_anew(corpus, output, **options)

    changed = {"text": texts("changed", 4), "id": [1, 2, 3, 4], "owner": ["b", None, "", "b"]}
    write_rows(corpus / "3.parquet", changed)
    done = quick_job(input=corpus, output=output, **options)
    assert "1 stale partitions kept" in done.stdout  # f is gone
    assert encoded_by(output) == [
        "owner=",
        "owner=__HIVE_DEFAULT_PARTITION__",
        "owner=a",
        "owner=b",
    ]
    assert read_output(output)["owner=a"].num_rows == 6
    quick_job(input=corpus, output=output, prune=True, **options)
    assert "owner=f" not in read_output(output)
    same_as_anew(corpus, output, **options)


def test_a_partition_through_many_shapes(tmp_path: Path) -> None:
    """Many parts, one, none but dead letters, fewer parts with some, and whole again."""
    corpus, output = make_corpus(tmp_path / "in", [4]), tmp_path / "out"
    path = corpus / "service=big" / "data.parquet"
    folder = output / "service=big"
    options = {"min_rows": 50, "max_rows": 50}
    nulls = [None] * 3

    def change(values: list[str | None], files: int, failed: int = 0) -> None:
        write_rows(path, {"text": values, "id": list(range(len(values)))})
        quick_job(input=corpus, output=output, **options)
        assert len(list(folder.glob("*"))) == files
        assert folder.exists() == bool(files)
        report = conserved(output)
        assert (report["partitions_encoded"], report["partitions_failed"]) == (1 - failed, failed)
        assert not temporaries(output)

    write_rows(path, {"text": nulls + texts(0, 200) + nulls, "id": list(range(206))})
    quick_job(input=corpus, output=output, **options)
    assert len(list(folder.glob("*"))) == 5
    change(texts(1, 30) + nulls, 1)
    same_as_anew(corpus, output, **options)
    change(nulls, 0, failed=1)
    change(nulls * 30, 0, failed=1)
    same_as_anew(corpus, output, **options)
    quick_job(input=corpus, output=output, **options)
    report = conserved(output)
    assert [report[f"partitions_{n}"] for n in ("encoded", "skipped", "failed")] == [0, 1, 1]
    change(texts(2, 120) + nulls, 3)
    change(nulls + texts(3, 120), 3)
    same_as_anew(corpus, output, **options)
    change(texts(4, 40), 1)
    same_as_anew(corpus, output, **options)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_unreadable_then_repaired(tmp_path: Path, kind: str) -> None:
    corpus, output = make_corpus(tmp_path / "in", [5]), tmp_path / "out"
    path = corpus / f"two.{kind}"
    good = [json.dumps({"text": t, "id": i}) for i, t in enumerate(texts("x", 6))]

    def write(sound: bool) -> None:
        if kind == "jsonl":
            lines = good if sound else [*good[:3], "{", '{"text": 3}', *good[5:]]
            path.write_text("\n".join(lines) + "\n")
        elif sound:
            write_rows(path, {"text": texts("x", 6), "id": list(range(6))})
        else:
            path.write_bytes(b"PAR1 is how this begins")

    write(sound=True)
    quick_job(input=corpus, output=output)
    write(sound=False)
    done = quick_job(input=corpus, output=output)
    letters = dead_letters(output)
    assert letters["file"].unique().to_pylist() == [str(path)]
    assert letters.num_rows == (2 if kind == "jsonl" else 1)
    assert done.stdout.endswith(f"{letters.num_rows} dead letters\n")
    report = conserved(output)
    assert report["partitions_failed"] == report["partitions_stale"] == (kind == "parquet")
    done = quick_job(input=corpus, output=output)
    assert "nothing to do" in done.stdout
    assert dead_letters(output).equals(letters)
    write(sound=True)
    quick_job(input=corpus, output=output)
    assert dead_letters(output).num_rows == 0
    same_as_anew(corpus, output)


def test_a_text_file_that_goes_and_comes_back_keeps_its_dead_letters(tmp_path: Path) -> None:
    corpus, output = make_corpus(tmp_path / "in", [5]), tmp_path / "out"
    path = corpus / "rows.jsonl"
    path.write_text('{"text": "a"}\n{\n{"text": "b"}\n')
    quick_job(input=corpus, output=output)
    path.rename(tmp_path / "aside")
    quick_job(input=corpus, output=output)
    report = conserved(output)
    assert (report["rows_in"], report["dead_letters"], report["partitions_stale"]) == (5, 0, 1)
    quick_job(input=corpus, output=output, prune=True)
    assert dead_letters(output).num_rows == 0
    (tmp_path / "aside").rename(path)
    quick_job(input=corpus, output=output)
    assert dead_letters(output)["row"].to_pylist() == [2]
    same_as_anew(corpus, output)


def test_broken_row_group(tmp_path: Path) -> None:
    """Rows that cannot be decoded count once, as their file's letter, in every later state."""
    corpus, output = make_corpus(tmp_path / "in", [5, 6]), tmp_path / "out"
    rows = {"text": texts("g", 40), "id": list(range(40))}
    path = write_rows(corpus / "service=bad" / "data.parquet", rows, row_group_size=10)
    data = bytearray(path.read_bytes())
    at = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[at : at + 12] = b"\xff" * 12
    path.write_bytes(data)
    options = {"max_rows": 15, "min_rows": 10}
    quick_job(input=corpus, output=output, **options)
    expected = conserved(output)
    assert expected["dead_letters"] == 1
    assert expected["rows_out"] in (11, 41)
    make_corpus(corpus, [5, 7])
    quick_job(input=corpus, output=output, **options)
    assert conserved(output)["rows_out"] == expected["rows_out"] + 1
    shutil.move(path.parent, tmp_path / "aside")
    quick_job(input=corpus, output=output, **options)
    assert conserved(output)["rows_in"] == 12
    quick_job(input=corpus, output=output, prune=True, **options)
    assert conserved(output)["dead_letters"] == 0
    same_as_anew(corpus, output, **options)


def test_stale_and_prune(tmp_path: Path) -> None:
    corpus, output = make_corpus(tmp_path / "in", [5, 6, 130, 8]), tmp_path / "out"
    write_rows(corpus / "service=bad" / "data.parquet", {"text": [None, "x", None]})
    (corpus / "broken.parquet").write_bytes(b"no")
    options = {"max_rows": 50, "min_rows": 50}
    quick_job(input=corpus, output=output, **options)
    gone = ["service=s001", "service=s002", "service=bad"]
    for name in gone:
        shutil.rmtree(corpus / name)
    (corpus / "broken.parquet").unlink()
    done = quick_job(input=corpus, output=output, **options)
    assert "3 stale partitions kept: their input is gone" in done.stdout
    assert done.stdout.endswith("\n0 dead letters\n")
    report = conserved(output)
    assert (report["partitions_stale"], report["rows_in"], report["rows_out"]) == (3, 13, 13)
    assert read_output(output)["service=s002"].num_rows == 130

    done = quick_job(input=corpus, output=output, prune=True, **options)
    assert "3 stale partitions removed" in done.stdout
    assert sorted(p.name for p in output.iterdir()) == ["_surge", "service=s000", "service=s003"]
    assert not list((output / "_surge" / "dead_letters").rglob("*.parquet"))
    same_as_anew(corpus, output, **options)
    done = quick_job(input=corpus, output=output, prune=True, **options)
    assert "stale" not in done.stdout

    make_corpus(corpus, [5, 6, 130, 8])
    quick_job(input=corpus, output=output, **options)
    same_as_anew(corpus, output, **options)


def test_an_input_that_is_put_back_after_a_failure(tmp_path: Path) -> None:
    """New files under an old fingerprint must not pass for its own."""
    corpus, output = make_corpus(tmp_path / "in", [5, 6, 120]), tmp_path / "out"
    options = {"max_rows": 50, "min_rows": 50}
    quick_job(input=corpus, output=output, **options)
    shutil.copytree(corpus, tmp_path / "backup")
    make_corpus(corpus, [5, 7, 130])
    for name in ("part-00000.parquet", "part-00002.parquet"):
        failed = run_job(
            input=corpus, output=output, **options, check=False, setup=_FailAfterRename(name)
        )
        assert failed.returncode == 1
    shutil.rmtree(corpus)
    shutil.copytree(tmp_path / "backup", corpus)  # with the times of the files
    quick_job(input=corpus, output=output, **options)
    same_as_anew(corpus, output, **options)


class _FailAfterRename:
    """Fails once a file of that name is in its place below the output's root."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self) -> None:
        from surge_beam.transforms.files import Store

        rename = Store.rename

        def rename_and_fail(store: Store, source: str, name: str) -> None:
            rename(store, source, name)
            if name.endswith(self.name) and not name.startswith("_surge"):
                raise OSError(5, os.strerror(5))

        Store.rename = rename_and_fail  # type: ignore[method-assign]


def test_prune_keeps_what_may_be_of_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    corpus, output = tmp_path / "in", tmp_path / "out"
    for name in "abc":
        write_rows(corpus / f"{name}.parquet", {"text": texts(name, 3)})
    quick_job(input=corpus, output=output)
    (corpus / "b.parquet").write_bytes(b"half an upl")
    (corpus / "c.parquet").unlink()
    for options in ({}, {"prune": True}):
        done = quick_job(input=corpus, output=output, **options)
        assert "2 stale partitions kept: their input is gone, or" in done.stdout
        assert f"1 of 2 files could not be used, such as {corpus}/b.parquet: " in done.stdout
        assert len(read_output(output)) == 3
    write_rows(corpus / "b.parquet", {"text": texts("b", 3)})
    done = quick_job(input=corpus, output=output, prune=True)
    assert "1 stale partitions removed" in done.stdout
    assert len(read_output(output)) == 2
    same_as_anew(corpus, output)


@pytest.mark.parametrize("first_is_a_folder", [True, False])
def test_a_file_in_the_way_of_a_folder_is_named_with_the_remedy(
    tmp_path: Path, first_is_a_folder: bool
) -> None:
    corpus, output = tmp_path / "in", tmp_path / "out"
    places = [corpus / "a.parquet" / "part-00000.parquet", corpus / "a.parquet"]
    first, second = places if first_is_a_folder else reversed(places)
    write_rows(first, {"text": texts(0, 3)})
    quick_job(input=corpus, output=output)
    shutil.rmtree(corpus)
    write_rows(second, {"text": texts(1, 3)})
    done = quick_job(input=corpus, output=output, check=False)
    assert done.returncode == 1
    assert "share a name" in done.stderr.splitlines()[-1] and "--prune" in done.stderr
    quick_job(input=corpus, output=output, prune=True)
    same_as_anew(corpus, output)
