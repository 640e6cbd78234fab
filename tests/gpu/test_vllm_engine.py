"""The vLLM engine over a stand-in for vLLM, against the native engine over the same tokens."""

from __future__ import annotations

import collections
import dataclasses
import os
import random
import subprocess
import sys
import types
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.gpu.dummy_runner import END, DummyRunner, next_token
from surge_beam.gpu.engine import Engine
from surge_beam.gpu.vllm_engine import VllmEngine
from surge_beam.records import (
    Checkpoint,
    Completion,
    EngineConfig,
    Request,
    SamplingParams,
    SurgeError,
)

VOCABULARY = 256
CONTEXT = 300


class EngineDeadError(Exception):
    """vLLM's, by its name."""


class FakeCore:
    """vLLM's client of an engine in this process."""

    def __init__(self) -> None:
        self.down = 0

    def shutdown(self) -> None:
        self.down += 1


@dataclasses.dataclass
class Row:
    name: str
    prompt: list[int]
    params: Any
    order: tuple[float, ...]
    wait: int
    cached: int = 0
    output: list[int] = dataclasses.field(default_factory=list)


class FakeEngine:
    """Decodes what the stand-in model decodes; holds its caller to vLLM's contract."""

    def __init__(self, llm: FakeLLM) -> None:
        self.llm, self.options = llm, llm.options
        self.model_config = types.SimpleNamespace(
            max_model_len=CONTEXT if llm.context < 0 else llm.context,
            get_vocab_size=lambda: VOCABULARY,
            hf_text_config=types.SimpleNamespace(eos_token_id=[END]),
            try_get_generation_config=lambda: {"eos_token_id": END},
        )
        policy = self.options.get("scheduling_policy", "fcfs")
        self.vllm_config = types.SimpleNamespace(
            scheduler_config=types.SimpleNamespace(policy=policy)
        )
        self.engine_core = FakeCore()
        self.rows: dict[str, Row] = {}
        self.names: set[str] = set()
        self.waves: list[list[str]] = []
        self.steps = 0
        self.cache: set[tuple[int, ...]] = set()
        self.dead = False

    def add_request(
        self, name: str, prompt: Any, params: Any, *, arrival_time: float, priority: int
    ) -> None:
        if self.dead:
            raise EngineDeadError("dead")
        assert name not in self.names, "a name was used twice"
        assert prompt["type"] == "token" and all(type(i) is int for i in prompt["prompt_token_ids"])
        ids = prompt["prompt_token_ids"]
        assert ids and len(ids) + params.max_tokens <= self.model_config.max_model_len
        assert priority == 0 or self.options["scheduling_policy"] == "priority"
        self.names.add(name)
        wait = self.llm.rng.randrange(3) if self.llm.bursts else 0
        order = (priority, arrival_time, self.llm.rng.random())  # ties go any way, as vLLM's do
        self.rows[name] = Row(name, ids, params, order, wait)
        if params.temperature > 2:  # half taken in
            raise ValueError("temperature must be in [0, 2]")

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.rows.pop(name, None)

    def step(self) -> list[Any]:
        assert self.rows, "a step without a row would wait for ever"
        self.steps += 1
        if self.steps == self.llm.dies_at:
            self.dead = True
            raise RuntimeError("the device is lost")
        batch = sorted(self.rows.values(), key=lambda row: row.order)
        batch = batch[: self.options["max_num_seqs"]]
        self.waves.append([row.name for row in batch])
        return [output for row in batch if (output := self._advance(row)) is not None]

    def _advance(self, row: Row) -> Any:
        if row.wait:
            row.wait -= 1
            return None
        params, first = row.params, not row.output
        if first:
            row.cached = self._cached(row.prompt)
        fresh: list[int] = []
        reason = None
        for _ in range(self.llm.rng.randint(1, 4) if self.llm.bursts else 1):
            seen = np.array(row.prompt + row.output, np.int32)
            greedy = params.temperature == 0.0
            token = next_token(seen, params.seed or 0, len(row.output), greedy=greedy)
            if self.llm.loops:
                token = 9
            row.output.append(token)
            fresh.append(token)
            if token in params.stop_token_ids:
                reason = "stop"
            elif len(row.output) == params.max_tokens:
                reason = "length"
            if reason:
                break
        if row.name in self.llm.errors:
            reason = "error"
        if reason:
            del self.rows[row.name]
        logprobs = None
        if params.logprobs is not None:
            logprobs = [
                {i: types.SimpleNamespace(logprob=p) for i, p in entries(t, params.logprobs)}
                for t in fresh
            ]
        part = types.SimpleNamespace(token_ids=fresh, logprobs=logprobs, finish_reason=reason)
        return types.SimpleNamespace(
            request_id=row.name,
            outputs=[part],
            finished=reason is not None,
            num_cached_tokens=row.cached,
        )

    def _cached(self, ids: list[int]) -> int:
        size = 4
        full = (len(ids) - 1) // size
        found = 0
        while found < full and tuple(ids[: (found + 1) * size]) in self.cache:
            found += 1
        self.cache.update(tuple(ids[: (n + 1) * size]) for n in range(full))
        return found * size


