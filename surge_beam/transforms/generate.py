"""Generation within a pipeline: texts, rows or Arrow batches in, the same with completions out.

Rows are packed into blocks that wait for the answers to their prompts; what is decoded is the
prompts alone. So batches stay whole, every type survives, and a row is shuffled no more often
where it is decoded in rounds. Within all this there is one window, the global one: a row's own
window and timestamp travel in its block.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import apache_beam as beam
import pyarrow as pa
import xxhash
from apache_beam.coders import BytesCoder, VarIntCoder
from apache_beam.metrics import Metrics
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec
from apache_beam.transforms.window import (
    BoundedWindow,
    GlobalWindow,
    GlobalWindows,
    TimestampCombiner,
)
from apache_beam.typehints import KV
from apache_beam.utils.timestamp import MAX_TIMESTAMP, Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from surge_beam.records import (
    Completion,
    DeadLetter,
    EngineConfig,
    Request,
    SamplingParams,
    SurgeError,
    pack,
    unpack,
)
from surge_beam.transforms.batch_lines import not_completed
from surge_beam.transforms.decode import DecodeRounds, RoundConfig
from surge_beam.transforms.embed import ACCELERATOR, LETTERS, NAMESPACE
from surge_beam.transforms.files import absolute_model
from surge_beam.transforms.generate_files import COLUMNS
from surge_beam.transforms.metric_ids import keep_metric_ids_apart
from surge_beam.transforms.plan_files import keyed
from surge_beam.transforms.prefix_partition import MAX_DELAY_SECS, BatchLimits
from surge_beam.transforms.prompt_batch import PIECE_ROWS, decode, encode, encoded_batches
from surge_beam.transforms.prompts import Prompt, PromptConfig, Refusal, prompt_of
from surge_beam.transforms.superbatch import MAX_BYTES, Row, as_dict, refuse_dask, split
from surge_beam.transforms.tokenizing import Tokenizing

# groups of bounded input in which equal rows meet; one is sorted in a worker's memory
SHARDS = 256
BLOCK_ITEMS = 256
BLOCK_BYTES = 1 << 20
DIGEST_BYTES = 16


class GenerateResult(NamedTuple):
    """What ``Generate`` gives.

    Attributes:
      rows: what came in, with its completions.
      dead_letters: PCollection[DeadLetter], the rows that could not be completed.
    """

    rows: beam.PCollection
    dead_letters: beam.PCollection[DeadLetter]


class Generate(beam.PTransform):
    """Completes the prompts of rows or of Arrow batches, those that share prefixes together.

    Rows (dicts, ``beam.Row``, named tuples) come out as dicts with all they held, whatever its
    type, and ``completion``, ``finish_reason``, ``prompt_tokens``, ``cached_tokens`` and
    ``completion_tokens`` (see ``Completion``). A text is a row whose only column is the prompt
    column (``prompt`` under a template). Batches (``pa.RecordBatch``, ``pa.Table``) come out as
    ``pa.RecordBatch``, cut anew, their rows in order. A column of an added one's name is replaced.
    Windows and timestamps are kept; the order of elements is not.

    A prompt that is null, missing, empty or no text, one that fills the model's context, a template
    or a chat template that fails, an empty id, and a row on which the engine fails, is a dead
    letter. Rows in = rows out + dead letters.

    Bounded input is brought together as a whole (``PartitionByPrefix``), and equal rows are told
    apart by number: the same rows give the same completions in every run, sampled ones included.
    Unbounded input is decoded as it comes, those prompts together that begin alike and arrive
    within ``max_delay_secs``; there a sampled row without an id draws anew in every run.

    Args:
      prompt_column: holds raw prompts; ``prompt`` if neither of the next two is given.
      template: text of a Jinja template over a row's columns; gives a raw prompt.
      messages_column: holds conversations, lists of ``role`` and ``content`` or their JSON text,
        which go through the model's chat template.
      id_column: names a row; a sampled row's random numbers come from it. Rows of one id are
        decoded one after the other; without it rows are named by their content.
      model, engine, dtype, device, max_sequences, kv_bytes, host_kv_bytes, max_context, schedule,
        admission, kernels, profile, seed: see ``EngineConfig``. ``device="cuda"`` fails
        without one.
      sampling: how every row is decoded.
      rounds, slice_tokens: see ``GenerateConfig``.
      ranges: see ``PartitionByPrefix``.
      batch: limits of what is decoded together.
      max_delay_secs: seconds a prompt of unbounded input waits at most for others of its kind, in
        processing time; in every round anew.
      accelerator: Beam's resource hint for the decoding steps; unused with ``device="cpu"``. None
        gives no hint.

    Raises:
      SurgeError: settings that contradict each other or are out of bounds; on DaskRunner; while
        running, an element that is no row, a model that cannot be loaded, or a device that is
        missing.
    """

    def __init__(
        self,
        *,
        prompt_column: str | None = None,
        template: str | None = None,
        messages_column: str | None = None,
        id_column: str | None = None,
        model: str = EngineConfig.model,
        engine: str = "native",
        sampling: SamplingParams | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_sequences: int = EngineConfig.max_sequences,
        kv_bytes: int | None = None,
        host_kv_bytes: int = 0,
        max_context: int | None = None,
        schedule: str = EngineConfig.schedule,
        admission: str = EngineConfig.admission,
        kernels: str = EngineConfig.kernels,
        profile: str | None = None,
        seed: int = 0,
        rounds: int = 1,
        slice_tokens: int = RoundConfig.slice_tokens,
        ranges: int | None = None,
        batch: BatchLimits | None = None,
        max_delay_secs: float = MAX_DELAY_SECS,
        accelerator: str | None = ACCELERATOR,
    ) -> None:
        super().__init__()
        for name, value in (("rounds", rounds), ("slice_tokens", slice_tokens), ("ranges", ranges)):
            if value is not None and value < 1:
                raise SurgeError(f"{name} must be at least 1, not {value}")
        if max_delay_secs <= 0:
            raise SurgeError(f"max_delay_secs must be above 0, not {max_delay_secs}")
        if prompt_column is None and template is None and messages_column is None:
            prompt_column = "prompt"
        self._prompts = PromptConfig(
            column=prompt_column,
            template=template,
            messages=messages_column,
            id_column=id_column,
            sampling=sampling or SamplingParams(),
        )
        self._rounds = RoundConfig(
            engine=EngineConfig(
                model=absolute_model(model),
                engine=engine,
                dtype=dtype,
                device=device,
                require_accelerator=device == "cuda",
                max_sequences=max_sequences,
                kv_bytes=kv_bytes,
                host_kv_bytes=host_kv_bytes,
                max_context=max_context,
                schedule=schedule,
                admission=admission,
                kernels=kernels,
                profile=profile,
                seed=seed,
            ),
            rounds=rounds,
            slice_tokens=slice_tokens,
            ranges=ranges,
            batch=batch or BatchLimits(),
            max_delay_secs=max_delay_secs,
            accelerator=accelerator or "",
        )

    def expand(self, pcoll: beam.PCollection) -> GenerateResult:
        refuse_dask(pcoll.pipeline)
        items = (
            pcoll
            | "Pack" >> beam.ParDo(_Pack(self._prompts)).with_output_types(tuple[int, bytes])
            # what waits keeps the watermark from passing the rows that come out in the end
            | "OneWindow"
            >> beam.WindowInto(
                GlobalWindows(), timestamp_combiner=TimestampCombiner.OUTPUT_AT_EARLIEST
            )
        )
        if pcoll.is_bounded:
            blocks = (
                items
                | "MeetEqualRows" >> beam.GroupByKey()
                | "Block" >> beam.ParDo(_Block()).with_output_types(bytes)
            )
        else:
            blocks = (
                items
                | "BlockAsTheyCome" >> beam.ParDo(_BlockAsTheyCome()).with_output_types(bytes)
                # so that a retry of what follows sees the same names
                | "FreezeNames" >> beam.Reshuffle()
            )
        tokenized = blocks | "Tokenize" >> beam.ParDo(
            _Tokenize(self._prompts, self._rounds.engine)
        ).with_outputs("waiting", main="prompts")
        tokenized.prompts.element_type = bytes
        answers = tokenized.prompts | "Decode" >> DecodeRounds(self._rounds)
        outcomes = (keyed(tokenized.waiting, KV[str, bytes]), answers) | "Outcomes" >> (
            beam.Flatten()
        )
        if pcoll.is_bounded:
            outcomes = outcomes | "JoinOutcomes" >> beam.GroupByKey()
        join = _Join() if pcoll.is_bounded else _JoinAsTheyCome()
        joined = outcomes | "Join" >> _IntoWindows(join, pcoll.windowing).with_output_types(
            _row_type(pcoll)
        ).with_outputs(LETTERS, main="rows")
        letters = joined[LETTERS]
        letters.element_type = DeadLetter
        return GenerateResult(joined.rows, letters)


def _row_type(pcoll: beam.PCollection) -> Any:
    given = pcoll.element_type
    if given in (pa.RecordBatch, pa.Table):
        return pa.RecordBatch
    return dict if given is str else Any


class _IntoWindows(beam.ParDo):
    """A ParDo whose function places its outputs in windows of a windowing of their own."""

    def __init__(self, function: beam.DoFn, windowing: Any) -> None:
        super().__init__(function)
        self._into = windowing

    def get_windowing(self, inputs: Any) -> Any:
        return self._into


class _Item(NamedTuple):
    """An element on its way.

    Attributes:
      value: a row, or the bytes of an encoded Arrow batch.
    """

    value: Row | bytes
    timestamp: Timestamp
    window: BoundedWindow


class _Pack(beam.DoFn):
    """Packs elements behind a digest of their content, which is the same in every run."""

    def __init__(self, prompts: PromptConfig) -> None:
        self._text_column = prompts.column or prompts.messages or "prompt"

    def process(
        self,
        element: Any,
        window: Any = beam.DoFn.WindowParam,
        timestamp: Any = beam.DoFn.TimestampParam,
    ) -> Iterator[tuple[int, bytes]]:
        for value, content in self._values(element):
            digest = xxhash.xxh3_128_digest(content)
            data = digest + pack((value, timestamp, window))
            yield int.from_bytes(digest[:2], "big") % SHARDS, data

    def _values(self, element: Any) -> Iterator[tuple[Row | bytes, bytes]]:
        if isinstance(element, (pa.RecordBatch, pa.Table)):
            batches = element.to_batches() if isinstance(element, pa.Table) else [element]
            for batch in batches:
                for piece in split(batch, PIECE_ROWS, MAX_BYTES):
                    data = encode(piece)
                    yield data, data
            return
        row = {self._text_column: element} if isinstance(element, str) else as_dict(element)
        yield row, _record(row).encode()


def _unpack(data: bytes) -> _Item:
    return _Item(*unpack(data[DIGEST_BYTES:]))


@dataclasses.dataclass(frozen=True)
class _Named:
    """A block.

    Attributes:
      names: one an item, unlike any other in the pipeline.
      items: as ``_Pack`` packed them.
    """

    names: list[str]
    items: list[bytes]


class _Block(beam.DoFn):
    """Cuts a group into blocks. Equal rows are numbered, so that each has a name of its own."""

    def process(self, grouped: tuple[int, Iterable[bytes]]) -> Iterator[bytes]:
        # in the order of digest and content, whatever the order in which a retry sees them
        ordered = itertools.groupby(sorted(grouped[1]), lambda data: data[:DIGEST_BYTES])
        names, items, size = list[str](), list[bytes](), 0
        for digest, equal in ordered:
            for number, data in enumerate(equal):
                names.append(f"{digest.hex()}-{number}")
                items.append(data)
                size += len(data)
                if _is_full(items, size):
                    yield pack(_Named(names, items))
                    names, items, size = [], [], 0
        if items:
            yield pack(_Named(names, items))


def _is_full(items: list[bytes], size: int) -> bool:
    return len(items) >= BLOCK_ITEMS or size >= BLOCK_BYTES


class _BlockAsTheyCome(beam.DoFn):
    """Makes blocks of a bundle's items, under names drawn at random."""

    def start_bundle(self) -> None:
        self._items: list[bytes] = []
        self._size = 0
        self._earliest: Timestamp = MAX_TIMESTAMP

    def process(
        self, keyed_item: tuple[int, bytes], timestamp: Any = beam.DoFn.TimestampParam
    ) -> Iterator[WindowedValue]:
        self._items.append(keyed_item[1])
        self._size += len(keyed_item[1])
        self._earliest = min(self._earliest, timestamp)
        if _is_full(self._items, self._size):
            yield from self._flush()

    def finish_bundle(self) -> Iterator[WindowedValue]:
        if self._items:
            yield from self._flush()

    def _flush(self) -> Iterator[WindowedValue]:
        drawn = uuid.uuid4().hex
        names = [f"{drawn}-{i}" for i in range(len(self._items))]
        block = pack(_Named(names, self._items))
        yield WindowedValue(block, self._earliest, (GlobalWindow(),))
        self.start_bundle()


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """A block that waits for its answers.

    Attributes:
      items: as ``_Pack`` packed them.
      rows: in all items.
      refused: rows without a prompt, and why.
    """

    items: list[bytes]
    rows: int
    refused: dict[int, Refusal]


