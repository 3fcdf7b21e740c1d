"""Losses and their gradients in fused CUDA kernels, for PyTorch and CuPy, with no compiler on the machine.

Importing the package touches no GPU and imports neither torch nor CuPy. If CuPy for CUDA 11 is installed, it preloads
the run-time compiler from CUDA 11's wheel, where CuPy would not find it.
"""

from cupylosses import functional
from cupylosses.custom import define_loss, define_statistics
from cupylosses.definition.base import Flag, Kink, Operand, Parameter
from cupylosses.definition.expressions import ExpressionError
from cupylosses.interop import load_cuda11_compiler
from cupylosses.jit.compiler import KernelError
from cupylosses.options import set_one_pass
from cupylosses.patch import patch_torch, unpatch_torch
from cupylosses.value_and_grad import value_and_grad
from cupylosses.warmup import warmup

load_cuda11_compiler()

__version__ = "0.1.0"
__all__ = [
    "ExpressionError",
    "Flag",
    "KernelError",
    "Kink",
    "Operand",
    "Parameter",
    "define_loss",
    "define_statistics",
    "functional",
    "patch_torch",
    "set_one_pass",
    "unpatch_torch",
    "value_and_grad",
    "warmup",
]
