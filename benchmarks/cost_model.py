"""Whether T = C * tau + N * c holds: ``python benchmarks/cost_model.py --help``.

tau and c are fitted on five call counts over one shuffled set of texts, so that every call sees
the corpus's mix of lengths; two policies that were not fitted are then predicted over the same
texts: SuperBatches of B_min rows, and one call a partition. Nothing is deduplicated or cached.
Policies take turns, and each one's time is the median of its rounds.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import (
    describe_machine,
    in_fresh_process,
    machine,
    median,
    save,
    say,
    shared_data,
    table,
)
from surge_beam.policy.costs import CostModel, fit

FITS = 5
FEWEST_CALLS, FEWEST_ROWS = 2, 4
HELD_OUT_ROWS = 24
QUICK = {"rows": 256, "rounds": 3}


def sample(rows: int, seed: int) -> tuple[list[str], list[list[str]]]:
    """Whole partitions by service and owner, drawn at random up to ``rows`` rows.

    Returns:
      All their texts shuffled, and the texts by partition.
    """
    corpus = pq.read_table(
        shared_data() / "api_docs_by_service" / "docs.parquet",
        columns=["service", "owner", "text"],
    ).to_pydict()
    partitions: dict[tuple[str, str], list[str]] = {}
    for service, owner, text in zip(*corpus.values(), strict=True):
        partitions.setdefault((service, owner), []).append(text)
    rng = np.random.default_rng(seed)
    keys, chosen, count = list(partitions), [], 0
    for at in rng.permutation(len(keys)).tolist():
        if count >= rows:
            break
        texts = partitions[keys[at]]
        chosen.append(texts)
        count += len(texts)
    texts = [text for part in chosen for text in part]
    return [texts[i] for i in rng.permutation(len(texts)).tolist()], chosen


def even_calls(texts: list[str], calls: int) -> list[list[str]]:
    edges = [len(texts) * i // calls for i in range(calls + 1)]
    return [texts[lo:hi] for lo, hi in itertools.pairwise(edges)]


def policies(texts: list[str], partitions: list[list[str]]) -> dict[str, list[list[str]]]:
    """Calls of every policy; those to fit come first, by their number of calls."""
    most = max(FEWEST_CALLS + 1, len(texts) // FEWEST_ROWS)
    fitted = {round(calls) for calls in np.geomspace(FEWEST_CALLS, most, FITS).tolist()}
    return {
        **{f"fit: {calls} calls": even_calls(texts, calls) for calls in sorted(fitted)},
        "held out: one call a partition": partitions,
        f"held out: calls of {HELD_OUT_ROWS}": even_calls(texts, len(texts) // HELD_OUT_ROWS or 1),
        "held out: one SuperBatch": [texts],
    }


def measure(rows: int, rounds: int, seed: int, model: str) -> dict[str, Any]:
    """Seconds of every policy in every round, and what the job's own calibration says."""
    import dataclasses
    import time

    from surge_beam.gpu.calibrate import calibrate
    from surge_beam.gpu.worker import EncodeWorker
    from surge_beam.records import EncoderConfig

    worker = EncodeWorker(
        EncoderConfig(model=model, device="cpu", dtype="float32", dedupe=False), cache_bytes=0
    )
    texts, partitions = sample(rows, seed)
    plans = {
        name: [pa.array(call, pa.string()) for call in calls]
        for name, calls in policies(texts, partitions).items()
    }
    worker.encode(worker.prepare(pa.array(texts[:64])))
    names, seconds = list(plans), {name: [] for name in plans}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            began = time.perf_counter()
            for call in plans[name]:
                worker.encode(worker.prepare(call))
            seconds[name].append(time.perf_counter() - began)
    began = time.perf_counter()
    own = dataclasses.asdict(calibrate(worker, texts))
    return {
        "texts": len(texts),
        "calls": {name: len(calls) for name, calls in plans.items()},
        "seconds": seconds,
        "calibration": own,
        "calibration_seconds": time.perf_counter() - began,
    }


def judge(found: dict[str, Any]) -> tuple[CostModel, list[list[Any]]]:
    """The fit over all fitted policies, and a table row for every policy."""
    calls, texts = found["calls"], found["texts"]
    middle = {name: median(times) for name, times in found["seconds"].items()}
    fitted = [name for name in calls if name.startswith("fit")]
    model = fit(
        [calls[name] for name in fitted],
        [texts] * len(fitted),
        [middle[name] for name in fitted],
    )
    rows = []
    for name, count in calls.items():
        predicted = model.seconds(count, texts)
        error = predicted / middle[name] - 1
        own = CostModel(**found["calibration"]).seconds(count, texts) / middle[name] - 1
        rows.append([name, count, middle[name], predicted, f"{error:+.1%}", f"{own:+.1%}"])
    return model, rows


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rows", type=int, default=2048)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--model", default="all-MiniLM-L6-v2")
    p.add_argument("--quick", action="store_true", help="a first look")
    p.add_argument("--json", help="file for the raw figures")
    args = p.parse_args(argv)
    if args.quick:
        vars(args).update(QUICK)
    about = machine()
    params = {"rows": args.rows, "rounds": args.rounds, "seed": args.seed, "model": args.model}
    say(f"{args.rounds} rounds over {args.rows} rows")
    found = in_fresh_process("benchmarks.cost_model:measure", params)
    save(args.json, {"machine": about, **params, **found})
    model, rows = judge(found)
    own = found["calibration"]
    print(describe_machine(about))
    print(
        f"{found['texts']:,} texts, float32, medians of {args.rounds} interleaved rounds; "
        f"tau {model.tau * 1e3:.3g} ms a call, c {model.c * 1e3:.3g} ms a text, largest residual "
        f"{model.error:.1%}. The job's own calibration took {found['calibration_seconds']:.1f} s: "
        f"tau {own['tau'] * 1e3:.3g} ms, c {own['c'] * 1e3:.3g} ms.\n"
    )
    header = ["policy", "calls", "measured s", "predicted s", "error", "error, job's calibration"]
    print(table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
