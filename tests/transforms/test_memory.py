"""Freed memory: threads share it, and it goes back to the system when it is told to."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from surge_beam.transforms.memory import share_freed_memory

ROOT = Path(__file__).resolve().parents[2]
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")


def python(code: str, **variables: str) -> str:
    env = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, cwd=ROOT
    ).stdout


def test_arrow_takes_the_systems_allocator() -> None:
    before = pa.default_memory_pool()
    try:
        share_freed_memory()
        assert pa.default_memory_pool().backend_name == "system"
    finally:
        pa.set_memory_pool(before)


_TAKES_BLOCKS_AGAIN = """
import resource, sys, threading
import numpy as np
from surge_beam.transforms.memory import share_freed_memory

def faults(mib, count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        np.empty(mib << 20, np.uint8)[:: 4096] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

share_freed_memory()
found = []
thread = threading.Thread(target=lambda: found.extend(faults(12, count) for count in (2, 40)))
thread.start(), thread.join()
print(found[1])
"""


@glibc
def test_large_blocks_are_taken_again_rather_than_got_anew() -> None:
    pages = 40 * (12 << 20) // 4096
    assert int(python(_TAKES_BLOCKS_AGAIN)) < pages // 4


_GIVES_BACK = """
import psutil
from surge_beam.transforms.memory import give_back_freed_memory, share_freed_memory

share_freed_memory()
blocks = [bytearray(b"x" * 100_000) for _ in range(1000)]
kept = blocks[::10]
del blocks
before = psutil.Process().memory_info().rss
give_back_freed_memory()
print(before - psutil.Process().memory_info().rss)
"""


@glibc
def test_what_lies_between_living_blocks_is_given_back() -> None:
    assert int(python(_GIVES_BACK)) > 60 << 20


@pytest.mark.parametrize("command", ["embed_corpus", "generate_corpus"])
def test_the_command_lines_keep_arrow_from_pools_of_its_own(command: str) -> None:
    code = f"import pipelines.{command}, pyarrow; print(pyarrow.default_memory_pool().backend_name)"
    assert python(code, ARROW_DEFAULT_MEMORY_POOL="mimalloc").split() == ["mimalloc"]
    code = f"import os; os.environ.pop('ARROW_DEFAULT_MEMORY_POOL', 0); {code}"
    assert python(code).split() == ["system"]
