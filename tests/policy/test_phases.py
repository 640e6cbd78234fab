from __future__ import annotations

import dataclasses
import itertools
import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.policy.batching import Workload, memory_safe_slots, refill_size, theta0
from surge_beam.policy.phases import (
    COOL_DOWN,
    IDLE,
    MIN_DEMAND,
    MIN_SAMPLES,
    AdaptiveBatching,
    ExclusiveBatching,
    LoadEstimator,
    MixedBatching,
    PhaseController,
    PhaseView,
    StepPlan,
    make_controller,
)
from surge_beam.policy.published import PUBLISHED
from surge_beam.policy.step_costs import CAUTIOUS, StepCosts

H200, RTX = PUBLISHED["qwen3-8b/h200"], PUBLISHED["qwen3-8b/rtx-pro-6000"]
SCHEDULES = ("eb", "mb", "eb+")
PREFILL, DECODE = StepPlan(True, False, 0), StepPlan(False, True, 0)


def controller(schedule: str, costs: StepCosts = RTX, kv_tokens: int = 1 << 30) -> PhaseController:
    return make_controller(schedule, costs, kv_tokens=kv_tokens, page_size=16)


def exclusive(k: int | None = None, kv_tokens: int = 1 << 30) -> ExclusiveBatching:
    return ExclusiveBatching(H200, kv_tokens=kv_tokens, page_size=16, k=k)


def view(
    waiting: int, prefilling: int, decoding: int, *, slots: int = 100, kv_short: bool = False
) -> PhaseView:
    return PhaseView(waiting, prefilling, decoding, slots, kv_short, 0.0)


def check(plan: StepPlan, seen: PhaseView, phase: str) -> None:
    """What holds of every plan."""
    assert 0 <= plan.admit <= max(0, min(seen.waiting, seen.slots - seen.occupied))
    assert plan.prefill == bool(plan.prefill and (seen.prefilling or plan.admit))
    assert not (plan.admit and not plan.prefill)
    assert not (plan.decode and not seen.decoding)
    assert (plan.prefill or plan.decode) == bool(seen.waiting or seen.occupied)
    kinds = {(False, False): "idle", (True, False): "prefill", (False, True): "decode"}
    assert phase == kinds.get((plan.prefill, plan.decode), "mixed")


counts = st.one_of(st.integers(0, 3), st.integers(0, 200))


@st.composite
def views(draw: st.DrawFn) -> PhaseView:
    slots = draw(st.one_of(st.just(1), st.integers(1, 200)))
    occupied = draw(st.integers(0, slots))
    decoding = draw(st.integers(0, occupied))
    waiting = draw(counts)
    return view(waiting, occupied - decoding, decoding, slots=slots, kv_short=draw(st.booleans()))


@given(
    st.sampled_from(SCHEDULES),
    st.sampled_from([*PUBLISHED.values(), CAUTIOUS]),
    st.sampled_from([1, 500, 20_000, 1 << 40]),
    st.lists(st.tuples(views(), counts, counts, st.integers(0, 40)), min_size=1, max_size=30),
)
def test_any_view_gets_a_plan_that_goes_on(
    schedule: str,
    costs: StepCosts,
    kv_tokens: int,
    trace: list[tuple[PhaseView, int, int, int]],
) -> None:
    subject = controller(schedule, costs, kv_tokens)
    for seen, rows, tokens, ended in trace:
        plan = subject.plan(seen)
        check(plan, seen, subject.phase)
        if schedule == "eb":
            assert not (plan.prefill and plan.decode)
        # An engine that could not carry it out asks again.
        if seen.decoding and not plan.decode:
            again = subject.plan(seen)
            check(again, seen, subject.phase)
            assert again.decode
        for _ in range(ended):
            subject.completed(rows + 1, tokens + 1)
        subject.stepped(rows, tokens, 0.01, ended)


