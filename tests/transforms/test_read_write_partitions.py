from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing import test_stream
from apache_beam.testing.util import assert_that
from apache_beam.transforms.window import FixedWindows, TimestampedValue

from surge_beam import DeadLetter, Embed, ReadPartitions, SurgeError, WritePartitions
from surge_beam.records import SourceFile
from surge_beam.transforms.files import Store
from surge_beam.transforms.read import ReadConfig
from surge_beam.transforms.read_partitions import read_file
from surge_beam.transforms.superbatch import RecordBatchCoder
from surge_beam.transforms.write_partitions import write_slices

LOOPBACK = ["--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=LOOPBACK"]


def source(path: Path, name: str | None = None, **how: Any) -> SourceFile:
    how = {"format": "parquet", "compression": None, **how}
    return SourceFile(str(path), name or path.name, "k", "f", **how)


def read(path: Path, name: str | None = None, how: Any = None, **config: Any) -> pa.Table:
    found = list(
        read_file(source(path, name, **(how or {})), ReadConfig(added_columns=(), **config))
    )
    assert not any(isinstance(item, DeadLetter) for item in found), found
    return pa.Table.from_batches(found)


def write(elements: list[Any], output: Path, *keys: str, **options: Any) -> None:
    with beam.Pipeline("FnApiRunner") as p:
        rows = p | beam.Create(elements, reshuffle=False)
        _ = rows | WritePartitions(output=str(output), partition_by=keys, **options)


def files(output: Path) -> list[str]:
    return sorted(str(p.relative_to(output)) for p in output.rglob("*") if p.is_file())


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# Reading


def test_key_columns_keep_their_types_and_others_come_along(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table(
        {
            "day": [datetime.date(2024, 1, 1), None],
            "text": ["x", "y"],
            "n": pa.array([1, 2], pa.int8()),
        }
    )
    pq.write_table(table, path)
    assert read(path, partition_by=("day",)).equals(table)
    assert read(path, partition_by=("day",), keep_columns=()).equals(table.drop_columns(["n"]))
    assert read(path).column("file").to_pylist() == ["a.parquet"] * 2


def test_hive_folders_are_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x"], "owner": ["of the file"]}), path)
    name = "service=a%2Fb/owner=__HIVE_DEFAULT_PARTITION__/a.parquet"
    assert read(path, name).to_pylist() == [{"text": "x", "service": "a/b", "owner": None}]
    by_service = read(path, name, partition_by=("service",)).to_pylist()
    assert by_service == [{"text": "x", "owner": "of the file", "service": "a/b"}]


def test_text_files_and_their_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x", "n": 1}\n{"text": 5}\nnonsense\n{"text": "y", "n": 2}\n')
    found = list(read_file(source(path, format="jsonl"), ReadConfig(added_columns=())))
    letters = [item for item in found if isinstance(item, DeadLetter)]
    assert [(x.file, x.row) for x in letters] == [(str(path), 2), (str(path), 3)]
    table = pa.Table.from_batches([x for x in found if not isinstance(x, DeadLetter)])
    assert table.column("text").to_pylist() == ["x", "y"]
    assert table.column_names == ["text", "n", "file"]


def test_a_row_group_that_does_not_decode_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {i}" for i in range(300)]})
    pq.write_table(table, path, row_group_size=100, compression="NONE", use_dictionary=False)
    middle = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = middle.data_page_offset
    data[start : start + middle.total_compressed_size] = b"\xff" * middle.total_compressed_size
    path.write_bytes(data)
    found = list(read_file(source(path), ReadConfig(added_columns=())))
    (letter,) = [x for x in found if isinstance(x, DeadLetter)]
    assert letter.error == "UnreadableRowGroup"
    rows = [t for x in found if not isinstance(x, DeadLetter) for t in x.column(0).to_pylist()]
    assert rows == [f"text {i}" for i in [*range(100), *range(200, 300)]]


def test_bad_files_are_dead_letters_and_batches_are_bounded(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x" * 100] * 200}), tmp_path / "good.parquet")
    pq.write_table(pa.table({"other": ["x"]}), tmp_path / "lacking.parquet")
    pq.write_table(pa.table({"text": ["x"], "file": ["y"]}), tmp_path / "taken.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing PAR1")

    def rows(found: list[pa.RecordBatch]) -> None:
        assert sum(b.num_rows for b in found) == 200
        assert all(b.nbytes <= 3000 for b in found)

    def letters(found: list[DeadLetter]) -> None:
        assert sorted(Path(x.file or "").name for x in found) == [
            "broken.parquet",
            "lacking.parquet",
            "taken.parquet",
        ]

    with beam.Pipeline("FnApiRunner") as p:
        result = p | ReadPartitions(input=str(tmp_path), batch_bytes=3000)
        assert_that(result.rows, rows, label="Rows")
        assert_that(result.dead_letters, letters, label="Letters")


def test_no_input_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no such input"), beam.Pipeline("FnApiRunner") as p:
        _ = p | ReadPartitions(input=str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="sequences of names"):
        ReadPartitions(input="x", partition_by="service")


# Writing


def test_a_dataset_as_the_file_job_writes_it(tmp_path: Path) -> None:
    rows = [
        {"k": key, "n": n, "text": f"{key} {n}", "embedding": vector(n, 1)}
        for n in range(10)
        for key in ("a/b", "", None, "__HIVE_DEFAULT_PARTITION__")
    ]
    write(rows, tmp_path, "k")
    assert files(tmp_path) == [
        "k=%5F_HIVE_DEFAULT_PARTITION__/part-00000.parquet",
        "k=/part-00000.parquet",
        "k=__HIVE_DEFAULT_PARTITION__/part-00000.parquet",
        "k=a%2Fb/part-00000.parquet",
    ]
    table = pq.ParquetFile(tmp_path / "k=a%2Fb/part-00000.parquet").read()
    assert table.column_names == ["n", "text", "embedding"]
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), 2)
    assert table.column("n").to_pylist() == list(range(10))
    assert table.column("embedding").to_pylist() == [[n, 1] for n in range(10)]
    exact = json.loads(table.schema.metadata[b"surge.partition"])
    assert exact == {"k": {"type": "string", "value": "a/b"}}
    back = ds.dataset(tmp_path, partitioning="hive").to_table()
    assert set(back.column("k").to_pylist()) >= {"a/b", None}


