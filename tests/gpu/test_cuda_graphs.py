"""The logic of graphs with a stand-in that runs the call again; real ones on a GPU."""

from __future__ import annotations

import functools
import logging

import numpy as np
import pytest
import torch

from surge_beam.gpu import cuda_graphs, model_runner, work_units
from surge_beam.gpu.attention_plan import plan_attention
from surge_beam.gpu.cuda_graphs import CannotCapture, CudaCapture, DecodeGraphs
from surge_beam.gpu.model_runner import ModelRunner
from tests.gpu.random_models import decode_batch, random_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, PAGE_SIZE = 64, 4


class Recorder:
    """Captures by keeping the call, or really on a GPU; counts."""

    def __init__(self):
        self.captured = self.replayed = 0
        self.capture = CudaCapture() if DEVICE == "cuda" else lambda call: call

    def __call__(self, call):
        replay = self.capture(call)
        self.captured += 1

        def counted():
            self.replayed += 1
            return replay()

        return counted


class Case:
    """A runner with random KV everywhere, one of the same model without graphs, and its graphs."""

    def __init__(self, family="llama", **changes):
        changes = {"num_hidden_layers": 1, **changes}
        self.model = random_model(family, DEVICE, kernels="triton", **changes)
        self.runner = ModelRunner(self.model, pages=PAGES, page_size=PAGE_SIZE)
        self.runner.graphs = None
        generator = torch.Generator().manual_seed(1)
        self.pool = torch.randn(self.runner.pool.shape, generator=generator).to(DEVICE)
        self.capture = Recorder()
        self.graphs = DecodeGraphs(self.model.decoder, self.runner._layers, self.capture)

    def forward(self, batch, graphs):
        """Logits, and the pool after the step."""
        with torch.inference_mode():
            self.runner.pool.copy_(self.pool)
            self.runner.graphs = graphs
            logits = self.runner._forward(batch).clone()
            return logits, self.runner.pool.clone()

    def check(self, batch):
        expected, got = self.forward(batch, None), self.forward(batch, self.graphs)
        assert got[0].shape == (len(batch.ids), self.model.vocabulary)
        for a, b in zip(expected, got, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
        return self.capture.captured, self.capture.replayed


def batch_of(contexts, *, shared=0, seed=0):
    """Sequences of these contexts, scattered; ``shared`` leading pages are everybody's."""
    place = np.random.default_rng(seed).permutation(PAGES)
    prefix, place = place[:shared], place[shared:]
    tables = []
    for context in contexts:
        own = context // PAGE_SIZE + 1 - shared
        tables.append(np.concatenate([prefix, place[:own]]))
        place = place[own:]
    return decode_batch(tables, contexts, seed=seed)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_steps_equal_those_without_graphs(family):
    case = Case(family, num_hidden_layers=2)
    assert case.check(batch_of([5, 17, 9])) == (1, 0)
    # another batch of no more pages, and one of a row more: rows are padded to four
    assert case.check(batch_of([7, 11, 13], seed=1)) == (1, 1)
    assert case.check(batch_of([3, 3, 2, 1], seed=2)) == (1, 2)
    assert case.check(batch_of([5], seed=3)) == (2, 2)
    assert case.check(batch_of([5, 17, 9])) == (2, 3)


def test_layers_of_two_windows():
    case = Case(
        "qwen3",
        num_hidden_layers=2,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    )
    assert case.check(batch_of([5, 17, 9])) == (1, 0)
    assert case.check(batch_of([15, 7, 8], seed=1)) == (1, 1)


def test_a_plan_that_does_not_fit_gets_a_larger_room(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "FEW_UNITS", 0)
    case = Case()
    assert case.check(batch_of([5, 6])) == (1, 0)
    assert case.check(batch_of([40, 60])) == (2, 0)
    # what fitted the smaller room fits the larger one
    assert case.check(batch_of([5, 6])) == (2, 1)
    assert case.check(batch_of([41, 61])) == (2, 2)


def test_a_shared_prefix_gets_a_room_of_its_own(monkeypatch):
    eager = functools.partial(plan_attention, node_cost=0, merge_cost=0)
    monkeypatch.setattr(model_runner, "plan_attention", eager)
    case = Case()
    assert case.check(batch_of([40, 41])) == (1, 0)
    assert case.check(batch_of([40, 41], shared=9)) == (2, 0)
    assert case.check(batch_of([42, 43], shared=9)) == (2, 1)


def test_a_room_of_empty_units_does_not_serve(monkeypatch):
    """A larger batch's room is kept for such batches."""
    monkeypatch.setattr(cuda_graphs, "FEW_UNITS", 0)
    monkeypatch.setattr(work_units, "SPLIT_KEYS", 16)
    case = Case()
    assert case.check(batch_of([90, 100])) == (1, 0)
    assert case.check(batch_of([3, 2])) == (2, 0)
    assert case.check(batch_of([2, 3])) == (2, 1)
    assert case.check(batch_of([91, 99])) == (2, 2)


def test_the_one_not_used_longest_is_dropped(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    case = Case()
    one, two, four = batch_of([5]), batch_of([5, 6]), batch_of([5, 6, 7])
    assert [case.check(batch)[0] for batch in (one, two, one, four)] == [1, 2, 2, 3]
    assert case.check(one)[0] == 3
    assert case.check(two)[0] == 4
    case.graphs.clear()
    assert case.check(two)[0] == 5


def test_no_more_are_dropped_than_must_be(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 5)
    case = Case()
    batches = [batch_of([2] * (1 << i)) for i in range(4)]
    for batch in batches * 2:
        case.check(batch)
    assert (case.capture.captured, case.capture.replayed) == (4, 4)


def test_where_capturing_fails_steps_run_without(caplog):
    case = Case()

    def fail(call):
        case.capture.captured += 1
        raise CannotCapture("not here")

    case.graphs = DecodeGraphs(case.model.decoder, case.runner._layers, fail)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert case.check(batch_of([5, 6])) == (1, 0)
    assert [record.message.count("not here") for record in caplog.records] == [1]


def test_padded_rows_write_nothing_and_read_nothing():
    """NaN anywhere but in the sequences' own tokens reaches neither logits nor pool."""
    case = Case()
    batch = batch_of([5, 17, 9])
    expected, _ = case.forward(batch, None)
    used = [
        t[np.arange(c) // PAGE_SIZE] * PAGE_SIZE + np.arange(c) % PAGE_SIZE
        for t, c in zip(batch.block_tables, batch.context, strict=True)
    ]
    new = [
        t[c // PAGE_SIZE] * PAGE_SIZE + c % PAGE_SIZE
        for t, c in zip(batch.block_tables, batch.context, strict=True)
    ]
    empty = np.setdiff1d(np.arange(PAGES * PAGE_SIZE), np.concatenate(used))
    case.pool[:, :, :, empty] = torch.nan
    for _ in range(2):
        logits, pool = case.forward(batch, case.graphs)
        torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)
        still = pool[0, 0, 0, :, 0].isnan().cpu().numpy()
        assert np.array_equal(np.flatnonzero(still), np.setdiff1d(empty, new))
    assert case.capture.replayed == 1


def test_only_steps_that_decode_use_them():
    case = Case()
    batch = batch_of([5, 6])
    batch.counts[1] = 2
    batch.context[1] = 5
    mixed = type(batch)(
        ids=np.array([1, 2, 3]),
        counts=batch.counts,
        context=batch.context,
        block_tables=batch.block_tables,
        rows=np.array([0, 2]),
        sample=batch.sample,
    )
    case.forward(mixed, case.graphs)
    assert case.capture.captured == 0
