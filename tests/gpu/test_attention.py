from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.gpu import attention
from surge_beam.gpu.attention import TorchAttention, merge_parts
from surge_beam.gpu.attention_plan import plan_attention, share_groups
from tests.gpu.attention_steps import CASES, TOLERANCE, check, check_only_rows, make_step, trees

without_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, without_cuda])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 1, 16, 40])
@pytest.mark.parametrize("case", CASES)
def test_cases_against_float64(case, window, device):
    step = make_step(CASES[case], device=device)
    check(step, step.run(window=window), window)
    check(step, step.run(window=window, share=False), window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("case", CASES)
def test_only_the_rows_that_are_read(case, window, device):
    check_only_rows(make_step(CASES[case], device=device), window=window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
def test_head_groups_and_sizes(group, dim, device):
    step = make_step(
        CASES["decode beside prefill"], heads=2 * group, kv_heads=2, dim=dim, device=device
    )
    check(step, step.run())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", ["nested levels", "decode beside prefill", "prefill in chunks"])
def test_dtypes(dtype, case, device):
    step = make_step(CASES[case], dtype=dtype, device=device)
    check(step, step.run())
    check(step, step.run(window=20), 20)


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("page_size", [1, 8, 128])
def test_page_sizes_and_pages_in_sequence(page_size, scattered):
    tree = [(-1, 0, 3 * page_size, 1), (0, 2, 5, 1), (0, 3, 0, 7), (-1, 0, 50, 1), (1, 2, 90, 1)]
    step = make_step(tree, page_size=page_size, scattered=scattered)
    check(step, step.run())


@pytest.mark.parametrize("case", ["nested levels", "decode beside prefill"])
def test_scores_up_to_60(case):
    step = make_step(CASES[case])
    keys = torch.cat([step.keys.nan_to_num(), step.key.transpose(0, 1)], 1)
    scores = torch.einsum("thgd,hkd->thgk", step.query.view(-1, 2, 3, 64), keys)
    step.scale = 60 / float(scores.abs().max())
    assert scores.max() > 50 / step.scale and scores.min() < -50 / step.scale
    # A float32 score of 60 is known to 4e-6 at best, and so is its exponential.
    check(step, step.run(), tolerance=2e-5)


def test_new_keys_and_values_reach_the_pool():
    step = make_step(CASES["decode beside prefill"])
    plan = plan_attention(step.tables, step.context, step.counts, step.page_size)
    keys, values = step.keys.clone(), step.values.clone()
    run = TorchAttention(plan, keys, heads=6, scale=step.scale)
    run.run(keys, values, step.query, step.key, step.value)
    for pool, before, new in ((keys, step.keys, step.key), (values, step.values, step.value)):
        assert torch.equal(pool[:, plan.slots], new.transpose(0, 1))
        changed = (pool != before) & ~(pool.isnan() & before.isnan())
        assert set(changed.any(2).any(0).nonzero().flatten().tolist()) == set(plan.slots.tolist())


@pytest.mark.parametrize("device", DEVICES)
def test_equal_runs_are_bit_equal(device):
    step = make_step(CASES["decode beside prefill"], device=device)
    first = step.run()
    assert torch.equal(first, step.run())
    # A plan serves every layer of a step: nothing is left over from the one before.
    assert torch.equal(first, step.run(times=2))


def test_a_step_of_two_layers_keeps_them_apart():
    step, other = (make_step(CASES["nested levels"], seed=0) for _ in range(2))
    other.query = torch.flip(step.query, [0])
    groups = share_groups(step.tables, step.context, step.page_size)
    plan = plan_attention(step.tables, step.context, step.counts, 16, groups=groups, node_cost=0)
    run = TorchAttention(plan, step.keys, heads=6, scale=step.scale)
    outs = [run.run(s.keys, s.values, s.query, s.key, s.value) for s in (step, other)]
    check(step, outs[0])
    check(other, outs[1])


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
    torch.testing.assert_close(permuted.run(), step.run()[rows], rtol=2e-6, atol=2e-6)


@given(
    trees(),
    st.sampled_from([None, 1, 7, 20]),
    st.sampled_from([(1, 1), (4, 1), (4, 2), (8, 1)]),
    st.sampled_from([0, 10]),
    st.booleans(),
)
@settings(max_examples=80)
def test_random_trees(sequences, window, heads, node_cost, scattered):
    step = make_step(
        sequences, page_size=4, heads=heads[0], kv_heads=heads[1], dim=16, scattered=scattered
    )
    check(step, step.run(window=window, node_cost=node_cost), window)


def test_small_blocks_change_nothing(monkeypatch):
    """Limits of memory cut the work anywhere."""
    step = make_step(CASES["decode beside prefill"])
    nested = make_step(CASES["nested levels"])
    monkeypatch.setattr(attention, "MAX_SCORES", 600)
    monkeypatch.setattr(attention, "MAX_GATHERED", 20_000)
    monkeypatch.setattr(attention, "PREFILL_ROWS", 7)
    for window in (None, 5, 40):
        check(step, step.run(window=window), window)
        check(nested, nested.run(window=window), window)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_parts_merge_in_any_order_and_shape(sizes, random):
    """Parts of ``sizes`` scores, some empty, at scores up to 60."""
    sizes = [1, *sizes]
    generator = torch.Generator().manual_seed(sum(sizes))
    scores = torch.randn(1, sum(sizes), generator=generator, dtype=torch.float64) * 20
    values = torch.randn(sum(sizes), 8, generator=generator, dtype=torch.float64)
    expected = scores.softmax(1) @ values
    parts = [
        (
            s.softmax(1) @ v if s.shape[1] else torch.zeros(1, 8, dtype=torch.float64),
            s.logsumexp(1) if s.shape[1] else torch.tensor([-torch.inf], dtype=torch.float64),
        )
        for s, v in zip(scores.split(sizes, 1), values.split(sizes), strict=True)
    ]
    parts = [(o.float(), log_sum.float()) for o, log_sum in parts]
    random.shuffle(parts)
    while len(parts) > 1:
        count = random.randint(2, len(parts))
        taken = [parts.pop(random.randrange(len(parts))) for _ in range(count)]
        outputs, log_sums = (torch.stack(x, 1) for x in zip(*taken, strict=True))
        parts.append((merge_parts(outputs, log_sums), log_sums.logsumexp(1)))
    torch.testing.assert_close(parts[0][0].double(), expected, rtol=0, atol=2e-5)


def test_merging_empty_parts_is_no_nan():
    outputs, log_sums = torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf)
    assert torch.equal(merge_parts(outputs, log_sums), torch.zeros(2, 4))
    outputs[:, 1], log_sums[:, 1] = 5.0, -60.0
    assert torch.equal(merge_parts(outputs, log_sums), torch.full((2, 4), 5.0))


def test_a_pool_of_more_than_2_31_numbers():
    """Its memory is never touched but for the pages in use; values are the keys."""
    pages, page_size, dim = 2**31 // (64 * 64) + 8, 64, 64
    pool = torch.empty(1, pages * page_size, dim, dtype=torch.float16)
    step = make_step([(-1, 0, 70, 1), (-1, 0, 5, 6)], page_size=page_size, heads=2, kv_heads=1)
    tables = [np.array([pages - 1, 3], np.int32), np.array([pages - 3], np.int32)]
    generator = torch.Generator().manual_seed(0)
    for table in tables:
        for page in table:
            start = int(page) * page_size
            pool[:, start : start + page_size] = torch.randn(1, 64, dim, generator=generator)
    fresh = {name: getattr(step, name).half() for name in ("query", "key")}
    step = dataclasses.replace(
        step, tables=tables, keys=pool, values=pool, value=fresh["key"], **fresh
    )
    plan = plan_attention(tables, step.context, step.counts, page_size)
    expected = step.reference()
    run = TorchAttention(plan, pool, heads=2, scale=step.scale)
    out = run.run(pool, pool, step.query, step.key, step.value)
    assert (out.double() - expected).abs().max() < 2e-3 * expected.abs().max()
