"""The same generation on every runner that can be had here: same output, whoever decodes it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest

from surge_beam.records import EngineConfig, SurgeError
from surge_beam.transforms.generate_files import GenerateConfig, GenerateFiles, read_config
from surge_beam.transforms.prompts import PromptConfig
from tests.pipelines.generate_support import (
    SCRIPT,
    arguments,
    errors,
    generate,
    outputs,
    run_script,
    settled,
    text_line,
    without_cached,
    without_time,
    write_lines,
)
from tests.pipelines.harness import dead_letters, read_output, write_rows
from tests.pipelines.runner_support import Pool, worker_pool
from tests.whole import only_whole

MULTI = ("--direct_running_mode=multi_processing", "--direct_num_workers=2")
ROWS = 90
JOBS: dict[str, dict[str, Any]] = {
    "columns": {
        "prompt_column": "prompt",
        "partition_by": "k",
        "max_rows": 12,
        "rounds": 2,
        "slice_tokens": 5,
        "ranges": 4,
    },
    "lines": {"temperature": 1.0, "max_rows": 12, "served_model_name": "dummy", "ranges": 3},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Columns and lines; partition ``0`` is split into parts, and some rows are bad."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [f"{'One instruction for many of these rows. ' * (i % 2)}Row {i}" for i in range(ROWS)]
    for file in range(3):
        own = range(file * 30, file * 30 + 30)
        prompts: list[Any] = [texts[i] for i in own]
        prompts[7] = None
        keys = [str(max(0, i % 7 - 3)) for i in own]
        write_rows(folder / "columns" / f"{file}.parquet", {"k": keys, "prompt": prompts})
        lines: list[Any] = [text_line(f"id {i}", texts[i]) for i in own]
        lines[7] = b"bad"
        write_lines(folder / "lines" / f"{file}.jsonl", [*lines, text_line("id 1", "doubled")])
    return folder


def state(output: Path) -> Any:
    report = settled(output)
    counts = [report[n] for n in ("rows_in", "rows_out", "dead_letters", "partitions_failed")]
    letters = sorted((x["file"], x["row"], x["message"]) for x in dead_letters(output).to_pylist())
    if (output / "output.jsonl").exists():
        return without_time(outputs(output)), errors(output), letters, counts
    return without_cached(read_output(output)), letters, counts


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What FnApiRunner makes of them in one process."""
    found = {}
    for kind, options in JOBS.items():
        output = tmp_path_factory.mktemp("expected") / kind
        generate(input=corpus / kind, output=output, **options)
        found[kind] = state(output)
        report = settled(output)
        assert report["rows_decoded"] == ROWS - 3
        assert report["dead_letters"] == (3 if kind == "columns" else 6)
    return found


@pytest.fixture(scope="module")
def pool(prism_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with worker_pool(tmp_path_factory.mktemp("pool")) as running:
        yield running


@pytest.fixture
def loopback(prism_path: str) -> tuple[str, ...]:
    location = f"--prism_location={prism_path}"
    return ("--runner=PrismRunner", location, "--environment_type=LOOPBACK")


@pytest.fixture
def external(prism_path: str, pool: Pool) -> tuple[str, ...]:
    return (
        "--runner=PrismRunner",
        f"--prism_location={prism_path}",
        "--environment_type=EXTERNAL",
        f"--environment_config=localhost:{pool.port}",
    )


@pytest.mark.parametrize("kind", ["columns", pytest.param("lines", marks=only_whole)])
def test_two_worker_processes(
    corpus: Path, expected: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    run_script(*MULTI, input=corpus / kind, output=tmp_path / "out", **JOBS[kind])
    assert state(tmp_path / "out") == expected[kind]
    assert settled(tmp_path / "out")["rows_decoded"] == ROWS - 3


def test_prism_loopback(
    corpus: Path, expected: dict[str, Any], tmp_path: Path, loopback: tuple[str, ...]
) -> None:
    run_script(*loopback, input=corpus / "lines", output=tmp_path / "out", **JOBS["lines"])
    assert state(tmp_path / "out") == expected["lines"]


def test_external_pool(
    corpus: Path,
    expected: dict[str, Any],
    tmp_path: Path,
    external: tuple[str, ...],
    pool: Pool,
) -> None:
    """The pool was started in another folder: paths are the submitter's, not the workers'."""
    options = {"input": corpus / "columns", "output": "out", **JOBS["columns"]}
    run_script(*external, cwd=tmp_path, **options)
    assert state(tmp_path / "out") == expected["columns"]
    assert not list(pool.elsewhere.iterdir())


def test_killed_worker(
    corpus: Path,
    expected: dict[str, Any],
    tmp_path: Path,
    external: tuple[str, ...],
    pool: Pool,
) -> None:
    """One clear word, and the next run takes over what was decoded."""
    output = tmp_path / "out"
    options = {"input": corpus / "columns", "output": output, **JOBS["columns"]}
    options |= {"model": "dummy:seconds=0.2"}
    job = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments(*external, **options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 200
    while not any(p.stat().st_size for p in output.glob("_surge/completions/*")):
        assert job.poll() is None and time.monotonic() < until, job.communicate()
        time.sleep(0.02)
    pool.encode_worker().kill()
    stdout, stderr = job.communicate(timeout=200)
    assert job.returncode == 1, stdout
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("failed: ") and "worker process ended" in last
    generate(**options)
    assert state(output) == expected["columns"]
    report = settled(output)
    assert report["rows_reused"] > 0
    assert report["rows_reused"] + report["rows_decoded"] == ROWS - 3


def config(**settings: Any) -> GenerateConfig:
    prompts = PromptConfig(column="p")
    return GenerateConfig(
        input="gs://bucket/in",
        output="gs://bucket/out",
        run="",
        prompts=prompts,
        read=read_config(prompts),
        **settings,
    )


def hinted(job: GenerateConfig) -> dict[str, dict[str, bytes]]:
    """Step -> resource hints, of the steps that have any, in a graph made for containers."""
    from apache_beam.transforms.environments import DockerEnvironment

    pipeline = beam.Pipeline()
    _ = pipeline | "Generate" >> GenerateFiles(job)
    image = DockerEnvironment.from_container_image("registry/surge_beam:0")
    proto = pipeline.to_runner_api(default_environment=image)
    found = {}
    for step in proto.components.transforms.values():
        if step.environment_id and step.spec.urn == "beam:transform:pardo:v1":
            hints = dict(proto.components.environments[step.environment_id].resource_hints)
            if hints:
                found["/".join(step.unique_name.split("/")[1:3])] = hints
    return found


def test_accelerator_hint_is_on_the_decoding_steps_alone() -> None:
    hint = {"beam:resources:accelerator:v1": GenerateConfig.accelerator.encode()}
    assert hinted(config()) == {"Decode/Round1": hint}
    assert hinted(config(rounds=2)) == {"Decode/Round1": hint, "Decode/Round2": hint}
    on_cpu = hinted(config(engine=EngineConfig(model="dummy", device="cpu")))
    assert on_cpu == {"Decode/Round1": {"beam:resources:min_ram_bytes:v1": b"2147483648"}}


def test_dry_run(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", {"p": ["x"]})
    done = generate(
        "--dry_run=True", input=tmp_path / "a.parquet", output=tmp_path / "out", prompt_column="p"
    )
    assert "nothing was run" in done.stdout and not (tmp_path / "out").exists()


def test_dask_is_refused() -> None:
    class DaskRunner(beam.runners.PipelineRunner):
        pass

    with pytest.raises(SurgeError, match="DaskRunner"):
        _ = beam.Pipeline(runner=DaskRunner()) | GenerateFiles(config())
