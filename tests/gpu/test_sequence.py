from __future__ import annotations

import itertools

import pytest

from surge_beam.gpu.sequence import Sequence, State
from surge_beam.gpu.stopping import StopChecker
from surge_beam.records import Checkpoint, Request, SamplingParams, TokenLogprob


def _sequence(output: tuple[int, ...] = (), **params) -> Sequence:
    request = Request(custom_id="a", prompt_ids=(1, 2, 3), sampling=SamplingParams(**params))
    stop = StopChecker(lambda ids: " ".join(map(str, ids)), request.sampling, frozenset({0}), 100)
    stop.resume(output)
    checkpoint = Checkpoint(request=request, output_ids=output)
    return Sequence(checkpoint, index=0, key=7, stop=stop, limit=100)


def test_tokens_grow_past_any_first_size_and_travel():
    sequence = _sequence(logprobs=0)
    for token in range(1, 201):
        assert sequence.push(token, TokenLogprob(token, -1.0)) in (None, "length")
    assert sequence.ids.tolist() == [1, 2, 3, *range(1, 201)]
    assert sequence.decoded == 200 and sequence.length == 203
    checkpoint = sequence.checkpoint()
    assert checkpoint.output_ids == tuple(range(1, 201)) and len(checkpoint.logprobs) == 200
    again = _sequence(checkpoint.output_ids)
    assert again.ids.tolist() == sequence.ids.tolist() and again.started
    completion = sequence.completion("stop")
    assert completion.completion_tokens == 200 and completion.logprobs is not None
    assert completion.text == " ".join(map(str, range(1, 201)))


def test_the_end_token_counts():
    sequence = _sequence()
    assert sequence.push(5, None) is None
    assert sequence.push(0, None) == "stop"
    assert sequence.completion("stop").token_ids == (5, 0)


@pytest.mark.parametrize("before, after", list(itertools.product(State, State)))
def test_only_sensible_moves_are_possible(before, after):
    sequence = _sequence()
    sequence.state = before
    possible = {
        State.QUEUED: {State.PREFILLING},
        State.PREFILLING: {State.ACTIVE, State.EVICTED},
        State.ACTIVE: {State.PARKED, State.EVICTED},
        State.PARKED: {State.ACTIVE, State.EVICTED},
        State.EVICTED: {State.PREFILLING},
    }
    ended = (State.DONE, State.FAILED)
    if before not in ended and (after in possible[before] or after in ended):
        sequence.move(after)
        assert sequence.state is after
    else:
        with pytest.raises(AssertionError):
            sequence.move(after)


def test_letting_go_of_kv_keeps_the_tokens():
    sequence = _sequence(output=(4, 5))
    sequence.table, sequence.context, sequence.registered = [3, 1], 4, 1
    assert sequence.forget_kv() == [3, 1]
    assert sequence.table == [] and sequence.context == sequence.registered == 0
    assert sequence.ids.tolist() == [1, 2, 3, 4, 5]
