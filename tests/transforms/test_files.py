from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from surge_beam.records import SurgeError
from surge_beam.transforms.files import Store, classify, digest, list_input


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    return folder


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.parquet", ("parquet", None)),
        ("a.JSONL.GZ", ("jsonl", "gzip")),
        ("a.ndjson.zst", ("jsonl", "zstd")),
        ("a.csv.bz2", ("csv", "bz2")),
        ("a.json", ("jsonl", None)),
        ("a.txt", ("", None)),
        ("a", ("", None)),
    ],
)
def test_classify(name: str, expected: tuple[str, str | None]) -> None:
    assert classify(name) == expected


def test_a_folder_means_its_data_files(tmp_path: Path) -> None:
    names = ["b/k=1/x.parquet", "a.csv", "a.jsonl.gz"]
    touch(tmp_path, *names, "_x/a.parquet", "b/.h.csv", "notes.txt", "_SUCCESS")
    listing = list_input(str(tmp_path))
    assert [f.name for f in listing.files] == ["a.csv", "a.jsonl.gz", "b/k=1/x.parquet"]
    assert listing.passed_over == 4


def test_a_glob_means_what_it_matches(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.txt", "a/_y.parquet", "b/x.txt", "b/z.csv", "x.txt")
    listing = list_input(f"{tmp_path}/*/?.txt")
    assert [f.name for f in listing.files] == ["a/x.txt", "b/x.txt"]
    assert [f.name for f in list_input(f"{tmp_path}/a/*.parquet").files] == ["_y.parquet"]
    with pytest.raises(SurgeError, match="no input files"):
        list_input(f"{tmp_path}/*.nothing")
    with pytest.raises(SurgeError, match="no such input"):
        list_input(f"{tmp_path}/nothing")


@pytest.mark.parametrize("through", ["in", "link"])
@pytest.mark.parametrize("named", ["in", "link"])
def test_the_output_is_left_out(tmp_path: Path, through: str, named: str) -> None:
    touch(tmp_path / "in", "a.parquet", "out/k=1/part-00000.parquet", "out2/b.parquet")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    listing = list_input(str(tmp_path / through), exclude=str(tmp_path / named / "out"))
    assert [f.name for f in listing.files] == ["a.parquet", "out2/b.parquet"]
    with pytest.raises(SurgeError, match="no input files"):
        list_input(f"{tmp_path}/{through}/*/*.parquet", exclude=f"{tmp_path}/{named}/out2")


def test_fingerprints(tmp_path: Path) -> None:
    touch(tmp_path, "a.csv", "b.csv")
    one, two = list_input(str(tmp_path)).files
    assert one.key != two.key
    assert one == list_input(str(tmp_path)).files[0]
    os.utime(tmp_path / "a.csv", ns=(1, 1))
    changed = list_input(str(tmp_path)).files[0]
    assert changed.key == one.key and changed.fingerprint != one.fingerprint


def test_digests_do_not_run_into_one_another() -> None:
    assert digest("ab", "c") != digest("a", "bc") != digest("abc")
    assert len(digest()) == 32


def test_put_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path / "out"))
    store.put("a/b.txt", b"old")

    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/a/b\.txt'"):
        store.put("a/b.txt", b"new")
    monkeypatch.undo()
    assert store.get("a/b.txt") == b"old"
    assert list(store.walk(Store.TEMPORARY)) == []
    store.put("a/b.txt", memoryview(b"new"))
    assert store.get("a/b.txt") == b"new"
    assert os.listdir(tmp_path / "out" / "_surge" / "tmp") == []


def test_names_walk_and_remove(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert store.names("none") == [] and list(store.walk("none")) == []
    for name in ("a/2", "a/1", "a/b/3"):
        store.put(name, b"")
    assert store.names("a") == ["1", "2"]
    assert sorted(store.walk("a")) == ["a/1", "a/2", "a/b/3"]
    assert store.get_or_none("a/9") is None and not store.exists("a/9")
    store.remove("a/9")
    store.remove_tree("none")
    store.remove("a/b/3")
    store.remove_empty_folders("a/b")
    assert not (tmp_path / "a" / "b").exists() and (tmp_path / "a").exists()
    store.put("a/b/4", b"")  # its folder was made, and removed, before
    store.move("a/b/4", "c/5")
    assert store.exists("c/5") and not store.exists("a/b/4")
    store.remove_tree("a")
    store.put("a/1", b"")
    again = pickle.loads(pickle.dumps(store))
    assert again.names("a") == ["1"]
