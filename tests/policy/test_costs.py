from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from surge_beam.policy.costs import CostModel, fit

measurements = st.lists(
    st.tuples(st.integers(1, 500), st.integers(1, 100_000)), min_size=2, max_size=12
)


@given(measurements, st.floats(1e-4, 10), st.floats(1e-6, 0.1))
def test_fit_recovers_exact_costs(pairs: list[tuple[int, int]], tau: float, c: float) -> None:
    ratios = sorted(texts / calls for calls, texts in pairs)
    assume(ratios[-1] > 1.5 * ratios[0])
    calls, texts = [p[0] for p in pairs], [p[1] for p in pairs]
    seconds = [n * tau + m * c for n, m in pairs]
    shares = [n * tau / s for n, s in zip(calls, seconds, strict=True)]
    assume(max(shares) > 1e-3 and min(shares) < 1 - 1e-3)
    model = fit(calls, texts, seconds)
    assert model.tau == pytest.approx(tau, rel=1e-6, abs=1e-12)
    assert model.c == pytest.approx(c, rel=1e-6, abs=1e-12)
    assert model.error < 1e-6
    assert model.seconds(7, 900) == pytest.approx(7 * tau + 900 * c, rel=1e-6)


@given(measurements, st.lists(st.floats(1e-3, 1e3), min_size=12, max_size=12))
def test_fit_of_anything_is_not_negative(
    pairs: list[tuple[int, int]], seconds: list[float]
) -> None:
    model = fit([p[0] for p in pairs], [p[1] for p in pairs], seconds[: len(pairs)])
    assert model.tau >= 0 and model.c >= 0
    assert math.isfinite(model.tau) and math.isfinite(model.c)
    assert model.error >= 0


def test_fit_takes_errors_relative_to_each_measurement() -> None:
    calls, texts = [1, 1, 1, 1, 1], [1, 10, 100, 1000, 100_000]
    exact = [0.02 + 0.001 * n for n in texts]
    noisy = [s * f for s, f in zip(exact, [1.01, 0.99, 1.01, 0.99, 1.01], strict=True)]
    model = fit(calls, texts, noisy)
    assert model.tau == pytest.approx(0.02, rel=0.03)
    assert model.c == pytest.approx(0.001, rel=0.03)
    assert model.error < 0.03


@pytest.mark.parametrize("arguments", [([1], [1], [1.0]), ([1, 2], [1, 2], [1.0])])
def test_too_little_to_fit(arguments: tuple[list[int], list[int], list[float]]) -> None:
    with pytest.raises(ValueError, match="two measurements"):
        fit(*arguments)


def test_decisions() -> None:
    model = CostModel(tau=0.02, c=0.001)
    assert model.break_even_rows == pytest.approx(20)
    assert model.min_rows(loss=0.025) == 800
    assert model.min_rows(loss=0.025, floor=4096) == 4096
    assert model.min_rows(loss=0.025, ceiling=100) == 100
    assert model.aggregation_gain(10) == pytest.approx(2)
    assert model.worth_aggregating(10) and not model.worth_aggregating(1000)
    free = CostModel(tau=0.02, c=0.0)
    assert free.break_even_rows == math.inf
    assert free.min_rows(ceiling=5000) == 5000
    assert free.aggregation_gain(0) == math.inf
