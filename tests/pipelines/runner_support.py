"""A worker pool started elsewhere, and a probe that tells which process did what."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent

# Logs, in a file a process, that torch is imported and which of our steps run.
PROBE = """
import functools, importlib.machinery, os, sys

def log(text):
    with open(os.path.join(os.environ["SURGE_PROBE"], str(os.getpid())), "a") as file:
        file.write(text + "\\n")

class Probe:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            log("import torch")
        if name.rpartition(".")[2] not in ("embed_files", "plan_files"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), watch(module))
        return spec

def watch(module):
    for name, step in vars(module).items():
        if isinstance(step, type) and "process" in vars(step):
            step.process = logged(name, step.process)

def logged(name, process):
    @functools.wraps(process)
    def wrapper(*args, **kwargs):
        log(name)
        return process(*args, **kwargs)
    return wrapper

log(" ".join(sys.orig_argv))
sys.meta_path.insert(0, Probe())
"""


class Probe:
    """What the processes of a pool did; ``env`` switches it on."""

    def __init__(self, folder: Path) -> None:
        (folder / "site").mkdir(parents=True)
        (folder / "log").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(PROBE)
        self._log = folder / "log"
        self.env = {"PYTHONPATH": str(folder / "site"), "SURGE_PROBE": str(self._log)}

    def clear(self) -> None:
        for path in self._log.iterdir():
            path.unlink()

    def events(self) -> dict[int, list[str]]:
        """Process id -> what it did, its command line first."""
        return {int(p.name): p.read_text().splitlines() for p in self._log.iterdir()}


class Pool:
    """Beam's external worker pool; each environment of a job gets a process of it."""

    def __init__(self, folder: Path, probe: Probe) -> None:
        self.probe = probe
        self.port = _free_port()
        self.log = folder / "pool.log"
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *("-m", "apache_beam.runners.worker.worker_pool_main"),
                    *("--service_port", str(self.port)),
                ],
                cwd=elsewhere,
                # the pool starts its workers as plain `python`
                env={**os.environ, **probe.env, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
                stdout=log,
                stderr=log,
            )
        self.elsewhere = elsewhere

    def wait(self) -> None:
        for _ in range(600):
            assert self._process.poll() is None, self.log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("localhost", self.port)):
                return
            time.sleep(0.1)
        raise AssertionError(f"the pool does not listen: {self.log.read_text()}")

    def workers(self) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self._process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "SdkHarness" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def encode_worker(self) -> psutil.Process:
        """The process of the step with a resource hint."""
        (found,) = [w for w in self.workers() if "resource_hints" in " ".join(w.cmdline())]
        return found

    def stop(self) -> None:
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()


@contextlib.contextmanager
def worker_pool(folder: Path) -> Iterator[Pool]:
    pool = Pool(folder, Probe(folder / "probe"))
    try:
        pool.wait()
        yield pool
    finally:
        pool.stop()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])
