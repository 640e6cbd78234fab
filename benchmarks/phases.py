"""Exclusive batching, mixed batching and EB+ on the engine itself: does EB+ keep up with the better
of the two? ``python benchmarks/phases.py --help``

The device is calibrated first, unless a profile is given. Each cell of the grid has requests of its
own: random tokens, so that nothing is shared, and output lengths that are forced (geometric, up to
four times their mean). As many are unfinished as the cell's concurrency says, and each of them has
a slot. In the two shifts the second half of the requests is of another kind. All schedules get the
same requests, each on an engine of its own, and take turns step by step.

EB+ is compared with whichever of the others has the lower median, within each round; the median of
these ratios is to be at most 1.03.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import (
    WORK,
    describe_machine,
    machine,
    median,
    save,
    say,
    show,
    spread,
    table,
)
from benchmarks.turns import Drive, take_turns
from surge_beam.policy.simulate import Trace, join_traces, synthetic_trace
from surge_beam.records import EngineConfig, Request, SamplingParams

if TYPE_CHECKING:
    from surge_beam.gpu.engine import Engine
    from surge_beam.gpu.runner import Runner

SCHEDULES = ("eb", "mb", "eb+")
TOLERANCE = 1.03
PROMPTS, OUTPUTS = (16, 96), (8, 32)  # short and long, mean tokens
REQUESTS = {4: 24, 16: 64, 64: 192, 128: 256}  # by concurrency
SHIFT_REQUESTS = 128  # of each half
LONGEST_OUTPUT = 4  # times the mean
KV_BYTES = 4 << 30

Prompts = Sequence[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Cell:
    """Attributes:
    name: concurrency, and mean tokens of prompts and outputs.
    trace: the requests, and how many may be unfinished when each arrives.
    """

    name: str
    trace: Trace

    @property
    def slots(self) -> int:
        return int(self.trace.concurrency.max())


def grid(scale: float = 1.0) -> list[Cell]:
    """Short and long prompts and outputs at each concurrency, then the shifts of lengths and of
    concurrency. ``scale`` is a share of the requests.
    """
    cells: list[Cell] = []

    def trace(count: int, prompt: int, output: int, concurrency: int, seed: int) -> Trace:
        drawn = synthetic_trace(
            max(1, round(count * scale)),
            prompt,
            output,
            seed=seed,
            prompt_law="uniform",
            concurrency=concurrency,
        )
        return dataclasses.replace(
            drawn, outputs=np.minimum(drawn.outputs, LONGEST_OUTPUT * output)
        )

    for concurrency, count in REQUESTS.items():
        for prompt in PROMPTS:
            for output in OUTPUTS:
                requests = trace(count, prompt, output, concurrency, seed=len(cells))
                cells.append(Cell(_name(concurrency, prompt, output), requests))
    (short, long), (few, many) = PROMPTS, OUTPUTS
    lengths = [
        trace(SHIFT_REQUESTS, long, few, 64, 100),
        trace(SHIFT_REQUESTS, short, many, 64, 101),
    ]
    shifting = _name(64, f"{long} then {short}", f"{few} then {many}")
    cells.append(Cell(shifting, join_traces(lengths)))
    loads = [trace(SHIFT_REQUESTS, short, many, n, 102 + n) for n in (8, 128)]
    cells.append(Cell(_name("8 then 128", short, many), join_traces(loads)))
    return cells


def _name(concurrency: object, prompt: object, output: object) -> str:
    return f"{concurrency} at once, prompts {prompt}, outputs {output}"


def random_prompts(trace: Trace, vocabulary: int, seed: int) -> Prompts:
    """Token ids of the trace's prompt lengths."""
    random = np.random.default_rng(seed)
    return [tuple(random.integers(0, vocabulary, n).tolist()) for n in trace.prompts]


def drive(engine: Engine, trace: Trace, prompts: Prompts) -> Drive:
    """An engine that is to go through a trace."""
    requests = [
        Request(
            custom_id=str(i),
            prompt_ids=ids,
            sampling=SamplingParams(max_tokens=tokens, ignore_eos=True),
        )
        for i, (ids, tokens) in enumerate(zip(prompts, trace.outputs.tolist(), strict=True))
    ]
    return Drive(engine, requests, trace.concurrency.tolist())


def outputs(done: Drive, trace: Trace) -> list[tuple[int, ...]]:
    """The tokens of every request.

    Raises:
      RuntimeError: if one ended with fewer or more tokens than the trace says.
    """
    found = [done.outputs[str(i)] for i in range(len(trace))]
    wrong = [i for i, n in enumerate(trace.outputs.tolist()) if len(found[i]) != n]
    if wrong:
        raise RuntimeError(f"requests {wrong[:8]} ended before or after their forced length")
    return found


