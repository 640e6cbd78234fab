"""Stage a text file (JSONL or CSV, compressed or not) as a Parquet file with random access.

Every input line ends up in exactly one place: a row of the staged file, a dead letter in
``<destination>.bad``, or nowhere because it is blank. Nothing holds more than one block of rows.

Column types of JSONL hold for the whole file:

- null < bool, and null < int64 < float64. An integer of more than 53 bits in a column that also
  holds fractions would lose digits, so such a column becomes a string column.
- lists of strings, and lists of numbers, become Arrow lists (nulls inside are kept).
- everything else, and every mix, becomes a string column: a string stays as it is, any other
  value is its JSON text. So does a column without any value, which is noted: another file's type
  for it is the better one (``columns.py``).

CSV carries no types: every column is a string, exactly as written.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import glob
import json
import lzma
import marshal
import os
import re
import socket
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Literal, Protocol

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from surge_beam.records import DEAD_LETTER_SCHEMA, SurgeError
from surge_beam.transforms.columns import mark_untyped

ROW_COLUMN = "__surge_row"
LINE_COLUMN = "line"
MAX_LINE_BYTES = 256 << 20
MAX_CSV_RECORD_BYTES = 16 << 20
MAX_CSV_RECORD_LINES = 100_000
MAX_RECORD_BYTES = 64 << 10
MAX_COLUMNS = 2_000
MAX_NAME_CHARACTERS = 1_024
GROUP_ROWS = 16_384
GROUP_BYTES = 16 << 20
_GROUP_CELLS = 2 << 20
_CHUNK_BYTES = 4 << 20
_MAX_RATIO = 2_000
_RATIO_FLOOR_BYTES = 1 << 30
_BOM = b"\xef\xbb\xbf"
_EXACT_FLOAT = 1 << 53
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_QUOTED = re.compile(r'"([^"]*(?:""[^"]*)*)"')


class UnreadableFileError(SurgeError):
    """A whole input file that cannot be read: none of its rows are used.

    Attributes:
      file: the file as it was named by the caller.
      reason: one line for a person.
    """

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(file, reason)
        self.file = file
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot read {self.file}: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staged:
    """What ``stage_text`` wrote.

    Attributes:
      rows: rows of the staged file.
      bad_rows: dead letters in ``bad``.
      bad: the Parquet file of dead letters, of ``DEAD_LETTER_SCHEMA``; None without any.
      missing: asked-for columns that no row of the source has.
    """

    rows: int
    bad_rows: int = 0
    bad: str | None = None
    missing: tuple[str, ...] = ()


class Readable(Protocol):
    """Anything with ``read``."""

    def read(self, size: int = -1, /) -> bytes: ...


def no_tick() -> None:
    """The default of every ``tick`` argument: nobody waits for signs of life."""


def stage_text(
    source: str,
    destination: str,
    *,
    format: Literal["jsonl", "csv", "lines", "parquet"],
    compression: str | None = None,
    text_column: str | None = None,
    key_columns: tuple[str, ...] = (),
    storage_options: dict[str, Any] | None = None,
    tick: Callable[[], None] = no_tick,
) -> Staged:
    """Converts a text file to Parquet, or decompresses a Parquet file.

    The staged rows keep their order; their source line (from 1; of a CSV record its first line)
    is the last column, ``__surge_row``. Files appear under their final name only when complete,
    the dead letters first.

    Args:
      source: local path or fsspec URL.
      destination: local path or fsspec URL of the Parquet file to write.
      format: ``jsonl``, ``csv``, ``lines`` (every line that is not blank is a row as it is, in a
        binary column ``line``), or ``parquet`` (a compressed Parquet file, copied as it is).
      compression: None, ``gzip``, ``bz2``, ``xz``, ``lzma``, ``zstd``, ``lz4`` or ``zip``.
      text_column: a JSONL row whose value there is neither a string nor null is a dead letter.
        A JSONL file without that column gets it, all null.
      key_columns: columns that a JSONL file gets too where it lacks them.
      storage_options: for the source's filesystem, and the destination's where both are one.
      tick: called on every sign of progress.

    Raises:
      UnreadableFileError: the file as a whole is unusable; nothing is written.
      OSError: the source cannot be opened or fetched, or the destination not written.
    """
    wanted = tuple(dict.fromkeys(([text_column] if text_column else []) + list(key_columns)))
    with (
        _Output(destination, source, storage_options, tick) as output,
        _open_stream(source, compression, storage_options, tick) as stream,
    ):
        if format == "parquet":
            return _copy_parquet(stream, output, source)
        with _BadRows(output.bad_path, source) as bad:
            if format == "jsonl":
                staged = _stage_jsonl(stream, output, bad, text_column, wanted, tick)
            elif format == "csv":
                staged = _stage_csv(stream, output, bad, wanted)
            elif format == "lines":
                staged = _stage_lines(stream, output, tick)
            else:
                raise ValueError(f"format must be jsonl, csv, lines or parquet, not {format!r}")
        return dataclasses.replace(staged, bad=output.commit())


def remove_leftovers(destination: str, pid: int) -> None:
    """Removes what a killed process left of staging to ``destination``."""
    for path in glob.glob(glob.escape(_temporary_base(destination, pid)) + "-*"):
        with contextlib.suppress(OSError):
            os.unlink(path)


# Opening and decompressing


def resolve(url: str, storage_options: dict[str, Any] | None) -> tuple[Any, str]:
    """The filesystem and the path on it.

    A local name is taken as it is, where fsspec would see a chain of URLs in ``a::b``.
    """
    if "://" not in url or url.startswith(("file://", "local://")):
        return LocalFileSystem(), os.path.abspath(LocalFileSystem._strip_protocol(url))
    filesystem, path = fsspec.core.url_to_fs(url, **(storage_options or {}))
    return filesystem, path


class SourceFile:
    """A file whose reads tick and which remembers a failure to fetch, as opposed to to parse."""

    closed = False

    def __init__(self, raw: BinaryIO, tick: Callable[[], None]) -> None:
        self._raw = raw
        self._tick = tick
        self.failure: Exception | None = None

    def read(self, size: int = -1, /) -> bytes:
        self._tick()
        try:
            return self._raw.read(size)
        except Exception as error:
            self.failure = error
            raise

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        self._raw.close()


@contextlib.contextmanager
def parsing(source: str, file: SourceFile | None = None) -> Iterator[None]:
    """Turns a failure to parse ``source`` into UnreadableFileError; a failure to fetch stays.

    Raises:
      UnreadableFileError: the content is bad.
      MemoryError: parsing needs more memory than there is.
    """
    try:
        yield
    except (SurgeError, MemoryError):
        raise
    except (
        pa.ArrowException,
        OSError,
        EOFError,
        ValueError,
        OverflowError,
        lzma.LZMAError,
        zipfile.BadZipFile,
    ) as error:
        if file is not None and file.failure is not None:
            raise file.failure from None
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise UnreadableFileError(source, reason) from None


class _Stream:
    """Decompressed bytes; a bad or exploding stream raises UnreadableFileError."""

    def __init__(self, raw: Readable, source: str, file: SourceFile, limit: int | None) -> None:
        self.source = source
        self._raw = raw
        self._file = file
        self._limit = limit
        self._count = 0
        self.compressed = raw is not file

    def read(self, size: int = -1, /) -> bytes:
        with parsing(self.source, self._file):
            data = self._raw.read(size)
        self._count += len(data)
        if self._limit is not None and self._count > self._limit:
            raise UnreadableFileError(
                self.source, f"it expands more than {_MAX_RATIO} times: a decompression bomb?"
            )
        return data


@contextlib.contextmanager
def _open_stream(
    source: str,
    compression: str | None,
    storage_options: dict[str, Any] | None,
    tick: Callable[[], None],
) -> Iterator[_Stream]:
    filesystem, path = resolve(source, storage_options)
    with filesystem.open(path, "rb") as handle:
        file = SourceFile(handle, tick)
        limit = None
        if compression is not None and getattr(handle, "size", None):
            limit = max(_RATIO_FLOOR_BYTES, _MAX_RATIO * handle.size)
        with parsing(source, file):
            raw = _decompressed(file, compression)
        yield _Stream(raw, source, file, limit)


def _decompressed(file: SourceFile, compression: str | None) -> Readable:
    # Python's bz2 and lzma readers, and zstandard's, end silently at damage between two members;
    # Arrow's report it, and the truncated stream too.
    if compression is None:
        return file
    if compression in ("gzip", "bz2", "zstd", "lz4"):
        stream: Readable = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), compression)
        return stream
    if compression in ("xz", "lzma"):
        return _XzFile(file)
    if compression == "zip":
        archive = zipfile.ZipFile(file)  # type: ignore[arg-type]
        members = [member for member in archive.infolist() if not member.is_dir()]
        if len(members) != 1:
            raise ValueError(f"the zip archive holds {len(members)} files, not one")
        if members[0].flag_bits & 1:
            raise ValueError("the zip archive is encrypted")
        return archive.open(members[0])
    raise ValueError(f"compression {compression!r} is not supported")


class _XzFile:
    """Concatenated xz (or lzma) streams."""

    def __init__(self, raw: Readable) -> None:
        self._raw = raw
        self._data = b""
        self._decoder: lzma.LZMADecompressor | None = None

    def read(self, size: int = -1, /) -> bytes:
        while True:
            if self._decoder is None or self._decoder.needs_input:
                self._data = self._data or self._raw.read(1 << 20)
                if not self._data:
                    if self._decoder is not None:
                        raise EOFError("the compressed stream is truncated")
                    return b""
            if self._decoder is None:
                self._data = self._data.lstrip(b"\0")
                if not self._data:
                    continue
                self._decoder = lzma.LZMADecompressor()
            out = self._decoder.decompress(self._data, size)
            self._data = b""
            if self._decoder.eof:
                self._data = self._decoder.unused_data
                self._decoder = None
            if out:
                return out


# Writing


class _Output:
    """The staged file and its dead letters, under temporary local names until ``commit``."""

    def __init__(
        self,
        destination: str,
        source: str,
        storage_options: dict[str, Any] | None,
        tick: Callable[[], None],
    ) -> None:
        same = destination.partition("://")[0] == source.partition("://")[0]
        self._filesystem, self._path = resolve(destination, storage_options if same else None)
        self._destination = destination
        self._tick = tick
        base = f"{_temporary_base(destination, os.getpid())}-{threading.get_ident()}"
        self.path = f"{base}.tmp"
        self.bad_path = f"{base}.bad.tmp"
        self.spool_path = f"{base}.spool.tmp"
        os.makedirs(os.path.dirname(self.path), exist_ok=True)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        for path in (self.path, self.bad_path, self.spool_path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def commit(self) -> str | None:
        """Gives the files their names; returns that of the dead letters, None without any."""
        bad = self._destination + ".bad" if os.path.exists(self.bad_path) else None
        if bad is None:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.rm_file(self._path + ".bad")
        else:
            self._place(self.bad_path, self._path + ".bad")
        self._place(self.path, self._path)
        return bad

    def _place(self, local: str, target: str) -> None:
        self._tick()
        if not isinstance(self._filesystem, LocalFileSystem):
            self._filesystem.put_file(local, target)
            return
        with open(local, "rb") as file:
            os.fsync(file.fileno())
        os.replace(local, target)


def _temporary_base(destination: str, pid: int) -> str:
    owner = f"{socket.gethostname()}-{pid}"
    if "://" in destination and not destination.startswith(("file://", "local://")):
        return os.path.join(tempfile.gettempdir(), f"surge-stage-{owner}")
    return f"{resolve(destination, None)[1]}.{owner}"


class _BadRows:
    """Dead letters of one file, streamed to Parquet."""

    def __init__(self, path: str, source: str) -> None:
        self._path = path
        self._source = source
        self._letters: list[tuple[str, str, int, str]] = []
        self._bytes = 0
        self._writer: pq.ParquetWriter | None = None
        self.count = 0

    def __enter__(self) -> _BadRows:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()

    def add(self, why: _BadLine, row: int, line: bytes) -> None:
        text = line[:MAX_RECORD_BYTES].removesuffix(b"\r").decode("utf-8", "replace")
        record = json.dumps(text, ensure_ascii=False)
        self._letters.append((why.error, why.message, row, record))
        self.count += 1
        self._bytes += len(record)
        if len(self._letters) >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._letters:
            return
        if self._writer is None:
            self._writer = _parquet_writer(self._path, DEAD_LETTER_SCHEMA)
        error, message, row, record = map(list, zip(*self._letters, strict=True))
        count = len(row)
        columns = {
            "stage": ["read"] * count,
            "error": error,
            "message": message,
            "file": [self._source] * count,
            "row": row,
            "partition": [None] * count,
            "record": record,
            "attempts": [1] * count,
        }
        self._writer.write_table(pa.Table.from_pydict(columns, schema=DEAD_LETTER_SCHEMA))
        self._letters = []
        self._bytes = 0


def _parquet_writer(path: str, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        path, schema, compression="zstd", compression_level=1, write_page_checksum=True
    )


def _copy_parquet(stream: _Stream, output: _Output, source: str) -> Staged:
    chunk = stream.read(_CHUNK_BYTES)
    if not chunk.startswith((b"PAR1", b"PARE")):
        raise UnreadableFileError(source, "the decompressed content is not a Parquet file")
    with open(output.path, "wb") as file:
        while chunk:
            file.write(chunk)
            chunk = stream.read(_CHUNK_BYTES)
    with parsing(source):
        rows = pq.read_metadata(output.path).num_rows
    output.commit()
    return Staged(rows=rows)


# Lines


class _BadLine(Exception):
    """Why a line is a dead letter: the error's kind and a sentence."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(error, message)
        self.error = error
        self.message = message


