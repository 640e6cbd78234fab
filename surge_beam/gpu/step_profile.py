"""Where the time of a step goes: ``python -m surge_beam.gpu.step_profile``.

Prints one decode step and one prefill, by part, beside a floor: the same linear layers alone on
the same number of rows, and the bytes of the KV at the speed at which this machine copies memory.
Step and floor take turns, and how often the floor the step takes is the median over turns.
Python's own share is what the same step takes on a model of as many layers that are next to
nothing, but for its linear layers and its attention kernel, which work on as many rows and keys. It
is less than that, as the other operations take their time too.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import LlamaConfig

from surge_beam.gpu.engine import Engine
from surge_beam.gpu.kernels.operations import CompiledOperations
from surge_beam.gpu.language_model import LanguageModel, load_language_model
from surge_beam.gpu.model_runner import ModelRunner
from surge_beam.gpu.models.decoder import Decoder
from surge_beam.gpu.models.weights import TensorSource
from surge_beam.gpu.runner import Sampled, StepBatch
from surge_beam.gpu.step_times import StepTimer
from surge_beam.records import EngineConfig, Request, SamplingParams

PARTS = ("linear", "attention", "elementwise", "head", "sampling", "planning")
_LINEAR = ("qkv", "out", "gate_and_up", "down")
_ELEMENTWISE = ("add_norm", "gated")
_KERNEL = "attention kernel"  # a part of a part
_TURN = "turn"

_Call = TypeVar("_Call", bound=Callable[..., Any])


class _Stopwatch:
    """Adds up the seconds of named calls."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys((*PARTS, _KERNEL), 0.0)
        self._waits = device.type == "cuda"

    def timed(self, part: str, call: _Call) -> _Call:
        def run(*arguments: Any, **options: Any) -> Any:
            began = self._now()
            result = call(*arguments, **options)
            self.seconds[part] += self._now() - began
            return result

        return run  # type: ignore[return-value]

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize()
        return time.perf_counter()


class ProfiledRunner(ModelRunner):
    """A runner whose parts' times are taken while ``watch`` is set.

    It changes the model's own parts for that time. It runs no CUDA graphs, of whose parts no times
    can be taken.
    """

    watch: _Stopwatch | None = None

    def _new_graphs(self) -> None:
        return None

    def sample(self, logits: Tensor, batch: StepBatch) -> Sampled:
        call = super().sample
        return (
            self.watch.timed("sampling", call)(logits, batch) if self.watch else call(logits, batch)
        )

    def plan(self, batch: StepBatch) -> Any:
        call = super().plan
        return self.watch.timed("planning", call)(batch) if self.watch else call(batch)

    def layers(self, plans: Any, rows: Any) -> Any:
        call = super().layers
        return self.watch.timed("planning", call)(plans, rows) if self.watch else call(plans, rows)

    def profiled(self, call: Callable[[], object]) -> dict[str, float]:
        """Seconds of each part in a call, of the attention kernel in its part where it is compiled,
        and ``other``, what is left.
        """
        decoder = self.model.decoder
        watch = _Stopwatch(decoder.device)
        places: list[tuple[Any, str, str]] = [(decoder, "head", "head")]
        places += [(block, name, "linear") for block in decoder.blocks for name in _LINEAR]
        places += [(decoder.operations, name, "elementwise") for name in _ELEMENTWISE]
        places += [(decoder.operations, "mix", "attention")]
        if isinstance(decoder.operations, CompiledOperations):
            places += [(decoder.operations, "attend", _KERNEL)]
        kept = [getattr(holder, name) for holder, name, _ in places]
        self.watch, began = watch, time.perf_counter()
        for (holder, name, part), original in zip(places, kept, strict=True):
            setattr(holder, name, watch.timed(part, original))
        try:
            call()
            whole = time.perf_counter() - began
        finally:
            self.watch = None
            for (holder, name, _), original in zip(places, kept, strict=True):
                setattr(holder, name, original)
        parts = sum(watch.seconds[part] for part in PARTS)
        return {**watch.seconds, "other": whole - parts}


