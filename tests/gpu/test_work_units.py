from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.gpu import work_units as module
from surge_beam.gpu.attention_plan import AttentionPlan, plan_attention, share_groups
from surge_beam.gpu.work_units import work_units
from tests.gpu.attention_steps import CASES, make_step, trees

TILE_ROWS = (5, 21)


def plan_of(sequences, *, page_size=16, window=None, share=True) -> AttentionPlan:
    step = make_step(sequences, page_size=page_size, heads=1, kv_heads=1, dim=1)
    groups = share_groups(step.tables, step.context, page_size) if share else None
    return plan_attention(
        step.tables,
        step.context,
        step.counts,
        page_size,
        window=window,
        groups=groups,
        node_cost=0,
        merge_cost=0,
    )


def check(plan: AttentionPlan) -> None:
    """Units give each row the keys that the plan's items give it, from the same slots, once."""
    units = work_units(plan, TILE_ROWS)
    seen: list[list[tuple[int, int]]] = [[] for _ in plan.positions]  # a row's keys and slots
    parts: list[list[int]] = [[] for _ in plan.positions]
    for u in range(len(units.first_key)):
        assert units.first_key[u] < units.last_key[u]
        tile = np.searchsorted(units.tile_offsets, u, side="right") - 1
        assert 0 < units.row_count[u] <= TILE_ROWS[tile]
        for i in range(units.row_count[u]):
            row = plan.rows[units.first_row[u] + i]
            parts[row].append(-1 if units.first_part[u] < 0 else units.first_part[u] + i)
            for key in range(units.first_key[u], units.last_key[u]):
                low = 0 if plan.window is None else plan.positions[row] - plan.window + 1
                if low <= key <= plan.positions[row]:
                    page = plan.pages[units.page_base[u] + key // plan.page_size]
                    seen[row].append((key, page * plan.page_size + key % plan.page_size))
    wanted: list[list[tuple[int, int]]] = [[] for _ in plan.positions]
    for i in range(len(plan.keys)):
        pages = plan.pages[plan.page_offsets[i] : plan.page_offsets[i + 1]]
        first = plan.first_key[i]
        for row in plan.rows[plan.row_offsets[i] : plan.row_offsets[i + 1]]:
            for key in range(first, first + plan.keys[i]):
                low = 0 if plan.window is None else plan.positions[row] - plan.window + 1
                if low <= key <= plan.positions[row]:
                    page = pages[key // plan.page_size - first // plan.page_size]
                    wanted[row].append((key, page * plan.page_size + key % plan.page_size))
    assert list(map(sorted, seen)) == list(map(sorted, wanted))

    merged = {
        int(row): units.merged_parts[units.merged_offsets[i] : units.merged_offsets[i + 1]].tolist()
        for i, row in enumerate(units.merged_rows)
    }
    for row, its_parts in enumerate(parts):
        assert its_parts == [-1] or sorted(its_parts) == merged.pop(row)
    assert not merged
    every = sorted(part for its_parts in parts for part in its_parts if part >= 0)
    assert every == list(range(units.parts))


@pytest.mark.parametrize("split", [8, 64, 256])
@pytest.mark.parametrize("window", [None, 1, 16, 40])
@pytest.mark.parametrize("case", CASES)
def test_cases(case, window, split, monkeypatch):
    monkeypatch.setattr(module, "SPLIT_KEYS", split)
    check(plan_of(CASES[case], window=window))
    check(plan_of(CASES[case], window=window, share=False))


@given(trees(), st.sampled_from([None, 1, 7, 20]), st.sampled_from([3, 8, 64]), st.booleans())
@settings(max_examples=40)
def test_random_trees(sequences, window, split, share):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SPLIT_KEYS", split)
        check(plan_of(sequences, page_size=4, window=window, share=share))


def test_a_long_sequence_is_split_and_a_short_one_is_not():
    plan = plan_of([(-1, 0, 999, 1), (-1, 0, 255, 1)])
    units = work_units(plan, TILE_ROWS)
    assert (units.last_key - units.first_key).tolist() == [256, 256, 256, 256, 232]
    assert units.merged_rows.tolist() == [0] and units.parts == 4
    assert (units.first_part == -1).tolist() == [False, False, False, True, False]


def test_many_blocks_of_rows_take_longer_stretches():
    """Their programs are many without it, and each part of a row costs memory."""
    plan = plan_of([(-1, 0, 0, 21 * 12)])
    assert work_units(plan, TILE_ROWS).parts == 0
    assert work_units(plan_of([(-1, 0, 600, 21)]), TILE_ROWS).parts == 3 * 21


def test_a_sequence_is_cut_the_same_whoever_stands_beside_it():
    alone = work_units(plan_of([(-1, 0, 700, 1)]), TILE_ROWS)
    plan = plan_of([(-1, 0, 30, 50), (-1, 0, 700, 1), (-1, 0, 300, 1)], share=False)
    beside = work_units(plan, TILE_ROWS)
    own = np.flatnonzero(plan.rows[beside.first_row] == 50)
    assert sorted(beside.first_key[own]) == sorted(alone.first_key)
    assert sorted(beside.last_key[own]) == sorted(alone.last_key)


def test_an_empty_plan_has_no_units():
    units = work_units(plan_attention([], [], [], 16), TILE_ROWS)
    assert units.parts == len(units.first_key) == len(units.merged_rows) == 0
    assert units.tile_offsets.tolist() == [0, 0, 0]
