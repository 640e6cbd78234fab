"""Generation: the file job, from an input to committed partitions or blocks of batch lines."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.typehints import KV

from surge_beam.policy.costs import CostModel
from surge_beam.policy.superbatch import Limits
from surge_beam.records import (
    Completion,
    EngineConfig,
    Request,
    SuperBatchPlan,
    SurgeError,
    pack,
    unpack,
)
from surge_beam.transforms.batch_lines import (
    BatchRequest,
    ServedModels,
    not_completed,
    output_line,
    parse_line,
)
from surge_beam.transforms.decode import DecodeRounds, RoundConfig
from surge_beam.transforms.files import Store, absolute_model, current_version
from surge_beam.transforms.guard import shared_guard
from surge_beam.transforms.journal import journals, read_journal, request_digest
from surge_beam.transforms.metric_ids import keep_metric_ids_apart
from surge_beam.transforms.overlap import Overlap
from surge_beam.transforms.plan_files import (
    FileJob,
    PlanFiles,
    PublishSplits,
    in_global_window,
    keyed,
    peak_rss,
    plans_of,
)
from surge_beam.transforms.prefix_partition import BatchLimits
from surge_beam.transforms.prompt_batch import encoded_batches
from surge_beam.transforms.prompts import Prompt, PromptConfig, Refusal, render
from surge_beam.transforms.read import (
    ReadConfig,
    ReadSegment,
    SuperBatchReader,
    row_letter,
    write_unreadable,
)
from surge_beam.transforms.row_ids import (
    Doubled,
    DropDoubled,
    FindDoubled,
    Remembered,
    by_shard,
    forget_others,
    id_digest_bytes,
    planned_ids,
    remember,
)
from surge_beam.transforms.superbatch import refuse_dask
from surge_beam.transforms.textfiles import LINE_COLUMN
from surge_beam.transforms.tokenizing import Tokenizing
from surge_beam.transforms.write import Committer, OutputSegment

COLUMNS = pa.schema(
    [
        ("completion", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
    ]
)
OUTPUT_LINE = "output"
JOURNAL_ENTRIES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(FileJob):
    """A generation job, whole: what is read, how it is decoded, and where it goes.

    A SuperBatch of its plan (``max_rows``, ``max_bytes``) is a block: whole partitions, or a part
    of one, that are tokenized together and committed together. What is decoded together is formed
    along the prefix tree of all blocks.

    Attributes:
      prompts: where prompts come from.
      engine: the engine's recipe.
      rounds, slice_tokens: a visit to the engine decodes at most ``slice_tokens`` tokens of a row;
        what is unfinished is regrouped across the fleet, in all ``rounds`` times. The last round
        decodes to the end.
      ranges: ranges of the prefix tree; None goes by the number of tokens.
      batch: limits of what is decoded together.
    """

    prompts: PromptConfig
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    rounds: int = 1
    slice_tokens: int = 256
    ranges: int | None = None
    batch: BatchLimits = dataclasses.field(default_factory=BatchLimits)
    max_rows: int = 1024
    max_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        super().__post_init__()
        engine = dataclasses.replace(self.engine, model=absolute_model(self.engine.model))
        object.__setattr__(self, "engine", engine)
        if min(self.rounds, self.slice_tokens) < 1:
            raise SurgeError("rounds and slice_tokens must be at least 1")

    def limits(self, model: CostModel | None) -> Limits:
        """Blocks are closed as soon as they are full; no cost decides."""
        return Limits(min_rows=self.max_rows, max_rows=self.max_rows, max_bytes=self.max_bytes)

    @property
    def names_rows(self) -> bool:
        """Whether rows bring ids of their own, which may be doubled."""
        return self.prompts.lines or self.prompts.id_column is not None

    @property
    def round(self) -> RoundConfig:
        """What the decoding rounds need to know."""
        return RoundConfig(
            engine=self.engine,
            rounds=self.rounds,
            slice_tokens=self.slice_tokens,
            ranges=self.ranges,
            batch=self.batch,
            accelerator=self.accelerator,
            output=self.output,
            run=self.run,
        )


def read_config(
    prompts: PromptConfig,
    *,
    partition_by: tuple[str, ...] = (),
    keep_columns: tuple[str, ...] | None = None,
    fail_on_bad_input: bool = False,
) -> ReadConfig:
    """What a job with these prompts reads."""
    return ReadConfig(
        text_column=prompts.column,
        required_columns=prompts.required_columns,
        optional_columns=prompts.optional_columns,
        lines=prompts.lines,
        partition_by=partition_by,
        keep_columns=keep_columns,
        added_columns=() if prompts.lines else tuple(COLUMNS.names),
        fail_on_bad_input=fail_on_bad_input,
    )


class GenerateFiles(beam.PTransform):
    """Completes every row of an input and commits it below the output.

    Starts from a pipeline. Its result is a PCollection of one small dict a block: the manifest
    entry's header. Batch lines are committed as blocks below ``_surge/blocks``;
    ``batch_files.assemble`` makes the two files of them.
    """

    def __init__(self, config: GenerateConfig):
        super().__init__()
        self._config = config

    def expand(self, pipeline: beam.pvalue.PBegin) -> beam.PCollection[dict]:
        refuse_dask(pipeline.pipeline)
        config = self._config
        planned = pipeline | "PlanFiles" >> PlanFiles(config)
        plans = planned.plans | "Plans" >> beam.FlatMap(_by_id).with_output_types(tuple[str, bytes])
        known = (
            pipeline
            | "Journals" >> beam.Create([None])
            | "ListJournals" >> beam.ParDo(_ListJournals(config)).with_output_types(str)
            | "SpreadJournals" >> beam.Reshuffle()
            | "ReadJournals"
            >> beam.ParDo(_ReadJournal(config)).with_output_types(tuple[str, bytes])
        )
        tokenized = (
            (plans, known)
            | "PlansAndJournals" >> beam.Flatten()
            | "JoinJournals" >> beam.GroupByKey()
            | "Tokenize"
            >> beam.ParDo(_Tokenize(config)).with_outputs("begun", "ids", "planned", main="prompts")
        )
        prompts = tokenized.prompts
        prompts.element_type = bytes
        outcomes = [keyed(tokenized.begun, KV[str, bytes])]
        if config.names_rows:
            remembered = (
                pipeline
                | "Ids" >> beam.Create([None])
                | "Remembered"
                >> beam.ParDo(
                    Remembered(config.output), beam.pvalue.AsIter(tokenized.planned)
                ).with_output_types(tuple[int, bytes])
            )
            doubled = (
                (keyed(tokenized.ids, KV[int, bytes]), remembered)
                | "AllIds" >> beam.Flatten()
                | "GroupIds" >> beam.GroupByKey()
                | "FindDoubled" >> beam.ParDo(FindDoubled()).with_output_types(tuple[str, bytes])
            )
            outcomes.append(doubled)
            prompts = prompts | "DropDoubled" >> beam.ParDo(
                DropDoubled(), beam.pvalue.AsMultiMap(doubled)
            ).with_output_types(bytes)
        answers = prompts | "Decode" >> DecodeRounds(config.round)
        committed = (
            (*outcomes, answers)
            | "Outcomes" >> beam.Flatten()
            | "JoinOutcomes" >> beam.GroupByKey()
            | "Commit" >> beam.ParDo(_Commit(config)).with_outputs("parts", main="headers")
        )
        _ = planned.splits | "PublishSplits" >> PublishSplits(config, committed.parts)
        return committed.headers


def _by_id(data: bytes) -> Iterator[tuple[str, bytes]]:
    for plan in plans_of(data):
        yield plan.id, pack(plan)


class _ListJournals(beam.DoFn):
    def __init__(self, config: GenerateConfig):
        self._config = config

    def process(self, _: None) -> Iterator[str]:
        yield from journals(Store(self._config.output))


class _ReadJournal(beam.DoFn):
    def __init__(self, config: GenerateConfig):
        self._config = config

    def process(self, name: str) -> Iterator[tuple[str, bytes]]:
        entries = read_journal(Store(self._config.output), name)
        while some := list(itertools.islice(entries, JOURNAL_ENTRIES)):
            found: dict[str, list[tuple[int, str, Completion]]] = {}
            for entry in some:
                known = (entry.row, entry.digest, entry.completion)
                found.setdefault(entry.owner, []).append(known)
            for owner, of_owner in found.items():
                yield owner, pack(of_owner)


@dataclasses.dataclass(frozen=True)
class Begun:
    """A block that was read.

    Attributes:
      plan: its plan.
      versions: of the files that were read as they are, before they were.
      rows: rows that were read.
      refused: rows without a prompt, and why.
      known: completions of an earlier run.
    """

    plan: SuperBatchPlan
    versions: tuple[str, ...]
    rows: int
    refused: dict[int, Refusal]
    known: dict[int, Completion]


def _versions(plan: SuperBatchPlan) -> tuple[str, ...]:
    """Size and version of the plan's files now; of staged ones the copy is read, which stays."""
    return tuple(current_version(f.url) for f in plan.files if not f.staged)


