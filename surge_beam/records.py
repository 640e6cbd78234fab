"""What flows between stages: Arrow schemas, plans, batches and dead letters.

Everything here is a small frozen value. It imports neither Beam's runners nor torch, and every
other module of the package may import it.
"""

from __future__ import annotations

import dataclasses
import pickle
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


@dataclasses.dataclass(frozen=True)
class SuperBatchPlan:
    """Which rows make one SuperBatch. Small; this is what is shuffled."""

    id: str
    files: tuple[SourceFile, ...]
    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.segments)


def pack(value: Any) -> bytes:
    """Pickles and compresses a value of this module, as an element between stages."""
    data = pickle.dumps(value, protocol=5)
    return len(data).to_bytes(8, "little") + pa.compress(data, "zstd", asbytes=True)


def unpack(data: bytes) -> Any:
    """The value that ``pack`` packed."""
    size = int.from_bytes(data[:8], "little")
    return pickle.loads(pa.decompress(data[8:], size, "zstd", asbytes=True))
