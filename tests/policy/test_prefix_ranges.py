from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.prefix_detection import groupings, heaviest, load_paths
from surge_beam.policy.prefix_digests import path_key
from surge_beam.policy.prefix_ranges import (
    form_superbatches,
    leading_key,
    range_cuts,
    range_of,
    tokens_saved,
)


def path(symbols: tuple[int, ...]) -> bytes:
    """Digests that are equal exactly where all symbols up to there are; spread as hashes are."""
    return path_key([hash((7919, *symbols[: i + 1])) % 2**64 for i in range(len(symbols))])


symbols = st.lists(st.integers(0, 2), max_size=5).map(tuple)
weighted = st.lists(st.tuples(symbols.map(path), st.integers(0, 50)), max_size=40)


def common(a: bytes, b: bytes) -> int:
    pairs = zip(range(0, len(a), 8), range(0, len(b), 8), strict=False)
    return next(
        (i // 8 for i, _ in pairs if a[i : i + 8] != b[i : i + 8]), min(len(a), len(b)) // 8
    )


def loads(sample, cuts, ranges):
    """Tokens of each range where each path's tokens lie evenly over the ids."""
    found = np.zeros(ranges)
    for key, tokens in sample:
        edges = [0, *(cut_id for cut_path, cut_id in cuts if cut_path == key), 2**64]
        for a, b in itertools.pairwise(edges):
            found[range_of(cuts, key, a)] += tokens * (b - a) / 2**64
    return found


@given(weighted, st.integers(1, 9), st.sampled_from([0.0, 0.05, 0.2]))
def test_no_range_is_too_heavy(sample, ranges, tolerance):
    cuts = range_cuts(sample, ranges, tolerance)
    assert cuts == sorted(set(cuts)) and len(cuts) < ranges
    total = sum(tokens for _, tokens in sample)
    assert loads(sample, cuts, ranges).max() <= (1 + 2 * tolerance) * total / ranges + 1e-6 * total
    if total and ranges > 1:
        assert len(cuts) == ranges - 1


@given(weighted, st.integers(2, 6))
def test_a_cut_is_where_neighbours_share_least(sample, ranges):
    tolerance = 0.2
    cuts = range_cuts(sample, ranges, tolerance)
    paths = sorted({key for key, tokens in sample if tokens})
    mean = sum(tokens for _, tokens in sample) / ranges
    for k, (cut_path, cut_id) in enumerate(cuts, 1):
        # what each border within tolerance would cost
        sums = [sum(t for key, t in sample if key <= p) for p in paths]
        near = [
            common(paths[i], paths[i + 1])
            for i in range(len(paths) - 1)
            if abs(sums[i] - k * mean) <= tolerance * mean * (1 - 1e-9)
        ]
        if cut_id:
            cost = len(cut_path) // 8
        else:
            behind = next(i for i, p in enumerate(paths) if p >= cut_path)
            cost = common(paths[behind - 1], paths[behind])
            # rows outside the sample that share more than that are not parted
            assert len(cut_path) == 8 * (cost + 1)
        assert cost <= min(near, default=cost)


def test_one_prefix_with_nine_tenths_of_the_rows_spreads():
    random = np.random.default_rng(0)
    hot = [path((1, 1, 1, int(i))) for i in random.integers(0, 4000, 9000)]
    cold = [path((int(i), 2)) for i in random.integers(10, 300, 1000)]
    tokens = random.integers(50, 2000, 10_000).tolist()
    for ranges in (2, 16, 64):
        assert heaviest(hot + cold, tokens, ranges, 1.0) <= 1.15
    # rows whose whole path is the same are parted by their ids
    assert heaviest([path((1, 1))] * 9000 + cold, tokens, 16, 1.0) <= 1.15


def test_equal_rows_of_one_path_are_parted_by_id_alone():
    cuts = range_cuts([(b"", 1.0)], 4)
    assert cuts == [(b"", 2**62), (b"", 2**63), (b"", 3 * 2**62)]
    assert [range_of(cuts, b"", i) for i in (0, 2**62 - 1, 2**62, 2**64 - 1)] == [0, 0, 1, 3]


def test_nothing_known_is_one_range():
    assert range_cuts([], 8) == [] and range_cuts([(b"", 0)], 8) == []
    assert range_of([], b"any", 5) == 0


@pytest.mark.parametrize(
    ("sample", "ranges", "tolerance"),
    [([], 0, 0.1), ([], 2, 0.5), ([], 2, -0.1), ([(b"", -1.0)], 2, 0.1), ([(b"", np.nan)], 2, 0.1)],
)
def test_wrong_arguments_of_range_cuts(sample, ranges, tolerance):
    with pytest.raises(ValueError):
        range_cuts(sample, ranges, tolerance)


def test_input_without_end_goes_by_its_first_chunks():
    first, second = path((1, 2, 3)), path((1, 2, 4))
    assert leading_key(first, 2) == leading_key(second, 2) == path((1, 2))
    assert leading_key(first, 3) != leading_key(second, 3)
    assert leading_key(path(()), 2) == b""


rows = st.lists(st.tuples(symbols, st.integers(0, 30), st.integers(0, 30)), max_size=30)
LIMITS = {"max_rows": 5, "max_tokens": 60, "max_kv_bytes": 50}


@given(rows, st.sampled_from([0.0, 0.1, 0.5]))
def test_superbatches_keep_all_limits_and_are_cut_late_and_cheaply(rows, tolerance):
    rows = sorted((path(s), tokens, kv) for s, tokens, kv in rows)
    paths, tokens, kv = ([row[i] for row in rows] for i in range(3))
    formed = form_superbatches(paths, tokens, kv, tolerance=tolerance, **LIMITS)
    assert [i for batch in formed for i in batch] == list(range(len(rows)))

    def fits(a, b, scale=1.0):
        sizes = (b - a, sum(tokens[a:b]), sum(kv[a:b]))
        return all(x <= scale * y for x, y in zip(sizes, LIMITS.values(), strict=True))

    for batch in formed:
        a, b = batch.start, batch.stop
        assert b > a and (fits(a, b) or b == a + 1)
        if b == len(rows) or not fits(a, a + 1):
            continue
        # every end that was open to it: not below the tolerance, not above a limit
        ends = [e for e in range(a + 1, len(rows)) if fits(a, e)]
        ends = [e for e in ends if e + 1 > len(rows) or not fits(a, e + 1, 1 - tolerance)]
        costs = [common(paths[e - 1], paths[e]) for e in ends]
        assert common(paths[b - 1], paths[b]) == min(costs)
        assert b == max(e for e, cost in zip(ends, costs, strict=True) if cost == min(costs))


def test_a_row_too_large_for_any_superbatch_travels_alone():
    formed = form_superbatches([b""] * 3, [1, 99, 1], [0, 0, 0], **LIMITS)
    assert formed == [range(0, 1), range(1, 2), range(2, 3)]


@pytest.mark.parametrize(
    ("paths", "tokens", "kv", "change"),
    [
        ([b"b" * 8, b"a" * 8], [1, 1], [1, 1], {}),
        ([b""], [1, 1], [1], {}),
        ([b""], [1], [-1], {}),
        ([b""], [1], [1], {"max_rows": 0}),
        ([b""], [1], [1], {"tolerance": 1.0}),
    ],
)
def test_wrong_arguments_of_form_superbatches(paths, tokens, kv, change):
    with pytest.raises(ValueError):
        form_superbatches(paths, tokens, kv, **(LIMITS | change))


@given(st.lists(symbols, max_size=25), st.integers(1, 4))
def test_tokens_saved_is_what_a_prefix_tree_saves(rows, parts):
    groups = [list(range(i, len(rows), parts)) for i in range(parts)]
    expected = 0
    for group in groups:
        chunks = [rows[i][: k + 1] for i in group for k in range(len(rows[i]))]
        expected += 10 * (len(chunks) - len(set(chunks)))
    assert tokens_saved([path(row) for row in rows], groups, chunk=10) == expected


@pytest.mark.parametrize("name", ["bbh", "xquad", "tau", "mooncake"])
def test_superbatches_keep_the_saving_of_one_whole_tree(shared_data, name):
    paths, tokens, chunk = load_paths(name, shared_data)
    everybody = [range(len(paths))]
    whole = tokens_saved(paths, everybody, chunk)
    assert whole > 0.3 * sum(map(len, paths)) // 8 * chunk
    for batches, wanted in ((1, 0.99), (8, 0.97), (64, 0.90)):
        found = groupings(paths, tokens, batches)
        ours = found.pop("path order")
        assert len(ours) >= batches and sorted(i for g in ours for i in g) == [*everybody[0]]
        kept = tokens_saved(paths, ours, chunk)
        assert kept >= wanted * whole
        # no other way to form as many keeps more
        for way, groups in found.items():
            assert tokens_saved(paths, groups, chunk) <= kept, way
        # ranges of equal tokens, each a superbatch, keep as much
        ids = np.random.default_rng(2).integers(0, 2**64, len(paths), np.uint64).tolist()
        cuts = range_cuts(zip(paths, tokens, strict=True), batches)
        members: list[list[int]] = [[] for _ in range(batches)]
        for i, (key, digest) in enumerate(zip(paths, ids, strict=True)):
            members[range_of(cuts, key, digest)].append(i)
        assert tokens_saved(paths, members, chunk) >= wanted * whole
        assert heaviest(paths, tokens, batches, 1.0) <= 1.15