class Switching:
    """MB and EB in turn, changed at random moments."""

    def __init__(self, rng: random.Random, often: float, k: int | None) -> None:
        self.rng, self.often = rng, often
        self.eb, self.mb = exclusive(k), MixedBatching()
        self.active: ExclusiveBatching | MixedBatching = self.mb
        self.name, self.phase = "switching", "idle"

    def plan(self, seen: PhaseView) -> StepPlan:
        if self.rng.random() < self.often:
            if self.active is self.mb:
                self.eb.enter()
            self.active = self.eb if self.active is self.mb else self.mb
        plan = self.active.plan(seen)
        self.phase = self.active.phase
        return plan

    def completed(self, prompt_tokens: int, output_tokens: int) -> None:
        self.eb.completed(prompt_tokens, output_tokens)

    def stepped(self, rows: int, tokens: int, seconds: float, completions: int) -> None:
        self.eb.stepped(rows, tokens, seconds, completions)


@settings(max_examples=150)
@given(st.sampled_from([*SCHEDULES, "switching"]), st.integers(0, 1 << 32))
def test_no_request_is_lost_or_decoded_twice(schedule: str, seed: int) -> None:
    """A queue with chunked prefill, refused admissions, evictions and arrivals at random."""
    rng = random.Random(seed)
    slots, budget = rng.choice([1, 2, 5, 20]), rng.choice([1, 7, 64])
    pages = rng.randint(12, 40)
    count = rng.randint(1, 150)
    prompts = [rng.randint(1, rng.choice([3, 12])) for _ in range(count)]
    outputs = [rng.randint(1, rng.choice([2, 30])) for _ in range(count)]
    often, refusal, eviction = rng.choice([0.02, 0.3]), rng.choice([0, 0.5]), rng.choice([0, 0.05])
    subject: PhaseController = (
        Switching(rng, often, rng.choice([None, 1, 3]))
        if schedule == "switching"
        else controller(schedule, rng.choice([RTX, CAUTIOUS]), 64)
    )
    decoded, done = [0] * count, [False] * count
    coming, waiting = deque(range(count)), deque[int]()
    prefilling: dict[int, int] = {}
    decoding: list[int] = []
    idle = 0
    for _ in range(60 * sum(outputs) + 60 * sum(prompts) + 1000):
        while coming and (rng.random() < 0.3 or not (waiting or prefilling or decoding)):
            waiting.append(coming.popleft())
        if not (coming or waiting or prefilling or decoding):
            break
        used = sum(prompts[i] for i in prefilling) + sum(prompts[i] for i in decoding)
        seen = view(
            len(waiting),
            len(prefilling),
            len(decoding),
            slots=slots,
            kv_short=used + slots > pages or rng.random() < 0.05,
        )
        plan = subject.plan(seen)
        check(plan, seen, subject.phase)
        rows, ended, tokens = 0, [], 0
        if plan.decode:
            for i in list(decoding):
                decoded[i] += 1
                rows += 1
                if decoded[i] == outputs[i]:
                    decoding.remove(i)
                    ended.append(i)
        refuse = rng.random() < refusal and bool(decoding)
        for _ in range(plan.admit):
            if refuse or (used and used + prompts[waiting[0]] > pages):
                break
            used += prompts[waiting[0]]
            prefilling[waiting.popleft()] = 0
        if plan.prefill:
            for i in list(prefilling):
                chunk = min(budget - tokens, prompts[i] - prefilling[i])
                prefilling[i] += chunk
                tokens += chunk
                if prefilling[i] == prompts[i]:
                    del prefilling[i]
                    decoded[i] += 1
                    if decoded[i] == outputs[i]:
                        ended.append(i)
                    else:
                        decoding.append(i)
        if rng.random() < eviction and (prefilling or decoding):
            if prefilling and rng.random() < 0.5:
                waiting.appendleft(prefilling.popitem()[0])
            elif decoding:
                waiting.appendleft(decoding.pop())
        for i in ended:
            assert not done[i]
            done[i] = True
            subject.completed(prompts[i], outputs[i])
        subject.stepped(rows, tokens, 0.01, len(ended))
        idle = 0 if rows or tokens else idle + 1
        assert idle <= 2
    assert all(done)
    assert decoded == outputs


