"""Compilation of kernels in background threads, in the order in which calls need them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn

from cupylosses import KernelError
from cupylosses.jit import compiler, processors
from cupylosses.jit.kernel import Kernel
from cupylosses.testing import host
from cupylosses.testing.host import build
from cupylosses.testing.host.launch import sources


class BackgroundCompiler:
    """Threads that compile the kernels of announced calls, first come, first served.

    Each thread calls ``advance`` after each kernel that it compiled. ``compile`` ignores errors: the call that launches
    the kernel raises them.
    """

    def __init__(
        self, compile: Callable[[Any], object], gpu: bool, advance: Callable[[], object] = lambda: None
    ) -> None:
        self._compile, self._gpu, self._advance = compile, gpu, advance
        self._pool = ThreadPoolExecutor(processors.usable())
        self._kernels: dict[Kernel, Future[None]] = {}
        self._needed: dict[Hashable, list[Future[None]]] = {}
        #: Called after each announcement.
        self.announced: Callable[[], object] = lambda: None

    def __enter__(self) -> BackgroundCompiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    @property
    def kernels(self) -> Mapping[Kernel, Future[None]]:
        """All kernels announced so far."""
        return self._kernels

    def announce(self, key: Hashable, calls: Callable[[], object]) -> None:
        """Records the kernels of ``calls`` without launching, and starts to compile them; `wait` for them by ``key``.

        Precondition: no other call runs meanwhile, because recording replaces the launcher of all calls.
        """
        with host.recording(self._gpu) as recorded, suppress(Exception):
            # Exceptions are ignored here, because the real call raises them again.
            calls()
        # On the host, one program contains a kernel and its companions.
        found = dict.fromkeys(recorded if self._gpu else (x.together[0] for x in recorded))
        for kernel in found:
            if kernel not in self._kernels:
                self._kernels[kernel] = self._pool.submit(self._run, kernel)
        self._needed[key] = [self._kernels[x] for x in found]
        self.announced()

    def wait(self, key: Hashable) -> None:
        """Waits until the kernels announced under ``key`` are compiled; returns immediately if there are none."""
        for kernel in self._needed.pop(key, ()):
            kernel.result()

    def _run(self, kernel: Kernel) -> None:
        self._compile(kernel)
        self._advance()


class Workers:
    """Processes that compile sources into CuPy's disk cache, one per requesting thread.

    NVRTC hardly compiles in parallel within one process: with NVRTC of CUDA 13 on 16 cores, 16 threads compiled 278
    kernels in 42 s, and 16 processes all 727.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command, self._local = command, threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def compile(self, text: str) -> bool:
        """Compiles a source and waits for the result; returns False if the worker process has ended."""
        process = getattr(self._local, "process", None)
        if process is None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = self._local.process = subprocess.Popen(self._command, **pipes)
            self._processes.append(process)
        try:
            pickle.dump(text, process.stdin)
            process.stdin.flush()
        except OSError:
            return False
        return bool(process.stdout.readline())


def workers() -> Workers | None:
    """Worker processes for the current GPU; None if CuPy has no disk cache through which to hand over kernels."""
    import cupy

    if os.environ.get("CUPY_CACHE_IN_MEMORY", "0") == "1":
        return None
    program = Path(__file__).with_name("nvrtc_worker.py")
    return Workers([sys.executable, str(program), cupy.cuda.Device().compute_capability])


def for_gpu(kernel: Any, workers: Workers | None = None) -> None:
    """Compiles and loads a kernel on the GPU; ignores a compile error."""
    if workers:
        workers.compile(kernel.source())
    with suppress(KernelError):
        compiler.Launcher.load(kernel)


def for_host(kernel: Any) -> None:
    """Compiles a kernel for the host; ignores a compile error."""
    with suppress(build.HostCompileError):
        build.program(sources(kernel.together))


@contextmanager
def compiling(place: str, console: Console, count: int) -> Iterator[tuple[BackgroundCompiler, Progress, TaskID]]:
    """Starts a background compiler, with progress bars for its kernels and for ``count`` checks."""
    bar = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        checking = progress.add_task("planning", total=count)
        kernels = progress.add_task("compiling kernels", total=0, visible=place != "cpu")
        with (workers() if place == "cuda" else None) or nullcontext() as processes:
            compile = partial(for_gpu, workers=processes) if place == "cuda" else for_host
            with BackgroundCompiler(compile, place == "cuda", partial(progress.advance, kernels)) as compiler:
                compiler.announced = lambda: progress.update(kernels, total=len(compiler.kernels))
                yield compiler, progress, checking
