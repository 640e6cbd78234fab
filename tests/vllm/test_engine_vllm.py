"""The native engine against vLLM's, greedy in float32. Runs in an environment that has vLLM:
``make test-vllm``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before vLLM is imported: one process, all cores, nothing sent anywhere.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)
vllm = pytest.importorskip("vllm", reason="no vLLM in this environment; make test-vllm has one")

import torch  # noqa: E402
import transformers  # noqa: E402

from surge_beam.gpu.engine import Engine  # noqa: E402
from surge_beam.gpu.gguf_file import GgufFile  # noqa: E402
from surge_beam.gpu.language_model import LanguageModel, load_language_model  # noqa: E402
from surge_beam.gpu.model_runner import ModelRunner  # noqa: E402
from surge_beam.records import EngineConfig, Request, SamplingParams  # noqa: E402
from tests.gpu import real_prompts  # noqa: E402

TOKENS = 64


def _save(model: LanguageModel, folder: Path) -> None:
    """SmolLM2 as a Hugging Face folder, for vLLM."""
    from surge_beam.gpu.encoder import resolve_model

    file = next(Path(resolve_model("SmolLM2-135M-Instruct")).glob("*.gguf"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    plain = transformers.LlamaForCausalLM(GgufFile(file).config())
    plain.load_state_dict(theirs.state_dict())
    plain.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)


@pytest.mark.timeout(1800)
def test_smollm2_decodes_what_vllm_decodes(shared_data, tmp_path):
    model = load_language_model(EngineConfig(dtype="float32", device="cpu"))
    texts = real_prompts.few_shot(shared_data, 3, 8)
    texts += real_prompts.over_documents(shared_data, 8, 3)
    prompts = [model.encode(text) for text in texts]
    prompts += [model.chat(messages) for messages in real_prompts.dialogues(shared_data, 16)]
    assert len(prompts) == 64

    _save(model, tmp_path)
    peer = vllm.LLM(
        str(tmp_path), dtype="float32", max_model_len=4096, enforce_eager=True, max_num_seqs=32
    )
    outputs = peer.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        vllm.SamplingParams(temperature=0.0, max_tokens=TOKENS),
        use_tqdm=False,
    )
    wanted = [tuple(output.outputs[0].token_ids) for output in outputs]
    del peer

    config = EngineConfig(max_sequences=32, schedule="eb+")
    with Engine(config, runner=ModelRunner(model, pages=4096, page_size=16)) as own:
        done = own.generate(
            Request(
                custom_id=str(i),
                prompt_ids=tuple(ids),
                sampling=SamplingParams(max_tokens=TOKENS),
            )
            for i, ids in enumerate(prompts)
        )
    differing = [i for i, c in enumerate(done) if c.token_ids != wanted[i]]
    assert not differing
    assert own.stats.prefix_tokens_saved > 0.5 * sum(map(len, prompts))
