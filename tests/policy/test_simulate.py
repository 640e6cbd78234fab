from __future__ import annotations

import math
import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.policy.batching import (
    Workload,
    advantage,
    memory_safe_slots,
    refill_size,
    theta0,
    throughput_eb,
)
from surge_beam.policy.phases import ExclusiveBatching, PhaseView, StepPlan, make_controller
from surge_beam.policy.published import PUBLISHED
from surge_beam.policy.simulate import Report, Trace, join_traces, simulate, synthetic_trace
from surge_beam.policy.step_costs import StepCosts

H200, RTX = PUBLISHED["qwen3-8b/h200"], PUBLISHED["qwen3-8b/rtx-pro-6000"]
HAND = StepCosts(
    alpha_p=1,
    beta_p=0.1,
    alpha_d=2,
    b0=0.25,
    b1=0.01,
    alpha_m=1.5,
    beta_m_decode=0.5,
    beta_m_prefill=0.125,
)


def exclusive(costs: StepCosts, k: int) -> ExclusiveBatching:
    return ExclusiveBatching(costs, kv_tokens=1 << 40, page_size=16, k=k)


def steady(costs: StepCosts, trace: Trace, slots: int, k: int) -> Report:
    """EB with a fixed k and a queue that is never empty; a refill is one step."""
    subject = exclusive(costs, k)
    return simulate(subject, costs, trace, slots=slots, prefill_budget=1 << 40, drain=False)


def test_one_request_by_hand() -> None:
    trace = Trace(np.array([10]), np.array([4]), np.array([3.0]), np.array([1]))
    report = simulate(make_controller("eb", HAND, kv_tokens=64, page_size=4), HAND, trace, slots=2)
    decode = [2 + 0.25 + 0.01 * context for context in (11, 12, 13)]
    assert report.ttft == pytest.approx(2.0)
    assert report.tpot == pytest.approx(sum(decode) / 3)
    assert report.seconds == pytest.approx(2.0 + sum(decode))
    assert report.throughput == pytest.approx(14 / report.seconds)
    assert report.steps == {"prefill": 1, "decode": 3}
    assert (report.completed, report.kv_peak, report.switches) == (1, 13, 1)
    assert report.refill_peaks == (10,)


