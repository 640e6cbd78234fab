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

MODEL = "all-MiniLM-L6-v2"
INT8 = "onnxruntime int8"
COMPARED = 200
ROW_GROUP = 20_000
OURS = ("ours float32", "ours float32, no dedupe", "ours bfloat16")
QUICK = {"rows": 1000, "slow_rows": 250, "rounds": 1}


@dataclasses.dataclass(frozen=True)
class Method:
    """Attributes:
    function: its name in ``benchmarks.methods``.
    params: what it is called with besides the input.
    slow: takes the smaller sample.
    """

    function: str
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    slow: bool = False


def methods(bf16: bool) -> dict[str, Method]:
    """All methods by the name in the table."""
    ours = {
        OURS[0]: ["--dtype=float32"],
        OURS[1]: ["--dtype=float32", "--no-dedupe"],
        OURS[2]: ["--dtype=bfloat16"],
    }
    return {
        **{name: Method("ours", {"flags": flags}) for name, flags in ours.items()},
        "PBP: a call a partition": Method("one_call_per_partition", slow=True),
        "FB: fixed batches of 100K": Method("fixed_batches"),
        "sentence-transformers float32": Method("sentence_transformers"),
        "sentence-transformers bfloat16": Method(
            "sentence_transformers", {"dtype": "bfloat16"}, slow=not bf16
        ),
        "RunInference, default batching": Method("run_inference", slow=True),
        "RunInference, 512, sorted": Method("run_inference", {"tuned": True}),
        "MLTransform": Method("ml_transform", slow=True),
        INT8: Method("onnx_int8"),
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


def prepare(
    folder: Path, rows: int | None, slow_rows: int | None, model: str
) -> tuple[Sample, Sample]:
    """The sample, and the smaller one of the same rows for slow methods."""
    corpus = pq.read_table(shared_data() / "api_docs_by_service" / "docs.parquet")
    corpus = corpus.append_column("row", pa.array(np.arange(corpus.num_rows)))
    counts = corpus.group_by("service", use_threads=False).aggregate([("text", "count")])
    names = counts.column("service").to_pylist()
    sizes = counts.column("text_count").to_pylist()

    def narrowed(among: list[int], most: int | None) -> list[int]:
        if most is None or sum(sizes[i] for i in among) <= most:
            return among
        return [among[i] for i in choose_services([sizes[i] for i in among], most)]

    chosen = narrowed(list(range(len(names))), rows)
    fewer = narrowed(chosen, slow_rows)
    whole = write_sample(
        corpus, [names[i] for i in chosen], folder / "sample.parquet", "Sample", model
    )
    if fewer == chosen:
        return whole, whole
    small = write_sample(
        corpus, [names[i] for i in fewer], folder / "slow.parquet", "Sample of slow methods", model
    )
    return whole, small


def measure(
    chosen: dict[str, Method],
    model: str,
    whole: Sample,
    small: Sample,
    rounds: int,
    folder: Path,
    raw: str | None,
) -> dict[str, list[dict[str, Any]]]:
    """Figures of every method, one dict a round."""
    compared = small.ids[np.unique(np.linspace(0, len(small.ids) - 1, COMPARED).astype(int))]
    common = {"model": model, "sample": compared.tolist()}
    truth = folder / "reference.npy"
    in_fresh_process(
        "benchmarks.methods:reference", {"path": small.path, "vectors": str(truth), **common}
    )
    expected = np.load(truth)
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    names = list(chosen)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            method = chosen[name]
            data = small if method.slow else whole
            vectors = folder / "vectors.npy"
            params = {"path": data.path, "vectors": str(vectors), **common, **method.params}
            began = time.perf_counter()
            figure = in_fresh_process(f"benchmarks.methods:{method.function}", params)
            if figure["rows"] != len(data.ids):
                raise SystemExit(f"{name}: {figure['rows']} of {len(data.ids)} rows came out")
            figure.update(
                round=number,
                tokens=data.tokens,
                texts_per_second=figure["rows"] / figure["seconds"],
                tokens_per_second=data.tokens / figure["seconds"],
                cosine=float(cosines(np.load(vectors), expected).min()),
                process_seconds=time.perf_counter() - began,
            )
            figures[name].append(figure)
            say(
                f"round {number + 1}/{rounds}  {name}: {figure['texts_per_second']:.1f} texts/s, "
                f"{figure['seconds']:.1f} s of {figure['process_seconds']:.1f} s"
            )
        save(raw, figures)
    return figures


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
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    number = lambda text: None if text == "all" else int(text)  # noqa: E731
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rows", type=number, default=4000, help="whole services up to N rows, or all")
    p.add_argument("--slow_rows", type=number, default=1000, help="the same for slow methods")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--methods", help="parts of names, comma between; default all")
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
        wanted = args.methods.split(";" if ";" in args.methods else ",")
        chosen = {n: m for n, m in chosen.items() if any(w.strip() in n for w in wanted)}
    if args.list or not chosen:
        print("\n".join(chosen or methods(about["bf16"])))
        return 0 if chosen else 2
    WORK.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="embed-", dir=WORK))
    try:
        whole, small = prepare(folder, args.rows, args.slow_rows, args.model)
        say(f"{whole.about}\n{small.about}")
        raw = f"{args.json}.partial" if args.json else None
        figures = measure(chosen, args.model, whole, small, args.rounds, folder, raw)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    samples = [whole.about] + ([small.about] if small is not whole else [])
    save(args.json, {"machine": about, "samples": samples, "figures": figures})
    if raw:
        Path(raw).unlink(missing_ok=True)
    print(describe_machine(about))
    print("\n".join(f"{text}." for text in samples))
    print(
        f"{args.rounds} interleaved rounds, a fresh process a method and round, medians; imports, "
        "model loading and warm-up not timed. Ours reads and writes files; the peers read the "
        "file and keep vectors in memory. Ratios: tokens/s, paired by round, median (range).\n"
    )
    print(report(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
