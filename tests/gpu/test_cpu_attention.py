from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.gpu import cpu_attention, work_units
from surge_beam.gpu.attention_plan import plan_attention
from surge_beam.gpu.kernels.compiled import load_kernels
from surge_beam.gpu.kernels.operations import CompiledOperations
from tests.gpu.attention_steps import CASES, TOLERANCE, check, check_only_rows, make_step, trees

# What this processor has, and what every one has.
CAPABILITIES = sorted({torch.backends.cpu.get_cpu_capability(), "AVX2", "DEFAULT"})


def backend(dtype=torch.float32, capability=None):
    """Builds a backend as ``TorchAttention`` is built."""
    library = load_kernels(capability)
    if library is None:
        pytest.skip("no C++ compiler here")
    return CompiledOperations(library, dtype).attention


def runs_here(capability):
    there = torch.backends.cpu.get_cpu_capability()
    order = ["DEFAULT", "AVX2", "AVX512"]
    if capability not in order or there not in order:
        return capability == there
    return order.index(capability) <= order.index(there)


@pytest.fixture(params=CAPABILITIES)
def compiled(request):
    if not runs_here(request.param):
        pytest.skip(f"this processor has no {request.param}")
    return backend(capability=request.param)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("case", CASES)
def test_cases_against_float64(case, window, compiled):
    step = make_step(CASES[case])
    check(step, step.run(attention=compiled, window=window), window)
    check(step, step.run(attention=compiled, window=window, share=False), window)


@pytest.mark.parametrize("case", CASES)
def test_only_the_rows_that_are_read(case):
    for window in (None, 16):
        check_only_rows(make_step(CASES[case]), backend(), window=window)


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_head_groups_and_sizes(group, dim, compiled):
    step = make_step(CASES["decode beside prefill"], heads=2 * group, kv_heads=2, dim=dim)
    check(step, step.run(attention=compiled))


@pytest.mark.parametrize("dim", [12, 20, 24])
def test_head_sizes_that_no_wide_vector_divides(dim, compiled):
    step = make_step(CASES["nested levels"], dim=dim)
    check(step, step.run(attention=compiled))


@pytest.mark.parametrize("case", ["nested levels", "decode beside prefill", "prefill in chunks"])
def test_bfloat16(case):
    step = make_step(CASES[case], dtype=torch.bfloat16)
    run = functools.partial(step.run, attention=backend(torch.bfloat16))
    check(step, run())
    check(step, run(window=20), 20)


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("page_size", [1, 8, 128])
def test_page_sizes_and_pages_in_sequence(page_size, scattered):
    tree = [(-1, 0, 3 * page_size, 1), (0, 2, 5, 1), (0, 3, 0, 7), (-1, 0, 50, 1), (1, 2, 90, 1)]
    step = make_step(tree, page_size=page_size, scattered=scattered)
    check(step, step.run(attention=backend()))


@pytest.mark.parametrize("case", ["nested levels", "decode beside prefill"])
def test_scores_up_to_60(case, compiled):
    step = make_step(CASES[case])
    keys = torch.cat([step.keys.nan_to_num(), step.key.transpose(0, 1)], 1)
    scores = torch.einsum("thgd,hkd->thgk", step.query.view(-1, 2, 3, 64), keys)
    step.scale = 60 / float(scores.abs().max())
    # A float32 score of 60 is known to 4e-6 at best, and so is its exponential.
    check(step, step.run(attention=compiled), tolerance=2e-5)


def test_new_keys_and_values_reach_the_pool():
    step = make_step(CASES["decode beside prefill"])
    plan = plan_attention(step.tables, step.context, step.counts, step.page_size)
    keys, values = step.keys.clone(), step.values.clone()
    run = backend()(plan, keys, heads=6, scale=step.scale)
    run.run(keys, values, step.query, step.key, step.value)
    for pool, before, new in ((keys, step.keys, step.key), (values, step.values, step.value)):
        assert torch.equal(pool[:, plan.slots], new.transpose(0, 1))
        changed = (pool != before) & ~(pool.isnan() & before.isnan())
        assert set(changed.any(2).any(0).nonzero().flatten().tolist()) == set(plan.slots.tolist())


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_equal_runs_are_bit_equal_whatever_the_threads(threads):
    step = make_step(CASES["decode beside prefill"])
    run = functools.partial(step.run, attention=backend())
    first = run()
    torch.set_num_threads(threads)
    assert torch.equal(first, run())
    # A plan serves every layer of a step: nothing is left over from the one before.
    assert torch.equal(first, run(times=2))


