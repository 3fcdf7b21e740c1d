"""NVRTC without CuPy and without a GPU: compiles a kernel for any architecture and reads the result.

The library compiles through CuPy, which needs a driver. Compilation itself does not, so a machine without a GPU can
prove that every kernel compiles, without warnings, without spilled registers, with 16-byte memory accesses.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
import re
import site
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from cupylosses.interop import kept_locale
from cupylosses.jit.compiler import options_for
from cupylosses.testing.counters import counters

#: NVRTC 12.9 prints this for every source for an architecture that CUDA 13 has dropped; no option suppresses it.
_ON_ARCHITECTURE = "nvrtc: warning: Architectures prior to"

_PATTERNS = ("libnvrtc.so.*", "nvrtc64_*.dll")


class CompileError(RuntimeError):
    """NVRTC rejected a source; the message is its log."""


@dataclass(frozen=True)
class Resources:
    """Resources of a kernel, as its compilation reports them."""

    #: Names of the kernels in the source; it should have one.
    entries: tuple[str, ...]
    #: Registers per thread.
    registers: int
    #: Bytes that a thread moves between registers and local memory because registers ran out.
    spills: int
    #: Bytes of local memory per thread, spilled or indexed.
    stack: int
    #: Bytes of shared memory per block.
    shared: int
    #: 16-byte loads from global or shared memory, and stores to global memory, in the text of the kernel.
    wide_loads: int
    wide_stores: int
    #: The log's lines with warnings.
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Compiled:
    """NVRTC's result for a source with one entry point."""

    ptx: str
    log: str

    @property
    def resources(self) -> Resources:
        """Resources, read from the PTX and from the report of the assembler."""
        return Resources(
            entries=tuple(re.findall(r"\.entry (\w+)", self.ptx)),
            registers=self._reported(r"Used (\d+) registers"),
            spills=self._reported(r"(\d+) bytes spill stores") + self._reported(r"(\d+) bytes spill loads"),
            stack=self._reported(r"(\d+) bytes stack frame"),
            shared=self._reported(r"(\d+) bytes smem", default=0),
            wide_loads=self._wide("ld") + len(re.findall(r"\bcp\.async\.cg\.shared\.global .*, 16;", self.ptx)),
            wide_stores=self._wide("st"),
            warnings=tuple(
                line.strip()
                for line in self.log.splitlines()
                if "warning" in line.lower() and _ON_ARCHITECTURE not in line
            ),
        )

    def _wide(self, instruction: str) -> int:
        words = r"(?:v4\.[a-z]32|v2\.[a-z]64)"
        return len(re.findall(rf"\b{instruction}\.global\.(?:[\w:]+\.)*{words}\s", self.ptx))

    def _reported(self, pattern: str, default: int | None = None) -> int:
        """Returns the largest figure among the kernel and functions that were not inlined."""
        found = [int(x) for x in re.findall(pattern, self.log)] or ([] if default is None else [default])
        if not found:
            raise ValueError(f"NVRTC reported nothing like {pattern!r}:\n{self.log}")
        return max(found)


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
        # The compiler opens this library by its name alone, and not every build searches its own directory.
        for builtins in self.path.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    @property
    def version(self) -> tuple[int, int]:
        """The compiler's CUDA version."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    @property
    def options(self) -> tuple[str, ...]:
        """The library's options for this compiler, and the one that CuPy appends."""
        return (*options_for(self.version), "-ftz=true")

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint that is equal for equal compilers: a hash of the file, since several releases share a version."""
        content = hashlib.sha256(self.path.resolve().read_bytes()).hexdigest() if self.path.is_file() else ""
        return f"{self.version} {self.path.name} {content}"

    @property
    def architectures(self) -> tuple[str, ...]:
        """The compiler's architectures, oldest first."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        found = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(found))
        return tuple(f"sm_{x}" for x in found)

    def compile(self, source: str, architecture: str) -> Compiled:
        """Compiles to machine code for ``architecture`` (``sm_90``), as CuPy would on such a GPU."""
        self.request(source, architecture)
        start = time.thread_time()
        try:
            return self._compile(source, architecture)
        finally:
            counters.count_nvrtc(time.thread_time() - start)

    def request(self, source: str, architecture: str) -> None:
        """Counts a requested kernel, whether compiled now or earlier."""
        text = repr((source, architecture, self.version))
        counters.nvrtc_kernels.add(hashlib.sha256(text.encode()).hexdigest())

    def _compile(self, source: str, architecture: str) -> Compiled:
        arguments = [*self.options, f"-arch={architecture}", "--ptxas-options=-v"]
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
        )
        try:
            encoded = (ctypes.c_char_p * len(arguments))(*(x.encode() for x in arguments))
            with kept_locale():
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
    """Returns the newest NVRTC among the wheels of this environment, a CUDA toolkit, and the system's libraries."""
    found = find_libraries()
    return found[max(found)] if found else ctypes.util.find_library("nvrtc")


def find_libraries() -> dict[int, Path]:
    """Returns the newest NVRTC of each major version of CUDA, by that version. Several wheels may coexist."""
    return {_version_in_name(x)[0]: x for x in sorted(_candidates(), key=_version_in_name)}


def _candidates() -> Iterator[Path]:
    wheels = [Path(x) / "nvidia" for x in {*site.getsitepackages(), site.getusersitepackages(), *sys.path} if x]
    named = [os.environ[x] for x in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(x)]
    toolkits = [Path(x) for x in named or ["/usr/local/cuda"]]
    for root in [*wheels, *toolkits]:
        # Wheels of CUDA 11 and 12 use nvidia/cuda_nvrtc/lib, those of 13 nvidia/cu13/lib; Windows has bin instead of
        # lib.
        for directory in ("lib", "lib64", "bin", "bin/x64", "*/lib", "*/bin", "*/bin/x86_64"):
            for pattern in _PATTERNS:
                yield from root.glob(f"{directory}/{pattern}")


def _version_in_name(path: Path) -> tuple[int, ...]:
    """Parses `libnvrtc.so.11.2` to (11, 2), and `nvrtc64_120_0.dll` to (12, 0)."""
    digits = re.search(r"nvrtc64_(\d+)(\d)_", path.name) or re.search(r"\.so\.(\d+)(?:\.(\d+))?", path.name)
    return tuple(int(x or 0) for x in digits.groups()) if digits else (0,)
