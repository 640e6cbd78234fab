"""The two files of a batch: answers and errors of all committed blocks, in input order."""

from __future__ import annotations

import heapq
import json
import operator
from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq

from surge_beam.records import DEAD_LETTER_SCHEMA, SamplingParams
from surge_beam.transforms import manifest
from surge_beam.transforms.batch_lines import RefusedLine, ServedModels, error_line, parse_line
from surge_beam.transforms.files import Store
from surge_beam.transforms.generate_files import OUTPUT_LINE
from surge_beam.transforms.job import BATCH_FILES
from surge_beam.transforms.read import FILE_LETTERS
from surge_beam.transforms.write import letters_folder

OUTPUT, ERRORS = BATCH_FILES
# of what is found wrong with a line that is a request
_STATUS = {
    **dict.fromkeys(("duplicate_custom_id", "invalid_json", "line_too_long")),
    **dict.fromkeys(("engine_error", "capacity_exceeded"), 500),
}


def assemble(store: Store, models: ServedModels) -> None:
    """Writes ``output.jsonl`` and ``errors.jsonl``, each under its name whole or not at all.

    Args:
      models: names under which lines may have asked for the model.
    """
    blocks = _blocks(store)
    with store.writing(OUTPUT) as file:
        for _, files in blocks:
            for name in files:
                for line in _lines(store, name, OUTPUT_LINE):
                    file.write(line.encode() + b"\n")
    with store.writing(ERRORS) as file:
        for letter in _letters(store, [folder for folder, _ in blocks]):
            file.write(_error(letter, models).encode() + b"\n")


def _blocks(store: Store) -> list[tuple[str, list[str]]]:
    """Folder and files of every committed input file, in the order of their names."""
    live: dict[str, list[str]] = {}
    for _, lines in manifest.entries(store):
        for line in lines:
            if "part_key" in line:
                continue
            if line["fingerprint"]:
                live[line["partition"]] = [file["path"] for file in line["files"]]
            else:
                live.pop(line["partition"], None)
    return sorted(live.items(), key=lambda item: _input_name(item[0]))


def _input_name(folder: str) -> str:
    from urllib.parse import unquote

    return unquote(folder, errors="replace")


def _lines(store: Store, name: str, column: str) -> Iterator[str]:
    with store.fs.open(store.path(name), "rb") as file:
        for batch in pq.ParquetFile(file).iter_batches(columns=[column]):
            yield from batch.column(column).to_pylist()


def _letters(store: Store, folders: list[str]) -> Iterator[dict[str, Any]]:
    """Dead letters of files and of rows, in input order.

    Args:
      folders: of the blocks, in the order of their input files.
    """
    of_files = [
        letter
        for name in store.names(FILE_LETTERS)
        for letter in _rows(store, f"{FILE_LETTERS}/{name}")
    ]
    by_file = operator.itemgetter("file")
    return heapq.merge(sorted(of_files, key=by_file), _of_rows(store, folders), key=by_file)


def _of_rows(store: Store, folders: list[str]) -> Iterator[dict[str, Any]]:
    for folder in map(letters_folder, folders):
        for name in store.names(folder):
            yield from _rows(store, f"{folder}/{name}")


def _rows(store: Store, name: str) -> Iterator[dict[str, Any]]:
    with store.fs.open(store.path(name), "rb") as file:
        for batch in pq.ParquetFile(file).iter_batches(columns=DEAD_LETTER_SCHEMA.names):
            yield from batch.to_pylist()


def _error(letter: dict[str, Any], models: ServedModels) -> str:
    line = json.loads(letter["record"])["line"].encode() if letter["record"] else b""
    found = parse_line(line, models=models, defaults=SamplingParams())
    # by its error first: invalid bytes are escapes in the letter, and may parse there
    status = _STATUS.get(letter["error"], found.status if isinstance(found, RefusedLine) else 400)
    refused = RefusedLine(found.custom_id, letter["error"], letter["message"], status)
    return error_line(refused, file=letter["file"], line=letter["row"] or 0)