class _Hollow(TensorSource):
    """Weights of a model that computes next to nothing: every matrix is 32 by 32."""

    width = 32

    def find(self, name: str) -> Tensor | None:
        """See ``TensorSource``."""
        if name.endswith("bias"):
            return None
        shape = (self.width,) if "norm" in name else (self.width, self.width)
        return torch.randn(shape, device=self.device).to(self.dtype)


def hollow_runner(model: LanguageModel, *, pages: int, page_size: int) -> ProfiledRunner:
    """A runner of as many layers that compute next to nothing."""
    width = _Hollow.width
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width,
        vocab_size=width,
        num_hidden_layers=model.decoder.layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    weights = _Hollow(dtype=model.decoder.dtype, device=model.decoder.device)
    decoder = Decoder(config, weights)
    hollow = dataclasses.replace(model, decoder=decoder, vocabulary=decoder.vocab)
    return ProfiledRunner(hollow, pages=pages, page_size=page_size)


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """Milliseconds of a step.

    Attributes:
      total: of the whole step.
      parts: ``linear`` (the head apart), ``attention`` (rotary positions and the append
        included), ``elementwise`` (norms, activation), ``head``, ``sampling``, ``planning``, and
        ``other``, what is left.
      python: of the whole step, at most; it is a share of every part.
      floor: linear layers and head alone, and the KV's bytes at copying speed.
      over_floor: the step over the sum of ``floor``.
    """

    total: float
    parts: dict[str, float]
    python: float
    floor: dict[str, float]
    over_floor: float


def profile_step(
    timer: StepTimer, hollow: StepTimer, rows: int, context: int, prompt: int
) -> StepProfile:
    """Medians over ``timer.repeats`` runs of the step that ``StepTimer.batch`` makes of these."""
    runner = timer.runner
    batch = timer.batch(rows, context, prompt)
    steps, floor = _in_turns(timer, lambda: runner.step(batch), _floor(runner, batch))
    total = statistics.median(steps)
    parts = _parts(timer, batch)
    del parts[_KERNEL]  # it is in its part
    scale = total / sum(parts.values())  # without what the watching takes
    nothing = _parts(hollow, hollow.batch(rows, context, prompt))
    kernels = nothing.pop(_KERNEL) + nothing["linear"] + nothing["head"]
    floors = [sum(turn) for turn in zip(*floor.values(), strict=True)]
    return StepProfile(
        total=1e3 * total,
        parts={name: 1e3 * seconds * scale for name, seconds in parts.items()},
        python=1e3 * (sum(nothing.values()) - kernels),
        floor={name: 1e3 * statistics.median(seconds) for name, seconds in floor.items()},
        over_floor=statistics.median(a / b for a, b in zip(steps, floors, strict=True)),
    )


