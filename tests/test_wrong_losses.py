"""Tests of the properties: each one fails for functions with the error that it should find.

A wrong function is made from the correct one, by changing its value or a gradient on its way back. A table lists the
properties that must notice it; other tests show that the correct functions have all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import KERNELS
from grids import REPRESENTATIVES, short_or_full, thorough
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

import cupylosses.functional as F
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import properties as P
from cupylosses.testing.check import EDGES, by_position
from cupylosses.testing.pointwise import properties as pointwise

pytestmark = [pytest.mark.programs, pytest.mark.filterwarnings("ignore:.*broadcast")]

Function = Callable[..., Tensor]


def by_name(function: Function, loss: Loss) -> Function:
    """Returns the function with the operands of the loss as keywords, as properties call it."""
    names = [x.name for x in loss.operands]
    return lambda **given: function(*[given.pop(x) for x in names], **given)


class _Tamper(torch.autograd.Function):
    """Identity that changes the gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grad), None


def gradient(position: int, change: Callable[[Tensor], Tensor]) -> Callable[[Function, Loss], Function]:
    """Changes the gradient of one operand."""

    def spoil(function: Function, loss: Loss) -> Function:
        def wrong(*operands: Tensor, **options: Any) -> Tensor:
            changed = [_Tamper.apply(x, change) if i == position else x for i, x in enumerate(operands)]
            return function(*changed, **options)

        return wrong

    return spoil


def value(change: Callable[[Tensor], Tensor]) -> Callable[[Function, Loss], Function]:
    """Changes the value, and with it the gradients."""
    return lambda function, loss: lambda *operands, **options: change(function(*operands, **options))


def operands(change: Callable[[Tensor], Tensor]) -> Callable[[Function, Loss], Function]:
    """Changes the operands."""
    return lambda function, loss: lambda *xs, **options: function(*map(change, xs), **options)


def argument(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Function, Loss], Function]:
    """Changes one of the common arguments, if it is passed."""

    def spoil(function: Function, loss: Loss) -> Function:
        def wrong(*operands: Tensor, **options: Any) -> Tensor:
            return function(*operands, **{n: change(x) if n == name else x for n, x in options.items()})

        return wrong

    return spoil


def upstream(change: Callable[[Tensor], Tensor]) -> Callable[[Function, Loss], Function]:
    """Changes the upstream gradient."""
    return value(lambda y: _Tamper.apply(y, change))


# ----------------------------------------------------------------------------------------------------------------------
# Errors that need more than one line


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.view_as(a), b.view_as(b)

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return b, a


def swapped_gradients(function: Function, loss: Loss) -> Function:
    return lambda a, b, *rest, **options: function(*_Swap.apply(a, b), *rest, **options)


def other_kinks(function: Function, loss: Loss) -> Function:
    """Correct except at the declared kinks, where the first operand's gradient follows another convention."""

    def wrong(*xs: Tensor, **options: Any) -> Tensor:
        at = torch.zeros_like(xs[0], dtype=torch.bool)
        for kink in loss.kinks(**loss.values({k: v for k, v in options.items() if k != "reduction"})):
            hits = [x == k for x, k in zip(xs, kink.operands, strict=True)]
            at = at | torch.stack(torch.broadcast_tensors(*hits)).all(0)
        return function(_Tamper.apply(xs[0], lambda g: torch.where(at, g + 0.5, g)), *xs[1:], **options)

    return wrong


def divides_by_rows(function: Function, loss: Loss) -> Function:
    """`mean` that divides by the size of the first dimension alone."""

    def wrong(*xs: Tensor, reduction: str = "mean", **options: Any) -> Tensor:
        y = function(*xs, reduction=reduction, **options)
        return y * (xs[0].numel() / xs[0].shape[0]) if reduction == "mean" else y

    return wrong


def divides_half_way(function: Function, loss: Loss) -> Function:
    """`mean` whose gradient is not divided."""

    def wrong(*xs: Tensor, reduction: str = "mean", **options: Any) -> Tensor:
        y = function(*xs, reduction=reduction, **options)
        return _Tamper.apply(y, lambda g: g * xs[0].numel()) if reduction == "mean" else y

    return wrong


