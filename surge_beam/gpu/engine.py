"""The decode engine: one loop that admits, prefills, decodes, parks and resumes sequences."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from surge_beam.gpu.admission import WaitingRoom, load_admission
from surge_beam.gpu.decode_engine import DecodeEngine
from surge_beam.gpu.kv_cache import OutOfPages, PagePool
from surge_beam.gpu.loading import load_controller, load_runner
from surge_beam.gpu.runner import CopyFailed, OutOfDeviceMemory, Runner, SampleRow, StepBatch
from surge_beam.gpu.sequence import HostCopy, Sequence, State
from surge_beam.policy import residency
from surge_beam.policy.feather import Admission
from surge_beam.policy.phases import PhaseController, PhaseView, StepPlan
from surge_beam.policy.residency import ResidencyDecision, ResidencyView, SequenceView
from surge_beam.records import EngineConfig


@dataclasses.dataclass
class _Chunk:
    """New tokens of one sequence in a step."""

    sequence: Sequence
    count: int
    last: bool
    registered: list[int] = dataclasses.field(default_factory=list)


class Engine(DecodeEngine):
    """Completes requests over one model.

    ``submit`` and ``cancel`` may be called from any thread; one thread at a time may draw
    completions, which is what drives the loop. Use it as a context manager, or ``close`` it.

    Args:
      config: the recipe.
      runner: built from the recipe if not given.
      controller: when to prefill and when to decode; built from the recipe if not given.
      admission: who is admitted next, and when to stop; built from the recipe if not given.
      decide: the boundary decision.
      clock: seconds, for step times.

    Raises:
      SurgeError: if the model cannot be loaded or the device is missing.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        runner: Runner | None = None,
        controller: PhaseController | None = None,
        admission: Admission | None = None,
        decide: Callable[[ResidencyView], ResidencyDecision] = residency.decide,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner if runner is not None else load_runner(config)
        super().__init__(
            config,
            context_length=self.runner.context_length,
            decode_text=self.runner.decode_text,
            stop_ids=self.runner.stop_ids,
        )
        self.pool = PagePool(self.runner.pages, self.runner.page_size, share=config.share_prefixes)
        self.controller = (
            controller if controller is not None else load_controller(config, self.runner)
        )
        self._decide, self._clock = decide, clock
        # a chunk ends on a page's end, so a step holds at least a page
        self._step_tokens = max(config.max_prefill_tokens, self.runner.page_size)
        self._host_pages = config.host_kv_bytes // max(1, self.runner.page_bytes)
        self._waiting = WaitingRoom(
            admission if admission is not None else load_admission(config), self.runner.page_size
        )
        self._refused = False
        self._running: list[Sequence] = []
        self._parked: list[Sequence] = []

    def close(self) -> None:
        """Lets go of the KV pool, and of unfinished sequences; take ``checkpoints`` before."""
        with self._lock:
            self._closed = True
            self._alive.clear()
            self._inbox.clear()
        self._waiting.clear()
        self._running.clear()
        self._parked.clear()
        self.runner.close()

    # --- one step ---

    def step(self) -> bool:
        """Runs one step; False if there was nothing to do."""
        self._take_in()
        if not (self._waiting or self._running or self._parked):
            return False
        self._settle()
        self._refused = False
        plan = self.controller.plan(self._view())
        chunks = self._schedule(plan)
        if not chunks:
            # what the controller hoped for had no room: whatever can go on goes on
            chunks = self._schedule(StepPlan(prefill=True, decode=True, admit=self._slots))
        if chunks:
            self._run(chunks)
        return True

    def _take_in(self) -> None:
        with self._lock:
            arrived = list(self._inbox)
            self._inbox.clear()
            cancelled = [self._alive[c] for c in self._cancelled if c in self._alive]
            self._cancelled.clear()
        for sequence in arrived:
            refusal = self._refusal(sequence)
            reason = refusal[0] if refusal else sequence.stop.resume(sequence.output)
            if reason is None:
                self._waiting.enter(sequence, self._sharable_digests(sequence))
            else:
                self._end(sequence, reason, refusal[1] if refusal else None)
        for sequence in cancelled:
            if sequence.state not in (State.DONE, State.FAILED):
                self._end(sequence, "cancelled")

    def _refusal(self, sequence: Sequence) -> tuple[str, str] | None:
        """Why a sequence cannot be decoded: finish reason and message."""
        if sequence.prompt_tokens == 0:
            return "error", "the prompt has no tokens"
        ids = sequence.ids
        if int(ids.min()) < 0 or int(ids.max()) >= self.runner.vocabulary:
            return "error", f"a token id lies outside the vocabulary of {self.runner.vocabulary}"
        if sequence.prompt_tokens >= self.context_length:
            return "error", (
                f"the prompt has {sequence.prompt_tokens} tokens and fills the context of "
                f"{self.context_length}"
            )
        if self.pool.pages_for(sequence.length) > self.pool.pages:
            return "capacity", self._too_long(sequence)
        return None

    def _too_long(self, sequence: Sequence) -> str:
        room = self.pool.pages * self.pool.page_size
        return f"{sequence.length} tokens do not fit the KV pool of {room}; give it more kv_bytes"

    def _view(self) -> PhaseView:
        decoding = sum(s.state is State.ACTIVE for s in self._running)
        return PhaseView(
            waiting=0 if self._parked else len(self._waiting),
            prefilling=len(self._running) - decoding,
            decoding=decoding,
            slots=self._slots,
            kv_short=bool(self._parked) or self.pool.available < len(self._running),
            now=self._clock(),
        )

    # --- where KV lives ---

    def _settle(self) -> None:
        """Asks for the boundary decision until nobody lacks a page, and carries it out."""
        while self._parked or any(self._lacks_page(s) for s in self._running):
            decision = self._decide(self._snapshot())
            by_index = {s.index: s for s in (*self._running, *self._parked)}
            for index in decision.park:
                self._park(by_index[index])
            for index in decision.evict:
                self._evict(by_index[index])
            for index in decision.exhausted:
                room, held = self.pool.pages * self.pool.page_size, by_index[index].length
                self._end(
                    by_index[index],
                    "capacity",
                    f"the KV pool of {room} tokens is full at {held} tokens",
                )
            for index in decision.grow:
                by_index[index].table += self.pool.allocate(1)
            for index in decision.resume:
                self._resume(by_index[index])
            if not (decision.park or decision.evict or decision.exhausted):
                return

    def _lacks_page(self, sequence: Sequence) -> bool:
        """Whether its next token has no slot; one that prefills has all its pages."""
        room = len(sequence.table) * self.pool.page_size
        return sequence.state is State.ACTIVE and sequence.context == room

    def _snapshot(self) -> ResidencyView:
        running = tuple(
            SequenceView(
                index=s.index,
                priority=s.request.priority,
                decoded=s.decoded,
                needs=int(self._lacks_page(s)),
                frees=int((self.pool.references[s.table] == 1).sum()),
                host_pages=len(s.table),
                parkable=s.state is State.ACTIVE,
            )
            for s in self._running
        )
        parked = tuple(
            SequenceView(
                index=s.index,
                priority=s.request.priority,
                decoded=s.decoded,
                needs=self.pool.pages_for(s.length),
                frees=0,
                host_pages=s.host.pages if s.host else 0,
            )
            for s in self._parked
        )
        return ResidencyView(
            running=running,
            parked=parked,
            free=self.pool.available,
            host_free=self._host_pages - sum(s.host.pages for s in self._parked if s.host),
            slots_free=self._slots - len(self._running),
        )

    def _park(self, sequence: Sequence) -> None:
        pages = self.pool.pages_for(sequence.context)
        try:
            copy = self.runner.save(sequence.table[:pages])
        except CopyFailed:
            self.stats.copies_failed += 1
            self._evict(sequence)
            return
        sequence.host = HostCopy(copy, pages)
        sequence.move(State.PARKED)
        sequence.parks += 1
        self.stats.parks += 1
        context = sequence.context
        self.pool.release(sequence.forget_kv())
        sequence.context = context
        self._running.remove(sequence)
        self._parked.append(sequence)

    def _resume(self, sequence: Sequence) -> None:
        assert sequence.host is not None
        context, pages = sequence.context, sequence.host.pages
        full = context // self.pool.page_size
        digests = self.pool.digests(sequence.ids, sequence.digests, full)
        table = self.pool.match(sequence.ids, digests[:full], [])
        found = len(table)
        try:
            table += self.pool.allocate(self.pool.pages_for(sequence.length) - found)
            self.runner.restore(sequence.host.copy, found, table[found:pages])
        except (CopyFailed, OutOfPages) as error:
            self.pool.release(table)
            if isinstance(error, CopyFailed):
                self.stats.copies_failed += 1
                self._evict(sequence)
            return
        sequence.host = None
        sequence.table, sequence.context, sequence.registered = table, context, found
        sequence.move(State.ACTIVE)
        self.stats.resumes += 1
        self._parked.remove(sequence)
        self._running.append(sequence)

    def _evict(self, sequence: Sequence) -> None:
        (self._parked if sequence.state is State.PARKED else self._running).remove(sequence)
        self.pool.release(sequence.forget_kv())
        sequence.host = None
        sequence.move(State.EVICTED)
        sequence.evictions += 1
        self.stats.evictions += 1
        self._waiting.put_back(sequence)

    # --- what a step holds ---

    def _schedule(self, plan: StepPlan) -> list[_Chunk]:
        chunks: list[_Chunk] = []
        budget = self._step_tokens
        if plan.decode:
            chunks = [_Chunk(s, 1, True) for s in self._running if s.state is State.ACTIVE]
            # never less than a page, or a long prompt would wait for as long as short ones come
            budget = max(budget - len(chunks), self.pool.page_size)
        if plan.prefill:
            before = len(chunks)
            prefilling = [s for s in self._running if s.state is State.PREFILLING]
            for sequence in prefilling:
                budget -= self._prefill(sequence, budget, chunks)
            # nobody overtakes one that had to wait
            served = len(chunks) - before == len(prefilling)
            admitted = 0
            while served and admitted < plan.admit and budget > 0 and self._admit():
                admitted += 1
                count = self._prefill(self._running[-1], budget, chunks)
                budget, served = budget - count, count > 0
        return chunks

    def _admit(self) -> bool:
        """Brings in the first that waits, if there is room for it and the gate lets it in."""
        if self._parked or self._refused or len(self._running) >= self._slots:
            return False
        sequence = self._waiting.first()
        if sequence is None:
            return False
        reads = self.pool.used * self.pool.page_size
        digests = self._sharable_digests(sequence)
        table = self.pool.match(sequence.ids, digests, [])
        wanted = self.pool.pages_for(sequence.length) - len(table)
        # a page for each that runs, or they would have to make room again at once
        if wanted + len(self._running) > self.pool.available:
            self.pool.release(table)
            if not self._running:
                self._end(sequence, "capacity", self._too_long(sequence))
            return False
        if not self._waiting.admit(sequence, running=len(self._running), reads=reads):
            self.pool.release(table)
            self._refused = True
            self.stats.refusals += 1
            return False
        self.stats.admissions += 1
        sequence.move(State.PREFILLING)
        sequence.baseline = sequence.decoded
        sequence.table, sequence.registered = table, len(table)
        sequence.context = len(table) * self.pool.page_size
        if sequence.fresh:
            sequence.cached_tokens = sequence.context
        self.stats.prefix_tokens_saved += sequence.context
        sequence.table += self.pool.allocate(wanted)
        self._running.append(sequence)
        return True

    def _sharable_digests(self, sequence: Sequence) -> list[int]:
        """Of all full pages but that of the last token, whose logits must be computed."""
        if not self.pool.share:
            return []
        pages = (sequence.length - 1) // self.pool.page_size
        return self.pool.digests(sequence.ids, sequence.digests, pages)[:pages]

    def _prefill(self, sequence: Sequence, budget: int, chunks: list[_Chunk]) -> int:
        """Plans a sequence's next chunk; returns its tokens."""
        self._catch_up(sequence)
        count = sequence.length - sequence.context
        if count > budget:
            size = self.pool.page_size
            count = (sequence.context + budget) // size * size - sequence.context
            if count <= 0:
                return 0
        chunk = _Chunk(sequence, count, sequence.context + count == sequence.length)
        first = sequence.registered
        # the last token's page is only offered once it is computed: an equal one may exist, which
        # this sequence must not write to
        shared = min(sequence.context + count, sequence.length - 1)
        self._register(sequence, shared)
        chunk.registered = sequence.table[first : sequence.registered]
        chunks.append(chunk)
        return count

    def _catch_up(self, sequence: Sequence) -> None:
        """Takes over pages that others have computed since this sequence was admitted."""
        size = self.pool.page_size
        if not sequence.sharable or sequence.context != sequence.registered * size:
            return
        digests = self._sharable_digests(sequence)
        held = sequence.table[: sequence.registered]
        found = self.pool.match(sequence.ids, digests, held)
        if not found:
            return
        end = sequence.registered + len(found)
        self.pool.release(sequence.table[sequence.registered : end])
        sequence.table[sequence.registered : end] = found
        sequence.registered = end
        sequence.context = end * size
        if sequence.fresh:
            sequence.cached_tokens += len(found) * size
        self.stats.prefix_tokens_saved += len(found) * size

    def _register(self, sequence: Sequence, tokens: int) -> None:
        """Lets others share a sequence's pages up to so many tokens."""
        full = tokens // self.pool.page_size
        if not sequence.sharable or full <= sequence.registered:
            return
        digests = self.pool.digests(sequence.ids, sequence.digests, full)
        while sequence.registered < full:
            if not self.pool.register(sequence.ids, digests, sequence.table, sequence.registered):
                sequence.sharable = False
                return
            sequence.registered += 1

    # --- running it ---

    def _run(self, chunks: list[_Chunk]) -> None:
        batch, sampled_chunks = self._batch(chunks)
        decoding = [c.sequence.context for c in chunks if c.sequence.state is State.ACTIVE]
        decode_rows = len(decoding)
        prefill_tokens = len(batch.ids) - decode_rows
        began = self._clock()
        try:
            try:
                sampled = self.runner.step(batch)
            except OutOfDeviceMemory:
                # once more: others use the device too, and what torch kept unused is given back
                sampled = self.runner.step(batch)
        except OutOfDeviceMemory as error:
            self._undo(chunks)
            self._shrink(chunks, len(batch.ids), error)
            return
        except BaseException:
            self._undo(chunks)
            self._evict_prefilling()
            raise
        seconds = self._clock() - began
        kind = "decode" if not prefill_tokens else "mixed" if decode_rows else "prefill"
        stats = self.stats
        stats.steps[kind] += 1
        stats.seconds[kind] += seconds
        stats.decode_tokens += decode_rows
        stats.prefill_tokens += prefill_tokens
        stats.sampled_tokens += len(sampled_chunks)
        token_bytes = self.runner.page_bytes // self.runner.page_size
        stats.kv_bytes_read = self.runner.kv_tokens_read * token_bytes
        stats.kv_bytes_unshared = self.runner.kv_tokens_unshared * token_bytes
        stats.peak_pages = max(stats.peak_pages, self.pool.used)
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.context += chunk.count
            stats.recomputed_tokens += max(
                0, min(chunk.count, sequence.computed - sequence.context + chunk.count)
            )
            sequence.computed = max(sequence.computed, sequence.context)
            self._register(sequence, sequence.context)
        bad = set(sampled.bad)
        completions = 0
        for row, chunk in enumerate(sampled_chunks):
            sequence = chunk.sequence
            if sequence.state is State.PREFILLING:
                sequence.move(State.ACTIVE)
                sequence.started = True
            if row in bad:
                alone = self.pool.references[sequence.table] == 1
                self.pool.withdraw([p for p, own in zip(sequence.table, alone, strict=True) if own])
                self._end(sequence, "error", "the model gave logits that are not numbers")
                continue
            reason = sequence.push(int(sampled.token_ids[row]), sampled.logprobs[row])
            if reason is not None:
                completions += 1
                self.controller.completed(
                    sequence.prompt_tokens - sequence.cached_tokens, sequence.decoded
                )
                self._end(sequence, reason)
        self.controller.stepped(decode_rows, prefill_tokens, seconds, completions)
        mean_context = sum(decoding) / max(1, decode_rows)
        self._waiting.observe(decode_rows, seconds, prefill_tokens, mean_context)

    def _batch(self, chunks: list[_Chunk]) -> tuple[StepBatch, list[_Chunk]]:
        counts = np.array([c.count for c in chunks], np.int32)
        context = np.array([c.sequence.context for c in chunks], np.int32)
        parts = [c.sequence.ids[c.sequence.context :][: c.count] for c in chunks]
        ends = np.cumsum(counts) - 1
        last = np.array([c.last for c in chunks], bool)
        sampled = [c for c in chunks if c.last]
        return (
            StepBatch(
                ids=np.concatenate(parts).astype(np.int64),
                counts=counts,
                context=context,
                block_tables=[np.array(c.sequence.table, np.int32) for c in chunks],
                rows=ends[last].astype(np.int64),
                sample=[_sample_row(c.sequence) for c in sampled],
            ),
            sampled,
        )

    def _undo(self, chunks: list[_Chunk]) -> None:
        """Takes back what a step that failed has offered to others."""
        for chunk in chunks:
            self.pool.withdraw(chunk.registered)

    def _evict_prefilling(self) -> list[Sequence]:
        """All that prefill: one without a chunk in a failed step may have counted on another's."""
        prefilling = [s for s in self._running if s.state is State.PREFILLING]
        for sequence in prefilling:
            self._evict(sequence)
        return prefilling

    def _shrink(self, chunks: list[_Chunk], tokens: int, error: OutOfDeviceMemory) -> None:
        """After a step that ran out of memory: nothing of it counts, and steps become smaller."""
        hopeless = len(chunks) == 1 and tokens <= self.pool.page_size
        if hopeless:
            self._end(
                chunks[0].sequence, "capacity", f"a step of {tokens} tokens does not fit: {error}"
            )
        decoding = [c.sequence for c in chunks if c.sequence.state is State.ACTIVE]
        prefilling = self._evict_prefilling()
        if hopeless:
            return
        if prefilling and self._step_tokens > self.pool.page_size:
            self._step_tokens = max(self.pool.page_size, min(self._step_tokens, tokens) // 2)
        else:
            self._slots = max(1, min(self._slots, len(chunks)) // 2)
            for sequence in sorted(decoding, key=_loss)[: len(decoding) - self._slots]:
                self._evict(sequence)
        self.stats.memory_ceiling = min(self._step_tokens, tokens - 1)

    def _end(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        self._waiting.leave(sequence)
        if sequence.state in (State.PREFILLING, State.ACTIVE):
            self._running.remove(sequence)
        elif sequence.state is State.PARKED:
            self._parked.remove(sequence)
        self.pool.release(sequence.forget_kv())
        sequence.host = None
        failed = reason in ("error", "capacity")
        sequence.move(State.FAILED if failed else State.DONE)
        self._emit(sequence, reason, error)

    def _emit(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        completion = sequence.completion(reason, error)
        with self._lock:
            del self._alive[completion.custom_id]
            self._cancelled.discard(completion.custom_id)
        self.stats.finished[reason] += 1
        self._finished.append(completion)


def _sample_row(sequence: Sequence) -> SampleRow:
    params = sequence.request.sampling
    history = sequence.ids if params.repetition_penalty != 1.0 else None
    return SampleRow(params, sequence.key, sequence.decoded, history)


def _loss(sequence: Sequence) -> tuple[int, int, int]:
    return residency.loss(sequence.request.priority, sequence.decoded, sequence.index)
