from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.policy.superbatch import Limits
from surge_beam.records import (
    DeadLetter,
    SourceFile,
    SuperBatchPlan,
    dead_letter_table,
    pack,
    unpack,
)
from surge_beam.transforms import manifest
from surge_beam.transforms.files import Store, digest
from surge_beam.transforms.plan import MAX_CHUNK, SINGLE_CHUNKS, PlanChunk, Planner, SplitPartition
from surge_beam.transforms.read import FILE_LETTERS, SCANS, FileRuns, write_file_letters

Runs = list[tuple[int, int]]
LIMITS = Limits(min_rows=10, max_rows=25, max_bytes=10_000)


def source(name: str, version: int = 0) -> SourceFile:
    return SourceFile(name, name, digest(name), digest(name, version), "parquet", None)


def runs_of(files: dict[str, Runs], *, split_at: int = 10**9, version: int = 0) -> list[bytes]:
    """Packed runs of files: (partition, rows) from row 0 on, in elements of ``split_at`` runs."""
    packed = []
    for name, runs in files.items():
        rows = np.array([r for _, r in runs], np.int64)
        starts = np.cumsum(rows) - rows
        for at in range(0, max(len(runs), 1), split_at):
            part = runs[at : at + split_at]
            used = sorted({p for p, _ in part})
            which = np.array([used.index(p) for p, _ in part], np.int64)
            to = slice(at, at + split_at)
            folders = [(f"key={p}", f'{{"key": {p}}}') for p in used]
            element = FileRuns(
                source(name, version), folders, which, starts[to], rows[to], rows[to] * 7
            )
            packed.append(pack(element))
    return packed


def rows_of(files: dict[str, Runs]) -> dict[str, list[tuple[str, int]]]:
    """Every partition's rows in order, as (file, row)."""
    found: dict[str, list[tuple[str, int]]] = {}
    for name in sorted(files):
        row = 0
        for partition, rows in files[name]:
            found.setdefault(f"key={partition}", []).extend((name, row + i) for i in range(rows))
            row += rows
    return found


def planned(plans: list[SuperBatchPlan]) -> dict[str, list[tuple[str, int]]]:
    parts: dict[str, dict[int, list[tuple[str, int]]]] = {}
    for plan in plans:
        for segment in plan.segments:
            rows = [
                (plan.files[s.file].name, s.start + i)
                for s in segment.slices
                for i in range(s.rows)
            ]
            assert len(rows) == segment.rows
            assert segment.part not in parts.setdefault(segment.folder, {})
            parts[segment.folder][segment.part] = rows
    return {
        folder: [row for part in sorted(found) for row in found[part]]
        for folder, found in parts.items()
    }


def plan(
    files: dict[str, Runs], committed: manifest.Committed, **options: int
) -> tuple[Planner, list[SuperBatchPlan], list[SplitPartition]]:
    planner = Planner(runs_of(files, **options), committed)
    items = list(planner.plan(LIMITS))
    splits = [x for x in items if isinstance(x, SplitPartition)]
    return planner, [x for x in items if isinstance(x, SuperBatchPlan)], splits


def committed_of(plans: list[SuperBatchPlan]) -> manifest.Committed:
    """What is committed when these plans, and nothing else, are done."""
    rows, parts = [], set()
    for segment in (s for p in plans for s in p.segments):
        if segment.parts > 1:
            parts.add(manifest.part_key(segment.fingerprint, segment.part, segment.parts))
        else:
            key = manifest.partition_key(segment.folder)
            rows.append((key, bytes.fromhex(segment.fingerprint), segment.rows, 0, 0))
    table = np.array(sorted(rows), manifest._DTYPE)
    return manifest.Committed(table, frozenset(parts))


NOTHING = committed_of([])
run_lists = st.lists(
    st.tuples(st.integers(0, 12), st.one_of(st.integers(1, 9), st.integers(0, 80))), max_size=12
)
corpora = st.dictionaries(st.sampled_from([f"f{i}" for i in range(6)]), run_lists, min_size=1)


