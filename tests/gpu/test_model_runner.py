from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from surge_beam.gpu.model_runner import ModelRunner
from tests.gpu.random_models import decode_batch, random_model


def prefill_batch(rows):
    """Prompts of 9, 4 and 6 tokens, the last two behind 8 tokens in the pool that they share."""
    counts = np.array([9, 4, 6], np.int32)
    tables = [[0, 1, 2], [3, 4, 5], [3, 4, 6, 7]]
    batch = decode_batch(tables, [0, 8, 8])
    ids = np.random.default_rng(1).integers(0, 100, counts.sum())
    rows = np.array(rows, np.int64)
    return dataclasses.replace(
        batch, ids=ids, counts=counts, rows=rows, sample=batch.sample[:1] * len(rows)
    )


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("rows", [[], [8], [12, 18], [3, 8, 10, 18]])
def test_the_last_layer_attends_for_those_who_are_read(rows, kernels, layers):
    model = random_model(kernels=kernels, num_hidden_layers=layers)
    runner = ModelRunner(model, pages=16, page_size=4)
    generator = torch.Generator().manual_seed(2)
    pool = torch.randn(runner.pool.shape, generator=generator)
    operations = runner.model.decoder.operations
    prepare, planned = operations.attention, []

    def attention(plan, *args, **how):
        planned.append(plan)
        return prepare(plan, *args, **how)

    operations.attention = attention
    everyone, found = list(range(19)), {}
    with torch.inference_mode():
        for read in (everyone, rows):
            planned.clear()
            runner.pool.copy_(pool)
            found[len(read)] = runner._forward(prefill_batch(read)).clone(), runner.pool.clone()
    assert sorted(set(planned[-1].rows.tolist())) == rows
    assert len(planned) == layers
    (whole, filled), (part, other) = found[19], found[len(rows)]
    assert torch.equal(filled, other)
    torch.testing.assert_close(part, whole[rows], rtol=2e-5, atol=2e-5)
