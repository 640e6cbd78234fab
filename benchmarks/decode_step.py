"""One step of the decode engine on a CPU: ``python benchmarks/decode_step.py --help``.

By this package's kernels, by the same with weights that are numbers of bfloat16, with oneDNN's
matrix products instead of its own, and with torch alone.

All models lie in one process and take turns, so that a busy machine slows them alike; ratios
are taken within a turn, then their median.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import describe_machine, machine, median, save, show, spread, table
from surge_beam.gpu.language_model import load_language_model
from surge_beam.gpu.model_runner import ModelRunner
from surge_beam.gpu.step_times import StepTimer
from surge_beam.records import EngineConfig

PAGE = 16
COMPILED, NARROW = "compiled kernels", "of bfloat16"
ONEDNN, TORCH = "with oneDNN's products", "torch alone"
# rows that decode, tokens before each, prompt tokens
STEPS = ((1, 256, 0), (8, 256, 0), (32, 256, 0), (64, 256, 0), (0, 0, 128), (0, 0, 512))


def timers(model: str) -> dict[str, StepTimer]:
    def load(kernels: str, dtype: str = "float32") -> Any:
        return load_language_model(
            EngineConfig(model=model, dtype=dtype, device="cpu", kernels=kernels)
        )

    models = {COMPILED: load("auto"), NARROW: load("auto", "bfloat16")}
    models |= {ONEDNN: load("torch"), TORCH: load("torch")}
    models[ONEDNN].decoder.operations = models[COMPILED].decoder.operations
    pages = 2 + max(
        rows * -(-(before + 1) // PAGE) + -(-new // PAGE) for rows, before, new in STEPS
    )
    return {
        name: StepTimer(ModelRunner(model, pages=pages, page_size=PAGE))
        for name, model in models.items()
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found = timers(args.model)
    results: dict[str, Any] = {"machine": machine(), "steps": []}
    for step in STEPS:
        batches = {name: timer.batch(*step) for name, timer in found.items()}
        turns = []
        for turn in range(args.turns + 1):
            seconds = {}
            for name, timer in found.items():
                began = time.perf_counter()
                timer.runner.step(batches[name])
                seconds[name] = time.perf_counter() - began
            if turn:  # the first one warms up
                turns.append(seconds)
        results["steps"].append({"step": step, "turns": turns})
    return results


def render(results: dict[str, Any]) -> str:
    body = []
    for entry in results["steps"]:
        (rows, before, new), turns = entry["step"], entry["turns"]
        row = [f"{rows} rows after {before} tokens" if rows else f"a prompt of {new} tokens"]
        every = (COMPILED, NARROW, ONEDNN, TORCH)
        row += [show(1e3 * median([t[name] for t in turns])) for name in every]
        for name in every[1:]:
            ratios = [t[name] / t[COMPILED] for t in turns]
            row.append(f"{show(median(ratios))} ({spread(ratios)})")
        body.append(row)
    head = [
        "step",
        f"{COMPILED}, ms",
        f"{NARROW}, ms",
        f"{ONEDNN}, ms",
        f"{TORCH}, ms",
        "ratio to bfloat16's",
        "ratio to oneDNN's",
        "ratio to torch",
    ]
    return "\n".join([describe_machine(results["machine"]), "", table(head, body)])


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--turns", type=int, default=9)
    p.add_argument("--model", default="SmolLM2-135M-Instruct")
    p.add_argument("--json", help="file for the raw figures")
    args = p.parse_args(argv)
    results = measure(args)
    save(args.json, results)
    print(render(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
