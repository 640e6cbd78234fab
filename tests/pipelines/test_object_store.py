"""The same job on an S3-compatible server on the loopback as on disk."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pipelines.harness import (
    SLOW,
    make_corpus,
    one_line,
    quick_job,
    read_output,
    run_job,
    start_job,
    texts,
    write_rows,
)

pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """The environment that reaches the server."""
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "FSSPEC_S3_ENDPOINT_URL": f"http://{host}:{port}",
    }
    moto.stop()


class Bucket:
    """One bucket, as a test sees it."""

    def __init__(self, name: str, env: dict[str, str]):
        self.env, self.name = env, name
        self.fs = s3fs.S3FileSystem(
            key="test",
            secret="test",
            endpoint_url=env["AWS_ENDPOINT_URL"],
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        self.fs.mkdir(name)

    def url(self, path: str) -> str:
        return f"s3://{self.name}/{path}"

    def keys(self, path: str) -> dict[str, Any]:
        found = self.fs.find(f"{self.name}/{path}", detail=True)
        start = len(f"{self.name}/{path}/")
        return {name[start:]: x["ETag"] for name, x in found.items() if x["type"] == "file"}

    def upload(self, folder: Path, path: str) -> str:
        for file in folder.rglob("*"):
            if file.is_file():
                name = file.relative_to(folder).as_posix()
                self.fs.pipe_file(f"{self.name}/{path}/{name}", file.read_bytes())
        return self.url(path)

    def read(self, path: str) -> dict[str, pa.Table]:
        found: dict[str, list[pa.Table]] = {}
        for name in sorted(self.keys(path)):
            if name.endswith(".parquet") and not name.startswith("_surge"):
                data = self.fs.cat_file(f"{self.name}/{path}/{name}")
                table = pq.ParquetFile(io.BytesIO(data)).read()
                found.setdefault(name.rpartition("/")[0], []).append(table)
        return {name: pa.concat_tables(tables) for name, tables in found.items()}

    def report(self, path: str) -> dict[str, Any]:
        found = json.loads(self.fs.cat_file(f"{self.name}/{path}/_surge/report.json"))
        assert found["rows_in"] == found["rows_out"] + found["dead_letters"]
        return found

    def committed(self, path: str) -> list[tuple[str, str, int]]:
        found = []
        for name in sorted(self.keys(f"{path}/_surge/manifest")):
            data = self.fs.cat_file(f"{self.name}/{path}/_surge/manifest/{name}").decode()
            header, *lines = [json.loads(line) for line in data.rstrip("\n").split("\n")]
            if "superbatch" in header:
                found += [(x["partition"], x["fingerprint"], x.get("part", 0)) for x in lines]
        return found

    def no_temporaries(self, path: str) -> None:
        names = [n for n in self.keys(path) if n.startswith("_surge/")]
        kept = ("manifest", "dead_letters", "scans")
        left = [n for n in names if "/" in n[7:] and n.split("/")[1] not in kept]
        assert not left


def same(bucket: Bucket, path: str, output: Path) -> None:
    remote, local = bucket.read(path), read_output(output)
    assert remote.keys() == local.keys()
    for name, table in remote.items():
        assert table.equals(local[name], check_metadata=True), name
    bucket.no_temporaries(path)


def corpus_of(folder: Path) -> Path:
    make_corpus(folder, [40, 130, 7, 25])
    write_rows(folder / "service=nulls" / "data.parquet", {"text": [None, "a"], "id": [1, 2]})
    lines = [json.dumps({"text": t, "id": 1}) for t in texts("j", 60)]
    (folder / "rows.jsonl").write_text("\n".join([*lines, "{"]))
    (folder / "broken.parquet").write_bytes(b"PAR1")
    return folder


OPTIONS = {"min_rows": 50, "max_rows": 50}


def test_a_job_and_its_growth(tmp_path: Path, server: dict[str, str]) -> None:
    bucket = Bucket("growth", server)
    corpus = corpus_of(tmp_path / "in")
    remote = {"input": bucket.upload(corpus, "in"), "output": bucket.url("out"), **OPTIONS}
    local = {"input": corpus, "output": tmp_path / "out", **OPTIONS}
    run_job(**remote, env=server)
    quick_job(**local)
    same(bucket, "out", tmp_path / "out")
    assert bucket.report("out")["dead_letters"] == 3

    before = bucket.keys("out")
    assert "nothing to do" in run_job(**remote, env=server).stdout
    after = bucket.keys("out")
    changed = {n for n in before | after if before.get(n) != after.get(n)}
    names = {"config.json", "plan.json", "report.json", "report.html", "run.json"}
    assert {n.removeprefix("_surge/") for n in changed} <= names

    make_corpus(corpus, [40, 60, 7, 25, 9])
    write_rows(corpus / "service=nulls" / "data.parquet", {"text": ["b"], "id": [1]})
    write_rows(corpus / "broken.parquet", {"text": ["c"], "id": [1]})
    (corpus / "rows.jsonl").unlink()
    bucket.fs.rm_file(f"{bucket.name}/in/rows.jsonl")
    bucket.upload(corpus, "in")
    done = run_job(**remote, env=server)
    assert done.stdout.startswith("4 partitions encoded, 3 skipped, 0 failed")
    assert "1 stale partitions" in done.stdout
    run_job("--prune", **remote, env=server)
    quick_job("--overwrite", **local)
    same(bucket, "out", tmp_path / "out")
    assert not bucket.keys("out/_surge/dead_letters")

    line = one_line(run_job(**remote, env=server, check=False, prompt="query: "))
    assert line.startswith("refused: ") and "prompt" in line
    line = one_line(run_job(**{**remote, "input": bucket.url("none")}, env=server, check=False))
    assert "no such input" in line
    line = one_line(run_job(**{**remote, "output": bucket.url("in")}, env=server, check=False))
    assert "holds the input" in line


def test_kill_and_second_job(tmp_path: Path, server: dict[str, str]) -> None:
    bucket = Bucket("kill", server)
    corpus = corpus_of(tmp_path / "in")
    slow = {**OPTIONS, "model": f"{SLOW}:tau=0.3"}
    remote = {"input": bucket.upload(corpus, "in"), "output": bucket.url("out"), **slow}
    quick_job(input=corpus, output=tmp_path / "out", **slow)
    for commits in (1, 4):
        job = start_job(**remote, env=server)
        while job.poll(0.02) is None and len(bucket.keys("out/_surge/manifest")) < commits:
            pass
        if commits == 1:
            second = run_job(**remote, env=server, check=False)
            assert "another job is writing" in one_line(second)
        job.kill()
    run_job(**remote, env=server)
    same(bucket, "out", tmp_path / "out")
    bucket.report("out")
    assert max(Counter(bucket.committed("out")).values()) == 1