class _Blocks(beam.DoFn):
    """Opens what reading blocks takes."""

    def __init__(self, config: GenerateConfig):
        self._config = config

    def setup(self) -> None:
        shared_guard().start()
        keep_metric_ids_apart()
        self._store = Store(self._config.output)
        self._reader = SuperBatchReader(self._config.read, self._store)

    def teardown(self) -> None:
        self._reader.close()


class _Tokenize(_Blocks):
    """Reads blocks and turns their rows into prompts of token ids."""

    def setup(self) -> None:
        super().setup()
        self._tokenizing = Tokenizing(self._config.engine)

    def process(self, joined: tuple[str, Iterable[bytes]]) -> Iterator[Any]:
        plan: SuperBatchPlan | None = None
        found: dict[tuple[int, str], Completion] = {}
        for value in map(unpack, joined[1]):
            if isinstance(value, SuperBatchPlan):
                plan = value
            else:
                found.update(((row, digest), completion) for row, digest, completion in value)
        if plan is None:
            # of a block that is committed, or that is cut otherwise now
            return
        versions = _versions(plan)
        segments, broken = self._reader.read(plan)
        for file, reason in broken.items():
            write_unreadable(self._store, plan.files[file], reason)
        prompts: list[Prompt | Refusal] = []
        for read in segments:
            ids = [f"{plan.files[file].name}#{row}" for file, row in read.origin.tolist()]
            prompts += render(self._config.prompts, read.table, read.segment, ids)
        requests = self._tokenizing.requests(prompts)
        origin = np.concatenate([read.origin for read in segments])
        refused = {i: r for i, r in enumerate(requests) if isinstance(r, Refusal)}
        accepted = {i: r for i, r in enumerate(requests) if isinstance(r, Request)}
        known = {}
        if found:
            for i, request in accepted.items():
                completion = found.get((i, request_digest(request, self._config.engine)))
                if completion is not None:
                    known[i] = completion
        yield beam.pvalue.TaggedOutput(
            "begun", (plan.id, pack(Begun(plan, versions, len(requests), refused, known)))
        )
        if self._config.names_rows:
            for pair in planned_ids(plan):
                yield beam.pvalue.TaggedOutput("planned", pair)
            yield from self._ids(plan, origin, accepted)
        left = [(i, r) for i, r in accepted.items() if i not in known]
        yield from encoded_batches(plan.id, left)

    def _ids(
        self, plan: SuperBatchPlan, origin: np.ndarray, accepted: dict[int, Request]
    ) -> Iterator[Any]:
        """Where every id stands, by a digest of it."""
        places = []
        for i, request in accepted.items():
            file, number = origin[i].tolist()
            name = plan.files[file].name
            places.append((id_digest_bytes(request.custom_id), name, number, plan.id, i))
        for pair in by_shard(places):
            yield beam.pvalue.TaggedOutput("ids", pair)


