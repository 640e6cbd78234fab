from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from surge_beam.gpu import step_profile, step_times
from surge_beam.gpu.language_model import load_language_model
from surge_beam.gpu.loading import load_controller, load_runner, step_costs
from surge_beam.gpu.model_runner import ModelRunner
from surge_beam.gpu.step_times import DECODES, StepTimer, measure, pages_needed
from surge_beam.policy.step_costs import CAUTIOUS, StepCosts
from surge_beam.records import EngineConfig, SurgeError
from tests.gpu.tiny_models import tiny_decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_decoder("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def runner(folder):
    model = load_language_model(EngineConfig(model=str(folder), device="cpu"))
    return ModelRunner(model, pages=pages_needed(16), page_size=16)


class ModelledClock:
    """Time goes by as step costs say, whatever the steps really take."""

    def __init__(self, runner: ModelRunner, costs: StepCosts) -> None:
        self.now = 0.0
        step = runner.step

        def stepped(batch):
            decode = batch.counts == 1
            context = float(np.mean(batch.context[decode])) if decode.any() else 0.0
            self.now += costs.step_seconds(
                int(decode.sum()), int(batch.counts[~decode].sum()), context
            )
            return step(batch)

        runner.step = stepped

    def __call__(self) -> float:
        return self.now


def test_the_fit_gives_back_the_costs_that_made_the_times(runner, monkeypatch):
    costs = StepCosts(
        alpha_p=0.02,
        beta_p=1e-3,
        alpha_d=0.03,
        b0=2e-3,
        b1=4e-6,
        alpha_m=0.04,
        beta_m_decode=2.5e-3,
        beta_m_prefill=1.1e-3,
    )
    monkeypatch.setattr(runner, "step", runner.step)
    clock = ModelledClock(runner, costs)
    found = measure(StepTimer(runner, repeats=1, clock=clock))
    for name, value in costs.to_dict().items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6, abs=1e-9), name


def test_the_command_writes_a_profile_that_the_engine_reads(folder, tmp_path, capsys, monkeypatch):
    output = tmp_path / "profile.json"
    monkeypatch.setattr(step_times, "PREFILLS", (16, 32))
    monkeypatch.setattr(step_times, "DECODES", ((1, 32), (4, 32), (4, 64)))
    monkeypatch.setattr(step_times, "MIXES", ((1, 16, 32), (4, 16, 32), (4, 32, 32)))
    arguments = ["--model", str(folder), "--output", str(output), "--repeats", "1"]
    assert step_times.main(arguments) == 0
    written = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out) == written
    assert written["dtype"] == "float32" and written["device"] == "cpu"
    assert step_costs(str(output)) == StepCosts.from_dict(written["step_costs"])
    config = EngineConfig(model="dummy", profile=str(output), schedule="eb")
    assert load_controller(config, load_runner(config)).name == "eb"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"step_costs": {"alpha_p": -1}}'])
def test_a_profile_that_is_none_is_named(content, tmp_path):
    file = tmp_path / "broken.json"
    file.write_text(content)
    with pytest.raises(SurgeError, match=r"broken\.json.*step_times"):
        step_costs(str(file))
    with pytest.raises(SurgeError, match="missing"):
        step_costs(str(tmp_path / "missing.json"))
    assert step_costs(None) == CAUTIOUS


def test_pools_without_a_page_and_devices_without_cuda_are_refused():
    with pytest.raises(SurgeError, match="CUDA"):
        load_runner(EngineConfig(model="dummy", require_accelerator=True))
    assert load_runner(EngineConfig(model="dummy", kv_bytes=4 * 16 * 5)).pages == 5


def test_a_model_pool_takes_the_bytes_it_was_given(folder):
    config = EngineConfig(model=str(folder), device="cpu", kv_bytes=1 << 20)
    own = load_runner(config)
    assert own.pages == (1 << 20) // own.page_bytes
    assert own.pool.nbytes == own.pages * own.page_bytes
    free = load_runner(EngineConfig(model=str(folder), device="cpu", max_sequences=2))
    assert free.pages == 2 * 1024 // 16, "no more than whole contexts for its sequences"
    with pytest.raises(SurgeError, match="kv_bytes"):
        load_runner(EngineConfig(model=str(folder), device="cpu", kv_bytes=100))
    with pytest.raises(SurgeError, match="does not fit the memory; give it fewer kv_bytes"):
        load_runner(EngineConfig(model=str(folder), device="cpu", kv_bytes=1 << 60))


def test_the_profile_command_accounts_for_the_whole_step(folder, capsys):
    arguments = ["--model", str(folder), "--rows", "4", "--context", "40", "--prompt", "32"]
    assert step_profile.main([*arguments, "--repeats", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith(("decode", "prefill"))]
    assert len(heads) == 2
    for head, end in itertools.pairwise([*heads, len(lines)]):
        total = float(lines[head].split(":")[1].split()[0])
        (python,) = [line for line in lines[head:end] if "of which Python" in line]
        assert 0 < float(python.split()[4]) < 100 * total
        parts = [line for line in lines[head + 1 : end] if "%" in line and line != python]
        assert {line.split()[0] for line in parts} >= {*step_profile.PARTS, "other"}
        assert sum(float(line.split()[1]) for line in parts) == pytest.approx(total, abs=0.6)
        assert sum(line.startswith("  floor: ") for line in lines[head:end]) == 3
        (over,) = [line for line in lines[head:end] if "step / floor" in line]
        assert float(over.split()[-1]) > 0.5


def test_steps_are_what_they_say(runner):
    batch = StepTimer(runner, repeats=1).batch(*DECODES[1], 64)
    assert batch.counts.tolist() == [1] * 8 + [64] and batch.context.tolist() == [128] * 8 + [0]
    pages = np.concatenate(batch.block_tables)
    assert len(set(pages.tolist())) == len(pages)
