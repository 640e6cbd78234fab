"""What both decode engines have in common: requests in, completions out, as they finish."""

from __future__ import annotations

import abc
import collections
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from surge_beam.gpu.randomness import sequence_key
from surge_beam.gpu.sequence import Sequence
from surge_beam.gpu.stopping import StopChecker
from surge_beam.records import Checkpoint, Completion, EngineConfig, Request, SurgeError

_Own = TypeVar("_Own", bound="DecodeEngine")
_QUEUE_PER_SLOT = 4


@dataclasses.dataclass
class EngineStats:
    """Counts since the engine began.

    Attributes:
      steps, seconds: by kind of step: ``prefill``, ``decode``, ``mixed``.
      prefill_tokens: tokens whose KV was computed in prefill, repeats after eviction included.
      recomputed_tokens: those of them that were computed before.
      decode_tokens: tokens computed one a step.
      sampled_tokens: tokens chosen.
      prefix_tokens_saved: tokens whose KV was found in the pool instead.
      admissions: sequences that got a slot, repeats after eviction included.
      refusals: steps in which the gate of admission let nobody else in.
      parks, resumes, evictions, copies_failed: of sequences.
      finished: completions by finish reason.
      kv_bytes_read: keys and values that attention read, over all layers.
      kv_bytes_unshared: what it would have read had each sequence read its prefix alone.
      peak_pages: most KV pages held at once.
      memory_ceiling: tokens of the largest step after one that ran out of memory; None if none
        did.
    """

    steps: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    decode_tokens: int = 0
    sampled_tokens: int = 0
    prefix_tokens_saved: int = 0
    admissions: int = 0
    refusals: int = 0
    parks: int = 0
    resumes: int = 0
    evictions: int = 0
    copies_failed: int = 0
    finished: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    kv_bytes_read: int = 0
    kv_bytes_unshared: int = 0
    peak_pages: int = 0
    memory_ceiling: int | None = None


