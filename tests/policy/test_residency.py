from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.policy.residency import ResidencyDecision, ResidencyView, SequenceView, decide


def _sequence(index: int, **fields: int | bool) -> SequenceView:
    defaults: dict = {"priority": 0, "decoded": index, "needs": 0, "frees": 1, "host_pages": 1}
    return SequenceView(index=index, **(defaults | fields))


def _view(running=(), parked=(), free=0, host_free=0, slots_free=8) -> ResidencyView:
    return ResidencyView(tuple(running), tuple(parked), free, host_free, slots_free)


def test_everybody_grows_while_there_is_room():
    view = _view([_sequence(0, needs=1), _sequence(1), _sequence(2, needs=1)], free=2)
    assert set(decide(view).grow) == {0, 2}


def test_the_least_decoded_of_the_lowest_priority_makes_room():
    running = [
        _sequence(0, decoded=1, priority=1, needs=1),
        _sequence(1, decoded=9, needs=1),
        _sequence(2, decoded=5, frees=3),
    ]
    parked = decide(_view(running, host_free=1))
    assert parked.park == (2,) and set(parked.grow) == {0, 1} and not parked.evict
    assert decide(_view(running, host_free=0)).evict == (2,)
    half = [running[0], running[1], dataclasses.replace(running[2], parkable=False)]
    assert decide(_view(half, host_free=9)).evict == (2,)


def test_the_latest_of_equals_makes_room():
    running = [_sequence(i, decoded=3, needs=1) for i in range(3)]
    assert decide(_view(running, free=1)).evict == (2,)


def test_the_last_one_is_exhausted_only_if_nobody_else_let_go():
    pair = [_sequence(0, needs=1, frees=0), _sequence(1, needs=1, frees=0)]
    first = decide(_view(pair))
    assert first == ResidencyDecision(evict=(0,))
    assert decide(_view(pair[1:])) == ResidencyDecision(exhausted=(1,))


def test_the_most_decoded_comes_back_first_and_leaves_a_page_for_each():
    parked = [_sequence(3, decoded=2, needs=2), _sequence(4, decoded=8, needs=3)]
    running = [_sequence(0, decoded=1)]
    assert decide(_view(running, parked, free=4)).resume == ()
    assert decide(_view(running, parked, free=5)).resume == (4,)
    assert decide(_view(running, parked, free=8)).resume == (4, 3)
    assert decide(_view(running, parked, free=8, slots_free=1)).resume == (4,)
    assert decide(_view((), parked, free=3)).resume == (4,)


_sequences = st.lists(
    st.builds(
        SequenceView,
        index=st.just(0),
        priority=st.integers(0, 2),
        decoded=st.integers(0, 5),
        needs=st.integers(0, 1),
        frees=st.integers(0, 4),
        host_pages=st.integers(1, 5),
        parkable=st.booleans(),
    ),
    max_size=8,
)


@settings(max_examples=400)
@given(
    running=_sequences,
    parked=_sequences,
    free=st.integers(0, 10),
    host=st.integers(0, 10),
    slots=st.integers(0, 8),
)
def test_a_decision_can_be_carried_out_and_gets_somewhere(running, parked, free, host, slots):
    running = [dataclasses.replace(s, index=i) for i, s in enumerate(running)]
    parked = [
        dataclasses.replace(s, index=100 + i, needs=s.needs + 1) for i, s in enumerate(parked)
    ]
    view = _view(running, parked, free, host, slots)
    got = decide(view)
    own, away = {s.index: s for s in running}, {s.index: s for s in parked}
    let_go = (*got.park, *got.evict)
    assert len(set(let_go)) == len(let_go) and set(let_go) <= set(own)
    assert len(let_go) < max(1, len(running)), "one stays"
    assert sum(own[i].host_pages for i in got.park) <= host
    assert all(own[i].parkable for i in got.park)
    room = free + sum(own[i].frees for i in let_go)
    spent = sum(own[i].needs for i in got.grow) + sum(away[i].needs for i in got.resume)
    assert spent <= room
    assert len(got.resume) <= slots
    assert not (got.resume and let_go), "nobody comes back while others make room"
    staying = [s for s in running if s.index not in let_go]
    short = [s for s in staying if s.needs and s.index not in got.grow]
    assert not short or let_go or got.exhausted
    if not running and parked and slots:
        assert got.resume or got.exhausted
