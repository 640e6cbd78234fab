"""One engine for the bundles of a process: shared by threads, started anew once, repeated rows."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from surge_beam.gpu.decode_engine import EngineStats
from surge_beam.gpu.decode_worker import DecodeWorker, load_engine, shared_decode_worker
from surge_beam.gpu.engine import Engine
from surge_beam.records import (
    Checkpoint,
    Completion,
    EngineConfig,
    Request,
    SamplingParams,
    SurgeError,
)

CONFIG = EngineConfig(model="dummy", device="cpu", max_sequences=4)


def request(name: str, tokens: int = 5) -> Request:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(custom_id=name, prompt_ids=tuple(name.encode()), sampling=sampling)


class FakeEngine:
    """Answers in order of arrival; ``fails`` is asked before every completion."""

    context_length = 100

    def __init__(self, log: list[str], fails: Callable[[], bool] = lambda: False) -> None:
        self.stats = EngineStats()
        self.log, self.fails = log, fails
        self.waiting: dict[str, Checkpoint] = {}
        self.cancelled: list[str] = []
        self.closed = False

    def submit(self, request: Request | Checkpoint) -> None:
        assert not self.closed
        checkpoint = request if isinstance(request, Checkpoint) else Checkpoint(request=request)
        name = checkpoint.request.custom_id
        assert name not in self.waiting, f"{name} is under way already"
        self.waiting[name] = checkpoint
        self.log.append(name)

    def cancel(self, custom_id: str) -> bool:
        self.cancelled.append(custom_id)
        return custom_id in self.waiting

    def completions(self) -> Iterator[Completion]:
        while self.waiting:
            if self.fails():
                raise RuntimeError("the device is lost")
            name = next(iter(self.waiting))
            checkpoint = self.waiting.pop(name)
            reason = "cancelled" if name in self.cancelled else "stop"
            yield Completion(
                custom_id=name,
                token_ids=checkpoint.output_ids,
                text=name,
                finish_reason=reason,
                prompt_tokens=len(checkpoint.request.prompt_ids),
                completion_tokens=len(checkpoint.output_ids),
            )

    def finished(self) -> list[Completion]:
        return []

    def checkpoints(self) -> list[Checkpoint]:
        return list(self.waiting.values())

    def close(self) -> None:
        self.closed = True


def names(found: Iterator[Completion]) -> list[str]:
    return [completion.custom_id for completion in found]


def test_a_visit_keeps_the_engine_full() -> None:
    log: list[str] = []
    visit = DecodeWorker(CONFIG, lambda _: FakeEngine(log)).visit()
    visit.add(request(str(i)) for i in range(5))
    assert names(visit.take(keep=3)) == ["0", "1"]
    visit.add([request("5")])
    assert names(visit.take()) == ["2", "3", "4", "5"]
    assert names(visit.take()) == [] and log == [str(i) for i in range(6)]


def test_completions_go_to_whom_they_belong() -> None:
    worker = DecodeWorker(CONFIG, lambda _: FakeEngine([]))
    one, two = worker.visit(), worker.visit()
    one.add(map(request, "acf"))
    two.add(map(request, "bde"))
    assert names(two.take()) == ["b", "d", "e"]
    assert names(one.take()) == ["a", "c", "f"]


def test_threads_share_an_engine() -> None:
    """Many bundles at once, on the stand-in model: each gets its own, as if decoded alone."""
    worker = DecodeWorker(CONFIG)
    found: dict[int, list[Completion]] = {}

    def bundle(number: int) -> None:
        visit = worker.visit()
        own = []
        for at in range(0, 12, 4):
            visit.add(request(f"{number} {i}", 3 + i) for i in range(at, at + 4))
            own += list(visit.take(keep=2))
        found[number] = own + list(visit.take())

    threads = [threading.Thread(target=bundle, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with Engine(EngineConfig(model="dummy", device="cpu", max_sequences=1)) as alone:
        for number in range(4):
            wanted = alone.generate([request(f"{number} {i}", 3 + i) for i in range(12)])
            texts = {c.custom_id: c.text for c in found[number]}
            assert texts == {c.custom_id: c.text for c in wanted} and len(found[number]) == 12
    assert worker.restarts == 0 and not worker.engine.checkpoints()


def failing(at: set[int]) -> tuple[DecodeWorker, list[list[str]], list[FakeEngine]]:
    """A worker whose engines fail before those completions, counted over all of them."""
    calls = [0]

    def fails() -> bool:
        calls[0] += 1
        return calls[0] - 1 in at

    logs: list[list[str]] = []
    engines: list[FakeEngine] = []

    def load(config: EngineConfig) -> FakeEngine:
        assert config == CONFIG
        logs.append([])
        engines.append(FakeEngine(logs[-1], fails))
        return engines[-1]

    return DecodeWorker(CONFIG, load), logs, engines


def test_an_engine_that_fails_once_repeats_what_had_not_finished() -> None:
    worker, logs, engines = failing({2})
    one, two = worker.visit(), worker.visit()
    one.add(map(request, "abc"))
    two.add(map(request, "de"))
    assert names(one.take()) == ["a", "b", "c"] and names(two.take()) == ["d", "e"]
    assert logs == [["a", "b", "c", "d", "e"], ["c", "d", "e"]]
    assert worker.restarts == 1 and engines[0].closed and not engines[1].closed


def test_an_engine_that_fails_twice_is_given_up() -> None:
    worker, _, _ = failing({1, 3})
    visit = worker.visit()
    visit.add(map(request, "abcd"))
    found = []
    with pytest.raises(RuntimeError, match="the device is lost"):
        for completion in visit.take():
            found.append(completion.custom_id)
    assert found == ["a", "b"]


def test_a_real_engine_that_fails_once_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from surge_beam.gpu.dummy_runner import DummyRunner

    real, left = DummyRunner.step, [9]

    def step(self: DummyRunner, batch: object) -> object:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("the device is lost")
        return real(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(DummyRunner, "step", step)
    worker = DecodeWorker(CONFIG)
    visit = worker.visit()
    wanted = [request(f"row {i}", 20) for i in range(6)]
    visit.add(wanted)
    left[0] = 1
    # ends in the very step that fails, and must not be lost with it
    visit.add([Request(custom_id="empty", prompt_ids=())])
    found = {c.custom_id: c for c in visit.take()}
    assert worker.restarts == 1
    assert found.pop("empty").finish_reason == "error" and len(found) == 6
    with Engine(CONFIG) as alone:
        for completion in alone.generate(wanted):
            mine = found[completion.custom_id]
            assert (mine.text, mine.completion_tokens) == (completion.text, 20)


def test_another_attempt_at_a_row_waits_for_the_first() -> None:
    """A runner may try a bundle again while the first attempt still runs."""
    worker = DecodeWorker(CONFIG, lambda _: FakeEngine([]))
    zombie, again = worker.visit(), worker.visit()
    zombie.add(map(request, "ab"))
    again.add(map(request, "ab"))
    assert names(again.take()) == ["a", "b"]
    assert names(zombie.take()) == ["a", "b"]


def test_two_rows_of_one_id_in_a_bundle() -> None:
    visit = DecodeWorker(CONFIG, lambda _: FakeEngine([])).visit()
    visit.add(map(request, "aba"))
    assert names(visit.take()) == ["a", "b", "a"]


def test_a_bundle_that_is_given_up_leaves_nothing() -> None:
    worker = DecodeWorker(CONFIG)
    gone, stays = worker.visit(), worker.visit()
    gone.add(request(f"gone {i}", 50) for i in range(6))
    stays.add(request(f"stays {i}", 50) for i in range(3))
    assert next(gone.take()).custom_id.startswith("gone")
    gone.close()
    gone.close()
    assert names(gone.take()) == []
    left = {c.request.custom_id for c in worker.engine.checkpoints()}
    assert left <= {f"stays {i}" for i in range(3)}
    assert sorted(names(stays.take())) == [f"stays {i}" for i in range(3)]
    again = worker.visit()
    again.add([request("gone 5", 4)])
    assert [c.finish_reason for c in again.take()] == ["length"]


def test_one_worker_a_process() -> None:
    worker = shared_decode_worker(CONFIG)
    assert (
        shared_decode_worker(EngineConfig(model="dummy", device="cpu", max_sequences=4)) is worker
    )
    other = shared_decode_worker(EngineConfig(model="dummy", device="cpu", seed=1))
    assert other is not worker and isinstance(other.engine, Engine)


def test_load_engine() -> None:
    engine = load_engine(CONFIG)
    assert isinstance(engine, Engine)
    engine.close()


def test_a_slow_stand_in() -> None:
    """It gives what the quick one does; a name of another form is refused."""
    slow = dataclasses.replace(CONFIG, model="dummy:seconds=0.01")
    began = time.monotonic()
    with Engine(slow) as one, Engine(CONFIG) as other:
        (mine,), (wanted,) = one.generate([request("a", 6)]), other.generate([request("a", 6)])
    assert mine == wanted and time.monotonic() - began > 0.05
    for name in ("dummy:", "dummy:16", "dummy:seconds=", "dummy:seconds=-1", "dummy:seconds=inf"):
        with pytest.raises(SurgeError, match="dummy:seconds=S"):
            load_engine(dataclasses.replace(CONFIG, model=name))