@dataclasses.dataclass
class _Block:
    """A block and what became of its rows."""

    begun: Begun
    outcomes: dict[int, Completion | Refusal]
    reused: int
    segments: list[ReadSegment] = dataclasses.field(default_factory=list)


class _Commit(_Blocks):
    """Reads a block once more, puts its completions beside its rows, and commits it."""

    def setup(self) -> None:
        super().setup()
        config = self._config
        self._committer = Committer(self._store, config.write, config.run)
        self._models = ServedModels(config.prompts.models[0], config.prompts.models[1:])
        self._overlap = Overlap(self._read, self._assemble, self._write)
        # only log-probabilities need it
        self._tokenizing: Tokenizing | None = None

    def start_bundle(self) -> None:
        self._overlap.reset()

    def process(self, joined: tuple[str, Iterable[bytes]]) -> Iterator[Any]:
        for result in self._overlap.push(self._block(joined)):
            yield from self._outputs(result)

    def finish_bundle(self) -> Iterator[Any]:
        for result in self._overlap.drain():
            yield from map(in_global_window, self._outputs(result))

    def teardown(self) -> None:
        self._overlap.close()
        self._committer.close()
        super().teardown()

    def _block(self, joined: tuple[str, Iterable[bytes]]) -> _Block:
        begun: Begun | None = None
        outcomes: dict[int, Completion | Refusal] = {}
        doubled: dict[int, Refusal] = {}
        for value in map(unpack, joined[1]):
            if isinstance(value, Begun):
                begun = value
            elif isinstance(value, Doubled):
                doubled.update(value.refused)
            else:
                for answer in value:
                    outcomes.setdefault(answer.row, answer.completion)
        if begun is None:
            raise SurgeError(f"block {joined[0]} has completions, but was never read")
        reused = len(begun.known.keys() - doubled.keys())
        outcomes = {**outcomes, **begun.known, **begun.refused, **doubled}
        if len(outcomes) != begun.rows:
            raise SurgeError(
                f"block {joined[0]} has {begun.rows} rows, but {len(outcomes)} of them came to an"
                " end"
            )
        return _Block(begun, outcomes, reused)

    def _read(self, block: _Block) -> _Block:
        plan = block.begun.plan
        block.segments, _ = self._reader.read(plan)
        if _versions(plan) != block.begun.versions:
            files = ", ".join(source.url for source in plan.files[:3])
            raise SurgeError(f"the input changed while it was read ({files}); run again")
        return block

    def _assemble(self, block: _Block) -> tuple[_Block, list[OutputSegment]]:
        segments, offset = [], 0
        for read in block.segments:
            rows = read.table.num_rows
            found = [block.outcomes[offset + row] for row in range(rows)]
            offset += rows
            segments.append(self._segment(block.begun.plan, read, found))
        if offset != block.begun.rows:
            raise SurgeError(
                f"block {block.begun.plan.id} had {block.begun.rows} rows, and now {offset}; its"
                " input changed meanwhile: run again"
            )
        return block, segments

    def _segment(
        self, plan: SuperBatchPlan, read: ReadSegment, found: list[Completion | Refusal]
    ) -> OutputSegment:
        letters, done = [], []
        for row, outcome in enumerate(found):
            stage = "read"
            if isinstance(outcome, Completion):
                if outcome.finish_reason not in ("error", "capacity", "cancelled"):
                    done.append(row)
                    continue
                failed = not_completed(outcome)
                stage, outcome = "decode", Refusal(failed.code, failed.message)
            letters.append(
                row_letter(
                    self._config.read, plan, read, row, stage, outcome.error, outcome.message
                )
            )
        completions = [c for row in done for c in [found[row]] if isinstance(c, Completion)]
        table = read.table
        if len(done) < table.num_rows:
            table = table.take(pa.array(done, pa.int64()))
        if self._config.prompts.lines:
            added = self._lines(table, completions)
        else:
            values = (
                [c.text for c in completions],
                [c.finish_reason for c in completions],
                [c.prompt_tokens for c in completions],
                [c.cached_tokens for c in completions],
                [c.completion_tokens for c in completions],
            )
            added = {
                field.name: pa.array(column, field.type)
                for field, column in zip(COLUMNS, values, strict=True)
            }
        return OutputSegment(read.segment, table, added, letters, read.unreadable)

    def _lines(self, table: pa.Table, completions: list[Completion]) -> dict[str, pa.Array]:
        """The lines of the output file."""
        created, lines = int(time.time()), []
        for line, completion in zip(
            table.column(LINE_COLUMN).to_pylist(), completions, strict=True
        ):
            request = parse_line(line, models=self._models, defaults=self._config.prompts.sampling)
            assert isinstance(request, BatchRequest)
            assert request.custom_id == completion.custom_id
            lines.append(
                output_line(
                    completion,
                    url=request.url,
                    model=request.model,
                    created=created,
                    token_text=self._token_text,
                )
            )
        return {OUTPUT_LINE: pa.array(lines, pa.string())}

    def _token_text(self, token: int) -> str:
        if self._tokenizing is None:
            self._tokenizing = Tokenizing(self._config.engine)
        return self._tokenizing.text([token])

    def _write(self, work: tuple[_Block, list[OutputSegment]]) -> tuple[dict, list[str]]:
        block, segments = work
        done = [x for x in block.outcomes.values() if isinstance(x, Completion)]
        reasons = Counter(c.finish_reason for c in done)
        header = {
            "superbatch": block.begun.plan.id,
            "partitions": sum(s.segment.part == 0 for s in segments),
            "rows_out": sum(s.table.num_rows for s in segments),
            "rows_reused": block.reused,
            "unreadable": sum(s.unreadable for s in segments),
            "dead_letters": sum(len(s.letters) for s in segments),
            "prompt_tokens": sum(c.prompt_tokens for c in done),
            "cached_tokens": sum(c.cached_tokens for c in done),
            "completion_tokens": sum(c.completion_tokens for c in done),
            "finish_reasons": dict(sorted(reasons.items())),
            "peak_memory": peak_rss(),
        }
        if self._config.names_rows:
            self._remember(block, segments)
        self._committer.commit(block.begun.plan.id, segments, header)
        if self._config.names_rows:
            forget_others(self._store, block.begun.plan)
        return header, sorted({s.segment.fingerprint for s in segments if s.segment.parts > 1})

    def _remember(self, block: _Block, segments: list[OutputSegment]) -> None:
        offset = 0
        for read, written in zip(block.segments, segments, strict=True):
            rows = range(offset, offset + read.table.num_rows)
            offset = rows.stop
            found = [block.outcomes[row] for row in rows]
            ids = [x.custom_id for x in found if isinstance(x, Completion)]
            remember(self._store, written.segment, ids)

    @staticmethod
    def _outputs(result: tuple[dict, list[str]]) -> Iterator[Any]:
        header, parts = result
        yield header
        for fingerprint in parts:
            yield beam.pvalue.TaggedOutput("parts", (fingerprint, b""))
