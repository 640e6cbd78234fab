"""Against numpy in float64; without a GPU, in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from surge_beam.gpu.kernels import sampling_triton
from surge_beam.gpu.kernels.sampling_triton import argmax, draw
from surge_beam.gpu.runner import SampleRow
from surge_beam.gpu.sampling import sample
from surge_beam.records import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARIES = pytest.mark.parametrize("vocabulary", [1, 2, 127, 128, 129, 5000, 9000])


def logits_of(rows, vocabulary, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocabulary, generator=generator) * 3).to(dtype).to(DEVICE)


def doubles(*numbers):
    return torch.tensor(numbers, dtype=torch.float64, device=DEVICE)


@VOCABULARIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_argmax(vocabulary, dtype):
    """Of rounded logits, among which many are equal; rows of a wider tensor."""
    logits = logits_of(5, vocabulary + 7, dtype)[:, :vocabulary].round()
    values, ids = argmax(logits)
    expected = logits.float().cpu().numpy()
    assert ids.tolist() == expected.argmax(axis=1).tolist()
    assert values.tolist() == expected.max(axis=1).tolist()


@pytest.mark.parametrize("places", [(0,), (8999,), (4095, 4096), (5000, 100)])
@pytest.mark.parametrize("special", [float("nan"), float("inf"), 50.0])
def test_argmax_takes_the_first_of_equal_ones(special, places):
    logits = logits_of(2, 9000)
    logits[0, list(places)] = special
    values, ids = argmax(logits)
    assert ids[0] == min(places)
    torch.testing.assert_close(values[0].item(), special, equal_nan=True)
    assert ids[1] == logits[1].argmax()


def test_nan_is_larger_than_infinity():
    logits = logits_of(1, 5000)
    logits[0, 7], logits[0, 4500] = torch.inf, torch.nan
    values, ids = argmax(logits)
    assert ids.tolist() == [4500] and values.isnan().all()


@pytest.mark.parametrize("vocabulary", [3, 5000])
def test_argmax_of_nothing_but_minus_infinity(vocabulary):
    values, ids = argmax(torch.full((1, vocabulary), -torch.inf, device=DEVICE))
    assert ids.tolist() == [0] and values.tolist() == [-torch.inf]


@VOCABULARIES
def test_draw_inverts_the_running_sum(vocabulary):
    uniform = [0.0, 0.1, 0.37, 0.62, 0.93, 1 - 2.0**-53]
    temperature = [1.0, 0.7, 0.3, 1.5, 1e6, 1.0]
    logits = logits_of(6, vocabulary)
    logits[2, 1:] = -torch.inf
    _, ids = draw(logits, doubles(*temperature), doubles(*uniform))
    for row, token in enumerate(ids.tolist()):
        scores = logits[row].double().cpu().numpy() / temperature[row]
        weights = np.exp(scores - scores.max())
        edges = np.concatenate([[0.0], np.cumsum(weights)]) / weights.sum()
        assert weights[token] > 0.0
        assert edges[token] - 1e-12 <= uniform[row] <= edges[token + 1] + 1e-12


def test_draw_never_takes_what_has_no_weight():
    """Whole blocks of it before, between and after the only two tokens."""
    logits = torch.full((64, 1000), -torch.inf, device=DEVICE)
    logits[:, [300, 700]] = torch.tensor([0.3, -0.2], device=DEVICE)
    share = float(torch.tensor([0.3, -0.2]).double().softmax(0)[0])
    near = [share * (1 + k * 2.0**-52) for k in range(-16, 16)]
    uniform = doubles(*near, *np.linspace(0.0, 1 - 2.0**-53, 32).tolist())
    _, ids = draw(logits, torch.ones_like(uniform), uniform)
    assert set(ids.tolist()) == {300, 700}


def test_draw_leaves_greedy_and_bad_rows_alone():
    logits = logits_of(4, 300)
    logits[1, 5], logits[2, 6], logits[3] = torch.nan, torch.inf, -torch.inf
    uniform = doubles(0.999, 0.5, 0.5, 0.5)
    values, ids = draw(logits, doubles(0.0, 1.0, 1.0, 1.0), uniform)
    expected = argmax(logits)
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(values, expected[0], equal_nan=True)


def test_batch_mates_change_nothing():
    logits, uniform = logits_of(4, 700), doubles(0.2, 0.4, 0.6, 0.8)
    temperature = torch.ones_like(uniform)
    _, ids = draw(logits, temperature, uniform)
    order = [2, 0, 3, 1]
    _, permuted = draw(logits[order], temperature, uniform[order])
    assert permuted.tolist() == ids[order].tolist()


def test_no_rows():
    none = doubles()
    assert [x.shape for x in draw(logits_of(0, 5), none, none)] == [(0,), (0,)]


def test_stages_cover_any_vocabulary():
    for vocabulary in (1, 4096, 4097, 151_936, 262_144):
        first, second = sampling_triton.argmax_options(vocabulary)
        assert first["BLOCK"] * second["COUNT"] >= vocabulary and second["BLOCK"] >= second["COUNT"]


def rows_of(*params):
    """Rows of sampling parameters, each with a key and a history of its own."""
    history = np.arange(0, 60, 7, dtype=np.int32)
    return [SampleRow(SamplingParams(**p), 11 + 3 * r, r, history) for r, p in enumerate(params)]


PLAIN = [{}, {"temperature": 0.7}, {"temperature": 1.3}, {"temperature": 0.7, "top_k": 5000}]
FILTERED = [{"temperature": 0.7, "top_k": 5}, {"temperature": 1.0, "top_p": 0.6, "logprobs": 2}]
PENALIZED = [{"repetition_penalty": 1.4}, {"temperature": 0.9, "repetition_penalty": 0.6}]


@pytest.mark.parametrize("params", [[{}] * 3, PLAIN, PLAIN + FILTERED, FILTERED, PENALIZED + PLAIN])
def test_sample_chooses_the_same_tokens_with_and_without_them(params):
    rows = rows_of(*params * 3)
    logits = logits_of(len(rows), 300)
    logits[1, 7], logits[2] = torch.nan, -torch.inf
    before = logits.clone()
    expected, got = sample(logits.cpu(), rows), sample(logits, rows, sampling_triton)
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    assert got.token_ids.dtype == np.int64
    assert list(got.bad) == list(expected.bad) == [1, 2]
    for a, b in zip(got.logprobs, expected.logprobs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or a.logprob == pytest.approx(b.logprob, abs=1e-5)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("params", [[{}] * 3, PLAIN, PENALIZED])
def test_the_logits_are_waited_for_once(params, monkeypatch):
    fetched = []
    real = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: fetched.append(x.numel()) or real(x))
    rows = rows_of(*params)
    sample(logits_of(len(rows), 300), rows, sampling_triton)
    assert fetched == [2 * len(rows)]