@torch.inference_mode()
def _in_turns(
    timer: StepTimer, step: Callable[[], object], floor: dict[str, tuple[Callable[[], object], int]]
) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds of a step and of each part of its floor, which is a share of a call: 1 / n."""
    watch = _Stopwatch(timer.runner.model.decoder.device)

    def seconds(call: Callable[[], object]) -> float:
        watch.seconds[_TURN] = 0.0
        watch.timed(_TURN, call)()
        return watch.seconds[_TURN]

    calls = [step, *(call for call, _ in floor.values())]
    for call in calls:
        call()
    steps: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in floor}
    for _ in range(timer.repeats):
        steps.append(seconds(step))
        for name, (call, share) in floor.items():
            found[name].append(seconds(call) / share)
    return steps, found


def _parts(timer: StepTimer, batch: StepBatch) -> dict[str, float]:
    """Mean seconds of each part."""
    runner = timer.runner
    assert isinstance(runner, ProfiledRunner)
    runner.step(batch)
    found = [runner.profiled(lambda: runner.step(batch)) for _ in range(timer.repeats)]
    return {part: statistics.fmean(seconds[part] for seconds in found) for part in found[0]}


def _floor(runner: ModelRunner, batch: StepBatch) -> dict[str, tuple[Callable[[], object], int]]:
    decoder = runner.model.decoder
    rows = decoder.padded(len(batch.ids))
    x = torch.randn(rows, decoder.width, dtype=decoder.dtype, device=decoder.device)
    wide = torch.randn(
        rows, decoder.blocks[0].down.in_features, dtype=decoder.dtype, device=decoder.device
    )
    mixed = torch.randn(
        rows, decoder.heads * decoder.head_dim, dtype=decoder.dtype, device=decoder.device
    )

    def layers() -> None:
        for block in decoder.blocks:
            block.qkv(x)
            block.out(mixed)
            block.gate_and_up(x)
            block.down(wide)

    def head() -> None:
        decoder.head(x[: decoder.padded(len(batch.rows))])

    kv_bytes = int((batch.context + batch.counts).sum()) * runner.page_bytes // runner.page_size
    source = torch.ones(max(1, kv_bytes // 4), dtype=torch.float32, device=decoder.device)
    target = torch.empty_like(source)

    return {
        "linear": (layers, 1),
        "head": (head, 1),
        # a copy reads and writes: half of its time is the reading
        "kv at copying speed": (lambda: target.copy_(source), 2),
    }


def engine_overhead(runner: ModelRunner, rows: int, context: int, steps: int) -> float:
    """Milliseconds a decode step spends in the engine's own loop, outside the runner."""
    config = EngineConfig(max_sequences=rows, schedule="mb", max_prefill_tokens=4096)
    inside = 0.0
    step = runner.step

    def timed(batch: StepBatch) -> Sampled:
        nonlocal inside
        began = time.perf_counter()
        sampled = step(batch)
        inside += time.perf_counter() - began
        return sampled

    runner.step = timed  # type: ignore[method-assign]
    engine = Engine(config, runner=runner)
    sampling = SamplingParams(max_tokens=steps + 8, ignore_eos=True)
    for row in range(rows):
        ids = tuple((row + i * 7) % 1000 + 3 for i in range(context))
        engine.submit(Request(custom_id=str(row), prompt_ids=ids, sampling=sampling))
    while engine.stats.steps["decode"] < 3:
        engine.step()
    inside, began = 0.0, time.perf_counter()
    for _ in range(steps):
        engine.step()
    total = time.perf_counter() - began
    runner.step = step  # type: ignore[method-assign]
    return 1e3 * (total - inside) / steps


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m surge_beam.gpu.step_profile", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=32, help="sequences of the decode step")
    parser.add_argument("--context", type=int, default=256, help="tokens of each")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args(arguments)
    config = EngineConfig(model=options.model, dtype=options.dtype, device=options.device)
    model = load_language_model(config)
    a_row = -(-(options.context + options.repeats + 32) // config.page_size)
    pages = options.rows * (a_row + 1) + -(-options.prompt // config.page_size)
    runner = ProfiledRunner(model, pages=pages, page_size=config.page_size)
    timer = StepTimer(runner, repeats=options.repeats)
    hollow = StepTimer(
        hollow_runner(model, pages=pages, page_size=config.page_size), repeats=options.repeats
    )
    decode = profile_step(timer, hollow, options.rows, options.context, 0)
    prefill = profile_step(timer, hollow, 0, 0, options.prompt)
    loop = engine_overhead(runner, options.rows, options.context, options.repeats)
    decode = dataclasses.replace(
        decode,
        total=decode.total + loop,
        over_floor=decode.over_floor * (1 + loop / decode.total),
        python=decode.python + loop,
        parts={**decode.parts, "engine": loop},
    )
    for name, step in (
        (f"decode, {options.rows} rows after {options.context} tokens", decode),
        (f"prefill, {options.prompt} tokens", prefill),
    ):
        print(f"{name}: {step.total:.1f} ms")
        for part, ms in step.parts.items():
            print(f"  {part:<22}{ms:8.1f} ms {100 * ms / step.total:6.1f} %")
        print(
            f"  of which Python, most {step.python:7.1f} ms {100 * step.python / step.total:6.1f} %"
        )
        for part, ms in step.floor.items():
            print(f"  floor: {part:<15}{ms:8.1f} ms")
        print(f"  step / floor {step.over_floor:18.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
