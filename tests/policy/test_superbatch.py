from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_beam.policy.superbatch import Limits, Piece, cut_superbatches, memory_bound

MIN, MAX, BYTES = 10, 25, 1000


def cut(rows: list[int], nbytes: list[int] | None = None, **limits: int) -> list[list[Piece]]:
    limits = {"min_rows": MIN, "max_rows": MAX, "max_bytes": BYTES, **limits}
    sizes = [1] * len(rows) if nbytes is None else nbytes
    return cut_superbatches(np.array(rows, np.int64), np.array(sizes, np.int64), Limits(**limits))


def naive(rows: list[int], nbytes: list[int], limits: Limits) -> list[list[tuple[int, int, int]]]:
    """(partition, start, rows) of every piece, by the rule as it is written down."""
    done: list[list[tuple[int, int, int]]] = []
    now: list[tuple[int, int, int]] = []
    for p, (n, size) in enumerate(zip(rows, nbytes, strict=True)):
        held = sum(x[2] for x in now), sum(nbytes[x[0]] for x in now)
        alone = n > limits.max_rows or size > limits.max_bytes
        full = held[0] + n > limits.max_rows or held[1] + size > limits.max_bytes
        if now and (alone or full):
            done.append(now)
            now = []
        if alone and n:
            wanted = max(-(-n // limits.max_rows), -(-size // limits.max_bytes))
            edges = np.arange(min(n, wanted) + 1) * n // min(n, wanted)
            done += [[(p, a, b - a)] for a, b in pairwise(edges.tolist())]
            continue
        now.append((p, 0, n))
        share = (8, 4, 2)[len(done)] if limits.ramp and len(done) < 3 else 1
        if sum(x[2] for x in now) >= max(1, limits.min_rows // share):
            done.append(now)
            now = []
    return [*done, now] if now else done


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], []),
        ([0], [[0]]),
        ([1], [[1]]),
        ([MIN], [[MIN]]),
        ([MAX], [[MAX]]),
        ([MAX + 1], [[13], [13]]),
        ([4, 4, 4, 4], [[4, 4, 4], [4]]),
        ([9, 25, 1], [[9], [25], [1]]),
        ([9, 60, 1], [[9], [20], [20], [20], [1]]),
        ([0, 0, 0], [[0, 0, 0]]),
        ([9, 16], [[9, 16]]),
        ([9, 17], [[9], [17]]),
    ],
)
def test_by_hand(rows: list[int], expected: list[list[int]]) -> None:
    assert [[piece.rows for piece in batch] for batch in cut(rows)] == expected


def test_bytes_close_and_split() -> None:
    assert [[p.rows for p in b] for b in cut([3, 3, 3], [600, 400, 1])] == [[3, 3], [3]]
    found = [[p.rows for p in b] for b in cut([3, 4, 3], [1, 3001, 1])]
    assert found == [[3], [1], [1], [1], [1], [3]]
    assert [[p.rows for p in b] for b in cut([2], [5000])] == [[1], [1]]
    assert [[p.rows for p in b] for b in cut([0, 2], [5000, 1])] == [[0], [2]]


def test_the_first_ones_are_smaller_where_asked() -> None:
    found = cut([1] * 100, min_rows=16, ramp=True)
    assert [len(batch) for batch in found] == [2, 4, 8, 16, 16, 16, 16, 16, 6]
    assert [len(batch) for batch in cut([1] * 5, min_rows=1, ramp=True)] == [1] * 5


sizes = st.one_of(
    st.sampled_from([0, 1, MIN - 1, MIN, MIN + 1, MAX - 1, MAX, MAX + 1, 3 * MAX]),
    st.integers(0, 4 * MAX),
)
weights = st.one_of(st.sampled_from([0, 1, BYTES, BYTES + 1]), st.integers(0, 5 * BYTES))


@given(
    st.lists(st.tuples(sizes, weights), max_size=60),
    st.integers(1, 40),
    st.integers(0, 40),
    st.integers(1, 2000),
    st.booleans(),
)
def test_every_row_once_within_bounds(
    partitions: list[tuple[int, int]], least: int, more: int, most_bytes: int, ramp: bool
) -> None:
    rows, nbytes = [p[0] for p in partitions], [p[1] for p in partitions]
    limits = Limits(min_rows=least, max_rows=least + more, max_bytes=most_bytes, ramp=ramp)
    batches = cut_superbatches(np.array(rows, np.int64), np.array(nbytes, np.int64), limits)
    pieces = [piece for batch in batches for piece in batch]
    at = dict.fromkeys(range(len(rows)), 0)
    for piece in pieces:
        assert piece.start == at[piece.partition]
        at[piece.partition] += piece.rows
    assert at == dict(enumerate(rows))
    assert {p.partition for p in pieces} == set(range(len(rows)))
    assert [(p.partition, p.part) for p in pieces] == sorted((p.partition, p.part) for p in pieces)
    for p in range(len(rows)):
        parts = [x for x in pieces if x.partition == p]
        assert [x.part for x in parts] == list(range(len(parts)))
        assert {x.parts for x in parts} == {len(parts)}
        if len(parts) > 1:
            assert min(x.rows for x in parts) >= 1
    for batch in batches:
        assert batch
        assert sum(p.rows for p in batch) <= limits.max_rows
        if len(batch) > 1:
            assert all(p.parts == 1 for p in batch)
            assert sum(nbytes[p.partition] for p in batch) <= limits.max_bytes
    found = [[(p.partition, p.start, p.rows) for p in batch] for batch in batches]
    assert found == naive(rows, nbytes, limits)
    again = cut_superbatches(np.array(rows, np.int64), np.array(nbytes, np.int64), limits)
    assert again == batches


@pytest.mark.parametrize(
    "limits",
    [
        {"min_rows": 0, "max_rows": 1, "max_bytes": 1},
        {"min_rows": 2, "max_rows": 1, "max_bytes": 1},
        {"min_rows": 1, "max_rows": 1, "max_bytes": 0},
    ],
)
def test_limits_are_checked(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"m(in_rows|ax_bytes) must be"):
        Limits(**limits)


def test_memory_bound_grows_with_the_limits_alone() -> None:
    small = Limits(min_rows=1, max_rows=1000, max_bytes=1 << 20)
    assert memory_bound(small, 384) >= 3 * ((1 << 20) + 1000 * 384 * 4)
    assert memory_bound(Limits(min_rows=9, max_rows=1000, max_bytes=1 << 20), 384) == memory_bound(
        small, 384
    )
