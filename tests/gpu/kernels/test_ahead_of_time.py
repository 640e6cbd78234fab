"""In processes of their own, since nothing is compiled where the interpreter was chosen."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from surge_beam.gpu.kernels.ahead_of_time import Usage, variants
from tests.whole import only_whole

CAPABILITIES = (80, 90, 100, 120)


def run(*arguments, **variables):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "surge_beam.gpu.kernels.ahead_of_time", *arguments],
        env={**environment, **variables},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "only"),
    [
        (90, "bfloat16, 64"),
        (120, "bfloat16, 64"),
        *(pytest.param(capability, "", marks=only_whole) for capability in CAPABILITIES),
    ],
)
def test_kernels_compile_and_none_spills(capability, only, tmp_path):
    done = run("--capabilities", str(capability), "--only", only, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    names = {variant.name for variant in variants(capability) if only in variant.name}
    assert len(names) >= 7
    rows = dict(re.findall(r"^\| (.+?) \| (\d+, [\d.]+ KiB, \d+) \|$", done.stdout, re.MULTILINE))
    assert rows.keys() == names
    assert {cell.rpartition(", ")[2] for cell in rows.values()} == {"0"}


def test_a_kernel_that_does_not_compile_is_a_failure(tmp_path):
    """No GPU has the compute capability 0.1."""
    done = run("--capabilities", "1", "--only", "silu", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "failed:" in done.stdout


def test_the_interpreter_is_refused():
    done = run("--only", "silu", TRITON_INTERPRET="1")
    assert done.returncode == 2 and "TRITON_INTERPRET" in done.stderr


def test_what_fits():
    assert Usage(255, 99 << 10, 0).fits(120)
    assert not Usage(255, (99 << 10) + 1, 0).fits(120)
    assert Usage(255, (99 << 10) + 1, 0).fits(90)
    assert not Usage(64, 0, 8).fits(90)


def test_every_gpu_gets_the_same_kernels():
    names = [[variant.name for variant in variants(c)] for c in CAPABILITIES]
    assert all(one == names[0] for one in names)
    assert len(set(names[0])) == len(names[0])
    kernels = {variant.kernel.__name__ for variant in variants(90)}
    assert len(kernels) == 10
