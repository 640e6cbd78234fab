"""Prompts of real use, as texts: few-shot questions, questions over documents, tool dialogues."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def few_shot(data: Path, tasks: int, each: int) -> list[str]:
    """Questions of BIG-Bench Hard behind their task's examples."""
    prefixes = _lines(data / "bbh_few_shot" / "prefixes.jsonl.gz")
    chosen = {row["task"]: row["prefix"] for row in list(prefixes)[:tasks]}
    prompts = []
    taken = dict.fromkeys(chosen, 0)
    for row in _lines(data / "bbh_few_shot" / "questions.jsonl.gz"):
        task = row["task"]
        if task in chosen and taken[task] < each:
            taken[task] += 1
            prompts.append(f"{chosen[task]}\n\nQ: {row['input']}\nA: Let's think step by step.")
    return prompts


def over_documents(data: Path, documents: int, each: int) -> list[str]:
    """Questions of XQuAD, in English and German, behind their document."""
    folder = data / "xquad_rag"
    contexts = {
        (row["doc"], row["lang"]): row["context"]
        for row in pq.read_table(folder / "documents.parquet").to_pylist()
    }
    taken: dict[tuple[Any, Any], int] = {}
    prompts = []
    for row in pq.read_table(folder / "questions.parquet").to_pylist():
        key = (row["doc"], row["lang"])
        if row["lang"] not in ("en", "de") or (len(taken) == documents and key not in taken):
            continue
        if taken.get(key, 0) < each:
            taken[key] = taken.get(key, 0) + 1
            prompts.append(f"{contexts[key]}\n\nQuestion: {row['question']}")
    return prompts


def dialogues(data: Path, count: int, *, turns: int = 1) -> list[list[dict[str, str]]]:
    """Messages before an assistant's message of airline dialogues; ``turns`` of each dialogue."""
    found: list[list[dict[str, str]]] = []
    for row in _lines(data / "tau_airline_dialogues" / "dialogues.jsonl.gz"):
        messages: list[dict[str, str]] = []
        own = 0
        for message in row["messages"]:
            if message["role"] == "assistant" and own < turns and len(found) < count:
                found.append(list(messages))
                own += 1
            messages.append({"role": message["role"], "content": message["content"] or ""})
        if len(found) >= count:
            break
    return found


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)
