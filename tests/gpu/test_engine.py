"""The decode loop over the stand-in model, whose text shows every mistake with pages."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.gpu.dummy_runner import END, DummyRunner, next_token
from surge_beam.gpu.engine import Engine
from surge_beam.gpu.randomness import sequence_key
from surge_beam.gpu.runner import OutOfDeviceMemory
from surge_beam.policy.feather import (
    Admission,
    AdmissionView,
    AlwaysAdd,
    CostGate,
    Gate,
    Learner,
)
from surge_beam.policy.residency import ResidencyDecision, ResidencyView, decide
from surge_beam.policy.step_costs import CAUTIOUS
from surge_beam.records import (
    Checkpoint,
    Completion,
    EngineConfig,
    Request,
    SamplingParams,
    SurgeError,
)


def expected(
    request: Request, *, seed: int = 0, context: int = 8192
) -> tuple[tuple[int, ...], str]:
    """Tokens and finish reason of one sequence decoded alone, without pages."""
    params = request.sampling
    ids = list(request.prompt_ids)
    key = sequence_key(seed if params.seed is None else params.seed, request.custom_id)
    limit = min(params.max_tokens or context, context - len(ids))
    out: list[int] = []
    while True:
        token = next_token(np.array(ids, np.int32), key, len(out), greedy=params.greedy)
        ids.append(token)
        out.append(token)
        if (token == END and not params.ignore_eos) or token in params.stop_token_ids:
            return tuple(out), "stop"
        if len(out) == limit:
            return tuple(out), "length"


def engine(
    *,
    pages: int = 64,
    page_size: int = 4,
    runner: DummyRunner | None = None,
    decide=decide,
    admission: Admission | str = "prefix",
    **fields,
) -> Engine:
    name = admission if isinstance(admission, str) else "prefix"
    config = EngineConfig(model="dummy", page_size=page_size, admission=name, **fields)
    runner = runner or DummyRunner(pages, page_size)
    own = None if isinstance(admission, str) else admission
    return Engine(config, runner=runner, decide=decide, admission=own)


def requests(count: int, *, shared: int = 0, seed: int = 0, longest: int = 30) -> list[Request]:
    rng = random.Random(seed)
    prefix = tuple(rng.randrange(1, 256) for _ in range(shared))
    return [
        Request(
            custom_id=f"r{i}",
            prompt_ids=prefix + tuple(rng.randrange(1, 256) for _ in range(rng.randint(1, 12))),
            sampling=SamplingParams(
                max_tokens=rng.randint(1, longest), temperature=float(rng.random() < 0.3)
            ),
        )
        for i in range(count)
    ]


def check(done: list[Completion], wanted: list[Request], **options) -> None:
    assert sorted(c.custom_id for c in done) == sorted(r.custom_id for r in wanted)
    by_id = {r.custom_id: r for r in wanted}
    for completion in done:
        tokens, reason = expected(by_id[completion.custom_id], **options)
        assert completion.token_ids == tokens
        assert completion.finish_reason == reason
        assert completion.completion_tokens == len(tokens)
        assert completion.prompt_tokens == len(by_id[completion.custom_id].prompt_ids)


@pytest.mark.parametrize("schedule", ["eb", "mb", "eb+"])
@pytest.mark.parametrize("slots", [1, 3, 32])
@pytest.mark.parametrize("share", [True, False])
def test_every_schedule_decodes_the_same_tokens(schedule, slots, share):
    wanted = requests(60, shared=21)
    with engine(
        pages=400,
        max_sequences=slots,
        schedule=schedule,
        share_prefixes=share,
        max_prefill_tokens=16,
    ) as own:
        done = own.generate(wanted)
        assert [c.custom_id for c in done] == [r.custom_id for r in wanted]
        check(done, wanted)
        assert own.pool.used == 0
        own.pool.check([])
        saved = own.stats.prefix_tokens_saved
        assert saved == sum(c.cached_tokens for c in done)
        assert (saved >= 59 * 20) if share else (saved == 0)
        prompts = sum(len(r.prompt_ids) for r in wanted)
        assert own.stats.prefill_tokens + saved == prompts
        assert own.stats.sampled_tokens == sum(c.completion_tokens for c in done)


class NeverAdd(AlwaysAdd):
    def add(self, view: AdmissionView) -> bool:
        return False


class Coin(AlwaysAdd):
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def add(self, view: AdmissionView) -> bool:
        return self.rng.random() < 0.5


# a row of its own is free, every token that it has not in common with others costs
READING = dataclasses.replace(CAUTIOUS, b0=0.0, b1=1.0)


def families(groups: int, each: int, *, shared: int = 16, seed: int = 0) -> list[Request]:
    """Requests of groups that share a prefix, one of each group in turn."""
    rng = random.Random(seed)
    prefixes = [tuple(rng.randrange(1, 256) for _ in range(shared)) for _ in range(groups)]
    return [
        Request(
            custom_id=f"{group}-{member}",
            prompt_ids=(*prefixes[group], *(rng.randrange(1, 256) for _ in range(3))),
            sampling=SamplingParams(max_tokens=rng.randint(1, 12), ignore_eos=True),
        )
        for member in range(each)
        for group in range(groups)
    ]


@pytest.mark.parametrize("gate", ["prefix", "learned", "cost", "fcfs", "never", "coin", "reading"])
@pytest.mark.parametrize("schedule", ["eb", "mb"])
def test_every_admission_decodes_the_same_tokens(gate, schedule):
    gates: dict[str, Gate] = {
        "never": NeverAdd(),
        "coin": Coin(random.Random(1)),
        "reading": CostGate(READING),
        "learned": Learner(),
    }
    wanted = families(5, 24)
    admission = Admission(gates[gate], floor=3) if gate in gates else gate
    with engine(pages=400, max_sequences=12, schedule=schedule, admission=admission) as own:
        done = own.generate(wanted)
        check(done, wanted)
        own.pool.check([])
        stats = own.stats
        assert stats.prefix_tokens_saved == sum(c.cached_tokens for c in done) > 5 * 20 * 16
        assert stats.prefill_tokens + stats.prefix_tokens_saved == 5 * 24 * 19
        assert stats.admissions == len(wanted)
        if gate in ("never", "coin", "reading"):
            assert stats.refusals > 0
        elif gate != "learned":
            assert stats.refusals == 0


def admitted(own: Engine, wanted: list[Request]) -> list[str]:
    """The order in which requests got their slot, but for those that ended in their first step;
    all are there from the beginning.
    """
    for request in wanted:
        own.submit(request)
    order: list[str] = []
    while own.step():
        order += [s.request.custom_id for s in own._running if s.request.custom_id not in order]
    check(list(own._finished), wanted)
    return order


def test_relatives_are_admitted_together():
    wanted = [
        dataclasses.replace(r, sampling=SamplingParams(max_tokens=3 + i % 4, ignore_eos=True))
        for i, r in enumerate(families(3, 8))
    ]
    by_arrival = [r.custom_id for r in wanted]
    assert admitted(engine(max_sequences=4, admission="fcfs"), wanted) == by_arrival
    groups = [name[0] for name in admitted(engine(max_sequences=4), wanted)]
    # a group whose only member so far has ended again is no reason to go on with it
    assert 2 <= sum(a != b for a, b in itertools.pairwise(groups)) <= 4


@pytest.mark.parametrize("admission", ["prefix", "learned", "cost", "fcfs"])
def test_where_nothing_is_shared_it_is_first_come_first_served(admission):
    own = engine(max_sequences=5, share_prefixes=False, admission=admission, pages=200)
    wanted = [
        dataclasses.replace(r, sampling=SamplingParams(max_tokens=2 + i % 5, ignore_eos=True))
        for i, r in enumerate(families(3, 8))
    ]
    assert admitted(own, wanted) == [r.custom_id for r in wanted]
    own = engine(max_sequences=5, admission=admission, pages=200)
    strangers = [
        dataclasses.replace(r, prompt_ids=(i + 1,) * (1 + 7 * i % 23)) for i, r in enumerate(wanted)
    ]
    assert admitted(own, strangers) == [r.custom_id for r in strangers]


def test_a_small_pool_computes_a_prefix_once_where_relatives_come_together():
    """In order of arrival each prefix is forgotten before its next request comes."""
    wanted = families(6, 12, shared=64)
    computed = {}
    for admission in ("fcfs", "prefix"):
        with engine(pages=60, max_sequences=2, admission=admission) as own:
            admitted(own, wanted)
            computed[admission] = own.stats.prefill_tokens
    assert computed["fcfs"] > 3 * computed["prefix"]


@pytest.mark.parametrize("gate", [AlwaysAdd(), NeverAdd()])
@pytest.mark.parametrize("schedule", ["eb", "mb"])
def test_a_stranger_among_relatives_is_admitted_within_a_bound(gate, schedule):
    """Relatives come for ever; what is admitted before the stranger is what was before it, its
    patience, and whoever of the next admissions of the same step went first.
    """
    own = engine(
        pages=200,
        max_sequences=6,
        schedule=schedule,
        admission=Admission(gate, floor=2, patience=20, patience_stops=10),
    )
    relatives = families(1, 400)
    stranger = Request(custom_id="stranger", prompt_ids=tuple(range(30, 60)))
    order = [c.custom_id for c in own.stream([*relatives[:8], stranger, *relatives[8:]])]
    assert order.index("stranger") < 8 + 20 + 16 + 6


@pytest.mark.parametrize("schedule", ["eb", "mb"])
def test_a_refused_stranger_is_asked_about_once_a_step_and_comes_in_at_last(schedule):
    own = engine(
        pages=200,
        max_sequences=12,
        schedule=schedule,
        admission=Admission(NeverAdd(), floor=2, patience_stops=3),
    )
    lengths = [20, 40, 60, 100, 100, 100, 100]
    relatives = [
        dataclasses.replace(r, sampling=SamplingParams(max_tokens=n, ignore_eos=True))
        for r, n in zip(families(1, len(lengths)), lengths, strict=True)
    ]
    stranger = Request(custom_id="stranger", prompt_ids=tuple(range(30, 60)))
    for request in [*relatives, stranger]:
        own.submit(request)
    refused = [0]
    while own.step():
        refused.append(own.stats.refusals)
    assert max(b - a for a, b in itertools.pairwise(refused)) == 1 and refused[-1] == 3
    order = [c.custom_id for c in own._finished]
    assert order.index("stranger") < len(relatives) - 1
    check(list(own._finished), [*relatives, stranger])


def test_a_prefix_is_computed_once_although_all_begin_together():
    wanted = [Request(custom_id=str(i), prompt_ids=(*range(1, 41), 100 + i)) for i in range(8)]
    with engine(schedule="mb", max_sequences=8, max_prefill_tokens=16) as own:
        check(own.generate(wanted), wanted)
        assert own.stats.prefill_tokens == 40 + 8


def test_a_small_pool_parks_and_evicts_and_changes_nothing():
    wanted = requests(80, shared=9, longest=60)
    for host, pages in ((1 << 20, 24), (0, 24), (8 * 16, 24), (1 << 20, 20)):
        with engine(pages=pages, max_sequences=16, schedule="mb", host_kv_bytes=host) as own:
            check(own.generate(wanted), wanted)
            own.pool.check([])
            assert own.stats.parks + own.stats.evictions > 10
            assert bool(own.stats.parks) == bool(host) and own.stats.resumes <= own.stats.parks
            assert own.stats.peak_pages <= pages


def test_what_can_never_fit_ends_as_capacity_and_the_rest_goes_on():
    wanted = requests(10, longest=8)
    big = Request(custom_id="big", prompt_ids=tuple(range(1, 70)))
    growing = Request(
        custom_id="growing",
        prompt_ids=(5,),
        sampling=SamplingParams(max_tokens=500, ignore_eos=True),
    )
    with engine(pages=16, max_sequences=4) as own:
        done = {c.custom_id: c for c in own.stream([*wanted[:5], big, growing, *wanted[5:]])}
        assert done["big"].finish_reason == "capacity" and "kv_bytes" in (done["big"].error or "")
        assert done["growing"].finish_reason == "capacity"
        assert done["growing"].token_ids == expected(growing)[0][:64]
        check([done[r.custom_id] for r in wanted], wanted)
        own.pool.check([])


def test_requests_that_cannot_be_decoded_are_completions_with_a_reason():
    own = engine(max_context=20)
    for name, ids in (
        ("none", ()),
        ("negative", (-1,)),
        ("beyond", (256,)),
        ("huge", (1 << 70,)),
        ("long", (1,) * 20),
    ):
        own.submit(Request(custom_id=name, prompt_ids=ids))
    own.submit(Request(custom_id="fits", prompt_ids=(1,) * 19))
    done = {c.custom_id: c for c in own.completions()}
    for name, word in (
        ("none", "no tokens"),
        ("negative", "vocabulary"),
        ("beyond", "vocabulary"),
        ("huge", "vocabulary"),
        ("long", "20"),
    ):
        assert done[name].finish_reason == "error" and word in (done[name].error or "")
    assert done["fits"].finish_reason == "length" and done["fits"].completion_tokens == 1
    own.submit(Request(custom_id="twice", prompt_ids=(1,)))
    with pytest.raises(SurgeError, match="twice"):
        own.submit(Request(custom_id="twice", prompt_ids=(1,)))
    own.close()
    with pytest.raises(SurgeError, match="closed"):
        own.submit(Request(custom_id="late", prompt_ids=(1,)))


def test_cancelled_wherever_they_are():
    own = engine(pages=12, max_sequences=4, host_kv_bytes=1 << 20, schedule="mb")
    wanted = [
        Request(
            custom_id=str(i),
            prompt_ids=(i + 1,) * 6,
            sampling=SamplingParams(max_tokens=200, ignore_eos=True),
        )
        for i in range(12)
    ]
    for request in wanted:
        own.submit(request)
    for _ in range(25):
        own.step()
    assert own._parked and own._running and own._waiting
    assert not own.cancel("unknown")
    for request in wanted:
        assert own.cancel(request.custom_id)
    done = list(own.completions())
    assert sorted(c.custom_id for c in done) == sorted(r.custom_id for r in wanted)
    assert {c.finish_reason for c in done} == {"cancelled"}
    own.pool.check([])
    assert not own._waiting and not own._waiting._levels
    assert not own.checkpoints()


def test_a_checkpoint_of_any_step_goes_on_in_another_engine(tmp_path):
    wanted = requests(12, shared=6, seed=3)
    own = engine(pages=40, max_sequences=5, seed=7)
    for request in wanted:
        own.submit(request)
    done: list[Completion] = []
    steps = 0
    while True:
        texts = [c.to_json() for c in own.checkpoints()]
        other = engine(pages=200, max_sequences=3, schedule="eb", seed=999)
        rest = list(other.stream(Checkpoint.from_json(t) for t in texts))
        finished = {c.custom_id for c in done} | {c.custom_id for c in own._finished}
        check(rest, [r for r in wanted if r.custom_id not in finished], seed=7)
        if not own.step():
            break
        steps += 1
        done += own._finished
        own._finished.clear()
    assert steps > 20


def test_a_checkpoint_goes_on_in_a_fresh_process():
    request = requests(1, seed=11)[0]
    request = dataclasses.replace(
        request, sampling=SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True)
    )
    own = engine(seed=5)
    own.submit(request)
    for _ in range(17):
        own.step()
    (checkpoint,) = own.checkpoints()
    assert 0 < len(checkpoint.output_ids) < 40
    program = (
        "import sys\n"
        "from surge_beam.gpu.engine import Engine\n"
        "from surge_beam.records import Checkpoint, EngineConfig\n"
        "engine = Engine(EngineConfig(model='dummy'))\n"
        "(done,) = engine.stream([Checkpoint.from_json(sys.stdin.read())])\n"
        "print(*done.token_ids)\n"
        "assert 'torch' not in sys.modules\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        input=checkpoint.to_json(),
        text=True,
        capture_output=True,
        check=True,
    ).stdout
    assert tuple(map(int, output.split())) == expected(request, seed=5)[0]


def test_out_of_memory_makes_steps_smaller_and_is_remembered():
    wanted = requests(40, shared=10)
    runner = DummyRunner(400, 4, memory=11)
    with engine(runner=runner, max_sequences=32, max_prefill_tokens=64) as own:
        check(own.generate(wanted), wanted)
        assert own.stats.memory_ceiling is not None and own.stats.memory_ceiling <= 11
        own.pool.check([])
    tiny = DummyRunner(400, 4, memory=0)
    with engine(runner=tiny) as own:
        done = own.generate(wanted[:3])
        assert {c.finish_reason for c in done} == {"capacity"}


def test_logits_that_are_no_numbers_end_one_row():
    class Poisoned(DummyRunner):
        def step(self, batch):
            sampled = super().step(batch)
            bad = [i for i, row in enumerate(batch.rows) if batch.ids[row] == 13]
            sampled.token_ids[bad] = -1
            return dataclasses.replace(sampled, bad=bad)

    wanted = requests(20)
    poison = Request(custom_id="poison", prompt_ids=(1, 13))
    with engine(runner=Poisoned(200, 4)) as own:
        done = own.generate([*wanted, poison])
        assert done[-1].finish_reason == "error" and "numbers" in (done[-1].error or "")
        good = [r for r in wanted if 13 not in r.prompt_ids[-1:] + expected(r)[0]]
        assert len(good) > 5
        check([c for c in done if c.custom_id in {r.custom_id for r in good}], good)
        own.pool.check([])


def test_after_a_step_that_raised_the_engine_goes_on():
    class Failing(DummyRunner):
        failures = 0

        def step(self, batch):
            if self.failures < 12 and len(batch.ids) > len(batch.counts):
                self.failures += 1
                raise RuntimeError("the device hiccups")
            return super().step(batch)

    wanted = requests(30, shared=30)
    own = engine(runner=Failing(200, 4), max_sequences=6, max_prefill_tokens=8, schedule="mb")
    for request in wanted:
        own.submit(request)
    done: list[Completion] = []
    raised = 0
    while len(done) < len(wanted):
        try:
            done += own.completions()
        except RuntimeError:
            raised += 1
            done += own._finished
            own._finished.clear()
            own.pool.check([s.table for s in own._running])
            assert len(own.checkpoints()) == len(wanted) - len(done)
    assert raised == 12
    check(done, wanted)


@pytest.mark.parametrize("budget, slots", [(16, 4), (64, 64)])
def test_short_prompts_do_not_overtake_a_long_one_for_ever(budget, slots):
    short = [
        Request(custom_id=str(i), prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=2 + i % 7))
        for i in range(400)
    ]
    long = Request(custom_id="long", prompt_ids=tuple(range(1, 200)))
    own = engine(
        pages=600, page_size=16, schedule="mb", max_sequences=slots, max_prefill_tokens=budget
    )
    order = [c.custom_id for c in own.stream([*short[:slots], long, *short[slots:]])]
    assert order.index("long") < 250


def test_one_step_without_memory_changes_nothing():
    class Once(DummyRunner):
        failed = False

        def step(self, batch):
            if not self.failed:
                self.failed = True
                raise OutOfDeviceMemory("somebody else has it")
            return super().step(batch)

    wanted = requests(5)
    own = engine(runner=Once(200, 4))
    check(own.generate(wanted), wanted)
    assert own.stats.memory_ceiling is None


def test_leaving_early_takes_ones_requests_along():
    own = engine(max_sequences=2)
    wanted = requests(20)
    for _ in own.stream(wanted):
        break

    def broken():
        yield wanted[3]
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="source"):
        own.generate(broken())
    assert not own._alive and own.pool.used == 0
    check(own.generate(wanted), wanted)


def test_two_requests_of_one_name_are_refused():
    same = Request(custom_id="same", prompt_ids=(1,))
    with pytest.raises(SurgeError, match="same"):
        engine().generate([same, same])


def test_priority_goes_first():
    own = engine(max_sequences=1, schedule="mb")
    for name, priority in (("low", 0), ("high", 5)):
        own.submit(Request(custom_id=name, prompt_ids=(1, 2), priority=priority))
    assert [c.custom_id for c in own.completions()] == ["high", "low"]


@pytest.mark.parametrize("slots", [1, 3, 32])
def test_sampled_text_does_not_depend_on_batch_or_order(slots):
    wanted = [
        dataclasses.replace(r, sampling=SamplingParams(max_tokens=20, temperature=1.0))
        for r in requests(30, seed=4)
    ]
    shuffled = random.Random(slots).sample(wanted, len(wanted))
    with engine(max_sequences=slots, seed=3) as own:
        check(own.generate(shuffled), wanted, seed=3)


def test_any_number_of_requests_passes_in_little_memory():
    def many(count: int):
        for i in range(count):
            yield Request(custom_id=str(i), prompt_ids=(1 + i % 200, 2, 3))

    blocks = {}
    with engine(pages=64, max_sequences=16) as own:
        for count, _ in enumerate(own.stream(many(6_000)), 1):
            assert len(own._alive) <= 4 * 16
            if count in (2_000, 6_000):
                gc.collect()
                blocks[count] = sys.getallocatedblocks()
    assert count == 6_000
    # a request alone is more than ten blocks
    assert blocks[6_000] - blocks[2_000] < 2 * 4_000


class Chaos:
    """The decision, and at random someone parked or evicted who need not be."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.budget = 200

    def __call__(self, view: ResidencyView) -> ResidencyDecision:
        decision = decide(view)
        touched = {*decision.park, *decision.evict, *decision.grow, *decision.exhausted}
        free = [s for s in view.running if s.index not in touched]
        if self.budget and len(view.running) > 1 and free and self.rng.random() < 0.3:
            self.budget -= 1
            victim = self.rng.choice(free)
            room = view.host_free - sum(
                s.host_pages for s in view.running if s.index in decision.park
            )
            if victim.parkable and victim.host_pages <= room and self.rng.random() < 0.6:
                return dataclasses.replace(decision, park=(*decision.park, victim.index))
            return dataclasses.replace(decision, evict=(*decision.evict, victim.index))
        return decision


