"""Compilation and launch of kernels through ``cupy.RawModule``. Modules are kept for the life of the process."""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cupylosses.interop import kept_locale
from cupylosses.jit.gpu import DECLARED_BYTES, SHARED_BYTES
from cupylosses.jit.kernel import Kernel

#: `-fmad=false`: contraction into FMAs could differ between kernels, but the value must have the same bits with and
#: without the gradient.
_OPTIONS = ("-std=c++17", "-fmad=false")
#: The first NVRTC that knows `-minimal`. Without it, each source begins with declarations of textures, surfaces and the
#: CUDA runtime, which no kernel uses.
_FIRST_MINIMAL = (12, 4)

_kernels: dict[Any, Any] = {}
_locks: dict[str, Any] = {}


class KernelError(RuntimeError):
    """Failure to compile or load a kernel; the message states the reason and the remedy."""


def kernel(variant: Kernel) -> Any:
    """Returns the launchable kernel of a variant, which is compiled on first use.

    Modules are never unloaded. Each is compiled under its own lock: if two threads compiled the same module, one of the
    two results would be unloaded, which is an error while a CUDA graph is captured. Different modules compile in
    parallel.
    """
    compiled = _kernels.get(variant)
    if compiled is None:
        with _lock(variant):
            compiled = _kernels.get(variant)
            if compiled is None:
                compiled = _kernels[variant] = _compile(variant)
    return compiled


def options_for(version: tuple[int, int]) -> tuple[str, ...]:
    """Returns the compiler options for NVRTC of a CUDA version."""
    return (*_OPTIONS, "-minimal") if version >= _FIRST_MINIMAL else _OPTIONS


@cache
def options() -> tuple[str, ...]:
    """Returns the compiler options for the NVRTC that CuPy loads."""
    from cupy.cuda import nvrtc

    return options_for(nvrtc.getVersion())


def _lock(variant: Kernel) -> Any:
    """Returns the lock of a source text. CuPy caches modules by their text, which contains the title."""
    return _locks.setdefault(variant.title, threading.RLock())


def _compile(variant: Kernel) -> Any:
    import cupy

    text = variant.source()
    with _explained(variant, text), kept_locale(), behind_the_first():
        module = cupy.RawModule(code=text, options=options())
        module.compile()
        return module.get_function(variant.entry)


def is_compiled(variant: Kernel) -> bool:
    """True if this process has compiled the variant or read it from CuPy's cache."""
    return variant in _kernels


first_begun, first_compiled = threading.Lock(), threading.Event()
#: Seconds that other kernels wait, after CuPy's empty program, for the first one to enter NVRTC's front end.
_HEAD_START = 0.01


@contextmanager
def behind_the_first() -> Iterator[None]:
    """Holds kernels back until the first one of the process has passed CuPy's empty program.

    CuPy compiles that program to find out the compiler's build, and caches the answer; but threads that ask before it
    is cached compile the program again. The front end of NVRTC admits one thread at a time, so the threads of a first
    call delayed each other: by 0.01 s with NVRTC 13, by 0.06 s with 11.8. For the same reason the other kernels give
    the first one, which the call waits for, a head start into the front end, where a kernel spends 0.06 s.
    """
    # The lock is never released: there is only one first kernel.
    if getattr(_background, "first", False) or first_begun.acquire(blocking=False):
        try:
            yield
        finally:
            first_compiled.set()
        return
    from cupy.cuda import compiler

    # A private attribute of CuPy: if it is missing, nobody waits.
    known = getattr(compiler, "_empty_file_preprocess_cache", True)
    if not first_compiled.is_set():
        while not known and not first_compiled.wait(0.001):
            pass
        first_compiled.wait(_HEAD_START)
    yield


