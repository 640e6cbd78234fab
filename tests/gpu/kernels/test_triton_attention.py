"""The cases of the torch path, and what is peculiar to a GPU; without one, in the interpreter."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from surge_beam.gpu import work_units
from surge_beam.gpu.attention_plan import plan_attention
from surge_beam.gpu.triton_attention import Room, TritonAttention
from surge_beam.records import SurgeError
from tests.gpu.attention_steps import CASES, TOLERANCE, Step, check, check_only_rows, make_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The sequences of a few cases once more, for what is tried many times.
SMALL = [(-1, 0, 37, 1), (0, 2, 5, 1), (0, 1, 0, 9), (-1, 0, 0, 20), (0, 2, 1, 1)]


def small_step(sequences=None, **options) -> Step:
    sizes = {"heads": 3, "kv_heads": 1, "device": DEVICE, **options}
    return make_step(SMALL if sequences is None else sequences, **sizes)


def attention_of(step: Step, *, room=None, **options) -> TritonAttention:
    heads = step.query.shape[1]
    plan = step.plan(**options)
    return TritonAttention(plan, step.keys, heads=heads, scale=step.scale, room=room)


def run(step: Step, attention: TritonAttention | None = None, **options) -> torch.Tensor:
    """The kernels' result; the pool is left as it was."""
    attention = attention or attention_of(step, **options)
    pool = step.keys.clone(), step.values.clone()
    return attention.run(*pool, step.query, step.key, step.value)


@pytest.fixture
def short_splits(monkeypatch):
    """So that a few dozen keys are several parts."""
    monkeypatch.setattr(work_units, "SPLIT_KEYS", 32)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("case", CASES)
def test_cases_against_float64(case, window):
    step = small_step(CASES[case])
    check(step, run(step, window=window), window)


@pytest.mark.parametrize("case", ["nested levels", "prefill in chunks"])
def test_only_the_rows_that_are_read(case):
    check_only_rows(small_step(CASES[case]), TritonAttention, window=16)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("case", ["decode, nothing shared", "nested levels"])
def test_cases_in_many_parts(case, window, short_splits):
    step = small_step(CASES[case], heads=2)
    check(step, run(step, window=window), window)
    check(step, run(step, window=window, share=False), window)


@pytest.mark.parametrize(
    ("group", "dim"),
    [*((group, 64) for group in range(1, 9)), (3, 96), (8, 96), (1, 128), (4, 128)],
)
def test_head_groups_and_sizes(group, dim, short_splits):
    sequences = [(-1, 0, 37, 1), (0, 2, 5, 1), (0, 1, 0, 9)]
    step = small_step(sequences, heads=2 * group, kv_heads=2, dim=dim)
    check(step, run(step))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sequences", [SMALL, [(-1, 0, 16, 24), (-1, 0, 40, 1)]])
def test_dtypes(sequences, dtype, short_splits):
    step = small_step(sequences, dtype=dtype)
    check(step, run(step))
    check(step, run(step, window=20), 20)


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
def test_page_sizes_and_pages_in_sequence(page_size, scattered, short_splits):
    tree = [(-1, 0, 2 * page_size, 1), (0, 2, 5, 1), (0, 1, 0, 7), (-1, 0, 20, 1)]
    step = small_step(tree, page_size=page_size, scattered=scattered)
    check(step, run(step))


@pytest.mark.parametrize("sequences", [SMALL, CASES["nested levels"]])
def test_scores_up_to_60(sequences, short_splits):
    step = small_step(sequences)
    keys = torch.cat([step.keys.nan_to_num(), step.key.transpose(0, 1)], 1)
    scores = torch.einsum("thd,kd->thk", step.query, keys[0])
    step.scale = 60 / float(scores.abs().max())
    assert scores.max() > 50 / step.scale and scores.min() < -50 / step.scale
    # A float32 score of 60 is known to 4e-6 at best, and so is its exponential.
    check(step, run(step), tolerance=2e-5)


def test_new_keys_and_values_reach_the_pool():
    step = small_step(kv_heads=3)
    plan = step.plan()
    keys, values = step.keys.clone(), step.values.clone()
    attention_of(step).run(keys, values, step.query, step.key, step.value)
    for pool, before, new in ((keys, step.keys, step.key), (values, step.values, step.value)):
        assert torch.equal(pool[:, plan.slots], new.transpose(0, 1))
        changed = (pool != before) & ~(pool.isnan() & before.isnan())
        assert set(changed.any(2).any(0).nonzero().flatten().tolist()) == set(plan.slots.tolist())


def test_strided_views_of_a_projection():
    """As a decoder hands them over."""
    step = small_step()
    fused = torch.cat([step.query, step.key, step.value], dim=1)
    views = dict(zip(("query", "key", "value"), fused.split((3, 1, 1), dim=1), strict=True))
    assert torch.equal(run(dataclasses.replace(step, **views)), run(step))


