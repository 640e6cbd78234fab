"""Ids of rows: of those with one id the first that can be answered keeps it, over all runs.

First means first in input order, but what is committed counts as earlier than what is not. The ids
of a committed block are in a file below ``_surge/ids``, as digests.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np

from surge_beam.records import Segment, SuperBatchPlan, pack, unpack
from surge_beam.transforms import manifest
from surge_beam.transforms.files import Store, digest
from surge_beam.transforms.plan import IDS
from surge_beam.transforms.prompt_batch import decode, encode, rows_where
from surge_beam.transforms.prompts import Refusal

SHARDS = 64
DIGEST_BYTES = 16
DOUBLED = "duplicate_custom_id"


@dataclasses.dataclass(frozen=True)
class Doubled:
    """Rows of a block whose id an earlier row has, and why they are refused."""

    refused: dict[int, Refusal]


# digest, name of the input file, row there, block, row of the block; a committed one has no block
_Place = tuple[bytes, str, int, str, int]


def id_digest_bytes(custom_id: str) -> bytes:
    """A digest that nobody can make collide, since a collision would drop a row."""
    text = custom_id.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()


def by_shard(places: Iterable[_Place]) -> Iterator[tuple[int, bytes]]:
    """Places of ids, packed by shard."""
    shards: dict[int, list[_Place]] = {}
    for place in places:
        shards.setdefault(place[0][0] % SHARDS, []).append(place)
    for shard, some in shards.items():
        yield shard, pack(some)


def remember(store: Store, segment: Segment, ids: Iterable[str]) -> None:
    """Keeps the ids of a segment that is about to be committed."""
    data = b"".join(map(id_digest_bytes, ids))
    store.put(f"{_folder(segment)}/{_name(segment)}", data)


def planned_ids(plan: SuperBatchPlan) -> Iterator[tuple[str, str]]:
    """Folder and name under which the ids of each segment of a plan will be kept."""
    for segment in plan.segments:
        yield _folder(segment), _name(segment)


def forget_others(store: Store, plan: SuperBatchPlan) -> None:
    """Removes, of a plan that is committed, what is kept of its partitions' earlier states."""
    for segment in plan.segments:
        for name in store.names(_folder(segment)):
            if _state(name) != _state(_name(segment)):
                store.remove(f"{_folder(segment)}/{name}")


def _state(name: str) -> str:
    """Fingerprint and number of parts in a name."""
    return name.rpartition("-")[0]


def _folder(segment: Segment) -> str:
    return f"{IDS}/{digest(segment.folder)}"


def _name(segment: Segment) -> str:
    return f"{segment.fingerprint}-{segment.parts}-{segment.part}"


class Remembered(beam.DoFn):
    """Places of the ids that earlier runs have committed.

    Args:
      output: the output folder.
    """

    def __init__(self, output: str):
        self._output = output

    def process(self, _: Any, planned: Iterable[tuple[str, str]]) -> Iterator[tuple[int, bytes]]:
        """Leaves out what this run plans anew: its rows come by themselves."""
        anew: dict[str, set[str]] = {}
        for folder, name in planned:
            anew.setdefault(folder, set()).add(name)
        store = Store(self._output)
        committed = manifest.load(store)
        # numpy takes trailing zeros off bytes
        whole = {x.ljust(16, b"\0").hex() for x in committed.table["fingerprint"].tolist()}
        for name in store.walk(IDS):
            folder, _, file = name.rpartition("/")
            if folder in anew:
                states = set(map(_state, anew[folder]))
                if file in anew[folder] or _state(file) not in states:
                    continue
            fingerprint, parts, part = file.split("-")
            key = manifest.part_key(fingerprint, int(part), int(parts))
            if fingerprint not in whole and key not in committed.parts:
                # left by a run that ended before it committed them
                continue
            data = store.get(name)
            digests = (data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES))
            yield from by_shard((d, "", 0, "", 0) for d in digests)


class FindDoubled(beam.DoFn):
    """Of rows with one id all but the first, as packed ``Doubled`` by block."""

    def process(self, grouped: tuple[int, Iterable[bytes]]) -> Iterator[tuple[str, bytes]]:
        # a set, since a bundle that was tried again may have left its places twice
        places = sorted({place for data in grouped[1] for place in unpack(data)})
        doubled: dict[str, dict[int, Refusal]] = {}
        first: _Place | None = None
        for place in places:
            if first is None or place[0] != first[0]:
                first = place
                continue
            _, _, _, owner, row = place
            where = f"row {first[2]} of {first[1]}" if first[3] else "a row of an earlier run"
            doubled.setdefault(owner, {})[row] = Refusal(DOUBLED, f"{where} has this id already")
        for owner, refused in doubled.items():
            yield owner, pack(Doubled(refused))


class DropDoubled(beam.DoFn):
    """Takes rows whose id is doubled out of encoded prompt batches of one block each."""

    def process(self, data: bytes, doubled: Any) -> Iterator[bytes]:
        batch = decode(data)
        owner = batch.column("owner")[0].as_py()
        gone = {row for found in doubled[owner] for row in unpack(found).refused}
        if not gone:
            yield data
            return
        keep = np.array([row not in gone for row in batch.column("row").to_pylist()])
        if keep.any():
            yield encode(rows_where(batch, keep))
