"""Versions agree across setup.py, requirements/ and the worker image."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "docker" / "Dockerfile.gpu").read_text(encoding="utf-8")


def setup_arguments() -> dict[str, Any]:
    """The literal arguments of setup(), read without running the file."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    call = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "setup"
    )
    wanted = ("name", "version", "python_requires", "install_requires", "extras_require")
    return {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg in wanted}


def pins(name: str) -> dict[str, str]:
    """Package to exact version, of one file in requirements/."""
    found = {}
    for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", f"{name}: {line} is no exact pin"
            assert "+" not in specifier.version, f"{name}: {line} names a local build"
            found[canonicalize_name(requirement.name)] = specifier.version
    return found


def argument(name: str) -> str:
    match = re.search(rf"^ARG {name}=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert match, f"the Dockerfile gives {name} no default"
    return match[1]


def requirements() -> list[Requirement]:
    setup = setup_arguments()
    groups = [setup["install_requires"], *setup["extras_require"].values()]
    return [Requirement(line) for group in groups for line in group]


SETUP = setup_arguments()
LOCK = pins("lock.txt")


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_setup_states_ranges_that_the_pins_meet(requirement: Requirement) -> None:
    assert not any(s.operator in ("==", "===") for s in requirement.specifier), "a pin"
    pinned = LOCK.get(canonicalize_name(requirement.name))
    if pinned:
        assert requirement.specifier.contains(pinned, prereleases=True)
    else:
        assert requirement.name in ("vllm", "gcsfs"), "not in the development environment"


def test_no_extra_names_triton() -> None:
    assert "triton" not in {r.name for r in requirements()}
    assert "triton" not in LOCK
    assert "triton" not in pins("worker.txt")


def test_beam_is_2_76_or_newer() -> None:
    (beam,) = [r for r in requirements() if r.name == "apache-beam"]
    assert not beam.specifier.contains("2.75.0")
    assert beam.specifier.contains("2.76.0")


@pytest.mark.parametrize("name", ["dev.txt", "worker.txt"])
def test_the_lock_holds_the_same_versions(name: str) -> None:
    different = {k: (v, LOCK.get(k)) for k, v in pins(name).items() if LOCK.get(k) != v}
    assert not different


def test_dev_names_all_that_setup_names() -> None:
    named = {canonicalize_name(r.name) for r in requirements()} - {"vllm", "gcsfs"}
    assert named <= set(pins("dev.txt"))


def test_the_lock_is_installed() -> None:
    """What the tests run against is what the lock says."""
    wrong = {}
    for name, pinned in {**LOCK, **pins("models.txt")}.items():
        try:
            installed = distribution(name).version.split("+")[0]
        except PackageNotFoundError:
            installed = "absent"
        if installed != pinned:
            wrong[name] = f"{installed}, not {pinned}"
    assert not wrong, "run `make venv`"


def test_the_image_has_the_submitters_versions() -> None:
    assert argument("BEAM_VERSION") == LOCK["apache-beam"]
    python = argument("PYTHON_VERSION")
    assert SpecifierSet(SETUP["python_requires"]).contains(f"{python}.0")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python != here:
        pytest.skip(
            f"Python {here}: submitting needs an image of --build-arg PYTHON_VERSION={here}"
        )


def test_the_image_takes_beams_boot_program_from_the_matching_sdk() -> None:
    assert "FROM apache/beam_python${PYTHON_VERSION}_sdk:${BEAM_VERSION} AS beam" in DOCKERFILE
    assert "COPY --from=beam /opt/apache/beam /opt/apache/beam" in DOCKERFILE
    assert 'ENTRYPOINT ["/opt/apache/beam/boot"]' in DOCKERFILE
    assert re.search(r"FROM \$\{CUDA_IMAGE\}", DOCKERFILE)
    assert argument("CUDA_IMAGE").startswith("nvidia/cuda:")
    assert '"apache-beam[gcp]==${BEAM_VERSION}"' in DOCKERFILE
    assert "pip check" in DOCKERFILE


def test_the_image_uses_arguments_not_versions_of_its_own() -> None:
    for version in (LOCK["apache-beam"], argument("PYTHON_VERSION")):
        lines = [x for x in DOCKERFILE.splitlines() if version in x and not x.startswith("#")]
        assert len(lines) == 1, f"{version} is written more than once"
    assert set(argument("EXTRAS").split(",")) <= set(SETUP["extras_require"])


def test_the_image_copies_what_exists() -> None:
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), f"the Dockerfile copies {source}"


def test_the_image_readme_names_the_same_versions() -> None:
    text = (ROOT / "docker" / "README.md").read_text(encoding="utf-8")
    for name in ("CUDA_IMAGE", "PYTHON_VERSION", "BEAM_VERSION", "EXTRAS"):
        assert f"| `{name}` | `{argument(name)}` |" in text


def test_what_the_package_imports_is_required() -> None:
    """Every foreign top-level import of the package is in install_requires or an extra."""
    required = {canonicalize_name(r.name) for r in requirements()}
    owners = packages_distributions()
    # Weights that a user may have installed, found by name and never required.
    required |= {canonicalize_name(name) for name in pins("models.txt")} | {"triton"}
    for path in sorted((ROOT / "surge_beam").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            else:
                continue
            for top in {module.split(".")[0] for module in modules}:
                if top in sys.stdlib_module_names or top == "surge_beam":
                    continue
                by = {canonicalize_name(name) for name in owners.get(top, [top])}
                assert by & required, f"{path.relative_to(ROOT)} imports {top}"


def test_the_package_is_installed_not_found_through_the_folder(tmp_path: Path) -> None:
    code = "import surge_beam; print(surge_beam.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip().splitlines()[-1]).is_file()


def test_a_source_distribution_builds_and_is_whole(tmp_path: Path) -> None:
    """What Beam stages for its workers from --setup_file."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(
        ROOT / "surge_beam", copy / "surge_beam", ignore=shutil.ignore_patterns("__pycache__")
    )
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "-d", str(tmp_path)],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        inside = {"/".join(name.split("/")[1:]) for name in tar.getnames()}
    files = {str(p.relative_to(copy)) for p in (copy / "surge_beam").rglob("*.py")}
    assert files | {"setup.py", "README.md", "surge_beam/py.typed"} <= inside


def test_no_index_host_or_machine_path_is_written_down() -> None:
    names = ["setup.py", "pyproject.toml", "Makefile", ".ci/run", "docker/Dockerfile.gpu"]
    paths = [ROOT / name for name in names] + sorted((ROOT / "requirements").glob("*.txt"))
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for word in ("--index-url", "--extra-index-url", "--find-links", "file://", "://"):
            assert word not in text, f"{path.relative_to(ROOT)} holds {word}"