def test_mixed_batching_fills_slots_and_leaves_a_short_pool_alone() -> None:
    subject = controller("mb")
    assert subject.plan(view(0, 0, 0)) == IDLE
    assert subject.plan(view(30, 5, 80)) == StepPlan(True, True, 15)
    assert subject.plan(view(30, 5, 80, kv_short=True)) == StepPlan(True, True, 0)
    assert subject.plan(view(30, 0, 80, kv_short=True)) == DECODE
    assert subject.plan(view(30, 0, 0, kv_short=True)) == StepPlan(True, False, 30)


def test_exclusive_batching_runs_through_its_cycle() -> None:
    subject = exclusive(k=10)
    assert subject.plan(view(500, 0, 0)) == StepPlan(True, False, 100)
    subject.stepped(0, 1000, 0.1, 0)
    # Two ended with their first token; the fill is for 100 admissions.
    subject.stepped(0, 0, 0.0, 2)
    assert subject.plan(view(460, 30, 8)) == StepPlan(True, False, 60)
    subject.stepped(0, 1000, 0.1, 0)
    # The last chunks keep the machine prefilling, without admitting more.
    assert subject.plan(view(400, 5, 93)) == StepPlan(True, False, 0)
    subject.stepped(0, 100, 0.1, 0)
    for decoding in (98, 95, 91):
        assert subject.plan(view(400, 0, decoding)) == DECODE
        subject.stepped(98, 0, 0.1, 3)
    assert subject.plan(view(400, 0, 90)) == StepPlan(True, False, 10)
    subject.stepped(0, 500, 0.1, 0)
    assert subject.plan(view(393, 0, 97)) == StepPlan(True, False, 3)
    subject.stepped(0, 500, 0.1, 0)
    assert subject.plan(view(390, 0, 100)) == DECODE


def test_a_short_queue_is_refilled_in_smaller_lots() -> None:
    subject = exclusive(k=10)
    assert subject.plan(view(5, 0, 50)) == DECODE
    assert subject.plan(view(5, 0, 46)) == DECODE
    assert subject.plan(view(5, 0, 45)) == StepPlan(True, False, 5)
    assert exclusive(k=10).plan(view(0, 0, 3)) == DECODE


def test_a_short_pool_ends_a_refill_and_holds_the_next() -> None:
    subject = exclusive(k=10)
    assert subject.plan(view(400, 0, 80)) == StepPlan(True, False, 20)
    subject.stepped(0, 500, 0.1, 0)
    assert subject.plan(view(390, 4, 86, kv_short=True)) == DECODE
    subject.stepped(86, 0, 0.1, 30)
    assert subject.plan(view(390, 4, 56, kv_short=True)) == DECODE
    subject.stepped(56, 0, 0.1, 1)
    # Once there is room the chunks come first, then a new refill.
    assert subject.plan(view(390, 4, 55)) == PREFILL
    subject.stepped(0, 100, 0.1, 0)
    assert subject.plan(view(390, 0, 59)) == StepPlan(True, False, 41)


def test_a_refill_that_does_not_materialise_turns_to_decoding() -> None:
    subject = exclusive(k=10)
    assert subject.plan(view(400, 0, 80)) == StepPlan(True, False, 20)
    for _ in range(50):  # nothing ends: there is no use in trying
        assert subject.plan(view(400, 0, 80)) == DECODE
        subject.stepped(80, 0, 0.1, 0)
    subject.stepped(80, 0, 0.1, 1)
    assert subject.plan(view(400, 0, 79)) == StepPlan(True, False, 21)


def test_prompts_that_cannot_go_on_let_others_decode() -> None:
    subject = exclusive(k=10)
    assert subject.plan(view(0, 3, 50)) == PREFILL
    assert subject.plan(view(0, 3, 50)) == DECODE


def test_requests_in_mid_prefill_are_finished_after_a_switch_to_exclusive() -> None:
    mixed, subject = MixedBatching(), exclusive(k=10)
    assert mixed.plan(view(20, 6, 90)).decode
    subject.enter()
    assert subject.plan(view(16, 10, 90)) == PREFILL
    subject.stepped(0, 100, 0.1, 0)
    assert subject.plan(view(16, 0, 100)) == DECODE


