"""Properties that every loss must have. Each function checks one property and raises AssertionError if it fails.

Each takes the function under test and the definition to compare it with. So a test can pass a deliberately wrong
function and see the property fail: a property that no wrong function violates would prove nothing. The properties of
this file apply to losses of any engine; those of element-wise losses come from ``pointwise/properties.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from cupylosses import options
from cupylosses.definition.base import Definition
from cupylosses.testing.check import Check, Result, perform, run
from cupylosses.testing.pointwise.properties import (
    agrees_with_torch,
    composed,
    follows_declared_kinks,
    is_differentiable,
    propagates_nan,
    reads_beyond_32_bits,
    reduces_consistently,
    shields_what_does_not_count,
    weighs_masks_and_reduces,
)
from cupylosses.testing.tolerance import compare, equal_bits, require, same_bits

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "agrees_with_torch",
    "agrees_with_truth",
    "composed",
    "differentiates_operands_alone_and_together",
    "follows_declared_kinks",
    "is_differentiable",
    "propagates_nan",
    "reads_any_upstream_gradient",
    "reads_beyond_32_bits",
    "reduces_consistently",
    "repeats_bit_by_bit",
    "require",
    "shields_what_does_not_count",
    "upstream_gradients",
    "weighs_masks_and_reduces",
    "writes_one_gradient_in_one_pass_or_two",
]

Function = Callable[..., "Tensor"]


def agrees_with_truth(function: Function, loss: Definition, **setting: Any) -> None:
    """Value, gradients, shapes, dtypes and devices match the float64 truth; ``setting`` are fields of Check."""
    outcome = perform(Check(loss, function=function, **setting))
    require(outcome.ok, "\n".join(outcome.problems))


def _check(
    function: Function,
    loss: Definition,
    case: Mapping[str, Any] | None,
    dtype: str,
    reduction: str,
    layout: str | None,
    device: str,
    shape: tuple[int, ...] | None = None,
) -> Check:
    """Returns a check of small operands, unless a shape is given."""
    check = Check(loss, case or {}, (dtype,), reduction, device=device, function=function).small(layout)
    return check if shape is None else replace(check, shape=shape)


# ----------------------------------------------------------------------------------------------------------------------
# Gradients


def upstream_gradients(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields upstream gradients for values like ``x``, of one or two dimensions, in every kind of storage."""
    import torch

    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        # At least 1/4: a gradient times 0 proves nothing.
        return (torch.rand(shape, generator=generator) * 2 + 0.25).to(x.device, x.dtype)

    if x.dim() == 1:  # A loss whose elements are means of rows.
        yield "contiguous", draw(len(x))
        yield "strided", draw(2 * len(x))[::2]
        yield "misaligned", draw(len(x) + 1)[1:]
        yield "one number for all", draw(1).expand(len(x))
        return
    rows, columns = x.shape
    yield "contiguous", draw(rows, columns)
    yield "transposed", draw(columns, rows).T
    yield "sliced", draw(rows + 2, columns + 2)[1:-1, 1:-1]
    yield "strided", draw(rows, 2 * columns)[:, ::2]
    yield "misaligned", draw(rows * columns + 1)[1:].view(rows, columns)
    yield "expanded along rows", draw(columns).expand(rows, columns)
    yield "expanded along columns", draw(rows, 1).expand(rows, columns)
    yield "one number for all", draw(1, 1).expand(rows, columns)


def reads_any_upstream_gradient(
    function: Function,
    loss: Definition,
    case: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    layout: str | None = None,
    device: str = "cpu",
) -> None:
    """With reduction "none", the upstream gradient may have any strides: only its elements count."""
    check = _check(function, loss, case, dtype, "none", layout, device)
    operands, call, wanted = check.operands(), check.ours(), check.gradients_of
    for name, grad_output in upstream_gradients(call(*operands)):
        result = run(call, operands, wanted, grad_output)
        expected = check.truth(operands, grad_output.cpu(), "cpu")
        for operand, w, gradient, exact, bias in zip(
            check.names, wanted, result.gradients, expected.gradients, check.biases(operands), strict=True
        ):
            require(not w or (gradient is not None and exact is not None), f"no gradient of {operand}")
            if w:
                compared = compare(gradient.cpu(), exact, None, bias)
                require(compared.ok, f"gradient of {operand}, grad_output {name}: {compared}")