def run_cell(
    config: EngineConfig, runners: Mapping[str, Runner], cell: Cell, prompts: Prompts
) -> dict[str, dict[str, Any]]:
    """Seconds and steps of each schedule, and how many outputs are those of the first one."""
    from surge_beam.gpu.engine import Engine

    drives: dict[str, Drive] = {}
    for schedule, runner in runners.items():
        recipe = dataclasses.replace(config, schedule=schedule, max_sequences=cell.slots)
        # a new page table over the same pool, so that its memory is touched once
        drives[schedule] = drive(Engine(recipe, runner=runner), cell.trace, prompts)
    take_turns(drives.values())
    tokens = {schedule: outputs(done, cell.trace) for schedule, done in drives.items()}
    first = next(iter(tokens.values()))
    return {
        schedule: {
            "seconds": done.seconds,
            "steps": dict(done.engine.stats.steps),
            "same": sum(a == b for a, b in zip(first, tokens[schedule], strict=True)),
        }
        for schedule, done in drives.items()
    }


def judge(seconds: Mapping[str, Sequence[float]]) -> tuple[str, list[float]]:
    """Which of EB and MB has the lower median, and EB+ over it in each round.

    The minimum of each round would be lower than either by the noise of both.
    """
    better = min(("eb", "mb"), key=lambda schedule: median(seconds[schedule]) or 0.0)
    ratios = [a / b for a, b in zip(seconds["eb+"], seconds[better], strict=True)]
    return better, ratios


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from surge_beam.gpu.loading import load_runner

    about = machine()
    config = EngineConfig(
        model=args.model, dtype=args.dtype, device=args.device, kv_bytes=args.kv_bytes
    )
    profile = args.profile or _calibrate(config)
    config = dataclasses.replace(config, profile=profile)
    cells = [c for c in grid(args.scale) if any(part in c.name for part in args.cells.split(";"))]
    results: dict[str, Any] = {
        "machine": about,
        "model": args.model,
        "step_costs": json.loads(Path(profile).read_text("utf-8"))["step_costs"],
        "cells": [{"name": cell.name, "requests": len(cell.trace)} for cell in cells],
        "rounds": [],
    }
    runners = {schedule: load_runner(config) for schedule in SCHEDULES}
    vocabulary, context = runners["eb"].vocabulary, runners["eb"].context_length
    prompts = [random_prompts(c.trace, vocabulary, seed) for seed, c in enumerate(cells)]
    longest = max(int((cell.trace.prompts + cell.trace.outputs).max()) for cell in cells)
    if longest > context:
        raise SystemExit(f"the grid needs a context of {longest}, not {context}")
    run_cell(config, runners, cells[0], prompts[0])  # a warm-up
    for number in range(args.rounds):
        results["rounds"].append([])
        for cell, ids in zip(cells, prompts, strict=True):
            found = run_cell(config, runners, cell, ids)
            results["rounds"][-1].append(found)
            times = ", ".join(f"{name} {run['seconds']:.1f} s" for name, run in found.items())
            say(f"round {number + 1}, {cell.name}: {times}")
            save(args.json, results)
    for runner in runners.values():
        runner.close()
    return results


def _calibrate(config: EngineConfig) -> str:
    from surge_beam.gpu.step_times import profile

    say("calibrating")
    path = WORK / "phases-profile.json"
    save(str(path), profile(config))
    return str(path)


def render(results: Mapping[str, Any]) -> str:
    """The grid as a Markdown table, and how many cells are within the tolerance."""
    rounds = results["rounds"]
    costs = ", ".join(f"{name} {value:.3g}" for name, value in results["step_costs"].items())
    body, within, worst = [], 0, 0.0
    for index, cell in enumerate(results["cells"]):
        runs = [found[index] for found in rounds]
        seconds = {s: [run[s]["seconds"] for run in runs] for s in SCHEDULES}
        better, ratios = judge(seconds)
        ratio = median(ratios) or 0.0
        within += ratio <= TOLERANCE
        worst = max(worst, ratio)
        same = min(run[s]["same"] for run in runs for s in SCHEDULES)
        body.append(
            [
                cell["name"],
                cell["requests"],
                *(median(seconds[s]) for s in SCHEDULES),
                better.upper(),
                f"{ratio:.3f}",
                spread(ratios),
                "yes" if ratio <= TOLERANCE else "NO",
                _steps(runs[0]["eb+"]["steps"]),
                f"{same} of {cell['requests']}",
            ]
        )
    head = ["cell", "requests", *(f"{s.upper()}, s" for s in SCHEDULES), "better"]
    head += ["EB+ / better", "lowest to highest", "within 3 %"]
    head += ["steps of EB+: prefill, mixed, decode", "same tokens"]
    return "\n".join(
        [
            describe_machine(results["machine"]),
            f"{results['model']}, rounds: {len(rounds)}; step costs: {costs}.",
            "",
            table(head, body),
            "",
            f"{within} of {len(body)} cells within 3 %; the worst is {worst:.3f}.",
        ]
    )


def _steps(steps: Mapping[str, int]) -> str:
    return ", ".join(show(steps.get(kind, 0)) for kind in ("prefill", "mixed", "decode"))


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--model", default=EngineConfig.model)
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device", default="auto")
    p.add_argument("--profile", help="step times that surge_beam.gpu.step_times wrote")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--scale", type=float, default=1.0, help="share of the requests")
    p.add_argument("--cells", default="", help="parts of names, ';' between; default all")
    p.add_argument("--kv_bytes", type=int, default=KV_BYTES)
    p.add_argument("--json", help="file for the raw figures, written after each cell")
    args = p.parse_args(argv)
    results = measure(args)
    print(render(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