def feed(subject: PhaseController, prompt: int, output: int, count: int, rows: int) -> None:
    """Memoryless outputs in a steady state: a completion every output / rows steps."""
    rng = np.random.default_rng(0)
    for length in rng.geometric(1 / output, count):
        subject.completed(prompt, int(length))
        subject.stepped(output, 0, 0.01, 1)
    subject.plan(view(10_000, 0, rows, slots=rows))


def test_limits_follow_the_load_once_there_is_data() -> None:
    subject = exclusive(kv_tokens=300_000)
    cold = round((2 * H200.alpha_p / (256 * H200.alpha_d)) ** 0.5 * 1024)
    assert subject.limits(1024) == (1024, cold)
    feed(subject, 512, 512, MIN_SAMPLES - 1, 400)
    assert subject.work is None
    feed(subject, 512, 512, 1000, 400)
    assert subject.work is not None
    assert subject.work.output == pytest.approx(512, rel=0.01)
    memoryless = Workload(512, 512)
    theta = theta0(H200, memoryless.p0)
    safe = memory_safe_slots(300_000, memoryless, theta, page_size=16)
    slots, k = subject.limits(1024)
    assert 0.75 * safe < slots <= safe
    assert k == refill_size(H200, 1 / 512, slots)
    assert subject.limits(64)[0] == 64


def test_refills_are_rounded_to_the_token_budget() -> None:
    subject = make_controller("eb", RTX, kv_tokens=1 << 30, page_size=16, prefill_budget=8192)
    assert isinstance(subject, ExclusiveBatching)
    feed(subject, 512, 512, 1000, 512)
    free = refill_size(RTX, 1 / 512, 1024)
    slots, k = subject.limits(1024)
    assert (slots, k % 16) == (1024, 0)
    assert abs(k - free) <= 8


def simulate_hazard(
    output: int, slots: int, queue: int, stops: list[int], seed: int
) -> list[tuple[float, float]]:
    """p0 by exposure and 1 / mean of the last 500 completions, after so many steps."""
    rng = np.random.default_rng(seed)
    estimator, recent = LoadEstimator(), deque[int](maxlen=500)
    left = rng.geometric(1 / output, slots)
    length = left.copy()
    found = []
    for step in range(1, max(stops) + 1):
        rows = len(left)
        left = left - 1
        ended = np.flatnonzero(left == 0)
        recent.extend(int(x) for x in length[ended])
        for x in length[ended]:
            estimator.completed(100, int(x))
        estimator.stepped(rows, len(ended))
        new = rng.geometric(1 / output, min(queue, len(ended)))
        queue -= len(new)
        keep = left > 0
        left, length = np.concatenate([left[keep], new]), np.concatenate([length[keep], new])
        if step in stops:
            found.append((estimator.hazard, len(recent) / sum(recent)))
    return found


def test_exposure_is_right_where_completions_alone_are_not() -> None:
    """Ramp-up, steady state and drain at N = 1024 and a mean output of 1024."""
    output, stops = 1024, [200, 1000, 8000, 13_000]
    runs = [simulate_hazard(output, 1024, 8000, stops, seed) for seed in range(4)]
    exposure, completions = np.mean(runs, axis=0).T * output
    assert exposure == pytest.approx(np.ones(4), rel=0.1)
    assert completions[0] > 5
    assert completions[1] > 1.5
    assert completions[3] < 0.7


def test_hazard_with_little_to_go_by() -> None:
    estimator = LoadEstimator()
    assert estimator.hazard == 1 / 256
    assert estimator.workload() is None
    estimator.stepped(0, 50)  # all ended with their first token
    assert estimator.hazard == 0.5


def test_requests_in_step_with_each_other_are_measured_over_a_whole_wave() -> None:
    estimator = LoadEstimator()
    for _ in range(3):
        for _ in range(280):
            estimator.stepped(2000, 0)
        for _ in range(20):
            estimator.stepped(2000, 100)
    assert 1 / 300 < estimator.hazard < 1 / 240


