from __future__ import annotations

import dataclasses
import math
import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from surge_beam.policy.batching import (
    Workload,
    advantage,
    beta_eb,
    crossover,
    memory_safe_slots,
    refill_size,
    round_to_budget,
    should_refill,
    theta0,
    theta_shift,
    theta_sqrt,
    throughput_eb,
    throughput_mb,
)
from surge_beam.policy.published import PUBLISHED
from surge_beam.policy.step_costs import CAUTIOUS, StepCosts

H200, RTX = PUBLISHED["qwen3-8b/h200"], PUBLISHED["qwen3-8b/rtx-pro-6000"]
WORKLOADS = {
    "decode": Workload(128, 1024),
    "balanced": Workload(512, 512),
    "prefill": Workload(1024, 128),
}
THETA0 = {
    "qwen3-8b/h200": (0.0165, 0.0233, 0.0460),
    "qwen3-8b/rtx-pro-6000": (0.0291, 0.0409, 0.0797),
    "qwen3-30b-a3b/h200": (0.0365, 0.0512, 0.0990),
    "qwen3-30b-a3b/rtx-pro-6000": (0.0503, 0.0702, 0.1342),
}


@pytest.mark.parametrize("device", THETA0)
def test_theta0_table(device: str) -> None:
    for work, published in zip(WORKLOADS.values(), THETA0[device], strict=True):
        exact = theta0(PUBLISHED[device], work.p0)
        assert exact == pytest.approx(published, abs=1e-3)
        assert theta0(PUBLISHED[device], work.p0, exact=False) == pytest.approx(exact, abs=3.1e-4)
        assert theta_sqrt(PUBLISHED[device], work.p0) == pytest.approx(exact, rel=0.1)


@given(st.floats(1e-9, 1e6), st.floats(1e-6, 0.5))
def test_theta0_solves_its_equation(ratio: float, p0: float) -> None:
    costs = dataclasses.replace(CAUTIOUS, alpha_p=ratio, alpha_d=1.0)
    theta = theta0(costs, p0)
    assert 0.0 < theta < 1.0
    assume(theta < 0.999)
    wanted = -math.log1p(-p0) * ratio
    series = math.fsum(theta**n * (1 - 1 / n) for n in range(2, 40)) if theta < 0.3 else None
    found = series if series is not None else theta / (1 - theta) + math.log1p(-theta)
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-18)


def test_theta0_where_a_cost_is_zero() -> None:
    assert theta0(dataclasses.replace(CAUTIOUS, alpha_p=0.0), 0.01) == 0.0
    assert theta0(dataclasses.replace(CAUTIOUS, alpha_d=0.0), 0.01) == 1.0
    assert theta0(dataclasses.replace(CAUTIOUS, alpha_p=0.0, alpha_d=0.0), 0.01) == 0.0


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("device", THETA0)
def test_theta0_maximises_throughput(device: str, name: str) -> None:
    costs, work = PUBLISHED[device], WORKLOADS[name]
    grid = np.linspace(0.001, 0.6, 6000)
    best = grid[np.argmax([throughput_eb(costs, work, 512, t) for t in grid])]
    assert theta0(costs, work.p0, exact=False) == pytest.approx(best, abs=2e-4)


def test_theta_shift_is_the_first_order_effect_of_a_growing_hazard() -> None:
    """Against a numeric optimum in the fluid limit, all slots at age 0 when decoding begins."""
    costs, work, slots = H200, Workload(512, 256), 512
    nodes, weight = np.polynomial.legendre.leggauss(16)

    def rate(theta: float, growth: float) -> float:
        # Survivors exp(-p0 t - growth t^2 / 2) fall to 1 - theta at t = end.
        zeta = -math.log1p(-theta)
        p0 = work.p0
        end = 2 * zeta / (p0 + math.sqrt(p0**2 + 2 * growth * zeta))
        t = (nodes + 1) * end / 2
        rows = slots * float(weight @ np.exp(-p0 * t - growth * t**2 / 2)) * end / 2
        fixed = costs.alpha_d * end + costs.alpha_p
        varying = costs.beta_d(0) * rows + costs.beta_p * slots * theta * work.prompt
        return slots * theta / (fixed + varying)

    def best(growth: float) -> float:
        low, high = 1e-3, 0.3
        golden = (math.sqrt(5) - 1) / 2
        for _ in range(40):
            a, b = high - golden * (high - low), low + golden * (high - low)
            low, high = (low, b) if rate(a, growth) > rate(b, growth) else (a, high)
        return (low + high) / 2

    theta = theta0(costs, work.p0, exact=False)
    assert best(0.0) == pytest.approx(theta, rel=1e-4)
    growth = 1e-2 * work.p0**2
    shift = theta_shift(costs, work, slots, theta, growth)
    assert best(growth) - best(0.0) == pytest.approx(shift, rel=0.05)