def loses_the_tail(function: Function, loss: Loss) -> Function:
    """The last element is never written."""

    def wrong(*xs: Tensor, reduction: str = "mean", **options: Any) -> Tensor:
        y = function(*xs, reduction="none", **options)
        keep = torch.ones_like(y)
        if y.numel() > 1:
            keep.view(-1)[-1] = 0
        y = y * keep
        return y if reduction == "none" else y.double().sum().to(y.dtype) / (y.numel() if reduction == "mean" else 1)

    return wrong


def assumes_contiguity(function: Function, loss: Loss) -> Function:
    """Reads memory in order and ignores strides."""

    def straight(x: Tensor) -> Tensor:
        strides = torch.empty(x.shape, device="meta").stride()
        return x if 0 in x.stride() else x.as_strided(x.shape, strides)

    return operands(straight)(function, loss)


def broadcasts_by_row(function: Function, loss: Loss) -> Function:
    """Aligns a 1-d operand with the first dimension where it fits."""

    def wrong(first: Tensor, *rest: Tensor, **options: Any) -> Tensor:
        fits = [first.dim() == 2 and x.dim() == 1 and x.shape[0] == first.shape[0] for x in rest]
        return function(first, *(x[:, None] if f else x for x, f in zip(rest, fits, strict=True)), **options)

    return wrong


def sums_one_row(function: Function, loss: Loss) -> Function:
    """The gradient of a broadcast operand is that of the first row."""

    def wrong(*xs: Tensor, **options: Any) -> Tensor:
        shape = torch.broadcast_shapes(*(x.shape for x in xs))

        def first_row(x: Tensor) -> Tensor:
            return x if x.shape == shape else torch.cat([x.expand(shape)[:1], x.detach().expand(shape)[1:]])

        return function(*map(first_row, xs), **options)

    return wrong


def right_for_all_wrong_for_one(function: Function, loss: Loss) -> Function:
    def wrong(*xs: Tensor, **options: Any) -> Tensor:
        y = function(*xs, **options)
        alone = y.requires_grad and sum(x.requires_grad for x in xs) == 1
        return _Tamper.apply(y, lambda g: g * 1.001) if alone else y

    return wrong


def other_value_with_gradients(function: Function, loss: Loss) -> Function:
    """Another order of additions with gradients: an error in the last place."""

    def wrong(*xs: Tensor, **options: Any) -> Tensor:
        y = function(*xs, **options)
        return y + torch.finfo(y.dtype).eps * 2 * y.detach() if y.requires_grad else y

    return wrong


def never_the_same(function: Function, loss: Loss) -> Function:
    calls = iter(range(10_000))
    return value(lambda y: y * (1 + 1e-6 * next(calls)))(function, loss)


def spoils_its_operand(function: Function, loss: Loss) -> Function:
    def wrong(*xs: Tensor, **options: Any) -> Tensor:
        y = function(*xs, **options)
        with torch.no_grad():
            xs[0].data.mul_(1 + 2**-7)  # Unlike detach(), unnoticed by torch.
        return y

    return wrong


def late_upstream_gradient(function: Function, loss: Loss) -> Function:
    """Each backward pass gets the previous upstream gradient."""
    last = [1.0]

    def late(g: Tensor) -> Tensor:
        before, last[0] = last[0], g.flatten()[0].item()
        return torch.full_like(g, before)

    return upstream(late)(function, loss)


def offsets_of_32_bits(function: Function, loss: Loss) -> Function:
    """Strides truncated to 32 bits."""
    return operands(lambda x: x.as_strided(x.shape, [s % (1 << 32) for s in x.stride()]))(function, loss)


# ----------------------------------------------------------------------------------------------------------------------
# Properties that must notice each error


def truth(**setting: Any) -> Callable[..., None]:
    """Returns a check of agreement with the truth in one setting."""

    def check(function: Function, loss: Loss, device: str) -> None:
        P.agrees_with_truth(function, loss, device=device, **setting)

    check.__name__ = "truth(" + ",".join(f"{k}={v}" for k, v in setting.items()) + ")"
    return check


