"""Columns of files that differ: joined in one table, and of one type in every partition."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import zlib
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pyarrow as pa

UNTYPED_KEY = b"surge.untyped"
MAX_COMMON = 2_000
_INFERRED = {b"surge.inferred": b""}
_LEFT = {b"surge.left": b""}
_NULLS = pa.list_(pa.null())
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_SETTLED = {pa.null(): pa.string(), _NULLS: pa.list_(pa.string())}


def mark_untyped(schema: pa.Schema, names: Collection[str]) -> pa.Schema:
    """The schema of a text file, which tells which columns hold nulls and empty lists alone.

    Such a column has a type, but any other file's type for it is the better one.
    """
    return schema.with_metadata({UNTYPED_KEY: json.dumps(sorted(names)).encode()})


def untyped_columns(schema: pa.Schema) -> list[str]:
    """Those that ``mark_untyped`` was given. Ask only of what was staged from text: in a file of
    somebody else's the same key is theirs, and may say anything.
    """
    return list(json.loads((schema.metadata or {}).get(UNTYPED_KEY, b"[]")))


def as_read(schema: pa.Schema, *, inferred: bool) -> pa.Schema:
    """The schema in which a file's columns are read: without metadata and views, of which Arrow
    cannot take rows.

    Args:
      inferred: it was staged from text, and its untyped columns are nulls or lists of nulls.
    """
    for name in untyped_columns(schema) if inferred else ():
        at = schema.get_field_index(name)
        is_list = pa.types.is_list(schema.field(at).type)
        schema = schema.set(at, pa.field(name, _NULLS if is_list else pa.null()))
    return pa.schema(map(_without_views, schema))


def _without_views(field: pa.Field) -> pa.Field:
    """The field with plain text and binary in place of views."""
    kind = field.type
    if pa.types.is_string_view(kind):
        kind = pa.string()
    elif pa.types.is_binary_view(kind):
        kind = pa.binary()
    elif pa.types.is_struct(kind):
        kind = pa.struct([_without_views(f) for f in kind.fields])
    elif pa.types.is_map(kind):
        kind = pa.map_(_without_views(kind.key_field), _without_views(kind.item_field))
    elif pa.types.is_fixed_size_list(kind):
        kind = pa.list_(_without_views(kind.value_field), kind.list_size)
    elif pa.types.is_large_list(kind):
        kind = pa.large_list(_without_views(kind.value_field))
    elif pa.types.is_list(kind):
        kind = pa.list_(_without_views(kind.value_field))
    return field if kind == field.type else field.with_type(kind)


def without_type(column: pa.Array) -> pa.Array:
    """A column of nulls, or of lists of nulls, in the type ``as_read`` gives it."""
    if not pa.types.is_list(column.type):
        return pa.nulls(len(column))
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = pa.nulls(int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=column.is_null())


def pack_columns(schema: pa.Schema, *, inferred: bool) -> bytes:
    """Names and types of a file's columns in a short form; equal for equal ones.

    Args:
      inferred: the types are guesses from the values of a text file.
    """
    plain = pa.schema([(field.name, field.type) for field in schema])
    return _pack(plain.with_metadata(_INFERRED if inferred else None))


def _pack(schema: pa.Schema) -> bytes:
    return zlib.compress(schema.serialize())


@functools.lru_cache(maxsize=64)
def unpack_columns(packed: bytes) -> pa.Schema:
    """What ``pack_columns`` was given, or ``common_columns`` found."""
    return pa.ipc.read_schema(pa.BufferReader(zlib.decompress(packed)))


def common_columns(files: Iterable[bytes]) -> bytes:
    """All columns of files, each of a type that can hold every file's values.

    Types that were inferred and have nothing in common become text. Types that were written down
    are left as each file has them, also where the common one would lose digits; the first of them
    is for the files that lack the column.

    Args:
      files: the packed columns of each.

    Returns:
      Packed columns, in the order in which they are met; empty where the files agree. Of more than
      ``MAX_COMMON`` together, which are tables of other things each, only those that have no type
      in one of them.
    """
    distinct = [unpack_columns(packed) for packed in dict.fromkeys(files)]
    kinds: dict[str, list[pa.DataType]] = {}
    written: set[str] = set()
    for schema in distinct:
        for field in schema:
            kinds.setdefault(field.name, []).append(field.type)
        written |= set(schema.names) if schema.metadata != _INFERRED else set()
    if len(kinds) > MAX_COMMON:
        kinds = {n: found for n, found in kinds.items() if not _SETTLED.keys().isdisjoint(found)}
    fields = []
    for name, found in kinds.items():
        kind = common_type(found, everywhere=len(found) == len(distinct))
        if kind is None and name in written:
            first = next(one for one in found if one not in _SETTLED)
            fields.append(pa.field(name, _nullable(first), metadata=_LEFT))
            continue
        kind = pa.string() if kind is None else kind
        fields.append(pa.field(name, kind if name in written else _SETTLED.get(kind, kind)))
    if len(distinct) < 2 and fields == [f for schema in distinct for f in schema]:
        return b""
    return _pack(pa.schema(fields))


def common_type(kinds: list[pa.DataType], *, everywhere: bool) -> pa.DataType | None:
    """A type that can hold the values of all of them without losing any digit, or None.

    Args:
      everywhere: no table lacks the column, which would be null there.
    """
    distinct = list(dict.fromkeys(kinds))
    if len(distinct) == 1:
        return distinct[0] if everywhere else _nullable(distinct[0])
    if any(not pa.types.is_dictionary(k) and k not in _SETTLED for k in distinct):
        distinct = [k.value_type if pa.types.is_dictionary(k) else k for k in distinct]
    if any(map(pa.types.is_decimal, distinct)) and any(map(pa.types.is_integer, distinct)):
        distinct = [_DIGITS.get(k, k) for k in distinct]
    try:
        schemas = [pa.schema([("", k)]) for k in distinct]
        kind = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None
    # Arrow would widen text to bytes, and decimals to floats
    before = {leaf for one in distinct for leaf in _leaves(one)}
    for leaf in _leaves(kind):
        if _is_binary(leaf) and any(map(is_text, before)):
            return None
        if pa.types.is_floating(leaf) and any(map(pa.types.is_decimal, before)):
            return None
    return _nullable(kind)


_DIGITS = {
    pa.int8(): pa.decimal128(3), pa.int16(): pa.decimal128(5), pa.int32(): pa.decimal128(10),
    pa.int64(): pa.decimal128(19), pa.uint8(): pa.decimal128(3), pa.uint16(): pa.decimal128(5),
    pa.uint32(): pa.decimal128(10), pa.uint64(): pa.decimal128(20),
}  # fmt: skip


def _leaves(kind: pa.DataType) -> list[pa.DataType]:
    if not kind.num_fields:
        return [kind]
    return [leaf for i in range(kind.num_fields) for leaf in _leaves(kind.field(i).type)]


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _nullable(kind: pa.DataType) -> pa.DataType:
    """A type whose parts may be null too, as they are where a file lacks the column.

    Lists of fixed size become plain ones: Arrow cannot read back those that hold nulls.
    """
    if pa.types.is_struct(kind):
        return pa.struct([(f.name, _nullable(f.type)) for f in kind.fields])
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_nullable(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_nullable(kind.value_type))
    return kind


def typed(table: pa.Table, columns: bytes, keys: Collection[str] = ()) -> pa.Table:
    """A partition as it is written: with the given columns first, in their order and types.

    Those it lacks are null. One whose values the type cannot hold, such as 2**60 + 1 as a float,
    stays as it is.

    Args:
      columns: packed, of ``common_columns``.
      keys: names that stand in the partition's folder, not in its files.
    """
    held, found = set(table.column_names), {}
    for field in unpack_columns(columns):
        if field.name in held:
            column = table.column(field.name)
            found[field.name] = column if field.metadata else _cast(column, field.type)
        elif field.name not in keys:
            found[field.name] = pa.nulls(len(table), field.type)
    for name in table.column_names:
        found.setdefault(name, table.column(name))
    return pa.table(found)


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if kind == pa.string():
        return _as_text(column)
    if is_text(column.type) and not is_text(kind):
        # made text by join_tables, since a number would lose digits
        return column
    try:
        return as_type(column, kind)
    except pa.ArrowException:
        return column


def as_type(column: Any, kind: pa.DataType) -> Any:
    """An array, or a chunked one, in another type.

    Raises:
      pa.ArrowException: a value does not fit it, or there is no such cast.
    """
    if column.type == kind:
        # Arrow fails to cast a slice of lists of nulls to their own type
        return column
    # null has no cast to some types, such as UUIDs
    return pa.nulls(len(column), kind) if pa.types.is_null(column.type) else column.cast(kind)


def join_tables(tables: list[pa.Table]) -> pa.Table:
    """Tables one after another; where the types of a column do not agree, it becomes text.

    A column that some of them lack is null there.
    """
    if all(table.schema.equals(tables[0].schema) for table in tables):
        return pa.concat_tables(tables)
    joined = {}
    for name in dict.fromkeys(name for table in tables for name in table.column_names):
        kinds = [t.schema.field(name).type for t in tables if name in t.column_names]
        kind = common_type(kinds, everywhere=len(kinds) == len(tables))
        joined[name] = _join([_column(table, name) for table in tables], kind)
    return pa.table(joined)


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
    held = name in table.column_names
    return table.column(name) if held else pa.chunked_array([pa.nulls(len(table))])


def _join(columns: list[pa.ChunkedArray], kind: pa.DataType | None) -> pa.ChunkedArray:
    if kind is not None:
        # a value may not fit, such as 2**60 + 1 in a column of floats
        with contextlib.suppress(pa.ArrowException):
            return _stacked([as_type(column, kind) for column in columns])
    return _stacked([_as_text(column) for column in columns])


def _stacked(columns: list[Any]) -> pa.ChunkedArray:
    """Columns of one type, one after another."""
    return pa.concat_tables([pa.table({"": column}) for column in columns]).column(0)


def fill_untyped(tables: list[pa.Table]) -> list[pa.Table]:
    """Tables in which a column of nulls has the type that the others have, if it is one type."""
    kinds: dict[str, set[pa.DataType]] = {}
    for table in tables:
        for field in table.schema:
            kinds.setdefault(field.name, set()).add(field.type)
    wanted: dict[str, pa.DataType] = {}
    for name, found in kinds.items():
        typed_ones = found - _SETTLED.keys()
        if len(found) > 1 and len(typed_ones) == 1:
            (kind,) = typed_ones
            if _nullable(kind) == kind:
                wanted[name] = kind
    return [_with_types(table, wanted) for table in tables]


def _with_types(table: pa.Table, wanted: dict[str, pa.DataType]) -> pa.Table:
    for at, field in enumerate(table.schema):
        if field.name in wanted:
            column = as_type(table.column(at), wanted[field.name])
            table = table.set_column(at, field.name, column)
    return table


def _as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values as text: what Arrow casts as it does, the rest as JSON."""
    # of an extension type, such as a UUID, Arrow would cast the bytes beneath
    if not isinstance(column.type, pa.BaseExtensionType):
        with contextlib.suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return column.cast(pa.string())
    values = (plain_value(column, row) for row in range(len(column)))
    texts = [v if v is None or isinstance(v, str) else _COMPACT.encode(v) for v in values]
    return pa.chunked_array([pa.array(texts, pa.string())])


def plain_value(column: pa.ChunkedArray, row: int) -> Any:
    """One value as JSON can hold it."""
    try:
        return _jsonable(column[row].as_py())
    except (ValueError, ArithmeticError, pa.ArrowException):
        # a date that Python cannot hold, a struct with two fields of one name
        return " ".join(column.slice(row, 1).combine_chunks().to_string().split())


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value)
