"""Values and gradients of kernels and of the reference path against the float64 truth, finite differences and torch.

``test_formulas.py`` checks formulas alone, for every parameter and dtype. Each loss has four kernels here; layouts,
dtypes, mixtures and sizes depend on the engine and are tested with the representatives in turn. Reduced losses get two
upstream gradients: the one that forward expects, for which it has already written the gradient, and one for which the
gradient must be computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from devices import GPU, KERNELS
from grids import (
    CASES,
    LOSSES,
    MIXED,
    REPRESENTATIVES,
    SIZES,
    by_reference_and_kernels,
    in_turn,
    mixtures,
    short_or_full,
)

import cupylosses.functional as F
from cupylosses.checks import FLOATING
from cupylosses.definition.base import REDUCTIONS
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import properties, samples
from cupylosses.testing.check import EDGES, Check, bind
from cupylosses.testing.layouts import LAYOUTS
from cupylosses.testing.pointwise.truth import OVERFLOWING, truth
from cupylosses.testing.tolerance import compare, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:.*broadcast")

#: Shapes that would take too long on the host.
LARGE = [((1 << 21) + 1,), ((1 << 22) + 513,), (12_345_678,), (3000, 1001), (7, 300_001)]

#: Layouts that differ in which gradients are sums.
BROADCAST = ("contiguous", "row", "column", "scalar", "outer")


def agrees(loss: Loss, **setting: Any) -> None:
    """Asserts that the public function and its gradients agree with the truth."""
    properties.agrees_with_truth(getattr(F, loss.name), loss, **setting)


# ----------------------------------------------------------------------------------------------------------------------
# Every loss


@pytest.mark.kernels
@pytest.mark.every_loss
@pytest.mark.parametrize(("loss", "reduction"), in_turn(LOSSES, ["none", "mean"]))
def test_kernels_of_every_loss(loss: Loss, reduction: str) -> None:
    agrees(loss, reduction=reduction, device=KERNELS)


@pytest.mark.parametrize(("given", "reduction", "dtype"), in_turn(CASES, REDUCTIONS, FLOATING))
def test_reference_of_every_loss(given: tuple[Loss, Mapping[str, Any]], reduction: str, dtype: str) -> None:
    loss, case = given
    agrees(loss, case=case, dtypes=(dtype,), reduction=reduction)
    properties.agrees_with_torch(getattr(F, loss.name), loss, case, reduction=reduction)


@pytest.mark.parametrize(("given", "reduction", "dtype"), in_turn(CASES, ["none", "sum"], FLOATING))
def test_reference_at_the_edges_of_the_domain(
    given: tuple[Loss, Mapping[str, Any]], reduction: str, dtype: str
) -> None:
    """Kinks with their neighbours, zeros of both signs, subnormal and huge numbers, infinities, and NaN."""
    loss, case = given
    properties.follows_declared_kinks(getattr(F, loss.name), loss, case, dtype)
    if (loss.name, dtype) not in OVERFLOWING:
        agrees(loss, case=case, dtypes=(dtype,), reduction=reduction, layout=EDGES)


@pytest.mark.parametrize(("given", "reduction"), in_turn(CASES, REDUCTIONS))
def test_reference_has_the_slopes_of_its_values(given: tuple[Loss, Mapping[str, Any]], reduction: str) -> None:
    """Finite differences confirm first and second derivatives."""
    loss, case = given
    for second in (False, True):
        properties.is_differentiable(getattr(F, loss.name), loss, case, reduction, second=second)


# ----------------------------------------------------------------------------------------------------------------------
# Layouts, dtypes and sizes


@pytest.mark.addresses
@pytest.mark.parametrize(
    ("layout", "reduction", "loss", "dtype"), in_turn([*LAYOUTS], ["none", "mean"], REPRESENTATIVES, FLOATING)
)
def test_layouts_and_dtypes(layout: str, reduction: str, loss: Loss, dtype: str, device: str) -> None:
    agrees(loss, dtypes=(dtype,), layout=layout, reduction=reduction, device=device)


@pytest.mark.parametrize(("mixture", "reduction", "layout"), in_turn(mixtures(), ["none", "mean"], BROADCAST))
def test_mixed_dtypes(mixture: tuple[Loss, tuple[str, ...]], reduction: str, layout: str, device: str) -> None:
    loss, dtypes = mixture
    agrees(loss, dtypes=dtypes, reduction=reduction, layout=layout, device=device)
    if all(LAYOUTS[layout].shapes((2, 3), 2)):  # An operand without dimensions does not take part in the promotion.
        check = Check(loss, dtypes=dtypes, reduction=reduction, layout=layout, device=device)
        assert check.ours()(*check.operands()).dtype == getattr(torch, MIXED[dtypes])


@by_reference_and_kernels
def test_a_number_does_not_widen_a_tensor(loss: Loss, device: str) -> None:
    """torch's promotion: a tensor without dimensions gives way to one with dimensions."""
    first = torch.rand(5, dtype=torch.bfloat16, device=device)
    others = [torch.rand((), dtype=torch.float32, device=device)] * (len(loss.operands) - 1)
    function = bind(getattr(F, loss.name), loss, loss.values(), "none")
    assert function(first, *others).dtype == torch.bfloat16


