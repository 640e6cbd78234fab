"""Where the time of a step goes: ``python -m surge_beam.gpu.step_profile``.

Prints one decode step and one prefill, by part, beside a floor: the same linear layers alone on
the same number of rows, and the bytes of the KV at the speed at which this machine copies memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from surge_beam.gpu.attention import TorchAttention
from surge_beam.gpu.engine import Engine
from surge_beam.gpu.language_model import load_language_model
from surge_beam.gpu.model_runner import ModelRunner
from surge_beam.gpu.models.linear import padded_rows
from surge_beam.gpu.runner import Sampled, StepBatch
from surge_beam.gpu.step_times import StepTimer
from surge_beam.records import EngineConfig, Request, SamplingParams

PARTS = ("attention", "head", "sampling", "planning")
_LINEAR = ("mkldnn::_linear_pointwise", "aten::linear", "aten::addmm", "aten::mm")


class ProfiledRunner(ModelRunner):
    """Names the parts of its steps for torch's profiler."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        head = self.model.decoder.head

        def named(x: Tensor) -> Tensor:
            with record_function("head"):
                return head(x)

        self.model.decoder.head = named  # type: ignore[assignment]

    def sample(self, logits: Tensor, batch: StepBatch) -> Sampled:
        with record_function("sampling"):
            return super().sample(logits, batch)

    def plan(self, batch: StepBatch) -> Any:
        with record_function("planning"):
            return super().plan(batch)

    def attend(
        self, attention: TorchAttention, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        with record_function("attention"):
            return super().attend(attention, layer, query, key, value)


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """Milliseconds of a step.

    Attributes:
      total: of the whole step.
      parts: ``linear`` (the head apart), ``attention``, ``head``, ``sampling``, ``other`` (norms,
        rope, activation, embedding), and ``python``: planning and whatever else is no tensor
        operation, less what the profiler itself takes for each of them.
      floor: linear layers and head alone, and the KV's bytes at copying speed.
    """

    total: float
    parts: dict[str, float]
    floor: dict[str, float]


def profile_step(timer: StepTimer, batch: StepBatch) -> StepProfile:
    """Runs a step ``timer.repeats`` times under the profiler and without it; medians."""
    runner = timer.runner
    total = timer.median(lambda: runner.step(batch))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        began = timer.clock()
        for _ in range(timer.repeats):
            runner.step(batch)
        profiled = (timer.clock() - began) / timer.repeats
    spent: dict[str, float] = defaultdict(float)
    operations = 0
    for event in recorded.events():
        if event.name in PARTS or (event.cpu_parent and event.cpu_parent.name not in PARTS):
            continue
        operations += 1
        part = event.cpu_parent.name if event.cpu_parent else ""
        if part == "planning":
            continue
        if not part:
            part = "linear" if event.name in _LINEAR else "other"
        spent[part] += event.cpu_time_total / 1e6 / timer.repeats
    parts = {name: spent[name] for name in ("linear", "attention", "head", "sampling", "other")}
    own = profiled - sum(parts.values()) - _profiler_seconds(timer) * operations / timer.repeats
    parts["python"] = max(0.0, own)
    scale = total / sum(parts.values())
    return StepProfile(
        total=1e3 * total,
        parts={name: 1e3 * seconds * scale for name, seconds in parts.items()},
        floor=_floor(runner, batch, timer),
    )


@torch.inference_mode()
def _profiler_seconds(timer: StepTimer, calls: int = 2000) -> float:
    """What recording one operation takes."""
    x = torch.zeros(4)

    def seconds() -> float:
        began = timer.clock()
        for _ in range(calls):
            x.view(2, 2)
        return timer.clock() - began

    seconds()
    plain = seconds()
    with profile(activities=[ProfilerActivity.CPU]):
        recorded = seconds()
    return max(0.0, recorded - plain) / calls


@torch.inference_mode()
def _floor(runner: ModelRunner, batch: StepBatch, timer: StepTimer) -> dict[str, float]:
    decoder = runner.model.decoder
    rows = padded_rows(len(batch.ids))
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
        decoder.head(x[: padded_rows(len(batch.rows))])

    kv_bytes = int((batch.context + batch.counts).sum()) * runner.page_bytes // runner.page_size
    source = torch.ones(max(1, kv_bytes // 4), dtype=torch.float32)
    target = torch.empty_like(source)

    # a copy reads and writes: half of its time is the reading
    copying = timer.median(lambda: target.copy_(source)) / 2
    return {
        "linear": 1e3 * timer.median(layers),
        "head": 1e3 * timer.median(head),
        "kv at copying speed": 1e3 * copying,
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
    decode = profile_step(timer, timer.batch(options.rows, options.context, 0))
    prefill = profile_step(timer, timer.batch(0, 0, options.prompt))
    loop = engine_overhead(runner, options.rows, options.context, options.repeats)
    decode.parts["python"] += loop
    decode = dataclasses.replace(decode, total=decode.total + loop)
    for name, step in (
        (f"decode, {options.rows} rows after {options.context} tokens", decode),
        (f"prefill, {options.prompt} tokens", prefill),
    ):
        print(f"{name}: {step.total:.1f} ms")
        for part, ms in step.parts.items():
            print(f"  {part:<22}{ms:8.1f} ms {100 * ms / step.total:6.1f} %")
        for part, ms in step.floor.items():
            print(f"  floor: {part:<15}{ms:8.1f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
