"""Reading: from an input's files to runs of partition rows, and from a plan to its rows.

Scanning opens footers and key columns, never whole files, and tells which rows of which file
belong to which partition. Reading takes a SuperBatchPlan and yields Arrow columns. Text and
compressed files are first staged: converted once to Parquet below ``_surge/staging``.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from surge_beam.records import (
    BadInputError,
    DeadLetter,
    Segment,
    SourceFile,
    SuperBatchPlan,
    SurgeError,
    dead_letter_table,
    pack,
    unpack,
)
from surge_beam.transforms.columns import (
    as_read,
    as_type,
    is_text,
    join_tables,
    pack_columns,
    plain_value,
    untyped_columns,
    without_type,
)
from surge_beam.transforms.files import InputFile, Store, digest, filesystem
from surge_beam.transforms.guard import GuardError, UnreadableFileError, shared_guard
from surge_beam.transforms.parquet_probe import FIRST_ROW, INT96_UNIT
from surge_beam.transforms.partitions import (
    KeyRuns,
    file_folder,
    hive_values,
    key_folder,
    key_type,
    key_values,
)

RESERVED = "__surge_"
ROW_COLUMN = "__surge_row"
FILE_COLUMN = "__surge_file"
STAGING = "_surge/staging"
SCANS = "_surge/scans"
BLOCKS = "_surge/blocks"
FILE_LETTERS = "_surge/dead_letters/files"
UNREADABLE = "UnreadableRowGroup"
MAX_RUNS_PER_ELEMENT = 50_000
SCAN_ROWS = 1 << 20
BATCH_ROWS = 4096
ATTEMPTS = 3
_SCAN_VERSION = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """What to read from each file.

    Attributes:
      text_column: a column that must hold text, if there is one.
      required_columns: further columns to read, which every file must have.
      optional_columns: further columns to read where a file has them.
      lines: a file is lines of text, of which each is a row with one binary column ``line``.
      partition_by: key columns; empty means hive folders, else one partition a file.
      keep_columns: columns to carry to the output, null where a file lacks one; None means all.
      added_columns: names the output adds, which no input column may have.
      fail_on_bad_input: raise BadInputError instead of writing a dead letter.
    """

    text_column: str | None = "text"
    required_columns: tuple[str, ...] = ()
    optional_columns: tuple[str, ...] = ()
    lines: bool = False
    partition_by: tuple[str, ...] = ()
    keep_columns: tuple[str, ...] | None = None
    added_columns: tuple[str, ...] = ("embedding",)
    fail_on_bad_input: bool = False

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """Columns that every file must have besides those that are kept, each once."""
        text = () if self.text_column is None else (self.text_column,)
        return tuple(dict.fromkeys((*text, *self.required_columns)))


@dataclasses.dataclass(frozen=True)
class FileRuns:
    """Runs of partition rows in one file, or in a stretch of it.

    Attributes:
      source: the file.
      partitions: ``(folder, values)`` of each distinct partition.
      which: int64 [R], the partition of each run.
      start, rows, nbytes: int64 [R], first row, rows and estimated bytes of each run.
      failed: the file gave no rows; its dead letter is written.
      dead_letters: file-level dead letters (a whole file, or lines of a text file).
      columns: the file's columns that go to the output, packed; empty where it has no rows.
    """

    source: SourceFile
    partitions: list[tuple[str, str]]
    which: np.ndarray
    start: np.ndarray
    rows: np.ndarray
    nbytes: np.ndarray
    failed: bool = False
    dead_letters: int = 0
    columns: bytes = b""


def first_contact(name: str, source: str, **kwargs: Any) -> Any:
    """Calls the helper process, which meets every file first, and tries again what may pass.

    Raises:
      UnreadableFileError: the file is bad, is gone or may not be read.
      OSError: its file system fails, so that trying later may help.
    """
    for attempt in range(ATTEMPTS):
        try:
            return shared_guard().call(name, source=source, **kwargs)
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            raise UnreadableFileError(source, error.strerror or str(error)) from error
        except (OSError, GuardError):
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(2**attempt)
    raise AssertionError("unreachable")


def describe(url: str, columns: Sequence[str] | None = None) -> tuple[pa.Schema, dict[str, Any]]:
    """The schema of a Parquet file, and what else the helper process tells about it.

    Raises:
      UnreadableFileError, OSError: as ``first_contact``.
    """
    about = first_contact("describe_parquet", url, columns=columns)
    return pa.ipc.read_schema(pa.BufferReader(about["schema"])), about


def source_of(file: InputFile) -> SourceFile:
    format_ = file.format or "parquet"
    return SourceFile(file.url, file.name, file.key, file.fingerprint, format_, file.compression)


def staged_name(source: SourceFile) -> str:
    return f"{STAGING}/{source.fingerprint}.parquet"


class Scanner:
    """Scans files of one input: what the worker that plans needs to know of each."""

    def __init__(self, config: ReadConfig, store: Store):
        self.config = config
        self.store = store
        self._scan_key = digest(
            _SCAN_VERSION,
            config.text_column,
            config.required_columns,
            config.lines,
            config.partition_by,
            config.keep_columns,
            config.added_columns,
        )

    def scan(self, file: InputFile) -> Iterator[bytes]:
        """Packed ``FileRuns`` of a file; of one that cannot be read, a single failed one.

        Raises:
          BadInputError: a bad file, under ``fail_on_bad_input``.
        """
        source = source_of(file)
        if source.staged:
            cached = self.store.get_or_none(self._cache_name(source))
            if cached is not None and not self.config.fail_on_bad_input:
                yield from unpack(cached)
                return
        try:
            found = list(self._scan(source))
        except BadInputError:
            raise
        except (SurgeError, pa.ArrowException, ValueError, ArithmeticError) as error:
            self._letter(source, error, guessed=not file.format)
            none = np.zeros(0, np.int64)
            failed = FileRuns(source, [], none, none, none, none, failed=True, dead_letters=1)
            yield pack(failed)
            return
        packed = [pack(part) for runs in found for part in _stretches(runs)]
        if source.staged:
            self.store.put(self._cache_name(source), pack(packed))
        yield from packed

    def _cache_name(self, source: SourceFile) -> str:
        return f"{SCANS}/{source.fingerprint}-{self._scan_key}"

    def _letter(self, source: SourceFile, error: Exception, *, guessed: bool) -> None:
        message = error.reason if isinstance(error, UnreadableFileError) else str(error)
        if guessed:
            message = f"read as Parquet, since its name does not tell the format: {message}"
        if self.config.fail_on_bad_input:
            raise BadInputError(f"{source.url}: {message}") from error
        kind = "UnusableFileError" if type(error) is SurgeError else type(error).__name__
        letter = DeadLetter(stage="read", error=kind, message=message, file=source.url)
        write_file_letters(self.store, source, dead_letter_table([letter]))

    def _scan(self, source: SourceFile) -> Iterator[FileRuns]:
        url, bad = source.url, 0
        if not url.isascii() and url.encode("utf-8", "replace").decode() != url:
            raise SurgeError("its name is not UTF-8, so that readers cannot open it; rename it")
        if self.config.lines and source.format == "parquet":
            raise SurgeError("batch lines are lines of JSON, not Parquet; name a prompt column")
        if source.staged:
            url, bad, missing = stage(self.store, source, self.config)
            if missing:
                raise SurgeError(_lacking(url, missing[0], source.format))
        keep = self.config.keep_columns
        needed = (*self.config.needed_columns, *self.config.optional_columns)
        columns = None if keep is None else [*keep, *needed]
        schema, about = describe(url, columns)
        hive = hive_values(source.name)
        check_schema(schema, hive, self.config)
        for name in schema.names:
            ours = name == ROW_COLUMN and source.format != "parquet"
            if name.startswith(RESERVED) and not ours:
                raise SurgeError(f"the column name {name!r} is reserved")
        group_rows = np.array(about["row_group_rows"], np.int64)
        group_bytes = np.array(about["row_group_bytes"], np.int64)
        _check_folder_values(url, schema, hive, group_rows)
        first: dict[str, Any] = {"dead_letters": bad}
        if group_rows.any():
            inferred = source.format != "parquet"
            own = as_read(schema, inferred=inferred)
            fields = [own.field(name) for name in kept_columns(schema, hive, self.config)]
            fields += [(n, pa.string()) for n in kept_folders(schema.names, hive, self.config)]
            first["columns"] = pack_columns(pa.schema(fields), inferred=inferred)
        if self.config.partition_by:
            yield from self._key_runs(source, url, schema, hive, group_rows, group_bytes, first)
            return
        if self.config.lines:
            path, values = file_folder(source.name)
            folder = (f"{BLOCKS}/{path}", values)
        elif hive:
            folder = key_folder(list(hive), [("string", v) for v in hive.values()])
        else:
            folder = file_folder(source.name)
        rows, nbytes = int(group_rows.sum()), int(group_bytes.sum())
        one = np.array([0], np.int64)
        yield FileRuns(source, [folder], one, one, np.array([rows]), np.array([nbytes]), **first)

    def _key_runs(
        self,
        source: SourceFile,
        url: str,
        schema: pa.Schema,
        hive: dict[str, str | None],
        group_rows: np.ndarray,
        group_bytes: np.ndarray,
        first: dict[str, Any],
    ) -> Iterator[FileRuns]:
        """
        Args:
          first: what the first of them tells of the file.
        """
        names = list(self.config.partition_by)
        in_file = [n for n in names if n not in hive]
        finder = KeyRuns(names)
        edges = np.concatenate([[0], np.cumsum(group_rows)])
        empty_file = not group_rows.any()
        if in_file and not empty_file:
            for name in in_file:
                key_type(schema.field(name).type)
        for some in _scanned_together(group_rows):
            begin, rows = int(edges[some[0]]), int(group_rows[some].sum())
            if in_file:
                data = first_contact("key_runs", url, row_groups=some.tolist(), columns=in_file)
                table = pa.ipc.open_stream(data).read_all()
                numbers = table.column(FIRST_ROW).to_numpy()
            else:
                numbers = edges[some] - begin
                table = pa.table({FIRST_ROW: numbers})
            for name in names:
                if name in hive:
                    constant = pa.scalar(hive[name], pa.string())
                    table = table.append_column(name, pa.repeat(constant, len(numbers)))
            at_groups = np.searchsorted(numbers, edges[some] - begin)
            partitions, which, at = finder.runs(table.select(names), at_groups)
            starts = numbers[at]
            counts = np.diff(np.append(starts, rows))
            starts = starts + begin
            group = np.searchsorted(edges, starts, side="right") - 1
            sizes = counts * group_bytes[group] // group_rows[group]
            yield FileRuns(source, partitions, which, starts, counts, sizes, **first)
            first = {}
        if empty_file:
            empty = np.zeros(0, np.int64)
            yield FileRuns(source, [], empty, empty, empty, empty, **first)


def _scanned_together(group_rows: np.ndarray) -> Iterator[np.ndarray]:
    """Row groups with rows: as many as begin within the same SCAN_ROWS rows, one or more."""
    groups = np.flatnonzero(group_rows)
    begins = (np.cumsum(group_rows) - group_rows)[groups]
    for some in np.split(groups, np.flatnonzero(np.diff(begins // SCAN_ROWS)) + 1):
        if len(some):
            yield some


def _check_folder_values(
    url: str, schema: pa.Schema, hive: dict[str, str | None], group_rows: np.ndarray
) -> None:
    """Raises SurgeError where a column has the name of a folder's key and holds something else.

    Only one of the two comes out, so that the other would be lost. Text and integers are compared,
    of which a folder's name is plain.
    """
    for name in hive:
        if name not in schema.names:
            continue
        kind = schema.field(name).type
        if not is_text(kind) and not pa.types.is_integer(kind):
            continue
        for some in _scanned_together(group_rows):
            data = first_contact("key_runs", url, row_groups=some.tolist(), columns=[name])
            for value in pa.ipc.open_stream(data).read_all().column(name).unique().to_pylist():
                if value is not None and not _names(hive[name], value):
                    raise SurgeError(
                        f"the column {name!r} holds {value!r} and the folder is {name}="
                        f"{hive[name]}; rename or drop one, or leave one out"
                    )


def _names(folder: str | None, value: str | int) -> bool:
    """Whether a folder's text is a value."""
    if folder is None or isinstance(value, str):
        return folder == value
    try:
        return int(folder) == value
    except ValueError:
        return False