def _lines(stream: _Stream) -> Iterator[bytes]:
    """Lines without their newline; one over MAX_LINE_BYTES comes cut to one byte over it.

    Raises:
      UnreadableFileError: such a line in a compressed file, which may be endless.
    """
    for number, line in enumerate(_split(stream, MAX_LINE_BYTES + 1), 1):
        if len(line) > MAX_LINE_BYTES and stream.compressed:
            raise UnreadableFileError(
                stream.source, f"line {number} expands to more than {MAX_LINE_BYTES} bytes"
            )
        yield line.removeprefix(_BOM) if number == 1 else line


def _split(stream: _Stream, limit: int) -> Iterator[bytes]:
    held = bytearray()
    while chunk := stream.read(_CHUNK_BYTES):
        first, *rest = chunk.split(b"\n")
        held += first[: limit - len(held)]
        if rest:
            yield bytes(held)
            for line in rest[:-1]:
                yield line[:limit]
            held = bytearray(rest[-1][:limit])
        elif len(held) >= limit and stream.compressed:
            break
    if held:
        yield bytes(held)


def _check_length(line: bytes, limit: int) -> None:
    if len(line) > limit:
        raise _BadLine("LineTooLong", f"the line is longer than {limit} bytes")


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BadLine("InvalidUtf8", f"byte {error.start + 1} is not valid UTF-8") from None


