"""A stand-in for a decoder model: no torch, and a KV pool that remembers tokens.

Its next token is a digest of the tokens that it reads through the block table, so whatever the
engine does wrong with pages (a shared page overwritten, a copy lost, a prefix mistaken for
another) changes the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from surge_beam.gpu.runner import CopyFailed, OutOfDeviceMemory, Sampled, StepBatch
from surge_beam.records import SurgeError, TokenLogprob

VOCABULARY = 256
END = 0
TOKEN_BYTES = 4  # its pool holds int32 token ids
_EMPTY = -1


class DummyRunner:
    """Args:
    pages, page_size: of the pool.
    context_length: most tokens of a sequence.
    memory: tokens above which a step runs out of memory; None never does.
    copy_fails: asked before every copy to the host and back.
    seconds: slept in every step.
    """

    page_bytes: int
    vocabulary = VOCABULARY
    stop_ids = frozenset({END})

    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        context_length: int = 8192,
        memory: int | None = None,
        copy_fails: Callable[[], bool] = lambda: False,
        seconds: float = 0.0,
    ) -> None:
        self.pages, self.page_size, self.context_length = pages, page_size, context_length
        self.page_bytes = TOKEN_BYTES * page_size
        self.kv_tokens_read = self.kv_tokens_unshared = 0
        self._memory, self._copy_fails, self._seconds = memory, copy_fails, seconds
        self._pool = np.full(pages * page_size, _EMPTY, np.int32)

    def decode_text(self, ids: list[int]) -> str:
        """A letter a token; the end token has none."""
        return "".join(chr(0x100 + i) for i in ids if i != END)

    def step(self, batch: StepBatch) -> Sampled:
        """See ``Runner``."""
        if self._memory is not None and len(batch.ids) > self._memory:
            raise OutOfDeviceMemory(f"{len(batch.ids)} tokens")
        if self._seconds:
            time.sleep(self._seconds)
        slots = [self._slots(table) for table in batch.block_tables]
        ends = np.cumsum(batch.counts)
        for own, context, count, end in zip(slots, batch.context, batch.counts, ends, strict=True):
            self._pool[own[context : context + count]] = batch.ids[end - count : end]
        tokens: list[int] = []
        logprobs: list[TokenLogprob | None] = []
        for row, how in zip(batch.rows, batch.sample, strict=True):
            at = int(np.searchsorted(ends, row, side="right"))
            length = int(batch.context[at] + batch.counts[at] - (ends[at] - 1 - row))
            seen = self._pool[slots[at][:length]]
            self.kv_tokens_read += length
            self.kv_tokens_unshared += length
            tokens.append(next_token(seen, how.key, how.position, greedy=how.params.greedy))
            wanted = how.params.logprobs is not None
            logprobs.append(TokenLogprob(tokens[-1], 0.0) if wanted else None)
        return Sampled(np.array(tokens, np.int64), logprobs)

    def save(self, pages: Sequence[int]) -> np.ndarray:
        """See ``Runner``."""
        self._fail_perhaps()
        return self._pool[self._slots(np.asarray(pages, np.int32))].copy()

    def restore(self, copy: np.ndarray, first: int, pages: Sequence[int]) -> None:
        """See ``Runner``."""
        self._fail_perhaps()
        self._pool[self._slots(np.asarray(pages, np.int32))] = copy[first * self.page_size :]

    def close(self) -> None:
        """See ``Runner``."""
        self._pool = self._pool[:0]

    def _slots(self, pages: np.ndarray) -> np.ndarray:
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).ravel()

    def _fail_perhaps(self) -> None:
        if self._copy_fails():
            raise CopyFailed("asked to fail")


def step_seconds(model: str) -> float:
    """The seconds of ``dummy:seconds=S``, that a step is to sleep; 0 of ``dummy``.

    Raises:
      SurgeError: if the name is neither.
    """
    head, colon, text = model.partition(":seconds=")
    try:
        seconds = float(text) if colon else 0.0
    except ValueError:
        seconds = -1.0
    if head != "dummy" or not 0.0 <= seconds < float("inf"):
        raise SurgeError(f"{model!r} is neither dummy nor of the form dummy:seconds=S")
    return seconds


def next_token(seen: np.ndarray, key: int, position: int, *, greedy: bool) -> int:
    """The token after ``seen``, int32 [n]; of a sampled row it depends on key and position too."""
    assert (seen != _EMPTY).all(), "KV that was never written was read"
    seed = 0 if greedy else (key + position) % (1 << 64)
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(seen).tobytes(), seed) % VOCABULARY
