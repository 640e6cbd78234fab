"""Writing partitions and committing them.

Every file is written whole under its final name or not at all; the manifest entry of a SuperBatch
follows when all of its files are durable. A partition that is split over SuperBatches gathers its
parts below ``_surge/pending`` and is published when the last one is there.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from surge_beam.records import DeadLetter, Segment, SurgeError, dead_letter_table
from surge_beam.transforms import manifest
from surge_beam.transforms.columns import typed
from surge_beam.transforms.files import Store, digest
from surge_beam.transforms.partitions import METADATA_KEY, key_values

ROW_LETTERS = "_surge/dead_letters/rows"
PENDING = "_surge/pending"
WRITERS = 4
ROW_GROUP_BYTES = 8 << 20
LARGE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class WriteConfig:
    """What a partition file holds: the kept columns, and the embedding's name and type."""

    columns: tuple[str, ...] | None = None
    drop: tuple[str, ...] = ()
    vector_column: str = "embedding"
    vector_type: str = "float32"


def vectors_to_arrow(matrix: np.ndarray) -> pa.FixedSizeListArray:
    """A C-contiguous matrix [n, d] as ``fixed_size_list<float>[d]``, sharing its memory.

    Raises:
      ValueError: the matrix is not contiguous, so that sharing is impossible.
    """
    if not matrix.flags.c_contiguous:
        raise ValueError("a matrix that is not C-contiguous cannot be shared with Arrow")
    flat = pa.array(matrix.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, matrix.shape[1])