def test_throughput_forms_agree_with_the_cycle() -> None:
    """TP_EB as tokens of a cycle over its seconds; section 3 of the paper."""
    work, slots, theta = Workload(512, 256), 512, 0.05
    zeta, k = -math.log(1 - theta), theta * slots
    decode = (H200.alpha_d * zeta + H200.b0 * slots * theta) / work.p0
    seconds = decode + H200.alpha_p + H200.beta_p * k * work.prompt
    assert throughput_eb(H200, work, slots, theta) == pytest.approx(k * work.tokens / seconds)
    inverse = H200.beta_m(1 / 3, 0.0) + H200.alpha_m * 257 / (slots * 768)
    assert throughput_mb(H200, work, slots) == pytest.approx(1 / inverse)


def test_longer_context_makes_both_slower() -> None:
    costs = dataclasses.replace(H200, b1=1e-8)
    for work in WORKLOADS.values():
        slower = throughput_eb(H200, work, 512, 0.05) - throughput_eb(costs, work, 512, 0.05)
        assert slower > 0
        assert throughput_mb(H200, work, 512) > throughput_mb(costs, work, 512)
        extra = 1e-8 * (work.prompt + work.output) * work.output / work.tokens
        assert beta_eb(costs, work) - beta_eb(H200, work) == pytest.approx(extra)


@pytest.mark.parametrize(
    ("costs", "fixed", "wanted"),
    [
        (H200, H200.alpha_p, 220),
        (RTX, RTX.alpha_p, 34),
        (H200, H200.alpha_d, 7),
        (RTX, RTX.alpha_d, 3),
    ],
)
def test_crossover_table(costs: StepCosts, fixed: float, wanted: int) -> None:
    work = Workload(512, 256)
    costs = dataclasses.replace(costs, alpha_m=fixed)
    assert round(crossover(costs, work, theta0(costs, work.p0))) == wanted


@given(
    st.sampled_from(sorted(PUBLISHED)),
    st.floats(16, 4096),
    st.floats(2, 4096),
    st.floats(0, 0.05),
    st.floats(0.3, 3.0),
)
def test_advantage_changes_sign_once_at_the_crossover(
    device: str, prompt: float, output: float, alpha_m: float, scale: float
) -> None:
    costs = PUBLISHED[device]
    costs = dataclasses.replace(costs, alpha_m=alpha_m, beta_m_prefill=costs.beta_m_prefill * scale)
    work = Workload(prompt, output)
    theta = theta0(costs, work.p0)
    x = crossover(costs, work, theta)
    sizes = np.geomspace(1e-3, 1e7, 300)
    signs = np.sign([advantage(costs, work, n, theta) for n in sizes])
    fixed = 1 / throughput_eb(costs, work, 1.0, theta) - beta_eb(costs, work)
    mixed = 1 / throughput_mb(costs, work, 1.0) - costs.beta_m(
        work.output / work.tokens, work.context
    )
    if fixed < mixed:  # the other way round: EB at few slots, if at all
        assert x in (0.0, math.inf)
        assert (np.diff(signs) <= 0).all()
        assert (x == 0.0) == (signs[-1] > 0)
        return
    assert (np.diff(signs) >= 0).all()
    outside = np.abs(sizes / x - 1) > 1e-6 if 0 < x < math.inf else np.full(len(sizes), True)
    assert ((signs > 0) == (sizes > x))[outside].all()
    for n in (7.0, 300.0):
        gap = 1 / throughput_mb(costs, work, n) - 1 / throughput_eb(costs, work, n, theta)
        assert advantage(costs, work, n, theta) == pytest.approx(gap, abs=1e-12)


def test_mixing_that_saves_only_a_fixed_cost_is_never_beaten() -> None:
    work = Workload(300, 200)
    assert crossover(CAUTIOUS, work, theta0(CAUTIOUS, work.p0)) > 1e9


def test_refill_size_table() -> None:
    found = [refill_size(H200, work.p0, 1024) for work in WORKLOADS.values()]
    assert found == [17, 24, 47]
    for work, k in zip(WORKLOADS.values(), found, strict=True):
        assert abs(k - theta0(H200, work.p0) * 1024) < 1