def test_a_pool_that_has_the_new_keys_is_only_read():
    step = small_step()
    attention = attention_of(step)
    keys, values = step.keys.clone(), step.values.clone()
    expected = attention.run(keys, values, step.query, step.key, step.value)
    before = keys.clone(), values.clone()
    assert torch.equal(attention.attend(keys, values, step.query), expected)
    for pool, old in zip((keys, values), before, strict=True):
        assert torch.equal(pool.view(torch.int32), old.view(torch.int32))


def test_equal_runs_are_bit_equal(short_splits):
    step = small_step()
    attention = attention_of(step)
    first = run(step, attention)
    # A plan serves every layer of a step: nothing is left over from the one before.
    other = dataclasses.replace(step, query=step.query.flip(0))
    check(other, run(other, attention))
    assert torch.equal(first, run(step, attention))
    assert torch.equal(first, run(step))


def test_batch_mates_change_no_bit(short_splits):
    """Without shared prefixes a row's sums are its own."""
    sequences = [(-1, 0, 100, 1), (-1, 0, 3, 30), (-1, 0, 70, 1)]
    step = small_step(sequences)
    together = run(step)
    starts = np.cumsum([0, *step.counts])
    for s in (2, 1, 0):
        rows = slice(starts[s], starts[s + 1])
        alone = dataclasses.replace(
            step,
            tables=[step.tables[s]],
            context=[step.context[s]],
            counts=[step.counts[s]],
            query=step.query[rows],
            key=step.key[rows],
            value=step.value[rows],
        )
        assert torch.equal(run(alone), together[rows])


def test_room_takes_any_plan_that_fits(short_splits):
    """As a captured CUDA graph needs it: the same launches on the same addresses."""
    step, larger = (small_step(x, heads=2) for x in (SMALL, CASES["nested levels"]))
    exact = attention_of(step).room, attention_of(larger).room
    assert not exact[0].holds(exact[1]) and exact[0].rounded().holds(exact[0])
    most = [max(a, b) for a, b in zip(*(room.units for room in exact), strict=True)]
    tokens = max(len(step.query), len(larger.query)) + 2
    room = Room(tokens, tuple(most), pages=256, entries=256, parts=128, merged=80).rounded()
    assert all(room.holds(one) for one in exact)
    attention = attention_of(larger, room=room)
    addresses = attention.slots.data_ptr()
    for one in (larger, step, larger):
        assert attention.load(one.plan())
        assert attention.slots.data_ptr() == addresses
        padding = tokens - len(one.query)
        padded = [
            torch.cat([x, x.new_full((padding, *x.shape[1:]), 7.0)])
            for x in (one.query, one.key, one.value)
        ]
        keys, values = one.keys.clone(), one.values.clone()
        out = attention.run(keys, values, *padded)
        assert torch.equal(out[: len(one.query)], run(one))
        assert not out[len(one.query) :].any()
        assert not (keys == 7.0).any() and not (values == 7.0).any()


def test_a_plan_that_exceeds_its_room_changes_nothing():
    step, larger = small_step(), small_step(CASES["nested levels"])
    attention = attention_of(step)
    expected = run(step, attention)
    assert not attention.load(larger.plan())
    assert torch.equal(run(step, attention), expected)
    with pytest.raises(SurgeError, match="the room is"):
        attention_of(larger, room=attention.room)


def test_a_step_without_tokens():
    step = small_step([(-1, 0, 0, 1)])
    none = TritonAttention(plan_attention([], [], [], 16), step.keys, heads=3, scale=1.0)
    out = none.run(step.keys, step.values, *(x[:0] for x in (step.query, step.key, step.value)))
    assert out.shape == (0, 3 * 64)


@pytest.mark.parametrize("options", [{"dim": 136}, {"dtype": torch.float64}])
def test_shapes_beyond_the_kernels_are_refused(options):
    with pytest.raises(SurgeError, match="Triton kernels take"):
        attention_of(small_step([(-1, 0, 0, 1)], **options))


def test_a_pool_of_more_than_2_31_numbers():
    """Its memory is never touched but for the pages in use; values are the keys."""
    pages, page_size, dim = 2**31 // (64 * 64) + 8, 64, 64
    pool = torch.empty(1, pages * page_size, dim, dtype=torch.float16, device=DEVICE)
    step = small_step(
        [(-1, 0, 70, 1), (-1, 0, 5, 6)], page_size=page_size, heads=2, dtype=torch.float16
    )
    tables = [np.array([pages - 1, 3], np.int32), np.array([pages - 3], np.int32)]
    for table in tables:
        for page in table:
            start = int(page) * page_size
            pool[:, start : start + page_size] = torch.randn(1, page_size, dim)
    step = dataclasses.replace(step, tables=tables, keys=pool, values=pool, value=step.key)
    expected = step.reference()
    out = attention_of(step).run(pool, pool, step.query, step.key, step.value)
    assert (out.double() - expected).abs().max() < 2e-3 * expected.abs().max()
