"""Prompts between stages: what goes into a batch comes out of it, slices and joins included."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.policy.prefix_digests import CHUNK, path_keys, prefix_digests
from surge_beam.records import Checkpoint, Request, SamplingParams, TokenLogprob
from surge_beam.transforms.prompt_batch import (
    SCHEMA,
    decode,
    encode,
    join,
    prefix_paths,
    prompt_batch,
    prompt_tokens,
    requests_of,
    rows_where,
    sampling_json,
    tokens_of,
)

SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 9),
    temperature=st.floats(0, 2),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 9), max_size=2).map(tuple),
    seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    logprobs=st.none() | st.integers(0, 3),
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
IDS = st.lists(st.integers(0, (1 << 31) - 1), max_size=3 * CHUNK).map(tuple)
CHECKPOINTS = st.builds(
    lambda output, cached: (output, cached),
    st.lists(st.integers(0, 99), max_size=4),
    st.integers(0, 9),
)
ROWS = st.lists(
    st.tuples(TEXTS, st.integers(0, 1 << 30), TEXTS, IDS, SAMPLING, st.none() | CHECKPOINTS),
    max_size=6,
)
FEW = settings(max_examples=60)
Row = tuple[str, int, Request | Checkpoint]


def expected(rows: list[Any]) -> list[Row]:
    found: list[Row] = []
    for owner, row, custom_id, ids, sampling, begun in rows:
        request = Request(custom_id=custom_id, prompt_ids=ids, sampling=sampling)
        if begun is None:
            found.append((owner, row, request))
        else:
            checkpoint = Checkpoint(
                request=request,
                output_ids=tuple(begun[0]),
                cached_tokens=begun[1],
                logprobs=(TokenLogprob(3, -0.5, ((3, -0.5),)),),
            )
            found.append((owner, row, checkpoint))
    return found


def batch_of(rows: list[Any]) -> pa.RecordBatch:
    begun = [x for _, _, x in expected(rows)]
    return prompt_batch(
        [r[0] for r in rows],
        [r[1] for r in rows],
        [r[2] for r in rows],
        [r[3] for r in rows],
        [sampling_json(r[4]) for r in rows],
        [x.to_json() if isinstance(x, Checkpoint) else None for x in begun],
    )


@FEW
@given(ROWS)
def test_a_batch_comes_back(rows: list[Any]) -> None:
    batch = decode(encode(batch_of(rows)))
    assert batch.schema.equals(SCHEMA)
    assert list(requests_of(batch)) == expected(rows)


@FEW
@given(ROWS, st.data())
def test_slices_and_choices(rows: list[Any], data: st.DataObject) -> None:
    """Of a slice only its own rows travel, and everything read off it is its own."""
    start = data.draw(st.integers(0, len(rows)))
    length = data.draw(st.integers(0, len(rows) - start))
    part, wanted = batch_of(rows).slice(start, length), rows[start : start + length]
    for batch in (part, decode(encode(part))):
        assert list(requests_of(batch)) == expected(wanted)
        assert prompt_tokens(batch).tolist() == [len(r[3]) for r in wanted]
        assert prefix_paths(batch) == prefix_paths(batch_of(wanted))
    which = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    chosen = rows_where(part, np.array(which, bool))
    assert list(requests_of(chosen)) == expected(
        [r for r, w in zip(wanted, which, strict=True) if w]
    )
    order = data.draw(st.permutations(range(length)))
    moved = rows_where(part, np.array(order, np.int64))
    assert list(requests_of(moved)) == expected([wanted[i] for i in order])


@FEW
@given(st.lists(ROWS, max_size=3))
def test_join(parts: list[list[Any]]) -> None:
    joined = join(decode(encode(batch_of(rows))) for rows in parts)
    assert list(requests_of(joined)) == expected([row for rows in parts for row in rows])
    assert joined.schema.equals(SCHEMA)


def test_what_a_slice_takes() -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 1 << 31, (50, 400)).tolist()
    rows = [("o", i, str(i), tuple(ids), SamplingParams(), None) for i, ids in enumerate(prompts)]
    batch = batch_of(rows)
    assert len(encode(batch.slice(3, 1))) < len(encode(batch)) / 10


def test_prefix_paths() -> None:
    """A path is a digest a whole chunk, of all tokens up to its end."""
    one = tuple(range(2 * CHUNK))
    prompts = [one, one[:CHUNK], (*one[:CHUNK], 7, *one[CHUNK + 1 :]), one[: CHUNK - 1], ()]
    rows = [("o", i, str(i), ids, SamplingParams(), None) for i, ids in enumerate(prompts)]
    paths = prefix_paths(batch_of(rows))
    assert paths[0].startswith(paths[1]) and paths[2].startswith(paths[1])
    assert paths[0] != paths[2] and len(paths[0]) == len(paths[2])
    assert paths[3] == paths[4] and len(paths[4]) < len(paths[1])
    flat, offsets = tokens_of(batch_of(rows))
    assert paths == path_keys(*prefix_digests(flat, offsets, CHUNK))


def test_equal_sampling_gives_equal_texts() -> None:
    one, other = SamplingParams(temperature=1, seed=2), SamplingParams(seed=2, temperature=1.0)
    assert json.loads(sampling_json(one)) == json.loads(sampling_json(other))
    assert sampling_json(one) != sampling_json(SamplingParams(temperature=1.0, seed=3))
