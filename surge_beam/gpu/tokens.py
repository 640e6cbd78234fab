"""Token ids of many texts in one flat array, as sentence-transformers would make them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

_SLICE = 1024
_CHARS_PER_TOKEN = 16
_SPARE_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class FlatTokens:
    """Attributes:
    ids: token ids of all texts one after another, int32.
    offsets: first token of each text and the end, int64 [n + 1].
    """

    ids: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every text, int32 [n]."""
        return np.diff(self.offsets).astype(np.int32)


class TextTokenizer:
    """Truncates at ``max_length`` and pads nothing; one thread at a time may use it.

    Args:
      backend: a ``tokenizers.Tokenizer`` whose truncation is set to ``max_length``.
      max_length: tokens kept of a text, special ones included; None keeps all.
      prompt: text put before every text.
    """

    def __init__(self, backend: Any, max_length: int | None, prompt: str = "") -> None:
        self.backend, self.max_length, self.prompt = backend, max_length, prompt
        keeps_head = max_length is not None and backend.truncation["direction"].lower() == "right"
        self._cut = max_length * _CHARS_PER_TOKEN + 1024 if keeps_head and max_length else None

    def __call__(self, texts: Sequence[str]) -> FlatTokens:
        """Tokenizes texts; any valid str will do, the empty one too."""
        ids: list[np.ndarray] = []
        lengths: list[int] = []
        for start in range(0, len(texts), _SLICE):
            part = list(texts[start : start + _SLICE])
            if self.prompt:
                part = [self.prompt + text for text in part]
            encodings = self._encode(part)
            sizes = [len(encoding) for encoding in encodings]
            flat = itertools.chain.from_iterable(encoding.ids for encoding in encodings)
            ids.append(np.fromiter(flat, np.int32, sum(sizes)))
            lengths += sizes
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return FlatTokens(np.concatenate(ids) if ids else np.empty(0, np.int32), offsets)

    def _encode(self, texts: list[str]) -> list[Any]:
        """Encodes texts, giving the tokenizer only as much of a long one as it will keep."""
        cut = self._cut
        if cut is None or max(map(len, texts)) <= cut:
            return list(self.backend.encode_batch_fast(texts))
        encodings: list[Any] = self.backend.encode_batch_fast([_head(t, cut) for t in texts])
        for row, text in enumerate(texts):
            size = cut
            while len(_head(text, size)) < len(text) and _dropped(encodings[row]) < _SPARE_TOKENS:
                size *= 8
                encodings[row] = self.backend.encode_batch_fast([_head(text, size)])[0]
        return encodings


def _head(text: str, size: int) -> str:
    """The first ``size`` characters, up to the next white space if one is near."""
    if len(text) <= size:
        return text
    near = text[size : size + 1024]
    gap = next((at for at, char in enumerate(near) if char.isspace()), 0)
    return text[: size + gap]


def _dropped(encoding: Any) -> int:
    """Tokens that truncation left out, roughly; the tail of a cut text must be among them."""
    return sum(len(part) for part in encoding.overflowing)
