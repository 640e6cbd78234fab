"""Completions kept as they finish come back whole, or not at all."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.records import Completion, EngineConfig, Request, SamplingParams, TokenLogprob
from surge_beam.transforms.files import Store
from surge_beam.transforms.journal import (
    FLUSH_ROWS,
    FLUSH_SECONDS,
    FOLDER,
    CompletionJournal,
    Entry,
    journals,
    read_journal,
    request_digest,
)

LOGPROB = st.builds(
    TokenLogprob,
    st.integers(0, 9),
    st.floats(-9, 0),
    st.lists(st.tuples(st.integers(0, 9), st.floats(-9, 0)), max_size=2).map(tuple),
)
COMPLETION = st.builds(
    Completion,
    custom_id=st.text(),
    token_ids=st.lists(st.integers(0, 1 << 31), max_size=4).map(tuple),
    text=st.text(),
    finish_reason=st.sampled_from(["stop", "length", "error"]),
    prompt_tokens=st.integers(1, 99),
    completion_tokens=st.integers(0, 99),
    cached_tokens=st.integers(0, 99),
    logprobs=st.none() | st.lists(LOGPROB, max_size=2).map(tuple),
    error=st.none() | st.text(),
)
ENTRY = st.builds(
    Entry, st.text(max_size=5), st.integers(0, 1 << 30), st.text(max_size=5), COMPLETION
)


def completion(text: str) -> Completion:
    return Completion(
        custom_id=text,
        token_ids=(1, 2),
        text=text,
        finish_reason="stop",
        prompt_tokens=1,
        completion_tokens=2,
    )


def entry(i: int) -> Entry:
    return Entry("owner", i, "digest", completion(f"text {i}\n\u2028"))


def read_all(store: Store) -> list[Entry]:
    return [e for name in journals(store) for e in read_journal(store, name)]


@settings(max_examples=40)
@given(st.lists(ENTRY, max_size=5), st.data())
def test_what_is_kept_comes_back(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Entry], data: st.DataObject
) -> None:
    """Cut anywhere, all lines that are whole."""
    store = Store(str(tmp_path_factory.mktemp("journal")))
    journal = CompletionJournal(store, "run")
    for one in entries:
        journal.add(one)
    journal.close()
    assert read_all(store) == entries
    if not entries:
        assert journals(store) == []
        return
    (name,) = journals(store)
    content = store.get(name)
    cut = data.draw(st.integers(0, len(content)))
    store.put(name, content[:cut])
    whole = content[:cut].count(b"\n")
    # a line that lacks only its newline is whole too
    assert read_all(store) in (entries[:whole], entries[: whole + 1])


def test_noise_is_passed_over(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    journal = CompletionJournal(store, "run")
    journal.add(entry(1))
    journal.close()
    (name,) = journals(store)
    noise = b'{"owner": 1}\n\xff\nnull\n[]\n7\n{"completion": {}}\n{"completion": 3}\n'
    store.put(name, noise + store.get(name) + b'{"owner": "o", "row": 1, "completion": {"tok')
    assert read_all(store) == [entry(1)]


def test_a_line_is_there_once_it_is_added(tmp_path: Path) -> None:
    """On a local disk: a killed process loses none."""

    def add_and_die(root: str) -> None:
        journal = CompletionJournal(Store(root), "run")
        for i in range(5):
            journal.add(entry(i))
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=add_and_die, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == -9
    assert read_all(Store(str(tmp_path))) == [entry(i) for i in range(5)]


def test_journals_do_not_collide(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    one, other = CompletionJournal(store, "run"), CompletionJournal(store, "run")
    for i in range(4):
        (one if i % 2 else other).add(entry(i))
    one.close()
    other.close()
    assert len(journals(store)) == 2
    assert sorted(e.row for e in read_all(store)) == [0, 1, 2, 3]
    assert all(name.startswith(f"{FOLDER}/run-") for name in journals(store))


def test_an_object_store_gets_blocks() -> None:
    """By number, by age, and what is left at the end."""
    store, now = Store("memory://journal-of-blocks"), [0.0]
    assert not store.local
    journal = CompletionJournal(store, "run", clock=lambda: now[0])
    for i in range(FLUSH_ROWS - 1):
        journal.add(entry(i))
    assert journals(store) == []
    journal.add(entry(FLUSH_ROWS - 1))
    assert len(journals(store)) == 1
    journal.add(entry(FLUSH_ROWS))
    assert len(journals(store)) == 1
    now[0] += FLUSH_SECONDS
    journal.add(entry(FLUSH_ROWS + 1))
    assert len(journals(store)) == 2
    journal.add(entry(FLUSH_ROWS + 2))
    journal.close()
    assert len(journals(store)) == 3
    assert [e.row for e in read_all(store)] == list(range(FLUSH_ROWS + 3))


BASE = Request(custom_id="a", prompt_ids=(1, 2), sampling=SamplingParams(stop=("x",)))


@pytest.mark.parametrize(
    "changed",
    [
        {"custom_id": "b"},
        {"prompt_ids": (1, 3)},
        {"prompt_ids": (12,)},
        {"prompt_ids": ()},
        {"sampling": SamplingParams(stop=("y",))},
        {"sampling": SamplingParams(stop=("x",), seed=1)},
        {"sampling": SamplingParams(stop=("x",), max_tokens=17)},
        {"sampling": SamplingParams(stop=("x",), temperature=0.1)},
    ],
)
def test_a_digest_is_of_all_that_decides_an_answer(changed: dict[str, Any]) -> None:
    base = request_digest(BASE, EngineConfig())
    assert request_digest(dataclasses.replace(BASE), EngineConfig(max_sequences=7)) == base
    assert request_digest(dataclasses.replace(BASE, **changed), EngineConfig()) != base


@pytest.mark.parametrize(
    "changed", [{"model": "m"}, {"seed": 1}, {"dtype": "float32"}, {"max_context": 9}]
)
def test_a_digest_is_of_the_engine_too(changed: dict[str, Any]) -> None:
    other = EngineConfig(**changed)
    assert request_digest(BASE, other) != request_digest(BASE, EngineConfig())


@settings(max_examples=50)
@given(st.text(), st.text())
def test_digests_of_ids(one: str, other: str) -> None:
    digests = {
        request_digest(dataclasses.replace(BASE, custom_id=x), EngineConfig()) for x in (one, other)
    }
    assert len(digests) == len({one, other})
