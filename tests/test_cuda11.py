"""Libraries of CUDA 11's wheels, which CuPy 13 opens by their bare names."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from devices import HOST

from cupylosses import interop
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


# ----------------------------------------------------------------------------------------------------------------------
# cuBLAS


def test_cublas_of_a_wheel_is_opened_before_the_second_attempt(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "cupy_cuda11x-13.6.0.dist-info").mkdir()
    for name in ("libcublas.so.11", "libcublasLt.so.11"):
        path = site / "nvidia" / "cublas" / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.syspath_prepend(str(site))
    opened: list[str] = []
    monkeypatch.setattr(interop.ctypes, "CDLL", lambda path: opened.append(Path(path).name))

    def imported(name: str) -> str:
        if "libcublas.so.11" not in opened:
            raise ImportError("libcublas.so.11: cannot open shared object file")
        return name

    monkeypatch.setattr(interop.importlib, "import_module", imported)
    assert interop.cublas() == "cupy_backends.cuda.libs.cublas"
    assert opened == ["libcublasLt.so.11", "libcublas.so.11"]


def test_missing_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("libcublas.so.11: cannot open shared object file")

    monkeypatch.setattr(interop.importlib, "import_module", broken)
    with pytest.raises(ImportError, match=r"linear layer.*cuBLAS.*\(libcublas\.so\.11.*nvidia-cublas-cu11.*torch"):
        interop.cublas()
