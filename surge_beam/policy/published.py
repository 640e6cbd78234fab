"""Step costs published with arXiv 2606.00516: Qwen3-8B and Qwen3-30B-A3B, fp16, eager mode.

Decode was calibrated at a context of 512 only. Mixed coefficients (a, b, c) exist for the 8B model
alone. They were fitted to the inverse throughput of the mixed scheduler, not to step times, and so
hold its fixed cost already; ``alpha_m`` is alpha_p, the default of the authors' code. Both make the
crossover between the phases an indication only. For the 30B model mixing is taken to cost what its
parts cost.
"""

from __future__ import annotations

from surge_beam.policy.step_costs import StepCosts


def _published(
    alpha_p: float,
    beta_p: float,
    alpha_d: float,
    beta_d: float,
    mixed: tuple[float, float, float] | None = None,
) -> StepCosts:
    a, b, c = mixed or (beta_p, beta_d - beta_p, 0.0)
    return StepCosts(
        alpha_p=alpha_p,
        beta_p=beta_p,
        alpha_d=alpha_d,
        b0=beta_d,
        alpha_m=alpha_p,
        beta_m_decode=a + b,
        beta_m_prefill=a,
        curvature=c,
    )


PUBLISHED: dict[str, StepCosts] = {
    "qwen3-8b/h200": _published(
        1.2786e-3, 2.4853e-5, 8.9212e-3, 4.5865e-5, (2.494e-5, 5.193e-5, 1.478e-5)
    ),
    "qwen3-8b/rtx-pro-6000": _published(
        4.6912e-3, 5.0079e-5, 1.0376e-2, 1.0388e-4, (6.293e-5, 19.689e-5, 0.990e-5)
    ),
    "qwen3-30b-a3b/h200": _published(1.7540e-2, 1.3469e-5, 2.4418e-2, 2.4270e-5),
    "qwen3-30b-a3b/rtx-pro-6000": _published(3.1139e-2, 2.6901e-5, 2.2420e-2, 1.2194e-4),
}
