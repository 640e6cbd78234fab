"""The benchmark of prefix detection at a tiny size: what it compares with is right."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.prefix_detection import RadixTree, costs, equal_cuts


def test_equal_cuts_cover_an_order():
    assert equal_cuts([2, 0, 1, 3], [1, 1, 1, 1], 2) == [[2, 0], [1, 3]]


@given(st.lists(st.lists(st.integers(0, 1), max_size=8), max_size=12))
def test_the_radix_tree_knows_the_longest_prefix(prompts):
    tree, seen = RadixTree(), []
    for prompt in prompts:
        prefixes = {tuple(p[:k]) for p in seen for k in range(len(p) + 1)} | {()}
        known = max(k for k in range(len(prompt) + 1) if tuple(prompt[:k]) in prefixes)
        assert tree.match(prompt) == known
        assert tree.insert(prompt) == known
        seen.append(prompt)


def test_every_operation_is_measured():
    random = np.random.default_rng(0)
    prefix = random.integers(0, 100, 200, np.int32)
    prompts = [np.concatenate([prefix, random.integers(0, 100, 80, np.int32)]) for _ in range(30)]
    measured = costs(prompts, slots=4, turns=20)
    assert measured.pop("tokens") == 280
    assert min(measured.values()) > 0
