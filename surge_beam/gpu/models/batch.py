"""One micro-batch without padding: sequences one after another, longest first."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

_FEW, _SMALL_STEP, _STEP = 512, 16, 64


@dataclasses.dataclass(frozen=True)
class Run:
    """Neighbouring sequences of equal length.

    Attributes:
      start: first token of the run in the packed tokens.
      rows: sequences in it.
      length: tokens of each.
    """

    start: int
    rows: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.length


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """Packed tokens of n sequences, T tokens in all.

    Attributes:
      ids: token ids, int64 [T]. On a CPU, T is rounded up: oneDNN keeps memory for every number
        of rows it has met. The tokens after the last sequence are filling, whose states mean
        nothing.
      positions: position of each token in its own sequence from 0, int64 [T].
      offsets: first token of each sequence and the end of the last, int32 [n + 1], on the device.
      runs: the sequences as runs of equal length; they cover all but the filling, in order.
    """

    ids: Tensor
    positions: Tensor
    offsets: Tensor
    runs: tuple[Run, ...]

    @property
    def longest(self) -> int:
        return max(run.length for run in self.runs)


def pack(
    flat_ids: np.ndarray, offsets: np.ndarray, rows: np.ndarray, device: torch.device
) -> PackedBatch:
    """Gathers rows of a flat token array; rows must be sorted by length.

    Args:
      flat_ids: token ids of all texts, int32 [all tokens].
      offsets: first token of each text and the end, int64 [texts + 1].
      rows: the texts to take, integers [n], n > 0.
      device: where the tensors go.
    """
    starts = offsets[rows]
    lengths = offsets[rows + 1] - starts
    ends = np.cumsum(lengths)
    begins = ends - lengths
    positions = np.arange(ends[-1], dtype=np.int64) - np.repeat(begins, lengths)
    ids = flat_ids[np.repeat(starts, lengths) + positions].astype(np.int64)
    if device.type == "cpu":
        filling = -len(ids) % (_STEP if len(ids) >= _FEW else _SMALL_STEP)
        ids, positions = np.pad(ids, (0, filling), "edge"), np.pad(positions, (0, filling))
    cuts = np.flatnonzero(np.diff(lengths)) + 1
    firsts = np.concatenate([[0], cuts])
    counts = np.diff(np.concatenate([firsts, [len(rows)]]))
    runs = tuple(
        Run(start, count, length)
        for start, count, length in zip(
            begins[firsts].tolist(), counts.tolist(), lengths[firsts].tolist(), strict=True
        )
    )
    bounds = np.concatenate([begins, ends[-1:]]).astype(np.int32)
    return PackedBatch(
        ids=torch.from_numpy(ids).to(device, non_blocking=True),
        positions=torch.from_numpy(positions).to(device, non_blocking=True),
        offsets=torch.from_numpy(bounds).to(device, non_blocking=True),
        runs=runs,
    )
