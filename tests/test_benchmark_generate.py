"""The benchmark of generation: its cases share what they say, its figures are right, and what it
compares decodes the same tokens.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import generate, generate_engines
from benchmarks.generate_cases import CASES, TURNS, Case, arrange, unique_tokens
from benchmarks.generate_engines import measure, run_ours, run_transformers, spread_out
from benchmarks.generate_tables import (
    equal_outputs,
    failures,
    geometric_mean,
    ratios,
    render,
    seconds_of,
    step_seconds_of,
)
from surge_beam.gpu.dummy_runner import END, next_token
from surge_beam.gpu.text_tokenizer import DummyTokenizer

BYTES = DummyTokenizer()
KV_BYTES = 1 << 22


def case_of(name: str, data: Path, scale: float = 1.0) -> Case:
    return CASES[name](data, BYTES, scale)


def test_few_shot_prompts_share_their_tasks_examples(shared_data: Path) -> None:
    prompts = case_of("fewshot", shared_data).prompts
    assert Counter(tuple(p[:1000]) for p in prompts).most_common() == [
        (p, 32) for p in dict.fromkeys(tuple(p[:1000]) for p in prompts)
    ]
    assert len(set(map(tuple, prompts))) == len(prompts) == 96


def test_questions_share_their_document(shared_data: Path) -> None:
    prompts = case_of("documents", shared_data).prompts
    heads = Counter(bytes(p).decode().partition("\n\nQuestion: ")[0] for p in prompts)
    assert len(prompts) == 96 and 12 <= len(heads) <= 24
    assert sorted(heads.values())[-10] >= 4 and max(heads.values()) <= 8


def test_requests_of_a_dialogue_nest(shared_data: Path) -> None:
    prompts = case_of("dialogues", shared_data).prompts
    follow = [b[: len(a)] == a for a, b in itertools.pairwise(prompts)]
    assert len(prompts) == 96
    # all but the first of each dialogue, some of which are shorter than six turns
    assert len(prompts) * (TURNS - 1) / TURNS - 3 <= sum(follow) < len(prompts) - 10
    assert len({tuple(p[:500]) for p in prompts}) == 1


@pytest.mark.parametrize("length", [2048, 6000])
def test_one_prefix_and_short_own_parts(length: int, shared_data: Path) -> None:
    case = case_of(f"prefix{length}", shared_data)
    assert len({tuple(p[:length]) for p in case.prompts}) == 1
    assert len({tuple(p[length:]) for p in case.prompts}) == len(case.prompts) == 64
    assert {len(p) for p in case.prompts} == {length + 20}
    assert unique_tokens(case.prompts) <= length + 64 * 20
    assert case.max_tokens == 64 and case.shares


def test_nothing_is_shared_where_it_says_so(shared_data: Path) -> None:
    case = case_of("unshared", shared_data)
    assert sorted(map(len, case.prompts)) == list(range(128, 255, 2))
    assert len({tuple(p[:16]) for p in case.prompts}) == 64
    assert not case.shares and case.max_tokens == 64


@pytest.mark.parametrize("name", CASES)
def test_a_scale_leaves_fewer_sequences(name: str, shared_data: Path) -> None:
    small, whole = case_of(name, shared_data, 0.1), case_of(name, shared_data)
    assert len(small.prompts) == pytest.approx(len(whole.prompts) / 10, rel=0.15)
    assert len(case_of(name, shared_data, 0.0).prompts) >= 2
    shared = [1 - unique_tokens(c.prompts) / sum(map(len, c.prompts)) for c in (small, whole)]
    assert shared == [pytest.approx(0, abs=0.02)] * 2 if not whole.shares else min(shared) > 0.3


prompts_ = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=10)


@given(prompts_)
def test_unique_tokens_are_the_nodes_of_a_tree(prompts: list[list[int]]) -> None:
    nodes = {tuple(p[: k + 1]) for p in prompts for k in range(len(p))}
    assert unique_tokens(prompts) == len(nodes)


@given(prompts_)
def test_orders_hold_every_prompt_once(prompts: list[list[int]]) -> None:
    for order in ("shuffled", "sorted"):
        assert sorted(arrange(prompts, order)) == list(range(len(prompts)))
        assert arrange(prompts, order) == arrange(prompts, order)
    ordered = [prompts[i] for i in arrange(prompts, "sorted")]
    assert all(a <= b for a, b in itertools.pairwise(ordered))


def test_prompts_are_taken_at_even_distances() -> None:
    assert spread_out(list(range(10, 22)), 4) == [10, 13, 16, 19]
    assert spread_out([3, 1, 2], 5) == [3, 1, 2]
    assert spread_out(list(range(5)), 3) == [0, 1, 3]


# --- figures, by hand ---


def run(seconds: float, outputs: list[str | None], **more: Any) -> dict[str, Any]:
    rows = sum(output is not None for output in outputs)
    order = {"seconds": seconds, "rows": rows, "tokens": rows * 5, "outputs": outputs}
    return {"orders": {"shuffled": order}, **more}


def results() -> dict[str, Any]:
    """Two rounds of two cases with four sequences each; transformers ran on half of them, once."""
    first = {
        "share": {
            "ours": run(2.0, ["a", "b", "c", "d"], warm={"one": 0.5, "all": 1.5}),
            "vLLM": run(3.0, ["a", "b", "x", "d"], warm={"one": 1.0, "all": 3.0}),
            "transformers": run(10.0, ["a", None, "c", None]),
        },
        "alone": {"ours": run(4.0, ["a"] * 4), "vLLM": run(2.0, ["a"] * 4)},
    }
    second = {
        "share": {
            "ours": run(1.0, ["a", "b", "c", "d"], warm={"one": 0.5, "all": 2.5}),
            "vLLM": run(2.0, ["a", "b", "c", "d"], warm={"one": 1.0, "all": 5.0}),
        },
        "alone": {"ours": run(4.0, ["a"] * 4), "vLLM": {"error": "it ended\nwhy\nOutOfMemory"}},
    }
    case = {"sequences": 4, "prompt_tokens": 40, "unique_tokens": 20, "max_tokens": 5}
    return {
        "machine": {"cpu": "x", "cores": 2, "bf16": False, "load": 0.0}
        | dict.fromkeys(("python", "torch", "sentence-transformers", "apache-beam", "onnxruntime")),
        **{"device": "cpu", "model": "m", "versions": {"vllm": "1"}, "scale": 1.0},
        **{"methods": ["ours", "vLLM", "transformers"], "orders": ["shuffled"]},
        "cases": {"share": {**case, "shares": True}, "alone": {**case, "shares": False}},
        "rounds": [{"float32": first}, {"float32": second}],
    }


def test_figures_by_hand() -> None:
    found = results()
    ours = seconds_of(found, "float32", "share", "ours", "shuffled")
    vllm = seconds_of(found, "float32", "share", "vLLM", "shuffled")
    others = seconds_of(found, "float32", "share", "transformers", "shuffled")
    assert (ours, vllm, others) == ([2.0, 1.0], [3.0, 2.0], [20.0, None])
    assert ratios(vllm, ours) == [1.5, 2.0] and ratios(others, ours) == [10.0]
    assert equal_outputs(found, "float32", "share", "vLLM", "shuffled") == (7, 8)
    assert equal_outputs(found, "float32", "share", "transformers", "shuffled") == (2, 2)
    assert step_seconds_of(found, "float32", "share", "ours") == [0.25, 0.5]
    assert step_seconds_of(found, "float32", "share", "transformers") == [None, None]
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0) and geometric_mean([]) is None
    assert failures(found) == ["float32, alone, vLLM: it ended OutOfMemory"]


def test_tables_by_hand() -> None:
    printed = render(results())
    for row in (
        "| share | 4 | 40 | 20 | 20 |",
        "| share | ours | 1.50 | 1.00 to 2.00 | 13.33 |  |",
        "| share | vLLM | 2.50 | 2.00 to 3.00 | 8.00 | 7 of 8 |",
        "| share | transformers, from 2 sequences | 20.00 |  | 1.00 | 2 of 2 |",
        "| share | 1.75 (1.50 to 2.00) | 10.00 |",
        "| alone | 0.50 |  |",
        # the case without sharing is left out
        "| geometric mean, cases that share | 1.75 | 10.00 |",
        "| share | 12.00 (8.00 to 16.00) | 6.00 (4.00 to 8.00) | 2.00 (2.00 to 2.00) |",
    ):
        assert row in printed.splitlines(), row
    assert "computes in float32" not in printed
    found = results()
    found["rounds"] = [{"bfloat16": found["rounds"][0]["float32"]}]
    assert "computes in float32" in render(found)
    found["machine"]["bf16"] = True
    assert "computes in float32" not in render(found)


# --- what is measured ---


class Countdown:
    """Answers every prompt with its own last token and numbers after it."""

    def __init__(self, missing: int = 0) -> None:
        self.missing = missing
        self.log: list[Any] = []

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        self.log.append((len(prompts), tokens))
        return [list(range(p[-1], p[-1] + tokens - self.missing)) for p in prompts]

    def forget(self) -> None:
        self.log.append("forget")


def test_each_order_begins_without_kv_and_outputs_keep_their_prompt() -> None:
    engine = Countdown()
    orders = {"sorted": [0, 1, 2], "shuffled": [2, 0, 1], "some": [1]}
    found = measure(engine, [[1, 5], [2, 6], [3, 5]], 7, orders, decode=True)
    runs = [x for n in (3, 3, 1) for x in ("forget", (n, 7))]
    assert engine.log == [(3, 4), *runs, (3, 1), (3, 7)]
    a, b, c = (found["orders"][name]["outputs"] for name in orders)
    assert a == b and a[0] == a[2] != a[1]
    assert c == [None, a[1], None]
    assert [x["tokens"] for x in found["orders"].values()] == [21, 21, 7]
    assert set(found["warm"]) == {"one", "all"}
    assert "warm" not in measure(engine, [[1]], 2, {"sorted": [0]}, decode=False)


def test_an_engine_that_stops_early_is_refused() -> None:
    with pytest.raises(RuntimeError, match="asked for 4 tokens of each prompt, got \\[3\\]"):
        measure(Countdown(missing=1), [[1]], 7, {"sorted": [0]}, decode=False)


def test_ours_decodes_past_end_tokens() -> None:
    prompts = [[i, 3, 4] for i in range(16)]
    how = {"model": "dummy", "dtype": "float32", "device": "cpu", "kv_bytes": KV_BYTES}
    orders = {"sorted": list(range(16)), "shuffled": list(range(15, -1, -1))}
    found = run_ours(**how, prompts=prompts, max_tokens=60, orders=orders, decode=True)
    ended = 0
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(60):
            ids.append(next_token(np.array(ids, np.int32), 0, 0, greedy=True))
        ended += END in ids[3:-1]
    assert ended > 0
    assert found["orders"]["sorted"]["tokens"] == 16 * 60
    assert found["orders"]["sorted"]["outputs"] == found["orders"]["shuffled"]["outputs"]


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("torch")
    from tests.gpu.tiny_models import tiny_decoder

    folder = tmp_path_factory.mktemp("tiny") / "llama"
    return str(tiny_decoder("llama", folder, max_position_embeddings=4096))


def test_ours_and_transformers_decode_the_same_tokens(tiny_llama: str) -> None:
    prompts = [[7 + i * j % 300 for j in range(1, 5 + i)] for i in range(40)]
    how = {"model": tiny_llama, "dtype": "float32", "device": "cpu", "max_tokens": 12}
    orders = {"sorted": list(range(40)), "shuffled": list(range(39, -1, -1))}
    own = run_ours(**how, kv_bytes=KV_BYTES, prompts=prompts, orders=orders)
    other = run_transformers(**how, rows=20, prompts=prompts, orders=orders)
    for name, run_ in other["orders"].items():
        pairs = zip(own["orders"][name]["outputs"], run_["outputs"], strict=True)
        assert [a == b for a, b in pairs if b is not None] == [True] * 20
        assert run_["rows"] == 20 and run_["tokens"] == 240
    assert len(set(own["orders"]["sorted"]["outputs"])) > 10


def in_this_process(target: str, params: dict[str, Any]) -> Any:
    module, _, function = target.partition(":")
    result = getattr(importlib.import_module(module), function)(**json.loads(json.dumps(params)))
    return json.loads(json.dumps(result))


def test_the_command(
    tiny_llama: str,
    shared_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(generate, "in_fresh_process", in_this_process)
    monkeypatch.setattr(generate_engines, "cores", lambda: 1)
    raw = tmp_path / "raw.json"
    small = ["--scale=0.03", "--cases=documents,unshared", "--dtypes=float32", "--rounds=2"]
    small += ["--methods=ours,transformers", "--device=cpu", f"--kv_bytes={KV_BYTES}"]
    assert generate.main(["--model", tiny_llama, *small, f"--json={raw}"]) == 0
    printed = capsys.readouterr().out
    assert "| documents | ours |" in printed and "| unshared | transformers |" in printed
    found = json.loads(raw.read_text("utf-8"))
    for case in ("documents", "unshared"):
        same, compared = equal_outputs(found, "float32", case, "transformers", "sorted")
        # transformers ran in the first of two rounds
        assert same == compared == found["cases"][case]["sequences"]
    assert generate.main([f"--show={raw}"]) == 0
    assert capsys.readouterr().out == printed
    found["rounds"][0]["float32"]["documents"]["ours"] = {"error": "killed"}
    raw.write_text(json.dumps(found), encoding="utf-8")
    assert generate.main([f"--show={raw}"]) == 1
    with pytest.raises(SystemExit):
        generate.main(["--cases=nonsense"])
