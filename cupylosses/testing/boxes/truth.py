"""Truth of losses of boxes: the reference formula in float64, and torch's derivatives of it.

Kernels compute in float32, or in float64 for float64 boxes. Differences of the drawn edges are exact, so the errors are
those of quotients. A value is a sum of terms up to 1. A gradient is a sum of terms of the order of 1 / side, which
cancel; the gradient of a logarithm has the factor 1 / IoU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from cupylosses.engines.boxes.definition import Box, BoxLoss
from cupylosses.engines.row_statistics.reference import formula_rows
from cupylosses.testing.tolerance import Expected, dtype_name
from cupylosses.testing.truth import Truth

if TYPE_CHECKING:
    from torch import Tensor

#: Share of the errors of float32 arithmetic in a 16-bit gradient.
OF_16_BITS = 2.0**-8


def truth(
    loss: BoxLoss,
    operands: Sequence[Tensor],
    values: Mapping[str, Any],
    reduction: str,
    grad_output: Any,
    wanted: Sequence[bool],
    result: str,
) -> Truth:
    """Computes the truth for boxes, on their device, of a value of dtype ``result``."""
    import array_api_compat.torch as xp
    import torch

    full = torch.broadcast_shapes(*[x.shape for x in operands])
    leaves = [x.detach().double().expand(full).clone().requires_grad_() for x in operands]
    with torch.enable_grad():
        rows: Any = formula_rows(xp, loss, leaves, values)
    slopes = torch.autograd.grad(rows.sum(), leaves, materialize_grads=True)
    rows = rows.detach()
    size = rows.abs() + 1
    divisor = {"none": 1, "sum": 1, "batchmean": rows.shape[0] if rows.dim() else 1}.get(reduction, prod(rows.shape))
    if reduction == "none":
        value = Expected(rows, size, size)
    else:
        value = Expected(rows.sum() / divisor, size.square().sum().sqrt() / divisor, size.sum() / divisor)
    upstream = torch.as_tensor(grad_output, dtype=torch.float64, device=rows.device) / divisor
    factor = upstream if reduction != "none" else upstream[..., None]
    boxes = [Box.of(x.detach(), values["box_format"]) for x in leaves]
    sides = torch.stack([x for box in boxes for x in (box.width, box.height)]).abs().amin(0)
    # The value is -log(IoU), so its exponential is the factor 1 / IoU.
    steep = rows.exp() if values.get("mode") == "log" else torch.ones_like(rows)
    terms = torch.where(sides > 0, steep / sides, 0.0)[..., None]
    gradients: list[Expected | None] = []
    for x, g, w in zip(operands, slopes, wanted, strict=True):
        share = OF_16_BITS if dtype_name(x.dtype) in ("float16", "bfloat16") else 1.0
        exact = g * factor
        size = exact.abs() + share * (factor * terms).abs()
        shape = tuple(x.shape)
        parts = exact.sum_to_size(shape), size.square().sum_to_size(shape).sqrt(), size.sum_to_size(shape)
        gradients.append(Expected(*parts) if w else None)
    return Truth(value, tuple(gradients))
