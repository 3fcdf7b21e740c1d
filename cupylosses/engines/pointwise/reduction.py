"""Reductions of element-wise losses: from elements to a result, over which dimensions and with which divisor.

    none            one result per element
    sum             the sum of the elements
    mean            the sum divided by the number of elements that are not masked out
    weighted_mean   the sum divided by the sum of the weights of these elements; without a weight, `mean`
    batchmean       the sum divided by the size of the first dimension

A normalizer replaces the divisor of a mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise.definition import Loss, ModifiedLoss


class Static(NamedTuple):
    """The settings that plans of element-wise losses specialise on.

    ``normalized`` is True if a normalizer is passed. ``flags`` holds the position of the choice for each flag of the
    loss.
    """

    kind: str = "mean"
    dim: tuple[int, ...] | None = None
    out_dtype: str | None = None
    normalized: bool = False
    flags: tuple[int, ...] = ()


class Resolved(NamedTuple):
    """The reduction of a loss, possibly a modified one, for a given shape.

    ``dims`` are the dimensions that are reduced: () for none, and None for all of them, which leaves one number.
    ``shape`` is that of the result. The sum is divided by the product of up to three factors: ``divisor``; if
    ``weighted``, the weight, which is a number; and a factor that is found on the device, the sum of the weights
    (``weights``) or the number of elements (``counts``). With ``masked``, the latter two count only elements that the
    mask keeps.
    """

    dims: tuple[int, ...] | None
    shape: tuple[int, ...]
    divisor: float
    weighted: bool = False
    weights: bool = False
    counts: bool = False
    masked: bool = False

    @property
    def counted(self) -> bool:
        """True if a factor of the divisor is found on the device."""
        return self.weights or self.counts

    @property
    def found(self) -> bool:
        """True if the divisor depends on more than shapes."""
        return self.counted or self.weighted


def resolve(loss: Loss, static: Static, shape: Sequence[int]) -> Resolved:
    """Returns the reduction of a loss for the broadcast shape of its operands."""
    shape, kind = tuple(shape), static.kind
    rows = loss.mean_of_rows and static.dim is None
    dims: tuple[int, ...] | None
    if kind == "none" and not rows:
        return Resolved((), shape, 1.0)
    if kind == "none":
        kind, dims = "mean", (len(shape) - 1,) if shape else None
    else:
        dims = None if static.dim is None else pointwise_checks.reduced_dimensions(loss, static.dim, shape)
    if dims is not None and len(dims) == len(shape):
        dims = None
    kept = () if dims is None else tuple(n for d, n in enumerate(shape) if d not in dims)
    # Lists, because Dynamo passes them to `prod`, but no generators.
    size = prod(shape) if dims is None else prod([shape[d] for d in dims])
    # The divisor of a sum of rows that are means. Not a float: while torch.compile traces, sizes may be symbols, and
    # have to stay symbols.
    divisor = shape[-1] if rows and shape and kind in ("sum", "batchmean") else 1
    if static.normalized or kind == "sum":
        return Resolved(dims, kept, divisor)
    if kind == "batchmean":
        return Resolved(dims, kept, divisor * (shape[0] if shape else 1))
    masked = isinstance(loss, ModifiedLoss) and loss.mask
    weight = (
        loss.weight if isinstance(loss, ModifiedLoss) and (kind == "weighted_mean" or loss.mean_of_weights) else None
    )
    if weight == "array":
        return Resolved(dims, kept, 1, weights=True, masked=masked)
    return Resolved(dims, kept, 1 if masked else size, weight == "number", counts=masked, masked=masked)
