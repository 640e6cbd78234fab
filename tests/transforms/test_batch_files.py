"""The two files of a batch, put together from committed blocks in the order of the input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from surge_beam.records import DeadLetter, Segment, SourceFile, dead_letter_table
from surge_beam.transforms import manifest
from surge_beam.transforms.batch_files import ERRORS, OUTPUT, assemble
from surge_beam.transforms.batch_lines import ServedModels
from surge_beam.transforms.files import Store, digest
from surge_beam.transforms.generate_files import OUTPUT_LINE
from surge_beam.transforms.partitions import file_folder
from surge_beam.transforms.read import BLOCKS, write_file_letters
from surge_beam.transforms.write import Committer, OutputSegment, WriteConfig

MODELS = ServedModels("m")


class Batch:
    """An output to which blocks are committed by hand."""

    def __init__(self, folder: Path) -> None:
        self.store, self.run = Store(str(folder)), 0

    def commit(self, name: str, lines: list[str], letters: list[DeadLetter] | None = None) -> None:
        self.run += 1
        run = f"{self.run:016x}"
        manifest.begin(self.store, run)
        folder, values = file_folder(name)
        rows = len(lines) + len(letters or [])
        segment = Segment(
            f"{BLOCKS}/{folder}", values, digest(name, self.run), 0, 1, rows, (), replaces=True
        )
        table = pa.table({"line": pa.array([b""] * len(lines), pa.binary())})
        added = {OUTPUT_LINE: pa.array(lines, pa.string())}
        committer = Committer(self.store, WriteConfig(columns=()), run)
        committer.commit("b", [OutputSegment(segment, table, added, letters or [])], {})
        committer.close()

    def broken(self, name: str) -> None:
        source = SourceFile(f"in/{name}", name, digest(name), digest("f", name), "jsonl", "gzip")
        letter = DeadLetter(stage="read", error="Unreadable", message="why", file=source.url)
        write_file_letters(self.store, source, dead_letter_table([letter]))

    def read(self) -> tuple[list[str], list[dict[str, Any]]]:
        assemble(self.store, MODELS)
        output = Path(self.store.path(OUTPUT)).read_text("utf-8")
        errors = Path(self.store.path(ERRORS)).read_text("utf-8")
        return output.split("\n")[:-1], [json.loads(x) for x in errors.split("\n")[:-1]]


def letter(name: str, row: int, error: str, line: str) -> DeadLetter:
    return DeadLetter(
        stage="read",
        error=error,
        message=f"message {row}",
        file=f"in/{name}",
        row=row,
        record=json.dumps({"line": line}),
    )


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path / "out")


def test_nothing(batch: Batch) -> None:
    assert batch.read() == ([], [])


def test_the_order_of_the_input(batch: Batch) -> None:
    """Names as they are, not as folders spell them; files that failed in their place."""
    names = ["a b.jsonl", "a%20.jsonl", "a-1.jsonl", "a/1.jsonl", "a1.jsonl", "ä.jsonl", "水.jsonl"]
    assert names == sorted(names)
    for name in (names[i] for i in (3, 6, 0, 5, 2)):
        batch.commit(name, [f"{name} 1", f"{name} 2"], [letter(name, 7, "x", "{")])
    batch.broken(names[1])
    batch.broken(names[4])
    output, errors = batch.read()
    kept = [names[i] for i in (0, 2, 3, 5, 6)]
    assert output == [f"{name} {k}" for name in kept for k in (1, 2)]
    assert [(x["error"]["file"], x["error"]["line"]) for x in errors] == [
        (f"in/{name}", 7 if name in kept else 0) for name in names
    ]


def test_a_block_that_is_replaced_or_taken_back(batch: Batch) -> None:
    batch.commit("a.jsonl", ["old 1", "old 2"], [letter("a.jsonl", 3, "x", "{")])
    batch.commit("b.jsonl", ["b"])
    batch.commit("a.jsonl", ["new"])
    assert batch.read() == (["new", "b"], [])
    manifest.prune(batch.store, f"{9:016x}", {f"{BLOCKS}/a.jsonl"})
    assert batch.read() == (["new"], [])


def test_what_an_error_says(batch: Batch) -> None:
    """The custom_id and status that its line has; codes are the dead letter's."""
    body = {"model": "m", "prompt": "p"}
    line = json.dumps({"custom_id": "é\n", "url": "/v1/completions", "body": body})
    other = json.dumps({"custom_id": "o", "url": "/v1/completions", "body": {"model": "n"}})
    cases = [
        ("invalid_json", "{", None, None),
        ("duplicate_custom_id", line, "é\n", None),
        ("context_length_exceeded", line, "é\n", 400),
        ("engine_error", line, "é\n", 500),
        ("capacity_exceeded", line, "é\n", 500),
        ("model_not_found", other, "o", 404),
    ]
    letters = [letter("a.jsonl", i, code, text) for i, (code, text, *_) in enumerate(cases, 1)]
    batch.commit("a.jsonl", [], letters)
    _, errors = batch.read()
    for found, (code, _, custom_id, status) in zip(errors, cases, strict=True):
        assert (found["error"]["code"], found["custom_id"]) == (code, custom_id)
        assert (found["response"] or {}).get("status_code") == status, code
        assert found["error"]["message"] == f"message {found['error']['line']}"


def test_whole_or_not_at_all(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    batch.commit("a.jsonl", ["old"])
    batch.read()
    batch.commit("a.jsonl", ["new"], [letter("a.jsonl", 1, "x", "{")])
    monkeypatch.setattr("surge_beam.transforms.batch_files.error_line", None)
    with pytest.raises(TypeError):
        batch.read()
    monkeypatch.undo()
    assert Path(batch.store.path(ERRORS)).read_bytes() == b""
    assert batch.read()[0] == ["new"]
    assert not list(batch.store.walk(Store.TEMPORARY))
