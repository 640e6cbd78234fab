"""One workload through one engine, in a process of its own: ours, vLLM, transformers' generate.

The model is loaded and a first batch has passed before the clock starts, and every timed order
begins with no KV of the prompts. All get the same token ids and decode the same number of tokens,
greedily and past end tokens.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.common import cores, peak_memory

BATCH = 32  # of transformers' generate
WARM_UP_ROWS, WARM_UP_PROMPT, WARM_UP_TOKENS = 16, 128, 4

Tokens = list[list[int]]


class Engine(Protocol):
    """What is measured."""

    def generate(self, prompts: Tokens, tokens: int) -> Tokens:
        """Exactly ``tokens`` tokens for each prompt."""

    def forget(self) -> None:
        """Drops all KV that was kept."""


def run_ours(device: str, kv_bytes: int, **how: Any) -> dict[str, Any]:
    """The native engine; the arguments beside its own are those of ``measure`` and ``_Ours``."""
    return _of(_Ours(device=device, kv_bytes=kv_bytes, **_recipe(how)), how)


def run_vllm(device: str, kv_bytes: int, block_size: int | None, **how: Any) -> dict[str, Any]:
    """vLLM with prefix caching; ``block_size`` None is its own default."""
    engine = _Vllm(device=device, kv_bytes=kv_bytes, block_size=block_size, **_recipe(how))
    return _of(engine, how)


def run_transformers(
    device: str, rows: int, orders: Mapping[str, Sequence[int]], **how: Any
) -> Any:
    """transformers' generate, left padded; of each order ``rows`` prompts at even distances."""
    some = {name: spread_out(order, rows) for name, order in orders.items()}
    return _of(_Transformers(device=device, **_recipe(how)), {**how, "orders": some})