class _Tokenize(beam.DoFn):
    """Turns the rows of a block into prompts of token ids."""

    def __init__(self, prompts: PromptConfig, engine: EngineConfig) -> None:
        self._prompts, self._engine = prompts, engine
        self._columns = {*prompts.required_columns, *prompts.optional_columns}

    def setup(self) -> None:
        keep_metric_ids_apart()
        self._tokenizing = Tokenizing(self._engine)

    def process(self, data: bytes) -> Iterator[Any]:
        block: _Named = unpack(data)
        owner = block.names[0]
        prompts: list[Prompt | Refusal] = []
        for name, item in zip(block.names, map(_unpack, block.items), strict=True):
            if isinstance(item.value, bytes):
                rows = _rows(decode(item.value), self._columns)
                prompts += (
                    prompt_of(self._prompts, row, f"{name}-{i}") for i, row in enumerate(rows)
                )
            else:
                prompts.append(prompt_of(self._prompts, item.value, name))
        requests = self._tokenizing.requests(prompts)
        refused = {i: r for i, r in enumerate(requests) if isinstance(r, Refusal)}
        waiting = _Waiting(block.items, len(requests), refused)
        yield TaggedOutput("waiting", (owner, pack(waiting)))
        accepted = [(i, r) for i, r in enumerate(requests) if isinstance(r, Request)]
        yield from encoded_batches(owner, accepted)


