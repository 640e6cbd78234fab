"""Against torch in float64; without a GPU, in the interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from surge_beam.gpu.kernels.elementwise_triton import (
    add_rms_norm,
    rope_and_append,
    silu_and_mul,
)
from surge_beam.gpu.models.rope import Rope, default_frequencies, rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Largest error, relative to the largest value; the interpreter does not round to bfloat16, it cuts.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def check(out, expected):
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[out.dtype]


@DTYPES
@pytest.mark.parametrize("width", [1, 100, 576, 1024])
def test_rms_norm(width, dtype):
    wide, weight = normal(3, 2 * width, dtype=dtype), normal(width, dtype=dtype, seed=1)
    x, before = wide[:, :width], wide.clone()
    check(
        add_rms_norm(x, None, weight, 1e-5),
        F.rms_norm(x.double(), (width,), weight.double(), 1e-5),
    )
    assert torch.equal(wide, before)


@DTYPES
def test_add_rms_norm(dtype):
    wide, added = normal(3, 150, dtype=dtype), normal(3, 100, dtype=dtype, seed=1)
    weight, x, before = normal(100, dtype=dtype, seed=2), wide[:, :100], wide.clone()
    normed = add_rms_norm(x, added, weight, 1e-5)
    check(x, before[:, :100].double() + added.double())
    assert torch.equal(wide[:, 100:], before[:, 100:])
    # What is normed is the sum as later layers see it.
    check(normed, F.rms_norm(x.double(), (100,), weight.double(), 1e-5))


def test_rows_of_zeros_are_no_nan():
    assert not add_rms_norm(torch.zeros(2, 16, device=DEVICE), None, normal(16), 1e-5).any()


@DTYPES
@pytest.mark.parametrize("width", [1, 96, 1500])
def test_silu_and_mul(width, dtype):
    gate_up = normal(3, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=1)
    check(silu_and_mul(gate_up), F.silu(gate) * up)


def test_silu_of_large_numbers_is_finite():
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 1.0, 1.0, 1.0]], device=DEVICE)
    torch.testing.assert_close(silu_and_mul(gate_up).tolist(), [[0.0, 1e4, 0.0]])


@DTYPES
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (2, 2, 96), (8, 1, 128)])
def test_rope_and_append(heads, kv_heads, dim, norms, dtype):
    slots = torch.tensor([37, 0, -1, 12], device=DEVICE)
    positions = torch.tensor([5, 0, 3, 1000], device=DEVICE)
    qkv = normal(4, (heads + 2 * kv_heads) * dim, dtype=dtype)
    cos, sin = Rope(default_frequencies(10_000.0, dim)).tables(positions, dtype)
    weights = normal(heads + kv_heads, dim, dtype=dtype, seed=1) if norms else None
    pool = torch.full((2, kv_heads, 40, dim), torch.nan, dtype=dtype, device=DEVICE)
    query = rope_and_append(
        qkv, cos, sin, slots, pool[0], pool[1], heads=heads, norms=weights, eps=1e-6
    )

    turned, value = qkv.double().view(4, -1, dim).split((heads + kv_heads, kv_heads), dim=1)
    if weights is not None:
        turned = F.rms_norm(turned, (dim,), None, 1e-6) * weights.double()
    turned = rotate(turned, cos.double(), sin.double())
    check(query, turned[:, :heads])
    written = [0, 1, 3]
    check(pool[0][:, slots[written]], turned[written, heads:].transpose(0, 1))
    assert torch.equal(pool[1][:, slots[written]].double(), value[written].transpose(0, 1))
    assert int(pool[0, 0, :, 0].isfinite().sum()) == len(written)


def test_no_tokens():
    assert add_rms_norm(normal(0, 8), normal(0, 8), normal(8), 1e-5).shape == (0, 8)
    assert silu_and_mul(normal(0, 8)).shape == (0, 4)
    pool, none = normal(1, 4, 4), torch.empty(0, dtype=torch.int64, device=DEVICE)
    tables = normal(0, 1, 2)
    assert rope_and_append(normal(0, 12), tables, tables, none, pool, pool, heads=1).numel() == 0
