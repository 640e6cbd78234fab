"""An encoder's activations and layer norms, compiled and torch's, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from surge_beam.gpu.kernels.compiled import load_kernels
from surge_beam.gpu.models import elementwise
from surge_beam.gpu.models.elementwise import ACTIVATIONS, LayerNorm
from surge_beam.gpu.models.weights import TensorSource
from surge_beam.records import SurgeError


@pytest.fixture(params=["compiled", "AVX2", "DEFAULT", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """By this machine's instructions, by narrower ones, or without a compiler."""
    name: str = request.param
    library = load_kernels(None if name in ("compiled", "torch") else name)
    if library is None:
        pytest.skip("there is no C++ compiler here")
    monkeypatch.setattr(elementwise, "load_kernels", lambda: None if name == "torch" else library)
    elementwise._compiled.cache_clear()
    yield name
    elementwise._compiled.cache_clear()


class Norms(TensorSource):
    def __init__(self, width: int) -> None:
        super().__init__(dtype=torch.float32, device=torch.device("cpu"))
        self.tensors = {"n.weight": torch.randn(width), "n.bias": torch.randn(width)}

    def find(self, name: str) -> Tensor | None:
        return self.tensors.get(name)


@pytest.mark.parametrize("shape", [(1, 4), (3, 24), (64, 1536), (5, 7), (0, 8)])
def test_gelu(kernels: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape) * 3
    expected = torch.nn.functional.gelu(x.double())
    changed = x.clone()
    got = ACTIVATIONS["gelu"](changed)
    assert got is changed and got.shape == x.shape
    assert ((got - expected).abs() <= 2e-6 + 1e-6 * expected.abs()).all()


def test_gelu_of_all_sizes_and_of_what_is_no_number(kernels: str) -> None:
    x = torch.cat([torch.linspace(-12, 12, 100_001)[:-1], torch.tensor([-0.0, 1e30, -1e30, 1e-30])])
    expected = torch.nn.functional.gelu(x.double())
    got = ACTIVATIONS["gelu"](x.clone())
    assert ((got - expected).abs() <= 2e-6 + 1e-6 * expected.abs()).all()
    got = ACTIVATIONS["gelu"](torch.tensor([float("nan"), float("inf"), 1.0, 2.0]))
    assert got.isnan().tolist() == [True, False, False, False] and got[1] == float("inf")


def test_gelu_of_a_part_of_a_row(kernels: str) -> None:
    whole = torch.randn(6, 32)
    left, right = whole[:, :16].clone(), whole[:, 16:].clone()
    got = ACTIVATIONS["gelu"](whole.chunk(2, dim=1)[0])
    torch.testing.assert_close(got, torch.nn.functional.gelu(left), atol=2e-6, rtol=1e-6)
    assert torch.equal(whole[:, 16:], right)


@pytest.mark.parametrize("width", [4, 12, 30, 384, 768])
@pytest.mark.parametrize("rows", [0, 1, 3, 200])
@pytest.mark.parametrize("adds", [True, False])
def test_layer_norm(kernels: str, rows: int, width: int, adds: bool) -> None:
    source = Norms(width)
    norm = LayerNorm(source, "n", 1e-12)
    x = torch.randn(rows, width) * 4 + 30
    added = torch.randn(rows, width) if adds else None
    total = x.double() if added is None else x.double() + added.double()
    expected = torch.nn.functional.layer_norm(
        total, (width,), norm.weight.double(), norm.bias.double(), 1e-12
    )
    kept = None if added is None else added.clone()
    got = norm(x.clone(), added)
    assert got.shape == x.shape and ((got - expected).abs() <= 2e-5).all()
    assert added is None or torch.equal(added, kept)


def test_many_threads_give_the_same(kernels: str) -> None:
    norm, x = LayerNorm(Norms(384), "n", 1e-6), torch.randn(300, 384)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append((norm(x.clone(), x), ACTIVATIONS["gelu"](x.clone())))
    finally:
        torch.set_num_threads(before)
    for normed, activated in found[1:]:
        assert torch.equal(normed, found[0][0]) and torch.equal(activated, found[0][1])


@pytest.mark.parametrize(("weight", "bias"), [(8, 4), (4, 8)])
def test_sizes_that_do_not_agree_are_refused(weight: int, bias: int) -> None:
    source = Norms(weight)
    source.tensors["n.bias"] = torch.randn(bias)
    with pytest.raises(SurgeError, match=r"the norm n has weights of the shape \[\d\] and a bias"):
        LayerNorm(source, "n", 1e-6)


def test_a_norm_of_another_width_than_the_model_is_an_error(kernels: str) -> None:
    with pytest.raises(RuntimeError, match="normalized_shape"):
        LayerNorm(Norms(64), "n", 1e-6)(torch.randn(3, 16))
