"""The helper process: hostile files, crashes, hangs, and life after them."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_beam.records import SurgeError
from surge_beam.transforms.guard import Guard, GuardError, UnreadableFileError, shared_guard
from surge_beam.transforms.parquet_probe import FIRST_ROW, ParquetProbe
from surge_beam.transforms.partitions import key_type

ROOT = Path(__file__).resolve().parents[2]
EXTRA = """
import os, signal, sys, time
from surge_beam.transforms import guard

calls = 0

def crash(source=None, destination=None, tick=None):
    if destination:
        from surge_beam.transforms import textfiles
        open(textfiles._temporary_base(destination, os.getpid()) + "-1.tmp", "w").close()
    os.kill(os.getpid(), signal.SIGSEGV)

def crash_unless_first(source=None, tick=None):
    global calls
    calls += 1
    if calls > 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return calls

def hang(seconds, source=None, tick=None):
    time.sleep(seconds)

def work(seconds, tick=None):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
        tick()

def fill(source=None, tick=None):
    return bytes(1 << 40)

def echo(value=None, tick=None):
    print("noise on standard output")
    return value

def fail(kind, tick=None):
    own = type("Own", (Exception,), {})
    raise PermissionError(13, "denied", "f") if kind == "os" else own("x")

def modules(tick=None):
    return sorted(sys.modules)

def leave(source=None, tick=None):
    os._exit(3)

