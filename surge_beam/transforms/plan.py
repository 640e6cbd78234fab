"""Planning: from the runs that scanning found to the SuperBatches that are left to encode."""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow.parquet as pq

from surge_beam.policy.superbatch import Limits, Piece, cut_superbatches
from surge_beam.records import Segment, Slice, SourceFile, SuperBatchPlan, SurgeError, unpack
from surge_beam.transforms import manifest
from surge_beam.transforms.columns import common_columns, unpack_columns
from surge_beam.transforms.exchange import scatter
from surge_beam.transforms.files import Store, digest
from surge_beam.transforms.partitions import hive_values
from surge_beam.transforms.read import FILE_LETTERS, SCANS, UNREADABLE, FileRuns, expand_ranges
from surge_beam.transforms.write import ROW_LETTERS

IDS = "_surge/ids"
SINGLE_CHUNKS = 128
MAX_CHUNK = 8


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


@dataclasses.dataclass(frozen=True)
class PartitionRuns:
    """Partitions, and where their rows lie.

    Attributes:
      files: the files.
      folders, values: of each partition.
      edges: int64 [P + 1], where each partition's runs begin among all runs.
      file, start, rows: int64 [R], of each run its file, first row and rows, in input order.
    """

    files: list[SourceFile]
    folders: list[str]
    values: list[str]
    edges: np.ndarray
    file: np.ndarray
    start: np.ndarray
    rows: np.ndarray

    def fingerprint(self, partition: int) -> str:
        lo, hi = self.edges[partition], self.edges[partition + 1]
        files = [self.files[f].fingerprint for f in self.file[lo:hi].tolist()]
        return digest(
            ",".join(files),
            self.start[lo:hi].astype("<i8").tobytes(),
            self.rows[lo:hi].astype("<i8").tobytes(),
        )

    def subset(self, partitions: np.ndarray) -> PartitionRuns:
        """Some partitions, with the files that they use."""
        counts = self.edges[partitions + 1] - self.edges[partitions]
        index = expand_ranges(self.edges[partitions], counts)
        files, file = np.unique(self.file[index], return_inverse=True)
        return PartitionRuns(
            [self.files[f] for f in files.tolist()],
            [self.folders[p] for p in partitions.tolist()],
            [self.values[p] for p in partitions.tolist()],
            np.concatenate([[0], np.cumsum(counts)]),
            file,
            self.start[index],
            self.rows[index],
        )

    def slices(self, piece: Piece, place: dict[int, int]) -> Iterator[Slice]:
        lo, hi = self.edges[piece.partition], self.edges[piece.partition + 1]
        skip, left = piece.start, piece.rows
        for i in range(lo, hi):
            rows = int(self.rows[i])
            if skip >= rows:
                skip -= rows
                continue
            if left <= 0:
                return
            take = min(rows - skip, left)
            yield Slice(place[int(self.file[i])], int(self.start[i]) + skip, take)
            skip, left = 0, left - take