def _rows(batch: pa.RecordBatch, names: set[str]) -> list[Row]:
    """Some columns of a batch as rows."""
    columns = {
        name: batch.column(at).to_pylist()
        for at, name in enumerate(batch.schema.names)
        if name in names
    }
    return [{name: column[i] for name, column in columns.items()} for i in range(batch.num_rows)]


class _Joining(beam.DoFn):
    """Puts completions beside the rows of a block, each in its own window."""

    def __init__(self) -> None:
        self._rows = Metrics.counter(NAMESPACE, "rows")
        self._letters = Metrics.counter(NAMESPACE, "dead_letters")

    def setup(self) -> None:
        keep_metric_ids_apart()

    def _finish(self, owner: str, values: Iterable[bytes]) -> Iterator[Any]:
        waiting: _Waiting | None = None
        outcomes: dict[int, Completion | _Fault] = {}
        for value in map(unpack, values):
            if isinstance(value, _Waiting):
                waiting = value
                for row, refusal in value.refused.items():
                    outcomes[row] = _Fault("read", refusal.error, refusal.message)
            else:
                for answer in value:
                    outcomes.setdefault(answer.row, _outcome(answer.completion))
        if waiting is None:
            raise SurgeError(f"block {owner} has completions, but no rows")
        if outcomes.keys() != set(range(waiting.rows)):
            raise SurgeError(
                f"block {owner} has {waiting.rows} rows, but {len(outcomes)} of them came to an end"
            )
        at = 0
        for item in map(_unpack, waiting.items):
            if isinstance(item.value, bytes):
                batch = decode(item.value)
                found = [outcomes[at + i] for i in range(batch.num_rows)]
                at += batch.num_rows
                outputs: Iterable[Any] = _batch_outputs(batch, found)
            else:
                outputs = [_row_output(item.value, outcomes[at])]
                at += 1
            for output in outputs:
                placed = WindowedValue(output, item.timestamp, (item.window,))
                is_letter = isinstance(output, DeadLetter)
                yield TaggedOutput(LETTERS, placed) if is_letter else placed
        failed = sum(isinstance(outcome, _Fault) for outcome in outcomes.values())
        self._rows.inc(waiting.rows - failed)
        self._letters.inc(failed)


