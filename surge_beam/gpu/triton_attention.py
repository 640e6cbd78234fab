"""Attention over the paged KV pool by Triton kernels, from the same plan as the torch path."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from surge_beam.gpu.attention_plan import AttentionPlan, offsets
from surge_beam.gpu.kernels.attention_triton import (
    INTERPRETED,
    MAX_HEAD_DIM,
    UNIT_FIELDS,
    Tile,
    launch_append,
    launch_attend,
    launch_merge,
    tiles,
)
from surge_beam.gpu.work_units import WorkUnits, work_units
from surge_beam.records import SurgeError

_ALL_KEYS = 2**31 - 1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNED = 4  # int32 numbers: where a kernel's argument begins decides how it was compiled


@dataclasses.dataclass(frozen=True)
class Room:
    """Sizes that plans are padded to, so that a captured CUDA graph may run any that fits.

    Attributes:
      tokens: packed tokens.
      units: by tile size, smallest first.
      pages, entries: lengths of the units' page list and row list.
      parts, merged: partial results, and the rows that have some.
    """

    tokens: int
    units: tuple[int, ...]
    pages: int
    entries: int
    parts: int
    merged: int

    def holds(self, other: Room) -> bool:
        """Whether every size is at least the other's."""
        return all(a >= b for a, b in zip(self._sizes(), other._sizes(), strict=True))

    def padded(self, tokens: int) -> Room:
        """For the same plan, padded to so many tokens."""
        padding = tokens - self.tokens
        return dataclasses.replace(self, tokens=tokens, merged=self.merged + padding)

    def joined(self, other: Room) -> Room:
        """The larger of each size."""
        return Room._of([max(a, b) for a, b in zip(self._sizes(), other._sizes(), strict=True)])

    def rounded(self) -> Room:
        """Every size but tokens rounded up to a power of two, 0 staying 0."""
        rounded = [0 if n == 0 else 1 << (n - 1).bit_length() for n in self._sizes()]
        return Room._of([self.tokens, *rounded[1:]])

    @staticmethod
    def _of(sizes: list[int]) -> Room:
        tokens, pages, entries, parts, merged, *units = sizes
        return Room(tokens, tuple(units), pages, entries, parts, merged)

    def _sizes(self) -> tuple[int, ...]:
        return (self.tokens, self.pages, self.entries, self.parts, self.merged, *self.units)


