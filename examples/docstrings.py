"""A real corpus without a download: the docstrings of the packages installed here.

    python examples/docstrings.py build OUT_DIR [--max_rows N]
    python examples/docstrings.py search EMBEDDED_DIR --query "..." [--query "..."] [--top 5]

`build` parses source files with `ast` and imports none of them. A partition is a package and a
module: OUT_DIR/package=json/module=json.decoder/docs.parquet.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import heapq
import inspect
import itertools
import os
import shutil
import statistics
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

LEFT_OUT = {"test", "tests", "testing", "idle_test", "_vendor"}
SCHEMA = pa.schema(
    [("qualname", pa.string()), ("kind", pa.string()), ("line", pa.int32()), ("text", pa.string())]
)
KINDS = {
    ast.Module: "module",
    ast.ClassDef: "class",
    ast.FunctionDef: "function",
    ast.AsyncFunctionDef: "async function",
}


class Source(NamedTuple):
    package: str
    module: str
    path: Path
    size: int


class Row(NamedTuple):
    qualname: str
    kind: str
    line: int
    text: str


def sources() -> Iterator[Source]:
    """Source files of the standard library and of every installed package, the first of a name."""
    seen = set()
    for root in (Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))):
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(x for x in subfolders if x.isidentifier() and not left_out(x))
            for name in sorted(names):
                stem, ending = os.path.splitext(name)
                if ending == ".py" and stem.isidentifier() and not left_out(stem):
                    path = Path(folder, name)
                    parts = path.relative_to(root).with_suffix("").parts
                    if len(parts) > 1 and stem == "__init__":
                        parts = parts[:-1]
                    module = ".".join(parts)
                    if module not in seen:
                        seen.add(module)
                        yield Source(parts[0], module, path, path.stat().st_size)


def left_out(name: str) -> bool:
    """Tests, vendored copies, and what an editable installation writes."""
    return name in LEFT_OUT or name.startswith(("test_", "__editable__")) or name.endswith("_test")


def docstrings(source: Source) -> list[Row] | None:
    """The docstrings of a file in their order; None where it does not decode or parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source.path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    rows: list[Row] = []

    def visit(node: ast.AST, scope: str) -> None:
        kind = KINDS.get(type(node))
        if kind:
            if kind != "module":
                scope = f"{scope}.{node.name}" if scope else node.name
            text = ast.get_docstring(node, clean=False)
            text = inspect.cleandoc(text) if text else ""
            if text:
                # A lone surrogate in a literal is a str that UTF-8 and so Arrow cannot hold.
                text = text.encode("utf-8", "replace").decode("utf-8")
                rows.append(Row(scope or source.module, kind, getattr(node, "lineno", 1), text))
        for child in ast.iter_child_nodes(node):
            visit(child, scope)

    try:
        visit(tree, "")
    except RecursionError:
        return None
    return rows


def draw(source: Source) -> tuple[float, str]:
    """A place in the order of choosing that depends on name and size alone.

    A module's chance falls with its size, so that the corpus is what it is an example of: very many
    tiny partitions and a few big ones.
    """
    digest = hashlib.blake2b(source.module.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") * source.size**1.5, source.module


def write(out: Path, source: Source, rows: list[Row]) -> None:
    folder = out / f"package={quote(source.package, '')}" / f"module={quote(source.module, '')}"
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_arrays(
        [pa.array(column) for column in zip(*rows, strict=True)], SCHEMA.names
    )
    pq.write_table(table.cast(SCHEMA), folder / "docs.parquet")


def build(out: Path, max_rows: int) -> None:
    started = time.monotonic()
    stray = [p for p in out.iterdir() if not p.name.startswith("package=")] if out.exists() else []
    if stray:
        sys.exit(f"{out} holds {stray[0].name}, which this command did not make: not replaced")
    found = sorted(sources(), key=draw)
    modules: list[tuple[Source, list[Row]]] = []
    total = read = skipped = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        while total < max_rows and read < len(found):
            part = found[read : read + 512]
            read += len(part)
            for source, rows in zip(part, pool.map(docstrings, part, chunksize=32), strict=True):
                skipped += rows is None
                if rows and total + len(rows) <= max_rows:
                    modules.append((source, rows))
                    total += len(rows)
    if not modules:
        sys.exit(f"no module with at most {max_rows:,} docstrings found")
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    for source, rows in modules:
        write(out, source, rows)
    sizes = [len(rows) for _, rows in modules]
    print(
        f"{out}: {sum(sizes):,} docstrings in {len(sizes):,} partitions of "
        f"{len({source.package for source, _ in modules}):,} packages; biggest {max(sizes):,}, "
        f"median {statistics.median(sizes):g}; {read:,} of {len(found):,} source files read, "
        f"{skipped} of them do not parse; {time.monotonic() - started:.1f} s"
    )


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def search(folder: Path, queries: list[str], top: int, model: str) -> None:
    from surge_beam.gpu.worker import EncodeWorker
    from surge_beam.records import EncoderConfig

    worker = EncodeWorker(EncoderConfig(model=model))
    encoded = worker.encode(worker.prepare(pa.array(queries, pa.string())))
    wanted = unit(np.asarray(encoded.matrix, np.float32))

    dataset = ds.dataset(folder, format="parquet", partitioning="hive")
    columns = ["package", "module", "qualname", "text", "embedding"]
    best: list[list[tuple[float, int, dict]]] = [[] for _ in queries]
    count = itertools.count()
    rows = 0
    for batch in dataset.to_batches(columns=columns):
        if not batch.num_rows:
            continue
        rows += batch.num_rows
        vectors = batch.column("embedding").flatten().to_numpy().reshape(batch.num_rows, -1)
        scores = wanted @ unit(vectors.astype(np.float32, copy=False)).T
        for hits, line in zip(best, scores, strict=True):
            for i in np.argsort(-line)[:top]:
                if len(hits) < top or line[i] > hits[0][0]:
                    hit = batch.select(columns[:-1]).slice(i, 1).to_pylist()[0]
                    heapq.heappush(hits, (float(line[i]), -next(count), hit))
                    if len(hits) > top:
                        heapq.heappop(hits)
    for query, hits in zip(queries, best, strict=True):
        print(f'\nnearest of {rows:,} to "{query}"')
        for score, _, hit in sorted(hits, reverse=True):
            first = next(iter(hit["text"].splitlines()), "")
            print(f"  {score:.3f}  {hit['package']} · {hit['module']} · {hit['qualname']}: {first}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="write the corpus")
    builder.add_argument("out", type=Path)
    builder.add_argument("--max_rows", type=int, default=4_200)
    finder = commands.add_parser("search", help="nearest docstrings of an embedded corpus")
    finder.add_argument("folder", type=Path)
    finder.add_argument("--query", action="append", required=True)
    finder.add_argument("--top", type=int, default=5)
    finder.add_argument("--model", default="all-MiniLM-L6-v2")
    args = parser.parse_args(argv)
    if args.command == "build":
        build(args.out, args.max_rows)
    else:
        search(args.folder, args.query, args.top, args.model)


if __name__ == "__main__":
    main()
