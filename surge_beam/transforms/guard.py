"""Runs the reading of untrusted files in a helper process that may crash, hang or run out.

The helper is this package's own reading code and nothing of Beam or torch. It answers one call
at a time over a pipe, and says ``tick`` while it makes progress, so a time limit bounds silence
rather than work and large files need no larger limit.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from surge_beam.records import SurgeError
from surge_beam.transforms.parquet_probe import ParquetProbe
from surge_beam.transforms.textfiles import UnreadableFileError, remove_leftovers, stage_text

__all__ = ["Guard", "GuardError", "UnreadableFileError", "shared_guard"]

_START_SECONDS = 120.0
_TICK_SECONDS = 0.5
_OUT_OF_MEMORY = 77
# A line of MAX_LINE_BYTES is parsed in one go.
_PATIENCE = {"stage_text": 10}
_FUNCTIONS = "surge_beam.transforms.guard"
# The packages are stubs in the helper: their __init__ may import Beam.
_BOOT = """
import sys, types
root, functions, memory, parent = sys.argv[1:5]
sys.path[:] = sys.argv[5:]
for name, path in (("surge_beam", root), ("surge_beam.transforms", root + "/transforms")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from surge_beam.transforms import guard
guard._serve(functions, int(memory), int(parent))
"""


class GuardError(RuntimeError):
    """The helper failed in a way that says nothing about the file; trying again may help."""


class _HelperDiedError(Exception):
    """The helper's pipe ended."""


class _HelperSilentError(Exception):
    """The helper gave no sign of life in time."""


class Guard:
    """A helper process, started by ``start`` or the first call, and again after a crash.

    Calls from several threads wait for one another. After a fork the child gets its own helper.

    Args:
      timeout_s: the longest silence of a call, ten times that for ``stage_text``; one that makes
        progress may take any time.
      memory_bytes: address space the helper may take on top of what it starts with.
      functions: the module whose ``FUNCTIONS`` the helper serves, by name.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 30.0,
        memory_bytes: int = 4 << 30,
        functions: str = _FUNCTIONS,
    ) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._functions = functions
        self._lock = threading.Lock()
        self._helper: _Helper | None = None
        _GUARDS.add(self)

    def start(self) -> None:
        """Starts the helper where none runs, and does not wait for it to be ready.

        Raises:
          GuardError: there can be no process.
        """
        with self._lock:
            if self._helper is None:
                self._helper = _Helper(self._functions, self._memory_bytes)

    def call(self, name: str, **kwargs: Any) -> Any:
        """Runs a function in the helper.

        A file is blamed for a crash only if it crashes a helper that has met no other file.

        Args:
          name: one of ``FUNCTIONS``, such as ``describe_parquet``.
          **kwargs: its arguments; ``source`` is the file that an error names.

        Raises:
          UnreadableFileError: the file is bad, or made the reader crash, hang or run out of
            memory.
          GuardError: the helper does not start, or failed for another reason than the file.
          OSError: the file cannot be opened or fetched.
        """
        request = pickle.dumps((name, kwargs), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            timeout_s = self._timeout_s * _PATIENCE.get(name, 1)
            good, value = pickle.loads(self._answer(request, kwargs, timeout_s))
        if good:
            return value
        try:
            raise value
        finally:
            del value

    @property
    def pid(self) -> int | None:
        """The helper's process id, None where none runs."""
        return None if self._helper is None else self._helper.process.pid

    def close(self) -> None:
        """Ends the helper; the next call starts another."""
        with self._lock:
            if self._helper is not None:
                self._helper.kill()
                self._helper = None

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # At exit the end of its input ends the helper; modules may be gone, and a daemon thread
        # cannot be joined.
        try:
            if not sys.is_finalizing():
                self.close()
        except Exception:
            pass

    def _answer(self, request: bytes, kwargs: dict[str, Any], timeout_s: float) -> bytes:
        source = str(kwargs.get("source", "the file"))
        while True:
            fresh = self._helper is None
            if self._helper is None:
                self._helper = _Helper(self._functions, self._memory_bytes)
            try:
                return self._helper.exchange(request, timeout_s)
            except _HelperDiedError:
                reason = self._discard(kwargs)
                if fresh:
                    raise UnreadableFileError(source, reason) from None
            except _HelperSilentError:
                self._discard(kwargs)
                raise UnreadableFileError(
                    source, f"reader gave no answer in {timeout_s:g} s"
                ) from None
            except BaseException:
                self._discard(kwargs)
                raise

    def _discard(self, kwargs: dict[str, Any]) -> str:
        """Ends the helper and removes its temporary files; says how it had ended by itself."""
        helper, self._helper = self._helper, None
        if helper is None:
            return ""
        code = helper.kill()
        if "destination" in kwargs:
            remove_leftovers(kwargs["destination"], helper.process.pid)
        if code == _OUT_OF_MEMORY:
            return f"reader needs more than {self._memory_bytes / (1 << 30):.1f} GiB of memory"
        if code is not None and code < 0:
            return f"reader crashed with signal {signal.Signals(-code).name}"
        return f"reader ended with status {code}"

    def _forget(self) -> None:
        """In a forked child: the helper belongs to the parent, and the lock may be held there."""
        self._lock = threading.Lock()
        if self._helper is not None:
            self._helper.close_pipes()
            self._helper = None


@functools.cache
def shared_guard() -> Guard:
    """The guard of this process."""
    return Guard()


class _Helper:
    """The parent's end of one helper process."""

    def __init__(self, functions: str, memory_bytes: int) -> None:
        root = str(Path(__file__).resolve().parents[1])
        command = [sys.executable, "-c", _BOOT, root, functions, str(memory_bytes)]
        command += [str(os.getpid()), *sys.path]
        started: SimpleQueue[subprocess.Popen[bytes] | Exception] = SimpleQueue()
        # The kernel's parent-death signal follows the thread that started a process, so that
        # thread has to live as long as the helper; it also reaps it.
        self._keeper = threading.Thread(
            target=_keep, args=(command, started), name="surge-guard", daemon=True
        )
        self._keeper.start()
        process = started.get()
        if isinstance(process, Exception):
            raise GuardError(f"the reading helper does not start: {process}") from process
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._buffer = bytearray()
        self._poll = select.poll()
        self._poll.register(self._stdout.fileno(), select.POLLIN)
        self._ready = False

    def exchange(self, request: bytes, timeout_s: float) -> bytes:
        if not self._ready:
            self._await_ready()
        try:
            _write(self._stdin.fileno(), request)
        except OSError:
            raise _HelperDiedError from None
        while not (answer := self._receive(timeout_s)):
            pass
        return answer

    def kill(self) -> int | None:
        """Ends the process and returns its status, None where it cannot be had."""
        if self._ended():
            self._keeper.join(5)
        with contextlib.suppress(OSError):
            self.process.kill()
        self._keeper.join(5)
        self.close_pipes()
        return self.process.returncode

    def close_pipes(self) -> None:
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def _await_ready(self) -> None:
        try:
            self._receive(_START_SECONDS)
        except (_HelperDiedError, _HelperSilentError):
            raise GuardError(
                f"the reading helper does not start: status {self.kill()}, see its output above"
            ) from None
        self._ready = True

    def _ended(self) -> bool:
        return any(event & select.POLLHUP for _, event in self._poll.poll(0))

    def _receive(self, timeout_s: float) -> bytes:
        """One frame; an empty one is a tick."""
        self._fill(8, timeout_s)
        end = 8 + int.from_bytes(self._buffer[:8], "little")
        self._fill(end, timeout_s)
        frame = bytes(self._buffer[8:end])
        del self._buffer[:end]
        return frame

    def _fill(self, size: int, timeout_s: float) -> None:
        while len(self._buffer) < size:
            if not self._poll.poll(timeout_s * 1000):
                raise _HelperSilentError
            part = os.read(self._stdout.fileno(), 1 << 20)
            if not part:
                raise _HelperDiedError
            self._buffer += part


def _keep(command: list[str], started: SimpleQueue[subprocess.Popen[bytes] | Exception]) -> None:
    # Arenas and pools reserve address space that the helper's limit would count.
    environment = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **environment},
        )
    except Exception as error:
        started.put(error)
        return
    started.put(process)
    process.wait()


