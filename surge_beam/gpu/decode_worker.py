"""One decode engine a process, fed by all bundles of that process."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator

from surge_beam.gpu.decode_engine import DecodeEngine
from surge_beam.gpu.engine import Engine
from surge_beam.records import Checkpoint, Completion, EngineConfig, Request, SurgeError


def load_engine(config: EngineConfig) -> DecodeEngine:
    """The engine of a recipe.

    Raises:
      SurgeError: if it cannot be built.
    """
    if config.engine == "vllm":
        from surge_beam.gpu.vllm_engine import VllmEngine

        return VllmEngine(config)
    return Engine(config)


class DecodeWorker:
    """Holds the engine of a process and starts it anew, once, where it fails.

    Bundles of several threads decode in the same batch: whoever waits for a completion drives the
    engine, and what finishes meanwhile is laid aside for whom it belongs to.

    Args:
      config: the engine's recipe.
      load: builds an engine.

    Attributes:
      broken: what ended the engine for good; ``shared_decode_worker`` makes another then.

    Raises:
      SurgeError: if the engine cannot be built.
    """

    def __init__(
        self, config: EngineConfig, load: Callable[[EngineConfig], DecodeEngine] = load_engine
    ) -> None:
        self.config, self._load = config, load
        self.engine = load(config)
        self.restarts = 0
        self.broken: BaseException | None = None
        self._lock = threading.RLock()
        self._owners: dict[str, Visit] = {}

    def visit(self) -> Visit:
        """A share of the engine for one bundle."""
        return Visit(self)

    def submit(self, visit: Visit, request: Request | Checkpoint) -> None:
        """Queues a request for a visit, once no other one of the same custom_id is under way."""
        inner = request.request if isinstance(request, Checkpoint) else request
        with self._lock:
            self._check()
            while inner.custom_id in self._owners:
                # another attempt at the same bundle; its row has to end first
                self._step()
            self.engine.submit(request)
            self._owners[inner.custom_id] = visit

    def next_for(self, visit: Visit) -> None:
        """Drives the engine until something of a visit has finished."""
        with self._lock:
            while not visit.done:
                self._check()
                self._step()

    def withdraw(self, visit: Visit) -> None:
        """Ends what is left of a visit."""
        with self._lock:
            own = [name for name, owner in self._owners.items() if owner is visit]
            if self.broken is not None:
                for name in own:
                    del self._owners[name]
                own = []
            for name in own:
                self.engine.cancel(name)
            while any(self._owners.get(name) is visit for name in own):
                self._step()
            visit.done.clear()

    def _check(self) -> None:
        if self.broken is not None:
            raise SurgeError(f"the decode engine is gone: {self.broken}") from self.broken

    def _step(self) -> None:
        try:
            completion = next(self.engine.completions(), None)
        except Exception as error:
            self._restart(error)
            return
        if completion is None:
            raise SurgeError("the decode engine has ended before all of its requests did")
        self._hand_over(completion)

    def _hand_over(self, completion: Completion) -> None:
        self._owners.pop(completion.custom_id).done.append(completion)

    def _restart(self, error: Exception) -> None:
        """Builds the engine anew and repeats only what had not finished."""
        if self.restarts:
            self.broken = error
            raise error
        self.restarts += 1
        logging.getLogger(__name__).warning(
            "the decode engine failed and is started anew: %s: %s", type(error).__name__, error
        )
        for completion in self.engine.finished():
            self._hand_over(completion)
        unfinished = self.engine.checkpoints()
        self.engine.close()
        try:
            self.engine = self._load(self.config)
        except Exception as again:
            self.broken = again
            raise
        for checkpoint in unfinished:
            self.engine.submit(checkpoint)


class Visit:
    """Requests of one bundle in the engine of its process.

    Attributes:
      done: what has finished and was not taken yet.
    """

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker
        self._left = 0
        self.done: collections.deque[Completion] = collections.deque()

    def add(self, requests: Iterable[Request | Checkpoint]) -> None:
        """Queues requests."""
        for request in requests:
            self._worker.submit(self, request)
            self._left += 1

    def take(self, keep: int = 0) -> Iterator[Completion]:
        """Completions, until at most ``keep`` requests are left; so the engine stays full while
        the next ones are fetched.
        """
        while self._left > keep:
            self._worker.next_for(self)
            while self.done:
                self._left -= 1
                yield self.done.popleft()

    def close(self) -> None:
        """Drops what is left."""
        if self._left:
            self._worker.withdraw(self)
            self._left = 0


@functools.lru_cache(maxsize=1)
def _shared(config: EngineConfig) -> DecodeWorker:
    return DecodeWorker(config)


_LOADING = threading.Lock()


def shared_decode_worker(config: EngineConfig) -> DecodeWorker:
    """The decode worker of this process; the first call loads the model."""
    with _LOADING:
        worker = _shared(config)
        if worker.broken is not None:
            with contextlib.suppress(Exception):
                worker.engine.close()
            _shared.cache_clear()
            worker = _shared(config)
        return worker
