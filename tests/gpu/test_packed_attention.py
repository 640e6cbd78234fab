"""Attention inside the sequences of a packed batch, by the kernel and by torch, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.gpu.models import attention
from surge_beam.gpu.models.attention import PackedAttention, compiled_kernel
from surge_beam.gpu.models.batch import pack

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernel():
    found = compiled_kernel(torch.float32, CPU)
    if found is None:
        pytest.skip("no C++ compiler here")
    return found


def packed(lengths):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return pack(np.zeros(offsets[-1], np.int32), offsets, np.arange(len(lengths)), CPU)


def layer(batch, heads, kv_heads, width, seed=0):
    """Query, key and value as views of one fused projection."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(len(batch.ids), heads + 2 * kv_heads, width, generator=made)
    return x.split((heads, kv_heads, kv_heads), dim=1)


def expected(batch, query, key, value, causal, window, bias):
    """Float64, one sequence after another."""
    heads, width = query.shape[1:]
    out = torch.zeros(len(query), heads, width, dtype=torch.float64)
    for first, last in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        q, k, v = (x[first:last].double().transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(heads // len(x), 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * width**-0.5
        if bias is not None:
            scores += bias[last - first][0].double()
        at = torch.arange(last - first)
        distance = at[:, None] - at[None, :]
        if causal:
            scores.masked_fill_(distance < 0, -torch.inf)
        if window is not None:
            scores.masked_fill_(distance.abs() > window, -torch.inf)
        out[first:last] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out.flatten(1)


def check(kernel, lengths, heads, kv_heads, width, *, causal=False, window=None, bias=None):
    batch = packed(sorted(lengths, reverse=True))
    attend = PackedAttention(batch, kernel, causal=causal, window=window, bias=bias)
    for seed in range(2):  # two layers of one plan
        query, key, value = layer(batch, heads, kv_heads, width, seed)
        out = attend(query, key, value)
        assert out.shape == (len(batch.ids), heads * width) and out.is_contiguous()
        torch.testing.assert_close(
            *(out.double(), expected(batch, query, key, value, causal, window, bias)),
            rtol=0,
            atol=1e-5,
        )
        assert not out[batch.runs[-1].stop :].any()


LENGTHS = st.lists(st.integers(1, 150), min_size=1, max_size=9)


@settings(deadline=None, max_examples=60)
@given(
    lengths=LENGTHS,
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 1)]),
    width=st.sampled_from([4, 8, 12, 32, 64]),
    causal=st.booleans(),
    compiled=st.booleans(),
)
def test_any_lengths_against_float64(lengths, heads, width, causal, compiled, kernel):
    check(kernel if compiled else None, lengths, *heads, width, causal=causal)


@settings(deadline=None, max_examples=30)
@given(lengths=LENGTHS, window=st.integers(0, 150), causal=st.booleans())
def test_windows_against_float64(lengths, window, causal, kernel):
    check(kernel, lengths, 2, 2, 16, causal=causal, window=window)


def test_a_bias_and_a_width_that_the_kernel_does_not_take(kernel):
    lengths = [40, 40, 7, 1]
    bias = {n: torch.randn(1, 3, n, n) for n in lengths}
    check(kernel, lengths, 3, 3, 16, bias=bias)
    check(kernel, lengths, 3, 3, 6)


def test_many_blocks_of_keys_and_of_queries(kernel):
    check(kernel, [1100, 513, 300], 2, 2, 32)
    check(kernel, [1100, 513, 300], 2, 1, 64, causal=True)


def test_a_sequence_gets_the_same_result_in_any_company(kernel):
    lone, company = packed([70]), packed([150, 99, 70, 3])
    begin = 150 + 99
    mates = layer(company, 4, 2, 16)
    own = [x[begin : begin + 70] for x in mates]
    own = [torch.cat([x, x.new_zeros(len(lone.ids) - 70, *x.shape[1:])]) for x in own]
    assert torch.equal(
        PackedAttention(lone, kernel)(*own)[:70],
        PackedAttention(company, kernel)(*mates)[begin : begin + 70],
    )


def test_keys_and_values_that_lie_otherwise_than_each_other(kernel):
    batch = packed([30, 12])
    query, key, value = layer(batch, 2, 2, 8)
    expected_out = PackedAttention(batch, kernel)(query, key, value)
    assert torch.equal(PackedAttention(batch, kernel)(query, key.contiguous(), value), expected_out)


def test_nan_stays_in_its_sequence(kernel):
    batch = packed([9, 5, 5])
    query, key, value = (x.clone() for x in layer(batch, 2, 2, 8))
    key[10] = torch.nan
    out = PackedAttention(batch, kernel)(query, key, value)
    assert out[9:14].isnan().all()
    assert not out[:9].isnan().any() and not out[14:].isnan().any()


def test_the_kernel_is_for_float32_on_a_cpu(monkeypatch):
    assert compiled_kernel(torch.bfloat16, CPU) is None
    assert compiled_kernel(torch.float32, torch.device("meta")) is None
    monkeypatch.setattr(attention, "load_kernels", lambda: None)
    assert compiled_kernel(torch.float32, CPU) is None
