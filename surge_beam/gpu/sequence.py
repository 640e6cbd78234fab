"""A sequence as a coroutine: it stops at page boundaries, waits, moves, and goes on elsewhere."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np

from surge_beam.gpu.stopping import StopChecker
from surge_beam.records import Checkpoint, Completion, Request, TokenLogprob


class State(enum.Enum):
    """Where a sequence stands, and where its KV is (BatchGen, arXiv 2606.21712)."""

    QUEUED = "queued"
    """No KV; not begun, or brought here as a checkpoint."""
    PREFILLING = "prefilling"
    """Pages held; the KV of part of its tokens is there."""
    ACTIVE = "active"
    """KV of all tokens but the last is in the pool; decodes a token a step."""
    PARKED = "parked"
    """KV on the host."""
    EVICTED = "evicted"
    """Token ids only; prefills again."""
    DONE = "done"
    FAILED = "failed"


_LARGEST = int(np.iinfo(np.int32).max)
_MOVES = {
    State.QUEUED: {State.PREFILLING, State.DONE, State.FAILED},
    State.PREFILLING: {State.ACTIVE, State.EVICTED, State.DONE, State.FAILED},
    State.ACTIVE: {State.PARKED, State.EVICTED, State.DONE, State.FAILED},
    State.PARKED: {State.ACTIVE, State.EVICTED, State.DONE, State.FAILED},
    State.EVICTED: {State.PREFILLING, State.DONE, State.FAILED},
    State.DONE: set(),
    State.FAILED: set(),
}


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """KV of a parked sequence: ``copy`` is the runner's own, of so many pages."""

    copy: Any
    pages: int


class Sequence:
    """One request on its way.

    Attributes:
      request: as submitted.
      index: order of arrival in this engine.
      key: 64 bits that stand for (seed, custom_id).
      state: see ``State``.
      table: its block table.
      context: tokens whose KV is in the pool.
      digests: chained digests of its pages, as far as they were needed.
      registered: leading pages that others may share.
      sharable: whether its next full page may be registered.
      computed: most tokens whose KV was ever computed.
      baseline: output tokens that the last prefill took in.
      cached_tokens: prompt tokens that its first prefill found in the pool.
      host: its KV on the host while it is parked.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, index: int, key: int, stop: StopChecker, limit: int
    ) -> None:
        self.request: Request = checkpoint.request
        self.index, self.key, self.stop = index, key, stop
        # what an int32 cannot hold is outside of any vocabulary, and refused as such
        prompt = np.array([min(max(i, -1), _LARGEST) for i in self.request.prompt_ids], np.int32)
        self.prompt_tokens = len(prompt)
        self._ids = np.empty(len(prompt) + min(limit, 64), np.int32)
        self._ids[: len(prompt)] = prompt
        self.length = len(prompt)
        self.state = State.QUEUED
        self.table: list[int] = []
        self.context = 0
        self.digests: list[int] = []
        self.registered = 0
        self.sharable = True
        self.computed = 0
        self.baseline = checkpoint.baseline
        self.cached_tokens = checkpoint.cached_tokens
        self.started = bool(checkpoint.output_ids)
        self.parks, self.evictions = checkpoint.parks, checkpoint.evictions
        self.logprobs: list[TokenLogprob] = list(checkpoint.logprobs)
        self.host: HostCopy | None = None
        for token in checkpoint.output_ids:
            self._append(token)

    @property
    def ids(self) -> np.ndarray:
        """Prompt and output, int32 [length]."""
        return self._ids[: self.length]

    @property
    def decoded(self) -> int:
        """Output tokens so far."""
        return self.length - self.prompt_tokens

    @property
    def output(self) -> list[int]:
        """Output token ids so far."""
        return [int(i) for i in self.ids[self.prompt_tokens :]]

    @property
    def fresh(self) -> bool:
        """Whether this is its first prefill."""
        return not self.started and not self.evictions

    def move(self, state: State) -> None:
        """Enters a state. Raises AssertionError if it cannot be entered from here."""
        assert state in _MOVES[self.state], f"{self.state.value} -> {state.value}"
        self.state = state

    def push(self, token: int, logprob: TokenLogprob | None) -> str | None:
        """Takes a decoded token; returns why the sequence ends with it, or None."""
        self._append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        return self.stop.push(token)

    def forget_kv(self) -> list[int]:
        """Empties the block table; returns the pages, whose references are the caller's now."""
        pages, self.table = self.table, []
        self.context = self.registered = 0
        self.sharable = True
        return pages

    def checkpoint(self) -> Checkpoint:
        """Its portable form."""
        return Checkpoint(
            request=self.request,
            output_ids=tuple(self.output),
            baseline=self.baseline,
            cached_tokens=self.cached_tokens,
            parks=self.parks,
            evictions=self.evictions,
            logprobs=tuple(self.logprobs),
        )

    def completion(self, reason: str, error: str | None = None) -> Completion:
        """What becomes of its request if it ends now."""
        wanted = self.request.sampling.logprobs is not None
        return Completion(
            custom_id=self.request.custom_id,
            token_ids=tuple(self.output),
            text=self.stop.text(),
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.decoded,
            cached_tokens=self.cached_tokens,
            logprobs=tuple(self.logprobs) if wanted else None,
            parks=self.parks,
            evictions=self.evictions,
            error=error,
        )

    def _append(self, token: int) -> None:
        if self.length == len(self._ids):
            self._ids = np.resize(self._ids, 2 * self.length)
        self._ids[self.length] = token
        self.length += 1
