"""GGUF files: equal to transformers' own reading of them; broken ones are named."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from surge_beam.gpu.encoder import resolve_model
from surge_beam.gpu.gguf_file import GgufFile
from surge_beam.gpu.language_model import load_language_model
from surge_beam.gpu.models.gguf import GgufWeights
from surge_beam.records import EngineConfig, SurgeError
from tests.gpu.test_decoder import DenseAttention, step
from tests.gpu.tiny_models import CHAT_TEMPLATE, TEXTS, train_tokenizer

F32, F16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
}


def write(path, family="llama", kind=F32, tied=True, add_bos=None, extra=()):
    """A random model and a tokenizer as a GGUF file, written as llama.cpp's converter does."""
    tokenizer = train_tokenizer("llama")
    vocab = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    config = transformers.AutoConfig.for_model(
        family, vocab_size=len(vocab), tie_word_embeddings=tied, head_dim=16, **SIZES
    )
    torch.manual_seed(5)
    state = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5e4)
    writer.add_rope_dimension_count(16)
    for key, value in extra:
        writer.add_uint32(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if i < 5 else 1 for i in range(len(vocab))])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(4)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), 2)
    for name, tensor in state.items():
        if name == "lm_head.weight" and tied:
            continue
        tensor = tensor + 0.2 * torch.randn_like(tensor)
        data = tensor.numpy()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = 4 if "q_proj" in name else 2
            pairs = data.reshape(heads, 2, 8, *data.shape[1:])
            data = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(data.shape)
        stem, _, tail = name.rpartition(".")
        as_kind = kind if data.ndim > 1 else F32
        data = gguf.quantize(data, as_kind)
        writer.add_tensor(f"{names.get_name(stem)}.{tail}", data, raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path):
    return load_language_model(EngineConfig(model=str(path), device="cpu"))


def transformers_model(path):
    """The model as transformers reads it, without its quantized layers."""
    # of Qwen models transformers passes over the size of a head in the file
    said = {"head_dim": 16} if path.name == "m.gguf" else {}
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name, **said)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model.eval(), tensors


