"""Decode steps as captured CUDA graphs: a replay costs the host one launch, not hundreds.

A graph is the decoder's whole pass, from embedding to logits, for a padded number of rows and
padded attention plans (``Room``). What changes from step to step lies in tensors that stay where
they are: token ids, positions and the plans' numbers.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from surge_beam.gpu.attention_plan import AttentionPlan, Ints
from surge_beam.gpu.models.decoder import Decoder
from surge_beam.gpu.transfer import to_device
from surge_beam.gpu.triton_attention import Room, TritonAttention

_log = logging.getLogger(__name__)

MAX_GRAPHS = 32
# A graph with so many times as many units as a plan has, and so many at least, does not serve it:
# each of them is a program that starts to find nothing to do.
WASTEFUL, FEW_UNITS = 4, 256

Plans = Mapping[int | None, AttentionPlan]


class CannotCapture(Exception):
    """There is no graph of a call, and there will be none of others."""


class Capture(Protocol):
    """Makes graphs."""

    def __call__(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What repeats a call's work on the same memory; its result is good until the next graph
        is repeated.

        Args:
          call: has run before, so that all its kernels are there.

        Raises:
          CannotCapture: if it does not work on this device.
        """


class CudaCapture:
    """See ``Capture``. The graphs share one memory pool, since they run one after another."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        # torch takes the pool of a living graph only
        other = next(iter(self._alive), None)
        pool = None if other is None else other.pool()
        stream = torch.cuda.current_stream()
        try:
            # other threads may use the device meanwhile
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                result = call()
        except RuntimeError as error:
            # torch leaves its own stream in place where the end of a capture fails
            torch.cuda.set_stream(stream)
            raise CannotCapture(str(error)) from error
        self._alive.add(graph)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@dataclasses.dataclass(eq=False)
class _Graph:
    """Attributes:
    inputs: token ids and positions, int64 [2, rows].
    attentions: by window.
    replay: gives logits of all rows, float32 [rows, vocab].
    """

    inputs: Tensor
    attentions: dict[int | None, TritonAttention]
    replay: Callable[[], Tensor]

    @property
    def rows(self) -> int:
        return self.inputs.shape[1]

    def load(self, plans: Plans) -> bool:
        """Takes plans; False if they do not fit, or leave too much of a room empty."""
        return all(
            self.attentions[window].load(plan)
            and not _wasteful(self.attentions[window].room, self.attentions[window].needed)
            for window, plan in plans.items()
        )


class DecodeGraphs:
    """Runs steps of one new token a sequence, each of which gets logits.

    Rows are padded to a power of two. A step that no graph takes runs without one, in a larger room
    of which a graph is then captured; of ``MAX_GRAPHS`` the one that was used least recently is
    dropped. Where capturing fails, which is said once, all later steps run without graphs.

    Args:
      decoder: of Triton operations.
      layers: keys and values of each layer, [kv_heads, slots, head_dim].
      capture: makes graphs.
    """

    def __init__(
        self, decoder: Decoder, layers: Sequence[tuple[Tensor, Tensor]], capture: Capture
    ) -> None:
        self._decoder, self._layers = decoder, layers
        self._capture: Capture | None = capture
        self._graphs: list[_Graph] = []  # the last one was used last

    def logits(self, ids: Ints, plans: Plans) -> Tensor | None:
        """Computes a step.

        Args:
          ids: the new tokens, int64 [n], n at least 1.
          plans: of the step, by window; n rows each.

        Returns:
          Logits, float32 [n, vocab], good until the next call; None where no graphs can be had.
        """
        if self._capture is None:
            return None
        rows = 1 << (len(ids) - 1).bit_length()
        graph = next((g for g in reversed(self._graphs) if g.rows == rows and g.load(plans)), None)
        if graph is None:
            return self._first(rows, ids, plans, self._capture)[: len(ids)]
        self._graphs.remove(graph)
        self._graphs.append(graph)
        _fill(graph.inputs, ids, plans)
        return graph.replay()[: len(ids)]

    def clear(self) -> None:
        """Drops all graphs and their memory."""
        self._graphs.clear()

    def _first(self, rows: int, ids: Ints, plans: Plans, capture: Capture) -> Tensor:
        """Runs a step without a graph, and captures one for the next."""
        decoder, (keys, _) = self._decoder, self._layers[0]
        # of as many rows, the one used last grows
        before = next((g for g in reversed(self._graphs) if g.rows == rows), None)
        attentions = {}
        for window, plan in plans.items():
            exact = TritonAttention(plan, keys, heads=decoder.heads, scale=decoder.scale)
            needed = exact.room.padded(rows)
            room = needed.rounded()
            if before is not None:
                joined = room.joined(before.attentions[window].room)
                room = room if _wasteful(joined, needed) else joined
            attentions[window] = TritonAttention(
                plan, keys, heads=decoder.heads, scale=decoder.scale, room=room
            )
        inputs = torch.zeros(2, rows, dtype=torch.int64, device=decoder.device)
        every_row = torch.arange(rows, device=decoder.device)
        layers = [
            (attentions[window], *pool)
            for window, pool in zip(decoder.windows, self._layers, strict=True)
        ]

        def run() -> Tensor:
            return decoder(inputs[0], inputs[1], layers, every_row)

        _fill(inputs, ids, plans)
        logits = run()
        del self._graphs[: max(0, len(self._graphs) + 1 - MAX_GRAPHS)]
        try:
            self._graphs.append(_Graph(inputs, attentions, capture(run)))
        except CannotCapture as error:
            self._capture = None
            self.clear()
            _log.warning("decoding runs without CUDA graphs, which is slower: %s", error)
        return logits


def _fill(inputs: Tensor, ids: Ints, plans: Plans) -> None:
    """Rows beyond the step's are token 0 at position 0, which attends to nothing."""
    host = np.zeros(inputs.shape, np.int64)
    host[0, : len(ids)] = ids
    host[1, : len(ids)] = next(iter(plans.values())).positions
    inputs.copy_(to_device(host, inputs.device))


def _wasteful(room: Room, needed: Room) -> bool:
    return sum(room.units) > max(FEW_UNITS, WASTEFUL * sum(needed.units))
