"""Every packed family equals sentence-transformers in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from surge_beam.gpu.encoder import load_encoder
from surge_beam.gpu.models import attention
from surge_beam.gpu.packed import PackedEncoder
from surge_beam.gpu.sentence_transformer import SentenceTransformerEncoder
from surge_beam.records import EncoderConfig
from tests.gpu.tiny_models import TEXTS, sentence_model, tiny_transformer

FAMILIES = ("bert", "roberta", "xlm-roberta", "mpnet", "modernbert", "qwen3")
ODD_LENGTHS = ["word " * n for n in (1, 2, 3, 5, 8, 13, 21, 34, 55, 61, 62, 63, 64, 65, 80, 300)]


@pytest.fixture(scope="session")
def transformer(tmp_path_factory):
    """Makes a tiny transformers folder of a family, once a session."""
    made = {}

    def make(family, **changes):
        key = family, str(changes)
        if key not in made:
            made[key] = tiny_transformer(family, tmp_path_factory.mktemp("model"), **changes)
        return made[key]

    return make


def encode(encoder, texts, rows=None):
    tokens = encoder.tokenize(texts)
    return encoder.forward(tokens, np.arange(len(texts)) if rows is None else rows)


def assert_equal(ours, theirs):
    assert ours.dtype == np.float32 and ours.flags.c_contiguous
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 1e-5 * max(1.0, np.abs(theirs).max())
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    assert ((ours * theirs).sum(1) >= 0.99999 * norms - 1e-9).all()


def check(folder, texts=TEXTS, *, kind=PackedEncoder, prompt=None, truncate_dim=None, theirs=None):
    """Ours against theirs; returns the encoder."""
    config = EncoderConfig(
        model=str(folder), device="cpu", prompt=prompt, truncate_dim=truncate_dim
    )
    encoder = load_encoder(config)
    assert type(encoder) is kind
    theirs = theirs or SentenceTransformer(str(folder), device="cpu")
    renormalise = truncate_dim is not None and any(
        type(module).__name__ == "Normalize" for module in theirs
    )
    expected = theirs.encode(
        list(texts),
        batch_size=4,
        prompt=prompt,
        truncate_dim=truncate_dim,
        normalize_embeddings=renormalise,
    )
    vectors = encode(encoder, texts)
    assert vectors.shape[1] == encoder.dimension
    assert_equal(vectors, expected)
    return encoder


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, transformer, tmp_path):
    pooling = "lasttoken" if family == "qwen3" else "mean"
    folder = sentence_model(transformer(family), tmp_path, pooling=pooling)
    encoder = check(folder, TEXTS + ODD_LENGTHS)
    assert encoder.tokenize(ODD_LENGTHS).lengths.max() == 64


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_without_a_compiler(family, transformer, tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "load_kernels", lambda: None)
    check(sentence_model(transformer(family), tmp_path), TEXTS + ODD_LENGTHS)


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet"])
def test_without_a_maximum_length(family, transformer, tmp_path):
    """Cut at the position table (80 places), or what the family leaves of it."""
    folder = sentence_model(transformer(family), tmp_path, max_seq_length=None)
    encoder = load_encoder(EncoderConfig(model=str(folder), device="cpu"))
    longest = int(encoder.tokenize(["word " * 500]).lengths[0])
    assert longest == (80 if family == "bert" else 78)
    assert np.isfinite(encode(encoder, ["word " * 500])).all()


@pytest.mark.parametrize(
    "pooling",
    [
        "cls",
        "max",
        "mean",
        "mean_sqrt_len_tokens",
        "weightedmean",
        "lasttoken",
        ("cls", "mean", "max"),
    ],
)
def test_pooling(pooling, transformer, tmp_path):
    folder = sentence_model(transformer("bert"), tmp_path, pooling=pooling, normalize=False)
    check(folder)


@pytest.mark.parametrize("pooling", ["cls", "mean", "weightedmean", ("max", "lasttoken")])
def test_prompt_left_out_of_pooling(pooling, transformer, tmp_path):
    folder = sentence_model(transformer("bert"), tmp_path, pooling=pooling, include_prompt=False)
    check(folder, prompt="query one two: ")


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_prompts(family, transformer, tmp_path):
    settings = {"prompts": {"doc": "Hello World: "}, "default_prompt_name": "doc"}
    folder = sentence_model(transformer(family), tmp_path, pooling="lasttoken", **settings)
    theirs = SentenceTransformer(str(folder), device="cpu")
    default = check(folder, theirs=theirs)
    asked = check(folder, prompt="other: ", theirs=theirs)
    none = check(folder, prompt="", theirs=theirs)
    assert len({default.identity, asked.identity, none.identity}) == 3


@pytest.mark.parametrize(
    "dense",
    [
        (20, torch.nn.Tanh(), False),
        (32, torch.nn.Identity(), True),
        (20, torch.nn.ReLU(), True),
    ],
)
def test_dense(dense, transformer, tmp_path):
    folder = sentence_model(transformer("bert"), tmp_path, dense=dense)
    assert check(folder).dimension == dense[0]
    assert check(folder, truncate_dim=8).dimension == 8


def test_truncate_dim_without_normalisation(transformer, tmp_path):
    folder = sentence_model(transformer("bert"), tmp_path, normalize=False)
    check(folder, truncate_dim=5)
    check(folder, truncate_dim=500)


def test_plain_transformers_folder_is_mean_pooled(transformer):
    check(transformer("bert"), ODD_LENGTHS[:9])


def test_lower_casing(transformer, tmp_path):
    from sentence_transformers.sentence_transformer import modules

    parts = [modules.Transformer(str(transformer("bert")), max_seq_length=64, do_lower_case=True)]
    parts.append(modules.Pooling(32))
    SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path))
    (tmp_path / "sentence_bert_config.json").write_text(
        '{"max_seq_length": 64, "do_lower_case": true}'
    )
    check(tmp_path)


def test_sharded_weights_and_old_names(transformer, tmp_path):
    from transformers import AutoModel

    folder = sentence_model(transformer("bert"), tmp_path)
    model = AutoModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").is_file()
    check(folder)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(kind, transformer, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 128
    folder = sentence_model(
        transformer("qwen3", rope_parameters=rope), tmp_path, pooling="lasttoken"
    )
    check(folder)


def test_unknown_family_runs_through_sentence_transformers(transformer, tmp_path):
    folder = sentence_model(transformer("distilbert"), tmp_path)
    check(folder, kind=SentenceTransformerEncoder, prompt="query: ", truncate_dim=9)


def test_rows_in_any_order(transformer, tmp_path):
    folder = sentence_model(transformer("bert"), tmp_path)
    encoder = load_encoder(EncoderConfig(model=str(folder), device="cpu"))
    tokens = encoder.tokenize(TEXTS)
    every = encoder.forward(tokens, np.arange(len(TEXTS)))
    rows = np.array([3, 14, 0, 7])
    assert np.abs(encoder.forward(tokens, rows) - every[rows]).max() < 1e-6
    assert encoder.forward(tokens, np.empty(0, np.int64)).shape == (0, 32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_weights(dtype, transformer, tmp_path):
    folder = sentence_model(transformer("bert"), tmp_path)
    exact = load_encoder(EncoderConfig(model=str(folder), device="cpu"))
    rounded = load_encoder(EncoderConfig(model=str(folder), device="cpu", dtype=dtype))
    assert rounded.dtype == dtype and exact.dtype == "float32"
    assert rounded.identity == exact.identity
    a, b = encode(exact, TEXTS), encode(rounded, TEXTS)
    assert not np.array_equal(a, b)
    assert (a * b).sum(1).min() > 0.99
