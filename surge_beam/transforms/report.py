"""The report of a run: ``_surge/report.json``, from the plan and the manifest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq

from surge_beam.policy.costs import CostModel, fit
from surge_beam.records import SurgeError
from surge_beam.transforms import manifest, stats_files
from surge_beam.transforms.files import Store
from surge_beam.transforms.plan_files import PLAN
from surge_beam.transforms.read import FILE_LETTERS
from surge_beam.transforms.write import read_json

REPORT = "_surge/report.json"
_LOOKED_AT = 32


Headers = list[dict[str, Any]]
Summarise = Callable[[dict[str, Any], Headers, float], dict[str, Any]]


def build_report(
    store: Store, run: str, summarise: Summarise, began: float, ended: float
) -> dict[str, Any]:
    """Everything the report says.

    ``rows_in``, ``rows_out`` and ``dead_letters`` speak of the whole input as the output now holds
    it; what ``summarise`` adds speaks of this run alone.

    Args:
      summarise: the part of the kind of job, from the plan, the headers of this run's manifest
        entries and the run's seconds.
      began, ended: seconds since the epoch.

    Raises:
      SurgeError: rows in are not rows out and dead letters: rows were lost.
    """
    plan = read_json(store, PLAN) or {}
    if plan.get("run") != run:
        raise SurgeError(f"run {run} left no plan at {store.url}/{PLAN}")
    headers, emptied = list(stats_files.read(store, run)), 0
    for header, lines in manifest.entries(store, run=run):
        headers.append(header)
        emptied += sum("part_key" not in line and _is_emptied(line) for line in lines)
    committed = manifest.load(store).table
    of_files = file_letters(store) - plan["file_letters_stale"]
    letters = int(committed["letters"].sum()) - plan["letters_stale"] + of_files
    rows_out = int(committed["rows"].sum()) - plan["rows_stale"]
    unreadable = int(committed["unreadable"].sum()) - plan["unreadable_stale"]
    rows_in = plan["rows"] - unreadable + of_files
    if rows_in != rows_out + letters:
        raise SurgeError(
            f"{rows_in} rows came in, {rows_out} went out and {letters} are dead letters;"
            f" the sums differ, see {store.url}/_surge/manifest"
        )
    done = [h for h in headers if "superbatch" in h]
    plan["partitions_committed"] = plan["partitions_planned"] - emptied
    plan["rows_out"] = rows_out
    return {
        "run": run,
        "partitions_skipped": plan["partitions_skipped"] - plan["partitions_emptied"],
        "partitions_failed": plan["files_failed"] + emptied + plan["partitions_emptied"],
        "partitions_stale": plan["partitions_stale"],
        "partitions_pruned": plan["partitions_pruned"],
        "rows_in": rows_in,
        "rows_out": rows_out,
        "dead_letters": letters,
        "files": plan["files"],
        "files_failed": plan["files_failed"],
        "failed_file": failed_file(store) if plan["files_failed"] else None,
        "files_passed_over": plan["passed_over"],
        "superbatches": len(done),
        "seconds": round(ended - began, 3),
        "seconds_to_first_output": (
            round(min(h["ended"] for h in done) - began, 3) if done else None
        ),
        "peak_memory": max((h["peak_memory"] for h in done), default=None),
        "max_rows": plan["max_rows"],
        "max_bytes": plan["max_bytes"],
        "largest_partition": plan["largest_partition"],
        **summarise(plan, headers, ended - began),
    }


def embed_summary(plan: dict[str, Any], headers: Headers, seconds: float) -> dict[str, Any]:
    """What an embedding run adds to its report."""
    headers = [h for h in headers if "superbatch" in h]
    return {
        "partitions_encoded": plan["partitions_committed"],
        "rows_encoded": sum(h["rows"] for h in headers),
        "tokens": sum(h["tokens"] for h in headers),
        "padding_share": _share(
            sum(h["padded_tokens"] - h["tokens"] for h in headers),
            sum(h["padded_tokens"] for h in headers),
        ),
        "duplicates_saved": sum(h["texts"] - h["unique_texts"] for h in headers),
        "cached_texts": sum(h["cached_texts"] for h in headers),
        "texts_per_second": _share(sum(h["rows"] for h in headers), seconds),
        "encode_seconds": round(sum(h["seconds"] for h in headers), 3),
        "memory_bound": max((h["memory_bound"] for h in headers), default=None),
        "min_rows": plan["min_rows"],
        "device": headers[0]["device"] if headers else None,
        "dtype": headers[0]["dtype"] if headers else None,
        "dimension": headers[0]["dimension"] if headers else None,
        **_costs(plan, headers),
    }


def generate_summary(plan: dict[str, Any], headers: Headers, seconds: float) -> dict[str, Any]:
    """What a generating run adds to its report."""
    decoded = [h for h in headers if "decoded" in h]
    committed = [h for h in headers if "superbatch" in h]
    tokens = sum(h["tokens"] for h in decoded)
    reasons: Counter[str] = Counter()
    for header in committed:
        reasons.update(header["finish_reasons"])
    return {
        "partitions_generated": plan["partitions_committed"],
        "rows_decoded": sum(h["rows"] for h in decoded),
        # parts of a split partition that an earlier run committed are in no other count
        "rows_reused": plan["rows_out"] - sum(h["rows_out"] - h["rows_reused"] for h in committed),
        "tokens_decoded": tokens,
        "prompt_tokens": sum(h["prompt_tokens"] for h in committed),
        "prefix_tokens_saved": sum(h["prefix_tokens_saved"] for h in decoded),
        "finish_reasons": dict(sorted(reasons.items())),
        "tokens_per_second": _share(tokens, seconds),
        "decode_seconds": round(sum(h["seconds"] for h in decoded), 3),
    }


def file_letters(store: Store) -> int:
    """Dead letters that belong to a file rather than to a partition."""
    total = 0
    for name in store.names(FILE_LETTERS):
        with store.fs.open(store.path(f"{FILE_LETTERS}/{name}"), "rb") as file:
            total += pq.read_metadata(file).num_rows
    return total


def failed_file(store: Store) -> dict[str, str] | None:
    """A file that cannot be used at all, and why; None if the first dead letters name none."""
    for name in store.names(FILE_LETTERS)[:_LOOKED_AT]:
        with store.fs.open(store.path(f"{FILE_LETTERS}/{name}"), "rb") as file:
            table = pq.read_table(file, columns=["file", "row", "message"])
        if table.num_rows == 1 and not table.column("row")[0].is_valid:
            letter = table.to_pylist()[0]
            return {"file": letter["file"], "message": letter["message"]}
    return None


def _is_emptied(line: dict[str, Any]) -> bool:
    """Whether a partition has input rows, and none of them could be used."""
    return not line["rows"] and bool(line["dead_letters"] or line.get("unreadable"))


def _costs(plan: dict[str, Any], headers: Headers) -> dict[str, Any]:
    """tau and c, and what they predicted of this run against what it took.

    They are those that planned the run, or else a fit over its SuperBatches where these differ
    enough in size to tell a call's cost from a text's.
    """
    measured = [(h["unique_texts"] - h["cached_texts"], h["seconds"]) for h in headers]
    measured = [(n, s) for n, s in measured if n > 0 and s > 0]
    texts, seconds = [n for n, _ in measured], [s for _, s in measured]
    model = CostModel(plan["tau"], plan["c"]) if plan.get("tau") is not None else None
    if model is None and len(set(texts)) >= 5 and max(texts) >= 2 * min(texts):
        model = fit([1] * len(texts), texts, seconds)
    return {
        "tau_seconds_per_call": model.tau if model else None,
        "c_seconds_per_text": model.c if model else None,
        "predicted_seconds": round(model.seconds(len(texts), sum(texts)), 3) if model else None,
        "measured_seconds": round(sum(seconds), 3),
    }


def _share(part: float, whole: float) -> float:
    return round(part / whole, 6) if whole else 0.0


def write_report(store: Store, report: dict[str, Any]) -> None:
    store.put(REPORT, json.dumps(report, indent=1).encode())
