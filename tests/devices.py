"""The device of the kernels in these tests: a GPU or, without one, the host (``cupylosses.testing.host``)."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

from cupylosses.testing import host

#: True if there is a GPU to run on; CUPYLOSSES_HOST=1 hides it.
GPU = torch.cuda.is_available() and os.environ.get("CUPYLOSSES_HOST", "0") != "1"

#: True if the host can run kernels.
HOST = sys.platform == "linux" and host.find_compiler() is not None

#: The device of tensors that go through kernels. On the CPU they do so within ``host.execution()`` only, which wraps
#: every test marked ``kernels``.
KERNELS = "cuda" if GPU else "cpu"

#: A kernel that keeps its stream busy for some 30 ms.
WAIT = 'extern "C" __global__ void wait() { long long t = clock64(); while (clock64() - t < 50000000) {} }'


def on_gpu(*values: Any) -> list[Any]:
    """Marks values of a parameter that would take too long on the host, so that they run on a GPU only."""
    return [pytest.param(x, marks=pytest.mark.gpu) for x in values]


#: GPU memory that a test marked ``large`` may take.
LARGE_BYTES = 26 << 30


@contextmanager
def room() -> Iterator[None]:
    """Waits until the GPU has room for one more large test besides those of other processes."""
    fcntl = pytest.importorskip("fcntl", reason="Windows has no file locks of this kind")

    def locked(file: TextIO) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    slots = max(1, torch.cuda.mem_get_info()[1] // LARGE_BYTES)
    with ExitStack() as stack:
        folder = Path(tempfile.gettempdir())
        files = [stack.enter_context((folder / f"cupylosses-large-{i}").open("w")) for i in range(slots)]
        while not any(locked(x) for x in files):
            time.sleep(0.1)
        yield
        torch.cuda.empty_cache()


def allocated() -> int:
    """Returns the bytes of CUDA tensors, after autograd's own thread has released its last result.

    That thread wakes the caller of ``backward`` first, so an unreferenced gradient may live on for a moment, but not
    beyond the thread's next gradient.
    """
    x = torch.ones((), device="cuda", requires_grad=True)
    torch.autograd.grad(x.sin(), x)
    return torch.cuda.memory_allocated()
