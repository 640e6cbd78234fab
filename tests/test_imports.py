"""Imports go one way: pipelines -> transforms -> gpu -> policy -> records."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "surge_beam"
LAYERS = ("records", "policy", "gpu", "transforms", "pipelines")
DEVICE = ("torch", "transformers", "sentence_transformers", "vllm", "triton")
HEAVY = (*DEVICE, "openai")
NO_IO = (
    *HEAVY,
    "apache_beam",
    "aiohttp",
    "asyncio",
    "boto3",
    "fcntl",
    "fsspec",
    "glob",
    "http",
    "io",
    "mmap",
    "multiprocessing",
    "os",
    "pathlib",
    "pyarrow.csv",
    "pyarrow.dataset",
    "pyarrow.fs",
    "pyarrow.json",
    "pyarrow.parquet",
    "requests",
    "shutil",
    "socket",
    "sqlite3",
    "subprocess",
    "tempfile",
    "urllib",
)


def files() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")])


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def resolved_imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """Full names of what a file imports; ``from a import b`` gives a.b."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def layer(module: str) -> int | None:
    """A layer's number from the bottom; None for other packages and for surge_beam itself."""
    parts = module.split(".")
    name = parts[0] if parts[0] == "pipelines" else parts[1] if len(parts) > 1 else ""
    if parts[0] not in ("surge_beam", "pipelines") or name not in LAYERS:
        return None
    return LAYERS.index(name)


def within(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_from_its_layer_and_below(path: Path) -> None:
    own = layer(module_name(path))
    for name in resolved_imports(ast.parse(path.read_text(encoding="utf-8")), path):
        theirs = layer(name)
        if theirs is None:
            # The public face imports every layer, so nothing below the pipelines may use it.
            through_face = name.split(".")[0] == "surge_beam" and own not in (None, 4)
            assert not through_face, f"{path} imports {name} through the package's public face"
        elif own is not None:
            assert theirs <= own, f"{LAYERS[own]} may not import {name}"


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "policy").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_policy_is_pure(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for name in resolved_imports(tree, path):
        assert not within(name, NO_IO), f"policy may not import {name}"
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {call.id for call in calls if isinstance(call, ast.Name)}
    assert not names & {"open", "print", "input", "__import__"}


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_only_gpu_imports_the_device_libraries(path: Path) -> None:
    """Elsewhere not even inside a function."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if layer(module_name(path)) != LAYERS.index("gpu"):
        for name in resolved_imports(tree, path):
            assert not within(name, DEVICE), f"only gpu may import {name}"


@pytest.mark.parametrize("module", ["surge_beam", "surge_beam.transforms", "surge_beam.records"])
def test_importing_loads_no_device_library(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_public_names_are_sorted_and_exist() -> None:
    import surge_beam

    assert list(surge_beam.__all__) == sorted(surge_beam.__all__)
    missing = [name for name in surge_beam.__all__ if not hasattr(surge_beam, name)]
    assert not missing
