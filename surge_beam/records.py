"""What flows between stages: Arrow schemas, plans, batches and dead letters.

Everything here is a small frozen value. It imports neither Beam's runners nor torch, and every
other module of the package may import it.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import pickle
from collections.abc import Iterable
from typing import Any

import pyarrow as pa


class SurgeError(Exception):
    """Base of the errors this package raises on purpose; its text is meant for a person."""


class BadInputError(SurgeError):
    """An input row or file that cannot be used, under ``on_bad_input='fail'``; one line of text."""

    def __init__(self, message: str):
        super().__init__(message.replace("\n", "\\n").replace("\r", "\\r"))


class RefusedError(SurgeError):
    """A run that may not start: another job holds the output, or its configuration differs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The recipe of an encoder. The recipe travels in the job graph; the model never does.

    Attributes:
      model: a sentence-transformers folder, a Hugging Face name, or ``dummy:D`` for a
        deterministic stand-in of D dimensions that loads no torch.
      dtype: ``auto`` (float32 on CPU, bfloat16 on CUDA), ``float32``, ``bfloat16``, ``float16``.
      device: ``auto`` (CUDA where there is one), ``cpu`` or ``cuda``.
      prompt: text put before every row; None takes the model's own default prompt.
      truncate_dim: keep the first N dimensions (then normalise again where the model does).
      max_padded_tokens: tokens in one forward pass; None chooses by device.
      dedupe: encode identical texts of a SuperBatch once.
      require_accelerator: fail in setup where the device is not CUDA.
    """

    model: str = "all-MiniLM-L6-v2"
    dtype: str = "auto"
    device: str = "auto"
    prompt: str | None = None
    truncate_dim: int | None = None
    max_padded_tokens: int | None = None
    dedupe: bool = True
    require_accelerator: bool = False


DEAD_LETTER_SCHEMA = pa.schema(
    [
        ("stage", pa.string()),
        ("error", pa.string()),
        ("message", pa.string()),
        ("file", pa.string()),
        ("row", pa.int64()),
        ("partition", pa.string()),
        ("record", pa.string()),
        ("attempts", pa.int32()),
    ]
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """A row (or a whole file) that could not be used, with where it came from.

    Attributes:
      stage: ``read``, ``encode`` or ``write``.
      error: the error's kind, such as ``NullText`` or an exception's class name.
      message: one sentence for a person.
      file: the input file as it was listed; None for rows that came from elsewhere.
      row: row of a Parquet file from 0, or line of a text file from 1; None for a whole file.
      partition: the partition's folder below the output, where known.
      record: the row as JSON, where there is one.
      attempts: how often the row was tried.
    """

    stage: str
    error: str
    message: str
    file: str | None = None
    row: int | None = None
    partition: str | None = None
    record: str | None = None
    attempts: int = 1


def dead_letter_table(letters: list[DeadLetter]) -> pa.Table:
    """Dead letters as a table of ``DEAD_LETTER_SCHEMA``; of a file name that is not UTF-8 the odd
    bytes come out as ``\\xff``.
    """
    rows = [{k: _utf8(v) for k, v in dataclasses.asdict(x).items()} for x in letters]
    return pa.Table.from_pylist(rows, schema=DEAD_LETTER_SCHEMA)


def _utf8(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """An input file as a worker opens it.

    Attributes:
      url: path or URL of the input file.
      name: its path below the input's root.
      key: digest of the name.
      fingerprint: digest of name, size and version.
      format: ``parquet``, ``jsonl`` or ``csv``.
      compression: fsspec's name of the codec, or None.
    """

    url: str
    name: str
    key: str
    fingerprint: str
    format: str
    compression: str | None

    @property
    def staged(self) -> bool:
        """Whether it is read through a Parquet copy, since it has no random access by row."""
        return self.format != "parquet" or self.compression is not None


@dataclasses.dataclass(frozen=True)
class Slice:
    """Rows ``[start, start + rows)`` of file ``file`` of the plan's list."""

    file: int
    start: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Segment:
    """A partition, or one numbered part of it, within a SuperBatch.

    Attributes:
      folder: the partition's folder below the output.
      values: its exact key values, as JSON.
      fingerprint: digest of the input rows of the whole partition.
      part, parts: which part this is, of how many.
      rows: rows of this part.
      slices: where they are, in order.
      replaces: the output holds this partition already, from an earlier state of the input.
      lost: rows planned that were found to be undecodable before, and are in no slice.
      columns: those that every partition of the run gets, see ``transforms.columns``; empty where
        all files have the same.
    """

    folder: str
    values: str
    fingerprint: str
    part: int
    parts: int
    rows: int
    slices: tuple[Slice, ...]
    replaces: bool = False
    lost: int = 0
    columns: bytes = b""


@dataclasses.dataclass(frozen=True)
class SuperBatchPlan:
    """Which rows make one SuperBatch. Small; this is what is shuffled."""

    id: str
    files: tuple[SourceFile, ...]
    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.segments)


