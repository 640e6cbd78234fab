"""The benchmark of phases: its grid is what it says, lengths are forced, EB+ is judged right."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import phases, turns
from benchmarks.phases import (
    OUTPUTS,
    PROMPTS,
    REQUESTS,
    SCHEDULES,
    SHIFT_REQUESTS,
    drive,
    grid,
    judge,
    outputs,
    random_prompts,
    render,
    run_cell,
)
from benchmarks.turns import take_turns
from surge_beam.gpu.dummy_runner import DummyRunner
from surge_beam.gpu.engine import Engine
from surge_beam.gpu.runner import Sampled, StepBatch
from surge_beam.policy.simulate import join_traces, synthetic_trace
from surge_beam.policy.step_costs import CAUTIOUS
from surge_beam.records import EngineConfig, Request

CONFIG = EngineConfig(model="dummy", max_sequences=8)


def runner(context_length: int = 8192) -> DummyRunner:
    return DummyRunner(512, CONFIG.page_size, context_length=context_length)


def test_the_grid_covers_lengths_concurrency_and_both_shifts() -> None:
    cells = grid()
    assert len({cell.name for cell in cells}) == len(cells) == 4 * 4 + 2
    assert [c.slots for c in cells] == [*(n for n in (4, 16, 64, 128) for _ in range(4)), 64, 128]
    *steady, lengths, loads = cells
    mixes = [(prompt, output) for _ in REQUESTS for prompt in PROMPTS for output in OUTPUTS]
    for cell, (prompt, output) in zip(steady, mixes, strict=True):
        trace = cell.trace
        assert len(trace) == REQUESTS[cell.slots] >= 2 * cell.slots
        assert set(trace.concurrency) == {cell.slots}
        assert trace.prompts.max() <= 2 * prompt and trace.outputs.max() <= 4 * output
        assert np.mean(trace.prompts) == pytest.approx(prompt, rel=0.3)
        assert np.mean(trace.outputs) == pytest.approx(output, rel=0.4)
    n = SHIFT_REQUESTS
    trace = lengths.trace
    assert trace.prompts[:n].mean() > 3 * trace.prompts[n:].mean()
    assert trace.outputs[n:].mean() > 2 * trace.outputs[:n].mean()
    assert loads.trace.concurrency.tolist() == [8] * n + [128] * n


def test_requests_are_the_same_every_time_and_share_nothing() -> None:
    for one, other in zip(grid(), grid(), strict=True):
        for a, b in zip(
            dataclasses.astuple(one.trace), dataclasses.astuple(other.trace), strict=True
        ):
            assert np.array_equal(a, b)
    trace = grid()[-1].trace
    prompts = random_prompts(trace, 1000, 3)
    assert prompts == random_prompts(trace, 1000, 3) != random_prompts(trace, 1000, 4)
    assert [len(p) for p in prompts] == trace.prompts.tolist()
    whole = [p[:16] for p in prompts if len(p) >= 16]
    assert len(set(whole)) == len(whole) > 10
    assert len(grid(0.1)[0].trace) == 2


class Watched(Engine):
    """Notes how many requests are unfinished at most."""

    most = 0
    left_after: dict[int, int]

    def submit(self, request: Request) -> None:  # type: ignore[override]
        super().submit(request)
        self.most = max(self.most, len(self._alive))
        self.left_after = {**getattr(self, "left_after", {}), int(request.custom_id): self.most}


def test_no_more_are_unfinished_than_the_trace_allows() -> None:
    few = synthetic_trace(12, 20, 10, seed=0, concurrency=3)
    many = synthetic_trace(20, 20, 10, seed=1, concurrency=8)
    trace = join_traces([few, many])
    with Watched(CONFIG, runner=runner()) as engine:
        driven = drive(engine, trace, random_prompts(trace, 256, 0))
        take_turns([driven])
    assert [len(tokens) for tokens in outputs(driven, trace)] == trace.outputs.tolist()
    assert (engine.left_after[11], engine.most) == (3, 8)


def test_a_length_that_is_not_reached_is_refused() -> None:
    trace = synthetic_trace(
        4, 30, 20, seed=0, prompt_law="fixed", output_law="fixed", concurrency=4
    )
    with Engine(CONFIG, runner=runner(context_length=40)) as engine:
        driven = drive(engine, trace, random_prompts(trace, 256, 0))
        take_turns([driven])
    with pytest.raises(RuntimeError, match="ended before or after their forced length"):
        outputs(driven, trace)


def test_schedules_decode_the_same_and_step_differently() -> None:
    cell = next(c for c in grid(0.5) if c.slots == 16)
    prompts = random_prompts(cell.trace, 256, 0)
    found = run_cell(CONFIG, {schedule: runner() for schedule in SCHEDULES}, cell, prompts)
    assert [found[s]["same"] for s in SCHEDULES] == [len(cell.trace)] * 3
    assert "mixed" not in found["eb"]["steps"] and found["mb"]["steps"]["mixed"] > 0


def test_eb_plus_is_judged_against_the_lower_median() -> None:
    seconds = {"eb": [1.0, 5.0, 5.0], "mb": [4.0, 4.0, 4.0], "eb+": [4.0, 4.4, 3.6]}
    better, found = judge(seconds)
    assert better == "mb" and found == pytest.approx([1.0, 1.1, 0.9])
    assert judge({"eb": [2.0], "mb": [3.0], "eb+": [3.0]}) == ("eb", [1.5])


def test_the_table_by_hand() -> None:
    def found(eb: float, mb: float, both: float) -> dict[str, dict[str, object]]:
        times = {"eb": eb, "mb": mb, "eb+": both}
        steps = {"mixed": 7, "decode": 1200}
        return {s: {"seconds": t, "steps": steps, "same": 9} for s, t in times.items()}

    versions = ("python", "torch", "sentence-transformers", "apache-beam", "onnxruntime")
    results = {
        "machine": {"cpu": "x", "cores": 2, "bf16": False, "load": 0.0} | dict.fromkeys(versions),
        **{"model": "m", "step_costs": {"alpha_p": 0.5}},
        "cells": [{"name": "one", "requests": 9}, {"name": "two", "requests": 9}],
        "rounds": [
            [found(10.0, 8.0, 8.2), found(4.0, 6.0, 5.0)],
            [found(10.0, 8.0, 8.0), found(4.0, 6.0, 6.0)],
        ],
    }
    lines = render(results).splitlines()
    row = (
        "| one | 9 | 10.00 | 8.00 | 8.10 | MB | 1.012 | 1.00 to 1.02 | yes | 0, 7, 1,200 | 9 of 9 |"
    )
    assert row in lines
    row = "| two | 9 | 4.00 | 6.00 | 5.50 | EB | 1.375 | 1.25 to 1.50 | NO | 0, 7, 1,200 | 9 of 9 |"
    assert row in lines
    assert lines[-1] == "1 of 2 cells within 3 %; the worst is 1.375."


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, raw = tmp_path / "profile.json", tmp_path / "raw.json"
    profile.write_text(json.dumps({"step_costs": CAUTIOUS.to_dict()}), encoding="utf-8")
    flags = [f"--profile={profile}", f"--json={raw}", "--rounds=2", "--scale=0.1"]
    flags += ["--model=dummy", "--device=cpu", f"--kv_bytes={1 << 20}", "--cells=16 at;128 at"]
    assert phases.main(flags) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n| 16 at once") == 4 and printed.count("8 then 128 at once") == 1
    assert " of 9 cells within 3 %" in printed
    found = json.loads(raw.read_text("utf-8"))
    assert [len(cells) for cells in found["rounds"]] == [9, 9]


def test_the_engine_that_has_used_the_least_time_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = 0.0, ""

    class Timed(DummyRunner):
        def __init__(self, name: str, takes: float) -> None:
            super().__init__(512, CONFIG.page_size)
            self.name, self.takes = name, takes

        def step(self, batch: StepBatch) -> Sampled:
            nonlocal now, order
            now += self.takes
            order += self.name
            return super().step(batch)

    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: now))
    cell = grid(0.2)[0]
    runners = {"eb": Timed("e", 1.0), "mb": Timed("m", 2.5)}
    found = run_cell(CONFIG, runners, cell, random_prompts(cell.trace, 256, 0))
    assert order.startswith("emeemeeem")
    assert {s: run["seconds"] for s, run in found.items()} == {
        "eb": order.count("e"),
        "mb": 2.5 * order.count("m"),
    }
