"""Reference formulas through the array API: the path of CPU arrays, and of third derivatives of any array.

They are written for correctness, not for speed. The formula of a definition runs in the arithmetic type (float32;
float64 for float64 operands and NumPy arrays), sums run in float64, and the result is rounded once. Derivatives are
those of the array library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cupylosses import checks, interop
from cupylosses.call import Call
from cupylosses.definition.base import MASK, WEIGHT
from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.pointwise.reduction import resolve
from cupylosses.reference_math import divide, float64_scalar


def evaluate(call: Call, promoted: str) -> Any:
    """Returns the loss of a call whose operands promote to dtype ``promoted``.

    A normalizer is a number or a float64 array.
    """
    loss: Any = call.loss
    operands, parameters, static = call.arrays, call.scalars, call.static
    xp = interop.namespace(operands[0])
    shape = pointwise_checks.broadcast(loss, [tuple(x.shape) for x in operands])
    resolved = resolve(loss, static, shape)
    # NumPy's own float32 functions are off by several units in the last place.
    single = promoted != "float64" and interop.kind(operands[0]) != "numpy"
    wide = [xp.astype(x, xp.float32 if single else xp.float64, copy=False) for x in operands]
    result = elements(loss, wide, loss.bind(parameters, static.flags))
    if resolved.dims != ():
        axis = tuple(range(len(shape))) if resolved.dims is None else resolved.dims
        total = xp.sum(result, axis=axis, dtype=xp.float64) if shape else xp.astype(result, xp.float64)
        divisor = float64_scalar(xp, total, resolved.divisor)
        if resolved.weighted:
            divisor = divisor * parameters[-1]
        if call.normalizer is not None:
            divisor = divisor * call.normalizer
        elif resolved.counted:
            divisor = divisor * _counted(xp, call, wide, shape, axis, resolved.weights)
        result = divide(xp, total, divisor)
    return xp.astype(result, getattr(xp, static.out_dtype or promoted), copy=False)


def elements(loss: Loss, operands: Sequence[Any], values: Mapping[str, Any]) -> Any:
    """Returns the value per element, in the dtype of the operands; ``values`` holds parameters and flags by name."""
    if loss.reference is None:
        raise checks.no_reference(loss)
    xp = interop.namespace(operands[0])
    losses = loss.reference(xp, *operands, **values)
    shape = pointwise_checks.broadcast(loss, [tuple(x.shape) for x in operands])
    if tuple(getattr(losses, "shape", ())) != shape:
        raise checks.wrong_shape_of_reference(loss, getattr(losses, "shape", None), shape, "element")
    if interop.kind(losses) == "torch" and losses.requires_grad:
        losses = _with_nan_gradients(xp, losses, operands)
    return losses


def _counted(xp: Any, call: Call, wide: Sequence[Any], shape: Sequence[int], axis: Sequence[int], weights: bool) -> Any:
    """Returns the sum, over the reduced dimensions, of the weights or of the elements that the mask keeps."""
    modifiers = {o.name: x for o, x in zip(call.loss.operands, wide, strict=True) if o in (WEIGHT, MASK)}
    counted = modifiers["weight"] if weights else modifiers["mask"]
    if weights and "mask" in modifiers:
        counted = xp.where(modifiers["mask"] != 0, counted, xp.zeros_like(counted))
    counted = xp.astype(xp.broadcast_to(counted, tuple(shape)), xp.float64, copy=False)
    return xp.sum(counted, axis=tuple(axis)) if shape else counted


def _with_nan_gradients(xp: Any, elements: Any, operands: Sequence[Any]) -> Any:
    """Returns the same values; an element that is NaN has NaN derivatives with respect to every operand.

    The kernels follow this rule. torch does not: its ``abs`` has a derivative of 0 there, and a ``where`` ignores the
    operand that is not chosen.
    """
    bad = xp.isnan(elements)
    zero = xp.zeros_like(elements)
    squares = sum(xp.where(bad, x, zero) ** 2 for x in operands)
    return xp.where(bad, squares * xp.where(bad, elements.detach(), zero), elements)
