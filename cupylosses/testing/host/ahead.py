"""Compiling many kernels at once, before the first of them runs.

A kernel is compiled when it is first needed, and the next one after it. Who knows what is to come makes the same calls
once within `noting`, where nothing is compiled or launched, and hands what was noted to `build_ahead`:

    with host.noting() as kernels:
        calls()
    host.build_ahead(kernels)
    with host.execution():
        calls()
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from cupylosses.backends.torch import autograd
from cupylosses.engines.pointwise.codegen import Variant
from cupylosses.testing.host import build
from cupylosses.testing.host.execution import HostDevice, execution
from cupylosses.testing.host.launch import Launcher
from cupylosses.warmup import in_threads


@contextmanager
def noting(gpu: bool = False) -> Iterator[dict[Variant, None]]:
    """Within it, losses of CPU tensors note the kernels that they would run, and run none: results hold NaN.

    This goes for any `execution` within it, too. The noted kernels are keys, in the order of their first use. With
    ``gpu`` it goes for CUDA tensors instead, and results hold anything.
    """
    noted: dict[Variant, None] = {}
    kind: Any = autograd.TorchDevice if gpu else HostDevice

    class Noting(Launcher):
        @classmethod
        def load(cls, variant: Variant, shared: int = 0) -> tuple[Callable[..., Any], Any]:
            noted[variant] = None
            return (lambda *_: None), None

    before, kind.launcher = kind.launcher, Noting
    try:
        # Without the plans of before, which launch, and afterwards without those that do not.
        with _no_plans() if gpu else execution():
            yield noted
    finally:
        kind.launcher = before


@contextmanager
def _no_plans() -> Iterator[None]:
    autograd.use_host(autograd.host)
    try:
        yield
    finally:
        autograd.use_host(autograd.host)


def build_ahead(kernels: Collection[Variant], advance: Callable[[], object] = lambda: None) -> None:
    """Compiles what the cache lacks of these kernels, on all processors; ``advance`` is called after each kernel.

    A kernel that does not compile is passed over: its launch says so.
    """
    build.runtime()  # which all of them are linked to

    def compile(variant: Variant) -> None:
        with suppress(build.HostCompileError):
            build.kernel(variant.entry, variant.source())

    in_threads(compile, kernels, advance=advance)
