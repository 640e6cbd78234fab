"""What finding shared prefixes costs and keeps, on real prompts.

    python -m benchmarks.prefix_detection

First microseconds of processor time a request: digests, insertion into the prefix tree, the best
candidate among all that wait; against a radix tree over tokens in plain Python. Then the share of
one whole-dataset prefix tree's saving that is left in 1, 8 and 64 superbatches, by how rows are
brought together. Prompts are cut into words and signs, letters of other scripts one by one; no
tokenizer is needed.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import itertools
import json
import re
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.common import shared_data, show, table
from surge_beam.policy.prefix_digests import path_key, path_keys, prefix_digests
from surge_beam.policy.prefix_ranges import form_superbatches, range_cuts, range_of, tokens_saved
from surge_beam.policy.prefix_tree import PrefixTree

Tokens = np.ndarray[Any, np.dtype[np.int32]]

BATCHES = (1, 8, 64)
WINDOW = 5000


class Words:
    """Numbers words and signs as they come."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, text: str) -> Tokens:
        ids = self._ids
        found = re.findall(r" ?[A-Za-z]+|\d{1,3}|.", text, re.DOTALL)
        return np.array([ids.setdefault(word, len(ids)) for word in found], np.int32)


def _lines(path: Path) -> list[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def bbh(data: Path, words: Words) -> list[Tokens]:
    folder = data / "bbh_few_shot"
    prefixes = {x["task"]: words(x["prefix"]) for x in _lines(folder / "prefixes.jsonl.gz")}
    ask = "Q: {}\nA: Let's think step by step."
    return [
        np.concatenate([prefixes[x["task"]], words(ask.format(x["input"]))])
        for x in _lines(folder / "questions.jsonl.gz")
    ]


def xquad(data: Path, words: Words) -> list[Tokens]:
    folder = data / "xquad_rag"
    documents = pq.read_table(folder / "documents.parquet").to_pylist()
    contexts = {(x["doc"], x["lang"]): words(x["context"]) for x in documents}
    return [
        np.concatenate([contexts[x["doc"], x["lang"]], words(f"\n\nQuestion: {x['question']}")])
        for x in pq.read_table(folder / "questions.parquet").to_pylist()
    ]


def tau(data: Path, words: Words) -> list[Tokens]:
    """A prompt for every assistant message: all messages before it."""
    prompts = []
    for dialogue in _lines(data / "tau_airline_dialogues" / "dialogues.jsonl.gz"):
        sofar: list[Tokens] = []
        for message in dialogue["messages"]:
            if message["role"] == "assistant":
                prompts.append(np.concatenate(sofar))
            sofar.append(words(json.dumps(message)))
    return prompts


DATASETS: dict[str, Callable[[Path, Words], list[Tokens]]] = {
    "bbh": bbh,
    "xquad": xquad,
    "tau": tau,
}


def flatten(prompts: Sequence[Tokens]) -> tuple[Tokens, np.ndarray]:
    """Tokens and offsets, as an Arrow list array has them."""
    offsets = np.zeros(len(prompts) + 1, np.int64)
    np.cumsum([len(p) for p in prompts], out=offsets[1:])
    return np.concatenate(prompts), offsets


def load_paths(name: str, data: Path) -> tuple[list[bytes], list[int], int]:
    """Paths, prompt tokens and tokens a chunk: rows in random order, the trace as it arrived."""
    if name == "mooncake":
        rows = _lines(data / "mooncake_conversation_trace" / "conversation_trace.jsonl.gz")
        return [path_key(x["hash_ids"]) for x in rows], [x["input_length"] for x in rows], 512
    prompts = DATASETS[name](data, Words())
    order = np.random.default_rng(0).permutation(len(prompts))
    tokens, offsets = flatten([prompts[i] for i in order])
    return path_keys(*prefix_digests(tokens, offsets)), np.diff(offsets).tolist(), 64


def superbatches(paths: Sequence[bytes], tokens: Sequence[int], batches: int) -> list[list[int]]:
    """At least so many, of equal prompt tokens, in path order."""
    order = sorted(range(len(paths)), key=paths.__getitem__)
    formed = form_superbatches(
        [paths[i] for i in order],
        [tokens[i] for i in order],
        [0] * len(order),
        max_rows=len(order),
        max_tokens=-(-sum(tokens) // batches),
        max_kv_bytes=1,
    )
    return [[order[i] for i in stretch] for stretch in formed]


def equal_cuts(order: Sequence[int], tokens: Sequence[int], batches: int) -> list[list[int]]:
    """So many stretches of an order, of equal prompt tokens."""
    sizes = np.array([tokens[i] for i in order], np.float64)
    part = ((np.cumsum(sizes) - sizes / 2) * batches / sizes.sum()).astype(int)
    edges = np.searchsorted(part, np.arange(batches + 1))
    return [list(order[a:b]) for a, b in itertools.pairwise(edges)]


def groupings(
    paths: Sequence[bytes], tokens: Sequence[int], batches: int
) -> dict[str, list[list[int]]]:
    """Superbatches by four ways to bring rows together, of equal tokens each."""
    arrival = range(len(paths))
    windows = [arrival[i : i + WINDOW] for i in range(0, len(paths), WINDOW)]
    window_sorted = [i for window in windows for i in sorted(window, key=paths.__getitem__)]
    by_first = sorted(arrival, key=lambda i: paths[i][:8])
    return {
        "path order": superbatches(paths, tokens, batches),
        "first chunk": equal_cuts(by_first, tokens, batches),
        f"sorted windows of {WINDOW:,}": equal_cuts(window_sorted, tokens, batches),
        "arrival": equal_cuts(arrival, tokens, batches),
    }


def shares_kept(data: Path, name: str) -> Iterable[list[Any]]:
    """A row for each way: share of the whole tree's saving, in percent, by superbatches."""
    paths, tokens, chunk = load_paths(name, data)
    whole = tokens_saved(paths, [range(len(paths))], chunk)
    kept: dict[str, list[float]] = {}
    for batches in BATCHES:
        for way, groups in groupings(paths, tokens, batches).items():
            kept.setdefault(way, []).append(100 * tokens_saved(paths, groups, chunk) / whole)
    for way, shares in kept.items():
        yield [name, way, *(f"{share:.1f}" for share in shares)]


def heaviest(paths: Sequence[bytes], tokens: Sequence[int], ranges: int, share: float) -> float:
    """Tokens of the heaviest range over the mean, cuts taken from a share of the rows."""
    random = np.random.default_rng(1)
    sample = np.flatnonzero(random.random(len(paths)) < share)
    cuts = range_cuts([(paths[i], tokens[i]) for i in sample], ranges)
    ids = random.integers(0, 1 << 64, len(paths), np.uint64).tolist()
    loads = np.zeros(ranges)
    for path, count, digest in zip(paths, tokens, ids, strict=True):
        loads[range_of(cuts, path, digest)] += count
    return float(loads.max() / loads.mean())


# --- a radix tree over tokens, for comparison ---


class RadixNode:
    """``tokens`` of the edge that leads here; children by their first token."""

    __slots__ = ("children", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.children: dict[int, RadixNode] = {}


class RadixTree:
    """Longest known prefix of a prompt, token by token, as engines keep it in Python."""

    def __init__(self) -> None:
        self.root = RadixNode([])

    def insert(self, tokens: list[int]) -> int:
        """Adds a prompt; returns how many of its tokens were known."""
        node, at = self.root, 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                node.children[tokens[at]] = RadixNode(tokens[at:])
                return at
            edge, same = child.tokens, 0
            for a, b in zip(edge, tokens[at : at + len(edge)], strict=False):
                if a != b:
                    break
                same += 1
            at += same
            if same < len(edge):
                upper = RadixNode(edge[:same])
                node.children[edge[0]] = upper
                child.tokens = edge[same:]
                upper.children[child.tokens[0]] = child
                child = upper
            node = child
        return at

    def match(self, tokens: list[int]) -> int:
        """How many leading tokens of a prompt are known; changes nothing."""
        node, at = self.root, 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                return at
            edge = child.tokens
            part = tokens[at : at + len(edge)]
            if part != edge:
                for a, b in zip(edge, part, strict=False):
                    if a != b:
                        break
                    at += 1
                return at
            node, at = child, at + len(edge)
        return at


def costs(prompts: Sequence[Tokens], *, slots: int = 96, turns: int = 2000) -> dict[str, float]:
    """Microseconds of processor time a request for each operation.

    A turn ends the request that ran longest, asks for the best candidate and admits it. A radix
    tree of ``slots`` prompts can only be asked about every waiting one: that is what its best
    candidate takes.
    """
    tokens, offsets = flatten(prompts)
    rows = len(prompts)
    # the prompts themselves are no part of a scheduler's heap
    gc.collect()
    gc.freeze()
    begin = time.thread_time()
    digests, ends = prefix_digests(tokens, offsets)
    digested = time.thread_time()
    flat, bounds = digests.tolist(), ends.tolist()
    tree = PrefixTree()
    for key in range(rows):
        tree.insert(key, flat[bounds[key] : bounds[key + 1]])
    inserted = time.thread_time()
    running: list[Hashable] = []
    asking = moving = 0.0
    for turn in range(min(slots + turns, rows)):
        started = time.thread_time()
        if turn >= slots:
            tree.finish(running[turn - slots])
        ended = time.thread_time()
        candidate = tree.best_candidate()
        answered = time.thread_time()
        assert candidate is not None
        tree.activate(candidate.key)
        moving += time.thread_time() - answered + ended - started
        asking += answered - ended
        running.append(candidate.key)
    listing = time.thread_time()
    lists = [prompt.tolist() for prompt in prompts]
    listed = time.thread_time()
    radix = RadixTree()
    for prompt in lists:
        radix.insert(prompt)
    radix_inserted = time.thread_time()
    batch = RadixTree()
    for prompt in lists[-slots:]:
        batch.insert(prompt)
    asked = time.thread_time()
    for prompt in lists:
        batch.match(prompt)
    radix_asked = time.thread_time()
    turned = len(running)
    return {
        "tokens": len(tokens) / rows,
        "digests": 1e6 * (digested - begin) / rows,
        "insert": 1e6 * (inserted - digested) / rows,
        "both, a 1,000 tokens": 1e9 * (inserted - begin) / len(tokens),
        "best candidate": 1e6 * asking / turned,
        "activate and finish": 1e6 * moving / turned,
        "radix: lists": 1e6 * (listed - listing) / rows,
        "radix: insert": 1e6 * (radix_inserted - listed) / rows,
        "radix: best candidate": 1e6 * (radix_asked - asked),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000, help="prompts of all data sets")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    parser.add_argument(
        "--step_ms",
        type=float,
        default=150.0,
        help="a decode step of 96 sequences; SmolLM2-135M took 150 to 250 ms on 2 cores",
    )
    args = parser.parse_args()
    data = shared_data()
    prompts = {name: load(data, Words()) for name, load in DATASETS.items()}
    every = [prompt for group in prompts.values() for prompt in group]
    order = np.random.default_rng(0).permutation(len(every))[: args.requests]
    prompts["mixed"] = [every[i] for i in order]
    measured = {}
    for name, group in prompts.items():
        runs = [costs(group[: args.requests]) for _ in range(args.repeats)]
        measured[name] = {key: min(run[key] for run in runs) for key in runs[0]}
    print("Microseconds a request\n")
    rows = [[key, *(m[key] for m in measured.values())] for key in measured["mixed"]]
    print(table(["", *measured], rows))
    mixed = measured["mixed"]
    admitted = sum(mixed[k] for k in ("digests", "insert", "best candidate", "activate and finish"))
    print(
        f"\nAdmitting a request: {show(admitted)} us, "
        f"{show(admitted / args.step_ms / 10)}% of a decode step of {show(args.step_ms)} ms\n"
    )
    print("Share of the whole prefix tree's saving that is kept, percent\n")
    names = [*DATASETS, "mooncake"]
    rows = [row for name in names for row in shares_kept(data, name)]
    print(table(["prompts", "order", *(f"{b} superbatches" for b in BATCHES)], rows))
    print("\nHeaviest range over the mean, cut from all rows and from a fifth of them\n")
    rows = []
    for name in names:
        paths, tokens, _ = load_paths(name, data)
        for ranges in (4, 16):
            loads = [heaviest(paths, tokens, ranges, share) for share in (1.0, 0.2)]
            rows.append([name, ranges, *loads])
    print(table(["prompts", "ranges", "all", "a fifth"], rows))


if __name__ == "__main__":
    main()
