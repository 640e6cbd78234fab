"""Kills, failures and full disks: the next run ends with what an undisturbed one writes."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surge_beam.transforms.files import Store
from tests.pipelines.harness import (
    SLOW,
    Job,
    committed,
    conserved,
    dead_letters,
    make_corpus,
    manifest_entries,
    one_line,
    quick_job,
    read_output,
    run_job,
    same_output,
    start_job,
    temporaries,
    texts,
    write_rows,
)

KILLS = int(os.environ.get("SURGE_KILLS", "2"))
IN_FLIGHT = 3
LAYOUTS = {
    "tiny partitions": {"min_rows": 40},
    "split partitions": {"min_rows": 50, "max_rows": 50},
    "jsonl and csv": {"min_rows": 50, "partition_by": "owner"},
}


def corpus_of(layout: str, folder: Path) -> Path:
    rng = random.Random(layout)
    if layout == "tiny partitions":
        make_corpus(folder, [rng.choice([1, 2, 5, 30]) for _ in range(60)])
    elif layout == "split partitions":
        make_corpus(folder, [rng.choice([20, 130, 260]) for _ in range(5)])
    else:
        folder.mkdir(parents=True)
        for i in range(4):
            rows = [{"text": t, "owner": rng.choice("abcdefgh")} for t in texts(i, 120)]
            lines = [json.dumps(row) for row in rows]
            lines[10] = "not JSON"
            (folder / f"{i}.jsonl").write_text("\n".join(lines) + "\n")
            with open(folder / f"{i}.csv", "w", newline="") as file:
                writer = csv.DictWriter(file, ["text", "owner"])
                writer.writeheader()
                writer.writerows(rows)
    if layout != "jsonl and csv":
        rows = {"text": [None, "a", None, "b"], "id": [1, 2, 3, 4]}
        write_rows(folder / "service=nulls" / "data.parquet", rows)
        (folder / "broken.parquet").write_bytes(b"PAR1")
    return folder


def check_end(output: Path, whole: Path) -> None:
    same_output(output, whole)
    assert not temporaries(output)
    assert dead_letters(output).to_pylist() == dead_letters(whole).to_pylist()
    names = ("rows_in", "rows_out", "dead_letters", "partitions_failed")
    assert [conserved(output)[n] for n in names] == [conserved(whole)[n] for n in names]
    twice = [part for part, count in Counter(committed(output)).items() if count > 1]
    assert not twice


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kill(layout: str, tmp_path: Path) -> None:
    """Kills at moments spread over what is left of the job, until it is done."""
    corpus = corpus_of(layout, tmp_path / "in")
    whole = tmp_path / "whole"
    options = {**LAYOUTS[layout], "input": corpus}
    job = start_job(output=whole, model=SLOW, **options)
    moments = watch(job, whole, 1 << 30)
    assert job.wait().returncode == 0
    rng = random.Random(layout)
    share = max(1, round(KILLS / len(LAYOUTS)))
    kills = attempt = 0
    while kills < share:
        attempt += 1
        output = tmp_path / f"out{attempt}"
        ended = False
        while kills < share and not ended:
            ended = killed_run(output, rng.randrange(moments), whole, model=SLOW, **options)
            kills += not ended
        quick_job(output=output, model=SLOW, **options)
        check_end(output, whole)
        shutil.rmtree(output)


def killed_run(output: Path, wanted: int, whole: Path, **options: object) -> bool:
    """Kills a job after that many changes to its output; True where it ended first."""
    before = len(committed(output))
    job = start_job(output=output, **options)
    watch(job, output, wanted)
    ended = job.poll() is not None
    job.kill()
    if not ended:
        assert len(committed(output)) >= before
        assert len(in_flight(output, whole)) <= IN_FLIGHT
    return ended


def in_flight(output: Path, whole: Path) -> set[str]:
    """SuperBatches some of whose files are there although they are not committed."""
    superbatch = _superbatches(whole)
    there = set(superbatch.keys() - _superbatches(output).keys())
    return {superbatch[path] for path in there if (output / path).exists()}


def _superbatches(output: Path) -> dict[str, str]:
    return {
        file["path"]: header["superbatch"]
        for _, header, lines in manifest_entries(output)
        if "superbatch" in header
        for line in lines
        for file in line["files"]
    }


def watch(job: Job, output: Path, most: int) -> int:
    """Waits for that many changes in the number of names below the output, or the job's end."""
    seen = known = 0
    while seen < most and job.poll(0.005) is None:
        now = sum(len(folders) + len(files) for _, folders, files in os.walk(output))
        known, seen = now, seen + (now != known)
    return seen


