"""The benchmark of stragglers: its lengths have the tail they should, its times are right."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.stragglers import REFILL, Fleet, Method, Run, Work, heavy_tailed, main, ratios
from surge_beam.policy.step_costs import CAUTIOUS, StepCosts

HAND = StepCosts(
    alpha_p=1, beta_p=0.5, alpha_d=2, b0=0.25, alpha_m=9, beta_m_decode=9, beta_m_prefill=9
)


def fleet(workers: int = 1, slots: int = 2) -> Fleet:
    return Fleet(HAND, workers, slots, between_rounds=100.0, schedule="eb")


def lengths(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("seed", range(3))
def test_lengths_have_the_published_tail(seed: int) -> None:
    found = heavy_tailed(2000, 512, seed)
    p95, p99 = np.quantile(found, (0.95, 0.99))
    assert p95 == pytest.approx(512, rel=0.03)
    assert p99 / p95 == pytest.approx(3.8, rel=0.05)
    assert found.max() == round(9.2 * 512) and found.min() >= 1
    assert np.quantile(found, 0.5) == pytest.approx(512 / np.exp(1.645), rel=0.03)
    # no order: the tail lies anywhere
    assert 800 < np.flatnonzero(found > 512).mean() < 1200


def test_fixed_batches_and_refill_by_hand() -> None:
    prompts, outputs = lengths(4, 4, 4), lengths(3, 2, 1)
    prefill_two, prefill_one = 1 + 0.5 * 8, 1 + 0.5 * 4
    first = prefill_two + (2 + 2 * 0.25) + (2 + 0.25)
    run = Method(superbatch=2)(fleet(), prompts, outputs)
    assert run.seconds == pytest.approx(first + prefill_one)
    assert run.prefilled == 12
    used = 2 * (first - 2.25) + 2.25 + prefill_one
    assert run.occupancy(2) == (pytest.approx(used / 2 / run.seconds), 0.0)
    # what refill does with the free slot costs a prefill only
    assert REFILL(fleet(), prompts, outputs).seconds == pytest.approx(first + prefill_one)
    # a row on each of three workers: the longest counts
    run = REFILL(fleet(workers=3), prompts, outputs)
    assert run.seconds == pytest.approx(prefill_one + 2 * 2.25)


def test_a_round_waits_for_all_and_prefills_again() -> None:
    run = Method(rounds=2, slice_tokens=2)(fleet(workers=2), lengths(4, 4), lengths(1, 4))
    first_round = (1 + 0.5 * 4) + 2.25
    again = (1 + 0.5 * (4 + 2)) + 2.25
    assert run.seconds == pytest.approx(first_round + 100 + again)
    assert run.prefilled == 4 + 4 + 6


rows = st.lists(st.integers(1, 40), min_size=1, max_size=20)


@settings(deadline=None, max_examples=50)
@given(
    rows, st.integers(1, 3), st.integers(1, 4), st.integers(1, 15), st.sampled_from([None, 1, 3])
)
def test_every_row_is_decoded_whole(
    outputs: list[int], workers: int, most: int, slice_tokens: int, superbatch: int | None
) -> None:
    visits: list[tuple[int, int]] = []

    class Noted(Run):
        def visit(self, fleet: Fleet, prompts: np.ndarray, outputs: np.ndarray, start: float):  # type: ignore[no-untyped-def]
            visits.extend(zip(prompts.tolist(), outputs.tolist(), strict=True))
            return super().visit(fleet, prompts, outputs, start)

    method = Method(superbatch, most, slice_tokens)
    prompts = np.full(len(outputs), 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.stragglers.Run", Noted)
        run = method(fleet(workers), prompts, np.array(outputs))
    expected = []
    for output in outputs:
        done = 0
        for number in range(1, most + 1):
            tokens = min(slice_tokens, output - done) if number < most else output - done
            if tokens > 0:
                expected.append((5 + done, tokens))
            done += max(0, tokens)
    assert sorted(visits) == sorted(expected)
    assert run.prefilled == sum(prompt for prompt, _ in expected)
    assert 0 < run.occupancy(2 * workers)[0] <= 1


def test_occupancy_by_hand() -> None:
    run = Run(seconds=10.0, changes=[(4.0, -4), (0.0, 4), (2.0, 4), (8.0, -4)])
    # 4 of 8 slots for two seconds, 8 for two, 4 for four, none for two
    assert run.occupancy(8) == (pytest.approx(40 / 80), pytest.approx(0.2))
    assert run.occupancy(10)[1] == pytest.approx(0.8)


def test_known_lengths_and_clustered_rows() -> None:
    work = Work(64, 16, 64)
    device = Fleet(CAUTIOUS, 2, 8)
    known = Method(longest_first=True)
    assert ratios([REFILL, known], REFILL, device, work, 2)[0] == 1.0
    clustered = dataclasses.replace(work, clustered=True)
    outputs = clustered.draw(0)[1]
    assert sorted(outputs) == sorted(work.draw(0)[1])
    assert outputs[32:].sum() > 1.5 * outputs[:32].sum()
    assert ratios([known], REFILL, device, clustered, 2)[0] < 0.9


def test_the_command(capsys: pytest.CaptureFixture) -> None:
    assert main(["--rows=32", "--p95=16", "--slots=4", "--superbatch=8", "--seeds=1"]) == 0
    printed = capsys.readouterr().out
    for method in ("fixed batches", "refill", "refill, 2 rounds of 128", "longest first"):
        assert f"| 4 | {method} |" in printed