@settings(deadline=None)
@given(corpora, st.integers(1, 5))
def test_every_row_is_planned_once_and_in_order(files: dict[str, Runs], split_at: int) -> None:
    planner, plans, splits = plan(files, NOTHING)
    assert planned(plans) == rows_of(files)
    assert (
        planner.summary.rows
        == planner.summary.rows_planned
        == sum(map(len, rows_of(files).values()))
    )
    assert planner.summary.partitions_planned == len(rows_of(files))
    assert planner.summary.superbatches == len(plans) == len({p.id for p in plans})
    large = {f: -(-len(r) // LIMITS.max_rows) for f, r in rows_of(files).items()}
    assert {s.folder: s.parts for s in splits} == {f: n for f, n in large.items() if n > 1}
    for superbatch in plans:
        assert superbatch.rows <= LIMITS.max_rows
        assert [f.name for f in superbatch.files] == sorted({f.name for f in superbatch.files})
    # neither the order of elements nor where a file is cut matters
    shuffled = Planner(reversed(runs_of(files, split_at=split_at)), NOTHING)
    again = [x for x in shuffled.plan(LIMITS) if isinstance(x, SuperBatchPlan)]
    assert planned(again) == planned(plans)
    assert plan(files, NOTHING)[1] == plans


def test_many_superbatches_travel_together_and_are_all_recognised() -> None:
    files = {"a": [(i, 9) for i in range(4000)], "b": [(i, 3) for i in range(0, 4000, 7)]}
    planner = Planner(runs_of(files), NOTHING)
    chunks = [x for x in planner.chunks(LIMITS) if isinstance(x, PlanChunk)]
    plans = [plan for chunk in chunks for plan in unpack(pack(chunk)).plans()]
    assert planned(plans) == rows_of(files)
    assert all(len(chunk.batches) == 1 for chunk in chunks[:SINGLE_CHUNKS])
    assert len(chunks) < len(plans) / 3
    assert max(len(chunk.batches) for chunk in chunks) == MAX_CHUNK
    # with so many fingerprints, some end in a byte of zero
    done, left, _ = plan(files, committed_of(plans))
    assert left == [] and done.summary.partitions_skipped == 4000


@settings(deadline=None)
@given(corpora, st.data())
def test_a_restart_plans_what_is_left_of_the_same_superbatches(
    files: dict[str, Runs], data: st.DataObject
) -> None:
    _, plans, _ = plan(files, NOTHING)
    done = [p for p in plans if data.draw(st.booleans())]
    planner, left, splits = plan(files, committed_of(done))
    assert left == [p for p in plans if p not in done]
    assert planner.summary.rows_planned == sum(p.rows for p in left)
    # a split partition is published even where all its parts are there
    large = {s.folder for p in plans for s in p.segments if s.parts > 1}
    assert {s.folder for s in splits} == large


@settings(deadline=None)
@given(corpora, st.sets(st.integers(0, 12)))
def test_an_increment_plans_what_is_not_committed(
    files: dict[str, Runs], changed: set[int]
) -> None:
    _, plans, _ = plan(files, NOTHING)
    whole = {s.folder: s for p in plans for s in p.segments}
    rows = rows_of(files)
    table = [
        (manifest.partition_key(f), bytes.fromhex(s.fingerprint), len(rows[f]), 0, 0)
        for f, s in whole.items()
        if int(f[4:]) not in changed
    ]
    committed = manifest.Committed(np.array(sorted(table), manifest._DTYPE), frozenset())
    planner, left, _ = plan(files, committed)
    assert planned(left) == {f: r for f, r in rows.items() if int(f[4:]) in changed}
    assert planner.summary.partitions_skipped == len(table)
    assert planner.summary.rows_skipped == sum(r[2] for r in table)
    assert all(p.rows <= LIMITS.max_rows for p in left)
    assert not any(s.replaces for p in left for s in p.segments)


def test_a_changed_file_changes_its_partitions_alone() -> None:
    files = {"a": [(1, 5), (2, 5)], "b": [(2, 3), (3, 4)], "c": [(4, 40)]}
    _, plans, _ = plan(files, NOTHING)
    new = [*runs_of({k: files[k] for k in "ac"}), *runs_of({"b": files["b"]}, version=1)]
    published = [
        (manifest.partition_key(s.folder), bytes.fromhex(s.fingerprint), 1, 0, 0)
        for p in plans
        for s in p.segments
        if s.part == 0
    ]
    committed = manifest.Committed(np.array(sorted(published), manifest._DTYPE), frozenset())
    planner = Planner(new, committed)
    left = [x for x in planner.plan(LIMITS) if isinstance(x, SuperBatchPlan)]
    assert set(planned(left)) == {"key=2", "key=3"}
    assert all(s.replaces for p in left for s in p.segments)
    assert planner.summary.partitions_stale == 0


def test_after_an_unfinished_run_everything_may_be_replaced() -> None:
    committed = manifest.Committed(NOTHING.table, frozenset(), unfinished=True)
    _, plans, _ = plan({"a": [(1, 5)]}, committed)
    assert plans[0].segments[0].replaces


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def letter(store: Store, name: str, version: int, error: str = "SurgeError") -> None:
    found = DeadLetter(stage="read", error=error, message="m", file=name)
    write_file_letters(store, source(name, version), dead_letter_table([found]))
    store.put(f"{SCANS}/{source(name, version).fingerprint}-x", b"")


def test_tidy(store: Store) -> None:
    letter(store, "a", 0)
    letter(store, "a", 1, "UnreadableRowGroup")
    letter(store, "b", 1)  # could not be read once, and now can
    letter(store, "gone", 0)
    manifest.write(store, "1", "x", {}, [_line("key=9", 4), _line("key=1", 5)])
    store.put("key=9/part-00000.parquet", b"x")
    planner = Planner(runs_of({"a": [(1, 5)], "b": []}, version=1), manifest.load(store))
    list(planner.plan(LIMITS))
    planner.tidy(store, "2", prune=False)
    left = {name.partition("-")[0] for name in store.names(FILE_LETTERS)}
    assert left == {digest("a"), digest("gone")}
    assert len(store.names(FILE_LETTERS)) == 2
    fingerprints = {source(n, 1).fingerprint for n in "ab"}
    assert {n.partition("-")[0] for n in store.names(SCANS)} == fingerprints
    summary = planner.summary
    assert (summary.partitions_stale, summary.rows_stale, summary.file_letters_stale) == (1, 4, 1)

    planner.tidy(store, "3", prune=True)
    assert {name.partition("-")[0] for name in store.names(FILE_LETTERS)} == {digest("a")}
    assert not store.exists("key=9/part-00000.parquet")
    assert len(manifest.load(store).table) == 1
    assert (summary.partitions_stale, summary.partitions_pruned) == (0, 1)


def _line(folder: str, rows: int) -> dict:
    files = [{"path": f"{folder}/part-00000.parquet"}]
    fingerprint = digest(folder)
    return {
        "partition": folder,
        "fingerprint": fingerprint,
        "rows": rows,
        "dead_letters": 0,
        "files": files,
    }


def test_no_runs_at_all() -> None:
    planner = Planner([], NOTHING)
    assert list(planner.plan(LIMITS)) == []
    assert planner.summary.rows == 0