TRUTH = truth()
ELEMENTS = truth(reduction="none")
EDGE = truth(reduction="none", layout=EDGES)
TRANSPOSED = truth(layout="transposed", reduction="none")
ROW = truth(layout="row")
SQUARE = truth(layout="row", shape=(16, 16))


def alone(function: Function, loss: Loss, device: str) -> None:
    """Checks agreement with the truth where only the first operand requires grad."""
    P.agrees_with_truth(function, loss, device=device, wanted=tuple(x is loss.operands[0] for x in loss.operands))


WRONG: dict[str, tuple[Callable[[Function, Loss], Function], list[Callable[..., None]]]] = {
    "sign flipped": (
        value(lambda y: -y),
        [TRUTH, ELEMENTS, P.agrees_with_torch, P.follows_declared_kinks],
    ),
    "twice the value": (value(lambda y: 2 * y), [TRUTH, ELEMENTS, P.agrees_with_torch]),
    "off by 1e-3": (value(lambda y: y * 1.001), [TRUTH, ELEMENTS, P.agrees_with_torch]),
    "first gradient's sign flipped": (
        gradient(0, lambda g: -g),
        [TRUTH, ELEMENTS, ROW, alone, P.agrees_with_torch, P.is_differentiable, P.reads_any_upstream_gradient],
    ),
    "second gradient's sign flipped": (
        gradient(1, lambda g: -g),
        [TRUTH, ELEMENTS, ROW, P.agrees_with_torch, P.is_differentiable, P.reads_any_upstream_gradient],
    ),
    "gradient twice": (gradient(0, lambda g: 2 * g), [TRUTH, ELEMENTS, P.agrees_with_torch, P.is_differentiable]),
    "gradient off by 1e-3": (
        gradient(1, lambda g: g * 1.001),
        [TRUTH, ELEMENTS, P.agrees_with_torch, P.is_differentiable, P.reads_any_upstream_gradient],
    ),
    "gradient of 0": (gradient(1, torch.zeros_like), [TRUTH, ELEMENTS, P.agrees_with_torch, P.is_differentiable]),
    "the other operand's gradient": (
        swapped_gradients,
        [TRUTH, ELEMENTS, P.agrees_with_torch, P.is_differentiable, P.reads_any_upstream_gradient],
    ),
    "NaN swallowed": (operands(lambda x: x.nan_to_num(nan=0.5)), [EDGE, P.propagates_nan]),
    "NaN swallowed by a gradient": (gradient(0, lambda g: g.nan_to_num(nan=0.0)), [EDGE, P.propagates_nan]),
    "NaN spread": (value(lambda y: y + 0 * y.sum()), [EDGE, P.propagates_nan]),
    "another convention at the kink": (other_kinks, [EDGE, P.follows_declared_kinks]),
    "divides by the rows": (divides_by_rows, [TRUTH, P.agrees_with_torch, P.reduces_consistently]),
    "value divided, gradient not": (
        divides_half_way,
        [TRUTH, P.agrees_with_torch, P.reduces_consistently, P.is_differentiable],
    ),
    "upstream gradient ignored": (upstream(torch.ones_like), [TRUTH, ELEMENTS, P.reads_any_upstream_gradient]),
    "one upstream gradient for all": (
        upstream(lambda g: g.flatten()[0].expand_as(g) if g.numel() else g),
        [ELEMENTS, P.reads_any_upstream_gradient],
    ),
    "computed in bfloat16": (operands(lambda x: x.bfloat16().to(x.dtype)), [TRUTH, ELEMENTS, P.agrees_with_torch]),
    "another dtype": (value(Tensor.double), [TRUTH, ELEMENTS]),
    "shape (1,)": (value(lambda y: y.reshape(1) if y.dim() == 0 else y), [TRUTH]),
    "tail lost": (loses_the_tail, [ELEMENTS]),
    "strides ignored": (assumes_contiguity, [TRANSPOSED]),
    "broadcast along the wrong dimension": (broadcasts_by_row, [SQUARE]),
    "broadcast gradient not summed": (sums_one_row, [ROW]),
    "right for all, wrong for one": (
        right_for_all_wrong_for_one,
        [alone, P.differentiates_operands_alone_and_together],
    ),
    "other value with gradients": (
        other_value_with_gradients,
        [P.differentiates_operands_alone_and_together, P.repeats_bit_by_bit],
    ),
    "never the same": (never_the_same, [P.repeats_bit_by_bit]),
    "operand changed": (spoils_its_operand, [P.repeats_bit_by_bit]),
    "upstream gradient of the call before": (late_upstream_gradient, [P.writes_one_gradient_in_one_pass_or_two]),
    "mask ignored": (argument("mask", torch.ones_like), [P.weighs_masks_and_reduces]),
    "weight ignored": (argument("weight", lambda w: 0 * w + 1), [P.weighs_masks_and_reduces]),
    "gradient of the weight off by 1e-3": (
        argument("weight", lambda w: _Tamper.apply(w, lambda g: g * 1.001)),
        [P.weighs_masks_and_reduces],
    ),
    "weight of 0 multiplied": (
        argument("weight", lambda w: torch.where(w == 0, 1e-300, w)),
        [P.shields_what_does_not_count],
    ),
    "offsets of 32 bits": (offsets_of_32_bits, [P.reads_beyond_32_bits]),
}


