"""Figures and tables of ``benchmarks/generate.py``, from what it has measured.

A result holds, besides what it was run with, a list of rounds; a round holds by number format, case
and method what ``generate_engines.measure`` returned, or an ``error``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.common import describe_machine, median, show, spread, table

OURS, VLLM, DEFAULT_BLOCK, TRANSFORMERS = "ours", "vLLM", "vLLM, default block", "transformers"

Found = dict[str, Any]


def seconds_of(
    results: Found, dtype: str, case: str, method: str, order: str
) -> list[float | None]:
    """Seconds of each round for all sequences, scaled up where some were run; None where none."""
    wanted = results["cases"][case]["sequences"]
    found: list[float | None] = []
    for round_ in results["rounds"]:
        run = round_[dtype][case].get(method, {}).get("orders", {}).get(order)
        found.append(run and run["seconds"] * wanted / run["rows"])
    return found


def step_seconds_of(results: Found, dtype: str, case: str, method: str) -> list[float | None]:
    """Seconds of a decode step of all sequences in each round: what n tokens take, less what one
    takes, over n - 1, with the KV of all prompts there.
    """
    steps = results["cases"][case]["max_tokens"] - 1
    warm = [round_[dtype][case].get(method, {}).get("warm") for round_ in results["rounds"]]
    return [w and (w["all"] - w["one"]) / steps for w in warm]


def ratios(over: Sequence[float | None], under: Sequence[float | None]) -> list[float]:
    """Quotients within each round that has both."""
    return [a / b for a, b in zip(over, under, strict=True) if a is not None and b is not None]


def equal_outputs(
    results: Found, dtype: str, case: str, method: str, order: str
) -> tuple[int, int]:
    """Sequences with the tokens that ours decoded, and sequences compared, over all rounds."""
    same = compared = 0
    for round_ in results["rounds"]:
        runs = [round_[dtype][case].get(m, {}).get("orders", {}) for m in (OURS, method)]
        if all(order in run for run in runs):
            pairs = zip(*(run[order]["outputs"] for run in runs), strict=True)
            both = [a == b for a, b in pairs if a is not None and b is not None]
            same, compared = same + sum(both), compared + len(both)
    return same, compared


def failures(results: Found) -> list[str]:
    """What ended without a figure: how, and the last line of what it said."""
    failed = [
        (f"{dtype}, {case}, {method}", found["error"].splitlines())
        for round_ in results["rounds"]
        for dtype, cases in round_.items()
        for case, runs in cases.items()
        for method, found in runs.items()
        if "error" in found
    ]
    return [f"{name}: {' '.join(dict.fromkeys((said[0], said[-1])))}" for name, said in failed]


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def render(results: Found) -> str:
    """Tables of all that was measured, as Markdown."""
    methods, orders = results["methods"], results["orders"]
    peers = [m for m in methods if m != OURS]
    lines = [*_header(results), ""]
    for dtype in results["rounds"][0]:
        for order in orders:
            lines += [f"{dtype}, {order}: seconds, and ratios over ours", ""]
            lines += [_times(results, dtype, order, methods), ""]
            if OURS in methods and peers:
                lines += [_ratio_table(results, dtype, order, peers), ""]
        decoding = [m for m in methods if m != TRANSFORMERS]
        lines += [f"{dtype}, decode alone: tokens a second, and ratios of the time", ""]
        lines += [_decode_table(results, dtype, decoding), ""]
    return "\n".join(lines)


def _header(results: Found) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        describe_machine(results["machine"]),
        f"{results['model']} on {results['device']}; {versions}; "
        f"rounds: {len(results['rounds'])}, scale: {show(results['scale'])}.",
    ]
    rounded = results["device"] == "cpu" and not results["machine"]["bf16"]
    if rounded and "bfloat16" in results["rounds"][0]:
        lines.append(
            "bfloat16: this CPU has no bfloat16 units, so ours rounds the weights and computes in "
            "float32, and transformers is made to do the same; vLLM computes in bfloat16."
        )
    lines += ["", table(*_case_table(results))]
    return lines


def _case_table(results: Found) -> tuple[list[str], list[list[Any]]]:
    head = ["case", "sequences", "prompt tokens", "without what is shared", "tokens decoded"]
    body = [
        [
            name,
            case["sequences"],
            case["prompt_tokens"],
            case["unique_tokens"],
            case["sequences"] * case["max_tokens"],
        ]
        for name, case in results["cases"].items()
    ]
    return head, body


def _times(results: Found, dtype: str, order: str, methods: Sequence[str]) -> str:
    head = ["case", "method", "seconds", "lowest to highest", "output tokens/s", "same tokens"]
    body = []
    for name, case in results["cases"].items():
        for method in methods:
            seconds = seconds_of(results, dtype, name, method, order)
            middle = median(seconds)
            if middle is None:
                continue
            same, compared = equal_outputs(results, dtype, name, method, order)
            rows = {
                found[dtype][name].get(method, {}).get("orders", {}).get(order, {}).get("rows")
                for found in results["rounds"]
            } - {None, case["sequences"]}
            body.append(
                [
                    name,
                    method + "".join(f", from {n} sequences" for n in sorted(rows)),
                    middle,
                    spread(seconds),
                    case["sequences"] * case["max_tokens"] / middle,
                    f"{same} of {compared}" if compared and method != OURS else "",
                ]
            )
    return table(head, body)


def _ratio_table(results: Found, dtype: str, order: str, peers: Sequence[str]) -> str:
    body, middles = [], {peer: [] for peer in peers}
    for name, case in results["cases"].items():
        row = [name]
        own = seconds_of(results, dtype, name, OURS, order)
        for peer in peers:
            found = ratios(seconds_of(results, dtype, name, peer, order), own)
            row.append(_cell(found))
            if found and case["shares"]:
                middles[peer].append(median(found))
        body.append(row)
    means = [show(geometric_mean(middles[peer])) for peer in peers]
    body.append(["geometric mean, cases that share", *means])
    return table(["case", *(f"{peer} / {OURS}" for peer in peers)], body)


def _decode_table(results: Found, dtype: str, methods: Sequence[str]) -> str:
    peers = [m for m in methods if m != OURS]
    head = ["case", *(f"{m}, tokens/s" for m in methods), *(f"{m} / {OURS}" for m in peers)]
    body = []
    for name, case in results["cases"].items():
        steps = {m: step_seconds_of(results, dtype, name, m) for m in methods}
        rates = [[s and case["sequences"] / s for s in steps[m]] for m in methods]
        own = steps.get(OURS, [None] * len(results["rounds"]))
        body.append([name, *map(_cell, rates), *(_cell(ratios(steps[m], own)) for m in peers)])
    return table(head, body)


def _cell(values: Sequence[float | None]) -> str:
    """Median and range."""
    around = spread(values)
    return show(median(values)) + (f" ({around})" if around else "")
