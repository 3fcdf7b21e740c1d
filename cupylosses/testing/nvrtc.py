"""NVRTC without CuPy and without a GPU: compiles a kernel for any architecture and reads what came out.

The library compiles through CuPy, which needs a driver. Compilation itself does not, so a machine without a GPU can
prove that every kernel compiles, without warnings, without spilled registers, with 16-byte memory accesses.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
import site
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cupylosses.compiler import OPTIONS

#: The library's options and the one that CuPy adds behind them.
CUPY_OPTIONS = (*OPTIONS, "-ftz=true")

_PATTERNS = ("libnvrtc.so.*", "nvrtc64_*.dll")


class CompileError(RuntimeError):
    """NVRTC refused a source; the message is its log."""


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made of a source with one entry point."""

    ptx: str
    log: str

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return self._from_log(r"Used (\d+) registers")

    @property
    def spills(self) -> int:
        """Bytes that a thread moves between registers and local memory because registers ran out."""
        return self._from_log(r"(\d+) bytes spill stores") + self._from_log(r"(\d+) bytes spill loads")

    @property
    def stack(self) -> int:
        """Bytes of local memory of a thread, spilled or indexed."""
        return self._from_log(r"(\d+) bytes stack frame")

    @property
    def warnings(self) -> tuple[str, ...]:
        """The lines of the log that warn."""
        return tuple(line.strip() for line in self.log.splitlines() if "warning" in line.lower())

    @property
    def wide_loads(self) -> int:
        """16-byte loads from global memory in the text of the kernel."""
        return self._wide("ld")

    @property
    def wide_stores(self) -> int:
        """16-byte stores to global memory in the text of the kernel."""
        return self._wide("st")

    def _wide(self, instruction: str) -> int:
        words = r"(?:v4\.[a-z]32|v2\.[a-z]64)"
        return len(re.findall(rf"\b{instruction}\.global\.(?:[\w:]+\.)*{words}\s", self.ptx))

    def _from_log(self, pattern: str) -> int:
        found = re.findall(pattern, self.log)
        if not found:
            raise ValueError(f"NVRTC reported nothing like {pattern!r}:\n{self.log}")
        return max(map(int, found))


class Nvrtc:
    """One copy of the compiler, by the path of its shared library; without a path, the newest that is installed."""

    def __init__(self, path: Path | str | None = None) -> None:
        if path is None:
            path = find_library()
        if path is None:
            raise FileNotFoundError(
                "NVRTC is not installed: `pip install nvidia-cuda-nvrtc`, or point CUDA_PATH at a CUDA toolkit."
            )
        self.path = Path(path)
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    @property
    def version(self) -> tuple[int, int]:
        """The CUDA version that it belongs to."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    @property
    def architectures(self) -> tuple[str, ...]:
        """What it compiles for, oldest first."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        found = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(found))
        return tuple(f"sm_{x}" for x in found)

    def compile(self, source: str, architecture: str, options: Sequence[str] = CUPY_OPTIONS) -> Compiled:
        """Compiles to machine code for ``architecture`` (``sm_90``), as CuPy would on such a GPU."""
        arguments = [*options, f"-arch={architecture}", "--ptxas-options=-v"]
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
        )
        try:
            encoded = (ctypes.c_char_p * len(arguments))(*(x.encode() for x in arguments))
            status = self._library.nvrtcCompileProgram(program, len(arguments), encoded)
            log = self._text(program, "ProgramLog")
            if status:
                raise CompileError(f"{self._error(status)}\n{log}")
            return Compiled(self._text(program, "PTX"), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.value.decode()

    def _error(self, status: int) -> str:
        return self._library.nvrtcGetErrorString(status).decode()

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"NVRTC: {self._error(status)}")


@cache
def find_library() -> Path | str | None:
    """The newest NVRTC among the wheels of this environment, a toolkit named by CUDA_PATH, and the system's."""
    found = sorted(_candidates(), key=_version_in_name)
    return found[-1] if found else ctypes.util.find_library("nvrtc")


def _candidates() -> Iterator[Path]:
    wheels = [Path(x) / "nvidia" for x in {*site.getsitepackages(), site.getusersitepackages(), *sys.path} if x]
    toolkits = [Path(os.environ[x]) for x in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(x)]
    for root in [*wheels, *toolkits]:
        # Wheels of CUDA 11 and 12 have nvidia/cuda_nvrtc/lib, of 13 nvidia/cu13/lib; Windows has bin for lib.
        for directory in ("lib", "lib64", "bin", "bin/x64", "*/lib", "*/bin", "*/bin/x86_64"):
            for pattern in _PATTERNS:
                yield from root.glob(f"{directory}/{pattern}")


def _version_in_name(path: Path) -> tuple[int, ...]:
    """`libnvrtc.so.11.2` as (11, 2); `nvrtc64_120_0.dll` as (12, 0)."""
    digits = re.search(r"nvrtc64_(\d+)(\d)_", path.name) or re.search(r"\.so\.(\d+)(?:\.(\d+))?", path.name)
    return tuple(int(x or 0) for x in digits.groups()) if digits else ()
