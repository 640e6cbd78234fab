from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from surge_beam.records import DeadLetter, Segment, SurgeError
from surge_beam.transforms import manifest, write
from surge_beam.transforms.files import Store, digest
from surge_beam.transforms.write import (
    PENDING,
    Committer,
    OutputSegment,
    WriteConfig,
    letters_folder,
    part_name,
    publish,
    vectors_to_arrow,
)

FOLDER = "service=a"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def encoded(
    rows: int,
    letters: int = 0,
    *,
    part: int = 0,
    parts: int = 1,
    version: object = 0,
    kind: type = np.float32,
) -> OutputSegment:
    values = '{"service": {"type": "string", "value": "a"}}'
    total = rows + letters
    segment = Segment(FOLDER, values, digest(version), part, parts, total, ())
    table = pa.table({"text": [f"{part} {i}" for i in range(rows)], "id": list(range(rows))})
    matrix = np.arange(rows * 4, dtype=kind).reshape(rows, 4) + kind(part)
    letter = DeadLetter(stage="read", error="NullText", message="m", file="f", row=1)
    added = {"embedding": vectors_to_arrow(matrix)}
    return OutputSegment(segment, table, added, [letter] * letters)


def commit(store: Store, *segments: OutputSegment, run: str = "1", **config: object) -> None:
    committer = Committer(store, WriteConfig(**config), run)
    try:
        committer.commit(f"sb{segments[0].segment.part}", list(segments), {"superbatch": "x"})
    finally:
        committer.close()


def read(store: Store, name: str) -> pa.Table:
    return pq.ParquetFile(store.path(name)).read()


def letters(store: Store) -> list[str]:
    return store.names(letters_folder(FOLDER))


def parts_of(store: Store, version: object = 0) -> list[dict]:
    return manifest.parts_under_way(store)[digest(version)]


def test_vectors_share_memory() -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    array = vectors_to_arrow(matrix)
    assert array.type == pa.list_(pa.float32(), 4)
    assert array.flatten().buffers()[1].address == matrix.ctypes.data
    with pytest.raises(ValueError, match="C-contiguous"):
        vectors_to_arrow(matrix.T)


@pytest.mark.parametrize("vector_type", ["float32", "float16"])
def test_a_partition(store: Store, vector_type: str) -> None:
    commit(store, encoded(3, 2, kind=getattr(np, vector_type)))
    table = read(store, f"{FOLDER}/part-00000.parquet")
    assert table.column_names == ["text", "id", "embedding"]
    kind = pa.float16() if vector_type == "float16" else pa.float32()
    assert table.schema.field("embedding").type == pa.list_(kind, 4)
    assert table["embedding"].to_pylist()[2] == [8, 9, 10, 11]
    assert json.loads(table.schema.metadata[b"surge.partition"])["service"]["value"] == "a"
    assert letters(store) == [part_name(0)]
    [(header, [line])] = manifest.entries(store)
    assert header.pop("ended") > 0
    assert header == {"run": "1", "superbatch": "x"}
    data = store.get(f"{FOLDER}/part-00000.parquet")
    assert (line["rows"], line["dead_letters"], line["fingerprint"]) == (3, 2, digest(0))
    assert line["files"] == [
        {
            "path": f"{FOLDER}/part-00000.parquet",
            "rows": 3,
            "bytes": len(data),
            "checksum": xxhash.xxh3_64_hexdigest(data),
        }
    ]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_large_partition_is_written_a_row_group_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """On an object store it is held whole, and put at once."""
    monkeypatch.setattr(write, "ROW_GROUP_BYTES", 1000)
    store = Store("memory://large") if elsewhere else store
    commit(store, encoded(500))
    data = store.get(f"{FOLDER}/part-00000.parquet")
    file = pq.ParquetFile(pa.BufferReader(data))
    assert file.num_row_groups > 4
    assert file.read()["embedding"].to_pylist()[499] == [1996, 1997, 1998, 1999]
    assert file.metadata.num_rows == 500
    [(_, [line])] = manifest.entries(store)
    [found] = line["files"]
    assert (found["bytes"], found["checksum"]) == (len(data), xxhash.xxh3_64_hexdigest(data))
    assert not store.names(store.TEMPORARY)
    store.remove_tree("")


def test_columns_in_the_order_asked_for(store: Store) -> None:
    commit(store, encoded(3), columns=("id", "none", "text"), drop=("text",))
    assert read(store, f"{FOLDER}/part-00000.parquet").column_names == ["id", "embedding"]


