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

without_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, without_cuda])]
# Largest error, relative to the largest value.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@dataclasses.dataclass
class Step:
    """A step over a pool whose slots hold NaN where no token is."""

    tables: list[np.ndarray]
    context: list[int]
    counts: list[int]
    page_size: int
    keys: torch.Tensor
    values: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float

    def run(self, *, window=None, share=True, node_cost=0, merge_cost=0, times=1) -> torch.Tensor:
        """The backend's result; the pool is left as it was."""
        groups = share_groups(self.tables, self.context, self.page_size) if share else None
        plan = plan_attention(
            self.tables,
            self.context,
            self.counts,
            self.page_size,
            window=window,
            groups=groups,
            node_cost=node_cost,
            merge_cost=merge_cost,
        )
        run = TorchAttention(plan, self.keys, heads=self.query.shape[1], scale=self.scale)
        for _ in range(times):
            out = run.run(self.keys.clone(), self.values.clone(), self.query, self.key, self.value)
        return out

    def reference(self, window=None) -> torch.Tensor:
        """Float64, sequence after sequence and query after query."""
        heads, dim = self.query.shape[1:]
        group = heads // self.keys.shape[0]
        rows, row = [], 0
        for table, start, count in zip(self.tables, self.context, self.counts, strict=True):
            at = torch.arange(start)
            slots = torch.as_tensor(table).long()[at // self.page_size] * self.page_size
            slots = (slots + at % self.page_size).to(self.keys.device)
            new = slice(row, row + count)
            k, v = (
                torch.cat([pool[:, slots], fresh[new].transpose(0, 1)], 1).double()
                for pool, fresh in ((self.keys, self.key), (self.values, self.value))
            )
            for p in range(start, start + count):
                low = 0 if window is None else max(0, p - window + 1)
                q = self.query[row].double().view(-1, group, dim)
                weights = (q @ k[:, low : p + 1].mT * self.scale).softmax(-1)
                rows.append((weights @ v[:, low : p + 1]).reshape(-1))
                row += 1
        return torch.stack(rows)


def make_step(
    sequences,
    *,
    page_size=16,
    heads=6,
    kv_heads=2,
    dim=64,
    dtype=torch.float32,
    scattered=True,
    device="cpu",
    seed=0,
) -> Step:
    """A step of sequences (parent, pages taken from it, own tokens in the pool, new tokens)."""
    random = np.random.default_rng(seed)
    tables, context, counts, pages = [], [], [], 0
    for parent, taken, own, count in sequences:
        taken_pages = tables[parent][:taken] if taken else []
        context.append(taken * page_size + own)
        counts.append(count)
        fresh = -(-(own + count) // page_size)
        tables.append(np.array([*taken_pages, *range(pages, pages + fresh)], np.int32))
        pages += fresh
    if scattered:
        place = random.permutation(2 * pages + 3).astype(np.int32)
        tables, pages = [place[table] for table in tables], len(place)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    pool = torch.full((2, kv_heads, pages * page_size, dim), torch.nan, dtype=dtype, device=device)
    for table, tokens in zip(tables, context, strict=True):
        at = np.arange(tokens)
        slots = torch.from_numpy(
            table.astype(np.int64)[at // page_size] * page_size + at % page_size
        )
        empty = slots[pool[0, 0, slots.to(device), 0].isnan().cpu()].to(device)
        pool[:, :, empty] = normal(2, kv_heads, len(empty), dim)
    total = sum(counts)
    return Step(
        tables,
        context,
        counts,
        page_size,
        pool[0],
        pool[1],
        normal(total, heads, dim),
        normal(total, kv_heads, dim),
        normal(total, kv_heads, dim),
        dim**-0.5,
    )


def check(step: Step, out: torch.Tensor, window=None, tolerance=None) -> None:
    assert out.dtype == step.query.dtype and out.shape == step.query.flatten(1).shape
    expected = step.reference(window)
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error < (tolerance or TOLERANCE[out.dtype])


# Sequences (parent, pages taken from it, own tokens in the pool, new tokens), pages of 16.
CASES = {
    "one token": [(-1, 0, 0, 1)],
    "decode, nothing shared": [(-1, 0, n, 1) for n in (1, 15, 16, 17, 63, 64, 65, 200, 0)],
    "prefill of empty sequences": [(-1, 0, 0, n) for n in (1, 16, 17, 70)],
    "prefill in chunks": [(-1, 0, 33, 40), (-1, 0, 16, 16), (-1, 0, 100, 2)],
    # A prefix of 15 tokens fills no page, one of 17 fills one and leaves a token to each sequence.
    "prefix of a page less one": [(-1, 0, 15, 1), (-1, 0, 15, 1), (-1, 0, 15, 1)],
    "prefix of a page": [(-1, 0, 16, 1), (0, 1, 0, 1), (0, 1, 5, 1)],
    "prefix of a page and one": [(-1, 0, 17, 1), (0, 1, 1, 1), (0, 1, 1, 1)],
    "group of one": [(-1, 0, 64, 1), (-1, 0, 80, 1)],
    "request equal to the prefix": [(-1, 0, 64, 1), (0, 4, 0, 1), (0, 4, 30, 1)],
    "nested levels": [
        (-1, 0, 96, 1),
        (0, 2, 40, 1),
        (0, 2, 64, 1),
        (2, 5, 3, 1),
        (2, 6, 0, 1),
        (0, 6, 20, 1),
        (-1, 0, 70, 1),
        (6, 3, 1, 1),
    ],
    "decode beside prefill": [
        (-1, 0, 96, 1),
        (0, 6, 10, 20),
        (0, 6, 0, 33),
        (-1, 0, 0, 50),
        (0, 2, 15, 1),
        (-1, 0, 20, 30),
    ],
    "group that only prefills": [(-1, 0, 64, 5), (0, 4, 0, 18), (0, 3, 9, 2), (0, 3, 0, 31)],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 1, 16, 40])
@pytest.mark.parametrize("case", CASES)
def test_cases_against_float64(case, window, device):
    step = make_step(CASES[case], device=device)
    check(step, step.run(window=window), window)
    check(step, step.run(window=window, share=False), window)


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


@st.composite
def trees(draw):
    """Sequences of a random tree, of pages of 4 tokens."""
    sequences, full = [], []
    for s in range(draw(st.integers(1, 6))):
        parent = draw(st.integers(-1, s - 1))
        taken = draw(st.integers(0, full[parent])) if parent >= 0 else 0
        own = draw(st.integers(0, 30))
        sequences.append((parent, taken, own, draw(st.sampled_from([1, 1, 1, 3, 9]))))
        full.append(taken + own // 4)
    return sequences


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
