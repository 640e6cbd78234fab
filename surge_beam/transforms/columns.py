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
_NULLS = pa.list_(pa.null())
_SETTLED = {pa.null(): pa.string(), _NULLS: pa.list_(pa.string())}


def mark_untyped(schema: pa.Schema, names: Collection[str]) -> pa.Schema:
    """The schema of a text file, which tells which columns hold nulls and empty lists alone.

    Such a column has a type, but any other file's type for it is the better one.
    """
    return schema.with_metadata({UNTYPED_KEY: json.dumps(sorted(names)).encode()})


def untyped_columns(schema: pa.Schema) -> list[str]:
    """Those that ``mark_untyped`` was given."""
    return list(json.loads((schema.metadata or {}).get(UNTYPED_KEY, b"[]")))


def as_read(schema: pa.Schema) -> pa.Schema:
    """The schema in which a file's columns are read: without metadata and views, of which Arrow
    cannot take rows, and with untyped columns as nulls or lists of nulls.
    """
    for name in untyped_columns(schema):
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
    """A column of nulls and empty lists alone, in the type ``as_read`` gives it."""
    if not pa.types.is_list(column.type):
        return pa.nulls(len(column))
    offsets = pa.array(np.zeros(len(column) + 1, np.int32))
    return pa.ListArray.from_arrays(offsets, pa.nulls(0), mask=column.is_null())


def pack_columns(schema: pa.Schema, *, inferred: bool) -> bytes:
    """Names and types of a file's columns in a short form; equal for equal ones.

    Args:
      inferred: the types are guesses from the values of a text file.
    """
    plain = pa.schema([(field.name, field.type) for field in schema])
    return zlib.compress(plain.with_metadata(_INFERRED if inferred else None).serialize())


@functools.lru_cache(maxsize=64)
def unpack_columns(packed: bytes) -> pa.Schema:
    """What ``pack_columns`` was given."""
    return pa.ipc.read_schema(pa.BufferReader(zlib.decompress(packed)))


def common_columns(files: Iterable[bytes]) -> bytes:
    """All columns of files, each of a type that can hold every file's values.

    A column has none where types that were written down have nothing in common, or would lose
    digits; it is left as each file has it. Types that were inferred become text there.

    Args:
      files: the packed columns of each.

    Returns:
      Packed columns, in the order in which they are met; empty where the files agree, and where
      they have more than ``MAX_COMMON`` together, which are tables of other things each.
    """
    distinct = [unpack_columns(packed) for packed in dict.fromkeys(files)]
    kinds: dict[str, list[pa.DataType]] = {}
    written: set[str] = set()
    for schema in distinct:
        for field in schema:
            kinds.setdefault(field.name, []).append(field.type)
        written |= set(schema.names) if schema.metadata != _INFERRED else set()
    if len(kinds) > MAX_COMMON:
        return b""
    fields = []
    for name, found in kinds.items():
        kind = _common(found, inferred=name not in written)
        if kind is not None:
            agreed = found == [kind] * len(distinct)
            fields.append((name, kind if agreed else _nullable(kind)))
    if len(distinct) < 2 and fields == [(f.name, f.type) for schema in distinct for f in schema]:
        return b""
    return pack_columns(pa.schema(fields), inferred=False)


def _common(kinds: list[pa.DataType], *, inferred: bool) -> pa.DataType | None:
    """A type that holds all of them, or None."""
    schemas = [pa.schema([("", kind)]) for kind in dict.fromkeys(kinds)]
    try:
        kind = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return pa.string() if inferred else None
    if inferred:
        return _SETTLED.get(kind, kind)
    if len(schemas) > 1:
        # Arrow would widen text to bytes, and decimals to floats
        before = {leaf for one in kinds for leaf in _leaves(one)}
        for leaf in _leaves(kind):
            if _is_binary(leaf) and any(map(_is_text, before)):
                return None
            if pa.types.is_floating(leaf) and any(map(pa.types.is_decimal, before)):
                return None
    return kind


def _leaves(kind: pa.DataType) -> list[pa.DataType]:
    if not kind.num_fields:
        return [kind]
    return [leaf for i in range(kind.num_fields) for leaf in _leaves(kind.field(i).type)]


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _nullable(kind: pa.DataType) -> pa.DataType:
    """A type whose parts may be null too, as they are where a file lacks the column."""
    if pa.types.is_struct(kind):
        return pa.struct([(f.name, _nullable(f.type)) for f in kind.fields])
    if pa.types.is_list(kind):
        return pa.list_(_nullable(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_nullable(kind.value_type))
    return kind


def typed(table: pa.Table, columns: bytes, keys: Collection[str] = ()) -> pa.Table:
    """A partition as it is written: in the types of the given columns, and with those it lacks.

    A column whose values the type cannot hold, such as 2**60 + 1 as a float, stays as it is.

    Args:
      columns: packed.
      keys: names that stand in the partition's folder, not in its files.
    """
    wanted = {field.name: field.type for field in unpack_columns(columns)}
    found = {}
    for name in table.column_names:
        column = table.column(name)
        found[name] = _cast(column, wanted.get(name, column.type))
    for name in [name for name in wanted if name not in found and name not in keys]:
        found[name] = pa.nulls(len(table), wanted[name])
    return pa.table(found)


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if column.type == kind:
        return column
    if kind == pa.string():
        return _as_text(column)
    if _is_text(column.type) and not _is_text(kind):
        # made text by join_tables, since a number would lose digits
        return column
    try:
        return column.cast(kind)
    except pa.ArrowException:
        return column


def join_tables(tables: list[pa.Table]) -> pa.Table:
    """Tables one after another; where the types of a column do not agree, it becomes text.

    A column that some of them lack is null there, whether or not the others promise values.
    """
    if len({tuple(t.column_names) for t in tables}) > 1:
        tables = [_with_nulls(t) for t in tables]
    if (table := _concatenated(tables)) is not None:
        return table
    tables = list(tables)
    for name in dict.fromkeys(n for t in tables for n in t.column_names):
        holders = [i for i, table in enumerate(tables) if name in table.column_names]
        if _concatenated([tables[i].select([name]) for i in holders]) is None:
            for i in holders:
                at = tables[i].column_names.index(name)
                tables[i] = tables[i].set_column(at, name, _as_text(tables[i].column(name)))
    return pa.concat_tables(tables, promote_options="permissive")


def _with_nulls(table: pa.Table) -> pa.Table:
    fields = [field.with_nullable(True) for field in table.schema]
    return table.cast(pa.schema(fields, table.schema.metadata))


def _concatenated(tables: list[pa.Table]) -> pa.Table | None:
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return None


def _as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values as text: what Arrow casts as it does, the rest as JSON."""
    # of an extension type, such as a UUID, Arrow would cast the bytes beneath
    if not isinstance(column.type, pa.BaseExtensionType):
        with contextlib.suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return column.cast(pa.string())
    values = (plain_value(column, row) for row in range(len(column)))
    texts = [
        v if v is None or isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values
    ]
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