def entries(token: int, count: int) -> list[tuple[int, float]]:
    """Of a token that ranks third, the likeliest ones last."""
    others = [((token + d) % VOCABULARY, -float(d)) for d in (3, 2, 1)]
    return [(token, -2.5), *others[3 - min(count, 3) :]]


class FakeLLM:
    started: ClassVar[list[FakeLLM]] = []
    deaths: ClassVar[list[int | None]] = []
    errors: frozenset[str] = frozenset()
    bursts = False  # several tokens a step, and steps without any
    loops = False
    breaks: Exception | None = None

    def __init__(self, **options: Any) -> None:
        if FakeLLM.breaks is not None:
            raise FakeLLM.breaks
        random.seed(0)
        np.random.seed(0)
        self.options = options
        self.environment = dict(os.environ)
        self.rng = random.Random(len(FakeLLM.started))
        self.context = options.get("max_model_len", CONTEXT)
        self.dies_at = FakeLLM.deaths.pop(0) if FakeLLM.deaths else None
        self.llm_engine = FakeEngine(self)
        FakeLLM.started.append(self)

    def get_tokenizer(self) -> Any:
        def decode(ids: list[int], *, skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            return DummyRunner(1, 4).decode_text(ids)

        return types.SimpleNamespace(decode=decode, eos_token_id=END)


class FakeArgs:
    def __init__(self, *, model: str) -> None:
        pass

    def create_model_config(self) -> Any:
        return types.SimpleNamespace(max_model_len=CONTEXT)


def fake_vllm() -> dict[str, types.ModuleType]:
    vllm = types.ModuleType("vllm")
    vllm.LLM, vllm.EngineArgs, vllm.SamplingParams = FakeLLM, FakeArgs, make_params
    vllm.sampling_params = types.ModuleType("vllm.sampling_params")
    vllm.sampling_params.RequestOutputKind = types.SimpleNamespace(DELTA="delta")
    vllm.platforms = types.ModuleType("vllm.platforms")
    vllm.platforms.current_platform = types.SimpleNamespace(device_type="cpu")
    return {
        "vllm": vllm,
        "vllm.sampling_params": vllm.sampling_params,
        "vllm.platforms": vllm.platforms,
    }


def make_params(**fields: Any) -> Any:
    assert fields["output_kind"] == "delta" and fields["ignore_eos"] and not fields["detokenize"]
    assert fields["max_tokens"] >= 1
    known = {"logprobs": None, "seed": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return types.SimpleNamespace(**(known | fields))


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    fakes = fake_vllm()
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("gc.collect", lambda: 0)  # slow, and the stand-in holds no memory
    monkeypatch.setattr(FakeLLM, "started", [])
    monkeypatch.setattr(FakeLLM, "deaths", [])
    return fakes["vllm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def engine(folder):
    def make(**fields: Any) -> VllmEngine:
        return VllmEngine(EngineConfig(model=folder, device="cpu", **fields))

    return make


def native(**fields: Any) -> Engine:
    runner = DummyRunner(4096, 4, context_length=CONTEXT)
    return Engine(EngineConfig(model="dummy", page_size=4, **fields), runner=runner)


def fake(own: VllmEngine) -> FakeEngine:
    """The newest of the stand-ins."""
    return FakeLLM.started[-1].llm_engine


def requests(count: int, *, seed: int = 0, longest: int = 30, **params: Any) -> list[Request]:
    rng = random.Random(seed)
    shared = tuple(rng.randrange(1, VOCABULARY) for _ in range(13))
    return [
        Request(
            custom_id=f"r{i}",
            prompt_ids=shared + tuple(rng.randrange(1, VOCABULARY) for _ in range(1 + i % 7)),
            sampling=SamplingParams(max_tokens=rng.randint(1, longest), **params),
        )
        for i in range(count)
    ]


def content(completion: Completion) -> Completion:
    """Without what the two engines may count differently."""
    return dataclasses.replace(completion, cached_tokens=0, evictions=0, parks=0)


def same(ours: list[Completion], theirs: list[Completion]) -> None:
    assert [content(c) for c in ours] == [content(c) for c in theirs]


@pytest.mark.parametrize("slots", [1, 3, 32])
@pytest.mark.parametrize("bursts", [False, True])
def test_it_completes_what_the_native_engine_completes(engine, monkeypatch, slots, bursts):
    monkeypatch.setattr(FakeLLM, "bursts", bursts)
    letters = "".join(chr(0x100 + i) for i in range(1, VOCABULARY))
    wanted = requests(40)
    wanted += [
        dataclasses.replace(r, custom_id=f"s{r.custom_id}", sampling=sampling)
        for r, sampling in zip(
            requests(40, seed=1),
            [
                SamplingParams(max_tokens=100, stop=(letters[i], letters[i + 40]), ignore_eos=True)
                for i in range(20)
            ]
            + [SamplingParams(max_tokens=None, stop_token_ids=(5 * i, 77)) for i in range(20)],
            strict=True,
        )
    ]
    wanted.append(Request(custom_id="end", prompt_ids=(7,) * (CONTEXT - 3)))
    wanted.append(Request(custom_id="nothing", prompt_ids=()))
    wanted.append(Request(custom_id="outside", prompt_ids=(VOCABULARY,)))
    wanted.append(Request(custom_id="negative", prompt_ids=(-1,)))
    wanted.append(Request(custom_id="full", prompt_ids=(3,) * CONTEXT))
    with engine(max_sequences=slots) as own, native(max_sequences=slots) as peer:
        done = own.generate(wanted)
        same(done, peer.generate(wanted))
        assert {c.finish_reason for c in done} == {"stop", "length", "error"}
        assert not fake(own).rows and not own.checkpoints()
        assert own.stats.finished == peer.stats.finished
        assert own.stats.prefix_tokens_saved == sum(c.cached_tokens for c in done) > 400
        prompts = sum(c.prompt_tokens for c in done if c.error is None)
        assert own.stats.prefill_tokens + own.stats.prefix_tokens_saved == prompts
        assert own.stats.sampled_tokens >= sum(c.completion_tokens for c in done)
        assert sum(own.stats.steps.values()) == fake(own).steps


def test_a_stop_text_over_token_borders_ends_a_row_and_aborts_it(engine):
    row = requests(1, longest=1)[0]
    long = dataclasses.replace(row, sampling=SamplingParams(max_tokens=60, ignore_eos=True))
    with engine() as own:
        [whole] = own.generate([long])
        sought = whole.text[20:23]
        cut = dataclasses.replace(
            long, sampling=dataclasses.replace(long.sampling, stop=("zzz", sought))
        )
        [done] = own.generate([cut])
        assert done.finish_reason == "stop"
        assert done.text == whole.text[: whole.text.index(sought)]
        assert done.completion_tokens == len(done.token_ids) < 60
        assert not fake(own).rows, "it decodes on"


def test_a_loop_ends_a_row_and_aborts_it(engine, monkeypatch):
    monkeypatch.setattr(FakeLLM, "loops", True)
    sampling = SamplingParams(max_tokens=None, end_on_repetition=True)
    with engine() as own:
        [done] = own.generate([Request(custom_id="a", prompt_ids=(1,), sampling=sampling)])
        assert (done.finish_reason, done.token_ids) == ("repetition", (9,) * 256)
        assert not fake(own).rows, "it decodes on"


def test_rows_that_vllm_refuses_or_fails_on_end_alone(engine, monkeypatch):
    good = requests(10)
    sampling = SamplingParams(temperature=3.0, max_tokens=None, ignore_eos=True)
    hot = Request(custom_id="hot", prompt_ids=(1,), sampling=sampling)
    with engine(max_sequences=4) as own, native() as peer:
        wanted = [*good[:5], hot, *good[5:]]
        done = own.generate(wanted)
        same([c for c in done if c.custom_id != "hot"], peer.generate(good))
        assert done[5].finish_reason == "error"
        assert "temperature must be in [0, 2]" in done[5].error
        # names of what vLLM is given count from the refused one on
        monkeypatch.setattr(FakeLLM, "errors", {str(len(wanted) + 2)})
        done = own.generate(good)
        same(
            [c for i, c in enumerate(done) if i != 2],
            peer.generate(g for g in good if g is not good[2]),
        )
        assert done[2].finish_reason == "error" and "vLLM ended it" in done[2].error
        assert own.stats.finished["error"] == 2
        assert not fake(own).rows


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_checkpoints_of_either_engine_go_on_in_the_other(engine, steps):
    wanted = requests(12, longest=40, ignore_eos=True)
    with native() as peer:
        whole = peer.generate(wanted)
    with engine(max_sequences=5) as own, native() as peer:
        for request in wanted:
            own.submit(request)
        for _ in range(steps):
            own.step()
        done = {c.custom_id: c for c in own._finished}
        left = [Checkpoint.from_json(c.to_json()) for c in own.checkpoints()]
        assert len(done) + len(left) == 12 and any(c.output_ids for c in left)
        done |= {c.custom_id: c for c in peer.stream(left)}
        same([done[r.custom_id] for r in wanted], whole)
    with native(max_sequences=5) as peer, engine() as own:
        for request in wanted:
            peer.submit(request)
        for _ in range(steps):
            peer.step()
        done = {c.custom_id: c for c in peer._finished}
        left = peer.checkpoints()
        done |= {c.custom_id: c for c in own.stream(left)}
        same([done[r.custom_id] for r in wanted], whole)


def test_a_checkpoint_counts_what_was_decoded_before(engine):
    request = Request(custom_id="a", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=3))
    with engine() as own:
        [done] = own.stream([Checkpoint(request=request, output_ids=(4, 5, 6), cached_tokens=1)])
        assert (done.finish_reason, done.token_ids, done.cached_tokens) == ("length", (4, 5, 6), 1)
        assert not fake(own).steps
        own.generate([dataclasses.replace(request, custom_id="b", prompt_ids=(1, 2, 4, 5, 6, 7))])
        own.submit(Checkpoint(request=request, output_ids=(4, 5), cached_tokens=1))
        own._take_in()
        [row] = fake(own).rows.values()
        assert (row.prompt, row.params.max_tokens) == ([1, 2, 4, 5], 1)
        own.submit(
            Checkpoint(
                request=dataclasses.replace(request, custom_id="c", prompt_ids=(1, 2, 4, 5, 6)),
                output_ids=(7,),
                cached_tokens=1,
            )
        )
        done = {c.custom_id: c for c in own.completions()}
        assert done["c"].cached_tokens == 1 and own.stats.prefix_tokens_saved == 4


def seeds(own: VllmEngine) -> dict[str, int | None]:
    return {name: row.params.seed for name, row in fake(own).rows.items()}


def test_sampled_rows_draw_independently_and_repeat(engine):
    def rows(count: int, **params: Any) -> list[Request]:
        params = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True} | params
        return [
            Request(custom_id=f"{i}", prompt_ids=(1, 2), sampling=SamplingParams(**params))
            for i in range(count)
        ]

    with engine(seed=3) as own:
        first = own.generate(rows(20))
        assert len({c.token_ids for c in first}) == 20
        assert own.generate(rows(20)) == [dataclasses.replace(c, cached_tokens=0) for c in first]
        by_row = own.generate(rows(20, seed=4))
        assert not {c.token_ids for c in by_row} & {c.token_ids for c in first}
        assert len({c.token_ids for c in own.generate(rows(3, temperature=0.0))}) == 1
    with engine(seed=4) as own:
        assert [c.token_ids for c in own.generate(rows(20))] == [c.token_ids for c in by_row]
    [row] = rows(1)
    with engine() as own:
        own.submit(row)
        own.submit(Checkpoint(request=dataclasses.replace(row, custom_id="0-"), output_ids=()))
        own.submit(Checkpoint(request=dataclasses.replace(row, custom_id="1"), output_ids=(8, 9)))
        own.step()
        drawn = list(seeds(own).values())
        assert len(set(drawn)) == 3 and all(0 <= s < 1 << 53 for s in drawn)


def test_a_continuation_draws_from_another_stream(engine):
    sampling = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    row = Request(custom_id="a", prompt_ids=(1, 2), sampling=sampling)
    with engine() as own:
        own.submit(row)
        own.step()
        [start] = seeds(own).values()
        [left] = own.checkpoints()
    with engine() as own:
        own.submit(left)
        own.step()
        [later] = seeds(own).values()
    assert start != later


def test_what_vllm_is_asked_for(engine, folder, monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    config = {"max_sequences": 7, "page_size": 64, "kv_bytes": 1 << 24, "max_context": 150}
    with engine(**config, max_prefill_tokens=99) as own:
        llm = FakeLLM.started[-1]
        assert own.context_length == 150
    assert llm.options == {
        "model": folder,
        "dtype": "float32",
        "load_format": "safetensors",
        "block_size": 64,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 99 + 7,
        "max_model_len": 150,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "max_logprobs": -1,
        "enforce_eager": True,
        "use_tqdm_on_load": False,
        "kv_cache_memory_bytes": 1 << 24,
    }
    assert llm.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert llm.environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    with engine(share_prefixes=False, dtype="bfloat16", max_context=10**6) as own:
        options = FakeLLM.started[-1].options
        assert own.context_length == options["max_model_len"] == CONTEXT
    assert options["block_size"] == 32 and not options["enable_prefix_caching"]
    assert options["dtype"] == "bfloat16"
    assert 0 < options["kv_cache_memory_bytes"] <= 4 << 30
    with engine():
        assert FakeLLM.started[-1].options["max_model_len"] == -1


def test_starting_it_leaves_the_random_streams_of_the_process_alone(engine):
    random.seed(5)
    np.random.seed(5)
    wanted = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    with engine():
        assert (random.random(), np.random.random()) == wanted


def test_the_sampling_parameters_of_a_row(engine):
    sampling = SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        stop=("x",),
        stop_token_ids=(44, 3),
        logprobs=10**9,
    )
    with engine() as own:
        own.submit(Request(custom_id="a", prompt_ids=(1, 2), sampling=sampling))
        own._take_in()
        [row] = fake(own).rows.values()
        fields = vars(row.params)
        assert fields.pop("seed") > 0
        assert fields == {
            "max_tokens": 9,
            "temperature": 0.5,
            "top_k": 4,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "stop_token_ids": [END, 3, 44],
            "ignore_eos": True,
            "detokenize": False,
            "output_kind": "delta",
            "logprobs": VOCABULARY,
        }


@pytest.mark.parametrize("count", [0, 1, 3])
def test_logprobs_are_of_the_token_and_of_the_likeliest(engine, count):
    row = Request(
        custom_id="a", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=5, logprobs=count)
    )
    with engine() as own:
        [done] = own.generate([row])
    assert len(done.logprobs) == done.completion_tokens
    for token, said in zip(done.token_ids, done.logprobs, strict=True):
        assert (said.token_id, said.logprob) == (token, -2.5)
        ranked = sorted(entries(token, count), key=lambda e: -e[1])
        assert said.top == tuple(ranked[:count])


