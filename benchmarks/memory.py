"""Peak memory and time to first output with a stub encoder: ``python benchmarks/memory.py --help``.

Two questions, each measurement in a process of its own. Against others: synthetic partitions of
log-normal sizes, and an encoder that sleeps as long as SURGE's published costs of MiniLM say; ours
against fixed batches that regroup at the end, and one call a partition. Flatness: a real corpus
repeated 1, 4 and 16 times under suffixed keys, and an encoder that costs nothing.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
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
    table,
)

STUB = "dummy:384:tau=0.0916:c=36e-6"
FREE_STUB = "dummy:384"
SIGMA, MEAN_ROWS = 1.72, 2500
FILE_ROWS = 100_000
FIXED_BATCH = 100_000
QUICK = {"rows": 200_000, "pbp_rows": 50_000, "times": (1, 2), "rounds": 1}
_WORDS = ("index", "shelf", "order", "basket", "label", "price", "size", "light", "green", "home")


def synthetic(rows: int) -> Path:
    """Files of log-normal partitions sorted by key, written once a machine."""
    folder = WORK / f"lognormal-{rows}"
    done = folder / "_done"
    if done.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rng = np.random.default_rng(2605)
    sizes = rng.lognormal(sigma=SIGMA, size=max(1, rows // MEAN_ROWS))
    edges = np.round(np.concatenate([[0], np.cumsum(sizes)]) * (rows / sizes.sum())).astype(int)
    for start in range(0, rows, FILE_ROWS):
        numbers = np.arange(start, min(rows, start + FILE_ROWS))
        which = np.searchsorted(edges, numbers, side="right") - 1
        words = rng.integers(0, len(_WORDS), (len(numbers), 6))
        texts = [
            f"{' '.join([_WORDS[w] for w in six])} {number}"
            for number, six in zip(numbers.tolist(), words.tolist(), strict=True)
        ]
        keys = [f"p{w:06d}" for w in which.tolist()]
        pq.write_table(
            pa.table({"partition": keys, "text": texts}),
            folder / f"part-{start // FILE_ROWS:04d}.parquet",
            row_group_size=20_000,
        )
    done.touch()
    return folder


def repeated(times: int) -> Path:
    """The corpus ``times`` times over, each time under keys with a suffix of its own."""
    path = WORK / f"repeated-{times}.parquet"
    if path.exists():
        return path
    WORK.mkdir(parents=True, exist_ok=True)
    corpus = pq.ParquetFile(shared_data() / "api_docs_by_service" / "docs.parquet")
    temporary = path.with_suffix(".tmp")
    with pq.ParquetWriter(temporary, corpus.schema_arrow) as writer:
        for number in range(times):
            for group in range(corpus.num_row_groups):
                part = corpus.read_row_group(group)
                suffix = pa.scalar(f"~{number:02d}", part.schema.field("service").type)
                empty = pa.scalar("", suffix.type)
                keys = pc.binary_join_element_wise(part.column("service"), suffix, empty)
                at = part.column_names.index("service")
                writer.write_table(part.set_column(at, part.schema.field(at), keys))
    temporary.rename(path)
    return path


class _Stub:
    """The stub encoder as a peer calls it: a list of texts in, a matrix out."""

    def __init__(self, model: str) -> None:
        from surge_beam.gpu.dummy import DummyEncoder
        from surge_beam.records import EncoderConfig

        self._encoder = DummyEncoder(EncoderConfig(model=model, device="cpu"))

    def encode(self, texts: list[str]) -> np.ndarray:
        self._encoder.simulate_call(len(texts))
        tokens = self._encoder.tokenize(texts)
        return self._encoder.forward(tokens, np.arange(len(texts)))


def _read(folder: str, rows: int) -> tuple[list[str], list[tuple[str, int, int]]]:
    """The first ``rows`` texts, and where each partition lies among them."""
    texts: list[str] = []
    keys: list[str] = []
    for file in sorted(Path(folder).glob("*.parquet")):
        if len(texts) < rows:
            part = pq.read_table(file)
            texts += part.column("text").to_pylist()[: rows - len(texts)]
            keys += part.column("partition").to_pylist()[: rows - len(keys)]
    starts = [i for i, key in enumerate(keys) if not i or key != keys[i - 1]]
    ends = [*starts[1:], len(keys)]
    return texts, [(keys[lo], lo, hi) for lo, hi in zip(starts, ends, strict=True)]


def _write(folder: Path, key: str, texts: list[str], matrix: np.ndarray) -> None:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), matrix.shape[1])
    pq.write_table(
        pa.table({"text": texts, "embedding": vectors}),
        folder / f"{key}.parquet",
        compression={"text": "zstd", "embedding": "none"},
        use_dictionary=["text"],
        write_statistics=["text"],
    )


def fixed_batches(path: str, model: str, rows: int) -> dict[str, Any]:
    """Ignores partitions, keeps a list of chunks, concatenates, and regroups at the end."""

    def work(clock: Any, out: Path) -> None:
        texts, partitions = _read(path, rows)
        chunks = [
            stub.encode(texts[at : at + FIXED_BATCH]) for at in range(0, len(texts), FIXED_BATCH)
        ]
        matrix = np.concatenate(chunks)
        for key, lo, hi in partitions:
            _write(out, key, texts[lo:hi], matrix[lo:hi])
            clock.output()

    stub = _Stub(model)
    return _timed(work, rows)


def one_call_per_partition(path: str, model: str, rows: int) -> dict[str, Any]:
    def work(clock: Any, out: Path) -> None:
        for key, texts in _stream(path, rows):
            _write(out, key, texts, stub.encode(texts))
            clock.output()

    stub = _Stub(model)
    return _timed(work, rows)


def _stream(folder: str, rows: int) -> Iterator[tuple[str, list[str]]]:
    """Partitions of the first ``rows`` rows in order, a file in memory at a time."""
    held: list[str] = []
    name, seen = "", 0
    for file in sorted(Path(folder).glob("*.parquet")):
        part = pq.read_table(file).slice(0, rows - seen)
        seen += part.num_rows
        for key, text in zip(*(part.column(c).to_pylist() for c in (0, 1)), strict=True):
            if key != name and held:
                yield name, held
                held = []
            name = key
            held.append(text)
    if held:
        yield name, held


def _timed(work: Any, rows: int) -> dict[str, Any]:
    from benchmarks.peers import Clock

    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK, prefix="peer-") as out:
        base = psutil.Process().memory_info().rss
        clock = Clock()
        work(clock, Path(out))
        return clock.result(rows, base=base)


def flatness(times: Sequence[int], rounds: int) -> dict[str, list[dict[str, Any]]]:
    figures: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for factor in times:
            path = repeated(factor)
            params = {"path": str(path), "model": FREE_STUB, "keys": ["service"]}
            figure = in_fresh_process("benchmarks.ours:job", params)
            figures.setdefault(f"corpus x {factor}", []).append(figure)
            say(f"round {number + 1}  corpus x {factor}: {figure['seconds']:.1f} s")
    return figures


def against_peers(
    rows: int, pbp_rows: int, rounds: int, min_rows: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    folder = str(synthetic(rows))
    ours = {"path": folder, "model": STUB, "keys": ["partition"]}
    calls: dict[str, tuple[str, dict[str, Any]]] = {
        f"ours, min_rows {n}": ("benchmarks.ours:job", {**ours, "flags": [f"--min_rows={n}"]})
        for n in min_rows
    }
    common = {"path": folder, "model": STUB}
    calls["FB: fixed batches of 100K"] = (
        "benchmarks.memory:fixed_batches",
        {**common, "rows": rows},
    )
    calls["PBP: a call a partition"] = (
        "benchmarks.memory:one_call_per_partition",
        {**common, "rows": min(rows, pbp_rows)},
    )
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in calls}
    for number in range(rounds):
        for name, (target, params) in calls.items():
            figures[name].append(in_fresh_process(target, params))
            say(f"round {number + 1}  {name}: {figures[name][-1]['seconds']:.1f} s")
    return figures


def row_of(name: str, found: list[dict[str, Any]]) -> list[Any]:
    """Cells of a method: rows, texts/s, first output, peak, base, what the job added, bound."""
    reports = [f.get("report") or {} for f in found]
    return [
        name,
        found[0]["rows"],
        median(f["rows"] / f["seconds"] for f in found),
        median(f["first"] for f in found),
        mib(f["peak"] for f in found),
        mib(f["peak_children"] for f in found),
        mib(f["base"] for f in found),
        mib(r.get("memory_bound") for r in reports),
    ]


def mib(values: Any) -> float | None:
    return median(v / 2**20 if v is not None else None for v in values)


HEADER = ["run", "rows", "texts/s", "first output s", "peak MiB", "helpers MiB", "base MiB"]
HEADER += ["printed bound MiB"]


def compare(figures: dict[str, list[dict[str, Any]]]) -> str:
    """The table, and ours against fixed batches."""
    parts = [table(HEADER, [row_of(name, found) for name, found in figures.items()])]
    fixed = next((v for k, v in figures.items() if k.startswith("FB")), [])
    rows = []
    for name, found in figures.items():
        if name.startswith("ours") and fixed:
            pairs = list(zip(fixed, found, strict=True))
            whole = [b["peak"] / (a["peak"] + a["peak_children"]) for b, a in pairs]
            rows.append(
                [
                    name,
                    median(b["peak"] / a["peak"] for b, a in pairs),
                    median(whole),
                    median(b["first"] / a["first"] for b, a in pairs),
                    median(b["seconds"] / a["seconds"] for b, a in pairs),
                ]
            )
    header = ["FB / ours", "peak", "peak with helpers", "first output", "time"]
    return "\n\n".join([*parts, table(header, rows)])


def flat(figures: dict[str, list[dict[str, Any]]]) -> str:
    """The table, and by how much the largest corpus is above the smallest."""

    def above(values: list[float | None]) -> str:
        return f"{values[-1] / values[0] - 1:+.1%}" if values[0] and values[-1] else ""

    runs = list(figures.values())
    peaks = [mib(f["peak"] for f in found) for found in runs]
    added = [mib(f["peak"] - f["base"] for f in found) for found in runs]
    first = [median(f["first"] for f in found) for found in runs]
    below = all(f["peak"] <= f["report"]["memory_bound"] for found in runs for f in found)
    return (
        table(HEADER, [row_of(name, found) for name, found in figures.items()])
        + f"\n\nLargest against smallest corpus: peak {above(peaks)}, peak above the base "
        f"{above(added)}, first output {above(first)}. "
        f"Peaks below the printed bound: {'yes' if below else 'no'}."
    )


def main(argv: Sequence[str] | None = None) -> int:
    numbers = lambda text: tuple(int(x) for x in text.split(","))  # noqa: E731
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rows", type=int, default=2_000_000)
    p.add_argument("--pbp_rows", type=int, default=500_000, help="PBP takes the first N rows")
    p.add_argument("--min_rows", default="auto", help="ours with auto, or N; several by commas")
    p.add_argument("--times", type=numbers, default=(1, 4, 16), help="repeats of the corpus")
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--only", choices=("peers", "flatness"))
    p.add_argument("--quick", action="store_true", help="a first look")
    p.add_argument("--keep", action="store_true", help="keep the generated input")
    p.add_argument("--json", help="file for the raw figures")
    args = p.parse_args(argv)
    if args.quick:
        vars(args).update(QUICK)
    about = machine()
    result: dict[str, Any] = {"machine": about}
    print(describe_machine(about))
    try:
        if args.only != "flatness":
            minimum = args.min_rows.split(",")
            peers = against_peers(args.rows, args.pbp_rows, args.rounds, minimum)
            result["peers"] = peers
            save(args.json, result)
            print(f"\nStub {STUB}, medians of {args.rounds}, peers write files too:\n")
            print(compare(peers), flush=True)
        if args.only != "peers":
            runs = flatness(args.times, args.rounds)
            result["flatness"] = runs
            save(args.json, result)
            print(f"\nStub {FREE_STUB}, api_docs_by_service by service, suffixed keys:\n")
            print(flat(runs))
    finally:
        if not args.keep:
            shutil.rmtree(WORK / f"lognormal-{args.rows}", ignore_errors=True)
            for factor in args.times:
                (WORK / f"repeated-{factor}.parquet").unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
