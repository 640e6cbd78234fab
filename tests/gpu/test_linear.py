"""Linear layers of every layout against float64."""

from __future__ import annotations

import pytest
import torch

from surge_beam.gpu.buffer import Buffer
from surge_beam.gpu.kernels.compiled import load_kernels
from surge_beam.gpu.models.linear import (
    CompiledLinear,
    Linear,
    PackedLinear,
    make_linear,
    packing_available,
)

SHAPES = [(1, 1), (16, 8), (17, 9), (5, 64), (40, 3), (960, 576), (49, 1536)]
ROWS = [1, 2, 3, 5, 6, 7, 12, 31, 64, 96, 97, 200]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_compiled_layer_equals_float64(library, shape, bias):
    outputs, inputs = shape
    weight, added = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
    layer = CompiledLinear(library, weight, added)
    assert (layer.out_features, layer.in_features) == shape
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        expected = x.double() @ weight.double().T + (0 if added is None else added.double())
        # a sum of n products is off by n roundings of the sum of their sizes at most
        size = x.double().abs() @ weight.double().abs().T + (0 if added is None else added.abs())
        assert ((layer(x) - expected).abs() <= size * (inputs + 1) * 2.0**-24).all()
    assert layer(torch.empty(0, inputs)).shape == (0, outputs)


def test_a_row_of_the_compiled_layer_depends_on_no_other(library):
    layer = CompiledLinear(library, torch.randn(200, 300), torch.randn(200))
    x = torch.randn(211, 300)
    whole = layer(x)
    for rows in (1, 2, 5, 32, 100):
        assert torch.equal(layer(x[7 : 7 + rows]), whole[7 : 7 + rows])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(layer(x), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_of_bfloat16_are_kept_as_such_and_change_nothing(library, shape):
    weight, added = torch.randn(shape).bfloat16().float(), torch.randn(shape[0])
    layer, wide = (CompiledLinear(library, w, added) for w in (weight, weight * (1 + 2.0**-12)))
    assert (layer.weight.dtype, wide.weight.dtype) == (torch.bfloat16, torch.float32)
    wide.weight.copy_(layer.weight)
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        assert torch.equal(layer(x), wide(x))


def test_rows_that_do_not_lie_side_by_side(library):
    layer = CompiledLinear(library, torch.randn(20, 30))
    wide = torch.randn(9, 70)
    assert torch.equal(layer(wide[:, 10:40]), layer(wide[:, 10:40].clone()))


def test_nothing_else_is_read_or_written(library):
    """NaN behind the rows and the panels' filling stay out of the results."""
    layer = CompiledLinear(library, torch.randn(17, 10), torch.randn(17))
    x = torch.full((8, 10), float("nan"))
    x[:3] = torch.randn(3, 10)
    assert layer(x)[:3].isfinite().all()
    assert layer(x)[3:].isnan().all()


def test_the_layer_that_is_chosen():
    weight = torch.randn(8, 4)
    packed = PackedLinear if packing_available() else Linear
    assert type(make_linear(weight, kernels="torch")) is packed
    compiled = packed if load_kernels() is None else CompiledLinear
    assert type(make_linear(weight, kernels="auto")) is compiled


@pytest.mark.parametrize("kind", [Linear, PackedLinear])
def test_torchs_layers_equal_float64(kind):
    if kind is PackedLinear and not packing_available():
        pytest.skip("this torch has no oneDNN")
    weight, bias, x = torch.randn(24, 40), torch.randn(24), torch.randn(9, 40)
    expected = x.double() @ weight.double().T + bias.double()
    assert (kind(weight, bias)(x) - expected).abs().max() < 1e-4


def test_packed_rows_are_of_few_numbers():
    padded = [PackedLinear.padded(rows) for rows in range(1, 5000)]
    assert all(rows <= p < rows * 9 / 8 for rows, p in enumerate(padded, 1))
    assert padded == sorted(padded)
    assert all(PackedLinear.padded(p) == p for p in padded)
    assert len(set(padded[:1024])) == 64
    assert PackedLinear.padded(0) == 0
    assert Linear.padded(17) == 17


def test_a_buffer_gives_the_same_memory_again(library):
    buffer = Buffer()
    layers = [CompiledLinear(library, torch.randn(20, 30), buffer=buffer) for _ in range(2)]
    x = torch.randn(9, 30)
    first, kept = layers[0](x), layers[0](x).clone()
    second = layers[1](x)
    assert second.data_ptr() == first.data_ptr()
    assert not torch.equal(second, kept)
    assert torch.equal(layers[0](x), kept)
    assert layers[0](torch.randn(90, 30)).shape == (90, 20)
    assert buffer.empty(2, 3, torch.bfloat16).dtype == torch.bfloat16
