"""500 real requests through the whole job, against transformers one by one.

Takes half an hour, so it runs only with SURGE_WHOLE=1; the suite has smaller samples of each part.
With vLLM it runs in the environment of ``make test-vllm``.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.gpu import real_prompts
from tests.pipelines.generate_support import generate, run_script
from tests.pipelines.harness import read_output, write_rows
from tests.pipelines.runner_support import worker_pool
from tests.whole import kept, only_whole

SMOLLM = "SmolLM2-135M-Instruct"
REQUESTS = {"bbh": 240, "xquad": 240, "tau": 20}
MAX_TOKENS = 8
SETTINGS = {
    "one range": {"ranges": 1},
    "4 ranges": {"ranges": 4, "max_rows": 64},
    "16 ranges, 3 rounds": {"ranges": 16, "rounds": 3, "slice_tokens": 2},
    "two worker processes": {"ranges": 4, "rounds": 3, "slice_tokens": 3, "max_rows": 64},
    "Prism, external workers": {"ranges": 4, "max_rows": 64},
    "vLLM": {"engine": "vllm", "ranges": 4},
}

pytestmark = [
    only_whole,
    pytest.mark.timeout(0),
]


@pytest.fixture(scope="module")
def prompts(shared_data: Path) -> list[str]:
    """Raw prompts; dialogues as their chat template writes them."""
    from surge_beam.gpu.text_tokenizer import load_text_tokenizer
    from surge_beam.records import EngineConfig

    # tasks with the shortest examples, so that the oracle ends today
    few = sorted(real_prompts.few_shot(shared_data, 27, 40), key=len)[: REQUESTS["bbh"]]
    over = real_prompts.over_documents(shared_data, 80, 4)[: REQUESTS["xquad"]]
    tokenizer = load_text_tokenizer(EngineConfig())
    talks = real_prompts.dialogues(shared_data, REQUESTS["tau"])
    chats = [
        tokenizer.tokenizer.apply_chat_template(t, tokenize=False, add_generation_prompt=True)
        for t in talks
    ]
    found = [*few, *over, *chats]
    assert len(found) == sum(REQUESTS.values())
    return found


@pytest.fixture(scope="module")
def expected(prompts: list[str]) -> list[str]:
    return kept(f"{len(prompts)} requests, {MAX_TOKENS} tokens", lambda: _oracle(prompts))


def _oracle(prompts: list[str]) -> list[str]:
    from surge_beam.gpu.encoder import resolve_model

    file = next(Path(resolve_model(SMOLLM)).glob("*.gguf"))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        file.parent, gguf_file=file.name
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            pad_token_id=0,
        )
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize("name", SETTINGS)
def test_every_completion_is_transformers(
    tmp_path: Path, prompts: list[str], expected: list[str], prism_path: str, name: str
) -> None:
    if name == "vLLM" and importlib.util.find_spec("vllm") is None:
        pytest.skip("no vLLM in this environment; make test-vllm makes one that has it")
    rows = {"id": list(range(len(prompts))), "k": [i % 7 for i in range(len(prompts))]}
    write_rows(tmp_path / "in" / "a.parquet", {**rows, "prompt": prompts})
    options = {
        **{"input": tmp_path / "in", "output": tmp_path / "out", "model": SMOLLM},
        **{"prompt_column": "prompt", "id_column": "id", "partition_by": "k"},
        **{"dtype": "float32", "max_tokens": MAX_TOKENS, **SETTINGS[name]},
    }
    if name == "two worker processes":
        run_script(*("--direct_running_mode=multi_processing", "--direct_num_workers=2"), **options)
    elif name.startswith("Prism"):
        with worker_pool(tmp_path) as pool:
            prism = (
                *("--runner=PrismRunner", f"--prism_location={prism_path}"),
                *("--environment_type=EXTERNAL", f"--environment_config=localhost:{pool.port}"),
            )
            run_script(*prism, **options)
    else:
        generate(**options)
    found = {
        row["id"]: row["completion"]
        for table in read_output(tmp_path / "out").values()
        for row in table.to_pylist()
    }
    wrong = [i for i, text in enumerate(expected) if found.get(i) != text]
    report = json.loads((tmp_path / "out" / "_surge" / "report.json").read_text())
    print(name, len(wrong), report["seconds"], report["prefix_tokens_saved"])
    assert not wrong
