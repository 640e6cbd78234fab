from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from surge_beam.policy.prefix_digests import (
    extend_chain,
    path_key,
    path_keys,
    prefix_digests,
    shared_chunks,
)

# few tokens and short chunks, so that prefixes are shared
rows_of_tokens = st.lists(st.lists(st.integers(0, 1), max_size=14), max_size=12)


def flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *map(len, rows)])
    return np.array([x for row in rows for x in row], np.int32), offsets


def digest_lists(rows: list[list[int]], chunk: int) -> list[list[int]]:
    digests, offsets = prefix_digests(*flat(rows), chunk)
    return [digests[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def common_tokens(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(rows_of_tokens, st.integers(1, 5))
def test_digests_are_equal_where_whole_prefixes_are(rows, chunk):
    found = digest_lists(rows, chunk)
    assert [len(d) for d in found] == [len(row) // chunk for row in rows]
    for a, row in zip(found, rows, strict=True):
        for b, other in zip(found, rows, strict=True):
            equal = [x == y for x, y in zip(a, b, strict=False)]
            shared = common_tokens(row, other) // chunk
            assert equal == [i < shared for i in range(len(equal))]


def test_the_chain_by_hand():
    tokens = np.arange(160, dtype=np.int32)
    digests, _ = prefix_digests(tokens, [0, 160], 64)
    first = xxhash.xxh3_64_intdigest(tokens[:64].tobytes(), 0)
    second = xxhash.xxh3_64_intdigest(tokens[64:128].tobytes(), first)
    assert digests.tolist() == [first, second] and digests.dtype == np.uint64


@given(rows_of_tokens, st.integers(1, 5), st.data())
def test_a_row_alone_has_the_digests_that_it_has_among_others(rows, chunk, data):
    """Extended in two goes, as a sequence grows."""
    for found, row in zip(digest_lists(rows, chunk), rows, strict=True):
        tokens = np.array(row, np.int32)
        known = extend_chain([], tokens, chunk, data.draw(st.integers(0, len(found))))
        assert known == found[: len(known)]
        assert extend_chain(known, tokens, chunk, len(found)) is known
        assert known == found
        assert extend_chain(known, tokens, chunk, 0) == found


def test_rows_of_an_arrow_slice():
    column = pa.array([[1], [1, 2, 3], [], [1, 2, 4, 5]], pa.list_(pa.int32())).slice(1)
    values, offsets = column.values.to_numpy(), column.offsets.to_numpy()
    digests, ends = prefix_digests(values, offsets, 2)
    assert ends.tolist() == [0, 1, 1, 3]
    assert digests[0] == digests[1] != digests[2]


def test_no_rows_and_no_tokens():
    empty = np.zeros(0, np.int32)
    for offsets in ([0], [0, 0, 0]):
        digests, ends = prefix_digests(empty, offsets)
        assert digests.shape == (0,) and ends.tolist() == offsets
        assert path_keys(digests, ends) == [b""] * (len(offsets) - 1)


@pytest.mark.parametrize(
    ("tokens", "offsets", "chunk"),
    [
        (np.zeros(4, np.int64), [0, 4], 2),
        (np.zeros((2, 2), np.int32), [0, 4], 2),
        (np.zeros(4, np.int32), [0, 5], 2),
        (np.zeros(4, np.int32), [-1, 4], 2),
        (np.zeros(4, np.int32), [0, 3, 2, 4], 2),
        (np.zeros(4, np.int32), [], 2),
        (np.zeros(4, np.int32), [0, 4], 0),
    ],
)
def test_what_is_no_column_of_tokens_is_refused(tokens, offsets, chunk):
    with pytest.raises(ValueError):
        prefix_digests(tokens, offsets, chunk)


@given(rows_of_tokens, st.integers(1, 4))
def test_in_path_order_prefixes_lie_together(rows, chunk):
    digests, offsets = prefix_digests(*flat(rows), chunk)
    keys = path_keys(digests, offsets)
    lists = digest_lists(rows, chunk)
    assert keys == [path_key(d) for d in lists]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    for prefix in {tuple(d[:k]) for d in lists for k in range(len(d) + 1)}:
        places = [p for p, i in enumerate(order) if tuple(lists[i][: len(prefix)]) == prefix]
        assert places == list(range(places[0], places[0] + len(places)))
        # whoever is the prefix itself comes before those that go on
        own = [p for p in places if len(lists[order[p]]) == len(prefix)]
        assert own == places[: len(own)]


@given(rows_of_tokens, st.integers(1, 4))
def test_shared_chunks_against_tokens(rows, chunk):
    keys = [path_key(d) for d in digest_lists(rows, chunk)]
    for a, row in zip(keys, rows, strict=True):
        for b, other in zip(keys, rows, strict=True):
            assert shared_chunks(a, b) == common_tokens(row, other) // chunk
