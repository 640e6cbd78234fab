"""The vLLM engine over vLLM itself, against the native engine, greedy in float32. Runs in an
environment that has vLLM: ``make test-vllm``.
"""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest

# Before vLLM is imported.
os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
pytest.importorskip("vllm", reason="no vLLM in this environment; make test-vllm has one")

from surge_beam.gpu.engine import Engine
from surge_beam.gpu.language_model import load_language_model
from surge_beam.gpu.model_runner import ModelRunner
from surge_beam.gpu.vllm_engine import VllmEngine, start_llm
from surge_beam.records import (
    Checkpoint,
    Completion,
    EngineConfig,
    Request,
    SamplingParams,
    SurgeError,
)
from tests.gpu import real_prompts
from tests.vllm.test_engine_vllm import _save as save_smollm2

pytestmark = pytest.mark.timeout(1800)
SLOTS = 4
TOKENS = 16


@pytest.fixture(scope="session")
def model():
    return load_language_model(EngineConfig(dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def config(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    save_smollm2(model, folder)
    return EngineConfig(
        model=str(folder),
        device="cpu",
        max_sequences=SLOTS,
        kv_bytes=1 << 30,
        max_context=4096,
        page_size=32,
    )


@pytest.fixture(scope="session")
def llm(config):
    """One for all tests: starting it takes a while."""
    return start_llm(config)


@pytest.fixture
def engine(config, llm):
    with VllmEngine(config, llm=llm) as own:
        yield own
        assert not llm.llm_engine.has_unfinished_requests()


@pytest.fixture(scope="session")
def native(model):
    config = EngineConfig(max_sequences=SLOTS)
    with Engine(config, runner=ModelRunner(model, pages=2048, page_size=16)) as own:
        yield own


@pytest.fixture(scope="session")
def rows(shared_data, model):
    """Real prompts in prefix order."""
    texts = real_prompts.few_shot(shared_data, 1, 4)
    texts += real_prompts.over_documents(shared_data, 2, 3)
    prompts = [model.encode(text) for text in texts]
    prompts += [model.chat(messages) for messages in real_prompts.dialogues(shared_data, 3)]
    sampling = SamplingParams(max_tokens=TOKENS)
    return [
        Request(custom_id=f"r{i}", prompt_ids=tuple(ids), sampling=sampling)
        for i, ids in enumerate(sorted(prompts))
    ]


@pytest.fixture(scope="session")
def whole(native, rows):
    return native.generate(rows)


def changed(request: Request, custom_id: str | None = None, **sampling) -> Request:
    params = dataclasses.replace(request.sampling, **sampling)
    return dataclasses.replace(request, custom_id=custom_id or request.custom_id, sampling=params)


def content(completion: Completion) -> Completion:
    """Without what depends on the pages of an engine, or on rounding."""
    return dataclasses.replace(completion, cached_tokens=0, evictions=0, logprobs=None)


def same(ours: list[Completion], theirs: list[Completion]) -> None:
    assert [content(c) for c in ours] == [content(c) for c in theirs]


def test_real_prompts_decode_to_what_the_native_engine_decodes(engine, rows, whole):
    same(engine.generate(rows), whole)
    stats = engine.stats
    prompts = sum(len(r.prompt_ids) for r in rows)
    assert stats.prefill_tokens + stats.prefix_tokens_saved == prompts
    assert stats.prefix_tokens_saved > 0.5 * prompts
    assert stats.sampled_tokens == sum(c.completion_tokens for c in whole)
    assert stats.decode_tokens == stats.sampled_tokens - len(rows)
    done = engine.generate(rows)
    same(done, whole)
    assert all(0 <= c.prompt_tokens - c.cached_tokens - 1 < 32 for c in done)


def test_stop_texts_across_tokens(engine, native, rows, whole):
    wanted = []
    for row, completion in zip(rows, whole, strict=True):
        text = completion.text
        if len(text) > 12:
            wanted.append(changed(row, stop=("no such text", text[7:10], text[5:9])))
    assert len(wanted) > 5
    done = engine.generate(wanted)
    same(done, native.generate(wanted))
    assert {c.finish_reason for c in done} == {"stop"}
    assert engine.stats.sampled_tokens == sum(c.completion_tokens for c in done)


def test_ends_and_penalties_and_limits(engine, native, rows, whole):
    [first, second, *_] = rows
    wanted = [
        changed(first, "penalty", repetition_penalty=1.3),
        changed(first, "token", stop_token_ids=(whole[0].token_ids[3],)),
        changed(rows[-1], "on", ignore_eos=True, max_tokens=30),
        changed(second, "one", max_tokens=1),
    ]
    end = dataclasses.replace(second, prompt_ids=(second.prompt_ids * 30)[:4090])
    wanted.append(changed(end, "context", max_tokens=None, ignore_eos=True))
    done = engine.generate(wanted)
    peer = Engine(
        dataclasses.replace(native.config, max_context=4096),
        runner=ModelRunner(native.runner.model, pages=1024, page_size=16),
    )
    with peer:
        same(done, peer.generate(wanted))
    assert done[-1].finish_reason == "length" and done[-1].completion_tokens == 6


def test_logprobs(engine, native, rows):
    wanted = [changed(row, logprobs=3, max_tokens=5) for row in rows[:3]]
    wanted.append(changed(rows[3], logprobs=0, max_tokens=5, repetition_penalty=1.2))
    for ours, theirs in zip(engine.generate(wanted), native.generate(wanted), strict=True):
        same([ours], [theirs])
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [i for i, _ in mine.top] == [i for i, _ in other.top]
            assert [p for _, p in mine.top] == pytest.approx([p for _, p in other.top], abs=1e-3)


def test_bad_rows_end_alone(engine, native, rows, whole):
    vocabulary = native.runner.vocabulary
    bad = {
        "hot": changed(rows[0], "hot", temperature=3.0),
        "empty": dataclasses.replace(rows[0], custom_id="empty", prompt_ids=()),
        "outside": dataclasses.replace(rows[0], custom_id="outside", prompt_ids=(vocabulary,)),
        "negative": dataclasses.replace(rows[0], custom_id="negative", prompt_ids=(-1,)),
        "full": dataclasses.replace(rows[0], custom_id="full", prompt_ids=(5,) * 4096),
        "\ud800": dataclasses.replace(rows[0], custom_id="\ud800"),
    }
    done = engine.generate([*rows[:5], *bad.values(), *rows[5:]])
    by_id = {c.custom_id: c for c in done}
    same([by_id[r.custom_id] for r in rows], whole)
    same([dataclasses.replace(by_id["\ud800"], custom_id="r0")], whole[:1])
    failed = {c.custom_id: c.error for c in done if c.finish_reason == "error"}
    assert sorted(failed) == ["empty", "full", "hot", "negative", "outside"]
    assert "temperature" in failed["hot"] and "context" in failed["full"]


@pytest.mark.parametrize("steps", [3, 12])
def test_unfinished_rows_go_on_in_either_engine(config, llm, native, rows, whole, steps):
    with VllmEngine(config, llm=llm) as own:
        for row in rows:
            own.submit(row)
        for _ in range(steps):
            own.step()
        done = {c.custom_id: c for c in own._finished}
        left = [Checkpoint.from_json(c.to_json()) for c in own.checkpoints()]
        assert any(0 < len(c.output_ids) < TOKENS for c in left)
    assert not llm.llm_engine.has_unfinished_requests()
    half = len(left) // 2
    with VllmEngine(config, llm=llm) as own:
        done |= {c.custom_id: c for c in own.stream(left[:half])}
    done |= {c.custom_id: c for c in native.stream(left[half:])}
    same([done[r.custom_id] for r in rows], whole)


def test_cancelling(engine, rows, whole):
    for row in rows[:6]:
        engine.submit(row)
    for _ in range(4):
        engine.step()
    assert engine.cancel("r1") and engine.cancel("r4")
    done = {c.custom_id: c for c in engine.completions()}
    assert {i for i, c in done.items() if c.finish_reason == "cancelled"} == {"r1", "r4"}
    assert done["r1"].token_ids == whole[1].token_ids[: done["r1"].completion_tokens]
    same([done[f"r{i}"] for i in (0, 2, 3, 5)], [whole[i] for i in (0, 2, 3, 5)])


def test_five_waves_stream_through_few_slots(engine, rows, whole):
    wanted = [
        changed(row, f"{wave}-{row.custom_id}", max_tokens=6) for wave in range(2) for row in rows
    ]
    drawn = 0

    def source():
        nonlocal drawn
        for request in wanted:
            drawn += 1
            yield request

    assert len(wanted) > 5 * SLOTS
    done = {}
    for count, completion in enumerate(engine.stream(source())):
        assert drawn - count <= 4 * SLOTS
        done[completion.custom_id] = completion
    texts = [c.token_ids[:6] for c in whole]
    assert [done[r.custom_id].token_ids for r in wanted] == texts * 2


def test_sampled_rows_draw_independently_and_repeat(engine, rows):
    sampling = {"temperature": 1.0, "top_p": 0.95, "ignore_eos": True}
    wanted = [changed(rows[0], f"s{i}", **sampling) for i in range(6)]
    first = engine.generate(wanted)
    assert len({c.token_ids for c in first}) == 6
    same(engine.generate(wanted), first)
    again = engine.generate([changed(row, seed=1) for row in wanted])
    assert not {c.token_ids for c in again} & {c.token_ids for c in first}


def test_an_engine_in_this_process_that_dies_is_started_again(config, rows, whole, monkeypatch):
    with VllmEngine(config) as own:
        for row in rows:
            own.submit(row)
        for _ in range(9):
            own.step()

        def fail():
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(own._llm._engine, "step", fail)
        done = {c.custom_id: c for c in own.completions()}
        same([done[r.custom_id] for r in rows], whole)
        assert own.stats.evictions == SLOTS
        monkeypatch.setattr(own._llm._engine, "step", fail)
        own.submit(rows[0])
        own.step()
        with pytest.raises(SurgeError, match="not started again"):
            own.step()


@pytest.mark.slow
def test_an_engine_whose_process_is_killed_is_started_again(config, rows, whole, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with VllmEngine(config) as own:
        processes = own._llm._processes
        assert len(processes) > 1
        for row in rows:
            own.submit(row)
        for _ in range(9):
            own.step()
        os.kill(processes[0].pid, signal.SIGKILL)
        done = {c.custom_id: c for c in own.completions()}
        same([done[r.custom_id] for r in rows], whole)
        assert own.stats.evictions > 0
        assert not any(process.is_running() for process in processes)
        processes = own._llm._processes
    assert not any(process.is_running() for process in processes)
