"""Losses and their gradients in fused CUDA kernels, for PyTorch and CuPy, with no compiler on the machine.

Importing this touches no CUDA and imports neither torch nor CuPy.
"""

from cupylosses import functional
from cupylosses.compiler import KernelError
from cupylosses.gradients import value_and_grad
from cupylosses.options import set_one_pass

__version__ = "0.1.0"
__all__ = ["KernelError", "functional", "set_one_pass", "value_and_grad"]
