from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_beam.policy.feather import (
    Admission,
    AdmissionView,
    AlwaysAdd,
    CostGate,
    Learner,
    reads_added,
)
from surge_beam.policy.prefix_tree import Candidate, PrefixTree
from surge_beam.policy.step_costs import CAUTIOUS, StepCosts

CHUNK = 64
COSTS = StepCosts(
    alpha_p=0.01,
    beta_p=1e-4,
    alpha_d=0.02,
    b0=1e-4,
    b1=1e-7,
    alpha_m=0.02,
    beta_m_decode=1e-4,
    beta_m_prefill=1e-4,
)


def chain(symbols: tuple[int, ...]) -> list[int]:
    return [hash(symbols[: i + 1]) for i in range(len(symbols))]


def view(running: int, *, before: int = 8, after: int = 2, peers: int = 0) -> AdmissionView:
    return AdmissionView(running, Candidate("next", before, after, after, 1, peers))


class NeverAdd(AlwaysAdd):
    def add(self, view: AdmissionView) -> bool:
        return False


def admit(admission: Admission, tree: PrefixTree, slots: int) -> list:
    """One pass of an engine's admission loop; returns who came in."""
    came = []
    while tree.active < slots:
        candidate = admission.candidate(tree)
        if candidate is None:
            break
        asked = AdmissionView(tree.active, candidate)
        if not admission.admit(tree, asked):
            break
        came.append(candidate.key)
    return came


# --- admission ---


def groups_tree(groups: int, each: int, shared: int = 6) -> PrefixTree:
    """Requests of groups that share a prefix, one of each group in turn."""
    tree = PrefixTree()
    for member in range(each):
        for group in range(groups):
            tree.insert((group, member), chain((*(group,) * shared, 100 + member)))
    return tree


def test_first_come_first_served():
    tree = groups_tree(3, 2)
    came = admit(Admission(AlwaysAdd(), prefix_order=False), tree, 4)
    assert came == [(0, 0), (1, 0), (2, 0), (0, 1)]


def test_a_batch_is_filled_by_relatives_first():
    came = admit(Admission(AlwaysAdd()), groups_tree(3, 3), 6)
    assert came[:3] == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("gate", [AlwaysAdd(), NeverAdd(), CostGate(COSTS), Learner()])
def test_where_nothing_is_shared_everybody_is_admitted_in_order(gate):
    tree = PrefixTree()
    for key in range(40):
        tree.insert(key, chain((1000 + key, 2, 3)))
    assert admit(Admission(gate), tree, 32) == list(range(32))


def test_without_relatives_a_short_stranger_does_not_go_first():
    tree = groups_tree(1, 2)
    tree.insert("long", chain((5,) * 9))
    tree.insert("short", chain((6,)))
    tree.insert("relative", chain((5, 5)))
    admission = Admission(AlwaysAdd())
    assert admit(admission, tree, 5) == [(0, 0), (0, 1), "long", "relative", "short"]


def test_another_of_its_like_has_patience_of_its_own():
    trees = [groups_tree(1, 2, shared=3) for _ in range(2)]
    first = Admission(NeverAdd(), floor=2, patience_stops=2)
    admissions = [first, first.anew()]
    assert admissions[1].gate is first.gate
    for tree in trees:
        tree.insert("stranger", chain((9,)))
    came = [[admit(a, t, 4) for a, t in zip(admissions, trees, strict=True)] for _ in range(3)]
    assert came == [[[(0, 0), (0, 1)]] * 2, [[]] * 2, [["stranger"]] * 2]


def test_one_prefix_for_all_is_first_come_first_served_too():
    tree = groups_tree(1, 40)
    assert admit(Admission(NeverAdd()), tree, 32) == [(0, i) for i in range(32)]


def test_small_groups_do_not_leave_the_batch_under_filled():
    """Whatever the gate says: below the floor strangers come in, then nothing is left to lose."""
    assert len(admit(Admission(NeverAdd(), floor=8), groups_tree(8, 4), 32)) == 32
    assert len(admit(Admission(NeverAdd(), floor=8), groups_tree(2, 16), 32)) == 16