def differentiates_operands_alone_and_together(
    function: Function,
    loss: Definition,
    case: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    reduction: str = "mean",
    layout: str | None = None,
    device: str = "cpu",
) -> None:
    """Value and gradients have the same bits whichever operands require grad."""
    check = _check(function, loss, case, dtype, reduction, layout, device)
    operands, call = check.operands(), check.ours()
    together = run(call, operands, check.gradients_of, -1.5)
    for wanted in product(*[(False, True) if w else (False,) for w in check.gradients_of]):
        result = run(call, operands, wanted, -1.5)
        names = "+".join(x for x, w in zip(check.names, wanted, strict=True) if w) or "none"
        require(same_bits(result.value, together.value), f"value with gradients of {names} has other bits")
        for operand, w, a, b in zip(check.names, wanted, result.gradients, together.gradients, strict=True):
            if w:
                require(
                    a is not None and b is not None and same_bits(a, b),
                    f"gradient of {operand} among gradients of {names} has other bits than among all",
                )


#: A sequence of upstream gradients: the expected one, a lasting change, zeros of both signs, NaN and infinity.
UPSTREAM = (1.0, 1.0, -3.0, -3.0, 0.0, -0.0, float("nan"), float("inf"), 1.0)


def writes_one_gradient_in_one_pass_or_two(
    function: Function,
    loss: Definition,
    case: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    reduction: str = "mean",
    layout: str | None = None,
    device: str = "cpu",
    shape: tuple[int, ...] | None = None,
) -> None:
    """The gradient has the bits of a two-pass gradient, whatever forward expected, also in repeated backward passes."""
    import torch

    check = _check(function, loss, case, dtype, reduction, layout, device, shape)
    operands, call = check.operands(), check.ours()
    wanted = zip(check.names, operands, check.gradients_of, strict=True)
    leaves = {name: x.requires_grad_() for name, x, w in wanted if w}

    def gradients(value: Tensor, grad_output: float) -> tuple[Tensor, ...]:
        upstream = torch.full_like(value, grad_output)
        return torch.autograd.grad(value, list(leaves.values()), upstream, retain_graph=True)

    def require_same(what: str, found: Sequence[Tensor], grad_output: float) -> None:
        for name, a, b in zip(leaves, found, expected[str(grad_output)], strict=True):
            require(same_bits(a, b), f"gradient of {name}, {what}, grad_output {grad_output}: other bits")

    # All expected gradients are computed beforehand: each backward pass changes what the next forward pass expects.
    with options.set_one_pass(False):
        expected = {str(g): gradients(call(*operands), g) for g in UPSTREAM}
    gradients(call(*operands), UPSTREAM[0])
    for grad_output in UPSTREAM:
        value = call(*operands)
        first = gradients(value, grad_output)
        require_same("first backward", first, grad_output)
        for x in first:
            x.fill_(float("nan"))
        require_same("second backward", gradients(value, grad_output), grad_output)
    # Two graphs exist at once, and a backward between their forward passes changes the expectation.
    one = call(*operands)
    gradients(call(*operands), -3.0)
    other = call(*operands)
    require_same("the other of two graphs", gradients(other, 1.0), 1.0)
    require_same("one of two graphs", gradients(one, -3.0), -3.0)


# ----------------------------------------------------------------------------------------------------------------------
# Bits


def repeats_bit_by_bit(
    function: Function,
    loss: Definition,
    case: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    reduction: str = "mean",
    layout: str | None = None,
    device: str = "cpu",
    shape: tuple[int, ...] | None = None,
    times: int = 3,
) -> None:
    """A repeated call, also without gradients, returns the same bits and does not modify its operands."""
    check = _check(function, loss, case, dtype, reduction, layout, device, shape)
    operands, call = check.operands(), check.ours()
    before = [x.clone() for x in operands]
    first = run(call, operands, check.gradients_of, -1.5)
    for _ in range(times):
        again, alone = (run(call, operands, w, -1.5) for w in (check.gradients_of, (False,) * len(operands)))
        require(_same(again, first), "a second call has other bits")
        require(same_bits(alone.value, first.value), "without gradients: other bits")
    for name, x, y in zip(check.names, operands, before, strict=True):
        require(same_bits(x, y), f"{name} was changed")


def _same(a: Result, b: Result) -> bool:
    return all(equal_bits(x, y) for x, y in zip((a.value, *a.gradients), (b.value, *b.gradients), strict=True))
