"""What reference formulas need beyond the array API, for NumPy, CuPy and torch."""

from __future__ import annotations

import math
from typing import Any


def detached(x: Any) -> Any:
    """``x`` without its derivative, where its library has derivatives."""
    return x.detach() if hasattr(x, "detach") else x


def with_derivative_of(value: Any, surrogate: Any) -> Any:
    """``value`` with the derivatives of ``surrogate``; both must be finite."""
    return surrogate + detached(value - surrogate)


def where_nan(xp: Any, condition: Any, x: Any) -> Any:
    """NaN where the condition holds, and ``x`` elsewhere."""
    return xp.where(condition, xp.full_like(x, math.nan), x)


def softplus(xp: Any, x: Any) -> Any:
    """log(1 + e^x), with a derivative that is exact in both tails and at 0."""
    return xp.where(x > 0, x, xp.zeros_like(x)) + softplus_excess(xp, x)


def softplus_excess(xp: Any, x: Any) -> Any:
    """log(1 + e^-|x|), by which softplus exceeds max(x, 0). At 0 it has the derivative of the side below."""
    return xp.log1p(xp.exp(xp.where(x > 0, -x, x)))


#: The steps up from t to where the asymptotic series of log(t!) has all digits of float64, and its coefficients: of the
#: odd powers of 1 / t.
_STEPS = 10
_SERIES = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)


def log_factorial(xp: Any, t: Any) -> Any:
    """log(t!) = log Gamma(1 + t) for small t >= 0, in float64 and rounded once.

    Stirling's formula for t + 10 less that for 10, and the steps between. Every term goes to 0 with t, and keeps its
    digits.
    """
    t, kind = xp.astype(t, xp.float64, copy=False), t.dtype
    growth = xp.log1p(t / _STEPS)
    found = t * (math.log(_STEPS) - 1) + (t + (_STEPS + 0.5)) * growth
    for power, coefficient in zip(range(1, 15, 2), _SERIES, strict=True):
        found = found + coefficient / _STEPS**power * xp.expm1(-power * growth)
    for k in range(1, _STEPS + 1):
        found = found - xp.log1p(t / k)
    return xp.astype(found, kind, copy=False)


def stirling_remainder(xp: Any, t: Any) -> Any:
    """log(t!) - (t log t - t + log(2 pi t) / 2) for t >= 1, in float64 and rounded once: the series at t + 10, and what
    each step on the way adds.
    """
    t, kind = xp.astype(t, xp.float64, copy=False), t.dtype
    found = xp.zeros_like(t)
    for coefficient in reversed(_SERIES):
        found = found / (t + _STEPS) / (t + _STEPS) + coefficient
    found = found / (t + _STEPS)
    for k in range(_STEPS):
        found = found + ((t + (k + 0.5)) * xp.log1p(1 / (t + k)) - 1)
    return xp.astype(found, kind, copy=False)