@pytest.mark.parametrize("gate", [AlwaysAdd(), NeverAdd()])
def test_a_lone_stranger_does_not_starve(gate):
    """Relatives keep coming for ever, and the batch never runs empty."""
    tree, admission = PrefixTree(), Admission(gate, floor=2, patience=20, patience_stops=10)
    for key in range(8):
        tree.insert(key, chain((1, 1, 1, 10 + key)))
    admit(admission, tree, 4)
    tree.insert("stranger", chain((2, 2, 2)))
    running = [0, 1, 2, 3]
    for step in range(100):
        tree.finish(running.pop(0))
        tree.insert(100 + step, chain((1, 1, 1, 100 + step)))
        came = admit(admission, tree, 4)
        running += came
        if "stranger" in came:
            assert 10 < step < 30
            return
    pytest.fail("it starved")


def test_a_refused_stranger_does_not_starve_either():
    tree, admission = PrefixTree(), Admission(NeverAdd(), floor=2, patience_stops=10)
    for key in range(2):
        tree.insert(key, chain((1, 1, 10 + key)))
    admit(admission, tree, 4)
    tree.insert("stranger", chain((2, 2, 2)))
    came = [admit(admission, tree, 4) for _ in range(11)]
    assert came == [[]] * 10 + [["stranger"]]


def test_once_a_stranger_is_in_nothing_is_left_to_lose():
    tree, admission = groups_tree(2, 2), Admission(NeverAdd(), floor=2, patience_stops=3)
    came = [admit(admission, tree, 4) for _ in range(8)]
    assert came == [[(0, 0), (0, 1)], [], [], [(1, 0), (1, 1)], [], [], [], []]


@pytest.mark.parametrize("wrong", [{"floor": 1}, {"patience": 0}, {"patience_stops": 0}])
def test_wrong_arguments_of_admission(wrong):
    with pytest.raises(ValueError):
        Admission(AlwaysAdd(), **wrong)


# --- what a candidate makes a step read ---


@given(st.lists(st.lists(st.integers(0, 1), max_size=5).map(tuple), min_size=2, max_size=8))
def test_reads_added_against_counting_what_is_read(paths):
    """Two kinds of attention, the reads of the batch counted with and without the candidate."""
    tails = [10 * (i + 1) % CHUNK for i in range(len(paths))]
    tree = PrefixTree()
    for key, symbols in enumerate(paths):
        tree.insert(key, chain(symbols))
        if key < len(paths) - 1:
            tree.activate(key)
    candidate = tree.best_candidate()

    def every_prefix_once(keys) -> int:
        chunks = {paths[k][: i + 1] for k in keys for i in range(len(paths[k]))}
        return CHUNK * len(chunks) + sum(tails[k] for k in keys)

    def common_prefix_once(keys) -> int:
        shared = min(len(paths[k]) for k in keys)
        while len({paths[k][:shared] for k in keys}) > 1:
            shared -= 1
        lengths = [CHUNK * (len(paths[k]) - shared) + tails[k] for k in keys]
        return CHUNK * shared + sum(lengths)

    last = len(paths) - 1
    tokens = CHUNK * len(paths[last]) + tails[last]
    for tree_attention, read in ((True, every_prefix_once), (False, common_prefix_once)):
        added = read(range(len(paths))) - read(range(last))
        assert reads_added(candidate, tokens, last, tree=tree_attention) == added


@given(
    st.integers(1, 200),
    st.integers(0, 10**6),
    st.integers(-(10**5), 10**6),
)
def test_the_cost_gate_adds_exactly_while_tokens_a_second_rise(running, reads, added):
    added = max(added, -reads)
    now = COSTS.alpha_d + COSTS.b0 * running + COSTS.b1 * reads
    then = now + COSTS.b0 + COSTS.b1 * added
    gain = (running + 1) / then - running / now
    if abs(gain) > 1e-9 * running / now:
        asked = AdmissionView(running, Candidate("next", 3, 1, 1, 1, 0), reads, added)
        assert CostGate(COSTS).add(asked) == (gain > 0)


# --- the learner ---


class Machine:
    """A batch whose common prefix is worth ``cliff``: without it a row costs so many times more.

    The batch of 16 relatives either stays alone or takes 4 strangers in.
    """

    def __init__(self, cliff: float, unit: float = 1.0) -> None:
        self.cliff, self.unit = cliff, unit

    def seconds(self, added: bool) -> float:
        return self.unit * (0.02 + (20 * self.cliff if added else 16) * 0.001)


