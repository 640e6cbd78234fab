"""Runs the command line in processes of its own, and looks at what it leaves.

A job is a real process that can be killed. Importing Beam takes seconds, so a server imports it
once and forks a process for every job; ``fresh=True`` starts the script itself instead.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "pipelines" / "embed_corpus.py"
MODEL = "dummy:16"
SLOW = "dummy:16:c=0.001"
TIMEOUT = 300.0
_ELSEWHERE = tempfile.gettempdir()


def command(*args: object, **options: object) -> list[str]:
    """The command line: ``options`` become ``--name value``, True a bare flag."""
    line = [sys.executable, str(SCRIPT), *map(str, args)]
    options = {"model": MODEL, "device": "cpu", "min_rows": 64, **options}
    for name, value in options.items():
        if value is True:
            line.append(f"--{name}")
        elif value is not None and value is not False:
            line += [f"--{name}", str(value)]
    return line


class Job:
    """A job under way, in a session of its own.

    Attributes:
      args: its command line.
      pid: its process.
    """

    def __init__(self, args: list[str], env: Mapping[str, str], setup: Callable[[], None] | None):
        self.args = args
        self._files = tempfile.TemporaryDirectory()
        names = [os.path.join(self._files.name, n) for n in ("stdout", "stderr")]
        self._process = _FORKS.Process(target=_child, args=(args, dict(env), names, setup))
        self._process.start()
        self.pid = self._process.pid

    def poll(self, seconds: float = 0) -> int | None:
        """The exit status, or None where it runs on after that many seconds."""
        self._process.join(seconds)
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL to the job's own process, and to no other."""
        self._process.kill()
        self._process.join()

    def wait(self) -> subprocess.CompletedProcess[str]:
        self._process.join(TIMEOUT)
        if self._process.exitcode is None:
            self.kill()
            raise AssertionError(f"{self.args} did not end; {self._read()}")
        return subprocess.CompletedProcess(self.args, self._process.exitcode, *self._read())

    def _read(self) -> list[str]:
        files = [Path(self._files.name, n) for n in ("stdout", "stderr")]
        return [f.read_text() if f.exists() else "" for f in files]


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["pipelines.embed_corpus", "surge_beam.gpu.worker"])


def _child(
    args: list[str], env: dict[str, str], files: list[str], setup: Callable[[], None] | None
) -> None:
    with contextlib.suppress(PermissionError):
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, name in enumerate(files, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), target)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.chdir(_ELSEWHERE)
    os.environ.update(env)
    from pipelines import embed_corpus

    if setup is not None:
        setup()
    status = embed_corpus.main(args)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)


def start_job(
    *args: object,
    env: Mapping[str, str] | None = None,
    setup: Callable[[], None] | None = None,
    **options: object,
) -> Job:
    """Starts a job and returns at once; ``setup`` is called in its process first."""
    return Job(command(*args, **options)[2:], env or {}, setup)