class _Join(_Joining):
    def process(self, joined: tuple[str, Iterable[bytes]]) -> Iterator[Any]:
        yield from self._finish(*joined)


class _JoinAsTheyCome(_Joining):
    """Holds a block and its answers in state until all are there.

    Nothing holds the watermark but the prompts that are still under way; their timestamps are no
    later than the block's.
    """

    VALUES = beam.DoFn.StateParam(BagStateSpec("values", BytesCoder()))
    # prompts less answers; it is 0 only when the block is there and all its answers are
    LEFT = beam.DoFn.StateParam(ReadModifyWriteStateSpec("left", VarIntCoder()))

    def process(
        self, element: tuple[str, bytes], values: Any = VALUES, left: Any = LEFT
    ) -> Iterator[Any]:
        owner, data = element
        value = unpack(data)
        count = left.read() or 0
        if isinstance(value, _Waiting):
            count += value.rows - len(value.refused)
        else:
            count -= len(value)
        if count:
            values.add(data)
            left.write(count)
            return
        held = [*values.read(), data]
        values.clear()
        left.clear()
        yield from self._finish(owner, held)


@dataclasses.dataclass(frozen=True)
class _Fault:
    """Why a row has no completion: what its dead letter says."""

    stage: str
    error: str
    message: str

    def letter(self, row: Row) -> DeadLetter:
        return DeadLetter(
            stage=self.stage, error=self.error, message=self.message, record=_record(row)
        )