_GUARDS: weakref.WeakSet[Guard] = weakref.WeakSet()


def _after_fork() -> None:
    for guard in list(_GUARDS):
        guard._forget()


os.register_at_fork(after_in_child=_after_fork)


# The helper's side


_probe = ParquetProbe()


def _stage_text(**kwargs: Any) -> dict[str, Any]:
    # Rows hold no cycles, and looking for them in millions of values takes most of the time.
    gc.disable()
    try:
        return dataclasses.asdict(stage_text(**kwargs))
    finally:
        gc.enable()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "describe_parquet": _probe.describe_parquet,
    "verify_row_group": _probe.verify_row_group,
    "key_runs": _probe.key_runs,
    "first_texts": _probe.first_texts,
    "stage_text": _stage_text,
}


def _serve(functions: str, memory_bytes: int, parent: int) -> None:
    """Answers calls on standard input until it ends."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    table: dict[str, Callable[..., Any]] = importlib.import_module(functions).FUNCTIONS
    start = _address_space()
    _limit_memory(start + memory_bytes)
    _write(answers, b"")
    tick = _Ticker(answers)
    while (head := _read_exactly(requests, 8)) is not None:
        request = _read_exactly(requests, int.from_bytes(head, "little"))
        if request is None:
            return
        name, kwargs = pickle.loads(request)
        try:
            answer = pickle.dumps((True, table[name](**kwargs, tick=tick)), 5)
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        except Exception as error:
            answer = pickle.dumps((False, _portable(error)), 5)
        _write(answers, answer)
        # A successor starts clean: what fragmentation takes here, a sound file would lack.
        if _address_space() > start + memory_bytes // 2:
            return


class _Ticker:
    """Tells the parent that the call makes progress, not more often than it needs to know."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._last = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last >= _TICK_SECONDS:
            self._last = now
            _write(self._answers, b"")


def _portable(error: Exception) -> Exception:
    """The error itself where the parent is sure to know its class."""
    if isinstance(error, SurgeError) or type(error) is getattr(
        builtins, type(error).__name__, None
    ):
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error
    return GuardError(f"{type(error).__name__}: {error}")


def _die_with(parent: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _address_space() -> int:
    """Bytes of address space in use, 0 where the system does not say."""
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return 0


def _limit_memory(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _write(pipe: int, data: bytes) -> None:
    view = memoryview(len(data).to_bytes(8, "little") + data)
    while view:
        view = view[os.write(pipe, view) :]


def _read_exactly(pipe: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = os.read(pipe, min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)
