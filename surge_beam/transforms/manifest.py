"""What is committed: one small manifest entry a SuperBatch, written after its files are durable.

An entry is a JSON-lines file ``_surge/manifest/<run>-<superbatch>.jsonl``: a header with the
SuperBatch's statistics, then one line a partition. A later run's line replaces an earlier one's;
one without a fingerprint says that the partition is not committed any more.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from surge_beam.records import SurgeError
from surge_beam.transforms.files import Store, digest

FOLDER = "_surge/manifest"
RUN = "_surge/run.json"
READ_AHEAD = 64
VOID = b""
_DTYPE = np.dtype(
    [
        ("key", "S16"),
        ("fingerprint", "S16"),
        ("rows", "i8"),
        ("letters", "i8"),
        ("unreadable", "i8"),
    ]
)


def partition_key(folder: str) -> bytes:
    return bytes.fromhex(digest(folder))


def part_key(fingerprint: str, part: int, parts: int) -> bytes:
    """Identifies a part of a split partition; equal splits of one fingerprint are the same."""
    return bytes.fromhex(digest(fingerprint, part, parts))


@dataclasses.dataclass(frozen=True)
class Committed:
    """The committed partitions as sorted arrays: about 50 bytes a partition, whatever its name.

    Attributes:
      table: one row a partition, by key.
      parts: keys of the parts that are committed, of partitions that are not yet published.
      unfinished: an earlier run may have left files that no entry names.
    """

    table: np.ndarray
    parts: frozenset[bytes]
    unfinished: bool = False

    def find(self, keys: list[bytes]) -> np.ndarray:
        """int64 [K]: row of each key in ``table``, or -1."""
        if not len(self.table) or not keys:
            return np.full(len(keys), -1, np.int64)
        wanted = np.array(keys, "S16")
        at = np.searchsorted(self.table["key"], wanted)
        at[at == len(self.table)] = 0
        return np.where(self.table["key"][at] == wanted, at, -1).astype(np.int64)


def begin(store: Store, run: str) -> None:
    """Makes ``run`` the one that may write: whatever is left of earlier ones fails from here on."""
    before = read_run(store)
    unfinished = bool(before.get("under_way", store.names(FOLDER)))
    put_run(store, {"run": run, "under_way": True, "after_unfinished": unfinished})


def end(store: Store, run: str) -> None:
    """Notes that ``run`` ended well."""
    put_run(store, {"run": run, "under_way": False})


def read_run(store: Store) -> dict[str, Any]:
    data = store.get_or_none(RUN)
    return {} if data is None else json.loads(data)


def put_run(store: Store, state: dict[str, Any]) -> None:
    store.put(RUN, json.dumps(state).encode())


def check_run(store: Store, run: str) -> None:
    """Raises SurgeError where a later run has begun, since its plan does not know of this one."""
    current = read_run(store).get("run", run)
    if current > run:
        raise SurgeError(f"run {run} is over: a later one is writing to {store.url}")


def write(store: Store, run: str, name: str, header: dict[str, Any], lines: list[dict]) -> None:
    """Writes an entry durably; from here on its partitions count as committed.

    Raises:
      SurgeError: a later run has begun.
    """
    check_run(store, run)
    text = "\n".join(json.dumps(x, ensure_ascii=False) for x in [{"run": run, **header}, *lines])
    store.put(f"{FOLDER}/{run}-{name}.jsonl", (text + "\n").encode("utf-8", "replace"))


def void(store: Store, run: str, name: str, partitions: list[str]) -> None:
    """Takes back that partitions are committed, before their files are overwritten.

    Without it a kill in between would leave new files under the old fingerprint, which an input
    that is put back as it was would take for its own.
    """
    if partitions:
        # a dash sorts before every name, so that the entries of the same run prevail
        write(store, run, f"-{name}", {"void": True}, [_void_line(p) for p in partitions])


def _void_line(partition: str) -> dict[str, Any]:
    return {"partition": partition, "fingerprint": "", "rows": 0, "dead_letters": 0, "files": []}


def entries(store: Store, *, run: str | None = None) -> Iterator[tuple[dict, list[dict]]]:
    """Header and lines of every entry, oldest run first."""
    names = [
        f"{FOLDER}/{name}"
        for name in store.names(FOLDER)
        if name.endswith(".jsonl") and (run is None or name.startswith(run + "-"))
    ]
    for at in range(0, len(names), READ_AHEAD):
        for data in store.get_many(names[at : at + READ_AHEAD]):
            header, *lines = data.decode().rstrip("\n").split("\n")
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
            parts.pop(line["fingerprint"], None)
            if header.get("dropped"):
                continue
            block.append(
                (
                    partition_key(line["partition"]),
                    bytes.fromhex(line["fingerprint"]),
                    line["rows"],
                    line["dead_letters"],
                    line.get("unreadable", 0),
                )
            )
        blocks.append(np.array(block, _DTYPE))
    table = np.concatenate(blocks) if blocks else np.zeros(0, _DTYPE)
    # stable, so that the newest of equal keys stands last
    table = table[np.argsort(table["key"], kind="stable")]
    if len(table):
        table = table[np.append(table["key"][1:] != table["key"][:-1], True)]
        table = table[table["fingerprint"] != VOID]
    unfinished = read_run(store).get("after_unfinished", True)
    return Committed(table, frozenset(k for keys in parts.values() for k in keys), unfinished)


def parts_under_way(store: Store) -> dict[str, list[dict[str, Any]]]:
    """Lines of the parts that are committed but not published: fingerprint -> lines, one a part."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for _, lines in entries(store):
        for line in lines:
            if "part_key" in line:
                found.setdefault(line["fingerprint"], {})[line["part_key"]] = line
            else:
                found.pop(line["fingerprint"], None)
    return {fingerprint: list(lines.values()) for fingerprint, lines in found.items()}


def drop_parts(store: Store, run: str) -> None:
    """Notes that parts which were never published are gone: their input changed midway."""
    lines = [
        {**_void_line(parts[0]["partition"]), "fingerprint": fingerprint}
        for fingerprint, parts in parts_under_way(store).items()
    ]
    if lines:
        write(store, run, "~dropped", {"dropped": True}, lines)


def prune(store: Store, run: str, keep: set[str]) -> list[str]:
    """Takes back every partition outside ``keep``; returns the files they had or may have had."""
    files: dict[str, set[str]] = {}
    live: dict[str, bool] = {}
    for _, lines in entries(store):
        for line in lines:
            if "part_key" not in line and line["partition"] not in keep:
                live[line["partition"]] = bool(line["fingerprint"])
                found = files.setdefault(line["partition"], set())
                found.update(file["path"] for file in line["files"])
    gone = [_void_line(partition) for partition, is_live in live.items() if is_live]
    if gone:
        write(store, run, "pruned", {"pruned": True}, gone)
    return sorted(path for found in files.values() for path in found)
