"""Reference formulas through the array API, for CPU arrays and for derivatives that no kernel computes.

Rows are computed in float64 for every dtype, and the result is rounded once. The array library differentiates them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cupylosses import checks, interop
from cupylosses.call import Call
from cupylosses.engines.row_statistics import checks as row_checks
from cupylosses.engines.row_statistics.call import arrays_by_name, constant_divisor
from cupylosses.engines.row_statistics.definition import StatisticsLoss
from cupylosses.reference_math import detached, divide, float64_scalar, weighted


def evaluate(call: Call, promoted: str) -> Any:
    """Returns the loss of a call whose operands promote to dtype ``promoted``."""
    static, xp = call.static, interop.namespace(call.arrays[0])
    values = row_values(xp, call)
    if static.reduction != "none":
        values = divide(xp, xp.sum(values), divisor(xp, call))
    return xp.astype(values, getattr(xp, static.out_dtype or promoted), copy=False)


def row_values(xp: Any, call: Call) -> Any:
    """Returns the weighted value of each row in float64: 0 for rows that the mask excludes."""
    loss: Any = call.loss
    static = call.static
    arrays = arrays_by_name(call)
    full, rows = row_checks.shapes(loss, static, [tuple(x.shape) for x in arrays.values()])
    wide = {name: xp.astype(x, xp.float64, copy=False) for name, x in arrays.items() if name != "mask"}
    axis = len(full) + static.feature_dim
    operands = []
    for x in loss.operands:
        array = wide[x.name]
        if x.name in loss.row_operands:
            operands.append(xp.broadcast_to(array, rows))
        else:
            operands.append(xp.moveaxis(xp.broadcast_to(array, full), axis, -1))
    zero = xp.zeros_like(xp.sum(operands[0], axis=-1))
    weight: Any = None
    used = zero == 0
    if static.weight:
        weight = wide["weight"] if static.weight == "array" else call.scalars[-1]
        weight = zero + weight
        used = used & (detached(weight) != 0)
    if static.masked:
        used = used & arrays["mask"]
    # Unused rows are replaced before the formula reads them. Masking its result would be too late: their NaN would
    # already have entered the gradient.
    safe = [xp.where(used if x.ndim == len(rows) else used[..., None], x, xp.ones_like(x)) for x in operands]
    parameters = call.scalars[: len(loss.parameters)] or [x.default for x in loss.parameters]
    settings = loss.bind(parameters, static.flags)
    values = formula_rows(xp, loss, safe, settings)
    if not static.weight:
        return xp.where(used, values, zero)
    # A row of weight 0 has its detached value here: the value is the derivative with respect to the weight, and nothing
    # must flow to the operands.
    plain = xp.where(used, values, detached(_formula(xp, loss, [*map(detached, operands)], settings)))
    if static.masked:
        plain = xp.where(arrays["mask"], plain, zero)
    return weighted(xp, weight, plain)


def divisor(xp: Any, call: Call) -> Any:
    """Returns the divisor of the sum over rows: a number, or an array without dimensions."""
    loss: Any = call.loss
    static, arrays = call.static, arrays_by_name(call)
    if call.normalizer is not None:
        return call.normalizer
    _, rows = row_checks.shapes(loss, static, [tuple(x.shape) for x in arrays.values()])
    if not static.counted:
        constant = float64_scalar(xp, arrays[loss.operands[0].name], constant_divisor(static, rows))
        return constant * call.scalars[-1] if static.weighs_mean else constant
    weight = call.scalars[-1] if static.weighs_mean and static.weight == "number" else 1.0
    if static.weighs_mean and static.weight == "array":
        counted = xp.broadcast_to(xp.astype(arrays["weight"], xp.float64), rows)
        if static.masked:
            counted = xp.where(arrays["mask"], counted, xp.zeros_like(counted))
    else:
        counted = xp.broadcast_to(xp.astype(arrays["mask"], xp.float64), rows)
    return xp.sum(counted) * weight


def formula_rows(xp: Any, loss: StatisticsLoss, operands: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    """Returns the value of each row by the reference formula, for operands with the features last. If the value is NaN,
    so are its derivatives with respect to all operands of the row.
    """
    values = _formula(xp, loss, operands, settings)
    bad = xp.isnan(detached(values))
    for x in operands:
        per_row = x.ndim == values.ndim
        squares = xp.where(bad if per_row else bad[..., None], x, xp.zeros_like(x)) ** 2
        total = squares if per_row else xp.sum(squares, axis=-1)
        values = xp.where(bad, total * float("nan"), values)
    return values


def _formula(xp: Any, loss: StatisticsLoss, operands: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    """Evaluates the reference formula, and checks that it returns one value per row."""
    if loss.reference is None:
        raise checks.no_reference(loss)
    values, rows = loss.reference(xp, *operands, **settings), tuple(operands[0].shape[:-1])
    if tuple(getattr(values, "shape", ())) != rows:
        raise checks.wrong_shape_of_reference(loss, getattr(values, "shape", None), rows, "row")
    return values