# JSONL


def _stage_jsonl(
    stream: _Stream,
    output: _Output,
    bad: _BadRows,
    text_column: str | None,
    wanted: tuple[str, ...],
    tick: Callable[[], None],
) -> Staged:
    parser = _RowParser(text_column)
    with open(output.spool_path, "w+b") as file:
        spool = _Spool(file)
        for number, line in enumerate(_lines(stream), 1):
            if not line.strip(b" \t\r"):
                continue
            try:
                row = parser.parse(line)
            except _BadLine as error:
                bad.add(error, number, line)
                continue
            spool.add(number, row, len(line), len(parser.kinds))
        spool.flush()
        if ROW_COLUMN in parser.kinds:
            raise UnreadableFileError(stream.source, f"the column name {ROW_COLUMN} is reserved")
        missing = tuple(name for name in wanted if name not in parser.kinds)
        kinds = {**parser.kinds, **{name: set() for name in missing}}
        schema = pa.schema({name: _column_type(kinds[name]) for name in kinds})
        known = {text_column, *wanted}
        untyped = [name for name in kinds if kinds[name] <= _UNTYPED and name not in known]
        rows = 0
        with _parquet_writer(
            output.path, mark_untyped(schema.append(_ROW_FIELD), untyped)
        ) as writer:
            for numbers, block in spool.blocks():
                tick()
                columns = [
                    _column([row.get(field.name) for row in block], field.type, kinds[field.name])
                    for field in schema
                ]
                columns.append(pa.array(numbers, pa.int64()))
                writer.write_table(pa.Table.from_arrays(columns, schema=schema.append(_ROW_FIELD)))
                rows += len(numbers)
    return Staged(rows=rows, bad_rows=bad.count, missing=missing)


