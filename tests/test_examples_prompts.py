from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "prompts.py"


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    before = list(sys.path)
    # as where the script is run: its folder comes first
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("prompts_example", SCRIPT)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
        sys.modules.pop("docstrings", None)
    return module


def run(script: Path, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prompts")
    done = run(SCRIPT, "build", out, "--max_rows", 30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{out}: 30 prompts in ")
    return out


def test_prompts_begin_alike_and_end_with_their_docstring(built: Path) -> None:
    table = ds.dataset(built, partitioning="hive").to_table()
    assert table.num_rows == 30
    assert set(table.column_names) == {"module", "qualname", "text", "prompt", "package"}
    rows = table.to_pylist()
    texts = [row["text"] for row in rows]
    assert len(set(texts)) == 30
    assert all("\n" not in text and 120 <= len(text) <= 320 for text in texts)
    begin = {row["prompt"].removesuffix(row["text"] + "\nSummary:") for row in rows}
    assert len(begin) == 1
    (begin,) = begin
    assert len(begin) > 1000
    assert begin.endswith("\n\nDocstring: ")
    assert {row["module"].split(".")[0] for row in rows} == {row["package"] for row in rows}


def test_a_build_leaves_alone_what_is_right_and_mends_the_rest(built: Path) -> None:
    files = sorted(built.rglob("*.parquet"))
    assert len(files) >= 2
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}
    changed = files[0]
    pq.write_table(pa.table({"text": ["other"]}), changed)
    gone = built / "package=no_such_package"
    gone.mkdir()
    (gone / "prompts.parquet").write_bytes(b"")
    done = run(SCRIPT, "build", built, "--max_rows", 30)
    assert done.returncode == 0, done.stderr
    assert sorted(built.rglob("*.parquet")) == files
    assert changed.read_bytes() == before[changed][1]
    for file in files[1:]:
        assert file.stat().st_mtime_ns == before[file][0]


def test_a_build_replaces_nothing_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("mine")
    done = run(SCRIPT, "build", tmp_path, "--max_rows", 5)
    assert done.returncode != 0
    assert "letters.txt" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]


def test_from_prompts_to_what_is_shown(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "generated"
    done = run(
        ROOT / "pipelines" / "generate_corpus.py",
        *("--input", built, "--output", out, "--prompt_column", "prompt"),
        *("--keep_columns", "module,qualname,text", "--stop", "\n", "--max_tokens", 4),
        *("--model", "dummy"),
    )
    assert done.returncode == 0, done.stderr
    shown = run(SCRIPT, "show", out, "--rows", 3)
    assert shown.returncode == 0, shown.stderr
    report = json.loads((out / "_surge" / "report.json").read_text())
    assert report["rows_out"] == 30
    assert report["prefix_tokens_saved"] > 29 * 1000
    saved, asked = report["prefix_tokens_saved"], report["prompt_tokens"]
    assert shown.stdout.splitlines()[-1].endswith(f": {saved:,} of {asked:,}")
    assert shown.stdout.count("\n  summary:   ") == 3


def test_show_takes_rows_from_all_over(
    tmp_path: Path, capsys: pytest.CaptureFixture, example: types.ModuleType
) -> None:
    for package in "abc":
        folder = tmp_path / f"package={package}"
        folder.mkdir()
        table = {
            "qualname": [f"{package}{i}" for i in range(4)],
            "text": ["word " * 40] * 4,
            "completion": [f" Sum {package}{i}." for i in range(4)],
        }
        pq.write_table(pa.table(table), folder / "part-00000.parquet")
    (tmp_path / "_surge").mkdir()
    report = {"prompt_tokens": 0, "prefix_tokens_saved": 0}
    (tmp_path / "_surge" / "report.json").write_text(json.dumps(report))
    example.main(["show", str(tmp_path), "--rows", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert [x for x in lines if "·" in x] == ["a · a0", "b · b0", "c · c0"]
    assert [x for x in lines if "summary" in x] == [f"  summary:   Sum {x}0." for x in "abc"]
    assert all(len(x) <= 95 for x in lines)
    assert lines[-1].endswith(": 0")
