"""NumPy arrays, and CPU arrays of other libraries taken over by NumPy: the reference formulas."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from cupylosses import checks, reference
from cupylosses.definition import Loss


def evaluate(
    loss: Loss, operands: Sequence[Any], reduction: str, parameters: Sequence[float], flags: Sequence[bool]
) -> Any:
    """The loss of NumPy arrays."""
    names = [x.dtype.name for x in operands]
    checks.dtypes(loss, names)
    shapes = [x.shape for x in operands]
    shape = checks.broadcast(loss, shapes)
    warning = checks.broadcast_warning(loss, shapes)
    if warning:
        warnings.warn(warning, UserWarning, stacklevel=4)
    batch = shape[0] if shape else 1
    values = loss.bind(parameters, flags)
    return reference.evaluate(loss, operands, reduction, values, checks.promote(names), batch)
