"""Planning: from the runs that scanning found to the SuperBatches that are left to encode."""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow.parquet as pq

from surge_beam.policy.superbatch import Limits, Piece, cut_superbatches
from surge_beam.records import Segment, Slice, SourceFile, SuperBatchPlan, unpack
from surge_beam.transforms import manifest
from surge_beam.transforms.exchange import scatter
from surge_beam.transforms.files import Store, digest
from surge_beam.transforms.read import FILE_LETTERS, SCANS, UNREADABLE, FileRuns
from surge_beam.transforms.write import ROW_LETTERS


@dataclasses.dataclass(frozen=True)
class SplitPartition:
    """A partition that is encoded in parts, and must be published when all are there."""

    folder: str
    fingerprint: str
    parts: int


@dataclasses.dataclass
class PlanSummary:
    """What a plan found, for the report."""

    files: int = 0
    files_failed: int = 0
    file_letters: int = 0
    partitions: int = 0
    partitions_skipped: int = 0
    partitions_emptied: int = 0
    rows: int = 0
    rows_skipped: int = 0
    letters_skipped: int = 0
    partitions_stale: int = 0
    rows_stale: int = 0
    letters_stale: int = 0
    unreadable_stale: int = 0
    file_letters_stale: int = 0
    partitions_pruned: int = 0
    superbatches: int = 0
    largest_partition: int = 0
    rows_planned: int = 0
    partitions_planned: int = 0


