"""Prefix-aware scheduling and prefix-aware attention, each on and off; and who decides admission:
``python benchmarks/admission.py --help``.

The engine runs a shared workload (few-shot prompts of several tasks, in random order) and one in
which nothing is shared (one question a document). Attention that is not prefix-aware reads every
sequence's KV alone; pages are shared in all cases but the last. All requests wait from the start.
Each setting has an engine of its own, and they take turns step by step; ratios are taken within a
round, then their median.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import (
    describe_machine,
    machine,
    median,
    save,
    say,
    shared_data,
    show,
    spread,
    table,
)
from benchmarks.turns import Drive, take_turns
from tests.gpu.real_prompts import few_shot, over_documents

# name -> admission, prefix-aware attention, share_prefixes
SETTINGS = {
    "fcfs, plain attention": ("fcfs", False, True),
    "fcfs, prefix-aware attention": ("fcfs", True, True),
    "prefix order, plain attention": ("prefix", False, True),
    "prefix order, prefix-aware attention": ("prefix", True, True),
    "cost gate, prefix-aware attention": ("cost", True, True),
    "learner, prefix-aware attention": ("learned", True, True),
    "nothing shared at all": ("fcfs", False, False),
}
BASE = "fcfs, prefix-aware attention"
LOADS = ("shared", "not shared")


def workloads(tokenizer: Any, rows: int) -> dict[str, list[list[int]]]:
    data = shared_data()
    few = few_shot(data, tasks=6, each=-(-rows // 6))[:rows]
    over = over_documents(data, documents=2 * rows, each=1)[:rows]
    found = {}
    for name, texts in zip(LOADS, (few, over), strict=True):
        random.Random(0).shuffle(texts)
        found[name] = tokenizer.encode_batch(texts)
    return found


def _alone(tables: Sequence[Any], *_: Any) -> Any:
    """No groups: attention reads every sequence by itself."""
    from surge_beam.gpu.attention_plan import ShareGroups

    return ShareGroups(np.arange(len(tables)), ())


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--rows", type=int, default=48)
    p.add_argument("--max_tokens", type=int, default=24)
    p.add_argument("--slots", type=int, default=12)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--load", nargs="+", default=[*LOADS], choices=LOADS, help="which to run")
    p.add_argument("--profile", help="step times that surge_beam.gpu.step_times wrote")
    p.add_argument("--json", help="file for the raw figures")
    args = p.parse_args(argv)
    about = machine()

    from surge_beam.gpu import model_runner
    from surge_beam.gpu.engine import Engine
    from surge_beam.gpu.model_runner import load_model_runner
    from surge_beam.gpu.text_tokenizer import load_text_tokenizer
    from surge_beam.records import EngineConfig, Request, SamplingParams

    grouping = {True: model_runner.share_groups, False: _alone}

    def group(aware: bool) -> None:
        model_runner.share_groups = grouping[aware]

    base = EngineConfig(
        dtype="float32",
        device="cpu",
        max_sequences=args.slots,
        kv_bytes=1 << 30,
        profile=args.profile,
    )
    configs = {
        name: dataclasses.replace(base, admission=admission, share_prefixes=shares)
        for name, (admission, _, shares) in SETTINGS.items()
    }
    runners = {name: load_model_runner(config) for name, config in configs.items()}
    sampling = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    loads = workloads(load_text_tokenizer(base), args.rows)
    for load in args.load:
        requests = [
            Request(custom_id=str(i), prompt_ids=tuple(ids), sampling=sampling)
            for i, ids in enumerate(loads[load])
        ]
        results[load] = {name: [] for name in SETTINGS}
        for number in range(args.rounds):
            drives = {
                name: Drive(
                    Engine(configs[name], runner=runners[name]),
                    requests,
                    before=functools.partial(group, aware),
                )
                for name, (_, aware, _) in SETTINGS.items()
            }
            take_turns(drives.values())
            for name, drive in drives.items():
                stats = drive.engine.stats
                results[load][name].append(
                    {
                        "seconds": drive.seconds,
                        "saved": stats.prefix_tokens_saved,
                        "refusals": stats.refusals,
                        "read": stats.kv_bytes_read,
                        "unshared": stats.kv_bytes_unshared,
                        "tokens": [drive.outputs[str(i)] for i in range(len(requests))],
                    }
                )
                say(f"{load}, round {number + 1}, {name}: {drive.seconds:.1f} s")
    group(True)
    lines = [describe_machine(about), ""]
    for load, found in results.items():
        reference, rows = found[BASE][0]["tokens"], []
        for name, runs in found.items():
            ratios = [b["seconds"] / r["seconds"] for b, r in zip(found[BASE], runs, strict=True)]
            same = sum(a == b for a, b in zip(reference, runs[0]["tokens"], strict=True))
            rows.append(
                [
                    name,
                    median(r["seconds"] for r in runs),
                    f"{show(median(ratios))} ({spread(ratios)})",
                    runs[0]["saved"],
                    f"{runs[0]['read'] / max(1, runs[0]['unshared']):.0%}",
                    runs[0]["refusals"],
                    f"{same} of {len(reference)}",
                ]
            )
        head = ["setting", "seconds", "speed over " + BASE, "prefix tokens saved", "KV read"]
        lines += [f"{load}: {args.rows} rows", "", table([*head, "refusals", "same"], rows), ""]
    save(args.json, results)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