def test_five_waves_through_few_slots_draw_as_room_comes(engine):
    wanted = requests(40, longest=20)
    drawn = 0

    def source():
        nonlocal drawn
        for request in wanted:
            drawn += 1
            yield request

    with engine(max_sequences=2) as own, native() as peer:
        done = {}
        for count, completion in enumerate(own.stream(source())):
            assert drawn - count <= 4 * 2
            done[completion.custom_id] = completion
        same([done[r.custom_id] for r in wanted], peer.generate(wanted))
        # no batch barrier: all but the last steps are full
        full = [len(wave) == 2 for wave in fake(own).waves]
        assert all(full[: len(full) - 20])


def test_they_go_in_the_order_given_and_by_priority(engine):
    wanted = [
        Request(
            custom_id=f"{i}",
            prompt_ids=(i + 1,),
            priority=int(i == 5),
            sampling=SamplingParams(max_tokens=2, ignore_eos=True),
        )
        for i in range(8)
    ]
    with engine(max_sequences=1) as own:
        for request in wanted:
            own.submit(request)
        assert [c.custom_id for c in own.completions()] == ["5", "0", "1", "2", "3", "4", "6", "7"]


def test_cancelling_before_during_and_after(engine):
    wanted = requests(6, longest=40, ignore_eos=True)
    wanted = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_tokens=20))
        for r in wanted
    ]
    with engine(max_sequences=2) as own, native() as peer:
        whole = {c.custom_id: c for c in peer.generate(wanted)}
        for request in wanted:
            own.submit(request)
        assert own.cancel("r3") and not own.cancel("unknown")
        own.step()
        own.step()
        assert own.cancel("r0") and own.cancel("r5")
        done = {c.custom_id: c for c in own.completions()}
        assert not own.cancel("r1")
        reasons = {i: c.finish_reason for i, c in done.items()}
        assert [i for i, r in sorted(reasons.items()) if r == "cancelled"] == ["r0", "r3", "r5"]
        assert done["r0"].token_ids == whole["r0"].token_ids[:2] and not done["r3"].token_ids
        same([done[i] for i in ("r1", "r2", "r4")], [whole[i] for i in ("r1", "r2", "r4")])
        assert not fake(own).rows and not own.checkpoints()


