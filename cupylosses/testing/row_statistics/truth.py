"""Truth of losses of row statistics: the reference formula in float64, and torch's derivatives of it.

Kernels compute in double and round once, so the size of a result is its absolute value. Only float64 results show the
errors of the arithmetic. The errors of a value are relative to 1, the scale of cosines. Those of a gradient are
relative to 1 / |x|, because its parts along x and along the other vector cancel where the two are similar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from cupylosses.engines.row_statistics.definition import StatisticsLoss
from cupylosses.engines.row_statistics.reference import formula_rows
from cupylosses.testing.tolerance import Expected, dtype_name
from cupylosses.testing.truth import Truth

if TYPE_CHECKING:
    from torch import Tensor

#: Share of the arithmetic's errors in a float64 result, and in one that is rounded to fewer bits.
IN_FLOAT64, NARROWER = 1.0, 2.0**-24


def truth(
    loss: StatisticsLoss,
    operands: Sequence[Tensor],
    values: Mapping[str, Any],
    reduction: str,
    grad_output: Any,
    wanted: Sequence[bool],
    result: str,
) -> Truth:
    """Computes the truth for operands with the features last, on their device, of a value of dtype ``result``."""
    import torch

    full = torch.broadcast_shapes(
        *[x.shape for o, x in zip(loss.operands, operands) if o.name not in loss.row_operands]
    )
    leaves = []
    for o, x in zip(loss.operands, operands, strict=True):
        shape = full[:-1] if o.name in loss.row_operands else full
        leaves.append(x.detach().double().expand(shape).clone().requires_grad_(x.is_floating_point()))
    import array_api_compat.torch as xp

    with torch.enable_grad():
        rows = formula_rows(xp, loss, leaves, values)
    floating = [x for x in leaves if x.requires_grad]
    slopes = iter(torch.autograd.grad(rows.sum(), floating, materialize_grads=True))
    by_leaf = [next(slopes) if x.requires_grad else None for x in leaves]
    rows = rows.detach()
    size = rows.abs() + (IN_FLOAT64 if result == "float64" else NARROWER)
    divisor = {"mean": prod(rows.shape), "batchmean": rows.shape[0] if rows.dim() else 1}.get(reduction, 1)
    divisor = prod(rows.shape) if reduction == "weighted_mean" else divisor
    if reduction == "none":
        value = Expected(rows, size, size)
    else:
        value = Expected(rows.sum() / divisor, size.square().sum().sqrt() / divisor, size.sum() / divisor)
    upstream = torch.as_tensor(grad_output, dtype=torch.float64, device=rows.device) / divisor
    gradients: list[Expected | None] = []
    for x, leaf, g, w in zip(operands, leaves, by_leaf, wanted, strict=True):
        if g is None or not w:
            gradients.append(None)
            continue
        factor = upstream if reduction != "none" or g.dim() == rows.dim() else upstream[..., None]
        exact = g * factor
        share = IN_FLOAT64 if dtype_name(x.dtype) == "float64" else NARROWER
        terms = exact.abs()
        if g.dim() > rows.dim():
            length = leaf.detach().norm(dim=-1, keepdim=True)
            # A gradient has two parts, hence the factor of 2.
            terms = terms + share * torch.where(length > 0, 2 * factor.abs() / length, 0.0)
        gradients.append(Expected(_back(exact, x.shape), _back(terms.square(), x.shape).sqrt(), _back(terms, x.shape)))
    return Truth(value, tuple(gradients))


def _back(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Sums over the dimensions along which an operand of this shape was broadcast."""
    return x.sum_to_size(tuple(shape))