class _KillAtStep:
    """Kills the process at the n-th time that it changes a name below the output."""

    METHODS = ("rename", "move", "remove", "remove_tree", "remove_empty_folders")

    def __init__(self, step: int, *, after: bool):
        self.step, self.after = step, after

    def __call__(self) -> None:
        lock = threading.Lock()

        def counted(method: str) -> None:
            real = getattr(Store, method)

            def replacement(store: Store, *args: str) -> None:
                with lock:
                    self.step -= 1
                    mine = self.step == -1
                if mine and not self.after:
                    os.kill(os.getpid(), signal.SIGKILL)
                real(store, *args)
                if mine:
                    os.kill(os.getpid(), signal.SIGKILL)

            setattr(Store, method, replacement)

        for method in self.METHODS:
            counted(method)


def test_kill_at_every_step_of_publishing(tmp_path: Path) -> None:
    """A split partition that replaces a larger one: every rename and removal, before and after."""
    corpus, output = make_corpus(tmp_path / "in", [170]), tmp_path / "old"
    options = {"input": corpus, "min_rows": 50, "max_rows": 50}
    nulls = {"text": [None, *texts("n", 160)], "id": list(range(161))}
    write_rows(corpus / "service=nulls" / "data.parquet", nulls)
    quick_job(output=output, **options)
    make_corpus(corpus, [120])
    nulls = {"text": [*texts("n", 100), None], "id": list(range(101))}
    write_rows(corpus / "service=nulls" / "data.parquet", nulls)
    quick_job(output=tmp_path / "whole", **options)
    first = last = 0
    for step in range(0, 1000, 1 if KILLS > 6 else 14):
        again = tmp_path / "again"
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(output, again)
        setup = _KillAtStep(step, after=step % 2 == 1)
        done = run_job(output=again, **options, check=False, setup=setup)
        if done.returncode == 0:
            break
        last, first = step, first or step
        assert done.returncode == -9
        quick_job(output=again, **options)
        check_end(again, tmp_path / "whole")
    assert last > 20


