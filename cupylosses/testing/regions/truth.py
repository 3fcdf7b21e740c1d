"""Truth of region losses: the reference formula in float64, and torch's derivatives of it.

A value is a quotient of sums, whose errors are measured relative to 1. The gradient of a voxel is a sum over classes of
derivatives with respect to the probabilities, times p (1 - p), which is at most 1/4. In a softmax these terms cancel in
part, so errors are measured relative to four times the largest gradient of the operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cupylosses.testing.tolerance import Expected
from cupylosses.testing.truth import Truth

if TYPE_CHECKING:
    from torch import Tensor


def truth(prepare: Callable[..., Any], operands: Sequence[Tensor], grad_output: Any, wanted: Sequence[bool]) -> Truth:
    """Computes the truth for operands, on their device; ``prepare`` is the function that makes a call of them."""
    import torch

    leaves = [
        (x.detach().double() if x.is_floating_point() else x.detach()).requires_grad_(w)
        for x, w in zip(operands, wanted, strict=True)
    ]
    call = prepare(*leaves)
    call = call._replace(static=call.static._replace(out_dtype=None))
    with torch.enable_grad():
        value = call.loss.engine.reference(call, "float64", False)
    floating = [x for x in leaves if x.requires_grad]
    upstream = torch.as_tensor(grad_output, dtype=torch.float64, device=value.device).expand(value.shape)
    slopes = iter(torch.autograd.grad(value, floating, upstream, materialize_grads=True))
    value = value.detach()
    size = value.abs() + 1
    gradients: list[Expected | None] = []
    for x in leaves:
        if not x.requires_grad:
            gradients.append(None)
            continue
        exact = next(slopes)
        largest = exact.abs().max() if exact.numel() else 0.0
        terms = exact.abs() + 4 * largest
        gradients.append(Expected(exact, terms, terms))
    return Truth(Expected(value, size, size), tuple(gradients))