def test_who_leaves_a_stream_early_drops_its_rows_and_no_others(engine):
    wanted = requests(20, longest=20)
    with engine(max_sequences=2) as own, native() as peer:
        kept = dataclasses.replace(wanted[3], custom_id="kept")
        own.submit(kept)
        for _, _ in zip(own.stream(wanted), range(3), strict=False):
            pass
        left = list(own.completions())
        assert [c.custom_id for c in left] in (["kept"], [])
        assert not fake(own).rows and not own.checkpoints()

        def broken():
            yield from wanted[:4]
            raise OSError("the source is gone")

        with pytest.raises(OSError, match="the source is gone"):
            list(own.stream(broken()))
        assert not own.checkpoints()
        same(own.generate(wanted), peer.generate(wanted))


def test_names_are_the_callers_own(engine):
    names = ["", "\ud800", "a" * 10_000, "0", "1", "\x00\n"]
    wanted = [Request(custom_id=name, prompt_ids=(1, 2)) for name in names]
    with engine() as own:
        assert [c.custom_id for c in own.generate(wanted)] == names
        assert len(own.generate(wanted[:1])) == 1
        own.submit(wanted[0])
        with pytest.raises(SurgeError, match="under way"):
            own.submit(wanted[0])
        list(own.completions())
        with pytest.raises(SurgeError, match="two requests"):
            own.generate(wanted[:1] * 2)
    with pytest.raises(SurgeError, match="closed"):
        own.submit(wanted[0])
    own.close()