@dataclasses.dataclass(frozen=True)
class PlanChunk:
    """Some SuperBatches in a short form; their plans are made where they are encoded.

    A plan is many small objects. Made of a whole corpus in one place, they would hold up the first.

    Attributes:
      runs: the partitions in them.
      replaces: bool [P], whether a partition may have output already.
      batches: the pieces of each SuperBatch.
      columns: as in ``Segment``.
    """

    runs: PartitionRuns
    replaces: np.ndarray
    batches: list[list[Piece]]
    columns: bytes = b""

    def plans(self) -> Iterator[SuperBatchPlan]:
        for batch in self.batches:
            yield self._plan(batch)

    def _plan(self, batch: list[Piece]) -> SuperBatchPlan:
        runs = self.runs
        used: set[int] = set()
        for piece in batch:
            used.update(runs.file[runs.edges[piece.partition] : runs.edges[piece.partition + 1]])
        files = sorted(used)
        place = {f: i for i, f in enumerate(files)}
        segments = tuple(
            Segment(
                runs.folders[p.partition],
                runs.values[p.partition],
                runs.fingerprint(p.partition),
                p.part,
                p.parts,
                p.rows,
                tuple(runs.slices(p, place)),
                bool(self.replaces[p.partition]),
                columns=self.columns,
            )
            for p in batch
        )
        name = digest(*[(s.folder, s.fingerprint, s.part, s.parts) for s in segments])
        return SuperBatchPlan(name, tuple(runs.files[f] for f in files), segments)


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
        self._sound: set[str] = set()
        self._runs, self._which, nbytes = self._collect(parts)
        self._file_columns = list(dict.fromkeys(part.columns for part in parts if part.columns))
        self._columns = common_columns(self._file_columns)
        count = len(self._runs.folders)
        self.rows = np.bincount(self._which, self._runs.rows, minlength=count).astype(np.int64)
        self._bytes = np.bincount(self._which, nbytes, minlength=count).astype(np.int64)
        self._cut: dict[Limits, list[list[Piece]]] = {}

    def _collect(self, parts: list[FileRuns]) -> tuple[PartitionRuns, np.ndarray, np.ndarray]:
        """The runs by partition; int64 [R], the partition and the bytes of each."""
        known: dict[str, int] = {}
        files: list[SourceFile] = []
        folders: list[str] = []
        values: list[str] = []
        which, file, start, rows, nbytes = [], [], [], [], []
        for part in parts:
            if not files or files[-1].name != part.source.name:
                files.append(part.source)
                self.summary.files += 1
                self._sound.add(part.source.key)
            if part.failed or part.dead_letters:
                self._sound.discard(part.source.key)
            self.summary.files_failed += part.failed
            self.summary.file_letters += part.dead_letters
            index = np.empty(len(part.partitions), np.int64)
            for i, (folder, value) in enumerate(part.partitions):
                number = index[i] = known.setdefault(folder, len(folders))
                if number == len(folders):
                    folders.append(folder)
                    values.append(value)
            which.append(index[part.which] if len(part.which) else part.which)
            file.append(np.full(len(part.start), len(files) - 1, np.int64))
            start.append(part.start)
            rows.append(part.rows)
            nbytes.append(part.nbytes)
        of_run = _joined(which)
        order = np.argsort(of_run, kind="stable")
        of_run = of_run[order]
        runs = PartitionRuns(
            files,
            folders,
            values,
            np.searchsorted(of_run, np.arange(len(folders) + 1)),
            _joined(file)[order],
            _joined(start)[order],
            _joined(rows)[order],
        )
        return runs, of_run, _joined(nbytes)[order]

    def check_kept(self, names: Iterable[str]) -> None:
        """Raises SurgeError where no file has one of the columns that are to be kept."""
        found = {f.name for columns in self._file_columns for f in unpack_columns(columns)}
        missing = set(names) - found
        # of all files, so only where a column was not found
        if not missing or not self._file_columns:
            return
        folders = {name for source in self._runs.files for name in hive_values(source.name)}
        for name in sorted(missing - folders):
            raise SurgeError(f"no file has a column {name!r}, which keep_columns asks for")

    def plan(self, limits: Limits) -> Iterator[SuperBatchPlan | SplitPartition]:
        """SuperBatches to encode, and the split partitions to publish after them."""
        for item in self.chunks(limits):
            if isinstance(item, PlanChunk):
                yield from item.plans()
            else:
                yield item

    def chunks(self, limits: Limits) -> Iterator[PlanChunk | SplitPartition]:
        """The same, several SuperBatches together where there are many."""
        folders, committed = self._runs.folders, self._committed
        keys = [manifest.partition_key(f) for f in folders] if len(committed.table) else []
        at = committed.find(keys) if keys else np.full(len(folders), -1, np.int64)
        present = at >= 0
        done = np.zeros(len(at), bool)
        fingerprints = [self._runs.fingerprint(p) for p in np.flatnonzero(present).tolist()]
        # as an array, since numpy takes trailing zeros off bytes
        wanted = np.array([bytes.fromhex(x) for x in fingerprints], "S16")
        done[present] = committed.table["fingerprint"][at[present]] == wanted
        self._summarise(at, present, done)
        cut = self._superbatches(limits)
        whole = self._left(cut, done, limits) if done.any() or committed.parts else cut
        self.summary.superbatches = len(whole)
        self.summary.rows_planned = sum(p.rows for batch in whole for p in batch)
        replaced = present | committed.unfinished
        for some in _grouped(whole):
            yield self._chunk(some, replaced)
        split = {p.partition: p.parts for p, *_ in cut if p.parts > 1 and not done[p.partition]}
        for partition, parts in split.items():
            yield SplitPartition(folders[partition], self._runs.fingerprint(partition), parts)

    def _left(self, cut: list[list[Piece]], done: np.ndarray, limits: Limits) -> list[list[Piece]]:
        """SuperBatches of which nothing is committed; what is left of the others is cut anew."""
        whole, rest = [], []
        for batch in cut:
            left = [p for p in batch if not self._is_done(p, done)]
            if len(left) == len(batch):
                whole.append(left)
            else:
                rest.extend(left)
        return [*whole, *self._recut(rest, limits)]

    def _superbatches(self, limits: Limits) -> list[list[Piece]]:
        if limits not in self._cut:
            self._cut[limits] = cut_superbatches(self.rows, self._bytes, limits)
        return self._cut[limits]

    def _chunk(self, batches: list[list[Piece]], replaced: np.ndarray) -> PlanChunk:
        used = np.array([piece.partition for batch in batches for piece in batch], np.int64)
        partitions, local = np.unique(used, return_inverse=True)
        number = iter(local.tolist())
        moved = [
            [Piece(next(number), p.start, p.rows, p.part, p.parts) for p in batch]
            for batch in batches
        ]
        return PlanChunk(self._runs.subset(partitions), replaced[partitions], moved, self._columns)

    def _summarise(self, at: np.ndarray, present: np.ndarray, done: np.ndarray) -> None:
        found = self._committed.table[at[done]]
        s = self.summary
        s.partitions = len(self._runs.folders)
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
        dead letters of what the input no longer has; none while a file of it cannot be read.
        """
        current = {source.key: source.fingerprint for source in self._runs.files}
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
        if not prune or self.summary.files_failed:
            # which output is theirs, files that cannot be read do not tell
            return
        for path in manifest.prune(store, run, set(self._runs.folders)):
            store.remove(path)
            store.remove_empty_folders(posixpath.dirname(path))
        known = {digest(folder) for folder in self._runs.folders}
        for folder in (ROW_LETTERS, IDS):
            for path in list(store.walk(folder)):
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
        batch_of = np.full(len(self._runs.folders), -1, np.int64)
        for number, batch in enumerate(self._superbatches(limits)):
            for piece in batch:
                # a split partition is read in stretches, as a clustered one is
                batch_of[piece.partition] = number if piece.parts == 1 else -1
        of_run = batch_of[self._which]
        used = of_run >= 0
        runs = self._runs
        return scatter(of_run[used], runs.file[used], runs.start[used], runs.rows[used])

    def _is_done(self, piece: Piece, done: np.ndarray) -> bool:
        if done[piece.partition]:
            return True
        if piece.parts == 1:
            return False
        key = manifest.part_key(self._runs.fingerprint(piece.partition), piece.part, piece.parts)
        return key in self._committed.parts

    def _recut(self, pieces: list[Piece], limits: Limits) -> list[list[Piece]]:
        alone = [[p] for p in pieces if p.parts > 1]
        pooled = [p for p in pieces if p.parts == 1]
        index = np.array([p.partition for p in pooled], np.int64)
        cut = cut_superbatches(self.rows[index], self._bytes[index], limits)
        return alone + [[pooled[p.partition] for p in batch] for batch in cut]


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def _grouped(batches: list[list[Piece]]) -> Iterator[list[list[Piece]]]:
    """Each alone as long as they are few, since what is shuffled can be encoded side by side."""
    at = 0
    while at < len(batches):
        size = min(MAX_CHUNK, 1 + at // SINGLE_CHUNKS)
        yield batches[at : at + size]
        at += size


def letter_errors(store: Store, name: str) -> list[str]:
    """The kinds of error in a file of dead letters."""
    with store.fs.open(store.path(name), "rb") as file:
        return pq.read_table(file, columns=["error"]).column(0).to_pylist()
