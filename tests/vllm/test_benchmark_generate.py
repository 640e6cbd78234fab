"""The benchmark of generation with vLLM in it. Runs in an environment that has vLLM:
``make test-vllm``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import generate
from benchmarks.generate_tables import DEFAULT_BLOCK, VLLM, equal_outputs, step_seconds_of

pytest.importorskip("vllm", reason="no vLLM in this environment; make test-vllm has one")


@pytest.mark.timeout(1800)
def test_vllm_decodes_what_ours_decodes(shared_data: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw.json"
    flags = ["--scale=0.04", "--cases=documents", "--dtypes=float32", "--order=shuffled"]
    flags += ["--rounds=1", "--methods=ours,vLLM", "--vllm_default_block", "--device=cpu"]
    assert generate.main([*flags, f"--json={raw}"]) == 0
    found = json.loads(raw.read_text("utf-8"))
    sequences = found["cases"]["documents"]["sequences"]
    for method in (VLLM, DEFAULT_BLOCK):
        same = equal_outputs(found, "float32", "documents", method, "shuffled")
        assert same == (sequences, sequences)
        [step] = step_seconds_of(found, "float32", "documents", method)
        assert step is not None and step > 0
