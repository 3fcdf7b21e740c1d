"""The run-time compiler of CUDA 11's wheels, which CuPy 13 opens by its bare name."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from devices import HOST

from cupylosses.testing.host import build

pytestmark = pytest.mark.skipif(not HOST, reason="needs a C++ compiler on Linux")

#: Opens the compiler as CuPy does; prints its origin, from a function that only the stand-in has.
PROGRAM = """
import sys
import cupylosses, ctypes
try:
    print(hasattr(ctypes.CDLL("libnvrtc.so.11.2"), "stand_in"))
except OSError:
    print("not found")
assert not {"cupy", "torch", "importlib.metadata"} & set(sys.modules)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages as pip installs them, including a compiler that needs its builtins by their bare name."""
    site = tmp_path / "site [packages]"
    libraries = site / "nvidia" / "cuda_nvrtc" / "lib"
    libraries.mkdir(parents=True)
    (site / "cupy").mkdir()
    builtins = libraries / "libnvrtc-builtins.so.11.8"
    for path, more in ((builtins, []), (libraries / "libnvrtc.so.11.2", [str(builtins)])):
        command = [*build.compiler(), "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-x", "c++", "-"]
        text = f'extern "C" int stand_in{"" if more else "_of_builtins"}() {{ return 1; }}'
        link = ["-x", "none", "-Wl,--no-as-needed", *more] if more else []
        subprocess.run([*command, *link, "-o", str(path)], input=text, text=True, check=True)
    monkeypatch.setenv("PYTHONPATH", str(site))
    return site


def test_the_compiler_is_found_after_the_import(site: Path, python: Callable[..., str]) -> None:
    (site / "cupy_cuda11x-13.6.0.dist-info").mkdir()
    assert python(PROGRAM) == "True"


def test_nothing_is_loaded_for_another_cupy(site: Path, python: Callable[..., str]) -> None:
    (site / "cupy_cuda12x-14.2.0.dist-info").mkdir()
    assert python(PROGRAM) in ("not found", "False")


def test_a_broken_compiler_does_not_break_the_import(site: Path, python: Callable[..., str]) -> None:
    (site / "cupy_cuda11x-13.6.0.dist-info").mkdir()
    for path in (site / "nvidia" / "cuda_nvrtc" / "lib").iterdir():
        path.write_bytes(b"\x7fELF")
    assert python(PROGRAM) in ("not found", "False")