class _Spool:
    """Parsed rows in blocks on disk, between the pass that learns types and the one that writes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._rows: list[dict[str, Any]] = []
        self._numbers: list[int] = []
        self._bytes = 0

    def add(self, number: int, row: dict[str, Any], nbytes: int, columns: int) -> None:
        self._numbers.append(number)
        self._rows.append(row)
        self._bytes += nbytes
        count = len(self._rows)
        if count >= GROUP_ROWS or self._bytes >= GROUP_BYTES or count * columns >= _GROUP_CELLS:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            data = marshal.dumps((self._numbers, self._rows))
            packed = pa.compress(data, codec="zstd", asbytes=True)
            self._file.write(len(packed).to_bytes(8, "little") + len(data).to_bytes(8, "little"))
            self._file.write(packed)
        self._rows, self._numbers, self._bytes = [], [], 0

    def blocks(self) -> Iterator[tuple[list[int], list[dict[str, Any]]]]:
        self._file.seek(0)
        while head := self._file.read(16):
            packed = self._file.read(int.from_bytes(head[:8], "little"))
            size = int.from_bytes(head[8:], "little")
            yield marshal.loads(pa.decompress(packed, size, codec="zstd"))


class _RowParser:
    """Strict JSON objects, and the kinds of value that each of their columns has held."""

    def __init__(self, text_column: str | None) -> None:
        self.kinds: dict[str, set[str]] = {}
        self._text_column = text_column

    def parse(self, line: bytes) -> dict[str, Any]:
        """A row of scalars, flat lists and JSON texts.

        Raises:
          _BadLine: the line is not a usable row; it has left no trace.
        """
        _check_length(line, MAX_LINE_BYTES)
        try:
            row = self._object(line)
            value = row.get(self._text_column) if self._text_column is not None else None
            if value is not None and type(value) is not str:
                raise _BadLine(
                    "NonTextValue",
                    f"column {self._text_column!r} holds {_json_type(value)}, not a string",
                )
            kinds = dict.fromkeys(row, "string")
            for name, value in row.items():
                if type(value) is not str:
                    kinds[name], row[name] = _classify(value)
        except RecursionError:
            raise _BadLine("InvalidJson", "values are nested too deeply") from None
        except MemoryError:
            raise _BadLine("LineTooLong", "the line needs more memory than there is") from None
        self._add(kinds)
        return row

    def _add(self, kinds: dict[str, str]) -> None:
        if not kinds.keys() <= self.kinds.keys():
            new = kinds.keys() - self.kinds.keys()
            if len(self.kinds) + len(new) > MAX_COLUMNS:
                raise _BadLine("TooManyColumns", f"the file has more than {MAX_COLUMNS} columns")
            if any(len(name) > MAX_NAME_CHARACTERS for name in new):
                raise _BadLine(
                    "InvalidColumnName", f"a name is longer than {MAX_NAME_CHARACTERS} characters"
                )
        for name, kind in kinds.items():
            self.kinds.setdefault(name, set()).add(kind)

    def _object(self, line: bytes) -> dict[str, Any]:
        text = _decode(line)
        try:
            row = _DECODER.decode(text)
        except json.JSONDecodeError as error:
            raise _BadLine(
                "InvalidJson", f"not valid JSON: {error.msg} at character {error.pos + 1}"
            ) from None
        except ValueError as error:
            raise _BadLine("InvalidJson", f"not usable JSON: {error}") from None
        if type(row) is not dict:
            raise _BadLine("NotAnObject", f"a row must be a JSON object, not {_json_type(row)}")
        if _SURROGATE.search(line):
            try:
                _json_text(row).encode("utf-8")
            except UnicodeEncodeError:
                raise _BadLine(
                    "InvalidUtf8", "a lone surrogate escape stands for no character"
                ) from None
        return row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_ROW_FIELD = pa.field(ROW_COLUMN, pa.int64())


def _json_text(value: Any) -> str:
    try:
        return _ENCODER.encode(value)
    except ValueError:
        raise _BadLine("InvalidJson", "a number is out of range") from None


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def _classify(value: Any) -> tuple[str, Any]:
    """A value's kind, and the value; a nested one becomes its JSON text here."""
    kind = type(value)
    if kind is int:
        if -_EXACT_FLOAT <= value <= _EXACT_FLOAT:
            return "int", value
        return "int64" if -(1 << 63) <= value < 1 << 63 else "integer", value
    if kind is float:
        if value in _INFINITIES:
            raise _BadLine("InvalidJson", "a number is out of range")
        return "float", value
    if kind is list:
        kinds = {"string" if type(item) is str else _item_kind(item) for item in value} - {""}
        if not kinds:
            return "[]", value
        for list_kind, allowed in _LISTS.items():
            if kinds <= allowed:
                return list_kind, value
    if kind in (list, dict):
        return "json", _json_text(value)
    return {str: "string", bool: "bool"}.get(kind, ""), value