class TritonAttention:
    """Runs a plan on tensors of one shape, layer after layer; the interface of ``TorchAttention``.

    All of a plan's numbers lie in one device tensor, copied there without waiting. ``load`` takes
    the next plan into the same memory, padded to the same launches, for CUDA graphs: between the
    two, ``run`` launches the same kernels on the same addresses.

    Pages may be of any size. Head sizes are at most 128, dtypes float32, bfloat16 and float16.
    Float32 is exact: products are not taken in TF32. Equal calls give bit-equal results. Slots that
    the plan does not name may hold NaN. Rows of ``room.tokens`` beyond the plan's come out as zero
    and write nothing to the pool.

    Attributes:
      room: what plans are padded to.
      needed: what the plan in it needs.
      slots: where the new tokens' keys and values go, int64 [room.tokens]; -1 beyond the plan's.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        keys: Tensor,
        *,
        heads: int,
        scale: float,
        room: Room | None = None,
    ) -> None:
        """Copies the plan to the device.

        Args:
          plan: of this step and of the layers' window.
          keys: any layer's keys, [kv_heads, slots, head_dim], contiguous; gives the shape, dtype
            and device of all.
          heads: query heads, a multiple of kv_heads; head h reads KV head
            ``h // (heads // kv_heads)``.
          scale: factor of the scores.
          room: what to pad to; None is what this plan needs.

        Raises:
          SurgeError: if the kernels do not take the shape or dtype, or the plan exceeds the room.
        """
        kv_heads, _, dim = keys.shape
        self._heads, self._group, self._dim = heads, heads // kv_heads, dim
        self._scale, self._device = scale, keys.device
        why = refusal(keys.device, keys.dtype, dim, self._group)
        if why:
            raise SurgeError(why)
        self._tiles = _fitting_tiles(keys.device, keys.dtype, dim, self._group)
        self._tile_rows = [tile.rows // self._group for tile in self._tiles]
        units = work_units(plan, self._tile_rows)
        self.needed = _room(plan, units, room.tokens if room else len(plan.positions))
        self.room = room or self.needed
        if not self.room.holds(self.needed):
            raise SurgeError(f"an attention plan needs {self.needed}, and the room is {room}")
        host, places = _packed(plan, units, self.room)
        self._buffer = torch.empty(len(host), dtype=torch.int32, device=self._device)
        self._send(host)
        self._window = plan.window or _ALL_KEYS
        self._page_size = plan.page_size
        parts = {name: self._buffer[place] for name, place in places.items()}
        self.slots = parts["slots"].view(torch.int64)
        self._units = parts["units"].view(-1, UNIT_FIELDS).split(self.room.units)
        self._lists = parts["pages"], parts["rows"], parts["positions"]
        self._merged = tuple(parts[f"merged_{name}"] for name in ("rows", "offsets", "parts"))
        self._parts = keys.new_empty(self.room.parts, heads, dim, dtype=torch.float32)
        self._log_sums = keys.new_empty(self.room.parts, heads, dtype=torch.float32)

    def load(self, plan: AttentionPlan) -> bool:
        """Takes another plan of the same window and page size, in place.

        Returns:
          False if it does not fit the room; then nothing is changed.
        """
        units = work_units(plan, self._tile_rows)
        needed = _room(plan, units, self.room.tokens)
        if not self.room.holds(needed):
            return False
        self.needed = needed
        self._send(_packed(plan, units, self.room)[0])
        return True

    def run(
        self, keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Appends a layer's new keys and values to the pool, then attends.

        Args:
          keys, values: the layer's pool, [kv_heads, slots, head_dim], contiguous.
          query: [T, heads, head_dim], T being ``room.tokens``; heads contiguous.
          key, value: [T, kv_heads, head_dim], tokens contiguous.

        Returns:
          [T, heads * head_dim] in the query's dtype.
        """
        launch_append(key, value, keys, values, self.slots)
        return self.attend(keys, values, query)

    def attend(self, keys: Tensor, values: Tensor, query: Tensor) -> Tensor:
        """``run`` where the pool has the new keys and values already."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format).flatten(1)
        for tile, units in zip(self._tiles, self._units, strict=True):
            if len(units):
                launch_attend(
                    query,
                    keys,
                    values,
                    out,
                    self._parts,
                    self._log_sums,
                    units,
                    *self._lists,
                    page_size=self._page_size,
                    scale=self._scale,
                    window=self._window,
                    tile=tile,
                )
        if self.room.merged:
            launch_merge(out, self._parts, self._log_sums, *self._merged)
        return out

    def _send(self, host: np.ndarray) -> None:
        sent = torch.from_numpy(host)
        if self._device.type == "cuda":
            sent = sent.pin_memory()
        self._buffer.copy_(sent, non_blocking=True)


def refusal(device: torch.device, dtype: torch.dtype, dim: int, group: int) -> str:
    """Why the kernels do not take a pool; empty if they do.

    Args:
      device, dtype: of the pool.
      dim: head size.
      group: query heads that share a KV head.
    """
    if device.type == "cpu" and not INTERPRETED:
        return "Triton kernels run on a GPU, or on a CPU with TRITON_INTERPRET=1"
    if dtype in _DTYPES and dim <= MAX_HEAD_DIM and _fitting_tiles(device, dtype, dim, group):
        return ""
    largest = tiles(dtype, dim, _capability(device))[-1]
    return (
        f"the Triton kernels take heads of at most {MAX_HEAD_DIM} numbers in float32, bfloat16 or "
        f"float16 and at most {largest.rows} query heads a KV head, not {dim} in {dtype} and "
        f"{group}"
    )


def _fitting_tiles(device: torch.device, dtype: torch.dtype, dim: int, group: int) -> list[Tile]:
    return [tile for tile in tiles(dtype, dim, _capability(device)) if tile.rows >= group]


def _capability(device: torch.device) -> int | None:
    """A GPU's compute capability, times ten."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _room(plan: AttentionPlan, units: WorkUnits, tokens: int) -> Room:
    """What a plan needs where it is padded to so many tokens, if it has no more."""
    padding = max(0, tokens - len(plan.positions))
    return Room(
        tokens=len(plan.positions) + padding,
        units=tuple(np.diff(units.tile_offsets).tolist()),
        pages=len(plan.pages),
        entries=len(plan.rows),
        parts=units.parts,
        merged=len(units.merged_rows) + padding,
    )


def _packed(
    plan: AttentionPlan, units: WorkUnits, room: Room
) -> tuple[np.ndarray, dict[str, slice]]:
    """A plan's numbers padded to a room, int32 [n], and where each list of them lies."""
    table = np.zeros((sum(room.units), UNIT_FIELDS), np.int32)
    fields = np.stack(
        (
            units.page_base,
            units.first_key,
            units.last_key,
            units.first_row,
            units.row_count,
            units.first_part,
        ),
        axis=1,
    )
    for start, first, last in zip(
        offsets(room.units), units.tile_offsets, units.tile_offsets[1:], strict=False
    ):
        table[start : start + last - first, : fields.shape[1]] = fields[first:last]
    # Rows of padding have no parts, so they are merged to zero.
    merged_rows = np.concatenate([units.merged_rows, np.arange(len(plan.positions), room.tokens)])
    lists = {  # what each list begins with, its length, and what fills it up
        "units": (table.reshape(-1), table.size, 0),
        "pages": (plan.pages, room.pages, 0),
        "rows": (plan.rows, room.entries, 0),
        "positions": (plan.positions, room.tokens, 0),
        "merged_rows": (merged_rows, room.merged, -1),
        "merged_offsets": (units.merged_offsets, room.merged + 1, units.parts),
        "merged_parts": (units.merged_parts, room.parts, 0),
        "slots": (plan.slots.view(np.int32), 2 * room.tokens, -1),
    }
    starts = offsets([-(-length // _ALIGNED) * _ALIGNED for _, length, _ in lists.values()])
    host = np.zeros(starts[-1], np.int32)
    places = {}
    for start, (name, (begin, length, filling)) in zip(starts, lists.items(), strict=False):
        place = places[name] = slice(int(start), int(start) + length)
        host[place] = filling
        host[start : start + len(begin)] = begin
    return host, places