def _lacking(url: str, column: str, format_: str) -> str:
    """Why a text file has no such column, staged at ``url``."""
    names = [name for name in describe(url)[0].names if not name.startswith(RESERVED)]
    why = f"no row has a column {column!r}; the file has {', '.join(map(repr, names[:20]))}"
    if column in (name.strip() for name in names):
        why += ": there is a blank beside the name"
    elif format_ == "csv" and len(names) == 1 and any(sign in names[0] for sign in ";\t|"):
        why += ": its fields must be separated by commas"
    return why


def _stretches(runs: FileRuns) -> Iterator[FileRuns]:
    """Cuts the runs of a file into elements of a size that every runner can pass on."""
    if len(runs.which) <= MAX_RUNS_PER_ELEMENT:
        yield runs
        return
    for at in range(0, len(runs.which), MAX_RUNS_PER_ELEMENT):
        to = slice(at, at + MAX_RUNS_PER_ELEMENT)
        used, which = np.unique(runs.which[to], return_inverse=True)
        yield FileRuns(
            runs.source,
            [runs.partitions[i] for i in used.tolist()],
            which.astype(np.int64),
            runs.start[to],
            runs.rows[to],
            runs.nbytes[to],
            dead_letters=runs.dead_letters if at == 0 else 0,
            columns=runs.columns if at == 0 else b"",
        )


