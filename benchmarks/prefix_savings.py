"""What superbatches keep of the saving of one prefix tree, and how even the ranges are.

    python -m benchmarks.prefix_savings

Real prompts, tokenized as SmolLM2 does it, and the Mooncake trace, whose block ids stand for
tokens. Rows are brought together by paths of 64-token chunks; what a group saves is counted in
whole KV pages, as an engine shares them. Ours cuts ranges as ``PartitionByPrefix`` does, from all
rows or from a sample of them, and forms superbatches in each. Beside it rows are brought together
by their first chunk, by sorting a local window, or not at all, and cut into as many stretches of
equal tokens. Rows arrive in random order, the trace as it was recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.common import save, say, shared_data, show, table
from benchmarks.prefix_detection import BATCHES, WINDOW, Tokens, equal_cuts, flatten
from surge_beam.policy.prefix_digests import (
    CHUNK,
    DIGEST_BYTES,
    path_key,
    path_keys,
    prefix_digests,
)
from surge_beam.policy.prefix_ranges import form_superbatches, range_cuts, range_of, tokens_saved

MODEL = "SmolLM2-135M-Instruct"
PAGE = 16
BLOCK = 512  # tokens of a block of the Mooncake trace
RANGES = {1: 1, 8: 4, 64: 16}  # ranges by superbatches
TARGETS = {1: 99, 8: 97, 64: 90}
HEAVIEST = 1.15
HOT_CHUNKS = 32


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a data set as they arrive.

    Attributes:
      paths: chunk digests, by which rows are brought together.
      pages: page digests, by which KV is shared; ``page`` is tokens a page.
      tokens: of each prompt.
      ids: 64-bit digests of the rows' ids.
      files: the rows in the order of their files.
      shared: prompt tokens that a prefix tree over single tokens saves.
    """

    paths: list[bytes]
    pages: list[bytes]
    page: int
    tokens: list[int]
    ids: list[int]
    files: list[int]
    shared: int | None


