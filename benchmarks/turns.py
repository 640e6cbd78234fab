"""Engines that take turns step by step, so that whatever slows the machine slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from surge_beam.records import Request

if TYPE_CHECKING:
    from surge_beam.gpu.engine import Engine


class Drive:
    """An engine on its way through requests.

    Args:
      limits: how many requests may be unfinished when each is given; None gives all at once.
      before: called before every step, and not timed.

    Attributes:
      seconds: that its steps have taken.
      outputs: the tokens of every request that has ended.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        limits: Sequence[int] | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.seconds = engine, 0.0
        self.outputs: dict[str, tuple[int, ...]] = {}
        self._requests, self._before = requests, before
        self._limits = limits or [len(requests)] * len(requests)
        self._given = 0

    @property
    def done(self) -> bool:
        return len(self.outputs) == len(self._requests)

    def step(self) -> None:
        """Gives what may come, and runs a step."""
        self._before()
        began = time.perf_counter()
        while (
            self._given < len(self._requests)
            and self._given - len(self.outputs) < self._limits[self._given]
        ):
            self.engine.submit(self._requests[self._given])
            self._given += 1
        self.engine.step()
        self.outputs |= {done.custom_id: done.token_ids for done in self.engine.finished()}
        self.seconds += time.perf_counter() - began


def take_turns(drives: Collection[Drive]) -> None:
    """Drives all to their ends; the next step is of the one that has used the least time."""
    while waiting := [drive for drive in drives if not drive.done]:
        min(waiting, key=lambda drive: drive.seconds).step()
