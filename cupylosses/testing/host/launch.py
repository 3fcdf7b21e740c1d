"""Launches of kernels on the host, with the arguments that a GPU's driver would get."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from cupylosses.jit import compiler
from cupylosses.jit.kernel import Kernel
from cupylosses.testing.counters import counters
from cupylosses.testing.host import build, symbols
from cupylosses.testing.host.settings import Settings, settings


class KernelFault(RuntimeError):
    """Behaviour of a kernel that a GPU leaves undefined; the message names threads, accesses and lines."""


class _Index(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class _Launch(ctypes.Structure):
    """Mirror of ``HostLaunch`` in ``interface.hpp``."""

    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", _Index),
        ("block", _Index),
        ("cluster", ctypes.c_uint),
        ("seed", ctypes.c_ulonglong),
        ("resident", ctypes.c_uint),
        ("check_races", ctypes.c_uint),
        ("flush_subnormals", ctypes.c_uint),
        ("timeout", ctypes.c_uint),
        ("shared", ctypes.c_void_p),
        ("shared_bytes", ctypes.c_ulonglong),
        ("beyond", ctypes.c_void_p),
        ("beyond_end", ctypes.c_void_p),
    )


@cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build.runtime()))
    library.host_message.restype = ctypes.c_char_p
    return library


class HostKernel:
    """Compiled kernel, which stays loaded for the life of the process."""

    def __init__(self, entry: str, program: tuple[build.Source, ...], flush: bool, sanitize: tuple[str, ...]) -> None:
        self.entry, self._flush, self._inputs = entry, flush, (program, sanitize)
        self._library = ctypes.CDLL(str(build.program(*self._inputs)))
        self._address = ctypes.cast(getattr(self._library, f"host_entry_{entry}"), ctypes.c_void_p).value
        self._shared = self._bound("host_shared_begin")
        self._shared_bytes = self._bound("host_shared_end") - self._shared
        self._dynamic = self._bound("host_dynamic_shared") or 0
        counters.kernels += 1

    def _bound(self, name: str) -> int | None:
        function = getattr(self._library, name)
        function.restype = ctypes.c_void_p
        return function()

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: int,
        launch_settings: Settings | None = None,
        cluster: int = 1,
        shared: int = 0,
    ) -> None:
        """Runs the kernel.

        ``arguments`` is the address of a table of pointers to the arguments; ``shared`` is the size of the dynamic
        shared memory in bytes.
        """
        launch_settings = launch_settings or settings()
        limit = build.DYNAMIC_SHARED_BYTES
        if shared > limit:
            raise KernelFault(f"{self.entry}: {shared} bytes of shared memory, of {limit}")
        wanted = _Launch(
            self.entry.encode(),
            self._address,
            arguments,
            _Index(*grid),
            _Index(*block),
            cluster,
            launch_settings.seed,
            launch_settings.resident,
            launch_settings.check_races,
            self._flush,
            launch_settings.timeout,
            self._shared,
            self._shared_bytes,
            *((self._dynamic + shared, self._dynamic + limit) if self._dynamic else (0, 0)),
        )
        start = time.thread_time()
        failed = _runtime().host_launch(ctypes.byref(wanted))
        counters.launches += 1
        counters.launching += time.thread_time() - start
        if failed:
            message = _runtime().host_message().decode()
            if "{code:" in message:
                message = symbols.with_lines(message, build.program(*self._inputs, debug=True))
            raise KernelFault(message)


@cache
def load(entry: str, program: tuple[build.Source, ...], flush: bool, sanitize: tuple[str, ...]) -> HostKernel:
    """Returns a kernel of a program, which is compiled on first use."""
    return HostKernel(entry, program, flush, sanitize)


def sources(kernels: Sequence[Kernel]) -> tuple[build.Source, ...]:
    """Returns the program of kernels that are compiled together."""
    return tuple([(x.entry, x.source()) for x in kernels])


class Launcher(compiler.Launcher):
    """Launcher of the library that packs the same arguments, but launches on the host."""

    @classmethod
    def load(cls, variant: Kernel, shared: int = 0) -> tuple[Callable[..., Any], Any]:
        # The host's processor flushes float and double alike. Kernels that compute in float have no doubles that small.
        flush, sanitize = variant.compute == "float32", build.sanitizers(settings().sanitize)
        kernel = load(variant.entry, sources(variant.together), flush, sanitize)
        return partial(_launch, getattr(variant, "cluster", 1)), kernel

    @classmethod
    def at_once(cls, function: Any, block: int, shared: int) -> int:
        return settings().resident

    def _enter(self) -> None:
        pass


def _launch(cluster: int, function: HostKernel, *geometry_and_arguments: int) -> None:
    """Launches with the signature of ``cuLaunchKernel``.

    Its arguments are function, grid, block, bytes of dynamic shared memory, stream, arguments, extra.
    """
    *geometry, shared, _stream, arguments, _extra = geometry_and_arguments
    function.launch(geometry[:3], geometry[3:], arguments, cluster=cluster, shared=shared)


def run_source(
    entry: str,
    text: str,
    arguments: Sequence[int | float],
    grid: int | Sequence[int] = 1,
    block: int | Sequence[int] = 32,
    flush: bool = False,
    shared: int = 0,
    **fields: Any,
) -> None:
    """Runs any kernel: ``text`` is CUDA C++ with ``extern "C" __global__ void entry(...)``.

    ``arguments`` are 64-bit integers, including addresses, and doubles; ``shared`` is the size of the dynamic shared
    memory in bytes; ``fields`` are fields of `Settings`.
    """
    words = [ctypes.create_string_buffer(struct.pack("=d" if isinstance(x, float) else "=q", x), 8) for x in arguments]
    table = (ctypes.c_void_p * max(1, len(words)))(*(ctypes.addressof(x) for x in words))
    launch_settings = Settings(**fields)
    kernel = load(entry, ((entry, text),), flush, build.sanitizers(launch_settings.sanitize))
    kernel.launch(_three(grid), _three(block), ctypes.addressof(table), launch_settings, shared=shared)


def obstacle() -> str | None:
    """Returns why this host cannot run kernels; None if an empty kernel could be compiled and loaded."""
    if sys.platform != "linux":
        return "host execution needs Linux"
    if build.find_compiler() is None:
        return "there is no C++ compiler"
    try:
        _runtime()
        ctypes.CDLL(str(build.of_source("probe", 'extern "C" __global__ void probe() {}')))
    except (build.HostCompileError, subprocess.SubprocessError, OSError) as error:
        return f"the C++ compiler does not do: {' '.join(str(error).split())}"
    return None


def _three(x: int | Sequence[int]) -> Sequence[int]:
    return (x, 1, 1) if isinstance(x, int) else (*x, *(1,) * (3 - len(x)))