def _item_kind(value: Any) -> str:
    return "json" if type(value) in (list, dict) else _classify(value)[0]


_INFINITIES = (float("inf"), float("-inf"))
_LISTS = {
    "[string]": {"string"},
    "[int]": {"int"},
    "[int64]": {"int", "int64"},
    "[float]": {"int", "float"},
}
_TYPES: list[tuple[set[str], pa.DataType]] = [
    (set(), pa.string()),
    ({"bool"}, pa.bool_()),
    ({"int", "int64"}, pa.int64()),
    ({"int", "float"}, pa.float64()),
    ({"[]", "[string]"}, pa.list_(pa.string())),
    ({"[]", "[int]", "[int64]"}, pa.list_(pa.int64())),
    ({"[]", "[int]", "[float]"}, pa.list_(pa.float64())),
]
_UNTYPED = {"", "[]"}


def _column_type(kinds: set[str]) -> pa.DataType:
    held = kinds - {""}
    return next((type_ for allowed, type_ in _TYPES if held <= allowed), pa.string())


def _column(values: list[Any], type_: pa.DataType, kinds: set[str]) -> pa.Array:
    if pa.types.is_string(type_) and kinds - {"", "string", "json"}:
        values = [v if v is None or type(v) is str else _json_text(v) for v in values]
    return pa.array(values, type_)