def _outcome(completion: Completion) -> Completion | _Fault:
    if completion.finish_reason in ("error", "capacity", "cancelled"):
        failed = not_completed(completion)
        return _Fault("decode", failed.code, failed.message)
    return completion


def _row_output(row: Row, outcome: Completion | _Fault) -> Row | DeadLetter:
    if isinstance(outcome, _Fault):
        return outcome.letter(row)
    return {**row, **dict(zip(COLUMNS.names, _values(outcome), strict=True))}


def _batch_outputs(
    batch: pa.RecordBatch, outcomes: list[Completion | _Fault]
) -> Iterator[pa.RecordBatch | DeadLetter]:
    faults = {i: x for i, x in enumerate(outcomes) if isinstance(x, _Fault)}
    done = {i: x for i, x in enumerate(outcomes) if isinstance(x, Completion)}
    if faults:
        records = batch.take(pa.array(list(faults), pa.int64())).to_pylist()
        yield from (x.letter(row) for row, x in zip(records, faults.values(), strict=True))
        batch = batch.take(pa.array(list(done), pa.int64()))
    if done:
        kept = [i for i, name in enumerate(batch.schema.names) if name not in COLUMNS.names]
        added = zip(*map(_values, done.values()), strict=True)
        columns = [batch.column(i) for i in kept]
        columns += [pa.array(x, f.type) for f, x in zip(COLUMNS, added, strict=True)]
        fields = [*(batch.schema.field(i) for i in kept), *COLUMNS]
        schema = pa.schema(fields, metadata=batch.schema.metadata)
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _values(completion: Completion) -> tuple[Any, ...]:
    """What is added to a row, in the order of ``COLUMNS``."""
    return (
        completion.text,
        completion.finish_reason,
        completion.prompt_tokens,
        completion.cached_tokens,
        completion.completion_tokens,
    )


def _record(row: Row) -> str:
    """A row as JSON, or near it; valid Unicode."""
    try:
        record = json.dumps(row, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        record = str(row)
    return record.encode("utf-8", "replace").decode()
