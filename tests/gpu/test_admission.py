from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.gpu.admission import WaitingRoom, load_admission
from surge_beam.gpu.sequence import Sequence, State
from surge_beam.gpu.stopping import StopChecker
from surge_beam.policy.feather import Admission, AdmissionView, AlwaysAdd
from surge_beam.policy.prefix_tree import Candidate
from surge_beam.policy.step_costs import CAUTIOUS
from surge_beam.records import Checkpoint, EngineConfig, Request, SurgeError

PAGE = 4


class NeverAdd(AlwaysAdd):
    def add(self, view: AdmissionView) -> bool:
        return False


class Recorder(AlwaysAdd):
    def __init__(self) -> None:
        self.views: list[AdmissionView] = []
        self.steps: list[tuple] = []

    def add(self, view: AdmissionView) -> bool:
        self.views.append(view)
        return True

    def observe(self, *step) -> None:
        self.steps.append(step)


def sequence(index: int, *, tokens: int = 8, priority: int = 0, output: int = 0) -> Sequence:
    request = Request(custom_id=str(index), prompt_ids=(1,) * tokens, priority=priority)
    stop = StopChecker(lambda ids: "", request.sampling, frozenset(), 100)
    checkpoint = Checkpoint(request=request, output_ids=(1,) * output)
    return Sequence(checkpoint, index=index, key=0, stop=stop, limit=100)


def admit(room: WaitingRoom, running: int = 1, reads: int = 0) -> int | None:
    """Index of who came in."""
    first = room.first()
    if first is None or not room.admit(first, running=running, reads=reads):
        return None
    first.move(State.PREFILLING)
    return first.index


def evict(room: WaitingRoom, gone: Sequence) -> None:
    gone.move(State.EVICTED)
    room.put_back(gone)


def test_those_that_had_begun_come_first_most_decoded_first():
    room = WaitingRoom(Admission(AlwaysAdd()), PAGE)
    everyone = [sequence(i, output=o) for i, o in enumerate((0, 0, 3, 0, 5))]
    for one in everyone:
        room.enter(one, [])
    assert [admit(room) for _ in range(3)] == [4, 2, 0]
    for back in (everyone[0], everyone[2]):
        evict(room, back)
    assert len(room) == 4
    assert [admit(room) for _ in range(5)] == [2, 0, 1, 3, None]


def test_relatives_come_first_but_a_higher_priority_before_them():
    room = WaitingRoom(Admission(AlwaysAdd()), PAGE)
    for index, (priority, digests) in enumerate(
        [(0, [1, 2]), (0, [7, 8]), (0, [1, 3]), (5, [9, 9]), (5, [6]), (5, [9, 8]), (-1, [1])]
    ):
        room.enter(sequence(index, priority=priority), digests)
    assert [admit(room) for _ in range(7)] == [3, 5, 4, 0, 2, 1, 6]


def test_without_digests_it_is_first_come_first_served():
    room = WaitingRoom(Admission(NeverAdd(), floor=2), PAGE)
    for index in range(20):
        room.enter(sequence(index, tokens=20 - index), [])
    assert [admit(room, running=50) for _ in range(20)] == list(range(20))


def test_the_gate_sees_what_a_candidate_costs():
    gate = Recorder()
    room = WaitingRoom(Admission(gate, floor=2), PAGE)
    for index, digests in enumerate([[1, 2, 3], [1, 2, 3], [1, 7]]):
        room.enter(sequence(index, tokens=14), digests)
    assert [admit(room, running=n, reads=100 + n) for n in range(3)] == [0, 1, 2]
    (asked,) = gate.views
    candidate = asked.candidate
    assert isinstance(candidate.key, Sequence) and candidate.key.index == 2
    assert candidate == Candidate(candidate.key, 3, 1, 1, 1, 0)
    # one page of its 14 tokens is read for the batch already
    assert (asked.running, asked.reads, asked.reads_added) == (2, 102, 14 - PAGE)
    room.observe(2, 0.5, 3, 9.0)
    assert gate.steps == [(2, 0.5, 3, 9.0)]


def test_the_first_of_its_priority_is_not_asked_about():
    room = WaitingRoom(Admission(NeverAdd(), floor=2), PAGE)
    room.enter(sequence(0), [1, 2])
    assert admit(room, running=9) == 0
    room.enter(sequence(1), [3])
    room.enter(sequence(2, priority=1), [3, 4])
    assert [admit(room, running=9) for _ in range(2)] == [2, None]


@settings(max_examples=200)
@given(st.data())
def test_everybody_is_known_exactly_as_long_as_it_lives(data):
    """Random comings and goings against plain sets; the order against its definition."""
    room = WaitingRoom(Admission(AlwaysAdd(), prefix_order=False), PAGE)
    waiting: list[Sequence] = []
    inside: list[Sequence] = []
    for index in range(data.draw(st.integers(1, 40))):
        kind = data.draw(st.sampled_from(["enter", "admit", "evict", "leave"]))
        if kind == "enter":
            priority, output = data.draw(st.integers(-1, 1)), data.draw(st.sampled_from([0, 0, 2]))
            waiting.append(sequence(index, priority=priority, output=output))
            room.enter(waiting[-1], data.draw(st.lists(st.integers(0, 1), max_size=3)))
        elif kind == "admit" and waiting:
            came = admit(room)
            chosen = min(
                waiting,
                key=lambda s: (
                    -s.request.priority,
                    not s.decoded and s.state is not State.EVICTED,
                    -s.decoded,
                    s.index,
                ),
            )
            assert came == chosen.index
            waiting.remove(chosen)
            inside.append(chosen)
        elif kind == "evict" and inside:
            gone = inside.pop(data.draw(st.integers(0, len(inside) - 1)))
            evict(room, gone)
            waiting.append(gone)
        elif kind == "leave" and (waiting or inside):
            gone = data.draw(st.sampled_from(waiting + inside))
            room.leave(gone)
            gone.move(State.DONE)
            room.leave(gone)
            (waiting if gone in waiting else inside).remove(gone)
        assert len(room) == len(waiting)
        assert (room.first() is None) == (not waiting)
        known = [key for level in room._levels.values() for key in level.tree._by_key]
        assert set(known) == {*waiting, *inside} and len(known) == len(waiting) + len(inside)
        assert all(len(level.tree) for level in room._levels.values())


@pytest.mark.parametrize("kind", ["prefix", "learned", "cost", "fcfs"])
def test_a_recipe_says_who_is_next(kind, tmp_path):
    """A stranger came before a relative; steps are all reading, so it costs more than it brings."""
    costs = {**CAUTIOUS.to_dict(), "b0": 0.0, "b1": 1.0}
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"step_costs": costs}), "utf-8")
    for path in (None, str(profile)):
        room = WaitingRoom(
            load_admission(EngineConfig(model="dummy", admission=kind, profile=path)), PAGE
        )
        for index, digests in enumerate([[1, 2], [7, 8], [1, 3]]):
            room.enter(sequence(index, tokens=12), digests)
        came = [admit(room, running=n, reads=4) for n in (0, 7, 50)]
        if kind == "fcfs":
            assert came == [0, 1, 2]
        else:
            # a page of [1] is common; after that the gate is asked about the stranger
            stops = kind == "cost" and path is not None
            assert came == [0, 2, None if stops else 1]


def test_a_recipe_with_another_admission_is_refused():
    with pytest.raises(SurgeError, match="admission must be prefix, learned, cost or fcfs"):
        EngineConfig(admission="lifo")
