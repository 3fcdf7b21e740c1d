"""Where kernels run in these tests: on a GPU, or, without one, on the host (``cupylosses.testing.host``)."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from cupylosses.testing import host

#: A GPU to run on; CUPYLOSSES_HOST=1 looks away from it.
GPU = torch.cuda.is_available() and os.environ.get("CUPYLOSSES_HOST", "0") != "1"

#: Whether the host can run kernels.
HOST = sys.platform == "linux" and host.find_compiler() is not None

#: The device of tensors that go through kernels. On the CPU they do within ``host.execution()`` only, in which every
#: test that is marked ``kernels`` runs.
KERNELS = "cuda" if GPU else "cpu"

#: A kernel that keeps its stream busy for some 30 ms.
WAIT = 'extern "C" __global__ void wait() { long long t = clock64(); while (clock64() - t < 50000000) {} }'


def on_gpu(*values: Any) -> list[Any]:
    """Values of a parameter that would take the host too long."""
    return [pytest.param(x, marks=pytest.mark.gpu) for x in values]


def allocated() -> int:
    """The bytes of CUDA tensors, once autograd's own thread has let go of what it computed last.

    It wakes the caller of ``backward`` first, so a gradient that nobody holds may live on for a moment, but not until
    the thread has computed another one.
    """
    x = torch.ones((), device="cuda", requires_grad=True)
    torch.autograd.grad(x.sin(), x)
    return torch.cuda.memory_allocated()