@settings(max_examples=120)
@given(data=st.data())
def test_random_traces_lose_and_double_nothing(data):
    """At least five waves of requests that share prefixes, over pools down to one page, with
    cancels, failing copies, out-of-memory steps and forced parking and eviction, in every order
    of admission.
    """
    draw = data.draw
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    pages = draw(st.integers(1, 30))
    slots = draw(st.integers(1, 8))
    fails = draw(st.sampled_from([0.0, 0.3, 1.0]))
    memory = draw(st.sampled_from([None, 3, 9]))
    runner = DummyRunner(
        pages, page_size, memory=memory, copy_fails=lambda: rng.random() < fails, context_length=48
    )
    gates = [AlwaysAdd(), NeverAdd(), Coin(rng), CostGate(READING), Learner(), Learner(CAUTIOUS)]
    admission = Admission(
        draw(st.sampled_from(gates)),
        prefix_order=draw(st.booleans()),
        floor=draw(st.integers(2, 4)),
        patience=draw(st.sampled_from([1, 5, 64])),
        patience_stops=draw(st.sampled_from([1, 5, 512])),
    )
    own = engine(
        runner=runner,
        page_size=page_size,
        decide=Chaos(rng),
        admission=admission,
        max_sequences=slots,
        schedule=draw(st.sampled_from(["eb", "mb", "eb+"])),
        host_kv_bytes=draw(st.sampled_from([0, 64, 1 << 20])),
        max_prefill_tokens=draw(st.sampled_from([1, 8, 64])),
        share_prefixes=draw(st.booleans()),
    )
    prefixes = [tuple(rng.randrange(1, 256) for _ in range(rng.randint(0, 12))) for _ in range(3)]
    wanted: dict[str, Request] = {}
    cancelled: set[str] = set()
    done: list[Completion] = []
    steps = 0

    def advance(limit: int) -> bool:
        nonlocal steps
        for _ in range(limit):
            steps += 1
            assert steps < 3_000, "no end in sight"
            if not own.step():
                return False
            done.extend(own._finished)
            own._finished.clear()
            own.pool.check([s.table for s in own._running])
            known = [key for level in own._waiting._levels.values() for key in level.tree._by_key]
            assert len(known) == len(own._alive) and set(known) == set(own._alive.values())
            having = len(own._running) + len(own._parked)
            assert len(own._waiting) == len(known) - having
        return True

    for wave in range(5):
        for i in range(rng.randint(1, 6)):
            ids = rng.choice(prefixes) + tuple(
                rng.randrange(1, 256) for _ in range(rng.randint(1, 6))
            )
            request = Request(
                custom_id=f"{wave}-{i}",
                prompt_ids=ids,
                priority=rng.randrange(2),
                sampling=SamplingParams(
                    max_tokens=rng.choice([1, 3, 20, None]), temperature=rng.choice([0.0, 1.0])
                ),
            )
            wanted[request.custom_id] = request
            own.submit(request)
        advance(rng.randint(0, 15))
        if wanted and rng.random() < 0.5:
            name = rng.choice(list(wanted))
            if own.cancel(name):
                cancelled.add(name)
    while advance(100):
        pass
    done.extend(own._finished)

    assert sorted(c.custom_id for c in done) == sorted(wanted)
    for completion in done:
        tokens, reason = expected(wanted[completion.custom_id], context=48)
        if completion.finish_reason in ("capacity", "cancelled"):
            assert completion.token_ids == tokens[: completion.completion_tokens]
            assert completion.finish_reason == "capacity" or completion.custom_id in cancelled
        else:
            assert (completion.token_ids, completion.finish_reason) == (tokens, reason)
    whole = [c for c in done if len(wanted[c.custom_id].prompt_ids) + 48 <= pages * page_size]
    if memory is None:
        assert not any(c.finish_reason == "capacity" for c in whole)
    own.pool.check([])
    assert own.pool.used == 0 and not own._parked and not own._alive
    assert not own._waiting and not own._waiting._levels and not own._waiting._priorities
