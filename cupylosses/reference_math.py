"""Numerics of the reference formulas, written against the array API of NumPy, CuPy and torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from cupylosses import interop


def detached(x: Any) -> Any:
    """``x`` outside of the autograd graph, if its library has one."""
    return x.detach() if hasattr(x, "detach") else x


def of_degree_one(mass: Any, derivative: Any) -> Any:
    """``mass`` times the derivative with respect to it: a summand of Euler's formula for functions of degree one.

    The derivatives of these derivatives sum to 0 in exact arithmetic, but not in floating point. The derivative is
    therefore treated as a constant, except for numbers of exact arithmetic.
    """
    return mass * (derivative if getattr(derivative, "exact", False) else detached(derivative))


def with_derivative_of(value: Any, surrogate: Any) -> Any:
    """``value`` with the derivative of ``surrogate``; both must be finite."""
    return surrogate + detached(value - surrogate)


def follows(*arrays: Any) -> bool:
    """True if the results of a computation on these arrays may be differentiated."""
    if interop.kind(arrays[0]) != "torch":
        return False
    import torch

    from cupylosses import torch_compat

    # A tensor wrapped by a transform may have requires_grad=False.
    return torch_compat.transforms_active() or (torch.is_grad_enabled() and any(x.requires_grad for x in arrays))


def tangent_plane(xp: Any, function: Callable[..., Any], operands: Sequence[Any], moves: bool) -> Any:
    """Tangent plane of an element-wise function at its operands; the constant value if ``moves`` is False.

    Where the value is not finite, the plane is the constant 0. Components of the gradient that are not finite are 0.
    """
    value, slopes = _value_and_slopes(function, [detached(x) for x in operands], moves)
    zero = xp.zeros_like(value)
    defined = xp.isfinite(value)
    plane = xp.where(defined, value, zero)
    for x, slope in zip(operands, slopes, strict=False):
        finite = xp.where(xp.isfinite(x), x, zero)
        plane = plane + xp.where(defined & xp.isfinite(slope), slope, zero) * (finite - detached(finite))
    return plane


def _value_and_slopes(function: Callable[..., Any], operands: Sequence[Any], moves: bool) -> tuple[Any, Sequence[Any]]:
    """Value and gradient, both outside of any graph; no gradient unless ``moves``.

    Precondition: the operands are outside of any graph, too.
    """
    if not moves:
        return detached(function(*operands)), ()
    import torch

    from cupylosses import torch_compat

    if torch_compat.transforms_active():  # requires_grad_ raises under a transform
        value, pull = torch.func.vjp(function, *operands)
        return value, pull(torch.ones_like(value))
    with torch.enable_grad():
        leaves = [x.requires_grad_() for x in operands]
        value = function(*leaves)
    if not value.requires_grad:
        return value, ()
    slopes = torch.autograd.grad(value, leaves, torch.ones_like(value), allow_unused=True, materialize_grads=True)
    return value.detach(), slopes


def where_nan(xp: Any, condition: Any, x: Any) -> Any:
    """NaN where the condition holds, ``x`` elsewhere."""
    return xp.where(condition, xp.full_like(x, math.nan), x)


def softplus(xp: Any, x: Any) -> Any:
    """log(1 + e^x), with a derivative that is exact in both tails and at 0."""
    return xp.where(x > 0, x, xp.zeros_like(x)) + softplus_excess(xp, x)


def softplus_excess(xp: Any, x: Any) -> Any:
    """log(1 + e^-|x|) = softplus(x) - max(x, 0). At 0 its derivative is the left-hand one."""
    return xp.log1p(xp.exp(xp.where(x > 0, -x, x)))


#: Number of recurrence steps after which Stirling's series of log(t!) is accurate to float64, and the coefficients of
#: that series, for odd powers of 1 / t.
_STEPS = 10
_SERIES = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)


def log_factorial(xp: Any, t: Any) -> Any:
    """log(t!) = log Gamma(1 + t) for small t >= 0, in float64 and rounded once.

    The result is Stirling's formula at t + 10 minus that at 10, minus the ten recurrence steps. Every term goes to 0
    with t and stays accurate there.
    """
    t, kind = xp.astype(t, xp.float64, copy=False), t.dtype
    growth = xp.log1p(t / _STEPS)
    total = t * (math.log(_STEPS) - 1) + (t + (_STEPS + 0.5)) * growth
    for power, coefficient in zip(range(1, 15, 2), _SERIES, strict=True):
        total = total + coefficient / _STEPS**power * xp.expm1(-power * growth)
    for k in range(1, _STEPS + 1):
        total = total - xp.log1p(t / k)
    return xp.astype(total, kind, copy=False)


def stirling_remainder(xp: Any, t: Any) -> Any:
    """log(t!) - (t log t - t + log(2 pi t) / 2) for t >= 1, in float64 and rounded once.

    The result is Stirling's series at t + 10, plus the contribution of each of the ten recurrence steps.
    """
    t, kind = xp.astype(t, xp.float64, copy=False), t.dtype
    remainder = xp.zeros_like(t)
    for coefficient in reversed(_SERIES):
        remainder = remainder / (t + _STEPS) / (t + _STEPS) + coefficient
    remainder = remainder / (t + _STEPS)
    for k in range(_STEPS):
        remainder = remainder + ((t + (k + 0.5)) * xp.log1p(1 / (t + k)) - 1)
    return xp.astype(remainder, kind, copy=False)


def log_ratio(xp: Any, a: Any, b: Any, difference: Any) -> Any:
    """log(a / b) for a, b > 0 without the cancellation of log(a) - log(b); ``difference`` is a - b."""
    near, tangent, tail = _near_ratio(xp, a, b, difference)
    one = xp.ones_like(tangent)
    ordinary = ~near & (a < 1e15 * b) & (b < 1e15 * a)
    # Each branch sees ones at the elements of the other branches.
    factor = xp.where(ordinary & (b < 2.0**-100), 2.0**100 * one, one)  # the inverse of a subnormal number overflows
    quotient = (factor * xp.where(ordinary, a, one)) / (factor * xp.where(ordinary, b, one))
    far_a, far_b = (xp.where(near | ordinary, one, x) for x in (a, b))
    far = xp.where(ordinary, xp.log(quotient), xp.log(far_a) - xp.log(far_b))
    return xp.where(near, 2 * tangent * (1 + tangent * tangent * tail), far)


def relative_entropy(xp: Any, a: Any, b: Any, difference: Any) -> Any:
    """a log(a / b) - a + b for a, b > 0, accurate where a is close to b; ``difference`` is a - b."""
    near, tangent, tail = _near_ratio(xp, a, b, difference)
    one = xp.ones_like(tangent)
    far_a, far_b = xp.where(near, one, a), xp.where(near, one, b)
    far = far_a * log_ratio(xp, far_a, far_b, far_a - far_b) - far_a + far_b
    return xp.where(near, difference * tangent * (1 + tangent * (1 + tangent) * tail), far)


def log_relative_entropy(xp: Any, log_a: Any, log_b: Any) -> Any:
    """a log(a / b) - a + b from the logarithms of a and b, which may be -inf; never negative."""
    a, b = xp.exp(log_a), xp.exp(log_b)
    zero = xp.zeros_like(log_a + b)
    ratio = xp.where(a == 0, zero, log_a) - xp.where(a == 0, zero, log_b)
    near = xp.abs(ratio) < 0.5
    small = xp.where(near, ratio, zero)
    series = 1.0
    for k in range(18, 2, -1):
        series = 1 - series * small / k
    far = xp.where(a == 0, zero, a) * xp.where(near, zero, ratio) - a + b
    return xp.where(a == 0, b, xp.where(near, 0.5 * a * small * small * series, far))


def _near_ratio(xp: Any, a: Any, b: Any, difference: Any) -> tuple[Any, Any, Any]:
    """Mask of elements with a close to b; there, t = (a - b) / (a + b) and the tail of the series of artanh t."""
    near = xp.abs(difference) < 0.17 * a + 0.17 * b
    zero = xp.zeros_like(difference)
    tangent = xp.where(near, difference, zero) / xp.where(near, a + b, zero + 1)
    tail = zero
    for k in range(25, 1, -2):
        tail = tail * tangent * tangent + 1 / k
    return near, tangent, tail


def itakura_saito(xp: Any, t: Any, x: Any) -> Any:
    """t / x - log(t / x) - 1 for t, x > 0, accurate where t is close to x."""
    log = log_ratio(xp, t, x, t - x)
    size = xp.abs(log)
    zero, one = xp.zeros_like(log), xp.ones_like(log)
    small, middle = xp.where(size < 0.5, log, zero), xp.where(size < 2, log, zero)
    series = 1.0
    for k in range(16, 2, -1):
        series = 1 + series * small / k
    far_t, far_x = xp.where(size < 2, one, t), xp.where(size < 2, one, x)
    far = xp.where(size < 2, xp.exp(middle), far_t / far_x) - 1 - log
    return xp.where(size < 0.5, 0.5 * small * small * series, far)


def power(xp: Any, x: Any, exponent: float) -> Any:
    """x^exponent for x, exponent >= 0. The derivative is 0 if the exponent is 0, and at x = 0."""
    if exponent == 0:
        return xp.ones_like(x)
    positive = x > 0
    return xp.where(positive, xp.where(positive, x, xp.ones_like(x)) ** exponent, x * 0)


def weighted(xp: Any, weight: Any, x: Any) -> Any:
    """weight * x, and 0 where the weight is 0, even if x is infinite or NaN.

    The derivative with respect to a weight of 0 is x where that is finite.
    """
    unused = weight == 0
    return weight * xp.where(unused & ~xp.isfinite(x), xp.zeros_like(x), x)


def float64_scalar(xp: Any, like: Any, value: float) -> Any:
    """``value`` as a 0-d float64 array on the device of ``like``."""
    return xp.asarray(float(value), dtype=xp.float64, device=like.device if interop.kind(like) == "torch" else None)


def divide(xp: Any, total: Any, divisor: Any) -> Any:
    """``total / divisor``. 0 / 0 is NaN, with a gradient of 0: 0 * inf must not arise in the derivative."""
    if isinstance(divisor, (int, float)):
        divisor = float64_scalar(xp, total, divisor)
    empty = divisor == 0
    quotient = total / xp.where(empty, xp.ones_like(divisor), divisor)
    return xp.where(empty, detached(total) / detached(divisor), quotient)
