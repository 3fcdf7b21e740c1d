"""The reference formulas, through the array API: the path of CPU arrays, and the second derivatives of any.

Written for being right, not fast: a definition's formula runs in the arithmetic type (float32, or float64 for float64
operands), sums run in float64, and the result is rounded once. Derivatives are the array library's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from array_api_compat import array_namespace, is_torch_array

from cupylosses.definition import Loss


def evaluate(
    loss: Loss, operands: Sequence[Any], reduction: str, values: Mapping[str, Any], result: str, batch: int
) -> Any:
    """The loss of ``operands`` in dtype ``result``; ``batch`` is what `batchmean` divides by."""
    xp = array_namespace(*operands)
    compute = xp.float64 if result == "float64" else xp.float32
    operands = [xp.astype(x, compute, copy=False) for x in operands]
    elements = loss.reference(xp, *operands, **values)
    if is_torch_array(elements) and elements.requires_grad:
        elements = _with_nan_gradients(xp, elements, operands)
    if reduction != "none":
        total = xp.sum(elements, dtype=xp.float64)
        divisor = {"mean": elements.size if not is_torch_array(elements) else elements.numel(), "batchmean": batch}
        elements = total / xp.asarray(float(divisor.get(reduction, 1)), dtype=xp.float64, device=_device(total))
    return xp.astype(elements, getattr(xp, result), copy=False)


def _with_nan_gradients(xp: Any, elements: Any, operands: Sequence[Any]) -> Any:
    """The same values; where one is NaN, so are its derivatives with respect to every operand.

    The kernels have this rule. torch has none: its ``abs`` says 0, and a ``where`` forgets the operand not chosen.
    """
    bad = xp.isnan(elements)
    zero = xp.zeros_like(elements)
    squares = sum(xp.where(bad, x, zero) ** 2 for x in operands)
    return xp.where(bad, squares * xp.where(bad, elements.detach(), zero), elements)


def _device(x: Any) -> Any:
    return x.device if is_torch_array(x) else None