@contextmanager
def _explained(variant: Kernel, text: str) -> Iterator[None]:
    """Turns errors of CuPy into a :class:`KernelError` with a remedy."""
    from cupy.cuda.compiler import CompileException

    try:
        yield
    except CompileException as error:
        raise KernelError(
            f"{variant.loss.name}: the kernel `{variant.entry}` for {_dtypes(variant)} did not compile:\n{error}\n"
            f"{_where_dumped(variant, text)}"
        ) from error
    except OSError as error:
        raise KernelError(
            f"{variant.loss.name}: CuPy could not write its kernel cache: {error}. Set CUPY_CACHE_DIR to a writable "
            "directory, or CUPY_CACHE_IN_MEMORY=1 to compile in every process."
        ) from error
    except RuntimeError as error:
        raise KernelError(f"{variant.loss.name}: {_explain(error)}") from error


@contextmanager
def without_gpu() -> Iterator[Callable[..., None]]:
    """Yields a function that compiles a variant for an architecture ("90") into CuPy's cache on disk.

    CuPy names, compiles and writes the file as it would on such a GPU. The two steps that need a GPU are patched out:
    the query of the current device, by which CuPy caches compiler options, and the loading of the result. The patch
    affects the whole process, so it is for processes without a GPU, which can do neither step.
    """
    from cupy._core import core
    from cupy.cuda import compiler, function

    class Unloaded(function.Module):
        def load(self, cubin: bytes) -> None:
            pass

    def fill(variant: Kernel, architecture: str) -> None:
        text = variant.source()
        with _explained(variant, text):
            core.compile_with_cache(text, options(), arch=architecture, prepend_cupy_headers=False)

    memoized = compiler._get_arch_for_options_for_nvrtc
    compiler._get_arch_for_options_for_nvrtc = memoized.__wrapped__
    compiler.function = SimpleNamespace(Module=Unloaded)
    try:
        yield fill
    finally:
        compiler._get_arch_for_options_for_nvrtc, compiler.function = memoized, function


def _explain(error: RuntimeError) -> str:
    """Returns the cause and the remedy of an error between CuPy and the CUDA installation."""
    text = str(error)
    if "CUDA headers" in text or "CUDA root directory" in text:
        return (
            f"CuPy needs the CUDA headers to compile any kernel, and found none ({text}). Install them with "
            '`pip install "cupy-cuda13x[ctk]"` (or cupy-cuda12x), or point CUDA_PATH at a toolkit.'
        )
    if "nvrtc" in text.lower() and "load" in text.lower():
        return (
            f"CuPy could not load the run-time compiler ({text}). Install the CuPy wheel of your CUDA version with its "
            'libraries: `pip install "cupy-cuda13x[ctk]"` or `"cupy-cuda12x[ctk]"`; for CUDA 11 '
            "`pip install cupy-cuda11x nvidia-cuda-nvrtc-cu11`."
        )
    if "no kernel image" in text.lower() or "CUDA_ERROR_NO_BINARY_FOR_GPU" in text:
        return (
            f"the compiled kernel does not fit this GPU ({text}). The run-time compiler is older than the GPU: install "
            "the CuPy wheel of a newer CUDA version, or set CUPY_COMPILE_WITH_PTX=1."
        )
    if "capturing" in text:
        return (
            f"a kernel cannot be loaded while a CUDA graph is being captured ({text}). Before the capture, call the "
            "loss and its backward once with these shapes and dtypes, or cupylosses.warmup."
        )
    return f"a kernel could not be loaded: {text}"


def _dtypes(variant: Kernel) -> str:
    names = [x.name for x in variant.loss.operands]
    return ", ".join(f"`{n}` of {d}" for n, d in zip(names, variant.storage, strict=True))


def dump(variant: Kernel, text: str | None = None) -> Path:
    """Writes the expanded source of a variant to a file and returns its path.

    The file is named after the variant, in the directory CUPYLOSSES_DUMP_DIR, or in a temporary directory of this
    process that no other user can access. An existing file or link of that name is replaced, never written through.
    """
    named = os.environ.get("CUPYLOSSES_DUMP_DIR")
    directory = Path(named) if named else _dump_directory()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{variant.title}.cu"
    handle, written = tempfile.mkstemp(suffix=".cu", dir=directory)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(variant.source() if text is None else text)
        os.replace(written, path)
    except BaseException:
        os.unlink(written)
        raise
    return path


