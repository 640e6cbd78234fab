"""The benchmark of prefix savings: what it counts is right, and it runs on real prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import prefix_savings
from benchmarks.prefix_savings import (
    DATASETS,
    Rows,
    groupings,
    heaviest,
    hot,
    many_rows,
    rows_of,
    split,
    tau,
    tokens_shared,
)
from surge_beam.policy.prefix_digests import path_key
from surge_beam.policy.prefix_ranges import tokens_saved


class Words:
    """Stands in for a tokenizer: a number a word, and a template without signs."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{m['role']}> {m['content']} <end>" for m in messages)

    def tokenize(self, texts: list[str]) -> list[np.ndarray]:
        words = [re.findall(r"\w+|\W", text) for text in texts]
        return [
            np.array([self.ids.setdefault(w, len(self.ids)) for w in found], np.int32)
            for found in words
        ]


prompts = st.lists(st.lists(st.integers(0, 300), max_size=6), min_size=1, max_size=12)


@given(prompts)
def test_tokens_shared_is_what_a_tree_of_tokens_saves(prompts: list[list[int]]) -> None:
    prefixes = [tuple(p[: k + 1]) for p in prompts for k in range(len(p))]
    found = tokens_shared([np.array(p, np.int32) for p in prompts])
    assert found == len(prefixes) - len(set(prefixes))


def sharing(count: int) -> Rows:
    """Prompts of 200 tokens behind eight prefixes of 150."""
    random = np.random.default_rng(0)
    starts = random.integers(0, 1000, (8, 150))
    own = random.integers(0, 1000, (count, 50))
    return rows_of([np.concatenate([starts[i % 8], own[i]]).astype(np.int32) for i in range(count)])


def test_rows_of_prompts() -> None:
    rows = sharing(80)
    whole = [range(80)]
    assert rows.shared is not None and 72 * 150 <= rows.shared <= 72 * 150 + 10
    assert tokens_saved(rows.pages, whole, rows.page) == 72 * 144
    assert tokens_saved(rows.paths, whole, 64) == 72 * 128
    # in the order of the files, each prefix comes every eighth row
    first = [rows.paths[i][:8] for i in rows.files]
    assert first[:8] * 10 == first and len(set(first)) == 8


@pytest.mark.parametrize("batches", [1, 8, 64])
def test_every_way_holds_every_row_once(batches: int) -> None:
    rows = sharing(320)
    for way, groups in groupings(rows, batches, sample=100).items():
        assert sorted(i for group in groups for i in group) == list(range(320)), way
        assert len(groups) >= batches if way.startswith("ours, cuts") else len(groups) == batches
    kept = prefix_savings.shares_kept(rows, 100)
    assert all(share[1][0] == 100 for share in kept.values())
    assert kept["ours, cuts from all rows"][8][0] > 99.9 > 90 > kept["arrival"][8][0]


def test_ranges_come_in_path_order() -> None:
    rows = sharing(64)
    members = split(rows, prefix_savings.cuts_from_sample(rows, 4, None))
    paths = [rows.paths[i] for group in members for i in group]
    assert paths == sorted(paths)


@pytest.mark.parametrize("one_path", [False, True])
def test_a_hot_prefix_has_nine_rows_of_ten(one_path: bool) -> None:
    rows = hot(many_rows(2000), one_path=one_path)
    first = [path[:8] for path in rows.paths]
    most = max(set(first), key=first.count)
    chosen = [path for path in rows.paths if path[:8] == most]
    assert 0.87 < len(chosen) / 2000 < 0.93
    assert (len(set(chosen)) == 1) == one_path
    if not one_path:
        # behind it they share what they shared before
        assert max(map(len, chosen)) == 8 * (prefix_savings.HOT_CHUNKS + 3)
        assert len({path[:-8] for path in chosen}) < 0.6 * len(chosen)


def test_heaviest_by_hand() -> None:
    paths = [path_key([n]) for n in range(4)]
    rows = Rows(paths, paths, 64, [3, 1, 1, 1], [0] * 4, [0, 1, 2, 3], None)
    # the heavy one alone, though it lies on the first cut; then one; then two
    assert heaviest(rows, 3, None) == pytest.approx(3 / 2)


def test_cuts_that_know_the_ids_part_one_path_exactly() -> None:
    rows = hot(many_rows(400), one_path=True)
    assert heaviest(prefix_savings.with_ids(rows), 16, None) < 1.15 < heaviest(rows, 16, None)


def test_tool_calls_are_kept(tmp_path: Path) -> None:
    import gzip

    folder = tmp_path / "tau_airline_dialogues"
    folder.mkdir()
    call = [{"name": "look"}]
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "assistant", "content": "done"},
    ]
    with gzip.open(folder / "dialogues.jsonl.gz", "wt") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
    first, second = tau(tmp_path, Words())
    assert first == "<user> hello <end>"
    assert second == first + f"<assistant> {json.dumps(call)} <end>"


def test_the_command(
    shared_data: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_savings, "load_tokenizer", lambda model: Words())
    monkeypatch.setattr(prefix_savings, "tokenize", Words.tokenize)
    monkeypatch.setattr(prefix_savings, "shared_data", lambda: shared_data)
    assert prefix_savings.main(["--rows=70", "--many=500", "--sample=40"]) == 0
    printed = capsys.readouterr().out
    for name in (*DATASETS, "mooncake"):
        assert f"| {name} | first chunk | 100.00 (1) |" in printed
        assert f"| {name}, 90 % on one path | 70 |" in printed
