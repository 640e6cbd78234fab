from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

from surge_beam.gpu.kernels import compiled


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.load_kernels.cache_clear()
    yield tmp_path
    compiled.load_kernels.cache_clear()


def test_without_a_compiler_it_is_said_once_that_it_is_slower(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert compiled.load_kernels() is None
        assert compiled.load_kernels() is None
    assert [r.message.count("slower") for r in caplog.records] == [1]
    assert "no C++ compiler" in caplog.text


def test_a_compiler_that_fails_is_no_error(fresh, monkeypatch, caplog):
    compiler = fresh / "c++"
    compiler.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert compiled.load_kernels() is None
    assert "slower" in caplog.text
    assert list((fresh / "surge_beam" / "kernels").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_no_error(fresh, monkeypatch, caplog):
    (fresh / "surge_beam").write_text("a file where the folder should be")
    assert compiled.load_kernels() is None
    assert "slower" in caplog.text


def test_it_is_compiled_once_and_found_again(fresh, monkeypatch):
    if compiled.load_kernels() is None:
        pytest.skip("no C++ compiler here")
    (library,) = (fresh / "surge_beam" / "kernels").iterdir()
    assert library.suffix == ".so"
    compiled.load_kernels.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiled.load_kernels() is not None


def test_its_threads_are_those_of_torch():
    """A second OpenMP library would bring a second pool of threads."""
    if compiled.load_kernels() is None:
        pytest.skip("no C++ compiler here")
    code = (
        "import torch, surge_beam.gpu.kernels.compiled as c; assert c.load_kernels() is not None\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line})"
    )
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("no /proc here")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    libraries = done.stdout.split()
    assert len(libraries) == 1 and os.path.dirname(torch.__file__) in libraries[0]