class Reference:
    """The same engine, sequence by sequence and page by page, with nothing counted ahead."""

    def __init__(self, trace: Trace, slots: int, pages: int, page: int, budget: int) -> None:
        self.trace, self.slots, self.pages = trace, slots, pages
        self.page, self.budget = page, budget

    def held(self, x: dict) -> int:
        return -(-(x["target"] if x["context"] < x["target"] else x["context"]) // self.page)

    def run(self, subject, costs: StepCosts) -> dict:  # type: ignore[no-untyped-def]
        trace, clock, preemptions, peak = self.trace, float(self.trace.arrivals[0]), 0, 0
        n, coming, fresh, recomputed = len(trace), 0, 0, 0
        waiting: list[dict] = []
        running: list[dict] = []
        done: list[dict] = []
        while len(done) < n:
            while (
                coming < n
                and trace.arrivals[coming] <= clock
                and coming - len(done) < trace.concurrency[coming]
            ):
                waiting.append(
                    {
                        "prompt": int(trace.prompts[coming]),
                        "target": int(trace.prompts[coming]),
                        "output": int(trace.outputs[coming]),
                        "decoded": 0,
                        "context": 0,
                        "seen": 0,
                        "arrived": clock,
                        "active": False,
                    }
                )
                coming += 1
            if not waiting and not running:
                clock = max(clock, float(trace.arrivals[coming]))
                continue
            used = sum(map(self.held, running))
            filling = [x for x in running if not x["active"]]
            seen = PhaseView(
                len(waiting),
                len(filling),
                len(running) - len(filling),
                self.slots,
                self.pages - used < len(running),
                clock,
            )
            plan = subject.plan(seen)
            ahead = sum(x["target"] - x["context"] for x in filling)
            admit = min(plan.admit, self.slots - len(running))
            while plan.prefill and waiting and admit > 0 and ahead < self.budget:
                need = -(-waiting[0]["target"] // self.page)
                if used + need > self.pages:
                    break
                used += need
                ahead += waiting[0]["target"]
                running.append(waiting.pop(0))
                admit -= 1
            rows: list[dict] = []
            if plan.decode:
                while True:
                    rows = [x for x in running if x["active"]]
                    more = sum(x["context"] % self.page == 0 for x in rows)
                    if sum(map(self.held, running)) + more <= self.pages:
                        break
                    latest = running.pop()
                    latest["seen"] = max(latest["seen"], latest["context"])
                    if latest["active"]:
                        latest["target"] = latest["prompt"] + latest["decoded"]
                        latest["seen"] = latest["target"]
                    latest["active"], latest["context"] = False, 0
                    waiting.insert(0, latest)
                    preemptions += 1
                for x in rows:
                    x["context"] += 1
            context = sum(x["context"] for x in rows) / len(rows) if rows else 0.0
            tokens, finished = 0, []
            for x in running if plan.prefill else []:
                if not x["active"]:
                    for _ in range(min(self.budget - tokens, x["target"] - x["context"])):
                        recomputed += x["context"] < x["seen"]
                        fresh += x["context"] >= x["seen"]
                        x["context"] += 1
                        tokens += 1
                    if x["context"] == x["target"]:
                        finished.append(x)
            clock += costs.step_seconds(len(rows), tokens, context)
            peak = max(peak, sum(x["context"] for x in running))
            ended = []
            for x in rows + finished:
                x["active"] = True
                x["decoded"] += 1
                x.setdefault("first", clock)
                fresh += 1
                if x["decoded"] == x["output"]:
                    x["end"] = clock
                    running.remove(x)
                    ended.append(x)
            done += ended
            for x in ended:
                subject.completed(x["prompt"], x["output"])
            subject.stepped(len(rows), tokens, 0.0, len(ended))
        paces = [(x["end"] - x["first"]) / (x["output"] - 1) for x in done if x["output"] > 1]
        return {
            "seconds": clock - float(trace.arrivals[0]),
            "fresh": fresh,
            "ttft": np.mean([x["first"] - x["arrived"] for x in done]),
            "tpot": np.mean(paces) if paces else 0.0,
            "peak": peak,
            "preemptions": preemptions,
            "recomputed": recomputed,
        }


@settings(max_examples=80)
@given(st.integers(0, 1 << 32), st.sampled_from(["eb", "mb", "eb+"]))
def test_against_a_simulator_that_follows_every_sequence(seed: int, schedule: str) -> None:
    rng = random.Random(seed)
    page, slots, budget = rng.choice([1, 4, 16]), rng.choice([1, 3, 8]), rng.choice([5, 30, 1000])
    count = rng.randint(1, 40)
    trace = synthetic_trace(
        count,
        rng.choice([1, 12]),
        rng.choice([1, 10, 30]),
        seed=seed,
        prompt_law=rng.choice(["fixed", "geometric", "uniform"]),
        output_law=rng.choice(["geometric", "gamma", "lognormal"]),
        rate=rng.choice([math.inf, 0.1]),
        concurrency=rng.choice([1, 4, 100]),
    )
    largest = int(np.max(trace.prompts + trace.outputs))
    pages = -(-largest // page) + rng.choice([0, 3, 40])

    def subject():  # type: ignore[no-untyped-def]
        return make_controller(schedule, HAND, kv_tokens=pages * page, page_size=page)

    report = simulate(
        subject(),
        HAND,
        trace,
        slots=slots,
        kv_tokens=pages * page,
        page_size=page,
        prefill_budget=budget,
    )
    wanted = Reference(trace, slots, pages, page, budget).run(subject(), HAND)
    assert report.completed == count
    assert report.seconds == pytest.approx(wanted["seconds"])
    assert report.throughput * report.seconds == pytest.approx(wanted["fresh"])
    assert wanted["fresh"] == int(np.sum(trace.prompts + trace.outputs))
    assert report.ttft == pytest.approx(wanted["ttft"])
    assert report.tpot == pytest.approx(wanted["tpot"])
    assert report.kv_peak == wanted["peak"] <= pages * page
    assert (report.preemptions, report.recomputed) == (wanted["preemptions"], wanted["recomputed"])


@pytest.mark.parametrize("law", ["fixed", "geometric", "gamma", "uniform", "lognormal"])
def test_lengths_have_their_mean(law: str) -> None:
    trace = synthetic_trace(40_000, 200, 100, seed=2, prompt_law=law, output_law=law, rate=5.0)
    assert trace.prompts.mean() == pytest.approx(200, rel=0.03)
    assert trace.outputs.mean() == pytest.approx(100, rel=0.03)
    assert trace.arrivals[-1] == pytest.approx(40_000 / 5, rel=0.03)
    assert min(trace.prompts.min(), trace.outputs.min()) >= 1
    again = synthetic_trace(40_000, 200, 100, seed=2, prompt_law=law, output_law=law, rate=5.0)
    assert (again.outputs == trace.outputs).all()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="zipf"):
        synthetic_trace(1, 1, 1, seed=0, output_law="zipf")
    trace = synthetic_trace(3, 100, 5, seed=0, output_law="fixed")
    with pytest.raises(ValueError, match="105 tokens"):
        simulate(exclusive(HAND, 1), HAND, trace, slots=2, kv_tokens=104, page_size=4)


def test_a_controller_that_stands_still_is_found() -> None:
    class Idle(ExclusiveBatching):
        def plan(self, view: PhaseView) -> StepPlan:
            return StepPlan(prefill=False, decode=False, admit=0)

    subject = Idle(HAND, kv_tokens=100, page_size=4)
    with pytest.raises(RuntimeError, match="no progress"):
        simulate(subject, HAND, synthetic_trace(3, 10, 5, seed=0), slots=2)


CASES = [
    ("qwen3-8b/h200", 128, 1024),
    ("qwen3-8b/rtx-pro-6000", 512, 512),
    ("qwen3-30b-a3b/rtx-pro-6000", 1024, 128),
]


@cache
def curve(device: str, prompt: int, output: int) -> dict[str, tuple[float, float]]:
    """Simulated throughput, and as a share of TP_EB, at N = 512 and multiples of theta0."""
    costs = PUBLISHED[device]
    trace = synthetic_trace(10_000, prompt, output, seed=1)
    # The prefill decodes a token: mu_O counts decode steps.
    work = Workload(prompt, float(trace.outputs.mean()) - 1)
    theta = theta0(costs, 1 / output)
    sizes = {str(f): round(f * theta * 512) for f in (0.5, 1, 2, 3)} | {"one": 1, "0.7": 358}
    found = {}
    for name, k in sizes.items():
        rate = steady(costs, trace, 512, k).throughput
        found[name] = rate, rate / throughput_eb(costs, work, 512, k / 512) if k >= 10 else 1.0
    return found


@pytest.mark.parametrize("case", CASES)
def test_throughput_formula(case: tuple[str, int, int]) -> None:
    """Within 2% for k >= 10; k = 0.7 N has too few cycles here to say."""
    shares = [share for name, (_, share) in curve(*case).items() if name != "0.7"]
    assert shares == pytest.approx([1.0] * len(shares), rel=0.02)


@pytest.mark.parametrize("case", CASES)
def test_the_optimum_of_theta_is_flat(case: tuple[str, int, int]) -> None:
    rate = {name: rate for name, (rate, _) in curve(*case).items()}
    for name in ("0.5", "2", "3"):
        assert rate[name] > 0.96 * rate["1"]
    assert rate["0.7"] < 0.97 * rate["1"]
    assert rate["one"] < 1.005 * rate["1"]
    if case[0].startswith("qwen3-30b"):  # where the fixed cost of a prefill is large
        assert rate["one"] < 0.95 * rate["1"]


LAWS = {
    "geometric": (None, None),
    # E[O^2] / 2 E[O] and E[O^3] / 3 E[O] - age^2 at sigma 1, in units of mu_O.
    "lognormal": (math.e / 2, math.e**3 / 3 - math.e**2 / 4),
}


@pytest.mark.parametrize("law", LAWS)
def test_kv_exceeds_the_capacity_in_a_share_eps_of_refills(law: str) -> None:
    prompt, output, capacity, eps = 1024, 128, 730_000, 0.01
    age, variance = LAWS[law]
    work = Workload(
        prompt,
        output,
        age=None if age is None else age * output,
        age_variance=None if variance is None else variance * output**2,
    )
    slots = memory_safe_slots(capacity, work, theta0(H200, work.p0), eps=eps)
    k = refill_size(H200, work.p0, slots)
    peaks: list[int] = []
    for seed in range(2):
        trace = synthetic_trace(40_000, prompt, output, seed=seed, output_law=law)
        peaks += steady(H200, trace, slots, k).refill_peaks
    assert np.mean(np.array(peaks) > capacity) <= eps
    # And not because N is far from what there is room for.
    assert np.mean(peaks) > 0.95 * capacity


KV_TOKENS = {"h200": 730_000, "rtx-pro-6000": 440_000}


@cache
def compare(device: str, load: str) -> dict[str, Report]:
    """MB, EB and EB+ as in the paper: prompts of 512 and outputs of 256, up to 2048 slots."""
    if load == "shift of lengths":
        shapes = ((1024, 128), (512, 512), (128, 1024))
        parts = [
            synthetic_trace(2000, p, o, seed=i, prompt_law="geometric", concurrency=2048)
            for i, (p, o) in enumerate(shapes)
        ]
    else:
        loads = {32: 500, 512: 2000, 1024: 2500, 256: 1500, 2048: 4000}
        chosen = loads if load == "shift of concurrency" else {int(load): 2 * loads[int(load)]}
        parts = [
            synthetic_trace(n, 512, 256, seed=c, prompt_law="geometric", concurrency=c)
            for c, n in chosen.items()
        ]
    costs, capacity = PUBLISHED[f"qwen3-8b/{device}"], KV_TOKENS[device]
    found = {}
    for schedule in ("mb", "eb", "eb+"):
        subject = make_controller(
            schedule, costs, kv_tokens=capacity, page_size=16, prefill_budget=8192
        )
        found[schedule] = simulate(
            subject, costs, join_traces(parts), slots=2048, kv_tokens=capacity
        )
        assert found[schedule].completed == sum(map(len, parts))
    return found


def rates(device: str, load: str) -> tuple[float, float, float]:
    found = compare(device, load)
    return found["mb"].throughput, found["eb"].throughput, found["eb+"].throughput


def test_low_concurrency_on_h200() -> None:
    """Published at c = 32: 11,584 / 8,609 / 11,586; the sign holds, the size (26%) does not."""
    mb, eb, adaptive = rates("h200", "32")
    assert eb < 0.96 * mb
    assert adaptive == pytest.approx(mb, rel=0.01)


def test_low_concurrency_on_rtx() -> None:
    """Published at c = 32: EB loses 21 to 26%, EB+ equals MB.

    The constants do not show that loss: the closed form puts the crossover at 34, so that MB wins
    by a hair, and step by step, where a mixed scheduler has steps without prefill too, it is a
    tie. EB+ stays with MB.
    """
    mb, eb, adaptive = rates("rtx-pro-6000", "32")
    work = Workload(512, 256)
    assert advantage(RTX, work, 32, theta0(RTX, work.p0)) < 0
    assert eb == pytest.approx(mb, rel=0.03)
    assert adaptive == pytest.approx(mb, rel=0.01)


def test_medium_concurrency_on_rtx() -> None:
    """Published at c = 512: EB +62.7%, EB+ +62.2% over MB."""
    mb, eb, adaptive = rates("rtx-pro-6000", "512")
    assert 1.4 * mb < eb < 1.8 * mb
    assert 1.4 * mb < adaptive < 1.8 * mb


def test_medium_concurrency_on_h200() -> None:
    """Published at c = 512: 27,464 / 27,207 / 27,460, a tie.

    The constants cannot show it: their mixed coefficients hold the fixed cost twice and put the
    crossover at 220, where the measured one lies above 512. They give EB 13%.
    """
    mb, eb, adaptive = rates("h200", "512")
    assert eb > 1.05 * mb
    assert adaptive > 1.05 * mb


@pytest.mark.parametrize(("device", "gain"), [("h200", 1.03), ("rtx-pro-6000", 1.15)])
def test_high_concurrency(device: str, gain: float) -> None:
    """Published at c = 2048: 26,368 / 27,198 / 27,043 and 8,830 / 13,179 / 13,214.

    On RTX the simulated MB does better than the published one (+25% instead of +49% for EB),
    since it admits nothing while KV is short, which vLLM does. Latencies rank as published on RTX;
    on the H200 MB is behind EB+ in time a token, but level with EB, whose figure the first fill of
    so short a run inflates, and not ahead in time to the first token.
    """
    found = compare(device, "2048")
    mb, eb, adaptive = rates(device, "2048")
    assert eb > gain * mb
    assert adaptive > gain * mb
    assert adaptive == pytest.approx(eb, rel=0.03)
    assert found["mb"].tpot > 1.1 * found["eb+"].tpot
    if device == "rtx-pro-6000":
        assert found["mb"].tpot > found["eb"].tpot
        assert found["mb"].ttft > max(found["eb"].ttft, found["eb+"].ttft)
    assert found["eb"].preemptions <= found["mb"].preemptions


@pytest.mark.parametrize("load", ["shift of lengths", "shift of concurrency"])
@pytest.mark.parametrize("device", ["h200", "rtx-pro-6000"])
def test_load_that_shifts(device: str, load: str) -> None:
    """Published: EB+ leads both by 2 to 13% on the H200 when lengths shift and by 0.6% when
    concurrency does; on RTX it is 36.4% and 22.6% above MB.

    Here EB+ is no worse than the better of them within noise, and far above MB on RTX when
    concurrency shifts. Its lead over EB does not appear: this EB follows the load as well.
    """
    mb, eb, adaptive = rates(device, load)
    assert adaptive > 0.98 * max(mb, eb)
    if device == "rtx-pro-6000":
        assert adaptive > (1.2 if load == "shift of concurrency" else 1.08) * mb
