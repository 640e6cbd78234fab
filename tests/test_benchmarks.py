"""The benchmarks at tiny sizes: every method runs, gives right vectors, and prints its row."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import common, cost_model, embed, memory
from surge_beam.gpu.worker import forget_workers

STUB = "dummy:16"


def in_this_process(target: str, params: dict[str, Any], **_: Any) -> Any:
    module, _, function = target.partition(":")
    result = getattr(importlib.import_module(module), function)(**json.loads(json.dumps(params)))
    return json.loads(json.dumps(result))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_data: Path) -> Iterator[None]:
    """No fresh processes, one thread, and what is generated goes to the test's own folder."""
    from benchmarks import ours, peers

    for module in (embed, memory, cost_model):
        monkeypatch.setattr(module, "in_fresh_process", in_this_process)
    for module in (embed, memory, ours):
        monkeypatch.setattr(module, "WORK", tmp_path / "work")
    monkeypatch.setattr(peers, "cores", lambda: 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    yield
    forget_workers()


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    torch = pytest.importorskip("torch")
    from tests.gpu.tiny_models import sentence_model, tiny_transformer

    folder = tmp_path_factory.mktemp("tiny")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield str(sentence_model(tiny_transformer("bert", folder / "bert"), folder / "st"))
    torch.set_num_threads(threads)


def test_every_method_but_int8(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: Any
) -> None:
    from apache_beam.ml.transforms.embeddings import huggingface

    monkeypatch.setattr(huggingface, "SentenceTransformer", huggingface.SentenceTransformer)
    raw = tmp_path / "raw.json"
    sizes = ["--rows=60", "--slow_rows=20", "--slowest_rows=10"]
    assert embed.main(["--model", tiny_model, *sizes, "--rounds=1", f"--json={raw}"]) == 0
    figures = json.loads(raw.read_text())["figures"]
    assert set(figures) == set(embed.methods(bf16=True)) - {embed.INT8}
    for name, (figure,) in figures.items():
        assert figure["cosine"] > (0.999 if "bfloat16" in name else 0.99999), name
        assert 0 < figure["first"] <= figure["seconds"], name
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in figures)


@pytest.mark.parametrize("rows", [1, 10, 500, 4000])
def test_services_are_whole_and_spread(rows: int) -> None:
    rng = np.random.default_rng(rows)
    sizes = rng.integers(5, 1500, 335).tolist()
    chosen = embed.choose_services(sizes, rows)
    assert chosen == sorted(set(chosen)) == embed.choose_services(sizes, rows)
    total = sum(sizes[i] for i in chosen)
    if rows < min(sizes):
        assert chosen == [sizes.index(min(sizes))]
    else:
        assert rows * 0.9 <= total <= rows
    if len(chosen) > 8:
        assert chosen[0] < 335 // 3 and chosen[-1] > 335 * 2 // 3


def test_memory(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "STUB", STUB)
    monkeypatch.setattr(memory, "FREE_STUB", STUB)
    flags = ["--rows=3000", "--pbp_rows=1000", "--min_rows=500", "--only=peers"]
    assert memory.main(flags) == 0
    printed = capsys.readouterr().out
    assert "| FB: fixed batches of 100K | 3,000 |" in printed
    assert "| PBP: a call a partition | 1,000 |" in printed
    assert "| ours, min_rows 500 | 3,000 |" in printed


def test_repeated_corpus_has_keys_of_its_own() -> None:
    import pyarrow.parquet as pq

    services = pq.read_table(memory.repeated(2), columns=["service"]).column(0)
    assert len(services) == 2 * 167_720
    assert len(services.unique()) == 2 * 335


def test_cost_model(tiny_model: str, capsys: pytest.CaptureFixture) -> None:
    assert cost_model.main(["--model", tiny_model, "--rows=100", "--rounds=1"]) == 0
    printed = capsys.readouterr().out
    assert "| held out: one call a partition |" in printed
    assert printed.count("| fit: ") == 5


def test_a_fit_predicts_what_is_linear() -> None:
    calls = {"fit: 1 calls": 1, "fit: 9 calls": 9, "held out: 5": 5}
    seconds = {name: [count * 0.5 + 20.0] for name, count in calls.items()}
    own = {"tau": 0.5, "c": 0.2, "error": 0.0}
    found = {"texts": 100, "calls": calls, "seconds": seconds, "calibration": own}
    model, rows = cost_model.judge(found)
    assert model.tau == pytest.approx(0.5) and model.c == pytest.approx(0.2)
    assert [row[-2:] for row in rows] == [["+0.0%", "+0.0%"]] * 3


def test_a_fresh_process_answers_and_reports_its_end() -> None:
    pid = common.in_fresh_process("os:getpid", {}, timeout=60)
    assert pid != os.getpid()
    with pytest.raises(RuntimeError, match="TypeError"):
        common.in_fresh_process("os:getpid", {"unknown": 1}, timeout=60)


def test_cells() -> None:
    assert [common.show(x) for x in (None, 12345, 123.4, 1.234, 0.01234, "a")] == [
        "",
        "12,345",
        "123",
        "1.23",
        "0.0123",
        "a",
    ]
    assert common.table(["a", "b"], [[1, None]]) == "| a | b |\n| --- | --- |\n| 1 |  |"
