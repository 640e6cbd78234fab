from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from surge_beam.gpu.randomness import sequence_key, uniform, uniforms

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


@given(st.lists(st.tuples(st.integers(0, MASK), st.integers(0, 1 << 40)), min_size=1))
def test_as_defined_and_each_by_itself(pairs):
    keys, positions = zip(*pairs, strict=True)
    values = uniforms(keys, positions).tolist()
    assert values == [(mix(k ^ mix(p)) >> 11) / 2**53 for k, p in pairs]
    assert values == [float(uniforms([k], [p])[0]) for k, p in pairs]


def test_known_answers():
    assert mix(0) == 0xE220A8397B1DCDAF  # first output of SplitMix64 with seed 0
    assert sequence_key(7, "row-1") == xxhash.xxh3_64_intdigest(b"7:row-1")
    assert sequence_key(7, "row-1") == 0x816DD68296B07B74
    assert [uniform(7, "row-1", p) for p in range(3)] == [
        0.45649635424966517,
        0.9307984464656445,
        0.2690883801853995,
    ]
    assert uniform(-1, "\ud800 床", 0) != uniform(-1, "床", 0)


@pytest.mark.parametrize(("one", "other"), [((1, "2:a"), (12, "a")), ((1, ""), (11, ""))])
def test_pairs_do_not_run_into_each_other(one, other):
    assert sequence_key(*one) != sequence_key(*other)


def test_uniform_and_without_correlation():
    keys = [sequence_key(0, str(row)) for row in range(400)]
    table = np.array([uniforms([key] * 400, range(400)) for key in keys])
    assert table.min() >= 0.0 and table.max() < 1.0
    counts = np.histogram(table, bins=100, range=(0, 1))[0]
    assert ((counts - 1600) ** 2 / 1600).sum() < 160  # chi-square of 99: beyond 1e-4
    centred = table - 0.5
    for product in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(product.mean()) < 4 / 12 / np.sqrt(product.size)
    assert len(np.unique(table)) == table.size
