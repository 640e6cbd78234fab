"""Token ids of prompts and conversations, without the weights of a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from surge_beam.gpu.dummy_runner import DummyRunner
from surge_beam.gpu.text_tokenizer import (
    DummyTokenizer,
    TextTokenizer,
    find_model,
    folder_tokenizer,
    kv_bytes_per_token,
    load_text_tokenizer,
    read_json,
)
from surge_beam.records import EngineConfig, SurgeError
from tests.gpu.tiny_models import train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SMOLLM = EngineConfig(model="SmolLM2-135M-Instruct", device="cpu")
TEXTS = ["", " ", "Hello, world", "naïve 水 \U0001f600", "<|im_start|>user", "a\n\n\nb"]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    try:
        found = load_text_tokenizer(SMOLLM)
    except SurgeError as error:
        pytest.skip(str(error))
    assert isinstance(found, TextTokenizer)
    return found


def test_the_stand_in() -> None:
    found = load_text_tokenizer(EngineConfig(model="dummy"))
    assert isinstance(found, DummyTokenizer)
    assert found.encode_batch(["a", "é", ""]) == [[97], [195, 169], []]
    chat = found.chat([{"role": "user", "content": "Hi"}, {"role": "system", "content": ""}])
    assert bytes(chat) == b"user: Hi\nsystem: \nassistant: "
    runner = DummyRunner(4, 4)
    assert found.context_length == runner.context_length and found.vocabulary == runner.vocabulary
    ids = list(range(1, 256))
    assert found.decode(ids) == runner.decode_text(ids)


def test_raw_prompts_are_what_transformers_makes_of_them(tokenizer: TextTokenizer) -> None:
    wanted = [tokenizer.tokenizer(text)["input_ids"] for text in TEXTS]
    assert tokenizer.encode_batch(TEXTS) == wanted
    assert [tokenizer.encode(text) for text in TEXTS] == wanted
    assert tokenizer.encode_batch([]) == []


def test_a_text_comes_back(tokenizer: TextTokenizer) -> None:
    for text in TEXTS[:4]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("<|im_start|>user")) == "user", "special ones left out"


def test_conversations_are_what_transformers_makes_of_them(tokenizer: TextTokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<b>Hi"}]
    wanted = tokenizer.tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.chat(messages) == wanted
    assert tokenizer.decode(tokenizer.chat(messages)).endswith("assistant\n")


def test_what_a_chat_template_refuses(tokenizer: TextTokenizer) -> None:
    with pytest.raises(SurgeError, match=r"chat template of .* fails"):
        tokenizer.chat([{"content": object()}, 7])  # type: ignore[list-item]
    template = tokenizer.tokenizer.chat_template
    tokenizer.tokenizer.chat_template = None
    try:
        with pytest.raises(SurgeError, match="has no chat template"):
            tokenizer.chat([{"role": "user", "content": "x"}])
    finally:
        tokenizer.tokenizer.chat_template = template


def test_what_the_model_says(tokenizer: TextTokenizer) -> None:
    assert tokenizer.context_length == 8192 and tokenizer.vocabulary == 49152
    # 30 layers, 3 heads of 64, keys and values, 16 bits
    assert kv_bytes_per_token(SMOLLM) == 30 * 3 * 64 * 2 * 2
    assert kv_bytes_per_token(EngineConfig(model="dummy")) > 0


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (
            {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64},
            3 * 2 * 2 * 8 * 2,
        ),
        (
            {"num_attention_heads": 8, "num_key_value_heads": None, "hidden_size": 64},
            3 * 2 * 64 * 2,
        ),
        ({"num_attention_heads": 8, "hidden_size": 64, "head_dim": 32}, 3 * 2 * 8 * 32 * 2),
        ({"num_attention_heads": 0, "hidden_size": 64}, 1 << 15),
        ({"num_attention_heads": "8", "hidden_size": 64}, 1 << 15),
        ({"num_attention_heads": 8, "hidden_size": 1 << 60}, 1 << 15),
        ({"n_head": 12}, 1 << 15),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_kv_of_a_folder(tmp_path: Path, said: dict, wanted: int, nested: bool) -> None:
    said = {"num_hidden_layers": 3, **said}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": said} if nested else said))
    assert kv_bytes_per_token(EngineConfig(model=str(tmp_path))) == wanted


def test_a_submitter_needs_no_model_library(tokenizer: TextTokenizer) -> None:
    code = f"""
import sys
from pipelines.generate_corpus import config_of, parser, settings_of
from surge_beam.gpu.text_tokenizer import load_text_tokenizer
from surge_beam.records import EngineConfig
load_text_tokenizer(EngineConfig(model="dummy"))
words = ["--input=in", "--output=out", "--prompt_column=p", "--model={tokenizer.name}"]
settings_of(config_of(parser().parse_args(words)))
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_tokenizer_is_loaded_once_until_its_file_changes(tmp_path: Path) -> None:
    train_tokenizer("llama").save_pretrained(tmp_path)
    first = folder_tokenizer(tmp_path)
    assert folder_tokenizer(tmp_path) is first
    changed = tmp_path / "tokenizer_config.json"
    changed.write_text(changed.read_text() + "\n")
    assert folder_tokenizer(tmp_path) is not first


def test_models_that_are_not_there(tmp_path: Path) -> None:
    for name in ("no/such/model", "no/such.gguf", str(tmp_path / "none")):
        with pytest.raises(SurgeError):
            load_text_tokenizer(EngineConfig(model=name))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SurgeError, match=r"no config\.json"):
        load_text_tokenizer(EngineConfig(model=str(empty)))
    (empty / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(SurgeError, match="no tokenizer"):
        load_text_tokenizer(EngineConfig(model=str(empty)))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(SurgeError, match="several GGUF files"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", "[" * 100_000, '{"a": NaN'])
def test_broken_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SurgeError, match="JSON"):
        read_json(tmp_path / "x.json")