@pytest.mark.parametrize("operation", ["put", "rename", "remove"])
def test_every_operation_fails_once(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One clear line, an exit status, and a next run that ends right; for each step in turn."""
    corpus = make_corpus(tmp_path / "in", [3, 130])
    write_rows(corpus / "service=s002" / "data.parquet", {"text": [None, "a"], "id": [1, 2]})
    options = {"input": corpus, "min_rows": 50, "max_rows": 50}
    output = tmp_path / "old"
    quick_job(output=output, **options)
    make_corpus(corpus, [4, 65, 5])
    write_rows(corpus / "service=nulls" / "data.parquet", {"text": [None, "a"], "id": [1, 2]})
    (corpus / "broken.parquet").write_bytes(b"PAR1")
    quick_job(output=tmp_path / "whole", **options)
    real = getattr(Store, operation)
    # every step where many kills are asked for, else some of them
    sampled = {"put": (1, 8, 10), "rename": (4, 13, 15), "remove": (0, 2, 1)}
    first, stride, least = sampled[operation]
    for step in range(first, 1000, 1 if KILLS > 6 else stride):
        again = tmp_path / "again"
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(output, again)
        fault = _FailOnce(real, step)
        monkeypatch.setattr(Store, operation, lambda store, *args, fault=fault: fault(store, *args))
        done = quick_job(output=again, **options, check=False)
        monkeypatch.setattr(Store, operation, real)
        if fault.failed is None:
            break
        if "_surge/report.html" in fault.failed:
            assert done.returncode == 0  # pictures are not worth a failed job
            continue
        assert done.returncode == 1, (step, fault.failed)
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("failed: OSError: the disk of the output ")
        assert str(again) in done.stderr
        quick_job(output=again, **options)
        check_end_of_failure(again, tmp_path / "whole")
    assert step > least


class _FailOnce:
    """Stands for a method of Store, and fails at its n-th call."""

    def __init__(self, real: Callable[..., None], step: int):
        self.real, self.step = real, step
        self.failed: tuple[str, ...] | None = None
        self._lock = threading.Lock()

    def __call__(self, store: object, *args: str) -> None:
        with self._lock:
            self.step -= 1
            mine = self.step == -1
        if mine:
            self.failed = tuple(x for x in args if isinstance(x, str))
            raise OSError(28, os.strerror(28))
        self.real(store, *args)


def check_end_of_failure(output: Path, whole: Path) -> None:
    same_output(output, whole)
    assert not temporaries(output)
    assert dead_letters(output).to_pylist() == dead_letters(whole).to_pylist()
    conserved(output)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB; skipped where it cannot be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "surge-test", str(folder)]
    if (
        os.geteuid()
        or not shutil.which("mount")
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("a small tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_full_disk(small_disk: Path, tmp_path: Path, kind: str) -> None:
    corpus = tmp_path / "in"
    if kind == "parquet":
        make_corpus(corpus, [400] * 20)
    else:
        corpus.mkdir()
        rng = random.Random(0)
        rows = [json.dumps({"text": rng.randbytes(2000).hex()}) for _ in range(1500)]
        (corpus / "a.jsonl").write_text("\n".join(rows))
    options = {"input": corpus, "model": "dummy:64", "min_rows": 400}
    line = one_line(quick_job(output=small_disk / "out", **options, check=False))
    assert line.startswith("failed: ") and "is full" in line and str(small_disk) in line
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    quick_job(output=small_disk / "out", **options)
    quick_job(output=tmp_path / "whole", **options)
    same_output(small_disk / "out", tmp_path / "whole")
    conserved(small_disk / "out")


@pytest.mark.parametrize("other", [{"max_rows": 100}, {"max_bytes": 700}])
def test_restart_with_other_limits(tmp_path: Path, other: dict[str, int]) -> None:
    """Parts of one split must not be mixed with those of another."""
    corpus, output = make_corpus(tmp_path / "in", [230, 30]), tmp_path / "out"
    quick_job(input=corpus, output=tmp_path / "whole", min_rows=50, max_rows=50)
    first = {"input": corpus, "output": output, "min_rows": 50, "max_rows": 50}
    limits = {"input": corpus, "output": output, "min_rows": 50, **other}
    for options in (first, limits, first):
        job = run_job(**options, check=False, setup=_KillAtStep(7, after=True))
        assert job.returncode == -9
    quick_job(**limits)
    assert not temporaries(output)
    conserved(output)
    left, right = read_output(output), read_output(tmp_path / "whole")
    assert {n: t.to_pylist() for n, t in left.items()} == {
        n: t.to_pylist() for n, t in right.items()
    }


def test_parts_whose_input_changed_midway(tmp_path: Path) -> None:
    corpus, output = make_corpus(tmp_path / "in", [170, 5]), tmp_path / "out"
    options = {"input": corpus, "output": output, "min_rows": 50, "max_rows": 50}
    shutil.copytree(corpus, tmp_path / "backup")
    done = run_job(**options, check=False, setup=_KillAtStep(8, after=True))
    assert done.returncode == -9
    make_corpus(corpus, [180, 5])
    quick_job(**options)
    assert not temporaries(output)
    shutil.rmtree(corpus)
    shutil.copytree(tmp_path / "backup", corpus)
    quick_job(**options)
    quick_job(**{**options, "output": tmp_path / "whole"})
    same_output(output, tmp_path / "whole")


def test_a_clock_that_goes_back(tmp_path: Path) -> None:
    corpus, output = make_corpus(tmp_path / "in", [5, 6]), tmp_path / "out"
    quick_job(input=corpus, output=output)
    make_corpus(corpus, [5, 7])
    run_job(input=corpus, output=output, setup=_yesterday)
    done = quick_job(input=corpus, output=output)
    assert "nothing to do" in done.stdout
    assert conserved(output)["rows_out"] == 12


def _yesterday() -> None:
    real = time.time
    time.time = lambda: real() - 86400  # type: ignore[assignment]
