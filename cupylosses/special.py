"""What reference formulas need beyond the array API, for NumPy, CuPy and torch."""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import is_torch_array


def detached(x: Any) -> Any:
    """``x`` without its derivative."""
    return x.detach() if is_torch_array(x) else x


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