@pytest.mark.addresses
@pytest.mark.parametrize(("dtype", "loss"), in_turn(["float32", "bfloat16"], REPRESENTATIVES[-2:]))
def test_sizes_around_vectors_and_warps(loss: Loss, dtype: str, device: str) -> None:
    for size, reduction in product(SIZES, ("none", "sum")):
        agrees(loss, dtypes=(dtype,), shape=(size,), reduction=reduction, device=device)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("shape", "layout", "loss", "dtype"),
    in_turn(
        [
            ((1 << (21 if GPU else 16)) - 1,),
            (70, 1001),
            (7, 9001),
            (9001, 7),
            *(LARGE if GPU else []),
        ],
        ["contiguous", "row", "column", "scalar"],
        REPRESENTATIVES[-4:],
        ["bfloat16", "float32"],
    ),
)
def test_groups_that_take_many_batches(shape: tuple[int, ...], layout: str, loss: Loss, dtype: str) -> None:
    agrees(loss, dtypes=(dtype,), shape=shape, layout=layout, reduction="sum", device=KERNELS)


@by_reference_and_kernels
def test_empty_operands(loss: Loss, device: str) -> None:
    """The mean of nothing is NaN and its sum 0, as in torch; for means of rows, the sum too is NaN."""
    for shape in ((0,), (3, 0), (0, 4, 2)):
        operands = [torch.empty(shape, device=device, requires_grad=True) for _ in loss.operands]
        functions = [bind(getattr(F, loss.name), loss, loss.values(), r) for r in ("none", "sum", "mean")]
        none, total, mean = (function(*operands) for function in functions)
        assert none.shape == (shape[:-1] if loss.mean_of_rows else shape)
        assert total.isnan().item() if loss.mean_of_rows and shape[-1] == 0 else total.item() == 0
        assert total.shape == ()
        assert mean.isnan().item() and mean.shape == ()
        for value in (none.sum(), total, mean):
            for gradient in torch.autograd.grad(value, operands):
                assert gradient.shape == shape


@by_reference_and_kernels
def test_empty_after_broadcasting(loss: Loss, device: str) -> None:
    """A row is broadcast against no rows, so its gradient is an empty sum, 0."""
    operands = [torch.rand(0, 3, device=device, requires_grad=True)]
    operands += [torch.rand(1, 3, device=device, requires_grad=True) for _ in loss.operands[1:]]
    value = bind(getattr(F, loss.name), loss, loss.values(), "sum")(*operands)
    value.backward()
    assert [x.grad.tolist() for x in operands[1:]] == [[[0.0, 0.0, 0.0]]] * (len(operands) - 1)


@by_reference_and_kernels
def test_twelve_dimensions(loss: Loss, device: str) -> None:
    """The dimensions are in an order in which no two merge, and one of them is broadcast."""
    order = (5, 0, 7, 2, 9, 4, 11, 6, 1, 8, 3, 10)
    values, function = loss.values(), getattr(F, loss.name)
    shapes = [(2,) * 12, *[(2,) * 11 + (1,)] * (len(loss.operands) - 1)]
    operands = samples.operands(loss, values, ("float64",) * len(shapes), shapes, device)
    flat = [x.clone().requires_grad_() for x in operands]
    permuted = [flat[0].permute(order).contiguous().permute([order.index(d) for d in range(12)]), *flat[1:]]
    value = bind(function, loss, values, "sum")(*permuted)
    found = torch.autograd.grad(value, flat)
    expected = truth(loss, [x.cpu() for x in operands], values, "sum")
    assert compare(value.detach().cpu(), expected.value).ok
    for gradient, exact in zip(found, expected.gradients, strict=True):
        assert compare(gradient.cpu(), exact).ok


# ----------------------------------------------------------------------------------------------------------------------
# Reductions


@pytest.mark.parametrize("given", CASES)
def test_reductions_are_consistent(given: tuple[Loss, Mapping[str, Any]]) -> None:
    loss, case = given
    for dtype in ("float32", "float64"):
        properties.reduces_consistently(getattr(F, loss.name), loss, case, dtype)


