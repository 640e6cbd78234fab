"""The engine by the Triton kernels gives the texts that it gives by torch's operations on a CPU."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from surge_beam.gpu.cuda_graphs import DecodeGraphs
from surge_beam.gpu.engine import Engine
from surge_beam.gpu.model_runner import ModelRunner, page_bytes
from surge_beam.policy.residency import decide
from surge_beam.records import EngineConfig, Request, SamplingParams
from tests.gpu.random_models import random_model
from tests.gpu.test_engine import Chaos

CUDA = torch.cuda.is_available()
without_cuda = pytest.mark.skipif(not CUDA, reason="no CUDA device")


def requests_of(count, tokens):
    """Half of them greedy; some begin alike."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(5, 300, 21)
    sampled = {"temperature": 0.8}, {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.2}
    return [
        Request(
            custom_id=str(i),
            prompt_ids=tuple(
                map(int, [*prefix[: (0, 21, 18)[i % 3]], *rng.integers(5, 300, 1 + i % 7)])
            ),
            sampling=SamplingParams(
                max_tokens=tokens + i % 3, ignore_eos=True, **(sampled[i % 4 // 2] if i % 2 else {})
            ),
        )
        for i in range(count)
    ]


def run(model, requests, *, chaos=False, graphs=None, **settings):
    """Token ids, and the engine's counters."""
    pages = 40 if chaos else 30 * len(requests)
    runner = ModelRunner(model, pages=pages, page_size=4)
    if graphs is not None:
        runner.graphs = DecodeGraphs(model.decoder, runner._layers, graphs)
    config = EngineConfig(
        page_size=4,
        max_prefill_tokens=16,
        seed=3,
        host_kv_bytes=page_bytes(model, 4) * pages if chaos else 0,
        **settings,
    )
    choose = Chaos(random.Random(1)) if chaos else decide
    engine = Engine(config, runner=runner, decide=choose)
    done = engine.generate(requests)
    assert all(completion.error is None for completion in done)
    return {completion.custom_id: completion.token_ids for completion in done}, engine.stats


def test_in_the_interpreter():
    if CUDA:
        pytest.skip("there is a CUDA device")
    requests = requests_of(5, 4)
    expected, _ = run(random_model(kernels="torch"), requests)
    captured = []
    found, stats = run(
        random_model(kernels="triton"),
        requests,
        graphs=lambda call: captured.append(call) or call,
        max_sequences=4,
    )
    assert found == expected
    assert captured and stats.steps["decode"] > len(captured)


@pytest.mark.gpu
@without_cuda
@pytest.mark.parametrize("chaos", [False, True])
@pytest.mark.parametrize("schedule", ["eb", "mb", "eb+"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_on_a_gpu(family, schedule, chaos):
    """With chaos sequences are parked, evicted and resumed at random."""
    requests = requests_of(24, 30)
    expected, _ = run(random_model(family, kernels="torch"), requests)
    model = random_model(family, "cuda", kernels="auto")
    assert model.decoder.operations.capturable
    found, stats = run(model, requests, chaos=chaos, schedule=schedule, max_sequences=8)
    assert found == expected
    assert not chaos or (stats.parks and stats.resumes)
