"""Who may write: one job at a time, one configuration an output, nobody else's files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.pipelines.harness import (
    SLOW,
    conserved,
    listing,
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
    wait_for_commits,
    write_rows,
)
from tests.whole import only_whole


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus and its finished output, which no test may change."""
    folder = tmp_path_factory.mktemp("finished")
    make_corpus(folder / "in")
    run_job(input=folder / "in", output=folder / "out", fresh=True)
    return folder


def refused(output: Path, *words: str, **options: object) -> None:
    """Asserts that a job is refused in one line that holds the words, and touches nothing."""
    before = listing(output)
    line = one_line(quick_job(output=output, check=False, **options))
    assert line.startswith("refused: "), line
    for word in words:
        assert word in line, line
    assert listing(output) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "dummy:8"}, ["model", "dummy:16", "dummy:8"]),
        ({"prompt": "query: "}, ["prompt was null", 'now "query: "']),
        ({"truncate_dim": 4, "output_dtype": "float16"}, ["truncate_dim", "output_dtype"]),
        ({"text_column": "id"}, ["text_column"]),
        ({"partition_by": "service"}, ["partition_by"]),
        ({"keep_columns": "id"}, ["keep_columns was null"]),
    ],
)
def test_another_configuration_is_refused(
    finished: Path, change: dict[str, object], words: list[str]
) -> None:
    refused(finished / "out", *words, "--overwrite", input=finished / "in", **change)


def test_limits_may_change(finished: Path) -> None:
    done = quick_job(input=finished / "in", output=finished / "out", min_rows=10, max_rows=20)
    assert "0 partitions encoded, 8 skipped" in done.stdout


def test_other_peoples_files(tmp_path: Path, finished: Path) -> None:
    output = tmp_path / "out"
    write_rows(output / "theirs.parquet", {"text": ["x"]})
    refused(output, "not empty", input=finished / "in")
    quick_job(input=finished / "in", output=output, overwrite=True)
    assert (output / "theirs.parquet").exists()
    quick_job(input=finished / "in", output=output)


def test_output_is_a_file(tmp_path: Path, finished: Path) -> None:
    (tmp_path / "out").write_text("x")
    refused(tmp_path / "out", "is a file", input=finished / "in")


@pytest.mark.parametrize("glob", ["", "/*/*.parquet"])
def test_input_in_the_output(tmp_path: Path, glob: str) -> None:
    corpus = make_corpus(tmp_path / "all" / "in", [3])
    refused(tmp_path / "all", "holds the input", input=f"{corpus}{glob}")
    (tmp_path / "link").symlink_to(tmp_path / "all")
    refused(tmp_path / "link", "holds the input", input=f"{corpus}{glob}")
    refused(corpus, "holds the input", input=f"{corpus}{glob}")


def test_output_in_the_input(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "in", [3, 4])
    (tmp_path / "link").symlink_to(corpus)
    for output in (corpus / "out", tmp_path / "link" / "out"):
        done = quick_job(input=corpus, output=output)
        assert conserved(corpus / "out")["rows_out"] == 7
    assert "nothing to do" in done.stdout


def test_missing_input_writes_nothing(tmp_path: Path) -> None:
    for input_ in (tmp_path / "none", f"{tmp_path}/none*.parquet"):
        refused(tmp_path / "out", "no such input", input=input_)
    assert not (tmp_path / "out").exists()


def test_a_run_that_committed_nothing_binds_nobody(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "in", [5, 6])
    quick_job(input=corpus, output=tmp_path / "out", text_column="txet")
    report = conserved(tmp_path / "out")
    assert (report["partitions_failed"], report["dead_letters"], report["rows_out"]) == (2, 2, 0)
    quick_job(input=corpus, output=tmp_path / "out")
    assert conserved(tmp_path / "out")["dead_letters"] == 0


def test_overwrite(tmp_path: Path, finished: Path) -> None:
    corpus = make_corpus(tmp_path / "in", [30, 0, 50])
    write_rows(corpus / "service=bad" / "data.parquet", {"text": [None, "x"], "id": [0, 1]})
    output = tmp_path / "out"
    quick_job(input=corpus, output=output, model="dummy:8", max_rows=20, min_rows=20)
    quick_job(input=finished / "in", output=output, overwrite=True)
    same_output(output, finished / "out")
    assert conserved(output)["dead_letters"] == 0
    assert {run for run, _, _ in manifest_entries(output)} == {conserved(output)["run"]}


@pytest.mark.parametrize("step", (5, 11))
def test_overwrite_cut_short(tmp_path: Path, finished: Path, step: int) -> None:
    output = tmp_path / "out"
    quick_job(input=finished / "in", output=output, model="dummy:8")
    cut = run_job(
        input=finished / "in", output=output, overwrite=True, check=False,
        setup=_ExitAtRemove(step),
    )  # fmt: skip
    assert cut.returncode == 9
    line = one_line(quick_job(input=finished / "in", output=output, model="dummy:8", check=False))
    assert "dummy:8" in line
    quick_job(input=finished / "in", output=output)
    same_output(output, finished / "out")