def _integers(name: str, values: Iterable[Any]) -> tuple[int, ...]:
    """A tuple of Python integers. Raises SurgeError if the values are something else."""
    try:
        return tuple(map(operator.index, values))
    except TypeError as error:
        raise SurgeError(f"{name} must be integers: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a completion's tokens are chosen and when it ends. The defaults decode greedily.

    Attributes:
      max_tokens: most tokens decoded, at least 1; None goes on to the model's context length.
      temperature: 0 takes the likeliest token; else logits are divided by it.
      top_k: keep the k likeliest tokens; 0 keeps all.
      top_p: keep the fewest likeliest tokens whose probabilities reach this sum, in (0, 1].
      min_p: drop tokens less probable than this share of the likeliest one's, in [0, 1].
      repetition_penalty: logits of tokens seen in prompt or output are divided by it if
        positive, multiplied if negative; 1 changes nothing.
      stop: texts that end the completion; it is cut before the earliest of them.
      stop_token_ids: tokens that end it, besides the model's own.
      ignore_eos: go on after the model's own end tokens.
      seed: of this row alone; None takes the engine's seed.
      logprobs: report the log-probability of every token, and of so many likeliest ones; None
        reports none.
      end_on_repetition: end a completion that has run into a loop.
    """

    max_tokens: int | None = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    end_on_repetition: bool = False

    def __post_init__(self) -> None:
        def reject(name: str, wanted: str) -> None:
            raise SurgeError(f"{name} must be {wanted}, not {getattr(self, name)!r}")

        for name in ("max_tokens", "top_k", "seed", "logprobs"):
            value = getattr(self, name)
            if value is None and name != "top_k":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                reject(name, "an integer")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                reject(name, "a number")
        if isinstance(self.stop, str) or not all(isinstance(text, str) for text in self.stop):
            reject("stop", "a tuple of texts")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", _integers("stop_token_ids", self.stop_token_ids))
        if self.max_tokens is not None and self.max_tokens < 1:
            reject("max_tokens", "at least 1")
        if not (0.0 <= self.temperature < float("inf")):
            reject("temperature", "a number from 0 up")
        if self.top_k < 0:
            reject("top_k", "0 or more")
        if not (0.0 < self.top_p <= 1.0):
            reject("top_p", "above 0 and at most 1")
        if not (0.0 <= self.min_p <= 1.0):
            reject("min_p", "from 0 to 1")
        if not (0.0 < self.repetition_penalty < float("inf")):
            reject("repetition_penalty", "above 0")
        if not all(self.stop):
            reject("stop", "texts that are not empty")
        if self.logprobs is not None and self.logprobs < 0:
            reject("logprobs", "0 or more")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to complete.

    Attributes:
      custom_id: names the row; a sampled row's random numbers depend on it.
      prompt_ids: token ids of the prompt.
      sampling: how to decode it.
      priority: higher ones are admitted first and parked last.
    """

    custom_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    priority: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.custom_id, str):
            raise SurgeError(f"custom_id must be a text, not {self.custom_id!r}")
        if not isinstance(self.priority, int):
            raise SurgeError(f"priority must be an integer, not {self.priority!r}")
        object.__setattr__(self, "prompt_ids", _integers("prompt_ids", self.prompt_ids))


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithm of a decoded token's probability before any filtering, and of the
    likeliest ones, likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """What became of a request.

    Attributes:
      custom_id: the request's.
      token_ids: the tokens decoded, an end token included.
      text: their text without special tokens, cut before a stop text.
      finish_reason: ``stop``, ``length`` (its own limit or the context), ``repetition``,
        ``capacity`` (it can never fit the KV pool), ``cancelled`` or ``error``.
      prompt_tokens, completion_tokens: counts; the end token counts.
      cached_tokens: prompt tokens whose KV was there already, at its first prefill.
      logprobs: one a token, where asked for.
      parks, evictions: how often its KV went to the host, or was dropped.
      error: the reason, where finish_reason is ``error`` or ``capacity``.
    """

    custom_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    parks: int = 0
    evictions: int = 0
    error: str | None = None


