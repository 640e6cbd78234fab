"""What the benchmarks share: where data lies, a fresh process a measurement, figures, tables."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "out" / "benchmarks"
WARM_UP = [f"warm up with sentence {i} of about a dozen words, as usual" for i in range(64)]
_SERVE = "from benchmarks.common import serve; serve()"
_INHERITED_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM")


def shared_data() -> Path:
    """The folder of shared data sets, from $SURGE_SHARED or beside the repository."""
    folder = Path(os.environ.get("SURGE_SHARED") or ROOT.parent / "shared").resolve() / "data"
    if not folder.is_dir():
        raise SystemExit(f"no shared data at {folder}; SURGE_SHARED names the folder with data/")
    return folder


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def in_fresh_process(target: str, params: dict[str, Any], *, timeout: float = 7200) -> Any:
    """Calls ``module:function`` with ``params`` in a new interpreter; returns what it returns.

    Threads are left to the called code: variables that set their number are taken out. Arrow
    takes its memory from the system, as under our command lines.
    """
    env = {k: v for k, v in os.environ.items() if k not in _INHERITED_SETTINGS}
    path = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env.update(
        PYTHONPATH=os.pathsep.join(path),
        ARROW_DEFAULT_MEMORY_POOL="system",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        TQDM_DISABLE="1",
    )
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "asked.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps({"target": target, "params": params}), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-c", _SERVE, str(asked), str(answer)],
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode or not answer.exists():
            raise RuntimeError(f"{target} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        return json.loads(answer.read_text(encoding="utf-8"))


def serve() -> None:
    """The other end of ``in_fresh_process``."""
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    module, _, function = asked["target"].partition(":")
    result = getattr(importlib.import_module(module), function)(**asked["params"])
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    # a runner's or a library's leftover threads must not hold the measurement up
    for child in psutil.Process().children(recursive=True):
        child.terminate()
    os._exit(0)


def peak_memory() -> dict[str, int]:
    """Bytes of this process at its highest, and of its live children together.

    VmHWM rather than ru_maxrss: across exec the latter keeps the peak of the process that forked.
    """
    children = psutil.Process().children(recursive=True)
    return {
        "peak": _high_water("self"),
        "peak_children": sum(_high_water(str(child.pid)) for child in children),
    }


def _high_water(pid: str) -> int:
    try:
        status = Path("/proc", pid, "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    kib = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(kib[0]) * 1024 if kib else 0


def tokenizer(model: str) -> Any:
    """The tokenizer of a model's folder, cutting texts where the model does; it pads nothing."""
    from tokenizers import Tokenizer

    from surge_beam.gpu.encoder import model_folder
    from surge_beam.gpu.folder import read_folder

    folder = read_folder(model_folder(model))
    backend = Tokenizer.from_file(str(folder.transformer / "tokenizer.json"))
    backend.no_padding()
    if folder.max_seq_length:
        backend.enable_truncation(folder.max_seq_length)
    return backend


def median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def spread(values: Iterable[float | None]) -> str:
    """Lowest and highest, for a table."""
    known = [v for v in values if v is not None]
    return f"{show(min(known))} to {show(max(known))}" if len(known) > 1 else ""


def show(value: Any) -> str:
    """A cell: three significant digits, thousands separated."""
    if value is None:
        return ""
    if isinstance(value, (bool, str)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 0.1 else f"{value:.2f}"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, every cell by ``show``."""
    lines = [f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
    lines += [f"| {' | '.join(map(show, row))} |" for row in rows]
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    flags: set[str] = set()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() == "flags":
                flags = set(value.split())
                break
    versions = {}
    for package in ("apache-beam", "sentence-transformers", "torch", "onnxruntime", "pyarrow"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": model,
        "cores": cores(),
        "bf16": bool(flags & {"avx512_bf16", "amx_bf16"}),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **versions,
    }


def describe_machine(about: dict[str, Any]) -> str:
    versions = ", ".join(
        f"{k} {about[k]}"
        for k in ("python", "torch", "sentence-transformers", "apache-beam", "onnxruntime")
    )
    bf16 = "with" if about["bf16"] else "without"
    return (
        f"Machine: {about['cpu']}, {about['cores']} cores, {bf16} bfloat16 instructions, "
        f"load {about['load']:.1f} at the start; {versions}."
    )


def save(path: str | None, data: Any) -> None:
    """Writes raw figures as JSON, if a path is given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(data, indent=1), encoding="utf-8")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
