"""Truth of element-wise losses in float64, by the reference formula and torch's automatic differentiation.

Operands of any dtype are exact in float64, so the truth uses exactly the numbers that a kernel reads.

Each number has a size, derived from its terms (:class:`cupylosses.testing.tolerance.Expected`). The size of a term f is
its absolute value or the sum of |x df/dx| over its operands x, whichever is larger. The latter is the change of f per
relative change of its operands, which have rounding errors. Where a formula must cancel (``log(t) - x``), no arithmetic
does better; elsewhere the size is of the order of the value, and the table stays strict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, prod
from typing import TYPE_CHECKING, Any

from cupylosses.engines.pointwise import reference as pointwise_reference
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.pointwise.reduction import Resolved, Static, resolve
from cupylosses.testing.pieces import LIMIT, part, pieces
from cupylosses.testing.tolerance import Expected
from cupylosses.testing.truth import Truth, common_shape

if TYPE_CHECKING:
    from torch import Tensor

#: Losses and dtypes without a truth at the edges: the formula overflows in float64, although the loss does not.
OVERFLOWING = {("general_robust_loss", "float64")}


def truth(
    loss: Loss,
    operands: Sequence[Tensor],
    values: Mapping[str, Any],
    reduction: str,
    grad_output: Tensor | float = 1.0,
    wanted: Sequence[bool] | None = None,
    flush: bool = False,
    limit: int = LIMIT,
    dim: tuple[int, ...] | None = None,
    normalizer: float | None = None,
) -> Truth:
    """Computes value and gradients of a loss, on the device of its operands.

    Args:
        loss: The definition.
        operands: Tensors of any dtype and layout that broadcast.
        values: All parameters and flags by name (``loss.values(case)``).
        reduction: One of ``loss.reductions``.
        grad_output: The upstream gradient: a number, or a tensor of the result's shape.
        wanted: Flags of the operands whose gradients are needed; by default all floating-point operands.
        dim: The dimensions to reduce over.
        normalizer: The divisor of a mean instead of the count.
        flush: True if subnormal float32 numbers count as zero, as they do on a GPU for float32 arithmetic.
        limit: Number of elements to process at a time.
    """
    import torch

    shape = common_shape(operands)
    if wanted is None:
        wanted = [x.is_floating_point() for x in operands]
    resolved = resolve(loss, Static(reduction, dim, None, normalizer is not None), shape)
    dims = tuple(range(len(shape))) if resolved.dims is None else resolved.dims
    kept = tuple(1 if d in dims else n for d, n in enumerate(shape))
    by_name = {o.name: x for o, x in zip(loss.operands, operands, strict=True)}
    divisor = _divisor(resolved, by_name, values, shape, dims) * (normalizer or 1.0)
    upstream = torch.as_tensor(grad_output, dtype=torch.float64, device=operands[0].device)
    # 0 / 0 is NaN, but has no gradient.
    upstream = upstream.expand(resolved.shape).reshape(kept) / torch.where(divisor == 0, inf, divisor)

    value = _Sum(operands[0], kept, shape)
    gradients = [_Sum(x, x.shape, shape) if w else None for x, w in zip(operands, wanted, strict=True)]
    for index in pieces(shape, limit):
        cut = [_widen(part(x, index), flush) for x in operands]
        terms, derivatives = _elements(loss, cut, values, wanted)
        value.add(*terms, index)
        factor = part(upstream, index)
        for gradient, derivative in zip(gradients, derivatives, strict=True):
            if gradient is not None and derivative is not None:
                gradient.add(derivative[0] * factor, derivative[1] * factor.abs(), index)
    expected = value.divided(divisor)
    if resolved.weights and wanted[[x.name for x in loss.operands].index("weight")]:
        _through_divisor(gradients, loss, by_name, expected, upstream)
    shaped = Expected(*(x.reshape(resolved.shape) for x in (expected.exact, expected.rms, expected.total)))
    return Truth(shaped, tuple(None if g is None else g.divided(torch.ones(())) for g in gradients))


def _divisor(
    resolved: Resolved,
    operands: Mapping[str, Tensor],
    values: Mapping[str, Any],
    shape: Sequence[int],
    dims: Sequence[int],
) -> Tensor:
    """Returns the divisor of each sum; reduced dimensions have size 1."""
    import torch

    like = next(iter(operands.values()))
    divisor = torch.full((1,) * len(shape), resolved.divisor, dtype=torch.float64, device=like.device)
    if resolved.counted:
        counted = (
            operands["weight"].detach().double() if resolved.weights else torch.ones((), device=like.device).double()
        )
        if resolved.masked:
            counted = torch.where(operands["mask"], counted, 0.0)
        divisor = divisor * (counted.expand(tuple(shape)).sum(tuple(dims), keepdim=True) if shape else counted)
    return divisor * values["weight"] if resolved.weighted else divisor


def _through_divisor(
    gradients: Sequence[_Sum | None], loss: Loss, operands: Mapping[str, Tensor], value: Expected, upstream: Tensor
) -> None:
    """Adds the derivative of the divisor, the sum of the weights, to the gradient of the weight."""
    import torch

    slot = [x.name for x in loss.operands].index("weight")
    weight, sums = operands["weight"], gradients[slot]
    assert sums is not None
    moved = torch.where(upstream == 0, 0.0, -value.exact * upstream)
    counted = operands["mask"] if "mask" in operands else torch.ones_like(weight, dtype=torch.bool)
    shape = common_shape(list(operands.values()))
    terms = torch.where(counted, moved, 0.0).expand(shape)
    sizes = torch.where(counted & (upstream != 0), (value.total * upstream).abs(), 0.0).expand(shape)
    sums.add(terms, sizes, tuple(slice(None) for _ in shape))


class _Sum:
    """Sums of terms, of their sizes and of their squared sizes, into a shape at most as large as that of the terms."""

    def __init__(self, like: Tensor, shape: Sequence[int], terms: Sequence[int]) -> None:
        import torch

        # If each term is a result of its own, there are no sums, and the squares are not needed.
        self.summed = prod(shape) != prod(terms)
        self.buffers = [
            torch.zeros(tuple(shape), dtype=torch.float64, device=like.device) for _ in range(3 if self.summed else 2)
        ]

    def add(self, terms: Tensor, sizes: Tensor, index: Sequence[slice]) -> None:
        """Adds the terms of a piece."""
        sums = (terms, sizes, sizes**2) if self.summed else (terms, sizes)
        for buffer, x in zip(self.buffers, sums, strict=True):
            target = part(buffer, index)
            target += x.sum_to_size(target.shape)

    def divided(self, divisor: Tensor) -> Expected:
        """Returns the sums divided by ``divisor``, as in a mean; 0 / 0 is NaN, as in torch."""
        # In place: for a huge loss, each buffer has many gigabytes.
        exact, total = (x.div_(divisor) for x in self.buffers[:2])
        return Expected(exact, self.buffers[2].sqrt_().div_(divisor.abs()) if self.summed else total, total)


def _widen(x: Tensor, flush: bool) -> Tensor:
    import torch

    wide = x.detach().double()
    # float16 numbers that are subnormal in their own dtype are normal in float32.
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(wide.abs() < tiny, 0.0, wide) if flush and x.is_floating_point() else wide


def _elements(
    loss: Loss, operands: Sequence[Tensor], values: Mapping[str, Any], wanted: Sequence[bool]
) -> tuple[tuple[Tensor, Tensor], list[tuple[Tensor, Tensor] | None]]:
    """Returns value and derivatives of each element, each with its size."""
    import torch

    with torch.enable_grad():
        leaves = [x.contiguous().requires_grad_() for x in torch.broadcast_tensors(*operands)]
        value = pointwise_reference.elements(loss, leaves, values)
        first = _derivatives(value, leaves, create_graph=True)
        derivatives = [
            _with_size(d, leaves, _derivatives(d, leaves)) if w else None for d, w in zip(first, wanted, strict=True)
        ]
    return _with_size(value, leaves, first), derivatives


def _derivatives(y: Tensor, leaves: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
    """Returns the derivative of each element of ``y`` with respect to the same element of each leaf."""
    import torch

    if not y.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    derivatives = torch.autograd.grad(y.sum(), leaves, create_graph=create_graph, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if d is None else d for x, d in zip(leaves, derivatives, strict=True)]


def _with_size(y: Tensor, leaves: Sequence[Tensor], derivatives: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    import torch

    y, size = y.detach(), y.detach().abs()
    moved = torch.stack([(x.detach() * d.detach()).abs() for x, d in zip(leaves, derivatives, strict=True)]).sum(0)
    size = torch.fmax(size, torch.where(torch.isfinite(moved), moved, 0.0))
    return y, torch.where(size.isfinite(), size, 0.0)