@pytest.mark.parametrize("change", [{"rows": 9}, {"rows": 3}])
def test_rows_must_add_up(store: Store, change: dict[str, int]) -> None:
    wrong = encoded(3, 1)
    wrong.segment = dataclasses.replace(wrong.segment, **change)
    with pytest.raises(SurgeError, match="rows planned"):
        commit(store, wrong)
    assert not list(manifest.entries(store))
    assert not store.names(FOLDER)


def test_every_vector_has_its_row(store: Store) -> None:
    wrong = encoded(3)
    wrong.added["embedding"] = wrong.added["embedding"][:2]
    with pytest.raises(SurgeError, match=r"results for \[2\]"):
        commit(store, wrong)


def test_publish(store: Store) -> None:
    for part, bad in enumerate([1, 0, 2]):
        commit(store, encoded(5, bad, part=part, parts=3))
    assert not store.names(FOLDER)
    assert len(manifest.load(store).table) == 0
    publish(store, "1", FOLDER, digest(0), parts_of(store))
    assert store.names(FOLDER) == [part_name(i) for i in range(3)]
    assert read(store, f"{FOLDER}/part-00002.parquet")["text"].to_pylist()[0] == "2 0"
    assert letters(store) == [part_name(0), part_name(2)]
    assert not list(store.walk(PENDING))
    table = manifest.load(store).table
    assert [(int(r["rows"]), int(r["letters"])) for r in table] == [(15, 3)]


def test_publish_again_after_a_part_was_moved(store: Store) -> None:
    for part in range(3):
        commit(store, encoded(5, part=part, parts=3))
    lines = parts_of(store)
    first = next(x for x in lines if x["part"] == 0)
    store.move(first["files"][0]["path"], f"{FOLDER}/{part_name(0)}")
    publish(store, "2", FOLDER, digest(0), lines)
    assert len(store.names(FOLDER)) == 3


def test_publish_without_a_part(store: Store) -> None:
    for part in range(2):
        commit(store, encoded(5, part=part, parts=2))
    lines = parts_of(store)
    store.remove(lines[0]["files"][0]["path"])
    with pytest.raises(SurgeError, match="is gone"):
        publish(store, "2", FOLDER, digest(0), lines)


def test_nothing_of_an_earlier_state_stays(store: Store) -> None:
    for part in range(3):
        commit(store, encoded(5, 1, part=part, parts=3))
    publish(store, "1", FOLDER, digest(0), parts_of(store))

    for part, bad in enumerate([1, 0]):
        commit(store, encoded(5, bad, part=part, parts=2, version=1), run="2")
    publish(store, "2", FOLDER, digest(1), parts_of(store, 1))
    assert (len(store.names(FOLDER)), letters(store)) == (2, [part_name(0)])

    commit(store, encoded(4, version=2), run="3")
    assert (store.names(FOLDER), letters(store)) == ([part_name(0)], [])

    commit(store, encoded(0, 3, version=3), run="4")
    assert not Path(store.path(FOLDER)).exists()
    assert letters(store) == [part_name(0)]


def test_two_splits_of_one_partition_stay_apart(store: Store) -> None:
    commit(store, encoded(5, part=0, parts=3))
    commit(store, encoded(7, part=0, parts=2))
    for line in parts_of(store):
        assert read(store, line["files"][0]["path"]).num_rows == line["rows"]


def test_what_is_replaced_is_taken_back_first(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(store, encoded(5))
    new = encoded(6, version=1)
    new.segment = dataclasses.replace(new.segment, replaces=True)
    real = manifest.write

    def fails(store: Store, run: str, name: str, header: dict, lines: list[dict]) -> None:
        if "superbatch" in header:
            raise OSError(5, "input/output error")
        real(store, run, name, header, lines)

    monkeypatch.setattr(manifest, "write", fails)
    with pytest.raises(OSError, match="input/output error"):
        commit(store, new, run="2")
    monkeypatch.undo()
    assert read(store, f"{FOLDER}/part-00000.parquet").num_rows == 6
    assert len(manifest.load(store).table) == 0
    commit(store, new, run="3")
    assert len(manifest.load(store).table) == 1


def test_an_earlier_run_writes_nothing(store: Store) -> None:
    manifest.begin(store, "2")
    with pytest.raises(SurgeError, match="a later one is writing"):
        commit(store, encoded(5), run="1")
    assert not store.names(FOLDER)
