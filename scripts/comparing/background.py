"""Compiling kernels in threads while others run, in the order in which calls will need them."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn

from cupylosses import KernelError, compiler
from cupylosses.codegen import Compilable, source
from cupylosses.testing import host
from cupylosses.testing.host import build


class BackgroundCompiler:
    """Threads that compile the kernels of calls which were announced, first come, first served.

    ``advance`` is called after each kernel, by the thread that compiled it. A kernel that does not compile is for the
    call that launches it to report.
    """

    def __init__(
        self, compile: Callable[[Any], object], gpu: bool, advance: Callable[[], object] = lambda: None
    ) -> None:
        self._compile, self._gpu, self._advance = compile, gpu, advance
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._kernels: dict[Compilable, Future[None]] = {}
        self._needed: dict[Hashable, list[Future[None]]] = {}
        #: Called when kernels were announced.
        self.announced: Callable[[], object] = lambda: None

    def __enter__(self) -> BackgroundCompiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    @property
    def kernels(self) -> Mapping[Compilable, Future[None]]:
        """Every kernel that was announced so far."""
        return self._kernels

    def announce(self, key: Hashable, calls: Callable[[], object]) -> None:
        """Plans calls, launches nothing, and starts to compile their kernels; `wait` for them by ``key``.

        Only between calls that launch: planning replaces the launcher of all of them.
        """
        with host.noting(self._gpu) as found, suppress(Exception):
            # What is wrong with a call is for the call itself to say.
            calls()
        for kernel in found:
            if kernel not in self._kernels:
                self._kernels[kernel] = self._pool.submit(self._run, kernel)
        self._needed[key] = [self._kernels[x] for x in found]
        self.announced()

    def wait(self, key: Hashable) -> None:
        """Returns when the kernels that were announced by ``key`` are compiled; at once if nothing was."""
        for kernel in self._needed.pop(key, ()):
            kernel.result()

    def _run(self, kernel: Compilable) -> None:
        self._compile(kernel)
        self._advance()


def for_gpu(kernel: Any) -> None:
    """Compiles and loads a kernel on the GPU, if it compiles."""
    with suppress(KernelError):
        compiler.Launcher.load(kernel)


def for_host(kernel: Any) -> None:
    """Compiles a kernel for the host, if it compiles."""
    with suppress(build.HostCompileError):
        build.kernel(kernel.entry, source(kernel))


@contextmanager
def compiling(place: str, console: Console, count: int) -> Iterator[tuple[BackgroundCompiler, Progress, TaskID]]:
    """A compiler in the background, and a progress bar with its kernels and with ``count`` checks."""
    bar = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        checking = progress.add_task("planning", total=count)
        kernels = progress.add_task("compiling kernels", total=0, visible=place != "cpu")
        compile = for_gpu if place == "cuda" else for_host
        with BackgroundCompiler(compile, place == "cuda", partial(progress.advance, kernels)) as compiler:
            compiler.announced = lambda: progress.update(kernels, total=len(compiler.kernels))
            yield compiler, progress, checking
