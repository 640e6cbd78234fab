from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_beam.gpu.attention_plan import AttentionPlan, only_rows, plan_attention, share_groups


@st.composite
def steps(draw):
    """Block tables of a random tree of prefixes, context, counts and page size of one step.

    Each sequence takes some leading pages of an earlier one, all of them full in both.
    """
    page_size = draw(st.sampled_from([1, 2, 4]))
    context: list[int] = []
    counts: list[int] = []
    tables: list[list[int]] = []
    fresh = iter(draw(st.permutations(range(200))))
    for s in range(draw(st.integers(1, 7))):
        parent = draw(st.integers(-1, s - 1))
        full = context[parent] // page_size if parent >= 0 else 0
        taken = tables[parent][: draw(st.integers(0, full))] if parent >= 0 else []
        own = draw(st.integers(0, 3 * page_size))
        context.append(len(taken) * page_size + own)
        counts.append(draw(st.sampled_from([1, 1, 1, 2, 5])))
        pages = -(-(context[s] + counts[s]) // page_size) + draw(st.integers(0, 1))
        tables.append([*taken, *(next(fresh) for _ in range(pages - len(taken)))])
    return [np.array(t, np.int32) for t in tables], context, counts, page_size


def covered(plan: AttentionPlan) -> list[tuple[int, int]]:
    """Every (row, slot) of every item, by the rule that its docstring states."""
    pairs = []
    for i in range(len(plan.keys)):
        pages = plan.pages[plan.page_offsets[i] : plan.page_offsets[i + 1]]
        first_page = plan.first_key[i] // plan.page_size
        for row in plan.rows[plan.row_offsets[i] : plan.row_offsets[i + 1]]:
            p, seen = plan.positions[row], 0
            for k in range(plan.first_key[i], plan.first_key[i] + plan.keys[i]):
                if k <= p and (plan.window is None or k > p - plan.window):
                    page = pages[k // plan.page_size - first_page]
                    pairs.append((int(row), int(page * plan.page_size + k % plan.page_size)))
                    seen += 1
            assert seen == plan.keys[i] if not plan.masked[i] else 0 < seen <= plan.keys[i]
    return pairs


@given(
    steps(),
    st.sampled_from([None, 1, 3, 8]),
    st.sampled_from([0, 4, 30]),
    st.sampled_from([0, 1]),
)
def test_every_visible_pair_is_covered_once(step, window, node_cost, merge_cost):
    tables, context, counts, page_size = step
    plan = plan_attention(
        tables,
        context,
        counts,
        page_size,
        window=window,
        groups=share_groups(tables, context, page_size),
        node_cost=node_cost,
        merge_cost=merge_cost,
    )
    expected, row = [], 0
    for table, start, count in zip(tables, context, counts, strict=True):
        slot = [int(page) * page_size + i for page in table for i in range(page_size)]
        for p in range(start, start + count):
            assert (plan.positions[row], plan.slots[row]) == (p, slot[p])
            low = 0 if window is None else max(0, p - window + 1)
            expected += [(row, slot[k]) for k in range(low, p + 1)]
            row += 1
    assert sorted(covered(plan)) == sorted(expected)
    assert plan.kv_tokens_read == plan.keys.sum()
    spans = [
        c + n - (0 if window is None else max(0, c - window + 1))
        for c, n in zip(context, counts, strict=True)
    ]
    assert plan.kv_tokens_unshared == sum(spans)
    # A node of its own pays by the stated rule, so it never reads more than without sharing.
    assert plan.kv_tokens_read <= plan.kv_tokens_unshared


@given(steps(), st.sampled_from([None, 1, 3, 8]), st.data())
def test_only_some_rows_are_covered(step, window, data):
    tables, context, counts, page_size = step
    groups = share_groups(tables, context, page_size)
    plan = plan_attention(
        tables, context, counts, page_size, window=window, groups=groups, node_cost=0, merge_cost=0
    )
    tokens = sum(counts)
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, tokens - 1)))), np.int64)
    read = only_rows(plan, rows)
    kept = set(rows.tolist())
    assert sorted(covered(read)) == sorted(pair for pair in covered(plan) if pair[0] in kept)
    assert np.array_equal(read.slots, plan.slots)
    # no key is read for nobody
    for i in range(len(read.keys)):
        at = read.positions[read.rows[read.row_offsets[i] : read.row_offsets[i + 1]]]
        assert at.max() >= read.first_key[i] + read.keys[i] - 1
        assert window is None or at.min() - window + 1 <= read.first_key[i]
        spanned = read.first_key[i] % page_size + read.keys[i]
        assert read.page_offsets[i + 1] - read.page_offsets[i] == -(-spanned // page_size)


@given(steps())
def test_nodes_are_the_maximal_runs_of_equal_full_pages(step):
    tables, context, _, page_size = step
    groups = share_groups(tables, context, page_size)
    assert sorted(groups.order) == list(range(len(tables)))
    found = set()
    for node in groups.nodes:
        members = groups.order[node.first : node.last]
        assert node.begin == (0 if node.parent < 0 else groups.nodes[node.parent].end)
        found.add((node.end, frozenset(members.tolist())))
    assert len(found) == len(groups.nodes)
    # By brute force: of every prefix that two or more sequences fill, the longest one for them.
    longest: dict[frozenset[int], int] = {}
    full = [tuple(t[: c // page_size].tolist()) for t, c in zip(tables, context, strict=True)]
    for prefix in {f[:end] for f in full for end in range(1, len(f) + 1)}:
        members = frozenset(i for i, f in enumerate(full) if f[: len(prefix)] == prefix)
        if len(members) > 1:
            longest[members] = max(longest.get(members, 0), len(prefix))
    assert found == {(end, members) for members, end in longest.items()}


def test_a_page_that_is_still_written_is_not_shared():
    tables = [np.array([7, 8, 9]), np.array([7, 8, 5])]
    assert share_groups(tables, [7, 8], 4).nodes[0].end == 1
    assert share_groups(tables, [8, 8], 4).nodes[0].end == 2
    assert share_groups(tables, [3, 8], 4).nodes == ()


def test_order_brings_members_together_and_keeps_equal_ones_in_order():
    a, b = [1, 2], [3, 4]
    tables = [np.array(t) for t in ([*a, 10], [*b, 11], [*a, 12], [*b, 13])]
    groups = share_groups(tables, [8] * 4, 4)
    assert groups.order.tolist() == [0, 2, 1, 3]
    unshared = share_groups([np.array([5]), np.array([5])], [3, 3], 4)
    assert unshared.order.tolist() == [0, 1]


def nested(sizes=(1, 40), group=8, page_size=16, own=1):
    """Two groups of sequences: a root of sizes[0] pages, sizes[1] more a group, own ones empty."""
    fresh = iter(range(10_000))
    root = [next(fresh) for _ in range(sizes[0])]
    tables = []
    for _ in range(2):
        branch = [next(fresh) for _ in range(sizes[1])]
        for _ in range(group):
            tables.append(np.array([*root, *branch, *(next(fresh) for _ in range(own))]))
    context = [page_size * sum(sizes)] * len(tables)
    return tables, context, share_groups(tables, context, page_size)


def shared_items(plan: AttentionPlan, sequences: int) -> list[tuple[int, int, int]]:
    """First key, keys and rows of the items that are not a sequence's own."""
    count = len(plan.keys) - sequences
    sizes = np.diff(plan.row_offsets)
    return [
        (int(a), int(b), int(c))
        for a, b, c in zip(plan.first_key[:count], plan.keys[:count], sizes[:count], strict=True)
    ]


def test_a_small_root_is_copied_into_large_branches():
    tables, context, groups = nested()
    plan = plan_attention(tables, context, [1] * 16, 16, groups=groups)
    assert shared_items(plan, 16) == [(0, 41 * 16, 8)] * 2
    assert plan.kv_tokens_read == 2 * 41 * 16 + 16
    assert plan.kv_tokens_unshared == 16 * (41 * 16 + 1)
    cheap = plan_attention(tables, context, [1] * 16, 16, groups=groups, node_cost=0, merge_cost=0)
    assert shared_items(cheap, 16) == [(0, 16, 16), (16, 640, 8), (16, 640, 8)]


def test_a_large_root_is_read_once_for_all_branches():
    tables, context, groups = nested((60, 20))
    plan = plan_attention(tables, context, [1] * 16, 16, groups=groups)
    assert shared_items(plan, 16) == [(0, 960, 16), (960, 320, 8), (960, 320, 8)]


def test_what_does_not_pay_is_read_by_every_sequence():
    tables, context, groups = nested((2, 1), group=2)
    plan = plan_attention(tables, context, [1] * 4, 16, groups=groups)
    assert shared_items(plan, 4) == []
    assert plan.kv_tokens_read == plan.kv_tokens_unshared
    # A long prefill uses what it reads for many queries by itself.
    tables, context, groups = nested((8, 20), group=2, own=16)
    short = plan_attention(tables, context, [1] * 4, 16, groups=groups)
    assert shared_items(short, 4) == [(0, 448, 2)] * 2
    long = plan_attention(tables, context, [256] * 4, 16, groups=groups)
    assert shared_items(long, 4) == []


def test_a_window_drops_what_lies_before_it():
    tables, context, groups = nested((10, 10), group=2, page_size=4)
    options = {"groups": groups, "node_cost": 0, "merge_cost": 0}
    plan = plan_attention(tables, context, [1] * 4, 4, window=30, **options)
    # Positions 80 see 51 to 80.
    assert shared_items(plan, 4) == [(51, 29, 2)] * 2
    assert plan.kv_tokens_read == 2 * 29 + 4
    own = plan_attention(tables, context, [1] * 4, 4, window=1, **options)
    assert shared_items(own, 4) == []
    assert own.keys.tolist() == [1] * 4


def test_slots_of_large_pools_do_not_overflow():
    page = np.array([0, 2**31 - 1], np.int32)
    plan = plan_attention([page], [64], [2], 64)
    assert plan.slots.tolist() == [(2**31 - 1) * 64, (2**31 - 1) * 64 + 1]


def test_an_empty_step_has_no_items():
    plan = plan_attention([], [], [], 16, groups=share_groups([], [], 16))
    assert len(plan.keys) == len(plan.slots) == plan.kv_tokens_read == 0


@pytest.mark.parametrize(
    ("pages", "counts", "window"), [([0], [1], None), ([0, 1], [0], None), ([0, 1], [1], 0)]
)
def test_impossible_steps_are_refused(pages, counts, window):
    with pytest.raises(ValueError):
        plan_attention([np.array(pages)], [4], counts, 4, window=window)