def says_nothing(check: Callable[..., None], loss: Loss, name: str) -> bool:
    """True if a property does not apply to this loss, or the changed loss is still correct."""
    if check is P.agrees_with_torch:
        return loss.torch is None
    if check is P.reads_beyond_32_bits:
        return not any(x.integer for x in loss.operands)
    if check is P.follows_declared_kinks:
        # A negated 0 is 0.
        kinks = loss.kinks(**loss.values())
        return not any(k.value or any(k.gradient) for k in kinks) if name == "sign flipped" else not kinks
    if name == "NaN spread" and loss.mean_of_rows:
        return check is not P.propagates_nan  # The edges are one row, which is NaN as a whole.
    return name.startswith("another convention") and not loss.kinks(**loss.values())


def pairs() -> list[Any]:
    """Pairs each wrong function with each property that must notice it.

    Each pair runs for one representative, in turn, on the reference path; with ``--thorough`` for all of them, in
    kernels too.
    """
    found = []
    pairs = [(name, check) for name, (_, checks) in WRONG.items() for check in checks]
    for i, (name, check) in enumerate(pairs):
        losses = [x for x in REPRESENTATIVES if not says_nothing(check, x, name)]
        for loss in short_or_full(losses[i % len(losses) :][:1], losses):
            title = f"{name}-{check.__name__}-{loss.name}"
            found.append(pytest.param(name, check, loss, "cpu", id=title))
            if thorough():
                found.append(pytest.param(name, check, loss, KERNELS, id=f"{title}-kernels", marks=pytest.mark.kernels))
    return found


@pytest.mark.parametrize(("name", "check", "loss", "device"), pairs())
def test_wrong_function_is_caught(name: str, check: Callable[..., None], loss: Loss, device: str) -> None:
    spoil, right = WRONG[name][0], getattr(F, loss.name)
    check(right, loss, device=device)
    # gradcheck raises its own exception.
    with pytest.raises((AssertionError, GradcheckError)):
        check(by_name(spoil(by_position(loss), loss), loss), loss, device=device)


def test_every_property_can_fail() -> None:
    helpers = {P.require, P.upstream_gradients, P.composed, P.agrees_with_truth}
    proven = {check for _, checks in WRONG.values() for check in checks}
    public = {x for m in (P, pointwise) for x in vars(m).values() if getattr(x, "__module__", "") == m.__name__}
    assert {x for x in public - helpers if callable(x) and not x.__name__.startswith("_")} <= proven


@pytest.mark.representatives
def test_lost_gradient_raises(loss: Loss) -> None:
    """torch raises for a missing gradient in every check that requests it."""

    def wrong(first: Tensor, *rest: Tensor, **options: Any) -> Tensor:
        return by_position(loss)(first, *(x.detach() for x in rest), **options)

    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        P.agrees_with_truth(by_name(wrong, loss), loss)
