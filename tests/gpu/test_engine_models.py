"""The engine's greedy float32 tokens against transformers' generate, one prompt at a time."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from surge_beam.gpu.engine import Engine
from surge_beam.gpu.kernels.compiled import load_kernels
from surge_beam.gpu.kernels.operations import CompiledOperations, TorchOperations
from surge_beam.gpu.language_model import LanguageModel, load_language_model
from surge_beam.gpu.model_runner import ModelRunner, page_bytes
from surge_beam.policy.residency import decide
from surge_beam.records import Checkpoint, Completion, EngineConfig, Request, SamplingParams
from tests.gpu import real_prompts
from tests.gpu.test_engine import Chaos
from tests.gpu.tiny_models import tiny_decoder
from tests.whole import WHOLE, kept

FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"head_dim": 16},
}
ALL = list(itertools.product(["eb", "mb", "eb+"], [True, False], [1, 3, 32], [16, 64], [False]))
# Every pair of settings stands in one of these at least.
SOME = [
    ("eb", True, 32, 16, True),
    ("mb", False, 32, 64, False),
    ("eb+", True, 3, 64, True),
    ("eb", False, 3, 64, False),
    ("mb", True, 3, 16, False),
    ("eb+", False, 32, 16, True),
    ("eb", True, 1, 64, False),
    ("mb", True, 1, 16, False),
    ("eb+", False, 1, 16, False),
    ("mb", True, 32, 64, True),
    ("eb+", True, 32, 16, False),
]


def oracle(model: torch.nn.Module, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    found = {}
    for request in requests:
        ids = torch.tensor([request.prompt_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request.sampling.max_tokens,
        )
        found[request.custom_id] = tuple(out[0, ids.shape[1] :].tolist())
    return found


def run(
    model: LanguageModel,
    requests: list[Request],
    setting: tuple[str, bool, int, int, bool],
    *,
    prefill: int,
    seed: int = 0,
) -> tuple[list[Completion], Engine]:
    """Completions under a setting; with chaos, of a pool that is too small and with sequences
    parked, evicted and resumed at random besides.
    """
    schedule, share, slots, page, chaos = setting
    longest = max(len(r.prompt_ids) + (r.sampling.max_tokens or 0) for r in requests)
    running = min(slots, len(requests))
    pages = -(-longest // page) * (max(2, running // 2) if chaos else running) + running + 1
    config = EngineConfig(
        max_sequences=slots,
        page_size=page,
        schedule=schedule,
        share_prefixes=share,
        max_prefill_tokens=prefill,
        host_kv_bytes=page_bytes(model, page) * (pages // 2 if chaos else 0),
        seed=seed,
    )
    runner = ModelRunner(model, pages=pages, page_size=page)
    runner.pool.fill_(float("nan"))
    own = Engine(config, runner=runner, decide=Chaos(random.Random(1)) if chaos else decide)
    done = own.generate(requests)
    own.pool.check([])
    return done, own


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    family = request.param
    folder = tiny_decoder(family, tmp_path_factory.mktemp(family), **FAMILIES[family])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_language_model(EngineConfig(model=str(folder), dtype="float32", device="cpu"))
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(5, 200, n) for n in (0, 33, 64, 70)]
    prefixes.append(np.concatenate([prefixes[2], rng.integers(5, 200, 40)]))
    requests = [
        Request(
            custom_id=str(i),
            prompt_ids=tuple(
                map(int, [*prefixes[i % 5], *rng.integers(5, 200, rng.integers(1, 20))])
            ),
            sampling=SamplingParams(max_tokens=int(rng.integers(1, 40))),
        )
        for i in range(12)
    ]
    requests.append(Request(custom_id="whole", prompt_ids=tuple(map(int, prefixes[2]))))
    return family, ours, requests, oracle(theirs, requests)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_tiny_models_decode_what_transformers_decodes(tiny, kernels, monkeypatch):
    family, model, requests, wanted = tiny
    settings = [*ALL, *SOME] if WHOLE and family == "llama" else SOME
    if kernels == "torch":
        monkeypatch.setattr(model.decoder, "operations", TorchOperations())
        settings = settings if WHOLE else SOME[:3]
    else:
        assert load_kernels() is None or isinstance(model.decoder.operations, CompiledOperations)
    moves = np.zeros(3, int)
    for setting in settings:
        done, own = run(model, requests, setting, prefill=48)
        assert {c.custom_id: c.token_ids for c in done} == wanted, setting
        if setting[1] and not setting[4]:
            assert own.stats.prefix_tokens_saved > 0
        moves += (own.stats.parks, own.stats.resumes, own.stats.evictions)
    assert moves.all(), moves


def test_sampled_text_is_the_same_in_any_batch_and_order(tiny):
    _, model, requests, _ = tiny
    sampled = [
        Request(
            custom_id=r.custom_id,
            prompt_ids=r.prompt_ids,
            sampling=SamplingParams(
                max_tokens=25, temperature=0.8, top_k=30, top_p=0.95, repetition_penalty=1.1
            ),
        )
        for r in requests
    ]
    texts = []
    for setting in [SOME[0], SOME[4], SOME[6]]:
        shuffled = random.Random(setting[2]).sample(sampled, len(sampled))
        done, _ = run(model, shuffled, setting, prefill=48, seed=9)
        texts.append({c.custom_id: c.token_ids for c in done})
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0].values())) > len(sampled) // 2


def _checkpoints(model: LanguageModel, requests: list[Request], every: int) -> list[Checkpoint]:
    """Those of a run, at each page boundary of each sequence."""
    runner = ModelRunner(model, pages=200, page_size=16)
    own = Engine(EngineConfig(page_size=16, max_sequences=4, seed=5), runner=runner)
    for request in requests:
        own.submit(request)
    found = []
    while own.step():
        found += [
            c
            for c in own.checkpoints()
            if c.output_ids and (len(c.request.prompt_ids) + len(c.output_ids)) % every == 0
        ]
    return found


def test_a_checkpoint_of_any_page_boundary_goes_on_in_a_fresh_process(tmp_path):
    folder = tiny_decoder("llama", tmp_path / "model")
    model = load_language_model(EngineConfig(model=str(folder), dtype="float32", device="cpu"))
    rng = np.random.default_rng(2)
    requests = [
        Request(
            custom_id=str(i),
            prompt_ids=tuple(map(int, rng.integers(5, 200, 5 + 7 * i))),
            sampling=SamplingParams(max_tokens=40, temperature=0.9 * (i % 2), ignore_eos=True),
        )
        for i in range(6)
    ]
    done, _ = run(model, requests, SOME[1], prefill=64, seed=5)
    wanted = {c.custom_id: c.token_ids for c in done}
    checkpoints = _checkpoints(model, requests, every=16)
    assert len(checkpoints) >= 10
    file = tmp_path / "checkpoints.jsonl"
    file.write_text("\n".join(c.to_json() for c in checkpoints))
    program = (
        "import sys\n"
        "from surge_beam.gpu.engine import Engine\n"
        "from surge_beam.records import Checkpoint, EngineConfig\n"
        "config = EngineConfig(\n"
        "    model=sys.argv[1], dtype='float32', device='cpu', kv_bytes=1 << 20)\n"
        "with Engine(config) as engine:\n"
        "    for line in open(sys.argv[2]):\n"
        "        for done in engine.stream([Checkpoint.from_json(line)]):\n"
        "            print(done.custom_id, *done.token_ids)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(file)],
        text=True,
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[2],
    ).stdout
    lines = [line.split() for line in output.splitlines()]
    assert len(lines) == len(checkpoints)
    for custom_id, *tokens in lines:
        assert tuple(map(int, tokens)) == wanted[custom_id]


@pytest.fixture(scope="module")
def smollm2(shared_data):
    model = load_language_model(EngineConfig(dtype="float32", device="cpu"))
    texts = real_prompts.few_shot(shared_data, *((3, 8) if WHOLE else (1, 2)))
    texts += real_prompts.over_documents(shared_data, *((8, 3) if WHOLE else (1, 2)))
    prompts = [model.encode(text) for text in texts]
    talks = real_prompts.dialogues(shared_data, 16 if WHOLE else 1)
    prompts += [model.chat(messages) for messages in talks]
    return model, [
        Request(
            custom_id=str(i),
            prompt_ids=tuple(ids),
            sampling=SamplingParams(max_tokens=64 if WHOLE else 12),
        )
        for i, ids in enumerate(prompts)
    ]


@pytest.mark.slow
@pytest.mark.timeout(0 if WHOLE else 600)
def test_smollm2_decodes_what_transformers_decodes(smollm2):
    model, requests = smollm2
    assert len(requests) == (64 if WHOLE else 5)
    found = kept(f"{len(requests)} prompts", lambda: _oracle_of_smollm2(requests))
    wanted = {custom_id: tuple(tokens) for custom_id, tokens in found.items()}
    for setting in SOME if WHOLE else SOME[:1]:
        done, own = run(model, requests, setting, prefill=512)
        print(setting, own.stats)  # an hour: with -s, to see how far it is
        assert {c.custom_id: c.token_ids for c in done} == wanted, setting
        if setting[1]:
            assert own.stats.prefix_tokens_saved > 0


def _oracle_of_smollm2(requests: list[Request]) -> dict[str, tuple[int, ...]]:
    from surge_beam.gpu.encoder import resolve_model

    file = next(Path(resolve_model("SmolLM2-135M-Instruct")).glob("*.gguf"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    return oracle(theirs, requests)
