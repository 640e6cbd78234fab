"""Random decoder models without files or tokenizers: the same weights on every device."""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import numpy as np
import torch
import transformers

from surge_beam.gpu.language_model import LanguageModel
from surge_beam.gpu.models.decoder import Decoder
from surge_beam.gpu.models.weights import TensorSource
from surge_beam.gpu.runner import SampleRow, StepBatch
from surge_beam.records import SamplingParams

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 300,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


class RandomWeights(TensorSource):
    """Numbers drawn by the tensor's name."""

    def __init__(self, config, **where):
        super().__init__(**where)
        width, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.shapes = {
            "embed_tokens": (config.vocab_size, width),
            "lm_head": (config.vocab_size, width),
            "q_proj": (queries, width),
            "k_proj": (keys, width),
            "v_proj": (keys, width),
            "o_proj": (width, queries),
            "gate_proj": (inner, width),
            "up_proj": (inner, width),
            "down_proj": (width, inner),
            "q_norm": (dim,),
            "k_norm": (dim,),
        }

    def find(self, name):
        if name.endswith("bias"):
            return None
        shape = self.shapes.get(name.split(".")[-2], (self.shapes["o_proj"][0],))
        random = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
        random = random * 0.3 if len(shape) > 1 else 1 + random * 0.2
        return self.cast(torch.from_numpy(random))


def random_model(family="llama", device="cpu", dtype=torch.float32, kernels="auto", **changes):
    """A language model; kernels ``triton`` takes the Triton kernels wherever it is."""
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **changes})
    weights = RandomWeights(config, dtype=dtype, device=torch.device(device))
    decoder = Decoder(config, weights, "torch" if kernels == "triton" else kernels)
    if kernels == "triton":
        from surge_beam.gpu.kernels.triton_operations import TritonOperations

        decoder.operations = TritonOperations()
    letters = SimpleNamespace(decode=lambda ids, **_: "".join(chr(0x100 + i) for i in ids))
    return LanguageModel(
        decoder=decoder,
        tokenizer=SimpleNamespace(backend_tokenizer=letters),
        context_length=config.max_position_embeddings,
        vocabulary=decoder.vocab,
        stop_ids=frozenset({2}),
        name="random",
    )


def decode_batch(tables, context, *, seed=0):
    """A step of one new token a sequence."""
    n = len(tables)
    return StepBatch(
        ids=np.random.default_rng(seed).integers(0, SIZES["vocab_size"], n),
        counts=np.ones(n, np.int32),
        context=np.array(context, np.int32),
        block_tables=[np.array(table, np.int32) for table in tables],
        rows=np.arange(n),
        sample=[SampleRow(SamplingParams(), 0, 0)] * n,
    )
