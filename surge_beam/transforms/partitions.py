"""Partition values, their folder names, and their exact form in file metadata.

A partition is known by its folder below the output. Folder names are hive's ``column=value``,
percent-encoded so that pyarrow, pandas and DuckDB decode the value, and no value can leave the
output folder. Hive carries no types, so the exact values travel as JSON under the key
``surge.partition`` of each file's metadata.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import json
import re
import unicodedata
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import xxhash

from surge_beam.records import Segment, SurgeError

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
METADATA_KEY = b"surge.partition"
MAX_NAME_BYTES = 255
_ODD = re.compile(r"[^A-Za-z0-9\-_.]")
# '~' is never plain, so a cut name (which holds one) equals no other value's name
_CUT = "~"
_JSON = json.JSONEncoder(ensure_ascii=False)


def _encode_odd(match: re.Match[str]) -> str:
    return _encoded_char(match[0])


@functools.lru_cache(maxsize=4096)
def _encoded_char(char: str) -> str:
    # letters that normalisation leaves alone stay readable; the rest could collide on some disks
    if char.isalnum() and ord(char) > 127 and unicodedata.normalize("NFKC", char) == char:
        return char
    return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogateescape"))


def encode_name(text: str, budget: int = MAX_NAME_BYTES, *, prefix: str = "") -> str:
    """``prefix`` and the percent-encoded text, cut between characters with a digest where longer
    than ``budget`` bytes. The result is never empty with a prefix, never ``.`` or ``..`` alone.
    """
    encoded = _ODD.sub(_encode_odd, text)
    if not prefix and encoded[:1] in ("_", "."):
        encoded = f"%{ord(encoded[0]):02X}{encoded[1:]}"
    name = prefix + encoded
    if len(name.encode()) <= budget:
        return name
    tail = _CUT + xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogateescape"))
    room = budget - len(prefix.encode()) - len(tail)
    kept, used = [], 0
    head = encoded[: len(encoded) - len(_ODD.sub(_encode_odd, text[1:]))]
    for part in (head, *(_ODD.sub(_encode_odd, char) for char in text[1:])):
        used += len(part.encode())
        if used > room:
            break
        kept.append(part)
    return prefix + "".join(kept) + tail


def key_folder(names: list[str], values: list[tuple[str, Any]]) -> tuple[str, str]:
    """Folder and metadata JSON of a partition with key columns.

    Args:
      names: the key columns.
      values: their ``(type, value)``: type one of ``key_type``'s, value None, bool, int or str.
    """
    folders, exact = [], {}
    for name, (kind, value) in zip(names, values, strict=True):
        prefix = _column_prefix(name)
        if value is None:
            folders.append(prefix + NULL_FOLDER)
        else:
            text = _text(value)
            if text == NULL_FOLDER:
                folders.append(prefix + "%5F" + text[1:])
            else:
                folders.append(encode_name(text, prefix=prefix))
        exact[name] = {"type": kind, "value": value}
    return "/".join(folders), _JSON.encode(exact)


@functools.lru_cache(maxsize=256)
def _column_prefix(name: str) -> str:
    return encode_name(name, 100) + "="


def _text(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def file_folder(name: str) -> tuple[str, str]:
    """Folder and metadata JSON of a partition that is a file, by its path below the root."""
    folder = "/".join(encode_name(part) for part in name.split("/") if part)
    exact = {"file": {"type": "string", "value": name.encode("utf-8", "replace").decode()}}
    return folder, _JSON.encode(exact)


def hive_values(name: str) -> dict[str, str | None]:
    """Column and value of each ``column=value`` folder in a file's path below the root."""
    found: dict[str, str | None] = {}
    for part in name.split("/")[:-1]:
        column, equals, value = part.partition("=")
        if equals and column:
            found[_decoded(column)] = None if value == NULL_FOLDER else _decoded(value)
    return found