@given(st.sampled_from(sorted(PUBLISHED)), st.floats(1e-4, 0.5), st.integers(1, 300))
def test_refill_size_is_the_least_that_pays(device: str, p0: float, slots: int) -> None:
    costs = PUBLISHED[device]
    k = refill_size(costs, p0, slots)
    assert 1 <= k <= max(1, slots - 1)

    def pays(k: int, slack: float) -> bool:
        tau = [math.inf] + [costs.alpha_d / (p0 * j) + costs.b0 / p0 for j in range(1, slots + 1)]
        waited = math.fsum(tau[j] for j in range(slots - k + 1, slots + 1))
        return k * tau[slots - k] - waited >= costs.alpha_p * slack

    assert not any(pays(j, 1 + 1e-6) for j in range(1, k))
    if k < slots - 1:
        assert pays(k, 1 - 1e-6)


def test_refill_size_at_the_edges() -> None:
    assert refill_size(H200, 0.01, 1) == refill_size(H200, 0.01, 2) == 1
    assert refill_size(dataclasses.replace(H200, alpha_p=0.0), 0.01, 100) == 1
    assert refill_size(dataclasses.replace(H200, alpha_d=0.0), 0.01, 100) == 99


@given(st.integers(1, 2000), st.floats(1, 10_000), st.integers(64, 32_768))
def test_round_to_budget(k: int, prompt: float, budget: int) -> None:
    rounded = round_to_budget(k, prompt, budget)
    assert rounded >= 1
    if k * prompt <= budget:
        assert rounded == k
    elif rounded > 1:
        steps = round(k * prompt / budget)
        assert (
            rounded * prompt <= steps * budget * (1 + 1e-12) < (rounded + 1) * prompt * (1 + 1e-9)
        )
        assert abs(rounded - k) <= budget / prompt / 2 + 1


PAPER, CODE, ADOPTED = (605, 715, 635), (625, 703, 619), (588, 686, 629)


def test_memory_safe_slots_table() -> None:
    capacity, eps = 730_000, 0.01
    for i, work in enumerate(WORKLOADS.values()):
        theta, p0 = theta0(H200, work.p0), work.p0
        assert abs(memory_safe_slots(capacity, work, theta, eps=eps) - ADOPTED[i]) <= 1
        # The two published rules, for which the table has numbers too.
        zeta = -math.log(1 - theta)
        mean = work.prompt + (1 - theta) / (theta * p0) * zeta
        nu = 1 / (p0**2 * work.prompt)
        assert abs((capacity - nu * math.log(1 / eps)) / mean - PAPER[i]) <= 1.5
        sigma = math.sqrt(2 * zeta * (1 + (p0 * work.prompt + zeta / theta) ** 2)) / p0
        spread = sigma * math.sqrt(math.log(1 / eps))
        root = (math.sqrt(spread**2 + 4 * mean * capacity) - spread) / (2 * mean)
        assert abs(root**2 - CODE[i]) <= 1.5


def test_memory_safe_slots_solves_its_inequality() -> None:
    work, theta, capacity = Workload(512, 256, prompt_variance=90_000.0), 0.05, 200_000
    zeta = -math.log(1 - theta)
    mean = 512 + (1 - theta) * zeta / theta * 256 + 15 / 2
    variance = 90_000 + zeta**2 * (1 - theta) / theta**2 * 256**2
    z = statistics.NormalDist().inv_cdf(1 - 0.01 / 50)

    def demand(n: int) -> float:
        return n * mean + z * math.sqrt(n * variance)

    n = memory_safe_slots(capacity, work, theta, eps=0.01, instants=50, page_size=16)
    assert demand(n) <= capacity < demand(n + 1)


@pytest.mark.parametrize("theta", [0.02, 0.3, 0.9])
def test_the_peak_within_the_cycle_counts_where_prompts_are_short(theta: float) -> None:
    work = Workload(1, 256)
    zeta = -math.log(1 - theta)
    mean = 1 + (1 - theta) * zeta / theta * 256
    assert mean / 256 < 1
    t = np.linspace(0, zeta * 256, 20_001)
    peak = float(np.max(np.exp(-t / 256) * (mean + t)))
    variance = zeta**2 * (1 - theta) / theta**2 * 256**2
    z = statistics.NormalDist().inv_cdf(0.99)
    n = memory_safe_slots(50_000, work, theta)
    assert n * peak + z * math.sqrt(n * variance) <= 50_000 * (1 + 1e-6)
    assert (n + 1) * peak + z * math.sqrt((n + 1) * variance) > 50_000 * (1 - 1e-6)


@given(st.integers(0, 3000), st.integers(0, 5000), st.integers(2, 1024), st.data())
def test_should_refill(decoding: int, waiting: int, slots: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, slots - 1))
    due = should_refill(decoding, waiting, slots, k)
    free = max(0, slots - decoding)
    if waiting >= free:  # a long queue: exactly at k free slots
        assert due == (free >= k)
    elif waiting:  # a short one: once as large a share of those decoding would be refilled
        assert due == (waiting * (slots - k) >= decoding * k)
    else:
        assert not due