def _lines(path: Path) -> list[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def bbh(data: Path, _: Any) -> list[str]:
    folder = data / "bbh_few_shot"
    prefixes = {x["task"]: x["prefix"] for x in _lines(folder / "prefixes.jsonl.gz")}
    return [
        f"{prefixes[x['task']]}\n\nQ: {x['input']}\nA: Let's think step by step."
        for x in _lines(folder / "questions.jsonl.gz")
    ]


def xquad(data: Path, _: Any) -> list[str]:
    folder = data / "xquad_rag"
    documents = pq.read_table(folder / "documents.parquet").to_pylist()
    contexts = {(x["doc"], x["lang"]): x["context"] for x in documents}
    return [
        f"{contexts[x['doc'], x['lang']]}\n\nQuestion: {x['question']}"
        for x in pq.read_table(folder / "questions.parquet").to_pylist()
    ]


def tau(data: Path, tokenizer: Any) -> list[str]:
    """A prompt for every assistant message: the chat of all messages before it.

    The template knows no tool calls; they stand as JSON where the content is null.
    """
    prompts = []
    for dialogue in _lines(data / "tau_airline_dialogues" / "dialogues.jsonl.gz"):
        sofar: list[dict[str, str]] = []
        for message in dialogue["messages"]:
            if message["role"] == "assistant":
                prompts.append(
                    tokenizer.apply_chat_template(sofar, tokenize=False, add_generation_prompt=True)
                )
            content = message["content"] or json.dumps(message.get("tool_calls") or "")
            sofar.append({"role": message["role"], "content": content})
    return prompts


DATASETS: dict[str, Callable[[Path, Any], list[str]]] = {"bbh": bbh, "xquad": xquad, "tau": tau}


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a bundled GGUF model, without its weights."""
    from surge_beam.gpu.encoder import model_folder
    from surge_beam.gpu.gguf_file import GgufFile
    from surge_beam.gpu.text_tokenizer import gguf_tokenizer

    path = next(model_folder(model).glob("*.gguf"))
    return gguf_tokenizer(path, adds_bos=GgufFile(path).adds_bos)


def tokenize(tokenizer: Any, texts: Sequence[str]) -> list[Tokens]:
    backend = tokenizer.backend_tokenizer
    encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in encodings]


def tokens_shared(prompts: Sequence[Tokens]) -> int:
    """Tokens that a prefix tree over single tokens saves: what sorted neighbours have in common."""
    ordered = sorted(prompts, key=lambda p: p.astype(">u4").tobytes())
    shared = 0
    for a, b in itertools.pairwise(ordered):
        both = min(len(a), len(b))
        differing = np.flatnonzero(a[:both] != b[:both])
        shared += int(differing[0]) if len(differing) else both
    return shared


def digests_of_ids(count: int, seed: int = 2) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1 << 64, count, np.uint64).tolist()


def rows_of(prompts: Sequence[Tokens]) -> Rows:
    """Rows of prompts in random order."""
    order = np.random.default_rng(0).permutation(len(prompts))
    tokens, offsets = flatten([prompts[i] for i in order])
    return Rows(
        paths=path_keys(*prefix_digests(tokens, offsets, CHUNK)),
        pages=path_keys(*prefix_digests(tokens, offsets, PAGE)),
        page=PAGE,
        tokens=np.diff(offsets).tolist(),
        ids=digests_of_ids(len(prompts)),
        files=np.argsort(order).tolist(),
        shared=tokens_shared(prompts),
    )


def mooncake(data: Path, limit: int | None) -> Rows:
    """The trace as it was recorded; a block is chunk and page."""
    found = _lines(data / "mooncake_conversation_trace" / "conversation_trace.jsonl.gz")[:limit]
    paths = [path_key(x["hash_ids"]) for x in found]
    tokens = [int(x["input_length"]) for x in found]
    ids = digests_of_ids(len(paths))
    return Rows(paths, paths, BLOCK, tokens, ids, list(range(len(paths))), None)


# --- ways to bring rows together ---


def cuts_from_sample(rows: Rows, ranges: int, sample: int | None) -> list[tuple[bytes, int]]:
    """Cuts from all rows, or from so many of them, those with the smallest digests of their ids."""
    chosen: Sequence[int] = range(len(rows.paths))
    if sample is not None:
        chosen = sorted(chosen, key=rows.ids.__getitem__)[:sample]
    return range_cuts([(rows.paths[i], rows.tokens[i]) for i in chosen], ranges)


def split(rows: Rows, cuts: Sequence[tuple[bytes, int]]) -> list[list[int]]:
    """Members of each range, in path order."""
    members: list[list[int]] = [[] for _ in range(len(cuts) + 1)]
    for i in sorted(range(len(rows.paths)), key=lambda i: (rows.paths[i], rows.ids[i])):
        members[range_of(cuts, rows.paths[i], rows.ids[i])].append(i)
    return members


def superbatches(rows: Rows, batches: int, ranges: int, sample: int | None) -> list[list[int]]:
    """At least so many: each range cut by tokens in path order."""
    limit = -(-sum(rows.tokens) // batches)
    groups = []
    for members in split(rows, cuts_from_sample(rows, ranges, sample)):
        formed = form_superbatches(
            [rows.paths[i] for i in members],
            [rows.tokens[i] for i in members],
            [0] * len(members),
            max_rows=len(rows.paths),
            max_tokens=limit,
            max_kv_bytes=1,
        )
        groups += [[members[i] for i in stretch] for stretch in formed]
    return groups


def groupings(rows: Rows, batches: int, sample: int) -> dict[str, list[list[int]]]:
    """Groups of rows by each way to bring them together."""
    paths, arrival = rows.paths, range(len(rows.paths))
    windows = [arrival[i : i + WINDOW] for i in range(0, len(paths), WINDOW)]
    by_window = [i for window in windows for i in sorted(window, key=paths.__getitem__)]
    by_first = sorted(arrival, key=lambda i: paths[i][:DIGEST_BYTES])
    ways = {
        "ours, cuts from all rows": superbatches(rows, batches, RANGES[batches], None),
        f"ours, cuts from {sample:,} rows": superbatches(rows, batches, RANGES[batches], sample),
        "ours, a range a superbatch": split(rows, cuts_from_sample(rows, batches, None)),
        "first chunk": equal_cuts(by_first, rows.tokens, batches),
        f"sorted windows of {WINDOW:,}": equal_cuts(by_window, rows.tokens, batches),
        "arrival": equal_cuts(arrival, rows.tokens, batches),
    }
    if rows.files != list(arrival):
        ways["as the files lie"] = equal_cuts(rows.files, rows.tokens, batches)
    return ways


def shares_kept(rows: Rows, sample: int) -> dict[str, dict[int, tuple[float, int]]]:
    """By way and superbatches asked for: percent of the whole tree's saving, and groups formed."""
    whole = tokens_saved(rows.pages, [range(len(rows.pages))], rows.page)
    kept: dict[str, dict[int, tuple[float, int]]] = {}
    for batches in BATCHES:
        for way, groups in groupings(rows, batches, sample).items():
            saved = tokens_saved(rows.pages, groups, rows.page)
            kept.setdefault(way, {})[batches] = (100 * saved / whole, len(groups))
    return kept


# --- balance ---


def hot(rows: Rows, *, one_path: bool) -> Rows:
    """Nine rows of ten behind one prefix; with ``one_path`` nothing of theirs is left but it."""
    random = np.random.default_rng(3)
    prefix = random.integers(0, 1 << 64, HOT_CHUNKS, np.uint64)
    chosen = random.random(len(rows.paths)) < 0.9
    paths, tokens = [], []
    for path, count, is_hot in zip(rows.paths, rows.tokens, chosen, strict=True):
        if is_hot:
            # other digests than those of the cold rows with the same chunks
            own = np.frombuffer(path, ">u8").astype(np.uint64) ^ prefix[0]
            path = path_key(prefix if one_path else np.concatenate([prefix, own]))
            count = HOT_CHUNKS * CHUNK + (count % CHUNK if one_path else count)
        paths.append(path)
        tokens.append(count)
    return dataclasses.replace(rows, paths=paths, pages=paths, tokens=tokens)


def many_rows(count: int) -> Rows:
    """A large made-up dataset: prompts of lognormal length over prefixes of very uneven use."""
    random = np.random.default_rng(4)
    first = random.zipf(1.5, count).astype(np.uint64)
    second = random.zipf(1.5, count).astype(np.uint64)
    own = random.integers(0, 1 << 64, count, np.uint64)
    a = first * np.uint64(0x9E3779B97F4A7C15)
    b = (a ^ second) * np.uint64(0xC2B2AE3D27D4EB4F)
    paths = [path_key(np.array(digests, np.uint64)) for digests in zip(a, b, own, strict=True)]
    tokens = random.lognormal(6.0, 1.0, count).astype(int) + 3 * CHUNK
    ids = digests_of_ids(count)
    return Rows(paths, paths, CHUNK, tokens.tolist(), ids, list(range(count)), None)


def heaviest(rows: Rows, ranges: int, sample: int | None) -> float:
    """Tokens of the heaviest range over the mean."""
    loads = [
        sum(rows.tokens[i] for i in members)
        for members in split(rows, cuts_from_sample(rows, ranges, sample))
    ]
    return max(loads) * ranges / sum(loads)


def with_ids(rows: Rows) -> Rows:
    """The rows with the digest of their id as a last chunk: a cut knows where each row lies."""
    paths = [path + path_key([i]) for path, i in zip(rows.paths, rows.ids, strict=True)]
    return dataclasses.replace(rows, paths=paths)


def balance(name: str, rows: Rows, sample: int) -> list[list[Any]]:
    """A table row for the data set as it is, and for each way to heat it."""
    variants = {
        name: rows,
        f"{name}, 90 % behind one prefix": hot(rows, one_path=False),
        f"{name}, 90 % on one path": hot(rows, one_path=True),
    }
    return [
        [variant, len(found.paths)]
        + [
            heaviest(cut, ranges, size)
            for ranges in (4, 16, 64)
            for cut, size in ((found, None), (with_ids(found), None), (found, sample))
        ]
        for variant, found in variants.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=2000, help="rows that cuts are taken from")
    parser.add_argument("--rows", type=int, help="first rows of each data set only")
    parser.add_argument("--many", type=int, default=200_000, help="rows of the made-up data set")
    parser.add_argument("--json", help="file for the raw figures")
    args = parser.parse_args(arguments)
    data = shared_data()
    tokenizer = load_tokenizer(MODEL)
    sets = {}
    for name, texts in DATASETS.items():
        say(f"tokenizing {name}")
        sets[name] = rows_of(tokenize(tokenizer, texts(data, tokenizer)[: args.rows]))
    sets["mooncake"] = mooncake(data, args.rows)

    about = []
    for name, rows in sets.items():
        total = sum(rows.tokens)
        saved = [
            tokens_saved(digests, [range(len(digests))], size)
            for digests, size in ((rows.pages, rows.page), (rows.paths, max(CHUNK, rows.page)))
        ]
        shares = [None if n is None else f"{100 * n / total:.1f}" for n in (rows.shared, *saved)]
        about.append([name, len(rows.paths), total / len(rows.paths), *shares])
    print("What one prefix tree over the whole data set saves, percent of prompt tokens\n")
    header = ["prompts", "rows", "tokens a row", "by token", "by page", "by chunk"]
    print(table(header, about))

    print("\nShare of the saving by page that is kept, percent (superbatches formed)\n")
    kept = {name: shares_kept(rows, args.sample) for name, rows in sets.items()}
    print(
        table(
            ["prompts", "brought together by", *(f"{b} (target {TARGETS[b]})" for b in BATCHES)],
            [
                [name, way, *(f"{share:.2f} ({count})" for share, count in shares.values())]
                for name, ways in kept.items()
                for way, shares in ways.items()
            ],
        )
    )

    print(f"\nHeaviest range over the mean, in tokens (target {HEAVIEST})\n")
    evenness = [line for name, rows in sets.items() for line in balance(name, rows, args.sample)]
    ways = ("all rows", "rows and ids", f"{args.sample:,} rows")
    header = [f"{ranges} ranges, {way}" for ranges in (4, 16, 64) for way in ways]
    print(table(["prompts", "rows", *header], evenness))

    print(f"\nThe same for {args.many:,} made-up rows, by sampled rows a range\n")
    large = many_rows(args.many)
    each = (125, 250, 500, 1000, 2000)
    needed = [
        [variant, ranges]
        + [heaviest(rows, ranges, n * ranges) for n in each]
        + [heaviest(rows, ranges, None)]
        for variant, rows in (
            ("as made", large),
            ("90 % behind one prefix", hot(large, one_path=False)),
            ("90 % on one path", hot(large, one_path=True)),
        )
        for ranges in (4, 16, 64)
    ]
    print(table(["rows", "ranges", *map(show, each), "all"], needed))
    save(args.json, {"about": about, "kept": kept, "balance": evenness, "sample": needed})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