class DecodeEngine(abc.ABC):
    """Completes requests. Whoever draws completions drives it, one thread at a time; ``submit``
    and ``cancel`` may be called from any thread. Use it as a context manager, or ``close`` it.

    Attributes:
      config: the recipe.
      stats: counts since it began.
      context_length: most tokens of prompt and completion.
      decode_text: text of token ids, without special tokens.
      stop_ids: tokens that end a completion.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        context_length: int,
        decode_text: Callable[[list[int]], str],
        stop_ids: frozenset[int],
    ) -> None:
        self.config = config
        self.stats = EngineStats()
        self.context_length = min(context_length, config.max_context or context_length)
        self.decode_text, self.stop_ids = decode_text, stop_ids
        self._slots = config.max_sequences
        self._lock = threading.Lock()
        self._inbox: collections.deque[Sequence] = collections.deque()
        self._cancelled: set[str] = set()
        self._alive: dict[str, Sequence] = {}
        self._arrived = 0
        self._finished: collections.deque[Completion] = collections.deque()
        self._closed = False

    @abc.abstractmethod
    def step(self) -> bool:
        """Runs one step; False if there was nothing to do."""

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go of everything, unfinished sequences too; take ``checkpoints`` before."""

    @abc.abstractmethod
    def _take_in(self) -> None:
        """Begins what was submitted, and ends what was cancelled."""

    def __enter__(self: _Own) -> _Own:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def submit(self, request: Request | Checkpoint) -> None:
        """Queues a request, or an unfinished sequence from anywhere.

        What cannot be decoded comes out as a completion with ``error`` or ``capacity``.

        Raises:
          SurgeError: if the engine is closed, or a request of that custom_id is under way.
        """
        checkpoint = request if isinstance(request, Checkpoint) else Checkpoint(request=request)
        custom_id = checkpoint.request.custom_id
        if checkpoint.request.sampling.seed is None:
            checkpoint = _with_seed(checkpoint, self.config.seed)
        limit = self._limit(checkpoint.request)
        stop = StopChecker(self.decode_text, checkpoint.request.sampling, self.stop_ids, limit)
        with self._lock:
            if self._closed:
                raise SurgeError("the engine is closed")
            if custom_id in self._alive:
                raise SurgeError(f"a request with custom_id {custom_id!r} is under way already")
            assert checkpoint.request.sampling.seed is not None
            sequence = Sequence(
                checkpoint,
                index=self._arrived,
                key=sequence_key(checkpoint.request.sampling.seed, custom_id),
                stop=stop,
                limit=limit,
            )
            self._arrived += 1
            self._alive[custom_id] = sequence
            self._inbox.append(sequence)

    def _limit(self, request: Request) -> int:
        """Most output tokens, those of a checkpoint included."""
        limit = self.context_length - len(request.prompt_ids)
        if request.sampling.max_tokens is not None:
            limit = min(limit, request.sampling.max_tokens)
        return max(1, limit)

    def cancel(self, custom_id: str) -> bool:
        """Ends a request as ``cancelled`` at the next step; False if none of that name is alive."""
        with self._lock:
            if custom_id not in self._alive:
                return False
            self._cancelled.add(custom_id)
            return True

    def completions(self) -> Iterator[Completion]:
        """Completions as they finish, until nothing is left to do."""
        while True:
            while self._finished:
                yield self._finished.popleft()
            if not self.step() and not self._finished:
                return

    def finished(self) -> list[Completion]:
        """Completions that nobody has taken; without a step, so also after one that raised."""
        found = list(self._finished)
        self._finished.clear()
        return found

    def stream(self, requests: Iterable[Request | Checkpoint]) -> Iterator[Completion]:
        """Completions as they finish; draws requests only as room for them comes, so that any
        number of them may pass through.

        Decoding waits while the source has nothing to give. Whoever leaves early, or whose source
        raises, drops what this call has submitted and not yielded.
        """
        source = iter(requests)
        own: set[str] = set()
        more = True
        try:
            while True:
                while more and len(self._alive) < _QUEUE_PER_SLOT * self._slots:
                    request = next(source, None)
                    if request is None:
                        more = False
                        break
                    self.submit(request)
                    inner = request.request if isinstance(request, Checkpoint) else request
                    own.add(inner.custom_id)
                progressed = self.step()
                while self._finished:
                    completion = self._finished.popleft()
                    own.discard(completion.custom_id)
                    yield completion
                if not progressed and not more:
                    return
        finally:
            self._drop(own)

    def _drop(self, custom_ids: set[str]) -> None:
        """Ends requests without a completion."""
        if custom_ids:
            for custom_id in custom_ids:
                self.cancel(custom_id)
            self._take_in()
            kept = [c for c in self._finished if c.custom_id not in custom_ids]
            self._finished = collections.deque(kept)

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Completions of all requests, in their order.

        Raises:
          SurgeError: if two of them have the same custom_id.
        """
        order: list[str] = []
        seen: set[str] = set()

        def noted() -> Iterator[Request]:
            for request in requests:
                if request.custom_id in seen:
                    raise SurgeError(f"two requests have custom_id {request.custom_id!r}")
                seen.add(request.custom_id)
                order.append(request.custom_id)
                yield request

        done = {completion.custom_id: completion for completion in self.stream(noted())}
        return [done[custom_id] for custom_id in order]

    def checkpoints(self) -> list[Checkpoint]:
        """All unfinished sequences in their portable form, by arrival; between two steps, or
        after one that raised.
        """
        with self._lock:
            alive = sorted(self._alive.values(), key=lambda s: s.index)
            return [sequence.checkpoint() for sequence in alive]


def _with_seed(checkpoint: Checkpoint, seed: int) -> Checkpoint:
    sampling = dataclasses.replace(checkpoint.request.sampling, seed=seed)
    request = dataclasses.replace(checkpoint.request, sampling=sampling)
    return dataclasses.replace(checkpoint, request=request)
