"""Completions as they finish, kept until their partitions are committed.

A row that was decoded is not decoded again after a crash: its completion is in a file below
``_surge/completions`` as soon as it is there, and the next run finds it under the same owner, row
and request.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import xxhash

from surge_beam.records import Completion, EngineConfig, Request, TokenLogprob
from surge_beam.transforms.files import Store

FOLDER = "_surge/completions"
FLUSH_SECONDS = 2.0
FLUSH_ROWS = 256


def request_digest(request: Request, engine: EngineConfig) -> str:
    """What a completion is an answer to: id, token ids and sampling, and what decides the answer
    besides; 32 hex digits.
    """
    recipe = (engine.model, engine.engine, engine.dtype, engine.max_context, engine.seed)
    asked = (request.custom_id, request.sampling, recipe)
    digest = xxhash.xxh3_128(repr(asked).encode("utf-8", "replace"))
    digest.update(repr(request.prompt_ids).encode())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Entry:
    """A completion, whose it is, and what it answers."""

    owner: str
    row: int
    digest: str
    completion: Completion


class CompletionJournal:
    """Appends completions to a file of this process.

    On a local disk a line is in the system's hands once ``add`` returns, so that only the machine
    can lose it. An object store cannot append: there lines are put in blocks, at most
    ``FLUSH_SECONDS`` or ``FLUSH_ROWS`` late.
    """

    def __init__(self, store: Store, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._name = f"{FOLDER}/{run}-{os.getpid():x}-{os.urandom(6).hex()}"
        self._file: int | None = None
        self._lines: list[bytes] = []
        self._blocks = 0
        self._since = clock()

    def add(self, entry: Entry) -> None:
        """Keeps a completion."""
        line = json.dumps(dataclasses.asdict(entry), ensure_ascii=True, separators=(",", ":"))
        self._lines.append(line.encode() + b"\n")
        late = self._clock() - self._since >= FLUSH_SECONDS
        if self._store.local or late or len(self._lines) >= FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Writes what was added."""
        self._since = self._clock()
        if not self._lines:
            return
        data = b"".join(self._lines)
        self._lines = []
        if self._store.local:
            if self._file is None:
                os.makedirs(self._store.path(FOLDER), exist_ok=True)
                path = self._store.path(f"{self._name}.jsonl")
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            while data:
                data = data[os.write(self._file, data) :]
            return
        self._store.put(f"{self._name}-{self._blocks:06d}.jsonl", data)
        self._blocks += 1

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None


def journals(store: Store) -> list[str]:
    """Names of all journal files."""
    return [f"{FOLDER}/{name}" for name in store.names(FOLDER)]


def read_journal(store: Store, name: str) -> Iterator[Entry]:
    """Entries of a file; a line that a crash cut short ends it."""
    with store.fs.open(store.path(name), "rb") as file:
        yield from filter(None, map(_entry, file))


def _entry(line: bytes) -> Entry | None:
    try:
        found: dict[str, Any] = json.loads(line)
        completion = found.pop("completion")
        completion["token_ids"] = tuple(completion["token_ids"])
        if completion["logprobs"] is not None:
            completion["logprobs"] = tuple(
                TokenLogprob(x["token_id"], x["logprob"], tuple((i, p) for i, p in x["top"]))
                for x in completion["logprobs"]
            )
        return Entry(completion=Completion(**completion), **found)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
