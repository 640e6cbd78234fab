"""Long texts are cut before the tokenizer sees them, and nobody can tell."""

from __future__ import annotations

import numpy as np
import pytest

from surge_beam.gpu.packed import set_truncation
from surge_beam.gpu.tokens import TextTokenizer
from tests.gpu.tiny_models import TEXTS, train_tokenizer

LONG = [
    "word " * 40_000,
    "x" * 200_000,
    " " * 200_000,
    " " * 30_000 + "after the gap " * 500,
    "床前明月光" * 20_000,
    "\x00\n" * 20_000,
    "a-b_c.d," * 10_000,
    "Straße 🎉 " * 10_000,
]


@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "unigram"])
def test_long_texts_are_cut_without_a_trace(kind):
    tokenizer = train_tokenizer(kind)
    tokenizer.model_max_length = 32
    limit = set_truncation(tokenizer, None)
    assert limit == 32
    whole = tokenizer._tokenizer.encode_batch_fast(LONG)
    tokens = TextTokenizer(tokenizer._tokenizer, limit)(LONG)
    for row, encoding in enumerate(whole):
        ours = tokens.ids[tokens.offsets[row] : tokens.offsets[row + 1]]
        assert ours.tolist() == encoding.ids


@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "unigram", "qwen"])
def test_same_ids_as_transformers(kind):
    tokenizer = train_tokenizer(kind)
    tokenizer.model_max_length = 40
    expected = tokenizer(["p: " + text for text in TEXTS], truncation="longest_first")["input_ids"]
    limit = set_truncation(tokenizer, None)
    tokens = TextTokenizer(tokenizer._tokenizer, limit, "p: ")(TEXTS)
    assert len(tokens) == len(TEXTS)
    assert tokens.lengths.dtype == np.int32
    assert tokens.lengths.tolist() == [len(ids) for ids in expected]
    assert tokens.ids.tolist() == [token for ids in expected for token in ids]


def test_more_texts_than_a_slice():
    tokenizer = train_tokenizer("wordpiece")
    encode = TextTokenizer(tokenizer._tokenizer, set_truncation(tokenizer, 16))
    tokens = encode(["fox " * (n % 7) for n in range(2500)])
    assert len(tokens) == 2500
    assert tokens.offsets[-1] == len(tokens.ids) == tokens.lengths.sum()
    assert len(encode([])) == 0
