from __future__ import annotations

import pytest

from surge_beam.policy.published import PUBLISHED


def test_names() -> None:
    assert set(PUBLISHED) == {
        f"{model}/{device}"
        for model in ("qwen3-8b", "qwen3-30b-a3b")
        for device in ("h200", "rtx-pro-6000")
    }


def test_mixed_coefficients_are_the_inverse_throughput_of_the_authors_rerun() -> None:
    """1 / beta_MB^e(r) at the three workloads of the H200: the published throughput of the mixed
    scheduler at N = 1024 was 13,974 / 19,509 / 32,228 tokens/s, and the rerun 0 to 20% lower.
    """
    costs = PUBLISHED["qwen3-8b/h200"]
    for decode_share, submitted in ((8 / 9, 13_974), (1 / 2, 19_509), (1 / 9, 32_228)):
        found = 1.0 / costs.beta_m(decode_share, 0.0)
        assert 0.8 * submitted < found < 1.01 * submitted


def test_mixing_costs_its_parts_where_nothing_was_published() -> None:
    for device in ("h200", "rtx-pro-6000"):
        costs = PUBLISHED[f"qwen3-30b-a3b/{device}"]
        apart = costs.prefill_seconds(512) + costs.decode_seconds(64, 512)
        assert costs.mixed_seconds(64, 512, 512) == pytest.approx(apart - costs.alpha_d)
