"""What the decode engine asks of whatever computes a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from surge_beam.records import SamplingParams, TokenLogprob


@dataclasses.dataclass(frozen=True)
class SampleRow:
    """How to choose one row's next token.

    Attributes:
      params: of its request.
      key: 64 bits that stand for (seed, custom_id).
      position: which output token this is, from 0.
      history: token ids of prompt and output so far, int32; None where nobody asks for them.
    """

    params: SamplingParams
    key: int
    position: int
    history: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Tokens chosen for R rows.

    Attributes:
      token_ids: int64 [R]; -1 where nothing could be chosen.
      logprobs: one a row, None where not asked for.
      bad: rows whose logits were not numbers.
    """

    token_ids: np.ndarray
    logprobs: Sequence[TokenLogprob | None]
    bad: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """One forward pass over n sequences, T new tokens packed one sequence after another.

    Attributes:
      ids: the new tokens, int64 [T].
      counts: new tokens of each sequence, at least 1, int32 [n].
      context: tokens of each sequence whose KV is in the pool already, or comes to be there in
        this very step as another sequence's new tokens, int32 [n].
      block_tables: pages of each sequence, int32 arrays; they cover context and new tokens.
      rows: which of the T tokens get logits, int64 [R].
      sample: how each of the R rows chooses its next token.
    """

    ids: np.ndarray
    counts: np.ndarray
    context: np.ndarray
    block_tables: Sequence[np.ndarray]
    rows: np.ndarray
    sample: Sequence[SampleRow]


class OutOfDeviceMemory(Exception):
    """A step did not fit the device's memory; nothing of it counts."""


class CopyFailed(Exception):
    """KV could not be copied to the host or back; what is in the pool is as it was."""


class Runner(Protocol):
    """Holds the model and the KV pool's tensors.

    Attributes:
      pages: pages in its KV pool.
      page_size: tokens of a page.
      page_bytes: bytes of a page over all layers.
      context_length: most tokens of a sequence.
      vocabulary: token ids are below it.
      stop_ids: tokens that end a completion.
      decode_text: the text of token ids, without special tokens.
      kv_tokens_read, kv_tokens_unshared: keys read so far over the steps, counted for one layer;
        and what would have been read had no prefix been shared.
    """

    pages: int
    page_size: int
    page_bytes: int
    context_length: int
    vocabulary: int
    stop_ids: frozenset[int]
    kv_tokens_read: int
    kv_tokens_unshared: int

    @property
    def decode_text(self) -> Callable[[list[int]], str]: ...

    def step(self, batch: StepBatch) -> Sampled:
        """Computes the pass, puts the new tokens' KV into the pool and samples.

        Raises:
          OutOfDeviceMemory: if it does not fit.
        """

    def save(self, pages: Sequence[int]) -> Any:
        """A host copy of pages. Raises CopyFailed."""

    def restore(self, copy: Any, first: int, pages: Sequence[int]) -> None:
        """Puts a copy's pages from its ``first`` on into pages of the pool. Raises CopyFailed."""

    def close(self) -> None:
        """Lets go of the pool."""
