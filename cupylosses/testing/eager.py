"""Facts about torch's own arithmetic that the losses of all engines share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, dtype

#: Function of the operands that computes a loss by torch's own operations.
Call = Callable[..., "Tensor"]


def promoted(operands: Sequence[Tensor]) -> dtype:
    """Returns the dtype of torch's arithmetic on all operands, found by adding stand-ins.

    A stand-in has no dimensions if its operand has none: torch's promotion gives such operands less weight.
    """
    import torch

    return reduce(lambda a, b: a + b, [torch.zeros((0,) if x.dim() else (), dtype=x.dtype) for x in operands]).dtype
