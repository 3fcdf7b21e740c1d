"""Parallel compilation of many kernels before the first of them runs.

Without it, kernels are compiled one after another, each when it is first needed. A caller that knows the coming calls
makes them once within `recording`, where nothing is compiled or launched, and passes the recorded kernels to
`build_ahead`:

    with host.recording() as kernels:
        calls()
    host.build_ahead(kernels)
    with host.execution():
        calls()
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from cupylosses.backends.torch import device as torch_device
from cupylosses.backends.torch.plans import use_host
from cupylosses.jit.kernel import Kernel
from cupylosses.testing.host import build
from cupylosses.testing.host.execution import HostDevice, execution
from cupylosses.testing.host.launch import Launcher, sources
from cupylosses.warmup import in_threads


@contextmanager
def recording(gpu: bool = False) -> Iterator[dict[Kernel, None]]:
    """Within this context, losses of CPU tensors record their kernels instead of running them: results hold NaN.

    This also applies to any `execution` within the context. Yields a dict whose keys are the recorded kernels, in the
    order of their first use. With ``gpu``, CUDA tensors record instead, and results are uninitialised.
    """
    recorded: dict[Kernel, None] = {}
    kind: Any = torch_device.TorchDevice if gpu else HostDevice

    class Recorder(Launcher):
        @classmethod
        def load(cls, variant: Kernel, shared: int = 0) -> tuple[Callable[..., Any], Any]:
            recorded[variant] = None
            return (lambda *_: None), None

    before, kind.launcher = kind.launcher, Recorder
    try:
        # Drops earlier plans, which would launch, and afterwards the plans made here, which would not.
        with _no_plans() if gpu else execution():
            yield recorded
    finally:
        kind.launcher = before


@contextmanager
def _no_plans() -> Iterator[None]:
    use_host(torch_device.host)
    try:
        yield
    finally:
        use_host(torch_device.host)


def build_ahead(kernels: Collection[Kernel], advance: Callable[[], object] = lambda: None) -> None:
    """Compiles the kernels that the cache lacks, with their companions, on all processors.

    Calls ``advance`` after each program. Skips kernels that do not compile; their launch reports the error.
    """
    build.runtime()  # All kernels link to the runtime.

    def compile(together: tuple[Kernel, ...]) -> None:
        with suppress(build.HostCompileError):
            build.program(sources(together))

    in_threads(compile, list(dict.fromkeys(x.together for x in kernels)), advance=advance)