# lines


def _stage_lines(stream: _Stream, output: _Output, tick: Callable[[], None]) -> Staged:
    schema = pa.schema([pa.field(LINE_COLUMN, pa.binary()), _ROW_FIELD])
    lines: list[bytes] = []
    numbers: list[int] = []
    rows = nbytes = 0
    with _parquet_writer(output.path, schema) as writer:

        def flush() -> None:
            columns = [pa.array(lines, pa.binary()), pa.array(numbers, pa.int64())]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            lines.clear()
            numbers.clear()

        for number, line in enumerate(_lines(stream), 1):
            if not line.strip(b" \t\r"):
                continue
            lines.append(line)
            numbers.append(number)
            rows, nbytes = rows + 1, nbytes + len(line)
            if len(lines) >= GROUP_ROWS or nbytes >= GROUP_BYTES:
                tick()
                flush()
                nbytes = 0
        flush()
    return Staged(rows=rows)


# CSV


def _stage_csv(stream: _Stream, output: _Output, bad: _BadRows, wanted: tuple[str, ...]) -> Staged:
    reader = _CsvReader(_lines(stream))
    header = _csv_header(reader, stream.source)
    schema = pa.schema([*((name, pa.string()) for name in header), _ROW_FIELD])
    rows = 0
    with _parquet_writer(output.path, schema) as writer:
        while group := _csv_group(reader, len(header), bad):
            columns = [
                pa.array(c, pa.string()) for c in zip(*(r.fields for r in group), strict=True)
            ]
            columns.append(pa.array([record.number for record in group], pa.int64()))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            rows += len(group)
    missing = tuple(name for name in wanted if name not in header)
    return Staged(rows=rows, bad_rows=bad.count, missing=missing)


def _csv_header(reader: _CsvReader, source: str) -> list[str]:
    record = reader.read(None)
    if record is None:
        raise UnreadableFileError(source, "the file is empty: it has no header")
    if record.error is not None:
        raise UnreadableFileError(source, f"in the header, {record.error.message}")
    # pandas writes its index without a name, and reads it under this one
    names = [name or f"Unnamed: {i}" for i, name in enumerate(record.fields)]
    if len(names) > MAX_COLUMNS:
        raise UnreadableFileError(source, f"the header has more than {MAX_COLUMNS} columns")
    if any("\r" in name for name in names):
        raise UnreadableFileError(source, "its lines end with a carriage return alone")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UnreadableFileError(source, f"column {twice!r} occurs more than once")
    if ROW_COLUMN in names:
        raise UnreadableFileError(source, f"the column name {ROW_COLUMN} is reserved")
    return names