def play(learner: Learner, machine: Machine, rounds: int, noise: float = 0.0) -> list[bool]:
    draw = random.Random(5)
    actions = []
    for _ in range(rounds):
        added = learner.add(view(16))
        actions.append(added)
        for _ in range(3):
            seconds = machine.seconds(added) * (1 + noise * draw.uniform(-1, 1))
            learner.observe(20 if added else 16, seconds, 0, 500.0)
    return actions


def share(actions: list[bool], action: bool) -> float:
    return actions.count(action) / len(actions)


def test_it_learns_to_stop_and_to_add_and_follows_drift():
    learner, machine = Learner(), Machine(cliff=4.0)
    assert share(play(learner, machine, 300, noise=0.1)[50:], False) > 0.9
    machine.cliff = 1.0
    assert share(play(learner, machine, 600, noise=0.1)[200:], True) > 0.85
    machine.cliff = 4.0
    assert share(play(learner, machine, 600, noise=0.1)[200:], False) > 0.9


def test_a_machine_that_slows_down_changes_nothing_about_what_is_best():
    learner, machine = Learner(), Machine(cliff=4.0)
    play(learner, machine, 300)
    machine.unit = 10.0
    assert share(play(learner, machine, 600)[200:], False) > 0.9


def test_exploration_costs_less_than_two_percent():
    """Against always taking the better action, once it is known."""
    for cliff, best in ((4.0, False), (2.0, False), (1.0, True)):
        learner, machine = Learner(), Machine(cliff)
        play(learner, machine, 100)
        actions = play(learner, machine, 1000)
        rows = sum(20 if a else 16 for a in actions)
        took = sum(map(machine.seconds, actions))
        optimum = (20 if best else 16) / machine.seconds(best)
        assert rows / took > 0.98 * optimum


@pytest.mark.parametrize("unit", [2.0**-10, 2.0**10])
def test_the_unit_of_time_does_not_matter(unit):
    one = play(Learner(), Machine(2.0), 300, noise=0.2)
    assert play(Learner(), Machine(2.0, unit), 300, noise=0.2) == one
    assert True in one and False in one


def test_contexts_learn_apart():
    learner = Learner()
    for _ in range(200):
        for peers, cliff in ((0, 4.0), (40, 1.0)):
            added = learner.add(view(16, peers=peers))
            learner.observe(20 if added else 16, Machine(cliff).seconds(added), 0, 500.0)
    # the last observation is still to be settled by the first question
    assert learner.add(view(16, peers=0)) is False
    assert learner.add(view(16, peers=40)) is True


def mixed_play(learner: Learner, rounds: int) -> list[bool]:
    """Adding pays, but the first step after it prefills 2,000 tokens; what follows is short."""
    actions = []
    for _ in range(rounds):
        added = learner.add(view(16))
        actions.append(added)
        rows = 20 if added else 16
        if added:
            learner.observe(rows, COSTS.step_seconds(rows, 2000, 500.0), 2000, 500.0)
        learner.observe(rows, COSTS.step_seconds(rows, 0, 500.0), 0, 500.0)
    return actions


def test_prefill_is_not_held_against_adding():
    for costs in (COSTS, None):
        assert share(mixed_play(Learner(costs), 300)[50:], True) > 0.9


def test_with_costs_a_schedule_of_mixed_steps_only_teaches_too():
    learner = Learner(COSTS)
    for _ in range(300):
        added = learner.add(view(16))
        rows, cliff = (20, 4.0) if added else (16, 1.0)
        mixed = COSTS.step_seconds(rows, 100, 500.0) * cliff
        learner.observe(rows, mixed, 100, 500.0)
    assert learner.add(view(16)) is False


def test_the_same_questions_get_the_same_answers():
    one, other = (play(Learner(COSTS), Machine(1.5), 200, noise=0.5) for _ in range(2))
    assert one == other


def test_what_says_nothing_is_not_counted():
    learner = Learner()
    assert learner.add(view(16)) is True
    learner.observe(0, 1.0, 500, 0.0)
    learner.observe(16, 0.0, 0, 500.0)
    learner.observe(16, 1.0, 500, 500.0)
    # nothing was settled, so adding is still untried
    assert learner.add(view(16)) is True
    learner.observe(16, 1.0, 0, 500.0)
    assert learner.add(view(16)) is False


@pytest.mark.parametrize("wrong", [{"discount": 1.0}, {"discount": 0.0}, {"exploration": 0.0}])
def test_wrong_arguments_of_the_learner(wrong):
    with pytest.raises(ValueError):
        Learner(CAUTIOUS, **wrong)
