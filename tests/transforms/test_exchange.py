"""Scattered partitions: the exchange gives what reading the input in place gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import embed_corpus
from surge_beam.records import Segment, Slice, SourceFile, SuperBatchPlan
from surge_beam.transforms import plan_files
from surge_beam.transforms.exchange import Bucket, Exchange, scatter, spread


def _write_corpus(folder: Path) -> None:
    rng = np.random.default_rng(5)
    folder.mkdir()
    for number in range(3):
        keys = rng.integers(0, 7, 400)
        texts = [None if i % 97 == 5 else f"text {number} {i}" for i in range(400)]
        table = pa.table({"key": keys, "text": texts, "n": range(400)})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=150)
    lines = [json.dumps({"key": int(i % 3), "text": f"line {i}", "n": i}) for i in range(90)]
    lines[7] = '{"key": 1, "text": 5, "n": 0}'
    lines[11] = "{broken"
    (folder / "rows.jsonl").write_text("\n".join(lines))


def _run(monkeypatch: pytest.MonkeyPatch, corpus: Path, output: Path, limit: float) -> dict:
    monkeypatch.setattr(plan_files, "SCATTER_LIMIT", limit)
    arguments = ["--input", str(corpus), "--output", str(output), "--partition_by", "key"]
    arguments += ["--model", "dummy:4", "--min_rows", "100", "--max_rows", "150"]
    assert embed_corpus.main(arguments) == 0
    assert not (output / "_surge" / "staging").exists()
    return json.loads((output / "_surge" / "report.json").read_text())


def _tables(output: Path) -> dict[str, list[dict]]:
    paths = (p for p in output.rglob("part-*.parquet") if "_surge" not in p.parts)
    return {
        str(p.relative_to(output)): pq.read_table(p, partitioning=None).to_pylist() for p in paths
    }


def _letters(output: Path) -> list[tuple]:
    table = pyarrow.dataset.dataset(output / "_surge" / "dead_letters").to_table()
    rows = table.to_pylist()
    return sorted((Path(r["file"]).name, r["row"] or -1, r["error"], r["partition"]) for r in rows)


def test_same_output_and_dead_letters_as_reading_in_place(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus"
    _write_corpus(corpus)
    in_place = _run(monkeypatch, corpus, tmp_path / "a", 1e9)
    exchanged = _run(monkeypatch, corpus, tmp_path / "b", 0.0)
    assert _tables(tmp_path / "a") == _tables(tmp_path / "b")
    assert _letters(tmp_path / "a") == _letters(tmp_path / "b")
    for name in ("rows_in", "rows_out", "dead_letters", "partitions_encoded", "superbatches"):
        assert in_place[name] == exchanged[name]
    assert exchanged["rows_out"] + exchanged["dead_letters"] == exchanged["rows_in"] == 1290


def test_an_undecodable_row_group_loses_its_rows_alone(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus"
    _write_corpus(corpus)
    path = corpus / "part-1.parquet"
    column = pq.read_metadata(path).row_group(1).column(1)
    data = bytearray(path.read_bytes())
    begin = column.dictionary_page_offset or column.data_page_offset
    data[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(bytes(data))
    in_place = _run(monkeypatch, corpus, tmp_path / "a", 1e9)
    exchanged = _run(monkeypatch, corpus, tmp_path / "b", 0.0)
    assert _tables(tmp_path / "a") == _tables(tmp_path / "b")
    assert ("part-1.parquet", -1, "UnreadableRowGroup", None) in _letters(tmp_path / "b")
    assert exchanged["rows_in"] == in_place["rows_in"] == 1290 - 150 + 1
    assert exchanged["rows_out"] + exchanged["dead_letters"] == exchanged["rows_in"]


def test_files_of_other_columns_are_read_in_place(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, extra in enumerate(("a", "b")):
        table = pa.table({"key": [0, 1] * 40, "text": [f"{extra} {i}" for i in range(80)]})
        table = table.append_column(extra, pa.array(range(80)))
        pq.write_table(table, corpus / f"{number}.parquet")
    _run(monkeypatch, corpus, tmp_path / "a", 1e9)
    _run(monkeypatch, corpus, tmp_path / "b", 0.0)
    assert _tables(tmp_path / "a") == _tables(tmp_path / "b")


def test_a_file_with_nulls_alone_is_brought_together_with_others(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(3):
        rows = [
            {"key": i % 5, "text": f"{number} {i}", "n": i if number else None, "l": [i] * number}
            for i in range(80)
        ]
        (corpus / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read_from: set[str] = set()
    merge = Exchange.merge

    def watched(self, *args):
        for plan in merge(self, *args):
            slices = [x for segment in plan.segments for x in segment.slices]
            read_from.update(Path(plan.files[x.file].url).name for x in slices)
            yield plan

    monkeypatch.setattr(Exchange, "merge", watched)
    _run(monkeypatch, corpus, tmp_path / "a", 1e9)
    assert not read_from
    _run(monkeypatch, corpus, tmp_path / "b", 0.0)
    assert read_from and all(name.startswith("bucket-") for name in read_from)
    assert _tables(tmp_path / "a") == _tables(tmp_path / "b")


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 50), st.integers(1, 9)),
        max_size=30,
    )
)
def test_scatter_is_the_spans_over_the_rows(runs):
    table = np.array(runs, np.int64).reshape(-1, 4)
    batch, file, start, rows = table.T
    assert scatter(batch, file, start, rows) == pytest.approx(_spans(runs))


def _spans(runs: list[tuple[int, int, int, int]]) -> float:
    total = 0
    for pair in {(b, f) for b, f, _, _ in runs}:
        own = sorted(
            [(s, i, n) for i, (b, f, s, n) in enumerate(runs) if (b, f) == pair],
            key=lambda x: (x[0], x[1]),
        )
        total += own[-1][0] + own[-1][2] - own[0][0]
    return total / sum(n for *_, n in runs) if runs else 0.0


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 40_000), min_size=1, max_size=4), max_size=8), st.data())
def test_every_row_has_one_place(batches, data):
    source = [SourceFile(str(i), str(i), str(i), str(i), "parquet", None) for i in range(2)]
    at = [0, 0]
    plans = []
    for number, sizes in enumerate(batches):
        segments = []
        for size in sizes:
            file = data.draw(st.integers(0, 1))
            segments.append(Segment("f", "{}", "00", 0, 1, size, (Slice(file, at[file], size),)))
            at[file] += size
        plans.append(SuperBatchPlan(str(number), tuple(source), tuple(segments)))
    items = list(spread(plans))
    buckets = [x for x in items if isinstance(x, Bucket)]
    tasks = [x for x in items if not isinstance(x, Bucket)]
    assert [p for b in buckets for p in b.plans] == plans
    places: dict[int, list[int]] = {}
    for task in tasks:
        assert (np.diff(task.ranges[:, 0]) > 0).all()
        for _, rows, bucket, place in task.ranges.tolist():
            places.setdefault(bucket, []).extend(range(place, place + rows))
    for number, bucket in enumerate(buckets):
        assert sorted(places[number]) == list(range(sum(p.rows for p in bucket.plans)))
