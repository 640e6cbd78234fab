"""Real prompts without a download: docstrings of the packages installed here, to be summarised.

    python examples/prompts.py build OUT_DIR [--max_rows N]
    python examples/prompts.py show GENERATED_DIR [--rows 8]

Every prompt is one instruction, a few worked examples and a docstring, so all of them begin alike.
A partition is a package: OUT_DIR/package=json/prompts.parquet.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from docstrings import Row, Source, docstrings, draw, sources

INSTRUCTION = (
    "Below are docstrings of Python code. Each is followed by a summary: one short sentence, in"
    " plain words, that says what the code is for."
)
EXAMPLES = (
    (
        "Return the number of bytes that a record takes on disk, header and padding included. The"
        " record itself is not read; only its header is, so that this is cheap for large records.",
        "Tells how much disk space a record takes.",
    ),
    (
        "Context manager that changes the current working directory to path and goes back to the"
        " former one on exit, also where the body raises. Not safe where several threads run.",
        "Works in another directory for a while.",
    ),
    (
        "Parse an ISO 8601 duration such as P3DT4H. Years and months are refused, since their"
        " length is not fixed. Raises ValueError if the text is not a duration.",
        "Reads a length of time from a text.",
    ),
    (
        "A cache of limited size. The entry that was used least recently is dropped when a new one"
        " needs its room. Lookups and insertions take constant time.",
        "Keeps the most recently used values and forgets the others.",
    ),
    (
        "Retry a callable until it succeeds or the attempts are spent, and sleep between attempts"
        " for a time that doubles. The exception of the last attempt is passed on to the caller.",
        "Calls a function again and again until it works.",
    ),
)
# Shorter ones hold nothing to summarise; longer ones make the example slow without a GPU.
CHARACTERS = range(120, 321)


def prompt(text: str) -> str:
    """The prompt that asks for the summary of a docstring."""
    shown = [f"Docstring: {docstring}\nSummary: {summary}" for docstring, summary in EXAMPLES]
    return "\n\n".join([INSTRUCTION, *shown, f"Docstring: {text}\nSummary:"])


def one_line(text: str) -> str:
    return " ".join(text.split())


def choose(max_rows: int) -> dict[str, list[tuple[Source, Row]]]:
    """At most so many docstrings of functions and classes, by package; the same every time."""
    chosen: dict[str, list[tuple[Source, Row]]] = {}
    seen: set[str] = set()
    for source in sorted(sources(), key=draw):
        for row in docstrings(source) or ():
            text = one_line(row.text)
            if row.kind == "module" or len(text) not in CHARACTERS or text in seen:
                continue
            if len(seen) == max_rows:
                return chosen
            seen.add(text)
            chosen.setdefault(source.package, []).append((source, row))
    return chosen


def build(out: Path, max_rows: int) -> None:
    chosen = choose(max_rows)
    if not chosen:
        sys.exit("no docstrings found")
    wanted = {f"package={quote(package, '')}": rows for package, rows in sorted(chosen.items())}
    there = {path.name: path for path in out.iterdir()} if out.exists() else {}
    stray = [name for name in there if not name.startswith("package=")]
    if stray:
        sys.exit(f"{out} holds {stray[0]}, which this command did not make: not replaced")
    for name in there.keys() - wanted.keys():
        shutil.rmtree(there[name])
    for name, rows in wanted.items():
        texts = [one_line(row.text) for _, row in rows]
        table = pa.table(
            {
                "module": [source.module for source, _ in rows],
                "qualname": [row.qualname for _, row in rows],
                "text": texts,
                "prompt": [prompt(text) for text in texts],
            }
        )
        path = out / name / "prompts.parquet"
        # a file that is left alone is one that the next run knows
        if not (path.exists() and pq.read_table(path, partitioning=None).equals(table)):
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, path)
    sizes = [len(rows) for rows in wanted.values()]
    print(f"{out}: {sum(sizes):,} prompts in {len(sizes):,} packages; biggest {max(sizes):,}")


def show(folder: Path, rows: int) -> None:
    report = json.loads((folder / "_surge" / "report.json").read_text("utf-8"))
    dataset = ds.dataset(folder, format="parquet", partitioning="hive")
    columns = ["package", "qualname", "text", "completion"]
    table = dataset.to_table(columns=columns).sort_by([("package", "ascending")])
    step = max(1, table.num_rows // rows)
    for row in table.take(list(range(0, table.num_rows, step))[:rows]).to_pylist():
        print(f"\n{row['package']} · {row['qualname']}")
        print("  docstring: " + textwrap.shorten(row["text"], 80, placeholder=" ..."))
        print("  summary:   " + row["completion"].strip())
    asked, saved = report["prompt_tokens"], report["prefix_tokens_saved"]
    share = f" of {asked:,}" if asked else ""
    print(f"\nprompt tokens whose keys and values were shared: {saved:,}{share}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="write the prompts")
    builder.add_argument("out", type=Path)
    builder.add_argument("--max_rows", type=int, default=400)
    shower = commands.add_parser("show", help="some rows of a generated corpus, and what was saved")
    shower.add_argument("folder", type=Path)
    shower.add_argument("--rows", type=int, default=8)
    args = parser.parse_args(argv)
    if args.command == "build":
        build(args.out, args.max_rows)
    else:
        show(args.folder, args.rows)


if __name__ == "__main__":
    main()
