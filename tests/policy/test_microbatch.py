"""micro_batches: invariants against brute force, and its speed."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.policy.microbatch import micro_batches


def brute_force(lengths, budget):
    """The same rule, one row at a time."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches = []
    for row in order:
        longest = max(1, lengths[batches[-1][0]]) if batches else 0
        if batches and longest * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 600), max_size=200), st.integers(1, 5000))
def test_matches_brute_force(lengths, budget):
    assert [b.tolist() for b in micro_batches(lengths, budget)] == brute_force(lengths, budget)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 600), max_size=200), st.integers(1, 5000))
def test_every_row_once_within_the_budget(lengths, budget):
    batches = micro_batches(np.array(lengths, dtype=np.int32), budget)
    rows = [row for batch in batches for row in batch.tolist()]
    assert sorted(rows) == list(range(len(lengths)))
    sizes = [lengths[row] for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    for batch in batches:
        assert batch.size
        longest = max(1, max(lengths[row] for row in batch))
        assert batch.size == 1 or longest * batch.size <= budget


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=100), st.integers(1, 200))
def test_rows_of_equal_length_keep_their_order(lengths, budget):
    rows = np.concatenate([np.empty(0, np.int64), *micro_batches(lengths, budget)]).tolist()
    for length in set(lengths):
        same = [row for row in rows if lengths[row] == length]
        assert same == sorted(same)


def test_no_rows():
    assert micro_batches([], 10) == []


@pytest.mark.parametrize("lengths, budget", [([1], 0), ([-1], 5), ([[1, 2]], 5)])
def test_refuses(lengths, budget):
    with pytest.raises(ValueError):
        micro_batches(lengths, budget)


def test_100k_rows_are_cut_fast():
    lengths = np.random.default_rng(0).integers(1, 256, 100_000).astype(np.int32)
    best = 1e9
    for _ in range(5):
        begin = time.process_time()
        micro_batches(lengths, 1024)
        best = min(best, time.process_time() - begin)
    assert best < 0.05