def test_age_is_that_of_memoryless_lengths_or_more() -> None:
    rng = np.random.default_rng(0)
    laws = {"fixed": np.full(500, 200.0), "lognormal": rng.lognormal(np.log(200) - 0.5, 1.0, 500)}
    ages = {}
    for law, lengths in laws.items():
        estimator = LoadEstimator()
        for length in lengths:
            estimator.completed(10, int(length))
            estimator.stepped(int(length), 1)
        work = estimator.workload()
        assert work is not None
        assert work.age is not None and work.age_variance is not None
        ages[law] = work.age / work.output, work.age_variance / work.output**2
    assert ages["fixed"] == (1.0, 1.0)
    second, third = (float(np.mean(laws["lognormal"] ** n) / 200**n) for n in (2, 3))
    assert ages["lognormal"][0] == pytest.approx(second / 2, rel=0.15)
    assert ages["lognormal"][1] == pytest.approx(third / 3 - second**2 / 4, rel=0.25)


def adaptive(costs: StepCosts) -> AdaptiveBatching:
    subject = make_controller("eb+", costs, kv_tokens=1 << 30, page_size=16)
    assert isinstance(subject, AdaptiveBatching)
    return subject


def drive(subject: AdaptiveBatching, demand: int, completions: int) -> list[int]:
    """Completions at which it switched, under a steady demand."""
    switched, before = [], subject.exclusive
    for i in range(completions):
        for _ in range(3):
            subject.plan(view(max(0, demand - 2048), 0, min(demand, 2048), slots=2048))
        subject.completed(512, 256)
        subject.stepped(256, 0, 0.01, 1)
        if subject.exclusive != before:
            switched.append(i)
            before = subject.exclusive
    return switched


def test_adaptive_batching_begins_mixed_and_follows_the_load() -> None:
    subject = adaptive(RTX)
    assert subject.plan(view(500, 0, 0)).admit == 100
    assert not subject.exclusive
    assert len(drive(subject, 512, 400)) == 1
    assert subject.exclusive
    # Far below the crossover of 34.
    assert len(drive(subject, 8, 800)) == 1
    assert not subject.exclusive
    assert len(drive(subject, 1024, 800)) == 1
    assert subject.exclusive


def test_adaptive_batching_stays_mixed_where_nothing_is_gained() -> None:
    for costs, demand in ((CAUTIOUS, 4096), (H200, 32), (RTX, 16)):
        subject = adaptive(costs)
        assert drive(subject, demand, 600) == []
        assert not subject.exclusive


def test_adaptive_batching_never_begins_exclusive_at_little_demand() -> None:
    costs = dataclasses.replace(RTX, alpha_m=RTX.alpha_d)  # a crossover of 3
    subject = adaptive(costs)
    assert drive(subject, MIN_DEMAND - 1, 600) == []
    assert len(drive(subject, MIN_DEMAND + 4, 600)) == 1


def test_a_surge_is_judged_at_once() -> None:
    subject = adaptive(RTX)
    assert drive(subject, 20, 450) == []
    subject.plan(view(580, 0, 20, slots=2048))
    assert subject.exclusive


@given(st.lists(st.sampled_from([4, 20, 40, 600, 3000]), min_size=1, max_size=12))
@settings(max_examples=20)
def test_adaptive_batching_never_switches_twice_within_the_cool_down(loads: list[int]) -> None:
    subject, at, total = adaptive(RTX), [], 0
    for demand in loads:
        at += [total + i for i in drive(subject, demand, 150)]
        total += 150
    assert all(b - a >= COOL_DOWN for a, b in itertools.pairwise(at))


def test_a_gain_within_the_margin_changes_nothing() -> None:
    """At the crossover itself neither mode is left."""
    costs = dataclasses.replace(RTX, curvature=0.0)
    for demand in (32, 36):
        subject = adaptive(costs)
        drive(subject, demand, 600)
        assert not subject.exclusive
        subject.exclusive = True
        assert drive(subject, demand, 600) == []


def test_make_controller() -> None:
    for schedule in SCHEDULES:
        subject = controller(schedule)
        assert (subject.name, subject.phase) == (schedule, "idle")
    with pytest.raises(ValueError, match="schedule"):
        controller("orca")
