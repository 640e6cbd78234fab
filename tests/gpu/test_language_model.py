"""Loading a language model: folders, names, what is refused, prompts and end tokens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers

from surge_beam.gpu.device import choose_device
from surge_beam.gpu.language_model import load_language_model
from surge_beam.records import EngineConfig, SurgeError
from tests.gpu.test_decoder import DenseAttention, step
from tests.gpu.tiny_models import TEXTS, tiny_decoder

MESSAGES = [
    {"role": "system", "content": "Be brief, naïve café 🎉."},
    {"role": "user", "content": "Hello, World! <s> written out"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_decoder("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "model")


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


def load(folder, **settings):
    return load_language_model(EngineConfig(model=str(folder), device="cpu", **settings))


def change(file, **changes):
    said = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in said.items() if v is not None}))


def logits(model, ids):
    return step(model.decoder, DenseAttention(model.decoder, 1), [(0, 0, ids)])


def test_prompts_as_transformers_makes_them(folder, model):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.encode_batch(TEXTS) == theirs(TEXTS)["input_ids"]
    assert [model.encode(text) for text in TEXTS] == model.encode_batch(TEXTS)
    assert model.encode("a")[0] == theirs.bos_token_id
    assert model.encode_batch([]) == []


def test_chat_as_transformers_makes_it(folder, model):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert model.chat(MESSAGES) == expected
    assert model.chat(iter(MESSAGES)) == expected
    assert expected.count(theirs.bos_token_id) == 4


def test_decode_leaves_special_tokens_out(folder, model):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = model.encode(text)
        plain = text
        for special in theirs.all_special_tokens:
            plain = plain.replace(special, "")
        assert model.decode([*ids, 2]) == plain


def test_a_tokenizer_that_truncates_and_pads_does_neither(copy, model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(copy)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    tokenizer.save_pretrained(copy)
    assert load(copy).encode_batch(TEXTS) == model.encode_batch(TEXTS)


@pytest.mark.parametrize(
    ("generation", "config", "stops"),
    [
        (None, 2, {2}),
        (None, [4, 5], {2, 4, 5}),
        (7, 2, {2, 7}),
        ([7, 8], [4, 2], {2, 4, 7, 8}),
        ("absent", None, {2}),
    ],
)
def test_end_tokens_of_all_files(generation, config, stops, copy):
    if generation == "absent":
        (copy / "generation_config.json").unlink()
    else:
        change(copy / "generation_config.json", eos_token_id=generation)
    change(copy / "config.json", eos_token_id=config)
    assert load(copy).stop_ids == stops


def test_what_it_says_of_itself(folder, model):
    assert model.name == str(folder)
    assert model.context_length == 256
    assert model.decoder.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_weights(dtype, folder, model):
    ids = model.encode(TEXTS[5])
    exact, rounded = logits(model, ids), None
    other = load(folder, dtype=dtype)
    if other.decoder.dtype == torch.float32:
        rounded = logits(other, ids)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        ).float()
        with torch.inference_mode():
            expected = theirs(torch.tensor([ids])).logits[0]
        assert float((rounded - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
        assert not torch.equal(exact, rounded)


def test_device(folder):
    assert choose_device(EngineConfig(device="cpu")).name == "cpu"
    with pytest.raises(SurgeError, match=r"exclude each other|has none"):
        load(folder, require_accelerator=True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "gpt2"}, "family 'gpt2'"),
        ({"model_type": "nothing-known", "auto_map": {"AutoConfig": "x.Y"}}, "'nothing-known'"),
        ({"model_type": None}, "family None"),
        ({"hidden_act": "tanh"}, "activation is 'tanh'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantized"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, "'axial'"),
    ],
)
def test_refused_with_the_engine_that_runs_it(changes, why, copy):
    change(copy / "config.json", **changes)
    with pytest.raises(SurgeError, match=f"{why}.*--engine vllm"):
        load(copy)


def test_pickled_weights_are_refused(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(SurgeError, match=r"family 'llama'.*pickled; --engine vllm"):
        load(copy)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(name, copy):
    (copy / name).unlink()
    with pytest.raises(SurgeError, match=name):
        load(copy)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"model_type": "llama"'])
def test_a_broken_json_file_is_named(name, content, copy):
    (copy / name).write_bytes(content)
    with pytest.raises(SurgeError, match=name.partition(".")[0]):
        load(copy)


@pytest.mark.parametrize("size", [0, 3, 8, 200, -1])
def test_a_broken_weights_file_is_named(size, copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(SurgeError, match=r"model\.safetensors cannot be read"):
        load(copy)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 7}', '{"weight_map": {}}'])
def test_a_broken_index_is_named(content, copy):
    (copy / "model.safetensors.index.json").write_text(content)
    with pytest.raises(SurgeError, match=r"index\.json|no tensor named"):
        load(copy)


def test_a_config_that_makes_no_model(copy):
    change(copy / "config.json", hidden_size="wide")
    with pytest.raises(SurgeError, match=r"config\.json"):
        load(copy)


@pytest.mark.parametrize(
    "field, size",
    [
        ("num_key_value_heads", 0),
        ("head_dim", -8),
        ("max_position_embeddings", -1),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 0),
    ],
)
def test_a_size_that_no_model_has_is_named(field, size, copy):
    change(copy / "config.json", **{field: size})
    with pytest.raises(SurgeError, match=rf"{field}|config\.json"):
        load(copy)


def test_a_config_nested_without_end(copy):
    (copy / "config.json").write_text("[" * 100_000)
    with pytest.raises(SurgeError, match=r"config\.json"):
        load(copy)


def test_a_missing_model_says_what_to_do():
    with pytest.raises(SurgeError, match=r"no model 'nobody/nothing'.*give the path"):
        load("nobody/nothing")


def test_chat_errors(copy, model):
    with pytest.raises(SurgeError, match=r"chat template.*nobody may not speak"):
        model.chat([{"role": "nobody", "content": "x"}])
    with pytest.raises(SurgeError, match="chat template"):
        model.chat(["not a mapping"])
    for file in copy.glob("*.jinja"):
        file.unlink()
    change(copy / "tokenizer_config.json", chat_template=None)
    with pytest.raises(SurgeError, match="no chat template"):
        load(copy).chat(MESSAGES)


def test_threads_spin_shortly_and_the_module_loads_no_torch():
    code = (
        "import os, sys; import surge_beam.gpu.language_model as l;"
        "assert 'torch' not in sys.modules; print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    for policy, expected in (({}, "5000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")):
        env = {
            k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
        }
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=env | policy
        )
        assert done.stdout.strip() == expected, done.stderr
