"""Overlapped read, encode and write within a bundle, each hand-over bounded to one SuperBatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

P = TypeVar("P")
R = TypeVar("R")
E = TypeVar("E")
W = TypeVar("W")


class Overlap(Generic[P, R, E, W]):
    """Runs ``write(encode(read(plan)))`` over plans so that the three stages overlap.

    ``encode`` runs on the caller's thread, the others on one thread each. While SuperBatch k is
    encoded, k + 1 is read and k - 1 is written: at most three are alive. Results come in order.
    """

    def __init__(
        self, read: Callable[[P], R], encode: Callable[[R], E], write: Callable[[E], W]
    ) -> None:
        self._read, self._encode, self._write = read, encode, write
        self._readers = ThreadPoolExecutor(1, "surge-read")
        self._writers = ThreadPoolExecutor(1, "surge-commit")
        self._reading: Future[R] | None = None
        self._writing: Future[W] | None = None

    def push(self, plan: P) -> Iterator[W]:
        """Starts reading ``plan`` and encodes the one before it; yields what is written."""
        ahead = self._reading
        self._reading = None
        if ahead is not None:
            batch = ahead.result()
            self._reading = self._readers.submit(self._read, plan)
            yield from self._hand_over(batch)
        else:
            self._reading = self._readers.submit(self._read, plan)

    def drain(self) -> Iterator[W]:
        """Ends the bundle: encodes and writes what is under way."""
        if self._reading is not None:
            ahead, self._reading = self._reading, None
            yield from self._hand_over(ahead.result())
        if self._writing is not None:
            last, self._writing = self._writing, None
            yield last.result()

    def reset(self) -> None:
        """Drops what a failed bundle left under way; what is being written is finished first."""
        for future in (self._reading, self._writing):
            if future is not None and not future.cancel():
                future.exception()
        self._reading = self._writing = None

    def close(self) -> None:
        self.reset()
        self._readers.shutdown()
        self._writers.shutdown()

    def _hand_over(self, batch: R) -> Iterator[W]:
        encoded = self._encode(batch)
        before, self._writing = self._writing, None
        if before is not None:
            # waits, so that a slow disk holds the device back rather than filling memory
            result = before.result()
            self._writing = self._writers.submit(self._write, encoded)
            yield result
        else:
            self._writing = self._writers.submit(self._write, encoded)