@pytest.mark.parametrize(
    ("family", "kind", "tied"),
    [
        ("llama", "F32", True),
        ("llama", "Q4_1", False),
        ("llama", "Q8_0", True),
        ("qwen2", "F16", False),
        ("qwen3", "BF16", True),
    ],
)
def test_equals_transformers(family, kind, tied, tmp_path):
    path = write(tmp_path / "m.gguf", family, getattr(gguf.GGMLQuantizationType, kind), tied)
    theirs, tensors = transformers_model(path)
    file = GgufFile(path)
    ours = file.config()
    assert ours.head_dim == 16
    for name in (*SIZES, "vocab_size", "tie_word_embeddings", "rms_norm_eps"):
        assert getattr(ours, name) == getattr(theirs.config, name), name
    cpu = {"dtype": torch.float32, "device": torch.device("cpu")}
    weights = GgufWeights(file, ours, **cpu)
    assert len(tensors) == len(file.tensors)
    for name, tensor in tensors.items():
        assert torch.equal(weights.tensor(name.removeprefix("model.")), tensor), name
    assert weights.find("lm_head.bias") is None and weights.find("nothing.weight") is None
    model = load(path)
    ids = list(range(40, 60))
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    got = step(model.decoder, DenseAttention(model.decoder, 1), [(0, 0, ids)])
    assert float((got - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("add_bos", [None, False, True])
def test_tokenizer(add_bos, tmp_path):
    path = write(tmp_path / "m.gguf", add_bos=add_bos)
    model, theirs = load(tmp_path), train_tokenizer("llama")
    skip = 0 if add_bos else 1
    assert model.encode_batch(TEXTS) == [ids[skip:] for ids in theirs(TEXTS)["input_ids"]]
    theirs.chat_template = CHAT_TEMPLATE
    messages = [{"role": "user", "content": "Hello, World!"}]
    assert model.chat(messages) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert model.stop_ids == {2, 4}
    assert model.context_length == 128
    assert model.name == str(tmp_path) and path.is_file()


def test_a_folder_with_two_files(tmp_path):
    write(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(SurgeError, match=r"several GGUF files \(a\.gguf, b\.gguf\)"):
        load(tmp_path)
    assert load(tmp_path / "a.gguf").context_length == 128


@pytest.mark.parametrize(
    ("key", "value"), [("llama.expert_count", 8), ("llama.attention.sliding_window", 64)]
)
def test_a_setting_that_is_not_computed(key, value, tmp_path):
    path = write(tmp_path / "m.gguf", extra=[(key, value)])
    with pytest.raises(SurgeError, match=f"{key.partition('.')[2]}; --engine vllm"):
        load(path)
    assert load(write(tmp_path / "n.gguf", extra=[(key, 0)])).context_length == 128


def test_heads_of_several_sizes(tmp_path):
    path = write(tmp_path / "m.gguf", extra=[("llama.attention.key_length", 32)])
    with pytest.raises(SurgeError, match="differ in size; --engine vllm"):
        load(path)


def test_an_unknown_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SurgeError, match=r"family 'mamba'.*--engine vllm"):
        load(tmp_path / "m.gguf")


def test_a_missing_tensor_or_tokenizer(tmp_path):
    path = write(tmp_path / "m.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(SurgeError, match=r"layers\.1\.mlp\.up_proj"):
        load(path)
    path.write_bytes(whole.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.xxxxxx"))
    with pytest.raises(SurgeError, match=r"m\.gguf"):
        load(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write(tmp_path_factory.mktemp("whole") / "m.gguf")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file(share, whole, tmp_path):
    path = tmp_path / "m.gguf"
    content = whole.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(SurgeError, match=r"m\.gguf cannot be read"):
        load(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.binary(min_size=1, max_size=64), at=st.integers(0, 1400))
def test_a_garbled_header_is_read_or_refused(junk, at, whole, tmp_path):
    path, content = tmp_path / "m.gguf", bytearray(whole.read_bytes())
    content[at : at + len(junk)] = junk
    path.write_bytes(content)
    try:
        file = GgufFile(path)
        file.config()
        for name in file.tensors:
            file.read(name)
    except SurgeError as error:
        assert "m.gguf" in str(error) and len(str(error)) < 2000


@pytest.mark.parametrize(
    "counts", [(2**60, 0), (0, 2**60), (2**63 + 5, 2**64 - 1)], ids=["tensors", "keys", "both"]
)
def test_counts_that_cannot_be(counts, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(100))
    with pytest.raises(SurgeError, match=r"m\.gguf"):
        GgufFile(path)


def test_the_bundled_model_answers():
    name = "SmolLM2-135M-Instruct"
    assert resolve_model(name) == resolve_model(f"HuggingFaceTB/{name}")
    model = load(name)
    ids = model.chat(
        [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    )
    attention, at, out = DenseAttention(model.decoder, 1), 0, []
    while not out or (out[-1] not in model.stop_ids and len(out) < 20):
        part = ids if not out else out[-1:]
        out.append(int(step(model.decoder, attention, [(0, at, part)], [len(part) - 1]).argmax()))
        at += len(part)
    assert model.decode(out) == "The capital of France is Paris."
    assert model.stop_ids == {2} and model.context_length == 8192


@pytest.mark.slow
def test_the_bundled_model_equals_transformers():
    model = load("SmolLM2-135M-Instruct")
    (path,) = Path(model.tokenizer.name_or_path).glob("*.gguf")
    theirs, tensors = transformers_model(path)
    file = GgufFile(path)
    cpu = {"dtype": torch.float32, "device": torch.device("cpu")}
    weights = GgufWeights(file, file.config(), **cpu)
    for name, tensor in tensors.items():
        assert torch.equal(weights.tensor(name.removeprefix("model.")), tensor), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert model.encode_batch(TEXTS) == tokenizer(TEXTS)["input_ids"]
    messages = [{"role": "user", "content": "Name a river."}]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert model.chat(messages) == ids
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    got = step(model.decoder, DenseAttention(model.decoder, 1), [(0, 0, ids)])
    assert float((got - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
