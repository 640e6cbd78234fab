from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "docstrings.py"
spec = importlib.util.spec_from_file_location("docstrings_example", SCRIPT)
assert spec and spec.loader
example = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = example
spec.loader.exec_module(example)

CODE = '''"""Of the module.

    Indented.
"""

class A:
    """Of A."""

    async def f(self):
        """Of f."""

        def inner():
            """Of inner."""

    def silent(self):
        pass

if True:
    def g():
        "Of g \\ud800."
'''


def source(path: Path, module: str = "pack.mod") -> example.Source:
    return example.Source(module.split(".")[0], module, path, 0)


def test_docstrings_are_found_without_importing(tmp_path: Path) -> None:
    path = tmp_path / "mod.py"
    path.write_text(CODE + "\nraise RuntimeError('imported')\n")
    rows = example.docstrings(source(path))
    assert [tuple(row) for row in rows] == [
        ("pack.mod", "module", 1, "Of the module.\n\nIndented."),
        ("A", "class", 6, "Of A."),
        ("A.f", "async function", 9, "Of f."),
        ("A.f.inner", "function", 12, "Of inner."),
        ("g", "function", 19, "Of g ?."),
    ]


@pytest.mark.parametrize("content", [b"def f(:\n", b"\xff\xfe\x00", b"x = '\x00'\n", b'"""\xe9"""'])
def test_a_file_that_does_not_parse_is_passed_over(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mod.py"
    path.write_bytes(content)
    assert example.docstrings(source(path)) is None


def test_partition_values_come_back_from_the_folder_names(tmp_path: Path) -> None:
    rows = [example.Row("q", "function", 3, "text")]
    for module in ("pack.mod", "päck.a%b/c=d", "pack.sub.mod"):
        example.write(tmp_path, source(tmp_path, module), rows)
    table = ds.dataset(tmp_path, partitioning="hive").to_table()
    assert sorted(table["module"].to_pylist()) == ["pack.mod", "pack.sub.mod", "päck.a%b/c=d"]
    assert set(table["package"].to_pylist()) == {"pack", "päck"}
    assert set(table.column_names) == {"qualname", "kind", "line", "text", "package", "module"}


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, timeout=300
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.parquet"))}


def test_build_is_repeatable_and_keeps_to_max_rows(tmp_path: Path) -> None:
    first = run("build", tmp_path / "a", "--max_rows", "200")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith(f"{tmp_path / 'a'}: ")
    before = files(tmp_path / "a")
    again = run("build", tmp_path / "a", "--max_rows", "200")
    assert again.returncode == 0, again.stderr
    assert files(tmp_path / "a") == before
    table = ds.dataset(tmp_path / "a", partitioning="hive").to_table()
    assert 150 < table.num_rows <= 200
    assert all(table["text"].to_pylist())


def test_build_replaces_nothing_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("mine")
    done = run("build", tmp_path, "--max_rows", "50")
    assert done.returncode != 0
    assert "letters.txt" in done.stderr
    assert os.listdir(tmp_path) == ["letters.txt"]


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_search_streams_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(60, 8)).astype(kind)
    for part in range(6):
        rows = slice(part * 10, part * 10 + 10)
        folder = tmp_path / "package=pack" / f"module=m{part}"
        folder.mkdir(parents=True)
        embedding = pa.FixedSizeListArray.from_arrays(pa.array(vectors[rows].reshape(-1)), 8)
        names = [f"q{i}" for i in range(60)[rows]]
        table = {"qualname": names, "text": [f"{x} first\nsecond" for x in names]}
        pq.write_table(pa.table({**table, "embedding": embedding}), folder / "part-00000.parquet")
    (tmp_path / "_surge").mkdir()
    pq.write_table(pa.table({"stage": ["read"]}), tmp_path / "_surge" / "dead.parquet")

    wanted = rng.normal(size=(2, 8)).astype(np.float32)

    class Worker:
        def __init__(self, config: object) -> None: ...

        def prepare(self, texts: pa.Array) -> pa.Array:
            return texts

        def encode(self, texts: pa.Array) -> types.SimpleNamespace:
            return types.SimpleNamespace(matrix=wanted[: len(texts)])

    stub = types.ModuleType("surge_beam.gpu.worker")
    stub.EncodeWorker = Worker
    monkeypatch.setitem(sys.modules, "surge_beam.gpu.worker", stub)
    example.main(["search", str(tmp_path), "--query", "one", "--query", "two", "--top", "3"])
    out = capsys.readouterr().out

    scores = example.unit(wanted) @ example.unit(vectors.astype(np.float32)).T
    order = np.argsort(-scores, axis=1)[:, :3]
    lines = [line for line in out.splitlines() if line.startswith("  ")]
    expected = [
        f"  {scores[q, i]:.3f}  pack · m{i // 10} · q{i}: q{i} first"
        for q in (0, 1)
        for i in order[q]
    ]
    assert lines == expected
    assert out.count("nearest of 60") == 2
