from __future__ import annotations

import threading
from typing import Any

import pytest

from surge_beam.transforms.overlap import Overlap


def run(overlap: Overlap, plans: Any) -> list[Any]:
    out: list[Any] = []
    overlap.reset()
    for plan in plans:
        out.extend(overlap.push(plan))
    out.extend(overlap.drain())
    return out


@pytest.mark.parametrize("count", [0, 1, 2, 3, 20])
def test_results_come_in_order(count: int) -> None:
    overlap = Overlap(lambda x: x * 2, lambda x: x + 1, str)
    for _ in range(2):
        assert run(overlap, range(count)) == [str(2 * x + 1) for x in range(count)]
    overlap.close()


def test_at_most_three_are_alive() -> None:
    alive, most, lock = 0, 0, threading.Lock()

    def read(x: int) -> int:
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        return x

    def write(x: int) -> int:
        nonlocal alive
        with lock:
            alive -= 1
        return x

    overlap = Overlap(read, lambda x: x, write)
    assert run(overlap, range(50)) == list(range(50))
    overlap.close()
    assert most <= 3


def test_the_stages_overlap() -> None:
    """While 1 is encoded, 2 is read and 0 is written; each waits here for the others."""
    meeting = threading.Barrier(3, timeout=60)

    def meet(at: int) -> Any:
        def stage(x: int) -> int:
            if x == at:
                meeting.wait()
            return x

        return stage

    overlap = Overlap(meet(2), meet(1), meet(0))
    assert run(overlap, range(3)) == [0, 1, 2]
    overlap.close()


@pytest.mark.parametrize("stage", ["read", "encode", "write"])
@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_a_failure_ends_the_bundle_and_the_next_one_is_sound(stage: str, at: int) -> None:
    broken = True
    written: list[int] = []

    def step(name: str) -> Any:
        def call(x: int) -> int:
            if broken and name == stage and x == at:
                raise ValueError(f"{name} {x}")
            if name == "write":
                written.append(x)
            return x

        return call

    overlap = Overlap(step("read"), step("encode"), step("write"))
    with pytest.raises(ValueError, match=f"{stage} {at}"):
        run(overlap, range(5))
    overlap.reset()
    assert written == sorted(set(written))
    assert set(range(max(0, at - 2))) <= set(written) <= set(range(5)) - {at}
    broken = False
    written.clear()
    assert run(overlap, range(5)) == written == list(range(5))
    overlap.close()


def test_reset_waits_for_what_is_being_written() -> None:
    started, release, done = threading.Event(), threading.Event(), threading.Event()

    def write(x: int) -> int:
        started.set()
        assert release.wait(60)
        done.set()
        return x

    overlap = Overlap(lambda x: x, lambda x: x, write)
    list(overlap.push(0))
    list(overlap.push(1))
    assert started.wait(60)
    threading.Timer(0.05, release.set).start()
    overlap.reset()
    assert done.is_set()
    overlap.close()
