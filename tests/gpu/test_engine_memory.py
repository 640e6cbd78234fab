"""The process's peak over many requests stays below the model and the KV pool it was given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from surge_beam.gpu.kernels.compiled import load_kernels
from tests.gpu.tiny_models import tiny_decoder

ROOT = Path(__file__).resolve().parents[2]
POOL = 32 << 20
# What oneDNN and MKL keep for the shapes they have met where there are no compiled kernels
# (docs/structure.md, Memory), and else queues and results of a step.
WORKSPACE = (24 if load_kernels() else 192) << 20
PROGRAM = """
import json, sys
from surge_beam.gpu.engine import Engine
from surge_beam.records import EngineConfig, Request, SamplingParams

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10

def requests(first, count):
    for i in range(first, first + count):
        own = (i % 190 + 5, i // 190 + 5)
        prompt = own + tuple((i * 31 + j * 7) % 190 + 5 for j in range(20 + i % 9))
        yield Request(custom_id=str(i), prompt_ids=prompt, sampling=SamplingParams(max_tokens=3))

config = EngineConfig(model=sys.argv[1], device="cpu", kv_bytes=int(sys.argv[2]))
with Engine(config) as engine:
    before = peak()
    done = sum(1 for _ in engine.stream(requests(0, 20_000)))
    engine.pool.check([])
    print(json.dumps({"done": done, "retained": engine.pool.retained,
        "before": before, "after": peak(),
        "pages": engine.stats.peak_pages, "page_bytes": engine.runner.page_bytes}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_twenty_thousand_requests_fit_the_model_and_the_pool(tmp_path):
    folder = tiny_decoder("llama", tmp_path / "model")
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(POOL)],
        text=True,
        capture_output=True,
        check=True,
        cwd=ROOT,
    ).stdout
    found = json.loads(output)
    assert found["done"] == 20_000
    assert found["pages"] * found["page_bytes"] <= POOL
    assert found["retained"] * found["page_bytes"] > 0.9 * POOL, "the pool was filled"
    assert found["after"] - found["before"] < POOL + WORKSPACE