def _csv_group(reader: _CsvReader, width: int, bad: _BadRows) -> list[_Record]:
    """The next good records, as many as make a row group; the bad ones go to ``bad``."""
    group: list[_Record] = []
    nbytes = 0
    most = min(GROUP_ROWS, _GROUP_CELLS // width)
    while len(group) < most and nbytes < GROUP_BYTES:
        record = reader.read(width)
        if record is None:
            break
        if record.error is not None:
            bad.add(record.error, record.number, record.line)
            continue
        group.append(record)
        nbytes += record.nbytes
    return group


@dataclasses.dataclass(slots=True)
class _Record:
    """A CSV record that starts at line ``number``, or what is wrong with it."""

    number: int
    line: bytes
    nbytes: int
    fields: list[str]
    error: _BadLine | None = None


class _CsvReader:
    """Records of a CSV file; a bad one costs its first line, and reading goes on at the next.

    A record ends at the first line end that an even number of quotes precedes. So every line
    between the first and last of a bad record has an even number of quotes and stands alone
    when it is read again: going back stays linear.
    """

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = enumerate(lines, 1)
        self._ahead: collections.deque[tuple[int, bytes]] = collections.deque()

    def read(self, width: int | None) -> _Record | None:
        """The next record; one without ``width`` fields is bad. None at the end."""
        start = self._next()
        while start is not None and start[1] in (b"", b"\r"):
            start = self._next()
        if start is None:
            return None
        number, line = start
        more: list[tuple[int, bytes]] = []
        try:
            _check_length(line, MAX_CSV_RECORD_BYTES)
            data = self._whole(line, more) if line.count(b'"') & 1 else line
            data = data.removesuffix(b"\r")
            if b'"' in data:
                fields = _quoted_fields(data.decode("utf-8", "surrogateescape"))
                _decode(data)
            else:
                fields = _decode(data).split(",")
            if width is not None and len(fields) != width:
                raise _BadLine(
                    "WrongFieldCount", f"the record has {len(fields)} fields, not {width}"
                )
        except _BadLine as error:
            self._ahead.extendleft(reversed(more))
            return _Record(number, line, len(line), [], error)
        return _Record(number, line[:0], len(data), fields)

    def _next(self) -> tuple[int, bytes] | None:
        return self._ahead.popleft() if self._ahead else next(self._lines, None)

    def _whole(self, line: bytes, more: list[tuple[int, bytes]]) -> bytes:
        """The record that ``line`` starts; ``more`` receives the other lines taken for it."""
        quotes, size = line.count(b'"'), len(line)
        while quotes & 1:
            following = self._next()
            if following is None:
                raise _BadLine("InvalidCsv", "a quote is never closed")
            more.append(following)
            quotes += following[1].count(b'"')
            size += len(following[1]) + 1
            if size > MAX_CSV_RECORD_BYTES or len(more) > MAX_CSV_RECORD_LINES:
                raise _BadLine(
                    "InvalidCsv",
                    f"a quote is not closed within {MAX_CSV_RECORD_BYTES} bytes "
                    f"and {MAX_CSV_RECORD_LINES} lines",
                )
        return b"\n".join([line, *(text for _, text in more)])


def _quoted_fields(text: str) -> list[str]:
    fields = []
    at = 0
    while True:
        if text.startswith('"', at):
            match = _QUOTED.match(text, at)
            if match is None:
                raise _BadLine("InvalidCsv", f"the quote at character {at + 1} is never closed")
            value, at = match[1].replace('""', '"'), match.end()
            if at < len(text) and text[at] != ",":
                raise _BadLine("InvalidCsv", f"text follows the closing quote at character {at}")
        else:
            end = text.find(",", at)
            end = len(text) if end < 0 else end
            value = text[at:end]
            if '"' in value:
                raise _BadLine(
                    "InvalidCsv", f"a quote stands inside the field at character {at + 1}"
                )
            at = end
        fields.append(value)
        if at == len(text):
            return fields
        at += 1
