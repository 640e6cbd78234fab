"""Prompts between stages: Arrow batches of token ids, each row with the row it answers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from surge_beam.policy.prefix_digests import CHUNK, path_keys, prefix_digests
from surge_beam.records import Checkpoint, Request, SamplingParams, SurgeError

# some thousand tokens a row keep an element within a few MB
PIECE_ROWS = 256
# ``owner`` and ``row`` say where the answer goes; ``sampling`` is JSON, since its fields may grow;
# ``progress`` is a Checkpoint as JSON, of rows that were begun elsewhere.
SCHEMA = pa.schema(
    [
        ("owner", pa.string()),
        ("row", pa.int32()),
        ("custom_id", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("sampling", pa.string()),
        ("progress", pa.string()),
    ]
)


def prompt_batch(
    owners: Sequence[str],
    rows: Sequence[int],
    custom_ids: Sequence[str],
    prompt_ids: Sequence[Sequence[int]],
    sampling: Sequence[str],
    progress: Sequence[str | None] | None = None,
) -> pa.RecordBatch:
    """A batch of ``SCHEMA``."""
    lengths = np.fromiter(map(len, prompt_ids), np.int64, len(prompt_ids))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.fromiter((t for ids in prompt_ids for t in ids), np.int32, int(offsets[-1]))
    return pa.RecordBatch.from_arrays(
        [
            pa.array(owners, pa.string()),
            pa.array(rows, pa.int32()),
            pa.array(custom_ids, pa.string()),
            pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat)),
            pa.array(sampling, pa.string()),
            pa.array([None] * len(rows) if progress is None else progress, pa.string()),
        ],
        schema=SCHEMA,
    )


def sampling_json(sampling: SamplingParams) -> str:
    """Sampling parameters as JSON text; equal ones give equal texts."""
    return json.dumps(dataclasses.asdict(sampling), separators=(",", ":"), sort_keys=True)


def tokens_of(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of all rows, int32 [t], and where each row's begin, int32 [n + 1]."""
    column = batch.column("prompt_ids")
    return column.values.to_numpy(), column.offsets.to_numpy()


def prompt_tokens(batch: pa.RecordBatch) -> np.ndarray:
    """Tokens of every prompt, int64 [n]."""
    return np.diff(tokens_of(batch)[1]).astype(np.int64)


def prefix_paths(batch: pa.RecordBatch, chunk: int = CHUNK) -> list[bytes]:
    """The prefix path of every prompt (``policy.prefix_digests.path_key``)."""
    return path_keys(*prefix_digests(*tokens_of(batch), chunk))


def requests_of(batch: pa.RecordBatch) -> Iterator[tuple[str, int, Request | Checkpoint]]:
    """Owner, row and request of every row; a Checkpoint where it was begun."""
    known: dict[str, SamplingParams] = {}
    flat, offsets = tokens_of(batch)
    names = ("owner", "row", "custom_id", "sampling", "progress")
    columns = [batch.column(name).to_pylist() for name in names]
    for at, (owner, row, custom_id, sampling, progress) in enumerate(zip(*columns, strict=True)):
        if progress is not None:
            yield owner, row, Checkpoint.from_json(progress)
            continue
        if sampling not in known:
            known[sampling] = SamplingParams(**json.loads(sampling))
        ids = tuple(flat[offsets[at] : offsets[at + 1]].tolist())
        request = Request(custom_id=custom_id, prompt_ids=ids, sampling=known[sampling])
        yield owner, row, request


def join(batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
    """Batches of ``SCHEMA`` as one; where all have the same columns beside it, with them.

    Raises:
      SurgeError: if they are more than Arrow holds in one.
    """
    parts = list(batches)
    schema = parts[0].schema if parts else SCHEMA
    found = pa.Table.from_batches(parts, schema).combine_chunks().to_batches()
    if len(found) > 1:
        raise SurgeError("the prompts of one range are over 2 GiB; ask for more ranges")
    return found[0] if found else pa.RecordBatch.from_pylist([], schema)


def encode(batch: pa.RecordBatch) -> bytes:
    """A batch as compressed Arrow IPC; of a slice only its own rows."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def encoded_batches(owner: str, requests: Sequence[tuple[int, Request]]) -> Iterator[bytes]:
    """Encoded batches of the requests of one owner, by row, of ``PIECE_ROWS`` rows each."""
    for at in range(0, len(requests), PIECE_ROWS):
        some = requests[at : at + PIECE_ROWS]
        yield encode(
            prompt_batch(
                [owner] * len(some),
                [row for row, _ in some],
                [request.custom_id for _, request in some],
                [request.prompt_ids for _, request in some],
                [sampling_json(request.sampling) for _, request in some],
            )
        )


def decode(data: bytes) -> pa.RecordBatch:
    """The batch that ``encode`` wrote."""
    return pa.ipc.open_stream(data).read_next_batch()


def rows_where(batch: pa.RecordBatch, which: np.ndarray) -> pa.RecordBatch:
    """Some rows of a batch, bool [n] or int64 [m]."""
    index = np.flatnonzero(which) if which.dtype == np.bool_ else which
    return batch.take(pa.array(index, pa.int64()))
