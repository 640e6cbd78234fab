"""Every decoder family equals transformers in float32, in one pass and token by token."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
import transformers

from surge_beam.gpu.models.decoder import PREFIXES, Decoder, unsupported
from surge_beam.gpu.models.linear import PackedLinear, packing_available
from surge_beam.gpu.models.weights import Weights
from surge_beam.gpu.text_tokenizer import context_length
from surge_beam.records import SurgeError
from tests.gpu.tiny_models import tiny_decoder

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {**YARN, "original_max_position_embeddings": 64},
    "yarn with an attention factor": {
        **YARN,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.8,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.3, 1.7],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 64,
    },
}
SLIDING = {"use_sliding_window": True, "sliding_window": 7}
CASES = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, a key head a head": ("llama", {"num_key_value_heads": 4}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, head_dim 96": ("llama", {"head_dim": 96}),
    "llama, head_dim 128": ("llama", {"head_dim": 128}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, shards": ("llama", {"shard": "20KB"}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2, last layers slide": ("qwen2", {**SLIDING, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied, biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3, mixed layers": (
        "qwen3",
        {**SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    **{f"llama, {name} rope": ("llama", {"rope_parameters": r}) for name, r in ROPES.items()},
    "qwen2, yarn rope": ("qwen2", {"rope_parameters": ROPES["yarn"]}),
}


class DenseAttention:
    """Attention by the definition: a list of keys and values a sequence, one query at a time."""

    def __init__(self, decoder, sequences):
        self.decoder = decoder
        self.kv = [[([], []) for _ in range(sequences)] for _ in range(decoder.layers)]
        self.owners = []

    def layers(self):
        """What a decoder takes; there is no pool."""
        none = torch.empty(self.decoder.kv_heads, 0, self.decoder.head_dim)
        return [
            (SimpleNamespace(run=functools.partial(self.run, layer)), none, none)
            for layer in range(self.decoder.layers)
        ]

    def run(self, layer, keys, values, query, key, value):
        model = self.decoder
        assert query.shape == (len(self.owners), model.heads, model.head_dim)
        assert key.shape == value.shape == (len(self.owners), model.kv_heads, model.head_dim)
        out = torch.empty(len(self.owners), model.heads * model.head_dim)
        for row, owner in enumerate(self.owners):
            keys, values = self.kv[layer][owner]
            keys.append(key[row].clone())
            values.append(value[row].clone())
            first = 0 if model.windows[layer] is None else max(0, len(keys) - model.windows[layer])
            groups = model.heads // model.kv_heads
            k = torch.stack(keys[first:]).repeat_interleave(groups, dim=1)
            v = torch.stack(values[first:]).repeat_interleave(groups, dim=1)
            scores = torch.einsum("hd,lhd->hl", query[row], k) * model.scale
            out[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), v).flatten()
        return out


def step(decoder, attention, parts, rows=None):
    """Logits of one step over (sequence, first position, ids) parts; of all tokens by default."""
    ids = torch.tensor([i for _, _, part in parts for i in part])
    positions = torch.cat([torch.arange(at, at + len(part)) for _, at, part in parts])
    attention.owners = [owner for owner, _, part in parts for _ in part]
    rows = torch.arange(len(ids)) if rows is None else torch.tensor(rows)
    with torch.inference_mode():
        return decoder(ids, positions, attention.layers(), rows)


def load(folder, kernels="auto"):
    config = transformers.AutoConfig.from_pretrained(folder)
    assert unsupported(config) == ""
    cpu = {"dtype": torch.float32, "device": torch.device("cpu")}
    return Decoder(config, Weights(folder, prefixes=PREFIXES, **cpu), kernels)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes the folder of a case, once."""
    made = {}

    def make(case):
        if case not in made:
            family, changes = CASES[case]
            made[case] = tiny_decoder(family, tmp_path_factory.mktemp("model"), **changes)
        return made[case]

    return make


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case, folders):
    folder = folders(case)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decoder = load(folder)
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(decoder.vocab, (length,), generator=generator).tolist()
        for length in (23, 1, 12)
    ]
    with torch.inference_mode():
        expected = [theirs(torch.tensor([p])).logits[0] for p in prompts]
    scale = max(float(e.abs().max()) for e in expected)
    assert scale > 1

    def close(ours, theirs):
        assert ours.dtype == torch.float32
        assert ours.shape == theirs.shape
        assert float((ours - theirs).abs().max()) <= 1e-5 * scale

    whole = DenseAttention(decoder, len(prompts))
    close(step(decoder, whole, [(i, 0, p) for i, p in enumerate(prompts)]), torch.cat(expected))

    # chunks of other lengths beside single tokens, and logits of some rows only
    mixed = DenseAttention(decoder, len(prompts))
    first = step(decoder, mixed, [(0, 0, prompts[0][:9]), (2, 0, prompts[2][:5])], [13, 8, 0])
    close(first, torch.stack([expected[2][4], expected[0][8], expected[0][0]]))
    last = step(
        decoder,
        mixed,
        [(2, 5, prompts[2][5:6]), (1, 0, prompts[1]), (0, 9, prompts[0][9:])],
        [0, 1, 15],
    )
    close(last, torch.stack([expected[2][5], expected[1][0], expected[0][22]]))

    one = DenseAttention(decoder, len(prompts))
    close(
        torch.cat([step(decoder, one, [(0, at, [i])]) for at, i in enumerate(prompts[0])]),
        expected[0],
    )


