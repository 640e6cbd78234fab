"""Against a float64 brute force over whole vocabularies, one row at a time."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.gpu import sampling
from surge_beam.gpu.randomness import sequence_key, uniforms
from surge_beam.gpu.runner import SampleRow
from surge_beam.gpu.sampling import sample
from surge_beam.records import SamplingParams

LAST = 1.0 - 2.0**-53


def row(position=0, name="r", history=None, **params):
    return SampleRow(SamplingParams(**params), sequence_key(0, name), position, history)


def kept(logits, params):
    """Ids by falling probability that the filters leave, and all weights: float64."""
    z = np.asarray(logits, dtype=np.float64)
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    weight = [math.exp(max((z[i] - z[order[0]]) / params.temperature, -800.0)) for i in order]
    weight = [w if z[i] > -math.inf else 0.0 for i, w in zip(order, weight, strict=True)]
    if params.top_k:
        order, weight = order[: params.top_k], weight[: params.top_k]
    if params.top_p < 1.0:
        total, running, size = math.fsum(weight), 0.0, 0
        while size < len(order) and running < params.top_p * total:
            running, size = running + weight[size], size + 1
        order, weight = order[:size], weight[:size]
    left = [(i, w) for i, w in zip(order, weight, strict=True) if w > 0 and w >= params.min_p]
    return [i for i, _ in left], np.array([w for _, w in left])


def drawn(logits, params, u):
    """Token of the brute force, and how near u is to where another would be drawn."""
    ids, weights = kept(logits, params)
    if params.top_k in range(1, len(logits)) or params.top_p < 1.0 or params.min_p > 0.0:
        order = range(len(ids))
    else:
        order = np.argsort(ids)
    edges = np.cumsum([weights[i] for i in order]) / math.fsum(weights)
    edges[-1] = 1.0
    rank = int(np.searchsorted(edges, u, side="right"))
    return ids[order[rank]], min(abs(edges[:-1] - u), default=1.0)


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 1.5, 1e6]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 40, 150, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.113, 0.517, 0.91, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.013, 0.23, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    logprobs=st.sampled_from([None, None, 0, 1, 5]),
)


def scores(seed, vocabulary, shape):
    generator = np.random.default_rng(seed)
    values = generator.normal(size=vocabulary) * 3.0
    if shape == "flat":
        values = generator.normal(size=vocabulary) * 0.01
    if shape == "ties":
        values = np.round(values)
    if shape == "equal":
        values = np.zeros(vocabulary)
    if shape == "masked":
        values[generator.random(vocabulary) < 0.7] = -np.inf
        values[generator.integers(vocabulary)] = 1.0
    return values.astype(np.float32)


shapes = st.sampled_from(["peaked", "flat", "ties", "equal", "masked"])


@st.composite
def batches(draw):
    vocabulary = draw(st.sampled_from([1, 5, 130, 400, 2500]))
    size = draw(st.integers(1, 6))
    logits = [scores(draw(st.integers(0, 99)), vocabulary, draw(shapes)) for _ in range(size)]
    history = draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=9))
    rows = [
        SampleRow(
            draw(params),
            draw(st.integers(0, 2**64 - 1)),
            draw(st.integers(0, 9)),
            np.array(history),
        )
        for _ in range(size)
    ]
    return np.stack(logits), rows


@settings(max_examples=250)
@given(batches(), st.data())
def test_batch_mates_and_their_order_change_nothing(batch, data):
    logits, rows = batch
    together = sample(torch.from_numpy(logits), rows)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sample(torch.from_numpy(logits[order]), [rows[i] for i in order])
    for place, i in enumerate(order):
        alone = sample(torch.from_numpy(logits[i : i + 1]), [rows[i]])
        assert alone.token_ids[0] == together.token_ids[i] == shuffled.token_ids[place]
        assert alone.logprobs[0] == together.logprobs[i] == shuffled.logprobs[place]


@settings(max_examples=250)
@given(batches())
def test_as_the_brute_force_draws(batch):
    logits, rows = batch
    before = logits.copy()
    rows = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, repetition_penalty=1.0))
        for r in rows
    ]
    result = sample(torch.from_numpy(logits), rows)
    assert result.token_ids.dtype == np.int64 and not list(result.bad)
    assert np.array_equal(logits, before)
    for z, r, token in zip(logits, rows, result.token_ids.tolist(), strict=True):
        if r.params.greedy:
            assert token == z.argmax()
            continue
        expected, distance = drawn(z, r.params, float(uniforms([r.key], [r.position])[0]))
        assert token == expected or distance < 1e-12


@settings(max_examples=150)
@given(batches(), st.sampled_from([0.0, LAST]))
def test_the_ends_of_the_interval(batch, u):
    logits, rows = batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "uniforms", lambda keys, positions: np.full(len(keys), u))
        tokens = sample(
            torch.from_numpy(logits),
            [
                dataclasses.replace(r, params=dataclasses.replace(r.params, repetition_penalty=1.0))
                for r in rows
            ],
        ).token_ids.tolist()
    for z, r, token in zip(logits, rows, tokens, strict=True):
        if not r.params.greedy:
            ids, weights = kept(z, r.params)
            assert token in ids
            filtered = r.params.top_k in range(1, len(z)) or r.params.top_p < 1 or r.params.min_p
            ranks = range(len(ids)) if filtered else np.argsort(ids)
            if u == 0.0:
                assert token == ids[ranks[0]]
            elif weights[ranks[-1]] > 1e-12 * weights.sum():
                assert token == ids[ranks[-1]]


@pytest.mark.parametrize(
    "given_params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_frequencies(given_params):
    z = scores(4, 12, "peaked") / 2
    ids, weights = kept(z, SamplingParams(**given_params))
    draws = 20_000
    rows = [row(p % 100, f"row {p // 100}", **given_params) for p in range(draws)]
    tokens = sample(torch.from_numpy(np.tile(z, (draws, 1))), rows).token_ids
    counts = np.bincount(tokens, minlength=len(z))
    expected = np.zeros(len(z))
    expected[ids] = draws * weights / weights.sum()
    assert counts[expected == 0].sum() == 0
    some = expected > 0
    # Chi-square with at most 11 degrees of freedom: 37 is beyond 1e-4.
    assert ((counts - expected)[some] ** 2 / expected[some]).sum() < 37


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6])
def test_a_temperature_near_zero_takes_the_likeliest(temperature):
    z = np.stack([scores(seed, 300, "peaked") for seed in range(20)])
    for filters in ({}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.5}):
        rows = [row(i, temperature=temperature, **filters) for i in range(20)]
        assert np.array_equal(sample(torch.from_numpy(z), rows).token_ids, z.argmax(axis=1))


def test_a_huge_temperature_makes_all_equally_likely():
    z = torch.from_numpy(np.tile(scores(1, 8, "peaked"), (4000, 1)))
    for temperature in (1e6, 1e300):
        tokens = sample(z, [row(i, temperature=temperature) for i in range(4000)]).token_ids
        assert np.bincount(tokens, minlength=8).min() > 400


def test_a_top_k_past_the_vocabulary_filters_nothing():
    z = torch.from_numpy(np.tile(scores(1, 50, "flat"), (200, 1)))
    plain = sample(z, [row(i, temperature=1.0) for i in range(200)]).token_ids
    for k in (50, 51, 10**9):
        rows = [row(i, temperature=1.0, top_k=k) for i in range(200)]
        assert np.array_equal(sample(z, rows).token_ids, plain)


def test_equal_logits_rank_by_id():
    z = torch.zeros(300, 4000)
    z[:, :7] = -1.0
    assert sample(z, [row() for _ in range(300)]).token_ids.tolist() == [7] * 300
    for filters in ({"top_k": 3}, {"top_p": 2.5 / (3993 + 7 * math.exp(-1))}):
        tokens = sample(z, [row(i, temperature=1.0, **filters) for i in range(300)]).token_ids
        assert set(tokens.tolist()) == {7, 8, 9}
    top = sample(z[:1], [row(logprobs=4)]).logprobs[0].top
    assert [i for i, _ in top] == [7, 8, 9, 10]


def test_repetition_penalty_as_in_transformers():
    logits = torch.from_numpy(np.stack([scores(s, 40, "peaked") for s in range(30)]))
    history = np.random.default_rng(0).integers(0, 40, (30, 12)).astype(np.int32)
    for penalty in (0.5, 1.2, 3.0):
        process = transformers.RepetitionPenaltyLogitsProcessor(penalty)
        expected = process(torch.from_numpy(history.astype(np.int64)), logits.clone()).argmax(1)
        rows = [row(history=h, repetition_penalty=penalty) for h in history]
        assert sample(logits, rows).token_ids.tolist() == expected.tolist()
    mixed = [row(history=history[0], repetition_penalty=3.0), *(row() for _ in range(29))]
    assert sample(logits, mixed).token_ids[1:].tolist() == logits.argmax(1)[1:].tolist()
    with pytest.raises(ValueError, match="row 1 has a repetition penalty but no history"):
        sample(logits[:2], [row(), row(repetition_penalty=2.0)])


@pytest.mark.parametrize(
    "filters", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.6}]
)
def test_filters_keep_what_those_of_transformers_keep(filters):
    classes = {
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    z = scores(3, 30, "peaked") / 2
    warped = torch.from_numpy(z)[None] / 0.8
    for name, value in filters.items():
        warped = classes[name](value)(None, warped)
    rows = [row(i, temperature=0.8, **filters) for i in range(5000)]
    tokens = sample(torch.from_numpy(np.tile(z, (5000, 1))), rows).token_ids
    assert set(tokens.tolist()) == set(torch.isfinite(warped[0]).nonzero().flatten().tolist())


@settings(max_examples=100)
@given(batches(), st.integers(0, 6))
def test_logprobs_are_of_the_raw_logits(batch, count):
    logits, rows = batch
    rows = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, logprobs=count)) for r in rows
    ]
    result = sample(torch.from_numpy(logits), rows)
    for z, token, logprob in zip(
        logits.astype(np.float64), result.token_ids, result.logprobs, strict=True
    ):
        exact = z - z.max() - math.log(np.exp(z - z.max()).sum())
        assert logprob.token_id == token
        assert logprob.logprob == pytest.approx(exact[token], abs=2e-6, rel=1e-6)
        likeliest = sorted(range(len(z)), key=lambda i: (-z[i], i))[:count]
        assert [i for i, _ in logprob.top] == likeliest
        assert [p for _, p in logprob.top] == pytest.approx(exact[likeliest], abs=2e-6, rel=1e-6)


def test_logprobs_only_where_asked():
    z = torch.from_numpy(np.stack([scores(s, 20, "peaked") for s in range(3)]))
    result = sample(z, [row(), row(logprobs=0), row(logprobs=99, temperature=1.0)])
    assert result.logprobs[0] is None
    assert result.logprobs[1].top == ()
    assert len(result.logprobs[2].top) == 20


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}])
@pytest.mark.parametrize("filters", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_rows_that_are_no_numbers_harm_no_others(filters, more):
    z = np.stack([scores(s, 200, "peaked") for s in range(6)])
    rows = [row(i, **filters, **more) for i in range(6)]
    fine = sample(torch.from_numpy(z), rows)
    assert list(fine.bad) == []
    z[1, 3], z[2, 5], z[4] = np.nan, np.inf, -np.inf
    z[5, :100] = -np.inf
    mixed = sample(torch.from_numpy(z), rows)
    assert list(mixed.bad) == [1, 2, 4]
    assert mixed.token_ids[[1, 2, 4]].tolist() == [-1, -1, -1]
    assert mixed.token_ids[[0, 3]].tolist() == fine.token_ids[[0, 3]].tolist()
    assert mixed.token_ids[5] >= 100
    assert [p is None for p in mixed.logprobs] == [not more or i in (1, 2, 4) for i in range(6)]


def test_no_rows():
    result = sample(torch.zeros(0, 10), [])
    assert result.token_ids.shape == (0,) and list(result.logprobs) == list(result.bad) == []


def test_a_real_vocabulary():
    z = np.stack([scores(s, 49_153, "flat" if s % 2 else "peaked") for s in range(4)])
    for filters in ({}, {"top_p": 0.95}, {"top_k": 3000}, {"min_p": 0.9}):
        rows = [row(i, temperature=0.9, **filters) for i in range(4)]
        tokens = sample(torch.from_numpy(z), rows).token_ids
        for i in range(4):
            u = float(uniforms([rows[i].key], [i])[0])
            expected, distance = drawn(z[i], rows[i].params, u)
            assert tokens[i] == expected or distance < 1e-11
            assert tokens[i] == sample(torch.from_numpy(z[i : i + 1]), [rows[i]]).token_ids[0]