FUNCTIONS = guard.FUNCTIONS | {
    f.__name__: f
    for f in (crash, crash_unless_first, hang, work, fill, echo, fail, modules, leave)
}
"""


@pytest.fixture
def guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    """A guard with functions that misbehave."""
    folder = tmp_path / "functions"
    folder.mkdir()
    (folder / "misbehaving.py").write_text(EXTRA)
    monkeypatch.syspath_prepend(folder)
    with Guard(timeout_s=5, functions="misbehaving") as guard:
        yield guard


@pytest.fixture(scope="module")
def reader() -> Iterator[Guard]:
    with Guard(memory_bytes=1 << 30) as guard:
        yield guard


def read_all(guard: Guard, path: Path) -> int:
    """Rows of a Parquet file, by way of all the functions."""
    about = guard.call("describe_parquet", source=str(path))
    schema = pa.ipc.read_schema(pa.BufferReader(about["schema"]))
    names, rows = schema.names, 0
    for group, expected in enumerate(about["row_group_rows"]):
        found = guard.call("verify_row_group", source=str(path), row_group=group)
        assert found == expected
        rows += found
    keys = [name for name in names if names.count(name) == 1 and may_be_key(schema, name)]
    groups = [group for group, count in enumerate(about["row_group_rows"]) if count]
    if keys and groups:
        data = guard.call("key_runs", source=str(path), row_groups=groups, columns=keys)
        found = pa.ipc.open_stream(data).read_all()[FIRST_ROW].to_pylist()
        assert found == sorted(set(found)) and found[0] == 0 and found[-1] < rows
    assert rows == about["num_rows"]
    return rows


def may_be_key(schema: pa.Schema, name: str) -> bool:
    try:
        return bool(key_type(schema.field(name).type))
    except SurgeError:
        return False


def outcome(guard: Guard, path: Path, kind: str = "parquet") -> int | str:
    try:
        if kind != "csv":
            return read_all(guard, path)
        target = str(path) + ".staged"
        staged = guard.call("stage_text", source=str(path), destination=target, format="csv")
        return int(staged["rows"])
    except UnreadableFileError as error:
        assert error.file == str(path)
        assert str(path) in str(error) and "\n" not in error.reason
        return error.reason


# Files


def test_describe_verify_and_keys(tmp_path: Path, reader: Guard) -> None:
    table = pa.table({"k": ["a", "b"] * 500, "n": range(1000), "t": ["some text"] * 1000})
    path = tmp_path / "f.parquet"
    pq.write_table(table, path, row_group_size=400)
    about = reader.call("describe_parquet", source=str(path), columns=["t"])
    assert about["row_group_rows"] == [400, 400, 200]
    assert about["num_rows"] == 1000 and "parquet" in about["created_by"]
    assert pa.ipc.read_schema(pa.BufferReader(about["schema"])).equals(table.schema)
    everything = reader.call("describe_parquet", source=str(path), columns=None)
    assert 0 < sum(about["row_group_bytes"]) < sum(everything["row_group_bytes"])
    assert reader.call("verify_row_group", source=str(path), row_group=2, columns=["t"]) == 200
    keys = reader.call("key_runs", source=str(path), row_groups=[1, 2], columns=["n", "k"])
    found = pa.ipc.open_stream(keys).read_all()
    assert found["n"].to_pylist() == list(range(400, 1000))
    assert found["k"].cast(pa.string()).to_pylist() == ["a", "b"] * 300
    assert found[FIRST_ROW].to_pylist() == list(range(600))
    runs = pa.table({"k": ["a"] * 500 + ["b"] * 300 + [None] * 200, "n": [1] * 700 + [2] * 300})
    pq.write_table(runs, tmp_path / "g.parquet", row_group_size=400)
    other = str(tmp_path / "g.parquet")
    keys = reader.call("key_runs", source=other, row_groups=[0, 1, 2], columns=["k", "n"])
    found = pa.ipc.open_stream(keys).read_all()
    assert found[FIRST_ROW].to_pylist() == [0, 400, 500, 700, 800]
    assert found["k"].cast(pa.string()).to_pylist() == ["a", "a", "b", "b", None]
    with pytest.raises(UnreadableFileError, match="0 columns named 'x'"):
        reader.call("verify_row_group", source=str(path), row_group=0, columns=["x"])
    texts = {"k": ["a", None, "b"], "n": [1, 2, 3]}
    pq.write_table(pa.table(texts), other)
    assert reader.call("first_texts", source=other, column="k", rows=2) == ["a"]
    with pytest.raises(UnreadableFileError, match="no one column named 'x'"):
        reader.call("first_texts", source=other, column="x", rows=2)
    pq.write_table(table.slice(0, 10), path)
    assert reader.call("verify_row_group", source=str(path), row_group=0) == 10


def test_bad_utf8_is_found(tmp_path: Path, reader: Guard) -> None:
    raw = pa.array([b"fine", b"\xff"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"good": [1, 2], "bad": text}), path)
    assert reader.call("verify_row_group", source=str(path), row_group=0, columns=["good"]) == 2
    for columns in (["bad"], None):
        with pytest.raises(UnreadableFileError, match="UTF8"):
            reader.call("verify_row_group", source=str(path), row_group=0, columns=columns)


def test_missing_and_empty_files(tmp_path: Path, reader: Guard) -> None:
    with pytest.raises(FileNotFoundError):
        reader.call("describe_parquet", source=str(tmp_path / "none"))
    (tmp_path / "empty").touch()
    assert "0 bytes" in str(outcome(reader, tmp_path / "empty"))
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "norows")
    assert outcome(reader, tmp_path / "norows") == 0


def test_a_file_cut_anywhere_is_unreadable(tmp_path: Path, reader: Guard) -> None:
    pq.write_table(pa.table({"a": ["x" * 50] * 200}), tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for size in range(0, len(data), max(1, len(data) // 40)):
        (tmp_path / "cut").write_bytes(data[:size])
        assert isinstance(outcome(reader, tmp_path / "cut"), str)


def test_remote_files_and_failures_to_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = ParquetProbe()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": ["x"] * 10}), sink)
    memory = fsspec.filesystem("memory")
    memory.pipe("/guard/f.parquet", sink.getvalue().to_pybytes())
    url = "memory://guard/f.parquet"
    assert probe.describe_parquet(url)["num_rows"] == 10
    assert probe.verify_row_group(url, 0) == 10
    memory.pipe("/guard/bad.parquet", b"x" * 100)
    with pytest.raises(UnreadableFileError):
        probe.describe_parquet("memory://guard/bad.parquet")

    class Broken:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.size = 1000

        def read(self, size: int = -1) -> bytes:
            raise TimeoutError("no answer")

        def seek(self, offset: int, whence: int = 0) -> int:
            return 1000

        def tell(self) -> int:
            return 1000

        def close(self) -> None:
            pass

    monkeypatch.setattr(type(memory), "open", Broken)
    with pytest.raises(TimeoutError):
        probe.describe_parquet(url)


def test_bad_parquet(shared_data: Path, reader: Guard) -> None:
    folder = shared_data / "bad_parquet"
    found = {path.name: outcome(reader, path) for path in sorted(folder.glob("*.parquet*"))}
    assert len(found) == 29
    for name in (
        "ARROW-GH-41317.parquet",
        "datapage_v1-corrupt-checksum.parquet",
        "rle-dict-uncompressed-corrupt-checksum.parquet",
        "encrypt_columns_and_footer.parquet.encrypted",
        "large_string_map.brotli.parquet",
    ):
        assert isinstance(found[name], str), name
    for name, rows in {
        "alltypes_plain.parquet": 8,
        "concatenated_gzip_members.parquet": 513,
        "repeated_no_annotation.parquet": 6,
        "unknown-logical-type.parquet": 3,
    }.items():
        assert found[name] == rows


def test_arrow_fuzz_inputs(tmp_path: Path, shared_data: Path, reader: Guard) -> None:
    counts = {"good": 0, "bad": 0}
    with gzip.open(shared_data / "arrow_fuzz_inputs" / "cases.jsonl.gz") as file:
        for number, line in enumerate(file):
            case = json.loads(line)
            path = tmp_path / f"case{number}"
            path.write_bytes(base64.b64decode(case["content_base64"]))
            found = outcome(reader, path, case["kind"])
            counts["bad" if isinstance(found, str) else "good"] += 1
            if case["kind"].startswith("ipc"):
                assert isinstance(found, str)
    assert sum(counts.values()) == 279 and counts["good"] > 0


# The process


def test_a_crash_is_survived(tmp_path: Path, guard: Guard) -> None:
    with pytest.raises(UnreadableFileError, match="f: reader crashed with signal SIGSEGV"):
        guard.call("crash", source="f")
    with pytest.raises(UnreadableFileError, match="reader ended with status 3"):
        guard.call("leave", source="f")
    assert guard.call("echo", value=[1]) == [1]
    with pytest.raises(UnreadableFileError):
        guard.call("crash", source="f", destination=str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["functions"]


def test_started_ahead(guard: Guard) -> None:
    guard.start()
    first = guard.pid
    guard.start()
    assert first is not None and guard.pid == first
    assert guard.call("echo", value=1) == 1 and guard.pid == first
    guard.close()
    guard.start()
    assert guard.pid not in (None, first) and guard.call("echo", value=2) == 2


def test_a_helper_that_cannot_start_is_not_the_file_s_fault() -> None:
    with Guard(functions="no_such_module") as guard:
        guard.start()
        with pytest.raises(GuardError, match="does not start"):
            guard.call("echo", source="f")
        assert guard.pid is None


def test_a_file_is_not_blamed_for_the_one_before(guard: Guard) -> None:
    for _ in range(2):
        assert guard.call("crash_unless_first") == 1


def test_a_helper_killed_between_calls_is_replaced(guard: Guard) -> None:
    guard.call("echo")
    first = guard.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert guard.call("echo", value=2) == 2
    assert guard.pid != first


def test_a_hang_ends_and_progress_does_not(guard: Guard) -> None:
    guard.call("echo")
    guard._timeout_s = 1
    guard.call("work", seconds=2.5)
    start = time.monotonic()
    with pytest.raises(UnreadableFileError, match=r"reader gave no answer in 1 s"):
        guard.call("hang", seconds=600, source="f")
    assert time.monotonic() - start < 10
    guard._timeout_s = 30
    assert guard.call("echo", value=1) == 1


def test_memory_is_limited(guard: Guard) -> None:
    with pytest.raises(UnreadableFileError, match=r"reader needs more than 4\.0 GiB of memory"):
        guard.call("fill", source="f")


def test_other_errors_come_through(guard: Guard) -> None:
    with pytest.raises(PermissionError, match="denied"):
        guard.call("fail", kind="os")
    with pytest.raises(GuardError, match="Own: x"):
        guard.call("fail", kind="own")
    with pytest.raises(GuardError, match="does not start"):
        Guard(functions="no_such_module").call("echo")


def test_an_interrupted_call_does_not_answer_the_next(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard.call("echo")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            guard.call("hang", seconds=2)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert guard.call("echo", value="next") == "next"


def test_the_helper_loads_neither_beam_nor_torch(tmp_path: Path, guard: Guard) -> None:
    path = str(tmp_path / "f.parquet")
    pq.write_table(pa.table({"k": ["a", "a", None], "n": [1, 2, None]}), path)
    guard.call("describe_parquet", source=path)
    guard.call("verify_row_group", source=path, row_group=0)
    guard.call("key_runs", source=path, row_groups=[0], columns=["k", "n"])
    loaded = {name.split(".")[0] for name in guard.call("modules")}
    assert not loaded & {"apache_beam", "torch", "numpy.testing", "pandas", "transformers"}
    assert {"pyarrow", "fsspec"} <= loaded


def test_threads_take_turns_and_outlive_the_starter(guard: Guard) -> None:
    answers: list[int] = []

    def ask(n: int) -> None:
        answers.append(guard.call("echo", value=n))

    starter = threading.Thread(target=ask, args=(0,))
    starter.start()
    starter.join()
    first = guard.pid
    time.sleep(0.2)
    threads = [threading.Thread(target=ask, args=(n,)) for n in range(1, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == list(range(30))
    assert guard.pid == first


def test_big_answers_and_requests(guard: Guard) -> None:
    value = os.urandom(5 << 20)
    assert guard.call("echo", value=value) == value


def test_a_forked_child_has_its_own_helper(guard: Guard) -> None:
    guard.call("echo")
    first = guard.pid
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            same = guard.call("echo", value=5) == 5
            code = 0 if same and guard.pid != first else 2
            guard.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert guard.call("echo", value=6) == 6 and guard.pid == first


def test_close_and_collection_end_the_helper(guard: Guard) -> None:
    guard.call("echo")
    helper = psutil.Process(guard.pid)
    guard.close()
    assert not helper.is_running()
    assert guard.call("echo", value=1) == 1
    other = Guard()
    with contextlib.suppress(FileNotFoundError):
        other.call("describe_parquet", source="/nowhere")
    helper = psutil.Process(other.pid)
    del other
    assert not helper.is_running()
    assert shared_guard() is shared_guard()


@pytest.mark.parametrize("busy", [False, True])
def test_a_killed_parent_leaves_no_helper(tmp_path: Path, busy: bool) -> None:
    (tmp_path / "misbehaving.py").write_text(EXTRA)
    code = textwrap.dedent(
        f"""
        import sys
        sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]
        from surge_beam.transforms.guard import Guard
        guard = Guard(functions="misbehaving", timeout_s=600)
        guard.call("echo")
        print(guard.pid, flush=True)
        guard.call("hang", seconds=600) if {busy} else sys.stdin.read()
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None and parent.stdout is not None
    with parent.stdin, parent.stdout:
        helper = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.3)
        parent.kill()
        parent.wait(10)
        gone, _ = psutil.wait_procs([helper], timeout=10)
    assert gone
