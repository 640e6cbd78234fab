from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_beam.policy.repetition import loop_period


def naive(ids, max_period, min_tokens, min_repeats):
    for period in range(1, max_period + 1):
        span = max(min_tokens, min_repeats * period)
        cycle = ids[len(ids) - period :]
        repeated = (cycle * math.ceil(span / period))[-span:]
        if len(ids) >= span and ids[-span:] == repeated:
            return period
    return None


small = {
    "max_period": st.integers(1, 6),
    "min_tokens": st.integers(2, 14),
    "min_repeats": st.integers(2, 4),
}


@given(st.lists(st.integers(0, 1), max_size=30), st.fixed_dictionaries(small))
def test_as_defined(ids, limits):
    assert loop_period(ids, **limits) == naive(ids, **limits)


@given(
    st.lists(st.integers(0, 2), max_size=5),
    st.lists(st.integers(0, 2), min_size=1, max_size=7),
    st.integers(0, 30),
    st.fixed_dictionaries(small),
)
def test_as_defined_on_loops(head, cycle, length, limits):
    ids = head + (cycle * 30)[:length]
    assert loop_period(ids, **limits) == naive(ids, **limits)


@given(st.lists(st.integers(0, 50_000), max_size=400), st.integers(1, 64), st.data())
def test_a_loop_is_found_as_soon_as_it_is_long_enough(head, period, data):
    cycle = data.draw(st.permutations(range(60_000, 60_000 + period)))
    loop = list(cycle) * 600
    span = max(256, 8 * period)
    assert loop_period(head + loop[:span]) == period
    assert loop_period(head + loop[: span - 1]) is None
    assert loop_period(head + loop[: span + 1000]) == period
    assert loop_period([*head, *loop[: span + 1000], 7]) is None


def test_a_longer_cycle_is_no_loop():
    assert loop_period(list(range(65)) * 50) is None
    assert loop_period(list(range(64)) * 50) == 64


@pytest.mark.parametrize("tokens", [2, 3, 10, 50_000])
def test_random_tokens_are_no_loop(tokens):
    ids = np.random.default_rng(tokens).integers(0, tokens, 4000).tolist()
    assert not any(loop_period(ids[:n]) for n in range(0, 4001, 7))


def test_real_texts_are_no_loop(shared_data):
    strings = json.loads((shared_data / "naughty_strings" / "blns.json").read_text())
    for unit in (list, str.split):
        ids = [hash(piece) for text in strings for piece in unit(text)]
        assert len(ids) > 1000
        assert not any(loop_period(ids[:n]) for n in range(0, len(ids), 16))


def test_a_list_of_numbers_is_no_loop():
    text = "".join(f"| row {i} | {i * i} |\n" for i in range(1000))
    assert not any(loop_period(text[:n]) for n in range(0, len(text), 16))
    assert loop_period("| --- " * 100) == 6


def test_any_sequence():
    assert loop_period([]) is None
    assert loop_period([1]) is None
    assert loop_period(np.full(300, 4, dtype=np.int32)) == 1