@pytest.mark.kernels
@pytest.mark.parametrize(("dtype", "loss"), in_turn(["float32", "float64"], REPRESENTATIVES[1:3]))
def test_reductions_are_consistent_in_kernels(loss: Loss, dtype: str) -> None:
    properties.reduces_consistently(getattr(F, loss.name), loss, {}, dtype, KERNELS)


@pytest.mark.parametrize(
    ("layout", "reduction", "loss", "dtype"),
    in_turn(["contiguous", "row", "outer"], REDUCTIONS, REPRESENTATIVES, FLOATING),
)
def test_nan_is_never_swallowed(layout: str, reduction: str, loss: Loss, dtype: str, device: str) -> None:
    properties.propagates_nan(
        getattr(F, loss.name), loss, dtype=dtype, device=device, layouts=[layout], reductions=[reduction]
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_reference_never_swallows_nan(loss: Loss) -> None:
    properties.propagates_nan(getattr(F, loss.name), loss, layouts=["row"], reductions=["none", "mean"])


@by_reference_and_kernels
def test_reduced_halves_do_not_overflow(loss: Loss, device: str) -> None:
    """The sum of 2^18 float16 numbers of about 1 exceeds float16, but their mean does not.

    Hence the division must precede the rounding.
    """
    values = loss.values()
    operands = samples.operands(loss, values, ("float16",) * len(loss.operands), [(1 << 16, 4)] * len(loss.operands))
    expected = truth(loss, operands, values, "mean").value.exact
    if abs(expected) * (1 << 18) < torch.finfo(torch.float16).max:
        return
    value = bind(getattr(F, loss.name), loss, values, "mean")(*(x.to(device) for x in operands))
    assert value.dtype == torch.float16
    torch.testing.assert_close(value.cpu().double(), expected, rtol=1e-3, atol=0)


# ----------------------------------------------------------------------------------------------------------------------
# Operands that require grad


@pytest.mark.parametrize(
    ("layout", "loss", "reduction"),
    in_turn(short_or_full(BROADCAST[::2], BROADCAST), REPRESENTATIVES[-5:], ["none", "mean"]),
)
def test_each_operand_alone_and_together(layout: str, loss: Loss, reduction: str, device: str) -> None:
    properties.differentiates_operands_alone_and_together(
        getattr(F, loss.name), loss, reduction=reduction, layout=layout, device=device
    )


@by_reference_and_kernels
def test_gradients_that_nobody_wants_are_not_there(loss: Loss, device: str) -> None:
    for position in range(len(loss.operands)):
        operands = [torch.rand(9, device=device) for _ in loss.operands]
        operands[position].requires_grad_()
        bind(getattr(F, loss.name), loss, loss.values(), "mean")(*operands).backward()
        assert [x.grad is not None for x in operands] == [i == position for i in range(len(operands))]


@by_reference_and_kernels
def test_gradients_have_their_operands_strides(loss: Loss, device: str) -> None:
    """Gradients have the operand's own, dense order of dimensions, as torch's accumulation into `.grad` needs."""
    for reduction in ("none", "sum"):
        operands = [torch.rand(4, 6, 5, device=device).permute(2, 0, 1).requires_grad_() for _ in loss.operands]
        value = bind(getattr(F, loss.name), loss, loss.values(), reduction)(*operands)
        gradients = torch.autograd.grad(value.sum(), operands)
        assert [g.stride() for g in gradients] == [x.stride() for x in operands]


# ----------------------------------------------------------------------------------------------------------------------
# Upstream gradients


@pytest.mark.parametrize(
    ("layout", "loss", "dtype"),
    in_turn(
        short_or_full(["contiguous", "outer"], ["contiguous", "row", "outer", "scalar"]),
        short_or_full(REPRESENTATIVES[-2:], REPRESENTATIVES),
        short_or_full(FLOATING[:2], FLOATING),
    ),
)
def test_upstream_gradients_in_any_storage(layout: str, loss: Loss, dtype: str, device: str) -> None:
    properties.reads_any_upstream_gradient(getattr(F, loss.name), loss, dtype=dtype, layout=layout, device=device)


@by_reference_and_kernels
def test_reduced_backward_through_later_operations(loss: Loss, device: str) -> None:
    """The upstream gradient arrives from arithmetic after the loss, not from ``backward(gradient)``."""
    function = bind(getattr(F, loss.name), loss, loss.values(), "sum")
    operands = [torch.rand(33, device=device, requires_grad=True) for _ in loss.operands]
    plain = torch.autograd.grad(function(*operands), operands)
    scaled = torch.autograd.grad(function(*operands) * 4 - 1, operands)
    for a, b in zip(plain, scaled, strict=True):
        assert same_bits(a * 4, b)
