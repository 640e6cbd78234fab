"""Ours against its peers on a real corpus: ``python benchmarks/embed.py --help``.

Rounds are interleaved, and every measurement has a process of its own. Imports and model loading
are not timed. Ratios are taken within a round, then their median.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
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
    tokenizer,
)

KEYS = ("service", "owner")
MODEL = "all-MiniLM-L6-v2"
INT8 = "onnxruntime int8"
COMPARED = 200
ROW_GROUP = 20_000
OURS = ("ours float32", "ours float32, no dedupe", "ours bfloat16")
QUICK = {"rows": 500, "slow_rows": 150, "slowest_rows": 30, "rounds": 1}


@dataclasses.dataclass(frozen=True)
class Method:
    """Attributes:
    target: the function that a fresh process calls.
    params: what it is called with besides the input.
    size: ``whole``, ``slow`` or ``slowest``: the sample it takes.
    """

    target: str
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    size: str = "whole"


def methods(bf16: bool) -> dict[str, Method]:
    """All methods by the name in the table."""
    ours = {
        OURS[0]: ["--dtype=float32"],
        OURS[1]: ["--dtype=float32", "--no-dedupe"],
        OURS[2]: ["--dtype=bfloat16"],
    }
    job, peers, beam = "benchmarks.ours:job", "benchmarks.peers:", "benchmarks.beam_peers:"
    st = f"{peers}sentence_transformers"
    bf16_size = "whole" if bf16 else "slowest"
    return {
        **{name: Method(job, {"flags": flags, "keys": KEYS}) for name, flags in ours.items()},
        "PBP: a call a partition": Method(f"{peers}one_call_per_partition", size="slow"),
        "FB: fixed batches of 100K": Method(f"{peers}fixed_batches"),
        "sentence-transformers float32": Method(st),
        "sentence-transformers bfloat16": Method(st, {"dtype": "bfloat16"}, size=bf16_size),
        "RunInference, default batching": Method(f"{beam}run_inference", size="slow"),
        "RunInference, 512, sorted": Method(f"{beam}run_inference", {"tuned": True}),
        "MLTransform": Method(f"{beam}ml_transform", size="slow"),
        INT8: Method(f"{peers}onnx_int8"),
    }


def choose_services(sizes: Sequence[int], rows: int) -> list[int]:
    """Whole services of together at most ``rows`` rows, from all over the corpus; at least one.

    They are visited in steps of the golden section of their number, and taken where they fit.
    """
    count = len(sizes)
    step = next(s for s in range(max(1, round(count * 0.618)), count + 2) if np.gcd(s, count) == 1)
    chosen, left = [], rows
    for i in range(count):
        at = i * step % count
        if sizes[at] <= left:
            chosen.append(at)
            left -= sizes[at]
    return sorted(chosen) or [int(np.argmin(sizes))]


@dataclasses.dataclass
class Sample:
    """An input of the benchmark.

    Attributes:
      path: its file.
      ids: number of every row in the whole corpus.
      tokens: tokens of all its rows as the model sees them.
      about: what to say of it.
    """

    path: str
    ids: np.ndarray
    tokens: int
    about: str


def write_sample(
    corpus: pa.Table, services: list[str], path: Path, label: str, model: str
) -> Sample:
    part = corpus.filter(pc.is_in(corpus.column("service"), pa.array(services, pa.large_string())))
    pq.write_table(part, path, row_group_size=ROW_GROUP)
    texts = part.column("text").to_pylist()
    lengths = token_lengths(texts, model)
    seen = dict(zip(texts, lengths.tolist(), strict=True))
    partitions = part.group_by(["service", "owner"]).aggregate([]).num_rows
    tokens = int(lengths.sum())
    about = (
        f"{label}: {len(texts):,} rows of {len(services)} whole services, {partitions:,} "
        f"partitions, {tokens / len(texts):.1f} tokens a text, duplicates "
        f"{1 - len(seen) / len(texts):.1%} of texts and "
        f"{1 - sum(seen.values()) / tokens:.1%} of tokens"
    )
    return Sample(str(path), part.column("row").to_numpy(), tokens, about)


def token_lengths(texts: list[str], model: str) -> np.ndarray:
    backend = tokenizer(model)
    lengths: list[int] = []
    for at in range(0, len(texts), 4096):
        lengths += map(len, backend.encode_batch_fast(texts[at : at + 4096]))
    return np.array(lengths)


def prepare(folder: Path, sizes: dict[str, int | None], model: str) -> dict[str, Sample]:
    """Samples by name, each of rows of the one before; None takes all of them."""
    corpus = pq.read_table(shared_data() / "api_docs_by_service" / "docs.parquet")
    corpus = corpus.append_column("row", pa.array(np.arange(corpus.num_rows)))
    counts = corpus.group_by("service", use_threads=False).aggregate([("text", "count")])
    names = counts.column("service").to_pylist()
    rows = counts.column("text_count").to_pylist()
    chosen = list(range(len(names)))
    samples: dict[str, Sample] = {}
    for label, most in sizes.items():
        if most is not None and sum(rows[i] for i in chosen) > most:
            chosen = [chosen[i] for i in choose_services([rows[i] for i in chosen], most)]
        services, path = [names[i] for i in chosen], folder / f"{label}.parquet"
        samples[label] = write_sample(corpus, services, path, f"Sample `{label}`", model)
    return samples


def measure(
    chosen: dict[str, Method],
    model: str,
    samples: dict[str, Sample],
    rounds: int,
    folder: Path,
    raw: str | None,
) -> dict[str, list[dict[str, Any]]]:
    """Figures of every method, one dict a round."""
    compared = {label: spread_out(sample.ids, COMPARED) for label, sample in samples.items()}
    wanted = sorted({row for rows in compared.values() for row in rows})
    truth = folder / "reference.npy"
    params = {"path": samples["whole"].path, "model": model, "vectors": str(truth)}
    in_fresh_process("benchmarks.peers:reference", {**params, "sample": wanted})
    expected = dict(zip(wanted, np.load(truth), strict=True))
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    names = list(chosen)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            method = chosen[name]
            data, sample = samples[method.size], compared[method.size]
            vectors = folder / "vectors.npy"
            params = {"path": data.path, "vectors": str(vectors), "sample": sample}
            began = time.perf_counter()
            figure = in_fresh_process(method.target, {**params, "model": model, **method.params})
            if figure["rows"] != len(data.ids):
                raise SystemExit(f"{name}: {figure['rows']} of {len(data.ids)} rows came out")
            figure.update(
                round=number,
                tokens=data.tokens,
                texts_per_second=figure["rows"] / figure["seconds"],
                tokens_per_second=data.tokens / figure["seconds"],
                cosine=float(
                    cosines(np.load(vectors), np.array([expected[row] for row in sample])).min()
                ),
                process_seconds=time.perf_counter() - began,
            )
            figures[name].append(figure)
            say(
                f"round {number + 1}/{rounds}  {name}: {figure['texts_per_second']:.1f} texts/s, "
                f"{figure['seconds']:.1f} s of {figure['process_seconds']:.1f} s"
            )
        save(raw, figures)
    return figures


def spread_out(ids: np.ndarray, count: int) -> list[int]:
    """At most ``count`` of ids, evenly spaced."""
    return ids[np.unique(np.linspace(0, len(ids) - 1, count).astype(int))].tolist()


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.einsum("nd,nd->n", a, b, dtype=np.float64) / norms


def ratios(ours: list[dict[str, Any]], peer: list[dict[str, Any]]) -> list[float]:
    """Ours over the peer, round by round, in tokens a second: samples may differ."""
    pairs = zip(ours, peer, strict=True)
    return [a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs]


def centre(values: list[float]) -> str:
    """Median, and the range in brackets."""
    return show(median(values)) + (f" ({spread(values)})" if len(values) > 1 else "")


def report(figures: dict[str, list[dict[str, Any]]]) -> str:
    """Two Markdown tables: the figures of every method, and our ratios."""
    rows = []
    for name, found in figures.items():
        speeds = [f["texts_per_second"] for f in found]
        rows.append(
            [
                name,
                found[0]["rows"],
                median(speeds),
                spread(speeds),
                median((f["peak"] + f["peak_children"]) / 2**20 for f in found),
                median(f["first"] for f in found),
                f"{min(f['cosine'] for f in found):.5f}",
            ]
        )
    header = ["method", "rows", "texts/s", "lowest to highest"]
    header += ["peak MiB", "first output s", "cosine, lowest"]
    parts = [table(header, rows)]
    mine = [name for name in OURS if name in figures]
    if mine and len(figures) > 1:
        peers = [name for name in figures if name not in mine]
        cells = [
            [
                p,
                *(
                    f"{show(median(r))} ({spread(r)})" if len(r) > 1 else show(median(r))
                    for r in rs
                ),
            ]
            for p, rs in ((p, [ratios(figures[m], figures[p]) for m in mine]) for p in peers)
        ]
        parts.append(table(["peer", *(f"{m} / peer" for m in mine)], cells))
    parts += [where_time_goes(name, figures[name]) for name in mine]
    return "\n\n".join(parts)


def where_time_goes(name: str, found: list[dict[str, Any]]) -> str:
    """A sentence on one of ours: what of its time the model had."""
    encode = median(f["report"]["encode_seconds"] for f in found)
    whole = median(f["seconds"] for f in found)
    # some texts were encoded while measuring tau and c, and came from the cache
    speeds = (
        (f["rows"] - f["report"]["cached_texts"]) / seconds if seconds else None
        for f in found
        for seconds in [f["report"]["encode_seconds"]]
    )
    return (
        f"{name}: {show(encode)} s of {show(whole)} s in the encoder, {show(median(speeds))} "
        "texts/s there; the rest is planning, measuring tau and c, the first read and last write."
    )


def main(argv: list[str] | None = None) -> int:
    number = lambda text: None if text == "all" else int(text)  # noqa: E731
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rows", type=number, default=4000, help="whole services up to N rows, or all")
    p.add_argument("--slow_rows", type=number, default=1000, help="the same for slow methods")
    p.add_argument(
        "--slowest_rows", type=number, default=60, help="the same for bfloat16 in software"
    )
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--methods", help="names or parts of names, ';' between; default all")
    p.add_argument("--model", default=MODEL, help="a sentence-transformers name or folder")
    p.add_argument("--quick", action="store_true", help="a first look, in 3 to 4 minutes")
    p.add_argument("--json", help="file for the raw figures")
    p.add_argument("--list", action="store_true", help="name the methods and end")
    args = p.parse_args(argv)
    if args.quick:
        vars(args).update(QUICK)
    about = machine()
    chosen = methods(about["bf16"])
    if args.model != MODEL:
        # the int8 file is of that model alone
        del chosen[INT8]
    if args.methods:
        wanted = [part.strip() for part in args.methods.split(";")]
        chosen = {
            name: method
            for name, method in chosen.items()
            if any(part == name if part in chosen else part in name for part in wanted)
        }
    if args.list or not chosen:
        print("\n".join(chosen or methods(about["bf16"])))
        return 0 if chosen else 2
    WORK.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="embed-", dir=WORK))
    try:
        sizes = {"whole": args.rows, "slow": args.slow_rows, "slowest": args.slowest_rows}
        used = {"whole", *(method.size for method in chosen.values())}
        samples = prepare(folder, {k: v for k, v in sizes.items() if k in used}, args.model)
        descriptions = [sample.about for sample in samples.values()]
        say("\n".join(descriptions))
        raw = f"{args.json}.partial" if args.json else None
        figures = measure(chosen, args.model, samples, args.rounds, folder, raw)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    save(args.json, {"machine": about, "samples": descriptions, "figures": figures})
    if raw:
        Path(raw).unlink(missing_ok=True)
    print(describe_machine(about))
    print("\n".join(f"{text}." for text in descriptions))
    print(
        f"{args.rounds} interleaved rounds, a fresh process a method and round, medians; imports, "
        "model loading and warm-up not timed. Ours reads and writes files; the peers read the "
        "file and keep vectors in memory. Ratios: tokens/s, paired by round, median (range).\n"
    )
    print(report(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
