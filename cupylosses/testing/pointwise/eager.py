"""torch's ways to compute an element-wise loss: its own function, or the reference formula one operation at a time."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from array_api_compat import array_namespace

from cupylosses.engines.pointwise.definition import Loss, ModifiedLoss
from cupylosses.engines.pointwise.reduction import Static, resolve
from cupylosses.testing.eager import Call, promoted

if TYPE_CHECKING:
    from torch import Tensor


def twin(loss: Loss, options: Mapping[str, Any], reduction: str) -> Call | None:
    """Returns the function of ``torch.nn.functional`` with these options; None if there is none or it lacks an option.

    It takes the operands in their order. For a modified loss, torch's function must have all of its operands.
    """
    from torch.nn import functional

    if loss.torch is None:
        return None
    function = getattr(functional, loss.torch)
    default, known = loss.values(), inspect.signature(function).parameters
    numbers = loss.numbers if isinstance(loss, ModifiedLoss) else frozenset()
    needed = {name: value for name, value in options.items() if name in numbers or value != default[name]}
    names = [x.name for x in loss.operands]
    if not {*needed, *names} <= known.keys() or reduction not in ("none", "mean", "sum", "batchmean"):
        return None
    if reduction == "batchmean" and loss.torch != "kl_div":
        return None
    if any(isinstance(x, str) for x in needed.values()):
        return None
    return lambda *operands: function(**dict(zip(names, operands, strict=True)), reduction=reduction, **needed)


def formula(loss: Loss, values: Mapping[str, Any], reduction: str) -> Call | None:
    """Returns the naive reference formula, in the dtype to which torch promotes the operands.

    None if there is no formula, or if torch lacks this kind of mean.
    """
    reference = loss.reference
    if reference is None or resolve(loss, Static(reduction), (1,)).found:
        return None

    def call(*operands: Tensor) -> Tensor:
        result = promoted([x for x in operands if x.dtype.is_floating_point])
        elements = reference(array_namespace(*operands), *(x.to(result) for x in operands), **values)
        resolved = resolve(loss, Static(reduction), elements.shape)
        if resolved.dims == ():
            return elements
        if reduction in ("mean", "none"):
            return elements.mean(resolved.dims)
        return elements.sum() / resolved.divisor

    return call