@pytest.mark.parametrize("dies_at", [1, 5, 17])
def test_an_engine_that_dies_is_started_again_for_what_is_unfinished(engine, dies_at, caplog):
    FakeLLM.deaths = [dies_at]
    wanted = requests(30)
    with engine(max_sequences=3) as own, native() as peer:
        same(own.generate(wanted), peer.generate(wanted))
        first, second = (llm.llm_engine for llm in FakeLLM.started)
        assert first.engine_core.down == 1 and not second.engine_core.down
        assert "vLLM has died (RuntimeError: the device is lost)" in caplog.text
        assert own.stats.evictions <= 3
    assert second.engine_core.down == 1


def test_a_second_death_is_the_callers(engine):
    FakeLLM.deaths = [3, 4]
    wanted = requests(9, longest=40, ignore_eos=True)
    own = engine(max_sequences=3)
    for request in wanted:
        own.submit(request)
    done = []
    with pytest.raises(SurgeError, match="not started again: RuntimeError: the device is lost"):
        for completion in own.completions():
            done.append(completion)
    left = own.checkpoints()
    assert len(FakeLLM.started) == 2 and not own._finished
    assert len(done) + len(left) == 9 and len(left) > 3
    assert [llm.llm_engine.engine_core.down for llm in FakeLLM.started] == [1, 1]
    with pytest.raises(SurgeError, match="has died"):
        own.step()
    own.close()
    with native() as peer:
        ends = {c.custom_id: c for c in (*done, *peer.stream(left))}
        same([ends[r.custom_id] for r in wanted], peer.generate(wanted))


