from __future__ import annotations

import pytest
import torch

from surge_beam.gpu.kernels.compiled import load_kernels
from surge_beam.gpu.kernels.operations import (
    CompiledOperations,
    TorchOperations,
    operations_for,
)

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


def close(got, expected, tolerance):
    """Relative to the largest value."""
    assert got.shape == expected.shape
    error = (got.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < tolerance


@pytest.mark.parametrize("width", [4, 24, 64, 576])
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm(dtype, rows, width, library):
    x, added, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    x, added, weight = x.to(dtype), added.to(dtype), weight.to(dtype)
    for other in (None, added):
        total = x.double() if other is None else (x + other).double()
        expected = total * (total.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        for operations in (CompiledOperations(library, dtype), TorchOperations()):
            changed = x.clone()
            close(operations.add_norm(changed, other, weight, 1e-5), expected, DTYPES[dtype])
            assert torch.equal(changed, x if other is None else x + other)


@pytest.mark.parametrize("half", [4, 8, 12, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_part_of_a_wider_row(dtype, half, library):
    rows, heads = 9, 5
    wide = torch.randn(rows, heads + 2, 2 * half).to(dtype)
    angles = torch.rand(rows, 1, half) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    left, right = wide[:, :heads].double().chunk(2, 2)
    expected = torch.cat((left * cos - right * sin, right * cos + left * sin), 2)
    for operations in (TorchOperations(), CompiledOperations(library, dtype)):
        changed = wide.clone()
        close(operations.rotate(changed[:, :heads], cos, sin), expected, DTYPES[dtype])
        assert torch.equal(changed[:, heads:], wide[:, heads:])


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("inner", [4, 24, 1536])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated(dtype, inner, activation, library):
    gate_up = (torch.randn(13, 2 * inner) * 20).to(dtype)
    gate, up = gate_up.double().chunk(2, 1)
    expected = getattr(torch.nn.functional, activation)(gate) * up
    operations = CompiledOperations(library, dtype)
    close(operations.gated(gate_up.clone(), activation), expected, DTYPES[dtype])


def test_what_is_not_a_number_stays_none(library):
    operations = CompiledOperations(library, torch.float32)
    x = torch.ones(2, 8)
    x[1, 3] = torch.nan
    normed = operations.add_norm(x.clone(), None, torch.ones(8), 1e-5)
    assert normed[0].isfinite().all() and normed[1].isnan().all()
    gated = operations.gated(torch.cat([x, x], 1), "silu")
    assert gated[1].isnan().tolist() == [i == 3 for i in range(8)]
    huge = torch.tensor([[-1e30, -200.0, 200.0, 1e30, 1.0, 1.0, 1.0, 1.0]])
    got = operations.gated(huge, "silu")[0].tolist()
    assert got == pytest.approx([0.0, 0.0, 200.0, 1e30], rel=1e-6, abs=1e-8)


def choose(kernels, device, dtype, width=64, inner=64, head_dim=64, group=3):
    return operations_for(
        kernels, device, dtype, width=width, inner=inner, head_dim=head_dim, group=group
    )


def test_sizes_that_no_vector_divides_and_other_dtypes_go_to_torch():
    cpu = torch.device("cpu")
    kinds = {
        name: type(choose(kernels, cpu, dtype, *sizes))
        for name, kernels, dtype, sizes in (
            ("torch", "torch", torch.float32, (64, 64)),
            ("odd", "auto", torch.float32, (64, 30)),
            ("odd head", "auto", torch.float32, (64, 64, 6)),
            ("half", "auto", torch.float16, (64, 64)),
        )
    }
    assert set(kinds.values()) == {TorchOperations}
    expected = TorchOperations if load_kernels() is None else CompiledOperations
    assert type(choose("auto", cpu, torch.float32, 64, 64)) is expected