def _decoded(text: str) -> str:
    """What a folder name stands for; one that is not encoded UTF-8 is taken as it stands."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        return text


def key_type(data_type: pa.DataType) -> str:
    """The name of a key column's type in ``surge.partition``.

    Raises:
      SurgeError: a type that has no exact text, such as a list or a struct.
    """
    t = data_type
    if pa.types.is_dictionary(t):
        t = t.value_type
    if pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_string_view(t):
        return "string"
    if pa.types.is_boolean(t):
        return "boolean"
    if pa.types.is_integer(t):
        return "integer"
    if pa.types.is_date(t):
        return "date"
    if pa.types.is_timestamp(t):
        return "timestamp"
    if pa.types.is_decimal(t):
        return "decimal"
    if pa.types.is_floating(t):
        return "float"
    if pa.types.is_null(t):
        return "null"
    raise SurgeError(f"type {data_type} cannot be a partition key")


def _exact(scalar: pa.Scalar, kind: str) -> Any:
    if not scalar.is_valid:
        return None
    if kind in ("string", "integer", "boolean"):
        return scalar.as_py()
    if kind == "timestamp":
        return _timestamp(scalar)
    if kind == "date":
        return _date(scalar)
    value = scalar.as_py()
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    return repr(value)


def _date(scalar: pa.Scalar) -> str:
    try:
        return str(scalar.as_py())
    except (OverflowError, ValueError):
        days = pa.types.is_date32(scalar.type)
        return f"{scalar.value if days else scalar.value // 86_400_000}d"


def _timestamp(scalar: pa.Scalar) -> str:
    unit = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[scalar.type.unit]
    seconds, fraction = divmod(scalar.value, unit)
    zone = "Z" if scalar.type.tz else ""
    try:
        text = str(datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=seconds))
    except OverflowError:
        return f"{scalar.value}{scalar.type.unit}{zone}"
    digits = len(str(unit)) - 1
    return text + (f".{fraction:0{digits}d}".rstrip("0") if fraction else "") + zone


def _comparable(column: pa.Array) -> pa.Array:
    """The column in a type that Arrow can dictionary-encode."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return column.dictionary_decode()
    if pa.types.is_decimal(kind) and kind.bit_width < 128:
        return column.cast(pa.decimal128(kind.precision, kind.scale))
    return column.cast(pa.float32()) if pa.types.is_float16(kind) else column


def _codes(column: pa.Array) -> np.ndarray:
    """A number for each row's value; rows of one number are equal."""
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.int64)
    if not pa.types.is_dictionary(column.type):
        column = _comparable(column).dictionary_encode(null_encoding="encode")
    codes = _int32(column.indices)
    return codes if not column.null_count else np.where(_int32(column.is_valid()), codes, -1)


def _int32(array: pa.Array) -> np.ndarray:
    """A view. to_numpy would load pandas: half a second in a process that has no use for it."""
    array = array.cast(pa.int32())
    return np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array)]


def first_rows(columns: list[pa.Array]) -> np.ndarray:
    """int64: rows at which a run of rows that are equal in all columns begins, at least one row.

    Where a dictionary holds a value twice, a run may begin in the middle of equal rows.
    """
    new = np.ones(len(columns[0]), bool)
    new[1:] = False
    for column in columns:
        new[1:] |= np.diff(_codes(column)) != 0
    return np.flatnonzero(new)


class KeyRuns:
    """Finds runs of equal key values in the rows of one file, a table of key columns at a time."""

    def __init__(self, names: list[str]):
        self._names = names
        self._known: dict[tuple[tuple[str, Any], ...], tuple[str, str]] = {}

    def runs(
        self, table: pa.Table, edges: np.ndarray | None = None
    ) -> tuple[list[tuple[str, str]], np.ndarray, np.ndarray]:
        """Runs of equal neighbours.

        Args:
          table: the key columns, at least one row.
          edges: rows at which a run begins even where its values are those of the row before.

        Returns:
          ``(folder, metadata JSON)`` of each distinct partition here; int64 [R], the index into
          those of each run; int64 [R], the first row of each run.

        Raises:
          SurgeError: a key column of a type that cannot be a key.
        """
        rows = table.num_rows
        code = np.zeros(rows, np.int64)
        columns: list[tuple[str, pa.Array]] = []
        for name in self._names:
            column = table.column(name).combine_chunks()
            kind = key_type(column.type)
            if pa.types.is_null(column.type):
                columns.append((kind, column[:1]))
                continue
            column = _comparable(column)
            encoded = column.dictionary_encode(null_encoding="encode")
            values = encoded.dictionary
            size = len(values)
            code = code * size + encoded.indices.to_numpy(zero_copy_only=False)
            # keep the product of dictionaries small enough for an int64
            code = np.unique(code, return_inverse=True)[1] if len(self._names) > 1 else code
            columns.append((kind, column))
        new = np.ones(rows, bool)
        new[1:] = np.diff(code) != 0
        if edges is not None:
            new[edges] = True
        starts = np.flatnonzero(new)
        _, first, which = np.unique(code[starts], return_index=True, return_inverse=True)
        partitions = []
        for row in starts[first].tolist():
            values = tuple(
                (kind, _exact(column[row if len(column) > 1 else 0], kind))
                for kind, column in columns
            )
            known = self._known.get(values)
            if known is None:
                known = self._known[values] = key_folder(self._names, list(values))
            partitions.append(known)
        return partitions, which.astype(np.int64), starts


def key_values(segment: Segment) -> dict[str, Any]:
    """Exact values of a partition's key columns; none of a partition that is a file."""
    # only folders of key columns hold a plain equals sign
    if "=" not in segment.folder:
        return {}
    return {name: key["value"] for name, key in json.loads(segment.values).items()}
