"""Exclusive or mixed batching: the closed forms of arXiv 2606.00516.

With N slots and a queue that is never empty, exclusive batching (EB) decodes until k = theta N of
them are free and then prefills k prompts at once; mixed batching (MB) prefills into every step.
Output lengths are taken as memoryless, a request's decoding ending with probability p0 = 1/mu_O a
step; the results are insensitive to that but for memory, where the age of a slot may be given.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

import numpy as np

from surge_beam.policy.step_costs import StepCosts


@dataclasses.dataclass(frozen=True)
class Workload:
    """What requests look like; tokens.

    Attributes:
      prompt: mean prompt tokens to prefill, mu_L.
      output: mean decode steps of a request, mu_O, at least 1.
      prompt_variance: variance of the prompt.
      age: mean tokens a slot has decoded at a random moment, E[O^2] / 2 E[O]; None takes that of
        memoryless lengths, mu_O.
      age_variance: its variance, E[O^3] / 3 E[O] - age^2; None likewise, mu_O^2.
    """

    prompt: float
    output: float
    prompt_variance: float = 0.0
    age: float | None = None
    age_variance: float | None = None

    @property
    def p0(self) -> float:
        """Share of decoding requests that end in a step."""
        return 1.0 / self.output

    @property
    def tokens(self) -> float:
        """Tokens of a request, mu_L + mu_O."""
        return self.prompt + self.output

    @property
    def mean_age(self) -> float:
        return self.output if self.age is None else self.age

    @property
    def context(self) -> float:
        """Mean tokens in the KV of a decoding request."""
        return self.prompt + self.mean_age


def _threshold(ratio: float) -> float:
    """theta with theta/(1-theta) + ln(1-theta) = ratio, by Newton on w = theta/(1-theta).

    w - ln(1+w) is convex and increasing, and the start lies above the root, so every iterate does
    and the sequence falls.
    """
    if ratio <= 0.0:
        return 0.0
    if math.isinf(ratio):
        return 1.0
    x = math.sqrt(2.0 * ratio)
    w = x + ratio
    for _ in range(64):
        lower = w - (w - math.log1p(w) - ratio) * (1.0 + w) / w
        if not 0.0 < lower < w:
            break
        w = lower
    return w / (1.0 + w)


def _over(numerator: float, denominator: float) -> float:
    if denominator > 0.0:
        return numerator / denominator
    return math.inf if numerator > 0.0 else 0.0


def theta0(costs: StepCosts, p0: float, *, exact: bool = True) -> float:
    """Share of freed slots that triggers a refill (Proposition 1), in [0, 1].

    ``exact`` counts steps as whole ones, -ln(1-p0); otherwise p0, the asymptotic form.
    """
    hazard = -math.log1p(-p0) if exact and p0 < 1.0 else p0
    return _threshold(_over(hazard * costs.alpha_p, costs.alpha_d))


def theta_sqrt(costs: StepCosts, p0: float) -> float:
    """sqrt(2 p0 alpha_p / alpha_d): theta0 where it is small; above it, by a tenth at 0.13."""
    return min(1.0, math.sqrt(_over(2.0 * p0 * costs.alpha_p, costs.alpha_d)))


def theta_shift(
    costs: StepCosts, work: Workload, slots: float, theta: float, growth: float
) -> float:
    """What a growing hazard p0 + growth * t adds to theta0 (Theorem 2), first order in ``growth``.

    It takes every slot to have age 0 when a decode phase begins. No gain over theta0 was seen in
    simulation, so nothing here applies it unasked.
    """
    zeta = -math.log1p(-theta)
    rows = _over(costs.beta_d(work.context) * slots, costs.alpha_d)
    shape = zeta * (theta / (1.0 - theta) - zeta / 2.0) + rows * (zeta - theta)
    return growth * (1.0 - theta) ** 2 / (work.p0**2 * theta) * shape


def beta_eb(costs: StepCosts, work: Workload) -> float:
    """beta_EB^w: seconds a token of exclusive steps without their fixed costs."""
    decode = costs.beta_d(work.context) * work.output
    return (costs.beta_p * work.prompt + decode) / work.tokens


def _fixed_eb(costs: StepCosts, work: Workload, theta: float) -> float:
    """Fixed seconds a token of exclusive steps, times N."""
    zeta = -math.log1p(-theta)
    return (costs.alpha_p + costs.alpha_d * zeta * work.output) / (theta * work.tokens)


def _beta_mb(costs: StepCosts, work: Workload) -> float:
    return costs.beta_m(work.output / work.tokens, work.context)


def _fixed_mb(costs: StepCosts, work: Workload) -> float:
    return costs.alpha_m * (1.0 + work.output) / work.tokens


def throughput_eb(costs: StepCosts, work: Workload, slots: float, theta: float) -> float:
    """TP_EB: tokens a second, prompt and output, of exclusive batching by renewal-reward.

    Within 1% of a simulation for k = theta * slots >= 10; too low for k of 1 to 3, where several
    requests end in one step. ``theta`` in (0, 1).
    """
    return 1.0 / (beta_eb(costs, work) + _fixed_eb(costs, work, theta) / slots)


def throughput_mb(costs: StepCosts, work: Workload, slots: float) -> float:
    """TP_MB: tokens a second of mixed batching; a request holds its slot for 1 + mu_O steps."""
    return 1.0 / (_beta_mb(costs, work) + _fixed_mb(costs, work) / slots)


def advantage(costs: StepCosts, work: Workload, slots: float, theta: float) -> float:
    """Delta(N) = 1/TP_MB - 1/TP_EB in seconds a token (Proposition 4); EB wins where positive."""
    fixed = _fixed_mb(costs, work) - _fixed_eb(costs, work, theta)
    return _beta_mb(costs, work) - beta_eb(costs, work) + fixed / slots


def crossover(costs: StepCosts, work: Workload, theta: float) -> float:
    """N_x: the slots above which EB wins; 0 if it always does, inf if it never does.

    Where EB wins below a number of slots and loses above, which takes a mixed step dearer in its
    fixed cost and cheaper a token, the answer is inf: only large N matter.
    """
    fixed = _fixed_eb(costs, work, theta) - _fixed_mb(costs, work)
    slope = _beta_mb(costs, work) - beta_eb(costs, work)
    if slope <= 0.0:
        return math.inf if fixed > 0.0 or slope < 0.0 else 0.0
    return max(0.0, fixed / slope)


def refill_size(costs: StepCosts, p0: float, slots: int) -> int:
    """k for a finite number of slots, in [1, max(1, slots - 1)].

    The least k with k tau(N-k) - sum_{j > N-k} tau(j) >= alpha_p, where tau(j) = alpha_d/(p0 j) +
    beta_d/p0 is the time to the next completion among j; beta_d cancels. The published rule takes
    a completion a step at most, and fails when N p0 is not small.
    """
    if slots <= 2:
        return 1
    k = np.arange(1, slots, dtype=np.float64)
    tails = np.cumsum(1.0 / np.arange(slots, 1, -1, dtype=np.float64))
    enough = (k / (slots - k) - tails) * costs.alpha_d >= costs.alpha_p * p0
    return int(np.argmax(enough)) + 1 if enough.any() else slots - 1


def round_to_budget(k: int, prompt: float, budget: int) -> int:
    """k moved so that a refill of k prompts fills whole steps of ``budget`` prompt tokens.

    One that fits a step stays. Never below 1; at most half a budget's worth of prompts away.
    """
    if k * prompt <= budget:
        return k
    return max(1, math.floor(round(k * prompt / budget) * budget / prompt))


def memory_safe_slots(
    capacity: float,
    work: Workload,
    theta: float,
    *,
    eps: float = 0.01,
    instants: float = 1.0,
    page_size: int = 1,
) -> int:
    """Largest N whose KV stays within ``capacity`` tokens but for a share ``eps`` of refills.

    N D + z sqrt(N V) <= capacity with D and V mean and variance of a slot's tokens at their
    highest within a cycle, which is right after the refill unless p0 D < 1, and z the normal
    quantile. V is the stationary variance; the published bound has that of one phase only, too
    small at small theta. Other than memoryless lengths enter through the workload's age. The normal
    quantile leaves out that ages are skewed: with fewer than some 300 slots, simulated refills
    exceeded the capacity in up to 2.3 eps.

    Args:
      capacity: tokens of the KV pool.
      work: lengths.
      theta: share of slots that is refilled at once, in [0, 1).
      eps: probability to exceed the capacity at one refill, or at any of ``instants``.
      instants: independent moments that matter, about p0 times the steps.
      page_size: tokens of a page; the last page of a sequence is half empty.
    """
    zeta = -math.log1p(-theta)
    # Of age at a random moment, as it is right after a refill: 1 - theta/2 and 1 - theta^2/12.
    early = (1.0 - theta) * zeta / theta if theta > 0.0 else 1.0
    spread = zeta**2 * (1.0 - theta) / theta**2 if theta > 0.0 else 1.0
    age_variance = work.output**2 if work.age_variance is None else work.age_variance
    mean = work.prompt + early * work.mean_age
    variance = work.prompt_variance + spread * age_variance
    if work.p0 * mean < 1.0:
        peak = min(work.output - mean, zeta * work.output)
        mean = math.exp(-work.p0 * peak) * (mean + peak)
    mean += (page_size - 1) / 2.0
    quantile = max(0.0, statistics.NormalDist().inv_cdf(1.0 - eps / instants))
    margin = quantile * math.sqrt(variance)
    root = (math.sqrt(margin**2 + 4.0 * mean * capacity) - margin) / (2.0 * mean)
    return math.floor(root**2)


def should_refill(decoding: int, waiting: int, slots: int, k: int) -> bool:
    """Whether to turn from decoding to a refill of f = min(waiting, slots - decoding) requests.

    f / decoding >= theta / (1 - theta), without division; with a short queue a smaller refill is
    due once fewer are decoding.
    """
    refill = min(waiting, slots - decoding)
    return refill > 0 and refill * (slots - k) >= decoding * k
