from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from surge_beam.records import RefusedError, SurgeError
from surge_beam.transforms import manifest
from surge_beam.transforms.files import Store
from surge_beam.transforms.job import (
    CONFIG,
    EXPECTED,
    check_paths,
    clear,
    exclusive,
    explain,
    finish,
    named,
    run_name,
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "out"))


def test_run_names_sort_by_time_whatever_the_clock_says(store: Store) -> None:
    names = []
    for now in (1000.0, 2000.0, 1.0, 1.0, 3000.0):
        names.append(run_name(store, now))
        manifest.put_run(store, {"run": names[-1]})
    assert names == sorted(names) and len(set(names)) == 5
    manifest.write(store, "ffff00000000abcd", "x", {}, [])
    assert run_name(store, 4000.0) > "ffff00000000abcd"
    manifest.write(store, "named by a person", "x", {}, [])
    assert run_name(store, 4000.0) > names[-1]


def test_lock_in_one_process(store: Store) -> None:
    with exclusive(store, {}, overwrite=False):
        with (
            pytest.raises(RefusedError, match="another job is writing"),
            exclusive(store, {}, overwrite=False),
        ):
            pass
        with (
            pytest.raises(RefusedError, match="another job is writing"),
            exclusive(store, {"other": 1}, overwrite=True),
        ):
            pass
    with exclusive(store, {}, overwrite=False) as run:
        finish(store, run)


def test_differences_are_named(store: Store) -> None:
    old = {"a": 1, "b": ["x"], "model": named("mini", "0123456789")}
    with exclusive(store, old, overwrite=False) as run:
        manifest.write(store, run, "x", {}, [])
    moved = {**old, "model": named("/elsewhere/mini", "0123456789")}
    with exclusive(store, moved, overwrite=False):
        pass
    new = {"a": 2, "c": None, "model": named("maxi", "9876543210")}
    with pytest.raises(RefusedError) as error, exclusive(store, new, overwrite=False):
        pass
    for words in ("a was 1, now 2", 'b was ["x"], now null', "now maxi (98765432)"):
        assert words in str(error.value)
    with exclusive(store, new, overwrite=True):
        assert json.loads(store.get(CONFIG))["settings"] == new
        assert not store.names(manifest.FOLDER)


def test_clear_leaves_what_is_not_ours(store: Store) -> None:
    for name in ("k=1/part-00000.parquet", "k=1/theirs", "theirs", "_surge/x/y"):
        store.put(name, b"")
    files = [{"path": "k=1/part-00000.parquet"}, {"path": "k=2/gone"}]
    line = {"partition": "k=1", "fingerprint": "", "rows": 0, "dead_letters": 0, "files": files}
    manifest.write(store, "1", "x", {}, [line])
    clear(store)
    assert sorted(store.walk("")) == ["k=1/theirs", "theirs"]


@pytest.mark.parametrize(
    ("input_", "output", "word"),
    [
        ("in", "in", "holds the input"),
        ("in", ".", "holds the input"),
        ("in/", "in/../in", "holds the input"),
        ("in/*.parquet", "in", "holds the input"),
        ("file://{}/in", "in", "holds the input"),
        ("none", "out", "no such input"),
        ("in/*.none", "out", "no such input"),
        ("", "out", "--input is empty"),
        ("in", " ", "--output is empty"),
        ("foo://in", "out", "cannot open foo://in"),
        ("pipe.jsonl", "out", "is a pipe"),
        ("in", "in/out", ""),
        ("in", "in2", ""),
        ("in/*.parquet", "in/out", ""),
    ],
)
def test_check_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, input_: str, output: str, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.parquet").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.jsonl")
    if not word:
        check_paths(input_, output)
        return
    with pytest.raises(RefusedError, match=word):
        check_paths(input_.format(tmp_path), output)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (SurgeError("a b"), "SurgeError", "a b"),
        (
            RuntimeError(
                "Traceback ...\nsurge_beam.records.BadInputError: /x.csv, line 3: bad"
                " [while running 'Embed/Encode-ptransform-31']\n"
            ),
            "BadInputError",
            "/x.csv, line 3: bad",
        ),
        (ValueError(), "ValueError", "ValueError"),
        (KeyError("x"), "KeyError", "'x'"),
        (OSError(5, "Input/output error", "/x"), "OSError", "[Errno 5] Input/output error: '/x'"),
    ],
)
def test_explain(error: Exception, kind: str, message: str) -> None:
    assert explain(error, "/out") == (kind, message)
    assert (kind in EXPECTED) == (kind not in ("ValueError", "KeyError"))


@pytest.mark.parametrize("number", [28, 122])
def test_explain_a_full_disk(number: int) -> None:
    text = f"OSError: [Errno {number}] no room: '/out/x' [while running 'Embed/Encode']"
    kind, message = explain(RuntimeError(f"Traceback\n{text}\n"), "/out")
    assert kind == "OSError"
    assert message == f"the disk of the output /out is full: [Errno {number}] no room: '/out/x'"
