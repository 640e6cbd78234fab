from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.records import SurgeError
from surge_beam.transforms import manifest
from surge_beam.transforms.files import Store, digest


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def line(partition: str, version: object, rows: int = 3, letters: int = 1) -> dict[str, Any]:
    files = [{"path": f"{partition}/part-00000.parquet"}]
    return {
        "partition": partition,
        "fingerprint": digest(version),
        "rows": rows,
        "dead_letters": letters,
        "files": files,
    }


def part(partition: str, version: object, at: int, parts: int) -> dict[str, Any]:
    fingerprint = digest(version)
    key = manifest.part_key(fingerprint, at, parts).hex()
    return {**line(partition, version), "part_key": key, "part": at, "parts": parts}


def committed(store: Store) -> dict[bytes, tuple[bytes, int, int]]:
    table = manifest.load(store).table
    assert (np.diff(table["key"].argsort()) == 1).all()
    return {
        row["key"]: (row["fingerprint"], int(row["rows"]), int(row["letters"])) for row in table
    }


def expected(version: object, rows: int = 3, letters: int = 1) -> tuple[bytes, int, int]:
    return bytes.fromhex(digest(version)).rstrip(b"\0"), rows, letters


def test_nothing(store: Store) -> None:
    assert committed(store) == {}
    assert manifest.load(store).find([b"x" * 16]).tolist() == [-1]
    assert manifest.load(store).find([]).tolist() == []


def test_newest_wins(store: Store) -> None:
    manifest.write(store, "2", "a", {}, [line("p", 2)])
    manifest.write(store, "1", "z", {}, [line("p", 1), line("q", 1)])
    assert committed(store) == {
        manifest.partition_key("p").rstrip(b"\0"): expected(2),
        manifest.partition_key("q").rstrip(b"\0"): expected(1),
    }


def test_void_and_then_committed_by_the_same_run(store: Store) -> None:
    manifest.write(store, "1", "a", {}, [line("p", 1), line("q", 1)])
    manifest.void(store, "2", "b", ["p", "q"])
    assert committed(store) == {}
    manifest.write(store, "2", "b", {}, [line("p", 2)])
    assert list(committed(store).values()) == [expected(2)]


def test_prune_names_the_files_until_they_are_in_use_again(store: Store) -> None:
    manifest.write(store, "1", "a", {}, [line("p", 1), line("q", 1)])
    for run in ("2", "3"):
        assert manifest.prune(store, run, {"p"}) == ["q/part-00000.parquet"]
        assert list(committed(store).values()) == [expected(1)]
    assert len(store.names(manifest.FOLDER)) == 2
    manifest.write(store, "4", "a", {}, [line("q", 1)])
    assert manifest.prune(store, "5", {"p", "q"}) == []
    assert len(committed(store)) == 2


def test_parts(store: Store) -> None:
    lines = [part("p", 1, i, 3) for i in range(3)]
    manifest.write(store, "1", "a", {}, lines[:2])
    manifest.write(store, "1", "b", {}, [part("p", 1, 0, 2)])
    assert committed(store) == {}
    keys = {bytes.fromhex(x["part_key"]) for x in [*lines[:2], part("p", 1, 0, 2)]}
    assert manifest.load(store).parts == keys
    under_way = manifest.parts_under_way(store)[digest(1)]
    assert sorted((x["parts"], x["part"]) for x in under_way) == [(2, 0), (3, 0), (3, 1)]
    manifest.write(store, "1", "published", {"published": True}, [line("p", 1)])
    assert manifest.load(store).parts == frozenset()
    assert manifest.parts_under_way(store) == {}
    assert len(committed(store)) == 1


def test_dropped_parts_are_not_trusted_again(store: Store) -> None:
    manifest.write(store, "1", "a", {}, [part("p", 1, 0, 2), line("q", 1)])
    manifest.write(store, "2", "a", {}, [line("p", 2)])
    manifest.drop_parts(store, "2")
    assert manifest.load(store).parts == frozenset()
    assert sorted(committed(store).values()) == sorted([expected(1), expected(2)])
    before = store.names(manifest.FOLDER)
    manifest.drop_parts(store, "3")
    assert store.names(manifest.FOLDER) == before


def test_line_separators_in_names(store: Store) -> None:
    names = ["a\u2028b", "a\x85b", "é", "\x0b"]
    manifest.write(store, "1", "a", {"device": "x\u2029y"}, [line(n, n) for n in names])
    [(header, lines)] = manifest.entries(store)
    assert header["device"] == "x\u2029y"
    assert [x["partition"] for x in lines] == names


def test_runs(store: Store) -> None:
    assert manifest.load(store).unfinished  # written by who knows what
    manifest.begin(store, "1")
    assert not manifest.load(store).unfinished
    manifest.begin(store, "2")
    assert manifest.load(store).unfinished
    with pytest.raises(SurgeError, match="a later one is writing"):
        manifest.write(store, "1", "a", {}, [])
    manifest.write(store, "2", "a", {}, [])
    manifest.end(store, "2")
    manifest.begin(store, "3")
    assert not manifest.load(store).unfinished


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3)), max_size=4), max_size=6
    )
)
def test_load_is_the_last_word_on_each(
    tmp_path_factory: pytest.TempPathFactory, runs: list[list[tuple[str, int]]]
) -> None:
    store = Store(str(tmp_path_factory.mktemp("manifest")))
    naive: dict[bytes, tuple[bytes, int, int]] = {}
    for number, changes in enumerate(runs):
        distinct = dict(changes)
        gone = [name for name, version in distinct.items() if not version]
        lines = [line(n, v, rows=v, letters=2 * v) for n, v in distinct.items() if v]
        manifest.void(store, f"{number:02d}", "x", gone)
        manifest.write(store, f"{number:02d}", "x", {}, lines)
        for name, version in distinct.items():
            key = manifest.partition_key(name).rstrip(b"\0")
            naive.pop(key, None)
            if version:
                naive[key] = expected(version, version, 2 * version)
    assert committed(store) == naive
    keys = [manifest.partition_key(name) for name in "abcdef"]
    found = manifest.load(store).find(keys)
    assert [int(at) >= 0 for at in found] == [key.rstrip(b"\0") in naive for key in keys]