def test_writing_again_changes_nothing(tmp_path: Path) -> None:
    rows = [{"k": i % 3, "j": True, "n": i} for i in range(30)]
    write(rows, tmp_path, "k", "j", vector_column=None)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    write(rows, tmp_path, "k", "j", vector_column=None)
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before
    assert next(iter(before)) == "k=0/j=true/part-00000.parquet"


def test_float16_and_lists_of_floats(tmp_path: Path) -> None:
    batch = pa.record_batch({"k": ["a"], "embedding": [[0.5, 2.0]], "z": [1]})
    write([batch], tmp_path, "k", output_dtype="float16")
    table = pq.ParquetFile(tmp_path / "k=a/part-00000.parquet").read()
    assert table.schema.field("embedding").type == pa.list_(pa.float16(), 2)
    assert table.column("embedding").to_pylist() == [[0.5, 2.0]]


def test_bounded_windows_share_a_file_and_rows_may_lack_columns(tmp_path: Path) -> None:
    with beam.Pipeline("FnApiRunner") as p:
        written = (
            p
            | beam.Create([TimestampedValue({"k": "a", f"c{i % 2}": i}, i) for i in range(10)])
            | beam.Map(lambda row: row)
            | beam.WindowInto(FixedWindows(2))
            | WritePartitions(output=str(tmp_path), partition_by=["k"], vector_column=None)
        )
        expected = [{"path": "k=a/part-00000.parquet", "rows": 10}]
        assert_that(written.files, lambda found: _equal(found, expected))
    rows = pq.ParquetFile(tmp_path / "k=a/part-00000.parquet").read().to_pylist()
    assert sorted(row["c0"] for row in rows if row["c0"] is not None) == [0, 2, 4, 6, 8]


def _equal(found: Any, expected: Any) -> None:
    assert found == expected, found


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"k": "a"}], "need one column 'embedding'"),
        ([{"embedding": vector(1)}], "need one column 'k'"),
        ([{"k": "a", "embedding": "no vector"}], "must hold a vector in every row"),
        ([{"k": "a", "embedding": [1.0]}, {"k": "a", "embedding": [1.0, 2.0]}], "of one size"),
        ([{"k": ["a"], "embedding": vector(1)}], "cannot be a partition key"),
    ],
)
def test_rows_that_cannot_be_written(rows: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=message):
        write(rows, tmp_path, "k")
    assert files(tmp_path) == []


def test_settings_that_make_no_sense() -> None:
    settings: list[dict[str, Any]] = [
        {"partition_by": []},
        {"partition_by": "k"},
        {"partition_by": ["k"], "output_dtype": "int8"},
        {"partition_by": ["embedding"]},
    ]
    for options in settings:
        with pytest.raises(ValueError):
            WritePartitions(output="x", **options)


def slices(*batches: pa.RecordBatch, values: str = "{}") -> list[tuple[str, bytes]]:
    return [(values, RecordBatchCoder().encode(batch)) for batch in batches]