def test_what_has_finished_comes_out_before_the_death_is_told(engine, monkeypatch):
    FakeLLM.deaths = [1]
    with engine() as own:
        monkeypatch.setattr(FakeLLM, "breaks", ValueError("no memory"))
        own.submit(Request(custom_id="good", prompt_ids=(1,)))
        own.submit(Request(custom_id="bad", prompt_ids=()))
        coming = own.completions()
        assert next(coming).custom_id == "bad"
        with pytest.raises(SurgeError, match="the device is lost; then vLLM does not start"):
            next(coming)
        assert [c.request.custom_id for c in own.checkpoints()] == ["good"]


def test_an_engine_that_is_found_dead_when_it_is_given_a_row_starts_again(engine):
    wanted = requests(4)
    with engine() as own, native() as peer:
        fake(own).dead = True
        same(own.generate(wanted), peer.generate(wanted))
        assert len(FakeLLM.started) == 2


def test_processes_of_a_dead_engine_go_with_it(engine):
    FakeLLM.deaths = [2]
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with engine() as own:
            process = psutil.Process(worker.pid)
            own._llm._processes.append(process)
            own.generate(requests(3, ignore_eos=True))
            assert len(FakeLLM.started) == 2 and not process.is_running()
    finally:
        worker.kill()
        worker.wait()