class _ExitAtRemove:
    """Ends the process at its n-th removal of a file."""

    def __init__(self, step: int):
        self.step = step

    def __call__(self) -> None:
        from surge_beam.transforms.files import Store

        remove = Store.remove

        def remove_or_exit(store: Store, name: str) -> None:
            if self.step == 0:
                os._exit(9)
            self.step -= 1
            remove(store, name)

        Store.remove = remove_or_exit  # type: ignore[method-assign]


RUNNERS = {
    "one process": [],
    "two workers": ["--direct_running_mode=multi_processing", "--direct_num_workers=2"],
}


@pytest.mark.parametrize("runner", ["one process", pytest.param("two workers", marks=only_whole)])
def test_second_job_is_refused_and_a_kill_blocks_nobody(tmp_path: Path, runner: str) -> None:
    corpus = make_corpus(tmp_path / "in", [20] * 30)
    options = {"input": corpus, "min_rows": 20, "max_rows": 20}
    output = tmp_path / "out"
    first = start_job(*RUNNERS[runner], output=output, **options, model=SLOW + ":tau=0.1")
    wait_for_commits(output, 2, first)
    second = quick_job(output=output, **options, model=SLOW + ":tau=0.1", check=False)
    assert "another job is writing" in one_line(second)
    assert first.poll() is None
    first.kill()
    third = quick_job(output=output, **options, model=SLOW + ":tau=0.1")
    assert third.stderr == ""
    assert not temporaries(output)
    report = conserved(output)
    assert report["partitions_encoded"] + report["partitions_skipped"] == 30
    runs = {run for run, _, _ in manifest_entries(output)}
    assert len(runs) == 2
    quick_job(output=tmp_path / "whole", **options, model=SLOW)
    same_output(output, tmp_path / "whole")


def test_what_is_left_of_an_earlier_run_cannot_commit(tmp_path: Path) -> None:
    from surge_beam.records import SurgeError
    from surge_beam.transforms import manifest
    from surge_beam.transforms.files import Store
    from surge_beam.transforms.job import exclusive

    store = Store(str(tmp_path / "out"))
    with exclusive(store, {}, overwrite=False) as first:
        manifest.write(store, first, "a", {}, [])
    with exclusive(store, {}, overwrite=False) as second:
        assert second > first
        with pytest.raises(SurgeError, match="a later one is writing"):
            manifest.write(store, first, "b", {}, [])
        manifest.write(store, second, "b", {}, [])


def test_written_by_another_version(tmp_path: Path, finished: Path) -> None:
    output = tmp_path / "out"
    quick_job(input=finished / "in", output=output)
    config = json.loads((output / "_surge" / "config.json").read_text())
    (output / "_surge" / "config.json").write_text(json.dumps({**config, "format_version": 99}))
    refused(output, "format_version was 99", input=finished / "in")


def test_two_at_once_on_a_new_output(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "in", [10] * 12)
    options = {"input": corpus, "output": tmp_path / "out", "model": SLOW + ":tau=0.3"}
    jobs = [start_job(**options, min_rows=10) for _ in range(3)]
    done = sorted((job.wait() for job in jobs), key=lambda x: x.returncode)
    assert [d.returncode for d in done] == [0, 2, 2]
    for second in done[1:]:
        assert one_line(second).startswith("refused: ")
    assert conserved(tmp_path / "out")["rows_out"] == 120
    assert read_output(tmp_path / "out")["service=s003"].column("text").to_pylist() == texts(3, 10)


def test_an_output_that_cannot_be_made_is_refused(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    line = one_line(quick_job(input=finished / "in", output=tmp_path / "file" / "x", check=False))
    assert line.startswith("refused: cannot write to the output ") and "file" in line


def test_a_model_that_is_not_there_is_refused(finished: Path, tmp_path: Path) -> None:
    refused(tmp_path / "out", "no/such/model", input=finished / "in", model="no/such/model")


def test_an_unknown_runner_is_refused(finished: Path, tmp_path: Path) -> None:
    refused(tmp_path / "out", "'Nope'", input=finished / "in", runner="Nope")


def test_an_unquoted_glob_is_refused(finished: Path, tmp_path: Path) -> None:
    line = one_line(
        quick_job("more.parquet", input=finished / "in", output=tmp_path / "out", check=False)
    )
    assert line.startswith("refused: unexpected argument 'more.parquet'")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["{broken", "[1]", "\0"])
def test_a_configuration_that_cannot_be_read_is_refused(
    finished: Path, tmp_path: Path, content: str
) -> None:
    (tmp_path / "out" / "_surge").mkdir(parents=True)
    (tmp_path / "out" / "_surge" / "config.json").write_text(content)
    refused(tmp_path / "out", "config.json is not what", input=finished / "in")
