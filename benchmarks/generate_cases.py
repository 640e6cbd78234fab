"""Workloads of ``benchmarks/generate.py``: prompts of real text, that share prefixes or do not."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow.parquet as pq

from surge_beam.gpu.text_tokenizer import PromptTokenizer
from tests.gpu.real_prompts import dialogues, few_shot, over_documents

ORDERS = ("shuffled", "sorted")
TASKS, DOCUMENTS, TURNS = 3, 24, 6
OWN_TOKENS = 20  # behind a long prefix
UNSHARED_TOKENS = (128, 254)  # shortest and longest


@dataclasses.dataclass(frozen=True)
class Case:
    """Attributes:
    prompts: token ids of each sequence.
    max_tokens: tokens that each has to decode.
    shares: whether prompts have prefixes in common.
    """

    prompts: list[list[int]]
    max_tokens: int
    shares: bool = True


def fewshot(data: Path, tokenizer: PromptTokenizer, scale: float) -> Case:
    """Questions of BIG-Bench Hard behind their task's examples: 3 tasks x 32."""
    return Case(tokenizer.encode_batch(few_shot(data, TASKS, scaled(32, scale))), 32)


def documents(data: Path, tokenizer: PromptTokenizer, scale: float) -> Case:
    """Questions of XQuAD behind their document, up to 8 of each: 96."""
    texts = over_documents(data, DOCUMENTS, 8)[: scaled(96, scale)]
    return Case(tokenizer.encode_batch(texts), 32)


def growing_dialogues(data: Path, tokenizer: PromptTokenizer, scale: float) -> Case:
    """The first six requests of tool dialogues, each of which begins with the one before: 96."""
    chats = dialogues(data, scaled(96, scale), turns=TURNS)
    return Case([tokenizer.chat(messages) for messages in chats], 32)


def one_prefix(length: int) -> Callable[[Path, PromptTokenizer, float], Case]:
    """64 questions of 20 tokens behind one text of ``length`` tokens."""

    def case(data: Path, tokenizer: PromptTokenizer, scale: float) -> Case:
        count = scaled(64, scale)
        text = "\n\n".join(_english(data, "documents", "context"))
        [prefix] = tokenizer.encode_batch([text])
        own: dict[tuple[int, ...], None] = {}
        questions = _english(data, "questions", "question")
        for ids in tokenizer.encode_batch([f"\n\nQuestion: {text}" for text in questions]):
            if len(ids) >= OWN_TOKENS and len(own) < count:
                own[tuple(ids[:OWN_TOKENS])] = None
        return Case([prefix[:length] + list(ids) for ids in own], 64)

    return case


def unshared(data: Path, tokenizer: PromptTokenizer, scale: float) -> Case:
    """64 texts of 128 to 254 tokens that have nothing in common."""
    count = scaled(64, scale)
    texts = _english(data, "documents", "context")
    pairs = [f"{a}\n\n{b}" for a, b in zip(texts[::2], texts[1::2], strict=True)]
    shortest, longest = UNSHARED_TOKENS
    long_enough = [ids for ids in tokenizer.encode_batch(pairs) if len(ids) >= longest]
    lengths = [shortest + (longest - shortest) * i // max(1, count - 1) for i in range(count)]
    return Case([ids[:n] for ids, n in zip(long_enough, lengths, strict=False)], 64, shares=False)


CASES: Mapping[str, Callable[[Path, PromptTokenizer, float], Case]] = {
    "fewshot": fewshot,
    "documents": documents,
    "dialogues": growing_dialogues,
    "prefix2048": one_prefix(2048),
    "prefix6000": one_prefix(6000),
    "unshared": unshared,
}


def scaled(count: int, scale: float) -> int:
    """A number of sequences at a scale; two at least, so that something can be shared."""
    return max(2, round(count * scale))


def arrange(prompts: list[list[int]], order: str) -> list[int]:
    """The indices of prompts in an order of arrival: ``shuffled``, the same way every time, or
    ``sorted`` by their token ids.
    """
    indices = list(range(len(prompts)))
    if order == "sorted":
        return sorted(indices, key=prompts.__getitem__)
    random.Random(0).shuffle(indices)
    return indices


def unique_tokens(prompts: list[list[int]]) -> int:
    """Prompt tokens without what a prefix tree over single tokens holds once."""
    ordered = sorted(prompts)
    found = sum(map(len, prompts))
    for a, b in itertools.pairwise(ordered):
        found -= next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    return found


def _english(data: Path, table: str, column: str) -> list[str]:
    rows = pq.read_table(data / "xquad_rag" / f"{table}.parquet", columns=["lang", column])
    return [row[column] for row in rows.to_pylist() if row["lang"] == "en"]
