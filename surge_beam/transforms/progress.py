"""A progress line for a person, read from the manifest, so that it works on every runner."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TextIO

from surge_beam.transforms import manifest, stats_files
from surge_beam.transforms.files import Store


class Progress:
    """Prints how far a run is, from a thread of its own, while the runner blocks.

    On a terminal one line is rewritten every second; elsewhere a line is printed every ten.
    """

    def __init__(self, store: Store, run: str, plan_name: str, stream: TextIO | None = None):
        self._store, self._run, self._plan_name = store, run, plan_name
        self._stream = stream or sys.stderr
        self._tty = self._stream.isatty()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="surge-progress", daemon=True)
        self._seen: set[str] = set()
        self._rows = self._letters = self._partitions = self._tokens = 0
        self._began = time.monotonic()
        self._first: float | None = None

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._tty:
            self._stream.write("\n")

    def _watch(self) -> None:
        interval = 1.0 if self._tty else 10.0
        while not self._stop.wait(interval):
            try:
                self._update()
                line = self._line()
            except Exception:
                # a look at the output that fails must not disturb the job
                continue
            if line:
                self._stream.write(f"\r\x1b[2K{line}" if self._tty else f"{line}\n")
                self._stream.flush()

    def _update(self) -> None:
        names = [
            f"{f}/{name}"
            for f in (manifest.FOLDER, stats_files.FOLDER)
            for name in self._store.names(f)
            if name.startswith(self._run + "-")
        ]
        for name in names:
            if name in self._seen:
                continue
            header = json.loads(self._store.get(name).split(b"\n", 1)[0])
            self._seen.add(name)
            done = ("rows", "rows_reused", "dead_letters", "unreadable")
            self._rows += sum(header.get(name, 0) for name in done)
            self._letters += header.get("dead_letters", 0)
            self._partitions += header.get("partitions", 0)
            self._tokens += header.get("tokens", 0)

    def _line(self) -> str:
        plan = json.loads(self._store.get_or_none(self._plan_name) or b"{}")
        if plan.get("run") != self._run:
            return f"planning, {time.monotonic() - self._began:.0f} s"
        if self._first is None:
            self._first = time.monotonic()
        total = plan["rows_planned"]
        seconds = max(time.monotonic() - self._first, 1.0)
        rate = self._rows / seconds
        left = _clock((total - self._rows) / rate) if rate else "unknown"
        share = 100 * self._rows / total if total else 100
        return (
            f"{self._rows:,} of {total:,} rows ({share:.0f}%), "
            f" {rate:,.{1 if rate < 10 else 0}f} rows/s,"
            f" {self._tokens / seconds:,.0f} tokens/s,"
            f" {self._partitions:,} of {plan['partitions_planned']:,} partitions,"
            f" {self._letters:,} dead letters, {left} left"
        )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
