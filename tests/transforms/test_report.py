from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surge_beam.records import DeadLetter, SourceFile, SurgeError, dead_letter_table
from surge_beam.transforms import manifest
from surge_beam.transforms.files import Store, digest
from surge_beam.transforms.plan import PlanSummary
from surge_beam.transforms.read import write_file_letters
from surge_beam.transforms.report import REPORT, build_report, embed_summary, write_report

PLAN = "_surge/plan.json"
LIMITS = {"min_rows": 10, "max_rows": 100, "max_bytes": 1000, "tau": None, "c": None}
NUMBERS = [
    *("partitions_encoded", "partitions_skipped", "partitions_failed"),
    *("rows_in", "rows_out", "dead_letters", "superbatches", "tokens", "padding_share"),
    *("duplicates_saved", "measured_seconds", "seconds_to_first_output", "peak_memory"),
    "texts_per_second",
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def plan(store: Store, run: str = "2", **summary: int) -> None:
    content = {**vars(PlanSummary(**summary)), **LIMITS, "run": run, "passed_over": 0}
    store.put(PLAN, json.dumps(content).encode())


def line(partition: str, rows: int, letters: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "partition": partition,
        "fingerprint": digest(partition),
        "rows": rows,
        "dead_letters": letters,
        "files": [],
        **more,
    }


def header(texts: int, **more: Any) -> dict[str, Any]:
    return {
        "superbatch": "x",
        "partitions": 1,
        "partitions_emptied": 0,
        "rows": texts,
        "dead_letters": 0,
        "unreadable": 0,
        "texts": texts,
        "unique_texts": texts,
        "cached_texts": 0,
        "tokens": 10 * texts,
        "padded_tokens": 20 * texts,
        "micro_batches": 1,
        "oom_ceiling": None,
        "seconds": 0.5 + 0.01 * texts,
        "read_seconds": 0.1,
        "ended": 105.0,
        "device": "cpu",
        "dtype": "float32",
        "dimension": 4,
        "memory_bound": 100,
        "peak_memory": 90,
        **more,
    }


def test_figures(store: Store) -> None:
    manifest.write(store, "1", "x", header(9), [line("old", 9), line("gone", 5, 2)])
    for i, rows in enumerate([10, 20, 40, 80, 160]):
        manifest.write(store, "2", f"{i}", header(rows, ended=104.0 + i), [line(f"p{i}", rows)])
    more = header(30, unique_texts=20, cached_texts=5, peak_memory=95)
    bad = [line("nulls", 0, 3), line("broken", 0, unreadable=4), line("q", 30, 1)]
    manifest.write(store, "2", "5", more, bad)
    plan(
        store, rows=9 + 310 + 3 + 4 + 31, rows_stale=5, letters_stale=2, partitions_stale=1,
        partitions_planned=8, partitions_skipped=1, files=9,
    )  # fmt: skip
    report = build_report(store, "2", embed_summary, 100.0, 110.0)
    expected = {
        "rows_in": 353, "rows_out": 349, "dead_letters": 4, "rows_encoded": 340,
        "partitions_encoded": 6, "partitions_skipped": 1, "partitions_failed": 2,
        "partitions_stale": 1, "superbatches": 6, "tokens": 3400, "padding_share": 0.5,
        "duplicates_saved": 10, "cached_texts": 5, "texts_per_second": 34.0, "seconds": 10.0,
        "seconds_to_first_output": 4.0, "peak_memory": 95, "memory_bound": 100,
    }  # fmt: skip
    assert {name: report[name] for name in expected} == expected
    assert report["tau_seconds_per_call"] == pytest.approx(0.5, rel=0.2)
    assert report["c_seconds_per_text"] == pytest.approx(0.01, rel=0.2)
    assert report["predicted_seconds"] == pytest.approx(report["measured_seconds"], rel=0.1)
    write_report(store, report)
    assert json.loads(store.get(REPORT)) == report


def test_lost_rows_fail_loudly(store: Store) -> None:
    manifest.write(store, "2", "x", header(9), [line("p", 9)])
    plan(store, rows=10)
    with pytest.raises(SurgeError, match="10 rows came in, 9 went out and 0 are dead letters"):
        build_report(store, "2", embed_summary, 0.0, 1.0)


@pytest.mark.parametrize("run", ["1", None])
def test_a_run_without_a_plan(store: Store, run: str | None) -> None:
    if run:
        plan(store, run)
    with pytest.raises(SurgeError, match="no plan"):
        build_report(store, "2", embed_summary, 0.0, 1.0)


def test_letters_of_files(store: Store) -> None:
    for name in ("a", "gone"):
        source = SourceFile(name, name, digest(name), digest(name, 1), "csv", None)
        letter = DeadLetter(stage="read", error="E", message="m", file=name)
        write_file_letters(store, source, dead_letter_table([letter] * 2))
    plan(store, file_letters_stale=2, files_failed=1)
    report = build_report(store, "2", embed_summary, 0.0, 1.0)
    assert (report["rows_in"], report["rows_out"], report["dead_letters"]) == (2, 0, 2)
    assert report["seconds_to_first_output"] is None
    assert report["partitions_failed"] == 1


def test_a_real_run_has_every_figure(tmp_path: Path) -> None:
    from tests.pipelines.harness import conserved, quick_job, write_rows

    for i in range(6):
        rows = {"text": [f"{i % 3}", "same", None, f"long {i} " * i], "id": [1, 2, 3, 4]}
        write_rows(tmp_path / "in" / f"k={i}" / "x.parquet", rows)
    quick_job(input=tmp_path / "in", output=tmp_path / "out", min_rows=4)
    report = conserved(tmp_path / "out")
    for name in NUMBERS:
        assert isinstance(report[name], (int, float)), name
    assert (report["rows_in"], report["rows_out"], report["dead_letters"]) == (24, 18, 6)
    assert report["superbatches"] == 6
    assert report["tokens"] > 0 and 0 <= report["padding_share"] < 1
    assert report["duplicates_saved"] + report["cached_texts"] >= 5
    assert 0 < report["seconds_to_first_output"] <= report["seconds"]
    assert report["peak_memory"] > 0
    for name in ("tau_seconds_per_call", "c_seconds_per_text", "predicted_seconds"):
        assert report[name] is None or report[name] >= 0