class Planner:
    """Plans the SuperBatches of an input against what is committed already.

    SuperBatch boundaries are cut over all partitions in input order, committed or not, so that a
    restart plans what is left of the same SuperBatches; those of which only a part is left are
    pooled and cut anew, so that an increment scattered over the corpus still fills its batches.
    """

    def __init__(self, runs: Iterable[bytes], committed: manifest.Committed):
        parts = sorted(
            (part for part in map(unpack, runs)),
            key=lambda p: (p.source.name, int(p.start[0]) if len(p.start) else -1),
        )
        self.summary = PlanSummary()
        self._committed = committed
        self._files: list[SourceFile] = []
        self._sound: set[str] = set()
        self._collect(parts)

    def _collect(self, parts: list[FileRuns]) -> None:
        folders: dict[str, int] = {}
        self._folders: list[str] = []
        self._values: list[str] = []
        which, file, start, rows, nbytes = [], [], [], [], []
        for part in parts:
            if not self._files or self._files[-1].name != part.source.name:
                self._files.append(part.source)
                self.summary.files += 1
                self._sound.add(part.source.key)
            if part.failed or part.dead_letters:
                self._sound.discard(part.source.key)
            self.summary.files_failed += part.failed
            self.summary.file_letters += part.dead_letters
            index = np.empty(len(part.partitions), np.int64)
            for i, (folder, values) in enumerate(part.partitions):
                known = folders.get(folder)
                if known is None:
                    known = folders[folder] = len(self._folders)
                    self._folders.append(folder)
                    self._values.append(values)
                index[i] = known
            which.append(index[part.which] if len(part.which) else part.which)
            file.append(np.full(len(part.start), len(self._files) - 1, np.int32))
            start.append(part.start)
            rows.append(part.rows)
            nbytes.append(part.nbytes)
        self._which = np.concatenate(which) if which else np.zeros(0, np.int64)
        order = np.argsort(self._which, kind="stable")
        self._which = self._which[order]
        self._file = (np.concatenate(file) if file else np.zeros(0, np.int32))[order]
        self._start = (np.concatenate(start) if start else np.zeros(0, np.int64))[order]
        self._run_rows = (np.concatenate(rows) if rows else np.zeros(0, np.int64))[order]
        bytes_ = (np.concatenate(nbytes) if nbytes else np.zeros(0, np.int64))[order]
        count = len(self._folders)
        self._edges = np.searchsorted(self._which, np.arange(count + 1))
        self.rows = np.bincount(self._which, self._run_rows, minlength=count).astype(np.int64)
        self._bytes = np.bincount(self._which, bytes_, minlength=count).astype(np.int64)
        self._fingerprints = [self._fingerprint(p) for p in range(count)]

    def _fingerprint(self, partition: int) -> str:
        lo, hi = self._edges[partition], self._edges[partition + 1]
        files = [self._files[f].fingerprint for f in self._file[lo:hi]]
        return digest(
            ",".join(files),
            self._start[lo:hi].astype("<i8").tobytes(),
            self._run_rows[lo:hi].astype("<i8").tobytes(),
        )

    def plan(self, limits: Limits) -> Iterator[SuperBatchPlan | SplitPartition]:
        """SuperBatches to encode, and the split partitions to publish after them."""
        at = self._committed.find([manifest.partition_key(f) for f in self._folders])
        wanted = np.array([bytes.fromhex(f) for f in self._fingerprints], "S16")
        present = at >= 0
        done = np.zeros(len(at), bool)
        done[present] = self._committed.table["fingerprint"][at[present]] == wanted[present]
        self._summarise(at, present, done)
        whole, rest = [], []
        cut = cut_superbatches(self.rows, self._bytes, limits)
        for batch in cut:
            left = [p for p in batch if not self._is_done(p, done)]
            if len(left) == len(batch):
                whole.append(left)
            else:
                rest.extend(left)
        whole.extend(self._recut(rest, limits))
        replaced = present | self._committed.unfinished
        for batch in whole:
            self.summary.superbatches += 1
            self.summary.rows_planned += sum(p.rows for p in batch)
            yield self._superbatch(batch, replaced)
        split: dict[int, int] = {}
        for batch in cut:
            for piece in batch:
                if piece.parts > 1 and not done[piece.partition]:
                    split[piece.partition] = piece.parts
        for partition, parts in split.items():
            yield SplitPartition(self._folders[partition], self._fingerprints[partition], parts)

    def _summarise(self, at: np.ndarray, present: np.ndarray, done: np.ndarray) -> None:
        found = self._committed.table[at[done]]
        s = self.summary
        s.partitions = len(self._folders)
        s.partitions_skipped = int(done.sum())
        s.partitions_planned = s.partitions - s.partitions_skipped
        s.rows = int(self.rows.sum())
        s.rows_skipped = int(found["rows"].sum())
        s.letters_skipped = int(found["letters"].sum())
        lost = found["letters"] + found["unreadable"]
        s.partitions_emptied = int(((found["rows"] == 0) & (lost > 0)).sum())
        stale = np.ones(len(self._committed.table), bool)
        stale[at[present]] = False
        s.partitions_stale = int(stale.sum())
        s.rows_stale = int(self._committed.table["rows"][stale].sum())
        s.letters_stale = int(self._committed.table["letters"][stale].sum())
        s.unreadable_stale = int(self._committed.table["unreadable"][stale].sum())
        s.largest_partition = int(self.rows.max(initial=0))

    def tidy(self, store: Store, run: str, *, prune: bool) -> None:
        """Removes dead letters of older versions of a file, and with ``prune`` the output and
        dead letters of what the input no longer has.
        """
        current = {source.key: source.fingerprint for source in self._files}
        for name in store.names(FILE_LETTERS):
            key, _, fingerprint = name.removesuffix(".parquet").partition("-")
            path = f"{FILE_LETTERS}/{name}"
            if current.get(key, None if prune else fingerprint) != fingerprint:
                store.remove(path)
            elif key not in current:
                self.summary.file_letters_stale += len(letter_errors(store, path))
            elif key in self._sound and UNREADABLE not in letter_errors(store, path):
                # the file could not be read once, by no fault of its content
                store.remove(path)
        known = set(current.values())
        for name in store.names(SCANS):
            # a file that comes back is scanned again, and its dead letters written again
            if name.partition("-")[0] not in known:
                store.remove(f"{SCANS}/{name}")
        if not prune:
            return
        for path in manifest.prune(store, run, set(self._folders)):
            store.remove(path)
            store.remove_empty_folders(posixpath.dirname(path))
        known = {digest(folder) for folder in self._folders}
        for path in list(store.walk(ROW_LETTERS)):
            if path.split("/")[-2] not in known:
                store.remove(path)
        self.summary.partitions_pruned = self.summary.partitions_stale
        s = self.summary
        s.partitions_stale = s.rows_stale = s.letters_stale = s.unreadable_stale = 0

    @property
    def bytes_per_row(self) -> float:
        """Mean input bytes of a row, as the footers tell."""
        return float(self._bytes.sum() / max(1, self.rows.sum()))

    def scattered(self, limits: Limits) -> float:
        """How often reading SuperBatch by SuperBatch would decode a row (see ``exchange``)."""
        batch_of = np.full(len(self._folders), -1, np.int64)
        for number, batch in enumerate(cut_superbatches(self.rows, self._bytes, limits)):
            for piece in batch:
                # a split partition is read in stretches, as a clustered one is
                batch_of[piece.partition] = number if piece.parts == 1 else -1
        of_run = batch_of[self._which]
        used = of_run >= 0
        return scatter(of_run[used], self._file[used], self._start[used], self._run_rows[used])

    def _is_done(self, piece: Piece, done: np.ndarray) -> bool:
        if done[piece.partition]:
            return True
        if piece.parts == 1:
            return False
        key = manifest.part_key(self._fingerprints[piece.partition], piece.part, piece.parts)
        return key in self._committed.parts

    def _recut(self, pieces: list[Piece], limits: Limits) -> list[list[Piece]]:
        alone = [[p] for p in pieces if p.parts > 1]
        pooled = [p for p in pieces if p.parts == 1]
        index = np.array([p.partition for p in pooled], np.int64)
        cut = cut_superbatches(self.rows[index], self._bytes[index], limits)
        return alone + [[pooled[p.partition] for p in batch] for batch in cut]

    def _superbatch(self, batch: list[Piece], present: np.ndarray) -> SuperBatchPlan:
        used: dict[int, int] = {}
        for piece in batch:
            for f in self._file[self._edges[piece.partition] : self._edges[piece.partition + 1]]:
                used.setdefault(int(f), 0)
        files = sorted(used)
        place = {f: i for i, f in enumerate(files)}
        segments = tuple(
            Segment(
                self._folders[p.partition],
                self._values[p.partition],
                self._fingerprints[p.partition],
                p.part,
                p.parts,
                p.rows,
                tuple(self._slices(p, place)),
                bool(present[p.partition]),
            )
            for p in batch
        )
        name = digest(*[(s.folder, s.fingerprint, s.part, s.parts) for s in segments])
        return SuperBatchPlan(name, tuple(self._files[f] for f in files), segments)

    def _slices(self, piece: Piece, place: dict[int, int]) -> Iterator[Slice]:
        lo, hi = self._edges[piece.partition], self._edges[piece.partition + 1]
        skip, left = piece.start, piece.rows
        for i in range(lo, hi):
            rows = int(self._run_rows[i])
            if skip >= rows:
                skip -= rows
                continue
            if left <= 0:
                return
            take = min(rows - skip, left)
            yield Slice(place[int(self._file[i])], int(self._start[i]) + skip, take)
            skip, left = 0, left - take


def letter_errors(store: Store, name: str) -> list[str]:
    """The kinds of error in a file of dead letters."""
    with store.fs.open(store.path(name), "rb") as file:
        return pq.read_table(file, columns=["error"]).column(0).to_pylist()