@cache
def _dump_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="cupylosses-"))


def _where_dumped(variant: Kernel, text: str) -> str:
    """Returns a sentence that says where the source was dumped.

    A failure to write it must not hide the compiler's error.
    """
    try:
        return f"The whole source is in {dump(variant, text)}."
    except OSError as error:
        return f"The whole source could not be written ({error}); set CUPYLOSSES_DUMP_DIR to a writable directory."


class Launcher:
    """Kernel with its grid, block and constant arguments, ready to be launched with the variable arguments.

    CUDA reads each argument during the launch through a table of pointers. The variable arguments are stored in a
    buffer per thread, because a launch releases the GIL, or in memory of the caller. The constant arguments, ``fixed``,
    come last in the kernel's signature: integers, floats, and structs as lists of 64-bit words. ``shared`` is the size
    of the dynamic shared memory of a block in bytes.
    """

    def __init__(
        self, variant: Kernel, grid: int, block: int, fixed: Sequence[int | float | Sequence[int]], shared: int = 0
    ) -> None:
        geometry = grid, 1, 1, block, 1, 1, shared
        if getattr(_background, "active", False) and not is_compiled(variant):
            self._launch: Callable[..., None] = _Loading(self, variant, geometry)
        else:
            self._launch = self.bind(variant, self.load(variant, shared), geometry)
        #: Format of the variable arguments for :mod:`struct`; `pack` writes them into a buffer.
        self.format = variant.argument_format
        self.pack = struct.Struct("=" + self.format).pack_into
        words = [_words(x) for x in fixed]
        self._fixed = (ctypes.c_uint64 * sum(map(len, words)))(*chain.from_iterable(words))
        #: Addresses of the constant arguments.
        self.fixed = [ctypes.addressof(self._fixed) + 8 * sum(map(len, words[:i])) for i in range(len(words))]
        self._local = threading.local()

    @classmethod
    def load(cls, variant: Kernel, shared: int = 0) -> tuple[Callable[..., Any], Any]:
        """Returns the launch function, which takes the arguments of ``cuLaunchKernel``, and its first argument.

        That is the handle of the kernel on the current device, allowed ``shared`` bytes of dynamic shared memory.
        """
        from cupy_backends.cuda.api import driver

        _ensure_context()
        # CuPy loads a module on each device at the first request there.
        with _lock(variant):
            compiled = kernel(variant)
            # The limit never decreases: earlier launchers of the kernel may need what they requested.
            if shared > max(SHARED_BYTES - DECLARED_BYTES, compiled.max_dynamic_shared_size_bytes):
                compiled.max_dynamic_shared_size_bytes = shared
            return driver.launchKernel, compiled.kernel.ptr

    @classmethod
    def at_once(cls, function: Any, block: int, shared: int) -> int:
        """Returns the number of blocks of a loaded kernel that the current device runs at once."""
        from cupy.cuda import runtime
        from cupy_backends.cuda.api import driver

        processors = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, runtime.getDevice())
        return int(processors * max(1, driver.occupancyMaxActiveBlocksPerMultiprocessor(function, block, shared)))

    def bind(
        self, variant: Kernel, loaded: tuple[Callable[..., Any], Any], geometry: tuple[int, ...]
    ) -> Callable[..., None]:
        """Returns the launch of a loaded kernel; `Kernel.grid` decides how many blocks of ``geometry`` it has."""
        launch, function = loaded
        planned, _, _, block, _, _, shared = geometry
        grid = variant.grid(planned, partial(self.at_once, function, block, shared))
        return partial(launch, function, grid, *geometry[1:])

    def _enter(self) -> None:
        """Runs before the first launch of each thread; subclasses may override it."""
        _ensure_context()

    def __call__(self, stream: int, *arguments: int | float) -> None:
        """Launches on a raw stream. The device that was current at construction must be current again."""
        try:
            buffer, table = self._local.memory
        except AttributeError:
            buffer, table = self._prepare()
        self.pack(buffer, 0, *arguments)
        self.launch(stream, table)

    def launch(self, stream: int, table: int) -> None:
        """Launches with the arguments that the table of pointers at the address ``table`` refers to."""
        try:
            self._local.entered  # noqa: B018
        except AttributeError:
            self._enter()
            self._local.entered = True
        self._launch(stream, table, 0)

    def _prepare(self) -> tuple[Any, int]:
        count = len(self.format)
        buffer, (table,) = arguments(count, [(self, range(count))])
        self._local.memory = buffer, table
        return self._local.memory