def write_unreadable(store: Store, source: SourceFile, reason: str) -> None:
    """The one dead letter of a file some of whose row groups cannot be decoded."""
    letter = DeadLetter(stage="read", error=UNREADABLE, message=reason, file=source.url)
    write_file_letters(store, source, dead_letter_table([letter]))


def write_file_letters(store: Store, source: SourceFile, table: pa.Table) -> None:
    """Dead letters of one version of one file; writing them again changes nothing."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    store.put(f"{FILE_LETTERS}/{source.key}-{source.fingerprint}.parquet", sink.getvalue())


def stage(store: Store, source: SourceFile, config: ReadConfig) -> tuple[str, int, tuple[str, ...]]:
    """Converts a text or compressed file to Parquet, and its bad lines to dead letters.

    Returns:
      URL of the copy, number of bad lines, and which of the text and key columns no row has.
    """
    name = staged_name(source)
    url = store.url_of(name)
    if store.local:
        store._make(store.path(STAGING))
    result = first_contact(
        "stage_text",
        source.url,
        destination=url,
        format="lines" if config.lines else source.format,
        compression=source.compression,
        text_column=config.text_column,
        key_columns=(*config.partition_by, *config.required_columns),
    )
    bad = int(result["bad_rows"])
    if bad:
        fs, path = filesystem(url + ".bad")
        with fs.open(path, "rb") as file:
            letters = pq.read_table(file)
        fs.rm_file(path)
        if config.fail_on_bad_input:
            first = letters.slice(0, 1).to_pylist()[0]
            raise BadInputError(f"{source.url}, line {first['row']}: {first['message']}")
        write_file_letters(store, source, letters)
    # an empty file has no columns and lacks none
    hive = hive_values(source.name)
    missing = tuple(n for n in result["missing"] if n not in hive) if result["rows"] else ()
    return url, bad, missing


def check_schema(schema: pa.Schema, hive: dict[str, str | None], config: ReadConfig) -> None:
    """Raises SurgeError where a file lacks a column that the job needs, or has it twice."""
    names = schema.names
    for name in config.needed_columns:
        if name not in names:
            raise SurgeError(f"no column {name!r}; the file has {', '.join(map(repr, names[:20]))}")
    for name in config.partition_by:
        if name not in names and name not in hive:
            raise SurgeError(f"no key column {name!r} in the file or its folder names")
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise SurgeError(f"column {twice[0]!r} occurs more than once")
    for name in config.added_columns:
        if name in names and (config.keep_columns is None or name in config.keep_columns):
            raise SurgeError(f"column {name!r} is the output's own; leave it out with keep_columns")
        if name in hive or name in config.partition_by:
            raise SurgeError(f"key column {name!r} has the name of a column of the output")
    if config.text_column is None:
        return
    kind = schema.field(config.text_column).type
    if not is_text(kind) and not pa.types.is_null(kind):
        raise SurgeError(f"column {config.text_column!r} holds {kind}, not text")


def kept_columns(schema: pa.Schema, hive: dict[str, str | None], config: ReadConfig) -> list[str]:
    """The columns of a file that go to the output."""
    keep = schema.names if config.keep_columns is None else config.keep_columns
    others = {*(config.partition_by or hive), ROW_COLUMN, FILE_COLUMN}
    return [name for name in keep if name in schema.names and name not in others]


def kept_folders(
    names: Sequence[str], hive: dict[str, str | None], config: ReadConfig
) -> list[str]:
    """The folders' names that are columns of the output, since they are neither keys of a
    partition nor columns of the file.
    """
    keys, keep = config.partition_by, config.keep_columns
    others = [name for name in hive if keys and name not in keys and name not in names]
    return [name for name in others if keep is None or name in keep]


@dataclasses.dataclass
class ReadSegment:
    """The rows of a segment as read.

    Attributes:
      segment: its plan.
      table: the columns, ``rows`` of them; the text column is among them.
      origin: int64 [rows, 2]: the file's index in the plan and the row's number there (from 0 in
        Parquet, the line from 1 in text).
      unreadable: rows planned that lie in row groups which cannot be decoded.
    """

    segment: Segment
    table: pa.Table
    origin: np.ndarray
    unreadable: int = 0


class _Cursor:
    """Reads ascending row ranges of one Parquet file, going on from where it stands.

    Attributes:
      edges: int64 [G + 1], the first row of each row group, and the file's rows.
      schema: of the batches that ``read`` yields.
    """

    def __init__(self, url: str, columns: list[str], *, inferred: bool):
        fs, path = filesystem(url)
        self._file = fs.open(path, "rb")
        self._parquet = pq.ParquetFile(self._file, coerce_int96_timestamp_unit=INT96_UNIT)
        counts = [
            self._parquet.metadata.row_group(g).num_rows
            for g in range(self._parquet.num_row_groups)
        ]
        self.edges = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        schema, wanted = self._parquet.schema_arrow, set(columns)
        self._columns = columns
        self._untyped = set(untyped_columns(schema)) if inferred else set()
        read = as_read(schema, inferred=inferred)
        self.schema = pa.schema([field for field in read if field.name in wanted])
        self._url = url
        self._verified: dict[int, str | None] = {}
        self._group = -1
        self._at = 0
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._batch: pa.RecordBatch | None = None

    def close(self) -> None:
        self._batches, self._batch = iter(()), None
        self._parquet.close()
        self._file.close()

    def unsound(self, group: int) -> str | None:
        """Why a row group cannot be decoded whole, or None where it can."""
        if group not in self._verified:
            try:
                first_contact("verify_row_group", self._url, row_group=group, columns=self._columns)
                self._verified[group] = None
            except UnreadableFileError as error:
                self._verified[group] = error.reason
        return self._verified[group]

    def read(self, group: int, starts: np.ndarray, stops: np.ndarray) -> Iterator[pa.RecordBatch]:
        """Rows of ascending, disjoint ranges ``[start, stop)`` of the file, in one row group."""
        if group != self._group or starts[0] < self._at:
            self._group, self._at = group, int(self.edges[group])
            self._batch = None
            self._batches = self._parquet.iter_batches(
                batch_size=BATCH_ROWS,
                row_groups=[group],
                columns=self._columns,
                use_threads=False,
            )
        first = 0
        while first < len(starts):
            if self._batch is None or starts[first] >= self._at + self._batch.num_rows:
                self._at += self._batch.num_rows if self._batch is not None else 0
                # asked for a column "a.b", Parquet gives field b of a column "a" too
                batch = next(self._batches).select(self.schema.names)
                columns = [
                    without_type(column)
                    if field.name in self._untyped
                    else as_type(column, field.type)
                    for field, column in zip(self.schema, batch.columns, strict=True)
                ]
                self._batch = pa.RecordBatch.from_arrays(columns, schema=self.schema)
                continue
            end = self._at + self._batch.num_rows
            last = int(np.searchsorted(starts, end))
            lo = np.maximum(starts[first:last], self._at) - self._at
            hi = np.minimum(stops[first:last], end) - self._at
            yield _pick(self._batch, lo, hi)
            # the last range may reach into the next batch
            first = last if stops[last - 1] <= end else last - 1
            if first < len(starts) and starts[first] < end:
                starts = np.concatenate([[end], starts[first + 1 :]])
                stops, first = stops[first:], 0


def _pick(batch: pa.RecordBatch, lo: np.ndarray, hi: np.ndarray) -> pa.RecordBatch:
    """Rows of ascending ranges of a batch; copied where sharing would keep much else alive."""
    counts = hi - lo
    total = int(counts.sum())
    if total == hi[-1] - lo[0] and total * 2 >= batch.num_rows:
        return batch.slice(int(lo[0]), total)
    return batch.take(pa.array(expand_ranges(lo, counts)))


def expand_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers of every range ``[start, start + count)``, one after another."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - ends + counts, counts)


@dataclasses.dataclass(frozen=True)
class FileRows:
    """Rows of one file.

    Attributes:
      table: their columns.
      positions: int64 [rows], where they stand in the Parquet file that was read.
      numbers: int64 [rows], their numbers for a person: rows from 0, lines of text from 1.
      owner: int64 [rows], owner of the range each is of.
      lost: int64 [L, 2], rows and owner of what lies in row groups that cannot be decoded.
      reason: why they cannot.
    """

    table: pa.Table
    positions: np.ndarray
    numbers: np.ndarray
    owner: np.ndarray
    lost: np.ndarray
    reason: str | None


class SuperBatchReader:
    """Reads the rows of plans. One per process; keeps a few files open between SuperBatches."""

    OPEN_FILES = 4

    def __init__(self, config: ReadConfig, store: Store):
        self._config = config
        self._store = store
        self._cursors: dict[str, _Cursor] = {}

    def read(self, plan: SuperBatchPlan) -> tuple[list[ReadSegment], dict[int, str]]:
        """The plan's segments in order, and why a file's row groups could not be read, by file.

        Raises:
          BadInputError: a row group that cannot be decoded, under ``fail_on_bad_input``.
        """
        slices = [
            (x.file, x.start, x.rows, i) for i, s in enumerate(plan.segments) for x in s.slices
        ]
        wanted = np.array(slices, np.int64).reshape(-1, 4)
        wanted = wanted[np.lexsort((wanted[:, 1], wanted[:, 0]))]
        pieces: list[list[tuple[pa.Table, np.ndarray]]] = [[] for _ in plan.segments]
        unreadable = np.zeros(len(plan.segments), np.int64)
        broken: dict[int, str] = {}
        for file in np.unique(wanted[:, 0]).tolist():
            ranges = wanted[wanted[:, 0] == file, 1:]
            found = self.read_rows(plan.files[file], ranges)
            table, owner = found.table, found.owner
            if found.reason is not None:
                broken[file] = found.reason
                np.add.at(unreadable, found.lost[:, 1], found.lost[:, 0])
            if FILE_COLUMN in table.column_names:
                # a bucket of the exchange: the files it came of follow it in the plan's list
                files = table.column(FILE_COLUMN).to_numpy() + 1
                table = table.drop_columns([FILE_COLUMN])
            else:
                files = np.full(len(owner), file, np.int64)
            origin = np.stack([files, found.numbers], axis=1)
            order = np.argsort(owner, kind="stable")
            if not np.array_equal(order, np.arange(len(order))):
                table, origin, owner = table.take(pa.array(order)), origin[order], owner[order]
            edges = np.flatnonzero(np.diff(owner, prepend=-1, append=-1))
            for lo, hi in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                pieces[owner[lo]].append((table.slice(lo, hi - lo), origin[lo:hi]))
        segments = []
        for index, segment in enumerate(plan.segments):
            read, origin = self._assemble(segment, pieces[index])
            lost = int(unreadable[index]) + segment.lost
            segments.append(ReadSegment(segment, read, origin, lost))
        return segments, broken

    def read_rows(self, source: SourceFile, ranges: np.ndarray) -> FileRows:
        """The rows of ascending ranges of one file.

        Args:
          ranges: int64 [R, 3]: start, rows, owner.

        Raises:
          BadInputError: a row group that cannot be decoded, under ``fail_on_bad_input``.
          SurgeError: the file has fewer rows than were planned.
        """
        cursor = self._cursor(source)
        ranges = ranges[ranges[:, 1] > 0]
        starts, counts, owner = ranges[:, 0], ranges[:, 1], ranges[:, 2]
        if len(starts) and starts[-1] + counts[-1] > cursor.edges[-1]:
            raise SurgeError(
                f"{source.url}: rows up to {starts[-1] + counts[-1]} are planned, the file now has"
                f" {cursor.edges[-1]}; run again"
            )
        starts, counts, owner = _cut(cursor.edges, starts, counts, owner)
        group = np.searchsorted(cursor.edges, starts, side="right") - 1
        batches: list[pa.RecordBatch] = []
        sound, reason = np.ones(len(starts), bool), None
        for number in np.unique(group).tolist():
            here = group == number
            why = cursor.unsound(number)
            if why is None:
                batches.extend(cursor.read(number, starts[here], (starts + counts)[here]))
                continue
            if self._config.fail_on_bad_input:
                raise BadInputError(f"{source.url}: {why}")
            reason, sound = why, sound & ~here
        lost = np.stack([counts[~sound], owner[~sound]], axis=1)
        table = pa.Table.from_batches(batches, cursor.schema)
        positions = numbers = expand_ranges(starts[sound], counts[sound])
        if ROW_COLUMN in table.column_names:
            numbers = table.column(ROW_COLUMN).to_numpy()
            table = table.drop_columns([ROW_COLUMN])
        if self._config.partition_by:
            table = self._with_hive(table, source)
        owners = np.repeat(owner[sound], counts[sound])
        return FileRows(table, positions, numbers, owners, lost, reason)

    def close(self) -> None:
        while self._cursors:
            self._cursors.popitem()[1].close()

    def _cursor(self, source: SourceFile) -> _Cursor:
        known = self._cursors.pop(source.fingerprint, None)
        if known is None:
            url = source.url
            if source.staged:
                name = staged_name(source)
                if not self._store.exists(name):
                    stage(self._store, source, self._config)
                url = self._store.url_of(name)
            inferred = source.format != "parquet"
            known = _Cursor(url, self._columns(source, url), inferred=inferred)
        self._cursors[source.fingerprint] = known
        while len(self._cursors) > self.OPEN_FILES:
            self._cursors.pop(next(iter(self._cursors))).close()
        return known

    def _columns(self, source: SourceFile, url: str) -> list[str]:
        schema, _ = describe(url)
        config = self._config
        wanted = kept_columns(schema, hive_values(source.name), config)
        more = (*config.needed_columns, *config.optional_columns)
        wanted += [n for n in dict.fromkeys(more) if n in schema.names and n not in wanted]
        return wanted + [n for n in (ROW_COLUMN, FILE_COLUMN) if n in schema.names]

    def _assemble(
        self, segment: Segment, pieces: list[tuple[pa.Table, np.ndarray]]
    ) -> tuple[pa.Table, np.ndarray]:
        # pieces come in input order: files by name, which is the order of the plan's list
        if not pieces:
            needed = self._config.needed_columns
            empty = pa.table({name: pa.array([], pa.string()) for name in needed})
            return empty, np.zeros((0, 2), np.int64)
        table = join_tables([t for t, _ in pieces])
        return table, np.concatenate([origin for _, origin in pieces])

    def _with_hive(self, table: pa.Table, source: SourceFile) -> pa.Table:
        """Adds the folder values that are not key columns, since they would be lost otherwise."""
        config, hive = self._config, hive_values(source.name)
        wanted = kept_folders(table.column_names, hive, config)
        held = {*config.partition_by, *table.column_names, *wanted}
        wanted += [n for n in config.optional_columns if n in hive and n not in held]
        for name in wanted:
            constant = pa.repeat(pa.scalar(hive[name], pa.string()), table.num_rows)
            table = table.append_column(name, constant)
        return table


def _cut(
    edges: np.ndarray, starts: np.ndarray, counts: np.ndarray, owner: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts row ranges at the edges of row groups."""
    stops = starts + counts
    pieces = np.searchsorted(edges, stops) - np.searchsorted(edges, starts, side="right") + 1
    if not len(pieces) or pieces.max() == 1:
        return starts, counts, owner
    which = np.repeat(np.arange(len(starts)), pieces)
    group = expand_ranges(np.searchsorted(edges, starts, side="right") - 1, pieces)
    lo = np.maximum(starts[which], edges[group])
    hi = np.minimum(stops[which], edges[group + 1])
    some = hi > lo
    return lo[some], (hi - lo)[some], owner[which][some]


