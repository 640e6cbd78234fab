"""Measures how long steps take on this device: ``python -m surge_beam.gpu.step_times``.

What it writes is what ``EngineConfig.profile`` names. Times are of whole steps as the engine runs
them, planning and sampling included, since those are what a phase costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surge_beam.gpu.language_model import load_language_model
from surge_beam.gpu.model_runner import ModelRunner
from surge_beam.gpu.runner import SampleRow, StepBatch
from surge_beam.policy.step_costs import StepCosts, fit
from surge_beam.records import EngineConfig, SamplingParams

PREFILLS = (64, 128, 256, 512)
DECODES = ((1, 128), (8, 128), (32, 128), (1, 512), (8, 512), (32, 512))
MIXES = ((4, 64, 128), (4, 256, 128), (32, 64, 128), (32, 256, 128), (16, 512, 512))


class StepTimer:
    """Runs steps of a given make over random KV.

    Args:
      runner: its pool is overwritten.
      repeats: timed runs a step, of which the median counts.
      clock: seconds.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        repeats: int = 5,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner, self.repeats, self.clock = runner, repeats, clock
        self._random = np.random.default_rng(0)
        with torch.inference_mode():
            runner.pool.normal_()

    def batch(self, decode_rows: int, context: int, prefill_tokens: int) -> StepBatch:
        """A step of rows that decode after ``context`` tokens, and of one prompt's chunk."""
        counts = [1] * decode_rows + [prefill_tokens] * bool(prefill_tokens)
        before = [context] * decode_rows + [0] * bool(prefill_tokens)
        tables, page = [], 0
        for count, held in zip(counts, before, strict=True):
            pages = -(-(count + held) // self.runner.page_size)
            tables.append(np.arange(page, page + pages, dtype=np.int32))
            page += pages
        row = SampleRow(SamplingParams(), 0, 0)
        return StepBatch(
            ids=self._random.integers(0, self.runner.vocabulary, sum(counts)),
            counts=np.array(counts, np.int32),
            context=np.array(before, np.int32),
            block_tables=tables,
            rows=np.cumsum(counts) - 1,
            sample=[row] * len(counts),
        )

    def seconds(self, decode_rows: int, context: int, prefill_tokens: int) -> float:
        """Median seconds of such a step."""
        batch = self.batch(decode_rows, context, prefill_tokens)
        return self.median(lambda: self.runner.step(batch))

    def median(self, call: Callable[[], object]) -> float:
        """Median seconds of a call, after one that warms up."""
        call()
        times = []
        for _ in range(self.repeats):
            began = self.clock()
            call()
            times.append(self.clock() - began)
        return statistics.median(times)


def pages_needed(page_size: int) -> int:
    """Pages of the largest step measured."""
    steps = [(0, 0, n) for n in PREFILLS] + [(r, c, 0) for r, c in DECODES]
    steps += [(r, c, n) for r, n, c in MIXES]
    return max(r * -(-(c + 1) // page_size) + -(-n // page_size) for r, c, n in steps)


def measure(timer: StepTimer) -> StepCosts:
    """Fits the step models to this device: prompts of one request, decode steps at two contexts,
    and mixed steps at several shares.
    """
    return fit(
        [(n, timer.seconds(0, 0, n)) for n in PREFILLS],
        [(rows, context, timer.seconds(rows, context, 0)) for rows, context in DECODES],
        [
            (rows, tokens, context, timer.seconds(rows, context, tokens))
            for rows, tokens, context in MIXES
        ],
    )


def profile(config: EngineConfig, *, repeats: int = 5) -> dict[str, Any]:
    """The profile of a recipe's model on this device, as JSON holds it."""
    model = load_language_model(config)
    runner = ModelRunner(model, pages=pages_needed(config.page_size), page_size=config.page_size)
    costs = measure(StepTimer(runner, repeats=repeats))
    device = model.decoder.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "model": model.name,
        "device": name,
        "threads": torch.get_num_threads(),
        "dtype": str(model.decoder.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "page_size": config.page_size,
        "step_costs": costs.to_dict(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m surge_beam.gpu.step_times", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--page_size", type=int, default=EngineConfig.page_size)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", required=True, help="JSON file to write")
    options = parser.parse_args(arguments)
    config = EngineConfig(
        model=options.model,
        dtype=options.dtype,
        device=options.device,
        page_size=options.page_size,
    )
    found = profile(config, repeats=options.repeats)
    Path(options.output).write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
