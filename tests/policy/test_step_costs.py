from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_beam.policy.step_costs import (
    CAUTIOUS,
    StepCosts,
    fit,
    fit_decode,
    fit_mixed,
    fit_prefill,
)

GRID = list(itertools.product((4, 16, 64), (128, 512), (256, 1024)))  # rows, prompt, context
COEFFICIENTS = st.floats(1e-6, 1e-2)


def costs(**changes: float) -> StepCosts:
    return dataclasses.replace(CAUTIOUS, **changes)


@given(st.lists(COEFFICIENTS, min_size=8, max_size=8))
def test_fit_recovers_exact_costs(values: list[float]) -> None:
    names = [
        "alpha_p",
        "beta_p",
        "alpha_d",
        "b0",
        "b1",
        "alpha_m",
        "beta_m_decode",
        "beta_m_prefill",
    ]
    truth = StepCosts(**dict(zip(names, values, strict=True)))
    found = fit(
        [(n, truth.prefill_seconds(n)) for n in (64, 256, 1024)],
        [(n, c, truth.decode_seconds(n, c)) for n, _, c in GRID],
        [(n, p, c, truth.mixed_seconds(n, p, c)) for n, p, c in GRID],
    )
    assert found.error < 1e-6
    for rows, prompt in ((8, 0), (0, 300), (8, 300)):
        wanted = truth.step_seconds(rows, prompt, 700.0)
        assert found.step_seconds(rows, prompt, 700.0) == pytest.approx(wanted, rel=1e-6)


def test_step_seconds_by_hand() -> None:
    model = StepCosts(
        alpha_p=1,
        beta_p=2,
        alpha_d=3,
        b0=4,
        b1=0.5,
        alpha_m=5,
        beta_m_decode=6,
        beta_m_prefill=7,
        curvature=2,
    )
    assert model.step_seconds(0, 0, 0.0) == 0.0
    assert model.step_seconds(0, 10, 0.0) == 1 + 2 * 10
    assert model.step_seconds(10, 0, 8.0) == 3 + (4 + 0.5 * 8) * 10
    # 5 + 6 d + 7 p + b1 context d + curvature d^2 / (d + p)
    assert model.step_seconds(10, 30, 8.0) == pytest.approx(5 + 60 + 210 + 40 + 2 * 100 / 40)
    assert model.beta_m(0.0, 8.0) == 7
    assert model.beta_m(1.0, 8.0) == 6 + 4 + 2


def test_negative_coefficients_are_zero_and_the_rest_is_fitted_again() -> None:
    # Time falls from 100 to 200 tokens: the slope would be negative.
    alpha, beta = fit_prefill([100, 200], [2.0, 1.0])
    assert beta == 0.0
    # argmin over a of (a/2 - 1)^2 + (a - 1)^2
    assert alpha == pytest.approx(1.2)
    # The fixed cost would be negative.
    alpha, beta = fit_prefill([1, 2], [1.0, 4.0])
    assert alpha == 0.0
    assert beta == pytest.approx(1.2)


def test_residuals_are_relative() -> None:
    tokens = [10.0, 20.0, 10_000.0, 20_000.0]
    exact = [1.0 + 0.01 * n for n in tokens]
    alpha, _ = fit_prefill(tokens, [*exact[:3], exact[3] * 1.1])
    assert alpha == pytest.approx(1.0, rel=0.06)


def test_one_context_gives_no_slope_in_it() -> None:
    alpha, b0, b1 = fit_decode([1, 2, 4], [512, 512, 512], [3.0, 5.0, 9.0])
    assert (alpha, b0) == pytest.approx((1.0, 2.0))
    assert b1 == 0.0


def test_the_fixed_cost_is_not_counted_twice() -> None:
    truth = costs(alpha_m=0.05, beta_m_decode=2e-3, beta_m_prefill=1e-3)
    times = [truth.mixed_seconds(n, p, c) for n, p, c in GRID]
    rows, prompts, contexts = zip(*GRID, strict=True)
    alpha_m, decode, prefill = fit_mixed(rows, prompts, contexts, times, b1=0.0)
    found = costs(alpha_m=alpha_m, beta_m_decode=decode, beta_m_prefill=prefill)
    assert found.beta_m(0.25, 0.0) == pytest.approx(0.25 * 2e-3 + 0.75 * 1e-3)
    inverse = [s / (n + p) for s, n, p in zip(times, rows, prompts, strict=True)]
    shares = np.array([n / (n + p) for n, p in zip(rows, prompts, strict=True)])
    trap = np.polynomial.Polynomial.fit(shares, inverse, 2)
    assert trap(0.25) > 1.1 * found.beta_m(0.25, 0.0)


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 2.0], [1.0, 0.0]), ([1.0, 2.0], [1.0, math.nan])],
)
def test_fit_refuses(tokens: list[float], seconds: list[float]) -> None:
    with pytest.raises(ValueError):
        fit_prefill(tokens, seconds)


def test_dict_round_trip() -> None:
    model = costs(b1=1e-7, curvature=3e-6, error=0.02)
    assert StepCosts.from_dict(model.to_dict()) == model


@pytest.mark.parametrize("bad", [-1e-3, math.nan, math.inf, "1", None, True, [1.0]])
@pytest.mark.parametrize("key", ["alpha_p", "b1", "curvature"])
def test_from_dict_names_a_bad_value(key: str, bad: object) -> None:
    with pytest.raises(ValueError, match=key):
        StepCosts.from_dict({**CAUTIOUS.to_dict(), key: bad})


def test_from_dict_names_missing_and_unknown_keys() -> None:
    content = CAUTIOUS.to_dict()
    del content["alpha_m"]
    with pytest.raises(ValueError, match="alpha_m"):
        StepCosts.from_dict(content)
    with pytest.raises(ValueError, match="alpha_q"):
        StepCosts.from_dict({**CAUTIOUS.to_dict(), "alpha_q": 1.0})
    with pytest.raises(ValueError, match="mapping"):
        StepCosts.from_dict([1.0])  # type: ignore[arg-type]
