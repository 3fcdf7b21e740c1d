"""How the elements of a loss become its result: the reduction, the dimensions it runs over, and what it divides by.

    none            an element per element
    sum             their sum
    mean            the sum over the number of elements that are not masked
    weighted_mean   the sum over the sum of the weights of these; without a weight, `mean`
    batchmean       the sum over the size of the first dimension

A normalizer takes the place of whatever a mean divides by.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise.definition import Loss, ModifiedLoss


class Static(NamedTuple):
    """The settings that plans of element-wise losses specialise on.

    ``normalized`` is True if a normalizer is given. ``flags`` are the positions of the choices of the loss's flags.
    """

    kind: str = "mean"
    dim: tuple[int, ...] | None = None
    out_dtype: str | None = None
    normalized: bool = False
    flags: tuple[int, ...] = ()


class Resolved(NamedTuple):
    """A reduction of a form of a loss, of a given shape.

    ``dims`` are the dimensions that are reduced: None for all of them, to a number, and () for none; ``shape`` is that
    of the result. The sum is divided by ``divisor``, times the weight if that is a number and ``weighted``, times what
    is found on the device: the sum of the weights (``weights``), or the number of elements (``counts``), that the mask
    leaves if there is one (``masked``).
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
        """Whether the divisor is found on the device."""
        return self.weights or self.counts

    @property
    def found(self) -> bool:
        """Whether the divisor depends on more than shapes."""
        return self.counted or self.weighted


def resolve(loss: Loss, how: Static, shape: Sequence[int]) -> Resolved:
    """What a reduction means for a form of a loss and the broadcast shape of its operands."""
    shape, kind = tuple(shape), how.kind
    rows = loss.mean_of_rows and how.dim is None
    dims: tuple[int, ...] | None
    if kind == "none" and not rows:
        return Resolved((), shape, 1.0)
    if kind == "none":
        kind, dims = "mean", (len(shape) - 1,) if shape else None
    else:
        dims = None if how.dim is None else pointwise_checks.reduced_dimensions(loss, how.dim, shape)
    if dims is not None and len(dims) == len(shape):
        dims = None
    kept = () if dims is None else tuple(n for d, n in enumerate(shape) if d not in dims)
    # Of lists: Dynamo hands them to `prod`, and no generator.
    size = prod(shape) if dims is None else prod([shape[d] for d in dims])
    # The sum of rows that are means. Not as floats: where torch.compile traces, sizes may be symbols, and stay so.
    divisor = shape[-1] if rows and shape and kind in ("sum", "batchmean") else 1
    if how.normalized or kind == "sum":
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
