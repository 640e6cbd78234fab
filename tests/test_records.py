from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_beam.records import (
    Checkpoint,
    EngineConfig,
    Request,
    SamplingParams,
    SurgeError,
    TokenLogprob,
)


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("stop", ("a", "")),
        ("logprobs", -1),
        ("max_tokens", 1.5),
        ("seed", [1]),
        ("top_k", None),
        ("temperature", "1"),
        ("stop", "END"),
        ("stop", (5,)),
        ("stop_token_ids", ((1,),)),
    ],
)
def test_parameters_out_of_range_are_named(field, value):
    with pytest.raises(SurgeError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "field, value",
    [
        ("schedule", "fifo"),
        ("page_size", 12),
        ("max_sequences", 0),
        ("max_prefill_tokens", 0),
        ("kv_bytes", 0),
        ("max_context", -5),
        ("host_kv_bytes", -1),
    ],
)
def test_recipes_that_cannot_work_are_named(field, value):
    with pytest.raises(SurgeError, match=field):
        EngineConfig(**{field: value})


_ids = st.lists(st.integers(0, 1 << 20), max_size=8).map(tuple)
_logprobs = st.floats(max_value=0, allow_nan=False)
_checkpoints = st.builds(
    Checkpoint,
    request=st.builds(
        Request,
        custom_id=st.text(),
        prompt_ids=_ids,
        priority=st.integers(-3, 3),
        sampling=st.builds(
            SamplingParams,
            max_tokens=st.none() | st.integers(1, 99),
            temperature=st.floats(0, 9),
            stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
            stop_token_ids=_ids,
            seed=st.none() | st.integers(0, 1 << 70),
            logprobs=st.none() | st.integers(0, 5),
        ),
    ),
    output_ids=_ids,
    logprobs=st.lists(
        st.builds(
            TokenLogprob,
            token_id=st.integers(0, 99),
            logprob=_logprobs,
            top=st.lists(st.tuples(st.integers(0, 99), _logprobs), max_size=2).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
    parks=st.integers(0, 9),
)


@given(_checkpoints)
def test_a_checkpoint_comes_back_from_json(checkpoint):
    assert Checkpoint.from_json(checkpoint.to_json()) == checkpoint


def test_a_custom_id_may_hold_half_a_surrogate_pair():
    checkpoint = Checkpoint(request=Request(custom_id="\ud800", prompt_ids=(1,)))
    assert Checkpoint.from_json(checkpoint.to_json()) == checkpoint


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"baseline": 9},
        {"output_ids": ["x"]},
        {"output_ids": None},
        {"request": {}},
        {"request": 3},
        {"unknown": 1},
        {"logprobs": [1]},
        {"baseline": "x"},
        {"cached_tokens": "x"},
        {"parks": -1},
        {"output_ids": [4.9]},
        {"output_ids": [float("inf")]},
    ],
)
def test_what_is_no_checkpoint_is_refused(change):
    whole = json.loads(Checkpoint(request=Request(custom_id="a", prompt_ids=(1,))).to_json())
    with pytest.raises(SurgeError, match="checkpoint"):
        Checkpoint.from_json(json.dumps(whole | change))
    for text in ("", "[]", "null", '"x"', "{"):
        with pytest.raises(SurgeError, match="checkpoint"):
            Checkpoint.from_json(text)


@pytest.mark.parametrize(
    "fields", [{"custom_id": 3}, {"priority": None}, {"prompt_ids": "12"}, {"prompt_ids": (1.5,)}]
)
def test_requests_of_the_wrong_kind_are_refused(fields):
    whole = {"custom_id": "a", "prompt_ids": (1,)}
    with pytest.raises(SurgeError, match=next(iter(fields))):
        Request(**(whole | fields))
