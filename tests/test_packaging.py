"""Contents of the wheel, and a program that runs from it; all other tests run in the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cupylosses.definition.kernel_sources import PRIMITIVES, kernel_directory

ROOT = Path(__file__).resolve().parents[1]
FILES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "cupylosses", "kernels")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources, so that no earlier build directory can add files."""
    source = tmp_path_factory.mktemp("source")
    for name in FILES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def test_wheel_has_every_module_kernel_and_type_once(wheel: Path) -> None:
    names = [x for x in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in x]
    modules = {str(x.relative_to(ROOT)) for x in (ROOT / "cupylosses").rglob("*.py")}
    kernels = {f"cupylosses/{x.relative_to(ROOT)}" for x in (ROOT / "kernels").rglob("*.cuh")}
    host = {str(x.relative_to(ROOT)) for x in (ROOT / "cupylosses").rglob("*.[ch]pp")}
    typed = {"cupylosses/py.typed", "cupylosses/functional.pyi", "cupylosses/nn.pyi"}
    assert sorted(names) == sorted(modules | kernels | host | typed)


def test_wheel_runs_by_itself(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = """
import sys
import numpy
import cupylosses.functional as F
from cupylosses.engines.pointwise import codegen
from cupylosses.jit import sources
value = F.mse_loss(numpy.array([3.0]), numpy.array([1.0]))
print(value, sources.kernel_directory(), len(sources.expand(codegen.SUMMING)))
assert "torch" not in sys.modules and "cupy" not in sys.modules
"""
    variables = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    value, directory, length = done.stdout.split()
    assert float(value) == 4.0
    assert Path(directory) == tmp_path / "cupylosses" / "kernels"
    assert int(length) > 10_000


def test_checkout_finds_its_own_kernels() -> None:
    assert (kernel_directory() / "pointwise" / "pointwise.cuh").is_file()


def test_constraints_pin_what_setup_cfg_allows() -> None:
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    allowed = {}
    for line in re.findall(r"(?m)^    ([a-z][\w.-]*(?:\[\w+\])?(?:[<>=].*)?)$", text):
        requirement = Requirement(line)
        allowed[requirement.name] = requirement.specifier
    assert {"numpy", "torch", "cupy-cuda11x", "cupy-cuda13x", "pytest", "ruff"} <= set(allowed)
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            version = next(iter(pin.specifier)).version
            assert pin.name in allowed, pin.name
            assert allowed[pin.name].contains(version), line


def test_linters_have_one_version() -> None:
    pins = dict(re.findall(r"(?m)^([\w-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8")))
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    for name, repository in (("ruff", "ruff-pre-commit"), ("clang-format", "mirrors-clang-format")):
        assert re.search(rf"{repository}\n    rev: v(\S+)", hooks)[1] == pins[name]


def test_pre_commit_watches_what_files_are_generated_from() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    watched = re.search(r"- id: generated\n(?:.*\n)*?        files: (.*)\n", hooks)[1]
    sources = [
        *(f"kernels/{name}" for name in PRIMITIVES),
        *("cupylosses/definition/expressions.py", "cupylosses/definition/docstring.py"),
        "cupylosses/definition/example_results.py",
        *("cupylosses/testing/mutants.py", "cupylosses/testing/transforms.py", "docs/transforms.csv"),
        *("cupylosses/functional.pyi", "cupylosses/nn.pyi", "README.md", "docs/mutations.md"),
        *(str(x.relative_to(ROOT)) for x in (ROOT / "tests" / "golden").glob("*.cu")),
    ]
    assert [x for x in sources if not re.search(watched, x)] == []
