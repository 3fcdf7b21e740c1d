"""Truth of a call in float64, which checks compare results with; each engine computes its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from cupylosses.testing.tolerance import Expected, arithmetic, dtype_name

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Truth:
    """Value of a loss and gradient of each operand; None for gradients that do not exist or are not wanted."""

    value: Expected
    gradients: tuple[Expected | None, ...]


def common_shape(operands: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the common shape of broadcast operands."""
    # NumPy's function, because torch's imports half of torch's compiler, which takes a second.
    return numpy.broadcast_shapes(*(tuple(x.shape) for x in operands))


def runs_kernels(x: Tensor) -> bool:
    """True if a loss of this tensor runs kernels: on a GPU, or on the host within a host execution."""
    from cupylosses.testing import host

    return x.is_cuda or (x.is_cpu and host.active())


def flushes(operands: Sequence[Tensor]) -> bool:
    """True if a loss of these operands flushes subnormal float32 numbers to zero: in kernels, below float64."""
    return runs_kernels(operands[0]) and all(
        arithmetic(dtype_name(x.dtype)) == "float32" for x in operands if x.is_floating_point()
    )