def write_parquet(table: pa.Table, sink: Any, vector_columns: Collection[str] = ()) -> None:
    """Writes a table as a Parquet file; vectors are neither compressed nor dictionary-coded."""
    plain = [n for n in table.column_names if n not in vector_columns]
    # Arrow makes levels of a whole row group at once, which for vectors take as much as themselves.
    groups = max(1, table.nbytes // ROW_GROUP_BYTES)
    pq.write_table(
        table,
        sink,
        row_group_size=max(1, -(-table.num_rows // groups)),
        compression={n: "NONE" if n in vector_columns else "ZSTD" for n in table.column_names},
        use_dictionary=plain,
        write_statistics=plain,
    )


class _Digesting:
    """A file that is written through, counted and digested."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size, self.digest = file, 0, xxhash.xxh3_64()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()


@dataclasses.dataclass
class OutputSegment:
    """A segment ready to be written.

    Attributes:
      segment: its plan.
      table: columns of the input, rows in order.
      added: columns that the job adds, by name, as long as ``table``.
      letters: of rows that could not be used.
      unreadable: rows planned that could not be read.
    """

    segment: Segment
    table: pa.Table
    added: dict[str, pa.Array]
    letters: list[DeadLetter]
    unreadable: int = 0


class Committer:
    """Writes segments and commits them as one manifest entry."""

    def __init__(self, store: Store, config: WriteConfig, run: str):
        self.store = store
        self.config = config
        self.run = run
        self._pool = ThreadPoolExecutor(WRITERS, "surge-write")
        # One at a time: while Arrow writes vectors it holds as much again for their row group.
        self._large = threading.Lock()

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def commit(self, name: str, segments: list[OutputSegment], header: dict[str, Any]) -> None:
        """Writes every segment, then the manifest entry, whose header tells when.

        Raises:
          SurgeError: the rows of a segment do not add up.
          OSError: the output cannot be written; nothing of the SuperBatch is committed then.
        """
        manifest.check_run(self.store, self.run)
        replaced = [s.segment.folder for s in segments if s.segment.replaces]
        manifest.void(self.store, self.run, name, replaced)
        lines = list(self._pool.map(self._write, segments))
        header["ended"] = time.time()
        manifest.write(self.store, self.run, name, header, lines)

    def _write(self, encoded: OutputSegment) -> dict[str, Any]:
        segment, rows = encoded.segment, encoded.table.num_rows
        accounted = rows + len(encoded.letters) + encoded.unreadable
        lengths = {len(column) for column in encoded.added.values()}
        if accounted != segment.rows or lengths - {rows}:
            raise SurgeError(
                f"partition {segment.folder}: {segment.rows} rows planned, but {rows} rows with"
                f" results for {sorted(lengths)}, {len(encoded.letters)} dead letters and"
                f" {encoded.unreadable} unreadable rows came of it"
            )
        split = segment.parts > 1
        pending = pending_folder(segment.fingerprint, segment.parts)
        folder = pending if split else segment.folder
        files = []
        if rows:
            table = encoded.table
            if segment.columns:
                table = typed(table, segment.columns, keys=key_values(segment))
            keep = table.column_names if self.config.columns is None else self.config.columns
            table = table.select(
                [n for n in keep if n in table.column_names and n not in self.config.drop]
            )
            for name, column in encoded.added.items():
                table = table.append_column(name, column)
            table = table.replace_schema_metadata({METADATA_KEY: segment.values.encode()})
            files.append(self._put(f"{folder}/{part_name(segment.part)}", table, rows))
        self._letters(encoded)
        line: dict[str, Any] = {
            "partition": segment.folder,
            "fingerprint": segment.fingerprint,
            "rows": rows,
            "dead_letters": len(encoded.letters),
            "files": files,
        }
        if encoded.unreadable:
            line["unreadable"] = encoded.unreadable
        if split:
            key = manifest.part_key(segment.fingerprint, segment.part, segment.parts)
            return {**line, "part_key": key.hex(), "part": segment.part, "parts": segment.parts}
        if self.store.local or segment.replaces:
            letters = {part_name(0)} if encoded.letters else set()
            sweep(self.store, segment.folder, {f["path"] for f in files}, letters)
        return line

    def _put(self, name: str, table: pa.Table, rows: int) -> dict[str, Any]:
        vectors = [self.config.vector_column]
        if self.store.local and table.nbytes > LARGE_BYTES:
            with self.store.writing(name) as file:
                sink = _Digesting(file)
                with self._large:
                    write_parquet(table, sink, vectors)
            size, checksum = sink.size, sink.digest.hexdigest()
        else:
            stream = pa.BufferOutputStream()
            write_parquet(table, stream, vectors)
            data = stream.getvalue()
            self.store.put(name, data)
            size, checksum = data.size, xxhash.xxh3_64_hexdigest(data)
        return {"path": name, "rows": rows, "bytes": size, "checksum": checksum}

    def _letters(self, encoded: OutputSegment) -> None:
        if encoded.letters:
            sink = pa.BufferOutputStream()
            pq.write_table(dead_letter_table(encoded.letters), sink)
            folder = letters_folder(encoded.segment.folder)
            self.store.put(f"{folder}/{part_name(encoded.segment.part)}", sink.getvalue())


def sweep(store: Store, folder: str, files: set[str], letters: set[str]) -> None:
    """Removes what an earlier state of a partition left beside its new files.

    Args:
      files: the partition's files now.
      letters: names of its files of dead letters now.
    """
    for name in store.names(folder):
        if f"{folder}/{name}" not in files and is_part(name):
            store.remove(f"{folder}/{name}")
    if not files:
        store.remove_empty_folders(folder)
    of_letters = letters_folder(folder)
    for name in store.names(of_letters):
        if name not in letters:
            store.remove(f"{of_letters}/{name}")
    store.remove_empty_folders(of_letters)


def publish(store: Store, run: str, folder: str, fingerprint: str, parts: list[dict]) -> None:
    """Moves the parts of a split partition to their names and commits the partition.

    Args:
      parts: the manifest lines of all its parts. A part that was moved before a crash counts.
    """
    files = []
    for line in sorted(parts, key=lambda x: x["part"]):
        for file in line["files"]:
            name = f"{folder}/{part_name(line['part'])}"
            if store.exists(file["path"]):
                store.move(file["path"], name)
            elif xxhash.xxh3_64_hexdigest(store.get_or_none(name) or b"") != file["checksum"]:
                raise SurgeError(f"{file['path']} is gone; run again with --overwrite")
            files.append({**file, "path": name})
    letters = {part_name(p["part"]) for p in parts if p["dead_letters"]}
    sweep(store, folder, {f["path"] for f in files}, letters)
    whole: dict[str, Any] = {
        "partition": folder,
        "fingerprint": fingerprint,
        "rows": sum(p["rows"] for p in parts),
        "dead_letters": sum(p["dead_letters"] for p in parts),
        "files": files,
    }
    if unreadable := sum(p.get("unreadable", 0) for p in parts):
        whole["unreadable"] = unreadable
    manifest.write(store, run, f"published-{digest(folder)}", {"published": True}, [whole])
    store.remove_tree(pending_folder(fingerprint, len(parts)))


def pending_folder(fingerprint: str, parts: int) -> str:
    """Where the parts of a split partition wait; another split of it has a folder of its own."""
    return f"{PENDING}/{fingerprint}-{parts}"


def part_name(part: int) -> str:
    return f"part-{part:05d}.parquet"


def is_part(name: str) -> bool:
    return name.startswith("part-") and name.endswith(".parquet")


def letters_folder(folder: str) -> str:
    return f"{ROW_LETTERS}/{digest(folder)}"


def read_json(store: Store, name: str) -> dict[str, Any] | None:
    """A JSON file of the output, or None where it is absent.

    Raises:
      SurgeError: if it is no JSON object.
    """
    data = store.get_or_none(name)
    if data is None:
        return None
    try:
        found = json.loads(data)
        if isinstance(found, dict):
            return found
        error = f"a {type(found).__name__}"
    except ValueError as caught:
        error = str(caught)
    raise SurgeError(f"{store.url_of(name)} is not what this program writes: {error}")
