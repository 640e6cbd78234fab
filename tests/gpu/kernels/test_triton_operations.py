"""Whole layers by the Triton kernels; without a GPU, in the interpreter."""

from __future__ import annotations

import logging

import pytest
import torch

from surge_beam.gpu import triton_attention
from surge_beam.gpu.attention_plan import plan_attention, share_groups
from surge_beam.gpu.kernels import operations
from surge_beam.gpu.kernels.operations import TorchOperations, operations_for
from surge_beam.gpu.kernels.triton_operations import TritonOperations
from surge_beam.gpu.models.rope import Rope, default_frequencies
from surge_beam.gpu.triton_attention import refusal
from tests.gpu.attention_steps import make_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TREE = [(-1, 0, 37, 1), (0, 2, 5, 1), (0, 1, 0, 9), (-1, 0, 0, 12)]


@pytest.mark.parametrize("normed", [False, True])
def test_a_layer_is_mixed_as_torch_mixes_it(normed):
    step = make_step(TREE, heads=4, kv_heads=2, dim=16, device=DEVICE)
    groups = share_groups(step.tables, step.context, step.page_size)
    plan = plan_attention(
        step.tables, step.context, step.counts, step.page_size, groups=groups, node_cost=0
    )
    qkv = torch.cat([step.query, step.key, step.value], 1).flatten(1)
    norms = 1 + 0.2 * torch.randn(6, 16, device=DEVICE) if normed else None
    positions = torch.from_numpy(plan.positions).to(DEVICE)
    cos, sin = Rope(default_frequencies(10_000.0, 16)).tables(positions, torch.float32)
    found = []
    for kind in (TorchOperations(), TritonOperations()):
        pool = step.keys.clone(), step.values.clone()
        attention = kind.attention(plan, step.keys, heads=4, scale=step.scale)
        out = kind.mix(attention, *pool, qkv.clone(), cos, sin, norms=norms, eps=1e-6)
        found.append((out, *pool))
    for expected, got in zip(*found, strict=True):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_other_activations_are_torchs():
    gate_up = torch.randn(3, 10, device=DEVICE)
    expected = TorchOperations().gated(gate_up.clone(), "gelu")
    assert torch.equal(TritonOperations().gated(gate_up.clone(), "gelu"), expected)


def choose(head_dim, group, kernels="auto"):
    """For a GPU, whether there is one or not."""
    sizes = {"width": 64, "inner": 64, "head_dim": head_dim, "group": group}
    return operations_for(kernels, torch.device("cuda"), torch.bfloat16, **sizes)


def test_a_gpu_gets_them_where_they_take_the_shape(monkeypatch, caplog):
    monkeypatch.setattr(triton_attention, "_capability", lambda device: 90)
    monkeypatch.setattr(operations, "_failed_launch", lambda device: "")
    operations._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert type(choose(64, 3)) is TritonOperations
        assert type(choose(64, 3, "torch")) is TorchOperations
        assert not caplog.records
        for head_dim, group in ((256, 1), (256, 1), (64, 129)):
            assert type(choose(head_dim, group)) is TorchOperations
    assert ["slower" in record.message for record in caplog.records] == [True, True]
    assert "256" in caplog.records[0].message and "129" in caplog.records[1].message


def test_without_triton_it_is_torchs(monkeypatch, caplog):
    monkeypatch.setattr(operations.importlib.util, "find_spec", lambda name: None)
    operations._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert type(choose(64, 3)) is TorchOperations
    assert "no package triton" in caplog.text


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_where_no_kernel_runs_it_is_torchs(monkeypatch, caplog):
    monkeypatch.setattr(triton_attention, "_capability", lambda device: 90)
    operations._say_once.cache_clear()
    operations._failed_launch.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert type(choose(64, 3)) is TorchOperations
    assert "runs no kernel" in caplog.text


def test_what_is_refused(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(triton_attention, "INTERPRETED", False)
    assert "TRITON_INTERPRET" in refusal(cpu, torch.float32, 64, 1)
    monkeypatch.setattr(triton_attention, "INTERPRETED", True)
    assert refusal(cpu, torch.float32, 64, 1) == ""
    assert "float64" in refusal(cpu, torch.float64, 64, 1)