def test_heads_of_a_row_may_be_part_of_a_wider_one():
    """As they are where query, key and value come from one product."""
    step = make_step(CASES["decode beside prefill"])
    wide = torch.cat([step.query, step.key, step.value], 1)
    query, key, value = wide.split((6, 2, 2), 1)
    strided = dataclasses.replace(step, query=query, key=key, value=value)
    assert torch.equal(strided.run(attention=backend()), step.run(attention=backend()))
    with pytest.raises(ValueError, match="side by side"):
        dataclasses.replace(step, query=step.query.mT.contiguous().mT).run(attention=backend())


@given(st.permutations(range(6)))
@settings(max_examples=15)
def test_permuted_sequences_give_permuted_results(order):
    step = make_step(CASES["decode beside prefill"])
    starts = np.cumsum([0, *step.counts])
    rows = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in order])
    permuted = dataclasses.replace(
        step,
        tables=[step.tables[s] for s in order],
        context=[step.context[s] for s in order],
        counts=[step.counts[s] for s in order],
        query=step.query[rows],
        key=step.key[rows],
        value=step.value[rows],
    )
    run = backend()
    expected = step.run(attention=run)[rows]
    torch.testing.assert_close(permuted.run(attention=run), expected, rtol=2e-6, atol=2e-6)


@given(
    trees(),
    st.sampled_from([None, 1, 7, 20]),
    st.sampled_from([(1, 1), (4, 1), (4, 2), (8, 1)]),
    st.sampled_from([0, 10]),
    st.booleans(),
    st.sampled_from([(16, 256), (1, 4), (3, 7)]),
)
@settings(max_examples=120)
def test_random_trees(sequences, window, heads, node_cost, scattered, sizes):
    """Also with units so small that they cut the work anywhere."""
    step = make_step(
        sequences, page_size=4, heads=heads[0], kv_heads=heads[1], dim=16, scattered=scattered
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "UNIT_ROWS", sizes[0])
        patch.setattr(cpu_attention, "UNIT_QUERIES", sizes[0])
        patch.setattr(work_units, "SPLIT_KEYS", sizes[1])
        out = step.run(attention=backend(), window=window, node_cost=node_cost)
    check(step, out, window)


def test_what_a_long_shared_prefix_gives_does_not_depend_on_the_cut():
    step = make_step([(-1, 0, 1300, 1), (0, 81, 3, 1), (0, 81, 0, 1), (0, 40, 5, 70)])
    check(step, step.run(attention=backend()), tolerance=2 * TOLERANCE[torch.float32])


def test_a_pool_of_more_than_2_31_numbers():
    """Its memory is never touched but for the pages in use; values are the keys."""
    pages, page_size, dim = 2**31 // (64 * 64) + 8, 64, 64
    pool = torch.empty(1, pages * page_size, dim, dtype=torch.bfloat16)
    step = make_step([(-1, 0, 70, 1), (-1, 0, 5, 6)], page_size=page_size, heads=2, kv_heads=1)
    tables = [np.array([pages - 1, 3], np.int32), np.array([pages - 3], np.int32)]
    generator = torch.Generator().manual_seed(0)
    for table in tables:
        for page in table:
            start = int(page) * page_size
            pool[:, start : start + page_size] = torch.randn(1, 64, dim, generator=generator)
    fresh = {name: getattr(step, name).bfloat16() for name in ("query", "key")}
    step = dataclasses.replace(
        step, tables=tables, keys=pool, values=pool, value=fresh["key"], **fresh
    )
    plan = plan_attention(tables, step.context, step.counts, page_size)
    expected = step.reference()
    run = backend(torch.bfloat16)(plan, pool, heads=2, scale=step.scale)
    out = run.run(pool, pool, step.query, step.key, step.value)
    assert (out.double() - expected).abs().max() < 1.5e-2 * expected.abs().max()