def spread_out(order: Sequence[int], rows: int) -> list[int]:
    """``rows`` of an order at even distances, or all if there are no more."""
    count = min(rows, len(order))
    return [order[i * len(order) // count] for i in range(count)]


def measure(
    engine: Engine,
    prompts: Tokens,
    max_tokens: int,
    orders: Mapping[str, Sequence[int]],
    *,
    decode: bool,
) -> dict[str, Any]:
    """Times each order without any KV; with ``decode`` also what is left of it with all prompts'
    KV there, for ``max_tokens`` tokens and for one.

    Returns:
      ``orders``: of each, ``seconds``, ``rows``, ``tokens`` decoded, and ``outputs``: a digest of
      the tokens of each prompt, None of those not run. ``warm``: seconds ``one`` and ``all``.

    Raises:
      RuntimeError: if an engine decodes fewer or more tokens than it was told to.
    """
    warm_up = [ids[::-1][:WARM_UP_PROMPT] for ids in prompts[:WARM_UP_ROWS]]
    _timed(engine, warm_up, WARM_UP_TOKENS)
    found: dict[str, Any] = {"orders": {}}
    for name, order in orders.items():
        engine.forget()
        seconds, outputs = _timed(engine, [prompts[i] for i in order], max_tokens)
        digests: list[str | None] = [None] * len(prompts)
        for i, tokens in zip(order, outputs, strict=True):
            digests[i] = hashlib.sha256(np.array(tokens, np.int64).tobytes()).hexdigest()[:16]
        found["orders"][name] = {
            "seconds": seconds,
            "rows": len(order),
            "tokens": sum(map(len, outputs)),
            "outputs": digests,
        }
    if decode:
        found["warm"] = {
            name: _timed(engine, prompts, tokens)[0]
            for name, tokens in (("one", 1), ("all", max_tokens))
        }
    return found


def _timed(engine: Engine, prompts: Tokens, tokens: int) -> tuple[float, Tokens]:
    began = time.perf_counter()
    outputs = engine.generate(prompts, tokens)
    seconds = time.perf_counter() - began
    wrong = [len(output) for output in outputs if len(output) != tokens]
    if wrong or len(outputs) != len(prompts):
        raise RuntimeError(f"asked for {tokens} tokens of each prompt, got {wrong[:8]}")
    return seconds, outputs


def _recipe(how: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": how["model"], "dtype": how["dtype"], "sequences": len(how["prompts"])}


def _of(engine: Engine, how: Mapping[str, Any]) -> dict[str, Any]:
    found = measure(
        engine, how["prompts"], how["max_tokens"], how["orders"], decode=how.get("decode", False)
    )
    return {**found, **peak_memory()}


class _Ours:
    def __init__(self, model: str, dtype: str, sequences: int, device: str, kv_bytes: int) -> None:
        from surge_beam.gpu.loading import load_runner
        from surge_beam.records import EngineConfig

        self._config = EngineConfig(
            model=model, dtype=dtype, device=device, max_sequences=sequences, kv_bytes=kv_bytes
        )
        self._runner = load_runner(self._config)
        self.forget()

    def forget(self) -> None:
        from surge_beam.gpu.engine import Engine as OurEngine

        # a new page table over the same pool: nothing in it belongs to anybody
        self._engine = OurEngine(self._config, runner=self._runner)

    def generate(self, prompts: Tokens, tokens: int) -> Tokens:
        from surge_beam.records import Request, SamplingParams

        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        done = self._engine.generate(
            Request(custom_id=str(i), prompt_ids=tuple(ids), sampling=sampling)
            for i, ids in enumerate(prompts)
        )
        return [list(completion.token_ids) for completion in done]


class _Vllm:
    def __init__(
        self,
        model: str,
        dtype: str,
        sequences: int,
        device: str,
        kv_bytes: int,
        block_size: int | None,
    ) -> None:
        on_cpu = device == "cpu"
        settings = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
        if on_cpu:
            # by itself it would leave a core to its server
            bound = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            settings |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": bound}
        for name, value in settings.items():
            os.environ.setdefault(name, value)
        import vllm

        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=str(model_folder(model)),
            dtype=dtype,
            max_num_seqs=sequences,
            enable_prefix_caching=True,
            enforce_eager=on_cpu,
            kv_cache_memory_bytes=kv_bytes,
            **({} if block_size is None else {"block_size": block_size}),
        )

    def forget(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM does not let go of its prefix cache")

    def generate(self, prompts: Tokens, tokens: int) -> Tokens:
        params = self._params(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        done = self._llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in done]


class _Transformers:
    def __init__(self, model: str, dtype: str, sequences: int, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        from surge_beam.gpu.device import choose_device
        from surge_beam.records import EngineConfig

        torch.set_num_threads(cores())
        self._device = choose_device(EngineConfig(model=model, dtype=dtype, device=device))
        loaded = AutoModelForCausalLM.from_pretrained(
            model_folder(model), dtype=getattr(torch, dtype)
        )
        self._model = loaded.to(self._device.torch, self._device.compute).eval()
        # no end tokens: generate takes those that its argument lacks from here
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    def forget(self) -> None:
        """It keeps nothing."""

    def generate(self, prompts: Tokens, tokens: int) -> Tokens:
        outputs: Tokens = []
        for start in range(0, len(prompts), BATCH):
            outputs += self._batch(prompts[start : start + BATCH], tokens)
        return outputs

    def _batch(self, prompts: Tokens, tokens: int) -> Tokens:
        import torch

        width = max(map(len, prompts))
        ids = torch.zeros((len(prompts), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        done = self._model.generate(
            ids.to(self._device.torch),
            attention_mask=mask.to(self._device.torch),
            max_new_tokens=tokens,
        )
        new: Tokens = done[:, width:].tolist()
        return new


def model_folder(model: str) -> Path:
    """The folder that vLLM and transformers read; of a GGUF file one is made first."""
    from surge_beam.gpu.gguf_folder import folder_of_gguf
    from surge_beam.gpu.text_tokenizer import GGUF, find_model

    path = find_model(model)
    return folder_of_gguf(path) if path.suffix == GGUF else path
