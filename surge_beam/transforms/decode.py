"""Decoding: rounds of superbatches through the engine of each worker process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.transforms.window import GlobalWindow
from apache_beam.typehints import KV
from apache_beam.utils.timestamp import MAX_TIMESTAMP, Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from surge_beam.records import Checkpoint, Completion, EngineConfig, Request, pack
from surge_beam.transforms import stats_files
from surge_beam.transforms.files import Store
from surge_beam.transforms.journal import CompletionJournal, Entry, request_digest
from surge_beam.transforms.metric_ids import keep_metric_ids_apart
from surge_beam.transforms.plan_files import NAMESPACE, keyed, on_device
from surge_beam.transforms.prefix_partition import (
    MAX_DELAY_SECS,
    BatchLimits,
    FormPrefixBatches,
    PartitionByPrefix,
)
from surge_beam.transforms.prompt_batch import (
    decode,
    encode,
    prompt_batch,
    requests_of,
    sampling_json,
)

ANSWERS_PER_ELEMENT = 64
STATS_SECONDS = 15.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """The completion of one row of an owner."""

    row: int
    completion: Completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundConfig:
    """How prompts are decoded.

    Attributes:
      engine: the engine's recipe.
      rounds, slice_tokens, ranges, batch: see ``GenerateConfig``.
      max_delay_secs: seconds a prompt of unbounded input waits at most for others of its kind.
      accelerator: Beam resource hint of the decoding steps; none where it is empty.
      output, run: where completions are kept as they finish, and under which run; None keeps none.
    """

    engine: EngineConfig
    rounds: int = 1
    slice_tokens: int = 256
    ranges: int | None = None
    batch: BatchLimits = dataclasses.field(default_factory=BatchLimits)
    max_delay_secs: float = MAX_DELAY_SECS
    accelerator: str = ""
    output: str | None = None
    run: str = ""


class DecodeRounds(beam.PTransform):
    """Completes prompts, those that share prefixes together.

    Takes PCollection[bytes], encoded prompt batches in the global window, and gives
    PCollection[KV[str, bytes]]: packed lists of ``Answer`` by owner. In every round but the last a
    row is given up after ``slice_tokens`` tokens, and goes on in the next, among other rows of its
    kind from the whole fleet.
    """

    def __init__(self, config: RoundConfig):
        super().__init__()
        self._config = config

    def expand(self, prompts: beam.PCollection) -> beam.PCollection:
        config = self._config
        batches = (
            prompts
            | "PartitionByPrefix" >> PartitionByPrefix(config.ranges)
            | "FormBatches" >> FormPrefixBatches(config.batch, config.max_delay_secs)
        )
        answers = []
        for number in range(1, config.rounds + 1):
            last = number == config.rounds
            decode_step = beam.ParDo(_Decode(config, last)).with_outputs(
                "unfinished", main="answers"
            )
            if config.accelerator or config.engine.device == "cpu":
                decode_step = on_device(decode_step, config.engine.device, config.accelerator)
            decoded = batches | f"Round{number}" >> decode_step
            answers.append(keyed(decoded.answers, KV[str, bytes]))
            if last:
                break
            unfinished = decoded.unfinished
            unfinished.element_type = bytes
            batches = (
                unfinished
                | f"Regroup{number}" >> PartitionByPrefix(config.ranges)
                | f"FormBatches{number}" >> FormPrefixBatches(config.batch, config.max_delay_secs)
            )
        return answers | "Answers" >> beam.Flatten()


class _Decode(beam.DoFn):
    """Feeds superbatches to the engine of the process; a bundle's next one is fetched before the
    last rows of the one before have ended.
    """

    def __init__(self, config: RoundConfig, last: bool):
        self._config, self._last = config, last
        self._rows = Metrics.counter(NAMESPACE, "completions")
        self._tokens = Metrics.counter(NAMESPACE, "completion_tokens")
        self._saved = Metrics.counter(NAMESPACE, "prefix_tokens_saved")

    def setup(self) -> None:
        keep_metric_ids_apart()
        config = self._config
        self._worker = self._load()
        self._visit = self._worker.visit()
        self._journal: CompletionJournal | None = None
        self._store = Store(config.output) if config.output is not None else None

    def _load(self) -> Any:
        from surge_beam.gpu.decode_worker import shared_decode_worker

        return shared_decode_worker(self._config.engine)

    def start_bundle(self) -> None:
        # of a bundle that failed, whose rows come again
        self._visit.close()
        if self._journal is not None:
            self._journal.close()
        self._worker = self._load()
        self._visit = self._worker.visit()
        # rows of one id are decoded one after the other
        self._under_way: dict[str, list[_UnderWay]] = {}
        self._earliest: Timestamp = MAX_TIMESTAMP
        self._answers: dict[str, list[Answer]] = {}
        self._counted = 0
        self._stats = _Stats()
        self._journal = (
            CompletionJournal(self._store, self._config.run) if self._store is not None else None
        )

    def process(self, data: bytes, timestamp: Any = beam.DoFn.TimestampParam) -> Iterator[Any]:
        began = time.monotonic()
        self._earliest = min(self._earliest, timestamp)
        self._visit.add(map(self._begin, requests_of(decode(data))))
        for completion in self._visit.take(keep=2 * self._config.engine.max_sequences):
            yield from map(self._placed, self._end(completion))
        self._stats.seconds += time.monotonic() - began

    def finish_bundle(self) -> Iterator[Any]:
        began = time.monotonic()
        try:
            for completion in self._visit.take():
                yield from map(self._placed, self._end(completion))
        finally:
            self._visit.close()
            if self._journal is not None:
                self._journal.close()
        yield from map(self._placed, self._flush())
        self._stats.seconds += time.monotonic() - began
        self._report()

    def _begin(self, item: tuple[str, int, Request | Checkpoint]) -> Request | Checkpoint:
        owner, row, begun = item
        checkpoint = begun if isinstance(begun, Checkpoint) else Checkpoint(request=begun)
        request = checkpoint.request
        most, until = request.sampling.max_tokens, None
        if not self._last:
            until = len(checkpoint.output_ids) + self._config.slice_tokens
            if most is not None and most <= until:
                until = None
        under_way = self._under_way.setdefault(request.custom_id, [])
        under_way.append(_UnderWay(owner, row, checkpoint, until))
        if until is None:
            return begun
        sampling = dataclasses.replace(request.sampling, max_tokens=until)
        sliced = dataclasses.replace(request, sampling=sampling)
        if isinstance(begun, Request):
            return sliced
        return dataclasses.replace(begun, request=sliced)

    def _end(self, completion: Completion) -> Iterator[Any]:
        under_way = self._under_way[completion.custom_id].pop(0)
        request = under_way.checkpoint.request
        self._stats.tokens += completion.completion_tokens - len(under_way.checkpoint.output_ids)
        if under_way.gives_up(completion, self._worker.engine.context_length):
            checkpoint = Checkpoint(
                request=request,
                output_ids=completion.token_ids,
                cached_tokens=completion.cached_tokens,
                parks=completion.parks,
                evictions=completion.evictions,
                logprobs=completion.logprobs or (),
            )
            batch = prompt_batch(
                [under_way.owner],
                [under_way.row],
                [request.custom_id],
                [request.prompt_ids],
                [sampling_json(request.sampling)],
                [checkpoint.to_json()],
            )
            yield beam.pvalue.TaggedOutput("unfinished", encode(batch))
            return
        # what failed may go better in the next run
        failed = completion.finish_reason in ("error", "capacity", "cancelled")
        if self._journal is not None and not failed:
            digest = request_digest(request, self._config.engine)
            self._journal.add(Entry(under_way.owner, under_way.row, digest, completion))
        self._stats.rows += not failed
        self._stats.saved += completion.cached_tokens
        self._rows.inc()
        self._tokens.inc(completion.completion_tokens)
        self._saved.inc(completion.cached_tokens)
        answers = self._answers.setdefault(under_way.owner, [])
        answers.append(Answer(under_way.row, completion))
        if len(answers) >= ANSWERS_PER_ELEMENT:
            yield under_way.owner, pack(self._answers.pop(under_way.owner))
        if time.monotonic() - self._stats.since >= STATS_SECONDS:
            self._report()

    def _flush(self) -> Iterator[Any]:
        for owner, answers in self._answers.items():
            yield owner, pack(answers)
        self._answers = {}

    def _placed(self, value: Any) -> Any:
        """At the earliest timestamp of the bundle: an answer later than the rows it belongs to
        would let the watermark pass them.
        """
        if isinstance(value, beam.pvalue.TaggedOutput):
            return beam.pvalue.TaggedOutput(value.tag, self._placed(value.value))
        return WindowedValue(value, self._earliest, (GlobalWindow(),))

    def _report(self) -> None:
        """What a progress line and the report count."""
        stats, self._stats = self._stats, _Stats()
        if self._store is None or not (stats.rows or stats.tokens):
            return
        header = {
            "decoded": True,
            "rows": stats.rows,
            "tokens": stats.tokens,
            "prefix_tokens_saved": stats.saved,
            "seconds": round(stats.seconds, 6),
            "ended": time.time(),
        }
        stats_files.put(self._store, self._config.run, header)


@dataclasses.dataclass(frozen=True)
class _UnderWay:
    """A row in the engine.

    Attributes:
      owner, row: where its answer goes.
      checkpoint: as it came.
      until: tokens at which it is given up in this round; None decodes it to the end.
    """

    owner: str
    row: int
    checkpoint: Checkpoint
    until: int | None

    def gives_up(self, completion: Completion, context_length: int) -> bool:
        """Whether only the round's limit ended it."""
        return (
            completion.finish_reason == "length"
            and completion.completion_tokens == self.until
            and completion.prompt_tokens + completion.completion_tokens < context_length
        )


@dataclasses.dataclass
class _Stats:
    rows: int = 0
    tokens: int = 0
    saved: int = 0
    seconds: float = 0.0
    since: float = dataclasses.field(default_factory=time.monotonic)
