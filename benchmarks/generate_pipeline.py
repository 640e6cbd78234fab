"""The whole generation job against Beam with vLLM in a DoFn and against a plain vLLM script:
``.venv-vllm/bin/python benchmarks/generate_pipeline.py --help`` (``make test-vllm`` makes that
environment).

Rounds are interleaved, every measurement has a process of its own, and loading is not timed. Rows
are shuffled once: their order of arrival. Ratios are taken within a round, then their median.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import (
    WORK,
    describe_machine,
    in_fresh_process,
    machine,
    median,
    save,
    say,
    shared_data,
    show,
    spread,
    table,
)
from tests.gpu.real_prompts import few_shot, over_documents

MODEL = "SmolLM2-135M-Instruct"
OURS = ("ours, engine vllm", "ours, engine native")
PEERS = ("Beam DoFn with vLLM", "plain vLLM script, sorted")


def dataset(name: str, rows: int) -> str:
    """A Parquet file of prompts in random order; returns its path."""
    each = 16
    if name == "bbh":
        prompts = few_shot(shared_data(), tasks=-(-rows // each), each=each)
    else:
        prompts = over_documents(shared_data(), documents=-(-rows // 5), each=5)
    prompts = prompts[:rows]
    random.Random(0).shuffle(prompts)
    WORK.mkdir(parents=True, exist_ok=True)
    path = WORK / f"prompts-{name}-{rows}.parquet"
    columns = {
        "id": [f"{name}-{i}" for i in range(len(prompts))],
        "part": [f"p{i % 8}" for i in range(len(prompts))],
        "prompt": prompts,
    }
    pq.write_table(pa.table(columns), path)
    return str(path)


def methods(args: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
    common = {"model": args.model, "max_tokens": args.max_tokens, "slots": args.slots}
    ours = "benchmarks.generate_peers:ours"
    found = {
        OURS[0]: (ours, {**common, "engine": "vllm"}),
        OURS[1]: (ours, {**common, "engine": "native"}),
        PEERS[0]: ("benchmarks.generate_peers:beam_dofn", {**common, "batch": args.batch}),
        PEERS[1]: ("benchmarks.generate_peers:script", common),
    }
    wanted = (args.methods or "").split(";")
    return {name: how for name, how in found.items() if any(part in name for part in wanted)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {"machine": machine(), "data": {}}
    chosen = methods(args)
    for name in args.data:
        path = dataset(name, args.rows)
        rounds: list[dict[str, Any]] = []
        for number in range(args.rounds):
            order = list(chosen)[number % len(chosen) :] + list(chosen)[: number % len(chosen)]
            found = {}
            for method in order:
                target, params = chosen[method]
                found[method] = in_fresh_process(target, {"path": path, **params})
                seconds = found[method]["seconds"]
                say(f"{name}, round {number + 1}  {method}: {seconds:.1f} s")
            rounds.append(found)
        results["data"][name] = {"rows": pq.read_metadata(path).num_rows, "rounds": rounds}
    return results


def render(results: dict[str, Any], args: argparse.Namespace) -> str:
    lines = [describe_machine(results["machine"]), ""]
    for name, found in results["data"].items():
        rows, rounds = found["rows"], found["rounds"]
        chosen = list(rounds[0])
        reference = rounds[0].get(PEERS[1], rounds[0][chosen[0]])["texts"]
        head = ["method", "rows/s", "lowest to highest", "prefix tokens saved", "peak MiB", "same"]
        body = []
        for method in chosen:
            rates = [rows / r[method]["seconds"] for r in rounds]
            first = rounds[0][method]
            same = sum(reference[i] == text for i, text in first["texts"].items())
            body.append(
                [
                    method,
                    median(rates),
                    spread(rates),
                    first["saved"],
                    first["peak"] >> 20,
                    f"{same} of {rows}",
                ]
            )
        lines += [f"{name}: {rows} rows, {args.max_tokens} tokens each, {len(rounds)} rounds", ""]
        lines += [table(head, body), ""]
        body = []
        for peer in (p for p in PEERS if p in chosen):
            row = [peer]
            for own in (o for o in OURS if o in chosen):
                ratios = [r[peer]["seconds"] / r[own]["seconds"] for r in rounds]
                row.append(f"{show(median(ratios))} ({spread(ratios)})")
            body.append(row)
        lines += [table(["peer", *(f"{o} / peer" for o in OURS if o in chosen)], body), ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--rows", type=int, default=160)
    p.add_argument("--max_tokens", type=int, default=16)
    p.add_argument("--slots", type=int, default=32)
    p.add_argument("--batch", type=int, default=32, help="elements a call of the DoFn")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--data", nargs="+", default=["bbh", "xquad"], choices=("bbh", "xquad"))
    p.add_argument("--methods", help="parts of names, ';' between; default all")
    p.add_argument("--model", default=MODEL)
    p.add_argument("--json", help="file for the raw figures")
    args = p.parse_args(argv)
    results = measure(args)
    save(args.json, results)
    print(render(results, args))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