def run_job(
    *args: object,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    fresh: bool = False,
    setup: Callable[[], None] | None = None,
    **options: object,
) -> subprocess.CompletedProcess[str]:
    """Runs a job to its end; with ``check`` it must end well."""
    if fresh:
        done = subprocess.run(
            command(*args, **options),
            cwd=_ELSEWHERE,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    else:
        done = start_job(*args, env=env, setup=setup, **options).wait()
    if check:
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line on stderr of a job that failed, which must not be a traceback."""
    assert done.returncode not in (0, None), done.stdout
    lines = done.stderr.strip().splitlines()
    assert lines and "Traceback" not in done.stderr, done.stderr
    return lines[-1]


def texts(tag: object, count: int, *, first: int = 0) -> list[str]:
    return [f"{tag}: text {i} of a row" for i in range(first, first + count)]


def write_rows(path: Path, rows: Mapping[str, Any] | pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = rows if isinstance(rows, pa.Table) else pa.table(dict(rows))
    pq.write_table(table, path, **options)
    return path


def make_corpus(
    folder: Path,
    sizes: Iterable[int] = (40, 1, 30, 7, 90, 3, 25, 60),
    *,
    name: Callable[[int], str] = lambda i: f"service=s{i:03d}/data.parquet",
) -> Path:
    """One Parquet file a partition: ``text`` and ``id``."""
    for i, rows in enumerate(sizes):
        write_rows(folder / name(i), {"text": texts(i, rows), "id": list(range(rows))})
    return folder


def read_output(output: Path) -> dict[str, pa.Table]:
    """Partition folder -> its rows, its files in name order."""
    found: dict[str, list[pa.Table]] = {}
    for path in sorted(output.rglob("*.parquet")):
        name = path.parent.relative_to(output).as_posix()
        if not name.startswith("_surge") and path.is_file():
            found.setdefault(name, []).append(pq.ParquetFile(path).read())
    return {name: pa.concat_tables(tables) for name, tables in found.items()}


def same_output(one: Path, other: Path) -> None:
    """Asserts that two outputs hold the same rows, to the bit."""
    left, right = read_output(one), read_output(other)
    assert left.keys() == right.keys()
    for name, table in left.items():
        assert table.equals(right[name], check_metadata=True), name


def report(output: Path) -> dict[str, Any]:
    return json.loads((output / "_surge" / "report.json").read_text())


def conserved(output: Path) -> dict[str, Any]:
    """The report; asserts that it agrees with the files that are there."""
    found = report(output)
    assert found["rows_in"] == found["rows_out"] + found["dead_letters"], found
    if not found["partitions_stale"]:
        assert found["rows_out"] == sum(t.num_rows for t in read_output(output).values())
        assert found["dead_letters"] == dead_letters(output).num_rows
    return found


def dead_letters(output: Path) -> pa.Table:
    from surge_beam.records import DEAD_LETTER_SCHEMA

    paths = sorted((output / "_surge" / "dead_letters").rglob("*.parquet"))
    tables = [pq.ParquetFile(p).read() for p in paths]
    return pa.concat_tables(tables) if tables else DEAD_LETTER_SCHEMA.empty_table()


def manifest_entries(output: Path, run: str | None = None) -> list[tuple[str, dict, list[dict]]]:
    """Run, header and lines of every manifest entry, oldest first."""
    found = []
    for path in sorted((output / "_surge" / "manifest").glob("*.jsonl")):
        header, *lines = [json.loads(x) for x in path.read_text().split("\n") if x]
        if run is None or header["run"] == run:
            found.append((header["run"], header, lines))
    return found


def committed(output: Path) -> list[tuple[str, str, int]]:
    """(partition, fingerprint, part) of everything that an encode step committed."""
    return [
        (line["partition"], line["fingerprint"], line.get("part", 0))
        for _, header, lines in manifest_entries(output)
        if "superbatch" in header
        for line in lines
    ]


def temporaries(output: Path) -> list[str]:
    """Files and folders that only a job under way needs."""
    folders = [output / "_surge" / n for n in ("tmp", "staging", "pending")]
    return [str(f) for f in folders if f.exists()]


def listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every path below a folder with its inode, size and time of change."""
    paths = [folder, *sorted(folder.rglob("*"))] if folder.exists() else []
    found = {}
    for path in paths:
        about = path.lstat()
        found[str(path.relative_to(folder))] = (about.st_ino, about.st_size, about.st_mtime_ns)
    return found


def wait_for_commits(output: Path, count: int, job: Job) -> None:
    """Returns when that many SuperBatches are committed, or the job has ended."""
    folder = output / "_surge" / "manifest"
    while job.poll(0.02) is None:
        if folder.exists() and sum(1 for _ in folder.glob("*.jsonl")) >= count:
            return


def run_here(*args: object, **options: object) -> int:
    """Runs a job in this process, without pictures, which is quicker; returns its exit status."""
    from pipelines import embed_corpus
    from surge_beam.transforms import launch

    with unittest.mock.patch.object(launch, "try_write_html"):
        return embed_corpus.main(command(*args, **options)[2:])


def quick_job(
    *args: object, check: bool = True, **options: object
) -> subprocess.CompletedProcess[str]:
    """``run_job`` in this process: quicker, for what needs no process of its own."""
    line = command(*args, **options)[2:]
    out, err = io.StringIO(), io.StringIO()
    from pipelines import embed_corpus

    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = embed_corpus.main(line)
    done = subprocess.CompletedProcess(line, status, out.getvalue(), err.getvalue())
    if check:
        assert status == 0, f"{status}\n{done.stdout}\n{done.stderr}"
    return done