def test_an_llm_of_the_callers_is_left_running_and_need_not_rank(folder):
    llm = FakeLLM(max_num_seqs=2, max_model_len=CONTEXT)
    config = EngineConfig(model=folder, device="cpu", max_context=50)
    first = dataclasses.replace(requests(1, ignore_eos=True)[0], priority=3)
    with VllmEngine(config, llm=llm) as own:
        assert own.context_length == 50
        own.generate([first])
        own.submit(dataclasses.replace(first, sampling=SamplingParams(max_tokens=20)))
        own.step()
    assert not llm.llm_engine.rows and not llm.llm_engine.engine_core.down


def test_what_cannot_start_says_why(engine, folder, tmp_path, monkeypatch, vllm):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for model in (str(tmp_path), str(tmp_path / "model.gguf")):
        with pytest.raises(SurgeError, match="GGUF"):
            VllmEngine(EngineConfig(model=model, device="cpu"))
    with pytest.raises(SurgeError, match="native engine"):
        VllmEngine(EngineConfig(model="dummy"))
    with pytest.raises(SurgeError, match="no model"):
        VllmEngine(EngineConfig(model=str(tmp_path / "nowhere"), device="cpu"))
    monkeypatch.setattr(FakeLLM, "breaks", ValueError("no architecture"))
    with pytest.raises(SurgeError, match=r"vLLM does not start with .*: ValueError: no arch"):
        engine()
    vllm.platforms.current_platform.device_type = "cuda"
    with pytest.raises(SurgeError, match="computes on cuda"):
        engine()
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SurgeError, match="pip install vllm"):
        engine()


def test_importing_it_loads_neither_vllm_nor_torch():
    code = (
        "import sys, surge_beam.gpu.vllm_engine\n"
        "print([m for m in ('vllm', 'torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@settings(max_examples=60)
@given(st.data())
def test_any_course_of_events_completes_each_request_once(data):
    """Submissions, cancels, deaths and bursts in any order change no greedy token."""
    FakeLLM.started, FakeLLM.bursts = [], data.draw(st.booleans())
    FakeLLM.deaths = data.draw(st.lists(st.none() | st.integers(1, 30), max_size=1))
    wanted = requests(data.draw(st.integers(1, 25)), seed=data.draw(st.integers(0, 9)))
    config = EngineConfig(
        model=os.path.dirname(__file__), device="cpu", max_sequences=data.draw(st.integers(1, 5))
    )
    moves = data.draw(st.lists(st.sampled_from(["submit", "step", "cancel", "move"]), max_size=60))
    own, queue = VllmEngine(config), list(wanted)
    done: list[Completion] = []
    cancelled = set()
    try:
        for move in moves:
            if move == "submit" and queue:
                own.submit(queue.pop(0))
            elif move == "cancel":
                name = data.draw(st.sampled_from(wanted)).custom_id
                cancelled |= {name} if own.cancel(name) else set()
            elif move == "step":
                own.step()
            elif move == "move":
                done += own._finished
                left = own.checkpoints()
                own.close()
                cancelled.clear()
                own = VllmEngine(config)
                queue = left + queue
        done += own.stream(queue)
        done += own.completions()
    finally:
        own.close()
        FakeLLM.bursts = False
    counted = collections.Counter(c.custom_id for c in done)
    assert counted == collections.Counter(r.custom_id for r in wanted)
    with native() as peer:
        whole = {c.custom_id: c for c in peer.generate(wanted)}
    for completion in done:
        theirs = whole[completion.custom_id]
        if completion.finish_reason == "cancelled":
            assert theirs.token_ids[: completion.completion_tokens] == completion.token_ids
        else:
            same([completion], [theirs])
