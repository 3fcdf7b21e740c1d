"""What torch itself makes of a loss: its twin, or the reference formula one operation at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from array_api_compat import array_namespace

from cupylosses.definition import Loss

if TYPE_CHECKING:
    from torch import Tensor, dtype

Call = Callable[..., "Tensor"]


def twin(loss: Loss, options: Mapping[str, Any], reduction: str) -> Call | None:
    """The function of ``torch.nn.functional`` with these options; None where there is none or it lacks an option."""
    from torch.nn import functional

    if loss.torch is None:
        return None
    function = getattr(functional, loss.torch)
    default, known = loss.values(), inspect.signature(function).parameters
    needed = {name: value for name, value in options.items() if value != default[name]}
    if not needed.keys() <= known.keys():
        return None
    return lambda *operands: function(*operands, reduction=reduction, **needed)


def formula(loss: Loss, values: Mapping[str, Any], reduction: str) -> Call:
    """The naive reference formula in the dtype that torch promotes the operands to."""

    def call(*operands: Tensor) -> Tensor:
        result = promoted(operands)
        elements = loss.reference(array_namespace(*operands), *(x.to(result) for x in operands), **values)
        if reduction == "none":
            return elements
        if reduction == "mean":
            return elements.mean()
        return elements.sum() / (elements.shape[0] if reduction == "batchmean" and elements.dim() else 1)

    return call


def promoted(operands: Sequence[Tensor]) -> dtype:
    """The dtype that torch gives to arithmetic on all operands, found by letting it add stand-ins.

    A stand-in has no dimensions where the operand has none: such operands count less in torch's rule.
    """
    import torch

    return reduce(lambda a, b: a + b, [torch.zeros((0,) if x.dim() else (), dtype=x.dtype) for x in operands]).dtype
