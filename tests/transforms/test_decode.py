"""Rounds of decoding: the same answers, whatever the rounds, ranges and superbatches."""

from __future__ import annotations

import pickle
import uuid
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest

from surge_beam.gpu import decode_worker
from surge_beam.gpu.engine import Engine
from surge_beam.records import Checkpoint, Completion, EngineConfig, Request, SamplingParams, unpack
from surge_beam.transforms import stats_files
from surge_beam.transforms.decode import Answer, DecodeRounds, RoundConfig, _UnderWay
from surge_beam.transforms.files import Store
from surge_beam.transforms.journal import journals, read_journal, request_digest
from surge_beam.transforms.prefix_partition import BatchLimits
from surge_beam.transforms.prompt_batch import encode, prompt_batch, sampling_json

ENGINE = EngineConfig(model="dummy", device="cpu", seed=4, max_sequences=5)


def requests() -> list[Request]:
    """Short and long ones, greedy and sampled, with and without a limit of their own."""
    return [
        Request(
            custom_id=f"id {i}",
            prompt_ids=tuple(b"A prefix that many of these rows share, " * (i % 3) + b"%d" % i),
            sampling=SamplingParams(
                max_tokens=(3, 8, 9, 30, None)[i % 5],
                temperature=float(i % 2),
                logprobs=0 if i % 7 == 0 else None,
                stop=("\u0142",) if i % 4 == 0 else (),
            ),
        )
        for i in range(40)
    ]


def _keep(element: tuple[str, bytes], folder: str) -> None:
    Path(folder, uuid.uuid4().hex).write_bytes(pickle.dumps(element))


def decoded(folder: Path, config: RoundConfig) -> dict[tuple[str, int], Completion]:
    rows = requests()
    batch = prompt_batch(
        [f"owner {i % 3}" for i in range(len(rows))],
        list(range(len(rows))),
        [r.custom_id for r in rows],
        [r.prompt_ids for r in rows],
        [sampling_json(r.sampling) for r in rows],
    )
    encoded = [encode(batch.slice(at, 7)) for at in range(0, len(rows), 7)]
    folder.mkdir()
    decode_worker._shared.cache_clear()
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        answers = pipeline | beam.Create(encoded) | DecodeRounds(config)
        _ = answers | beam.Map(_keep, str(folder))
    found: dict[tuple[str, int], Completion] = {}
    for path in folder.iterdir():
        owner, packed = pickle.loads(path.read_bytes())
        for answer in unpack(packed):
            assert isinstance(answer, Answer) and (owner, answer.row) not in found
            found[owner, answer.row] = answer.completion
    return found


@pytest.fixture(scope="module")
def alone() -> list[Completion]:
    config = EngineConfig(model="dummy", device="cpu", seed=4, max_sequences=1, max_context=200)
    with Engine(config) as engine:
        return [engine.generate([request])[0] for request in requests()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rounds": 3, "slice_tokens": 8, "ranges": 4, "batch": BatchLimits(rows=4)},
        {"rounds": 6, "slice_tokens": 1, "ranges": 2},
    ],
    ids=str,
)
def test_answers(tmp_path: Path, alone: list[Completion], options: dict[str, Any]) -> None:
    import dataclasses

    engine = dataclasses.replace(ENGINE, max_context=200)
    config = RoundConfig(engine=engine, output=str(tmp_path / "out"), run="r", **options)
    found = decoded(tmp_path / "answers", config)
    assert sorted(found) == sorted((f"owner {i % 3}", i) for i in range(40))
    for (_, row), completion in found.items():
        wanted = alone[row]
        for name in ("custom_id", "token_ids", "text", "finish_reason", "logprobs"):
            assert getattr(completion, name) == getattr(wanted, name), (row, name)
        assert completion.prompt_tokens == wanted.prompt_tokens
    # each is kept once, under the request as it was first made
    store = Store(str(tmp_path / "out"))
    entries = [e for name in journals(store) for e in read_journal(store, name)]
    assert {(e.owner, e.row): e.completion for e in entries} == found and len(entries) == 40
    digests = [request_digest(request, engine) for request in requests()]
    assert {e.row: e.digest for e in entries} == dict(enumerate(digests))
    # and counted once
    headers = list(stats_files.read(store, "r"))
    assert all(header["decoded"] for header in headers)
    assert sum(h["rows"] for h in headers) == 40
    assert sum(h["tokens"] for h in headers) == sum(c.completion_tokens for c in alone)
    saved = sum(h["prefix_tokens_saved"] for h in headers)
    assert saved == sum(c.cached_tokens for c in found.values())


def test_nothing_is_kept_where_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = decoded(tmp_path / "answers", RoundConfig(engine=ENGINE))
    assert len(found) == 40 and [p.name for p in tmp_path.iterdir()] == ["answers"]


@pytest.mark.parametrize(
    ("reason", "tokens", "until", "gives_up"),
    [
        ("length", 8, 8, True),
        ("stop", 8, 8, False),  # ended with the very token at which the round would have
        ("length", 7, 8, False),  # the context ended it
        ("length", 8, None, False),
        ("length", 90, 90, False),  # prompt and completion fill the context
        ("error", 0, 8, False),
    ],
)
def test_what_goes_on_in_the_next_round(
    reason: str, tokens: int, until: int | None, gives_up: bool
) -> None:
    request = Request(custom_id="a", prompt_ids=tuple(range(10)))
    completion = Completion(
        custom_id="a",
        token_ids=(1,) * tokens,
        text="",
        finish_reason=reason,
        prompt_tokens=10,
        completion_tokens=tokens,
    )
    under_way = _UnderWay("owner", 0, Checkpoint(request=request), until)
    assert under_way.gives_up(completion, context_length=100) == gives_up
