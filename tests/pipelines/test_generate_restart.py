"""Kills and growth: the next run ends as an undisturbed one does, and decodes no row twice."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from surge_beam.transforms import manifest
from surge_beam.transforms.journal import CompletionJournal
from surge_beam.transforms.write import Committer
from tests.pipelines.generate_support import (
    Dying,
    GenerateJob,
    errors,
    generate,
    outputs,
    settled,
    start_generate,
    text_line,
    without_cached,
    without_time,
    write_lines,
)
from tests.pipelines.harness import dead_letters, read_output, write_rows

KILLS = int(os.environ.get("SURGE_KILLS", "2"))
MODEL = "dummy:seconds=0.004"
RULES = "Behind one instruction that is longer than a page of KV: "
OPTIONS: dict[str, dict[str, Any]] = {
    "columns": {"prompt_column": "prompt", "rounds": 2, "slice_tokens": 9, "ranges": 3},
    "lines": {"served_model_name": "dummy", "temperature": 1.0},
}


def make_input(kind: str, folder: Path) -> Path:
    """60 rows to answer in partitions of several sizes, one of them split, and some bad ones."""
    rng = random.Random(kind)
    for name, rows in (("a", 25), ("b", 3), ("c", 1), ("d", 31)):
        texts = [f"{RULES if rng.random() < 0.5 else ''}{name} {i}" for i in range(rows)]
        if kind == "columns":
            prompts: list[Any] = [*texts, None]
            rows_ = {"prompt": prompts, "n": list(range(rows + 1))}
            write_rows(folder / f"k={name}" / "x.parquet", rows_)
        else:
            lines: list[Any] = [text_line(f"{name}{i}", t) for i, t in enumerate(texts)]
            lines += [b"bad", text_line("a0", "doubled")]
            write_lines(folder / f"{name}.jsonl", lines)
    return folder


def state(output: Path) -> Any:
    """What two runs on one input must have alike."""
    report = settled(output)
    names = ("rows_in", "rows_out", "dead_letters", "partitions_failed", "files_failed")
    found = dead_letters(output).to_pylist()
    letters = sorted(json.dumps(_without_who(x, x["error"])) for x in found)
    counts = [report[n] for n in names]
    if (output / "output.jsonl").exists():
        lines = [
            x | {"error": _without_who(x["error"], x["error"]["code"])} for x in errors(output)
        ]
        return without_time(outputs(output)), lines, letters, counts
    return without_cached(read_output(output)), letters, counts


def _without_who(error: dict[str, Any], code: str) -> dict[str, Any]:
    """An error without its message where that says which row, or which run, has an id already."""
    return error | {"message": ""} if code == "duplicate_custom_id" else error


def progress(output: Path) -> int:
    """Completions kept and names below the output."""
    names = sum(len(folders) + len(files) for _, folders, files in os.walk(output))
    folder = output / "_surge" / "completions"
    kept = 0
    for path in folder.glob("*") if folder.exists() else ():
        try:
            kept += path.read_bytes().count(b"\n")
        except FileNotFoundError:
            continue
    return names + kept


def kill_at(job: GenerateJob, output: Path, moment: int) -> bool:
    """Kills a job once its output has come so far; False where it ended before."""
    while job.poll(0.005) is None:
        if progress(output) >= moment:
            job.kill()
            return True
    assert job.poll() == 0
    return False


@pytest.mark.parametrize("kind", OPTIONS)
def test_kill(kind: str, tmp_path: Path) -> None:
    source, whole = make_input(kind, tmp_path / "in"), tmp_path / "whole"
    options = {"input": source, "model": MODEL, "max_rows": 10, "max_tokens": 30, **OPTIONS[kind]}
    options |= {"max_sequences": 6}
    generate(output=whole, **options)
    rows = settled(whole)["rows_out"]
    assert rows == settled(whole)["rows_decoded"] == 60
    rng = random.Random(kind)
    share = max(1, round(KILLS / len(OPTIONS)))
    kills = attempt = reused = 0
    while kills < share:
        attempt += 1
        output = tmp_path / f"out{attempt}"
        # every other time the run that goes on is killed too
        for _ in range(1 + attempt % 2):
            job = start_generate(output=output, **options)
            kills += kill_at(job, output, progress(output) + rng.randrange(3, 90))
        generate(output=output, **options)
        assert state(output) == state(whole)
        report = settled(output)
        assert report["rows_decoded"] + report["rows_reused"] == rows
        reused += report["rows_reused"]
        shutil.rmtree(output)
    assert reused > 0


def test_a_journal_cut_short(tmp_path: Path) -> None:
    """Of a line that was not written whole the row is decoded again, of all others none."""
    source, output = make_input("columns", tmp_path / "in"), tmp_path / "out"
    options = {"input": source, "output": output, "prompt_column": "prompt", "max_rows": 10}
    job = start_generate(setup=Dying(CompletionJournal, "add", 20), **options)
    assert job.wait().returncode == -9
    (path,) = (output / "_surge" / "completions").iterdir()
    data = path.read_bytes()
    assert data.count(b"\n") == 20
    path.write_bytes(data[:-30])
    # and a file of which nothing can be read
    (path.parent / "noise.jsonl").write_bytes(b'\xff\n[1]\n{}\n{"completion": 7}\nnull\n')
    generate(**options)
    report = settled(output)
    assert (report["rows_reused"], report["rows_decoded"]) == (19, 41)
    generate(**options | {"output": tmp_path / "whole"})
    assert state(output) == state(tmp_path / "whole")


@pytest.mark.parametrize("kind", OPTIONS)
def test_killed_between_two_commits(kind: str, tmp_path: Path) -> None:
    """An id of a block that is committed is refused in the others, as in an undisturbed run."""
    source, output = make_input(kind, tmp_path / "in"), tmp_path / "out"
    options = {"input": source, "max_rows": 10, **OPTIONS[kind], "served_model_name": "dummy"}
    job = start_generate(setup=Dying(Committer, "commit", 3), output=output, **options)
    assert job.wait().returncode == -9
    generate(output=output, **options)
    report = settled(output)
    assert (report["rows_reused"], report["rows_decoded"]) == (60, 0)
    generate(output=tmp_path / "whole", **options)
    assert state(output) == state(tmp_path / "whole")


def test_killed_while_the_two_files_are_made(tmp_path: Path) -> None:
    source, output = make_input("lines", tmp_path / "in"), tmp_path / "out"
    options = {"input": source, "served_model_name": "dummy"}

    setup = Dying("pipelines.generate_corpus", "assemble", after=False)
    job = start_generate(setup=setup, output=output, **options)
    assert job.wait().returncode == -9
    assert not (output / "output.jsonl").exists()
    done = generate(output=output, **options)
    assert "0 rows decoded, 60 reused" in done.stdout
    generate(output=tmp_path / "whole", **options)
    assert state(output) == state(tmp_path / "whole")


def test_completions_of_other_settings_are_not_reused(tmp_path: Path) -> None:
    """Of a run that was killed before it committed anything, so that others are not refused."""
    source = tmp_path / "in" / "a.parquet"
    write_rows(source, {"prompt": [f"row {i}" for i in range(20)]})
    options = {"input": source, "prompt_column": "prompt", "temperature": 1.0}
    output = tmp_path / "out"
    job = start_generate(setup=Dying(CompletionJournal, "add", 10), output=output, **options)
    assert job.wait().returncode == -9
    assert not (output / manifest.FOLDER).exists()
    generate(output=output, seed=1, **options)
    generate(output=tmp_path / "whole", seed=1, **options)
    assert state(output) == state(tmp_path / "whole")
    assert settled(output)["rows_reused"] == 0


def test_growth_of_columns(tmp_path: Path) -> None:
    """A new file and a changed one: only their partitions are decoded."""
    source, output = make_input("columns", tmp_path / "in"), tmp_path / "out"
    options = {"input": source, "prompt_column": "prompt", "max_rows": 10}
    generate(output=output, **options)
    done = generate(output=output, **options)
    assert done.stdout.startswith("0 rows decoded, 60 reused; 0 tokens")
    assert "nothing to do: every row is answered already" in done.stdout
    write_rows(source / "k=e" / "x.parquet", {"prompt": ["new", "newer"], "n": [1, 2]})
    write_rows(source / "k=b" / "x.parquet", {"prompt": ["changed"], "n": [1]})
    generate(output=output, **options)
    report = settled(output)
    assert (report["rows_decoded"], report["rows_reused"]) == (3, 57)
    generate(output=tmp_path / "anew", **options)
    assert state(output) == state(tmp_path / "anew")
