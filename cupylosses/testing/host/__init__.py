"""Execution of the kernels on the CPU: the source that NVRTC compiles, through the whole torch path, without a GPU.

    with cupylosses.testing.host.execution(seed=1):
        F.mse_loss(prediction, target).backward()    # CPU tensors, real kernels

Threads of a block are fibers that meet at barriers. Anything that a GPU would leave undefined ends the launch with an
error: a barrier that only part of a block reaches, a shuffle without all its lanes, an unordered access to memory that
another thread also uses, undefined behaviour, and, in a build with AddressSanitizer, an out-of-bounds access.

The environment variable ``CUPYLOSSES_HOST=1`` does this for a whole program that imports ``cupylosses.testing``. Needs
a C++17 compiler (``CXX``, ``c++``, ``g++`` or ``clang++``) on Linux. This is a test tool: nothing here is fast.
"""

from cupylosses.testing.counters import counters
from cupylosses.testing.host.ahead import build_ahead, recording
from cupylosses.testing.host.build import HostCompileError, find_compiler
from cupylosses.testing.host.execution import active, execution
from cupylosses.testing.host.launch import KernelFault, obstacle, run_source

__all__ = [
    "HostCompileError",
    "KernelFault",
    "active",
    "build_ahead",
    "counters",
    "execution",
    "find_compiler",
    "obstacle",
    "recording",
    "run_source",
]
