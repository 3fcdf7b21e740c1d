"""Compiling the kernels of all rows, on all processors, before the first of them runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from rich.console import Console
from rich.progress import Progress

from comparing.rows import AnyCheck
from cupylosses import KernelError, compiler
from cupylosses.ahead import in_threads
from cupylosses.codegen import Variant
from cupylosses.testing import host


def needed(rehearsals: Iterable[tuple[AnyCheck, Callable[[AnyCheck], object]]], gpu: bool = False) -> Sequence[Variant]:
    """The kernels that checks run, each with what makes its calls."""
    with host.noting(gpu) as kernels:
        for check, rehearse in rehearsals:
            # What is wrong with a call is for its row to say.
            with suppress(Exception):
                rehearse(check)
    return list(kernels)


def compile_all(kernels: Sequence[Variant], console: Console, gpu: bool = False) -> None:
    """Compiles kernels, for the GPU or for the host, in sight; one that does not compile is for its row to report."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"compiling {len(kernels)} kernels", total=len(kernels))
        if gpu:
            in_threads(load, kernels, advance=lambda: progress.advance(task))
        else:
            host.build_ahead(kernels, lambda: progress.advance(task))


def load(variant: Variant) -> None:
    """Compiles and loads a kernel on the GPU, if it compiles."""
    with suppress(KernelError):
        compiler.Launcher.load(variant)
