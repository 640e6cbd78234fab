"""What is committed: one small manifest entry a SuperBatch, written after its files are durable.

An entry is a JSON-lines file ``_surge/manifest/<run>-<superbatch>.jsonl``: a header with the
SuperBatch's statistics, then one line a partition. A later run's line replaces an earlier one's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from surge_beam.transforms.files import Store, digest

FOLDER = "_surge/manifest"
PRUNED = b""
_DTYPE = np.dtype([("key", "S16"), ("fingerprint", "S16"), ("rows", "i8"), ("letters", "i8")])


def partition_key(folder: str) -> bytes:
    return bytes.fromhex(digest(folder))


def part_key(fingerprint: str, part: int, parts: int) -> bytes:
    """Identifies a part of a split partition; equal splits of one fingerprint are the same."""
    return bytes.fromhex(digest(fingerprint, part, parts))


@dataclasses.dataclass(frozen=True)
class Committed:
    """The committed partitions as sorted arrays: about 50 bytes a partition, whatever its name."""

    table: np.ndarray
    parts: frozenset[bytes]

    def find(self, keys: list[bytes]) -> np.ndarray:
        """int64 [K]: row of each key in ``table``, or -1."""
        if not len(self.table) or not keys:
            return np.full(len(keys), -1, np.int64)
        wanted = np.array(keys, "S16")
        at = np.searchsorted(self.table["key"], wanted)
        at[at == len(self.table)] = 0
        return np.where(self.table["key"][at] == wanted, at, -1).astype(np.int64)


def write(store: Store, run: str, name: str, header: dict[str, Any], lines: list[dict]) -> None:
    """Writes an entry durably; from here on its partitions count as committed."""
    text = "\n".join(json.dumps(x, ensure_ascii=False) for x in [{"run": run, **header}, *lines])
    store.put(f"{FOLDER}/{run}-{name}.jsonl", (text + "\n").encode("utf-8", "replace"))


def entries(store: Store, *, run: str | None = None) -> Iterator[tuple[dict, list[dict]]]:
    """Header and lines of every entry, oldest run first."""
    for name in store.names(FOLDER):
        if name.endswith(".jsonl") and (run is None or name.startswith(run + "-")):
            header, *lines = store.get(f"{FOLDER}/{name}").decode().splitlines()
            yield json.loads(header), [json.loads(line) for line in lines]


def load(store: Store) -> Committed:
    """Reads every entry. Memory is a few arrays, not the entries."""
    blocks: list[np.ndarray] = []
    parts: dict[str, set[bytes]] = {}
    for header, lines in entries(store):
        block = []
        for line in lines:
            if "part_key" in line:
                parts.setdefault(line["fingerprint"], set()).add(bytes.fromhex(line["part_key"]))
                continue
            if header.get("published"):
                parts.pop(line["fingerprint"], None)
            block.append(
                (
                    partition_key(line["partition"]),
                    bytes.fromhex(line["fingerprint"]),
                    line["rows"],
                    line["dead_letters"],
                )
            )
        blocks.append(np.array(block, _DTYPE))
    table = np.concatenate(blocks) if blocks else np.zeros(0, _DTYPE)
    # stable, so that the newest of equal keys stands last
    table = table[np.argsort(table["key"], kind="stable")]
    if len(table):
        table = table[np.append(table["key"][1:] != table["key"][:-1], True)]
        table = table[table["fingerprint"] != PRUNED]
    return Committed(table, frozenset(k for keys in parts.values() for k in keys))


def parts_under_way(store: Store) -> dict[str, dict[int, dict[str, Any]]]:
    """Lines of the parts that are committed but not published: fingerprint -> part -> line."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for header, lines in entries(store):
        for line in lines:
            if "part_key" in line:
                found.setdefault(line["fingerprint"], {})[line["part"]] = line
            elif header.get("published"):
                found.pop(line["fingerprint"], None)
    return found


def prune(store: Store, run: str, keep: set[str]) -> list[str]:
    """Marks every committed partition outside ``keep`` as gone; returns the files they had."""
    last: dict[str, list[str]] = {}
    for _, lines in entries(store):
        for line in lines:
            if "part_key" not in line and line["partition"] not in keep:
                last[line["partition"]] = [f["path"] for f in line["files"]]
    gone = [
        {"partition": p, "fingerprint": "", "rows": 0, "dead_letters": 0, "files": []}
        for p in last
    ]
    if gone:
        write(store, run, "pruned", {"pruned": True}, gone)
    return [path for files in last.values() for path in files]