def test_what_it_says_of_itself(folders):
    qwen = load(folders("qwen3, mixed layers"))
    assert (qwen.layers, qwen.heads, qwen.kv_heads, qwen.head_dim) == (3, 4, 2, 8)
    assert qwen.windows == (7, None, 7)
    assert load(folders("qwen2, last layers slide")).windows == (None, 7, 7)
    assert load(folders("mistral")).windows == (5, 5, 5)
    llama = load(folders("llama, head_dim 96"))
    assert llama.windows == (None,) * 3
    assert (llama.width, llama.head_dim, llama.scale) == (32, 96, 96**-0.5)
    assert (llama.dtype, llama.device) == (torch.float32, torch.device("cpu"))


@pytest.mark.skipif(not packing_available(), reason="this torch has no oneDNN")
def test_few_sizes_reach_packed_linear_layers(folders, monkeypatch):
    """A step of any size runs on a padded one, which attention does not see."""
    decoder = load(folders("llama"), kernels="torch")
    assert isinstance(decoder.head, PackedLinear)
    sizes = set()
    for block in decoder.blocks:
        real = block.qkv
        monkeypatch.setattr(
            block, "qkv", lambda x, real=real: sizes.add(len(x)) or real(x), raising=True
        )
    for tokens in range(1, 71):
        step(decoder, DenseAttention(decoder, 1), [(0, 0, [7] * tokens)], [tokens - 1])
    assert sizes == {*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), 72}


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 256),
        (ROPES["dynamic"], 256),
        (ROPES["longrope"], 64),
        (ROPES["yarn"], 256),
        ({**YARN, "original_max_position_embeddings": 256}, 1024),
    ],
)
def test_context_length(rope, length):
    assert context_length(SimpleNamespace(max_position_embeddings=256, rope_parameters=rope)) == (
        length
    )


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("gpt2", {}, "family"),
        ("mixtral", {}, "family"),
        ("qwen3_moe", {}, "family"),
        ("llama", {"hidden_act": "tanh"}, "activation is 'tanh'"),
        ("llama", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rotary"),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "a part of each head",
        ),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ("qwen3", {"layer_types": ["linear_attention"], "num_hidden_layers": 1}, "linear_attent"),
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 3}, "no multiple"),
    ],
)
def test_unsupported(family, changes, why):
    assert why in unsupported(transformers.AutoConfig.for_model(family, **changes))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"intermediate_size": 40}, r"layers\.0\.mlp\.gate_proj"),
        ({"num_key_value_heads": 4}, r"layers\.0\.self_attn\.q_proj"),
        ({"vocab_size": 77}, "embed_tokens"),
        ({"num_hidden_layers": 4}, r"layers\.3\.input_layernorm"),
        ({"model_type": "qwen3"}, r"q_norm"),
    ],
)
def test_weights_that_the_config_does_not_fit(changes, name, folders):
    folder = folders("llama")
    said = transformers.AutoConfig.from_pretrained(folder).to_dict() | changes
    config = transformers.AutoConfig.for_model(said.pop("model_type"), **said)
    cpu = {"dtype": torch.float32, "device": torch.device("cpu")}
    with pytest.raises(SurgeError, match=name):
        Decoder(config, Weights(folder, prefixes=PREFIXES, **cpu))