@pytest.mark.parametrize("root", ["local", "memory"])
def test_a_large_partition_is_streamed_in_row_groups(root: str, tmp_path: Path) -> None:
    store = Store(str(tmp_path) if root == "local" else "memory://streamed")
    parts = [
        pa.record_batch({"n": pa.array(range(i * 100, i * 100 + 100), pa.int64())})
        for i in range(10)
    ]
    # generators can be read but once, as grouped values of some runners
    assert write_slices(store, "k=a/p.parquet", iter(slices(*parts)), None, 2000) == 1000
    file = pq.ParquetFile(pa.BufferReader(store.get("k=a/p.parquet")))
    assert file.num_row_groups == 5
    assert file.read().column("n").to_pylist() == list(range(1000))
    if root == "local":
        assert files(tmp_path) == ["k=a/p.parquet"]


def test_slices_that_disagree(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    number, text = pa.record_batch({"n": [1] * 50}), pa.record_batch({"n": ["x"] * 50})
    with pytest.raises(SurgeError, match="several schemas"):
        write_slices(store, "p.parquet", slices(number, text), None)
    with pytest.raises(SurgeError, match="too large to hold"):
        write_slices(store, "p.parquet", slices(number, text), None, 300)
    nulls = pa.record_batch({"n": pa.nulls(50)})
    write_slices(store, "p.parquet", slices(number, nulls), None, 400)
    one = '{"k": {"type": "integer", "value": 5}}'
    other = '{"k": {"type": "string", "value": "5"}}'
    with pytest.raises(SurgeError, match="different key values"):
        write_slices(
            store, "p.parquet", [*slices(number, values=one), *slices(number, values=other)], None
        )
    vectors = [
        pa.record_batch({"v": pa.array([[1.0] * n], pa.list_(pa.float32(), n))}) for n in (1, 2)
    ]
    with pytest.raises(SurgeError, match="several sizes"):
        write_slices(store, "p.parquet", slices(*vectors), "v")
    assert files(tmp_path) == ["p.parquet"]


def test_unbounded_input_gives_a_file_a_window_and_pane(tmp_path: Path) -> None:
    def row(n: int) -> TimestampedValue:
        return TimestampedValue({"k": "a", "n": n}, n)

    events = (
        test_stream.TestStream()
        .add_elements([row(1), row(2)])
        .add_elements([row(61)])
        .advance_watermark_to(60)
        .add_elements([row(62)])
        .advance_watermark_to_infinity()
    )
    flags = PipelineOptions(["--runner=DirectRunner", "--streaming"])
    with beam.Pipeline(options=flags) as p:
        _ = (
            p
            | events
            | beam.WindowInto(FixedWindows(60))
            | WritePartitions(output=str(tmp_path), partition_by=["k"], vector_column=None)
        )
    names = [f"k=a/part-19700101T000{m}00.000000Z-00000.parquet" for m in (0, 1)]
    assert files(tmp_path) == names
    found = [pq.ParquetFile(tmp_path / name).read().column("n").to_pylist() for name in names]
    assert [sorted(x) for x in found] == [[1, 2], [61, 62]]


# Together


@pytest.mark.parametrize("runner", ["FnApiRunner", "PortableRunner", "PrismRunner"])
def test_read_embed_write(runner: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    arguments = [f"--runner={runner}"]
    if runner == "PortableRunner":
        arguments = LOOPBACK
    elif runner == "PrismRunner":
        arguments.append(f"--prism_location={request.getfixturevalue('prism_path')}")
        arguments.append("--environment_type=LOOPBACK")
    source_folder, output = tmp_path / "in", tmp_path / "out"
    source_folder.mkdir()
    texts: dict[int, list[str]] = {}
    for file in range(3):
        keys = [file, file + 1] * 5
        texts_here = [f"file {file}, row {i}" for i in range(10)]
        for key, text in zip(keys, texts_here, strict=True):
            texts.setdefault(key, []).append(text)
        table = pa.table({"service": pa.array(keys, pa.int16()), "text": texts_here})
        pq.write_table(table, source_folder / f"{file}.parquet")
    with beam.Pipeline(options=PipelineOptions(arguments)) as p:
        read_ = p | ReadPartitions(input=str(source_folder), partition_by=["service"])
        embedded = read_.rows | Embed(model="dummy:16", device="cpu")
        _ = embedded.rows | WritePartitions(output=str(output), partition_by=["service"])
    found = ds.dataset(output, partitioning="hive").to_table().to_pylist()
    by_key: dict[int, list[str]] = {}
    for row in found:
        by_key.setdefault(row["service"], []).append(row["text"])
        assert len(row["embedding"]) == 16
    assert {k: sorted(v) for k, v in by_key.items()} == {k: sorted(v) for k, v in texts.items()}
    metadata = pq.read_schema(output / "service=1/part-00000.parquet").metadata
    assert json.loads(metadata[b"surge.partition"]) == {"service": {"type": "integer", "value": 1}}