_background = threading.local()


@contextmanager
def background() -> Iterator[None]:
    """Within this context, launchers of kernels that are not compiled yet compile them in threads of their own.

    The first launch waits for its thread, so the kernels of one call compile concurrently. Precondition: no CUDA graph
    is being captured.
    """
    _background.active = True
    try:
        yield
    finally:
        _background.active = False


class _Loading:
    """Launch of a kernel that is still being compiled. Its first call replaces it by the launch of the compiled one."""

    def __init__(self, launcher: Launcher, variant: Kernel, geometry: tuple[int, ...]) -> None:
        self._launcher, self._variant, self._geometry = launcher, variant, geometry
        self._loaded = Future[Any]()
        # Decided here rather than in the threads, which start in any order.
        first = first_begun.acquire(blocking=False)
        arguments = launcher.load, variant, geometry[-1], self._loaded, current_device(), first
        threading.Thread(target=_load, args=arguments).start()

    def __call__(self, *arguments: int) -> None:
        launch = self._launcher._launch = self._launcher.bind(self._variant, self._loaded.result(), self._geometry)
        launch(*arguments)


def _load(
    load: Callable[..., Any], variant: Kernel, shared: int, result: Future[Any], device: int, first: bool
) -> None:
    _background.first = first
    try:
        use_device(device)
        result.set_result(load(variant, shared))
    except BaseException as error:
        result.set_exception(error)
    finally:
        if first:
            first_compiled.set()


def current_device() -> int:
    """Returns the device on which this thread loads kernels."""
    from cupy.cuda import runtime

    return int(runtime.getDevice())


def use_device(device: int) -> None:
    """Makes this thread load kernels on a device."""
    from cupy.cuda import runtime

    runtime.setDevice(device)


def arguments(count: int, launches: Sequence[tuple[Launcher, Sequence[int]]]) -> tuple[Any, list[int]]:
    """Allocates a buffer of ``count`` arguments for several launchers, and a table of pointers for each launcher.

    A launcher takes the arguments at its positions, then its constant arguments. The tables follow the arguments in the
    buffer. Returns the buffer and the address of each table.
    """
    size = count + sum([len(positions) + len(launcher.fixed) for launcher, positions in launches])
    buffer: Any = (ctypes.c_uint64 * size)()
    start, end, tables = ctypes.addressof(buffer), count, []
    for launcher, positions in launches:
        tables.append(start + 8 * end)
        table = [*[start + 8 * i for i in positions], *launcher.fixed]
        buffer[end : end + len(table)] = table
        end += len(table)
    return buffer, tables


def _words(x: int | float | Sequence[int]) -> list[int]:
    """Converts an argument to a list of unsigned 64-bit words."""
    if isinstance(x, (int, float)):
        return [struct.unpack("=Q", struct.pack("=q" if isinstance(x, int) else "=d", x))[0]]
    return [word & 0xFFFFFFFFFFFFFFFF for word in x]


_contexts = threading.local()


def _ensure_context() -> None:
    """Creates the CUDA context of a thread that has not called the runtime API; the driver API creates none."""
    from cupy.cuda import runtime

    known = _contexts.__dict__.setdefault("devices", set())
    device = runtime.getDevice()
    if device not in known:
        runtime.memGetInfo()
        known.add(device)
