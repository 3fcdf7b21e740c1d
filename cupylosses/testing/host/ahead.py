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

import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from cupylosses.codegen import Variant, source
from cupylosses.testing.host import build
from cupylosses.testing.host.execution import HostDevice, execution
from cupylosses.testing.host.launch import Launcher


@contextmanager
def noting() -> Iterator[dict[Variant, None]]:
    """Within it, losses of CPU tensors note the kernels that they would run, and run none: results hold NaN.

    This goes for any `execution` within it, too. The noted kernels are keys, in the order of their first use.
    """
    noted: dict[Variant, None] = {}

    class Noting(Launcher):
        def _load(self, variant: Variant) -> tuple[Callable[..., Any], Any]:
            noted[variant] = None
            return (lambda *_: None), None

    before, HostDevice.launcher = HostDevice.launcher, Noting
    try:
        with execution():
            yield noted
    finally:
        HostDevice.launcher = before


def build_ahead(kernels: Collection[Variant], advance: Callable[[], object] = lambda: None) -> None:
    """Compiles what the cache lacks of these kernels, on all processors; ``advance`` is called after each kernel.

    A kernel that does not compile is passed over: its launch says so.
    """
    build.runtime()  # which all of them are linked to
    # The compiler is a process of its own, so that threads are enough to keep all processors busy.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pending = [pool.submit(build.kernel, x.entry, source(x)) for x in kernels]
        try:
            for done in as_completed(pending):
                if not isinstance(done.exception(), build.HostCompileError):
                    done.result()
                advance()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