CHECKPOINT_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A sequence in its portable form, tokens only: another process finishes it with the same
    tokens (BatchGen, arXiv 2606.21712).

    Its random numbers come from (seed, custom_id, position), so their state is that alone.

    Attributes:
      request: the request as submitted; its seed is filled in.
      output_ids: tokens decoded so far.
      baseline: of these, how many an earlier prefill has taken into the prompt's KV; a later
        prefill appends only what lies beyond.
      cached_tokens, parks, evictions: as in ``Completion``, so far.
      logprobs: so far.
      version: of this layout.
    """

    request: Request
    output_ids: tuple[int, ...] = ()
    baseline: int = 0
    cached_tokens: int = 0
    parks: int = 0
    evictions: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    version: int = CHECKPOINT_VERSION

    def to_json(self) -> str:
        """As JSON text, for a file or an element between stages."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Checkpoint:
        """Raises SurgeError if the text is no checkpoint of this version."""
        try:
            fields = json.loads(text)
            version = fields["version"]
            if version != CHECKPOINT_VERSION:
                raise SurgeError(
                    f"a checkpoint of version {version} cannot be read; this is version "
                    f"{CHECKPOINT_VERSION}"
                )
            request = fields.pop("request")
            sampling = request.pop("sampling")
            fields["output_ids"] = tuple(map(operator.index, fields["output_ids"]))
            fields["logprobs"] = tuple(
                TokenLogprob(x["token_id"], x["logprob"], tuple((i, p) for i, p in x["top"]))
                for x in fields["logprobs"]
            )
            checkpoint = cls(
                request=Request(sampling=SamplingParams(**sampling), **request), **fields
            )
            for name in ("baseline", "cached_tokens", "parks", "evictions"):
                if operator.index(getattr(checkpoint, name)) < 0:
                    raise ValueError(f"{name} is negative")
            if checkpoint.baseline > len(checkpoint.output_ids):
                raise ValueError("its baseline lies beyond its output")
            return checkpoint
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise SurgeError(f"not a checkpoint: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The recipe of a decode engine; a worker builds the engine from it.

    Attributes:
      model: a Hugging Face folder, a name of a bundled model, or ``dummy`` for a stand-in
        without torch.
      engine: ``native``, or ``vllm``, which also runs families that the native one lacks.
      dtype: ``auto`` (float32 on CPU, bfloat16 on CUDA), ``float32``, ``bfloat16``, ``float16``.
      device: ``auto``, ``cpu`` or ``cuda``.
      require_accelerator: fail at start where the device is not CUDA.
      max_sequences: slots N, sequences decoded at once.
      page_size: tokens of a KV page, a power of two.
      kv_bytes: bytes of the KV pool; None takes a fraction of the memory that is free.
      host_kv_bytes: bytes of host copies of parked sequences; 0 evicts instead of parking.
      max_prefill_tokens: prompt tokens in one step; a longer prompt is prefilled in chunks.
      max_context: most tokens of prompt and completion; None takes the model's own.
      schedule: ``eb``, ``mb`` or ``eb+``.
      share_prefixes: keep and share the KV of equal prefixes.
      admission: who gets a free slot, among equal priorities. ``prefix``: whoever shares most with
        the batch, which is always filled; ``learned`` and ``cost`` stop before one whose foreign
        prefix slows the batch down, as learnt from its steps or computed from the profile (without
        one ``cost`` never stops); ``fcfs``: first come, first served, as all of them are without
        ``share_prefixes``.
      kernels: ``auto`` takes the project's own kernels where the device can run them; ``torch``
        takes torch's operations alone, the reference.
      profile: JSON file of step-time models that ``calibrate`` wrote; None measures none and
        takes the cautious defaults.
      seed: of rows without their own.
    """

    model: str = "SmolLM2-135M-Instruct"
    engine: str = "native"
    dtype: str = "auto"
    device: str = "auto"
    require_accelerator: bool = False
    max_sequences: int = 32
    page_size: int = 16
    kv_bytes: int | None = None
    host_kv_bytes: int = 0
    max_prefill_tokens: int = 1024
    max_context: int | None = None
    schedule: str = "eb+"
    share_prefixes: bool = True
    admission: str = "prefix"
    kernels: str = "auto"
    profile: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.engine not in ("native", "vllm"):
            raise SurgeError(f"engine must be native or vllm, not {self.engine!r}")
        if self.schedule not in ("eb", "mb", "eb+"):
            raise SurgeError(f"schedule must be eb, mb or eb+, not {self.schedule!r}")
        if self.admission not in ("prefix", "learned", "cost", "fcfs"):
            raise SurgeError(
                f"admission must be prefix, learned, cost or fcfs, not {self.admission!r}"
            )
        if self.kernels not in ("auto", "torch"):
            raise SurgeError(f"kernels must be auto or torch, not {self.kernels!r}")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise SurgeError(f"page_size must be a power of two, not {self.page_size}")
        for name in ("max_sequences", "max_prefill_tokens", "kv_bytes", "max_context"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise SurgeError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.host_kv_bytes < 0:
            raise SurgeError(f"host_kv_bytes must be 0 or more, not {self.host_kv_bytes}")


def pack(value: Any) -> bytes:
    """Pickles and compresses a value of this module, as an element between stages."""
    data = pickle.dumps(value, protocol=5)
    return len(data).to_bytes(8, "little") + pa.compress(data, "zstd", asbytes=True)


def unpack(data: bytes) -> Any:
    """The value that ``pack`` packed."""
    size = int.from_bytes(data[:8], "little")
    return pickle.loads(pa.decompress(data[8:], size, "zstd", asbytes=True))