def row_letter(
    config: ReadConfig,
    plan: SuperBatchPlan,
    read: ReadSegment,
    row: int,
    stage: str,
    error: str,
    message: str,
    attempts: int = 1,
) -> DeadLetter:
    """The dead letter of a row of a segment.

    Raises:
      BadInputError: in its place, under ``fail_on_bad_input``.
    """
    file, number = read.origin[row].tolist()
    source = plan.files[file]
    if config.fail_on_bad_input:
        where = "line" if source.format != "parquet" else "row"
        raise BadInputError(f"{source.url}, {where} {number}: {message}")
    return DeadLetter(
        stage=stage,
        error=error,
        message=message,
        file=source.url,
        row=number,
        partition=read.segment.folder,
        record=record_json(read.table, row, read.segment),
        attempts=attempts,
    )


def rows_of(table: pa.Table, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Some columns as rows; a value that Python cannot hold, such as a date, becomes text."""
    if not columns:
        return [{} for _ in range(table.num_rows)]
    try:
        return list(table.select(columns).to_pylist())
    except (ValueError, ArithmeticError, pa.ArrowException):
        named = {name: table.column(name) for name in columns}
        return [
            {name: _held(column, row) for name, column in named.items()}
            for row in range(table.num_rows)
        ]


def _held(column: pa.ChunkedArray, row: int) -> Any:
    try:
        return column[row].as_py()
    except (ValueError, ArithmeticError, pa.ArrowException):
        return plain_value(column, row)


def record_json(table: pa.Table, row: int, segment: Segment | None = None) -> str:
    """A row as JSON, for a dead letter, with its partition's keys; what JSON lacks becomes text."""
    record = {} if segment is None else key_values(segment)
    record.update((name, plain_value(table.column(name), row)) for name in table.column_names)
    return json.dumps(record, ensure_ascii=False)
