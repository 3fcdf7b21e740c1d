"""A call whose arguments have been checked, as it goes from the functions to the backends."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from cupylosses.definition.base import MASK, WEIGHT
from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise.definition import Loss, counting
from cupylosses.engines.pointwise.reduction import Reduction, Resolved


class Call(NamedTuple):
    """The form of a loss, its operands, and everything else: parameters and choices of flags in the order of the form,
    and a normalizer, which is a number or an array of whatever library.
    """

    loss: Loss
    operands: tuple[Any, ...]
    reduction: Reduction
    parameters: tuple[float, ...]
    flags: tuple[int, ...]
    normalizer: Any = None

    def wants_weight(self, wanted: tuple[bool, ...]) -> bool:
        """Whether the gradient of an array of weights is among those that are wanted."""
        return any(o is WEIGHT and w for o, w in zip(self.loss.operands, wanted, strict=True))


#: The same as a plain tuple, which is made in a fifth of the time.
Parts = tuple[Loss, tuple[Any, ...], Reduction, tuple[float, ...], tuple[int, ...], Any]


def split(call: Call, resolved: Resolved, shape: tuple[int, ...]) -> tuple[Call, Call | None, float]:
    """A mean whose divisor is found per index of the result, or has a gradient, as two calls: the sum, and the divisor
    (None if a normalizer is given), both in float64; and the factor that the divisor lacks.

    The divisor has the dimensions of the result, of size 1 where neither weight nor mask has more: what is broadcast is
    read once, and counted as often as it is used.
    """
    rank = len(shape)
    dims = tuple(range(rank)) if resolved.dims is None else resolved.dims
    total = call._replace(reduction=Reduction("sum", dims, "float64"), normalizer=None)
    if call.normalizer is not None:
        return total, None, resolved.divisor
    operands = zip(call.loss.operands, call.operands, strict=True)
    chosen = [x[(None,) * (rank - x.ndim)] for o, x in operands if (o is WEIGHT and resolved.weights) or o is MASK]
    loss = counting(resolved.weights, resolved.masked)
    sizes = pointwise_checks.broadcast(loss, [tuple(x.shape) for x in chosen])
    factor = prod([shape[d] for d in dims if sizes[d] == 1]) * (call.parameters[-1] if resolved.weighted else 1.0)
    return total, Call(loss, tuple(chosen), total.reduction, (), ()), factor
