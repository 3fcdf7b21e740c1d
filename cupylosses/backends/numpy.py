"""NumPy arrays, and CPU arrays of other libraries taken over by NumPy: the reference formulas."""

from __future__ import annotations

from typing import Any

import numpy

from cupylosses import checks
from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise import reference as pointwise_reference
from cupylosses.engines.pointwise.call import Call
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax import reference as softmax_reference
from cupylosses.engines.softmax.call import RowCall


def evaluate(call: Call) -> Any:
    """The loss of NumPy arrays."""
    loss, operands, normalizer = call.loss, call.operands, call.normalizer
    names = [x.dtype.name for x in operands]
    pointwise_checks.dtypes(loss, names)
    warning = pointwise_checks.broadcast_warning(loss, [x.shape for x in operands])
    if warning:
        checks.warn(warning)
    if normalizer is not None and type(normalizer) is not float:
        call = call._replace(normalizer=numpy.asarray(normalizer, dtype=numpy.float64).reshape(()))
    promoted = checks.promote(names)
    if (call.reduction.out_dtype or promoted) == "bfloat16":
        raise checks.no_bfloat16(loss)
    # Empty sums and infinities have their results without NumPy's remarks.
    with numpy.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # NumPy makes arrays without dimensions of some operations, and its own numbers of most.
        return pointwise_reference.evaluate(call, promoted)[()]


def evaluate_rows(call: RowCall) -> Any:
    """A loss of rows of NumPy arrays."""
    softmax_checks.arrays(call)
    promoted = softmax_checks.promoted(call)
    if (call.out_dtype or promoted) == "bfloat16":
        raise checks.no_bfloat16(call.loss)
    with numpy.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return softmax_reference.evaluate(call, promoted)
