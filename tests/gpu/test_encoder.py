"""Finding, identifying and refusing models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from surge_beam.gpu.device import choose_device
from surge_beam.gpu.encoder import load_encoder, model_identity, resolve_model
from surge_beam.records import EncoderConfig, SurgeError
from tests.gpu.tiny_models import sentence_model, tiny_transformer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    plain = tiny_transformer("bert", tmp_path_factory.mktemp("plain"))
    prompts = {"prompts": {"q": "query: "}, "default_prompt_name": None}
    return sentence_model(plain, tmp_path_factory.mktemp("model") / "m", **prompts)


def identity(folder, **settings):
    return model_identity(EncoderConfig(model=str(folder), **settings))


def test_resolve(folder, monkeypatch):
    assert resolve_model(str(folder)) == folder
    assert resolve_model("someone/some-model") == "someone/some-model"
    bundled = resolve_model("all-MiniLM-L6-v2")
    assert bundled == resolve_model("sentence-transformers/all-MiniLM-L6-v2")


def test_a_missing_model_says_what_to_do(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SurgeError, match=r"no model 'nobody/nothing'.*give the path"):
        load_encoder(EncoderConfig(model="nobody/nothing"))


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(SurgeError, match=r"no config\.json"):
        load_encoder(EncoderConfig(model=str(tmp_path)))


def test_identity_does_not_depend_on_the_place(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "README.md").write_text("another readme")
    assert identity(copy) == identity(folder)
    assert len(identity(folder)) == 32
    assert load_encoder(EncoderConfig(model=str(copy), device="cpu")).identity == identity(folder)


@pytest.mark.parametrize("file", ["1_Pooling/config.json", "tokenizer.json", "config.json"])
def test_identity_follows_the_files(file, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / file).write_text((copy / file).read_text() + "\n")
    assert identity(copy) != identity(folder)


def test_identity_follows_weights_and_settings(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    (copy / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 17}))
    found = {
        identity(copy),
        identity(folder),
        identity(folder, prompt="p: "),
        identity(folder, truncate_dim=4),
    }
    assert len(found) == 4
    assert identity(folder, prompt="") == identity(folder, dtype="bfloat16") == identity(folder)


def test_identity_loads_no_torch(folder):
    code = f"""
import sys
from surge_beam.gpu.encoder import model_identity
from surge_beam.records import EncoderConfig
assert model_identity(EncoderConfig(model={str(folder)!r})) == {identity(folder)!r}
assert not {{"torch", "transformers", "sentence_transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pickled_weights_are_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    torch.save({}, copy / "pytorch_model.bin")
    with pytest.raises(SurgeError, match="pickled"):
        load_encoder(EncoderConfig(model=str(copy), device="cpu"))
    (copy / "pytorch_model.bin").unlink()
    with pytest.raises(SurgeError, match=r"model\.safetensors is missing"):
        load_encoder(EncoderConfig(model=str(copy), device="cpu"))


def test_code_of_the_models_own_is_not_run(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    modules = json.loads((copy / "modules.json").read_text())
    modules[1]["type"] = "custom_code.Pooling"
    (copy / "modules.json").write_text(json.dumps(modules))
    (copy / "custom_code.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(SurgeError, match="cannot load"):
        load_encoder(EncoderConfig(model=str(copy), device="cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"require_accelerator": True}])
def test_no_silent_cpu(settings, folder):
    with pytest.raises(SurgeError, match="CUDA"):
        load_encoder(EncoderConfig(model=str(folder), **settings))


@pytest.mark.parametrize("settings", [{"device": "tpu"}, {"dtype": "int4"}])
def test_unknown_names(settings):
    with pytest.raises(SurgeError, match="must be"):
        choose_device(EncoderConfig(**settings))
