"""The measurement of a step, on a tiny model."""

from __future__ import annotations

import json

from benchmarks import decode_step
from tests.gpu.tiny_models import tiny_decoder


def test_a_row_of_the_table_for_each_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decode_step, "STEPS", ((2, 20, 0), (0, 0, 30)))
    folder = tiny_decoder("llama", tmp_path / "model")
    raw = tmp_path / "raw.json"
    assert decode_step.main(["--turns", "2", "--model", str(folder), "--json", str(raw)]) == 0
    printed = capsys.readouterr().out
    assert "| 2 rows after 20 tokens |" in printed
    assert "| a prompt of 30 tokens |" in printed
    steps = json.loads(raw.read_text())["steps"]
    assert [len(step["turns"]) for step in steps] == [2, 2]
    assert all(seconds > 0 for step in steps for t in step["turns"] for seconds in t.values())
