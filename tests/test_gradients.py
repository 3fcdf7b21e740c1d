"""Gradients of every loss against the float64 truth, finite differences, and the declared conventions.

Reduced losses get two upstream gradients: the one that the forward pass expects, for which it has written the gradient
already, and one for which it must be computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from devices import KERNELS, on_gpu
from grids import BY_KERNEL, CASES, MIXTURES, OTHERS, SIZES, losses_in_turn

import cupylosses.functional as F
from cupylosses.checks import FLOATING
from cupylosses.definition import Loss
from cupylosses.testing import properties
from cupylosses.testing.check import EDGES, bind
from cupylosses.testing.covering import OWN
from cupylosses.testing.layouts import LAYOUTS
from cupylosses.testing.tolerance import same_bits
from cupylosses.testing.truth import OVERFLOWING

pytestmark = pytest.mark.filterwarnings("ignore:.*broadcast")


def agrees(loss: Loss, **setting: Any) -> None:
    """The public function and its gradients agree with the truth."""
    properties.agrees_with_truth(getattr(F, loss.name), loss, **setting)


@pytest.mark.covering
@BY_KERNEL
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(("loss", "case"), CASES)
def test_parameters_and_dtypes(
    loss: Loss, case: Mapping[str, Any], dtype: str, reductions: Sequence[str], device: str
) -> None:
    for reduction in reductions:
        agrees(loss, case=case, dtypes=(dtype,), reduction=reduction, device=device)


@pytest.mark.covering(layout=EDGES)
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(("loss", "case"), CASES)
def test_edges_of_the_domain(loss: Loss, case: Mapping[str, Any], dtype: str, reduction: str, device: str) -> None:
    """The kinks with their neighbours, zeros of both signs, subnormal and huge numbers, infinities, NaN."""
    if (loss.name, dtype) in OVERFLOWING:
        pytest.skip("the truth overflows on the way; tests/test_numerics.py has one of many digits")
    agrees(loss, case=case, dtypes=(dtype,), reduction=reduction, layout=EDGES, device=device)


@pytest.mark.covering(reduction="sum")
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(("loss", "case"), CASES)
def test_kinks_are_as_declared(loss: Loss, case: Mapping[str, Any], dtype: str, device: str) -> None:
    properties.follows_declared_kinks(getattr(F, loss.name), loss, case, dtype, device)


@pytest.mark.covering
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(loss: Loss, layout: str, reduction: str, device: str) -> None:
    agrees(loss, layout=layout, reduction=reduction, device=device)


@pytest.mark.parametrize(("loss", "layout", "dtype"), losses_in_turn(OWN, OTHERS))
def test_layouts_of_other_dtypes(loss: Loss, layout: str, dtype: str, device: str) -> None:
    for reduction in ("none", "mean"):
        agrees(loss, dtypes=(dtype,), layout=layout, reduction=reduction, device=device)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(("loss", "dtypes"), MIXTURES)
def test_mixed_dtypes(loss: Loss, dtypes: tuple[str, ...], reduction: str, device: str) -> None:
    agrees(loss, dtypes=dtypes, reduction=reduction, device=device)


@pytest.mark.parametrize("layout", ["row", "column", "scalar", "outer"])
def test_mixed_dtypes_with_broadcasting(layout: str, device: str) -> None:
    for reduction in ("none", "mean"):
        agrees(F.mse_loss.loss, dtypes=("bfloat16", "float32"), layout=layout, reduction=reduction, device=device)


@pytest.mark.representatives
def test_sizes_around_vectors_and_warps(loss: Loss, device: str) -> None:
    for size, reduction in product(SIZES, ("none", "sum")):
        agrees(loss, shape=(size,), reduction=reduction, device=device)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "shape",
    [(300, 1001), (7, 30_001), (30_001, 7), *on_gpu(((1 << 21) + 1,), (12_345_678,), (3000, 1001), (7, 300_001))],
)
@pytest.mark.parametrize(("loss", "layout"), losses_in_turn(["contiguous", "row", "column", "scalar"]))
def test_large_operands(loss: Loss, layout: str, shape: tuple[int, ...]) -> None:
    if len(shape) >= LAYOUTS[layout].rank:
        agrees(loss, shape=shape, layout=layout, reduction="sum", device=KERNELS)


@pytest.mark.representatives
def test_twelve_dimensions(loss: Loss, device: str) -> None:
    """In an order in which no two dimensions merge, with one of them broadcast."""
    order = (5, 0, 7, 2, 9, 4, 11, 6, 1, 8, 3, 10)
    values, function = loss.values(), getattr(F, loss.name)
    shapes = [(2,) * 12, *[(2,) * 11 + (1,)] * (len(loss.operands) - 1)]
    operands = properties.samples.operands(loss, values, ("float64",) * len(shapes), shapes, device)
    flat = [x.clone().requires_grad_() for x in operands]
    permuted = [flat[0].permute(order).contiguous().permute([order.index(d) for d in range(12)]), *flat[1:]]
    value = bind(function, loss, values, "sum")(*permuted)
    found = torch.autograd.grad(value, flat)
    expected = properties.truth(loss, [x.cpu() for x in operands], values, "sum")
    assert properties.compare(value.detach().cpu(), expected.value).ok
    for gradient, exact in zip(found, expected.gradients, strict=True):
        assert properties.compare(gradient.cpu(), exact).ok


# ----------------------------------------------------------------------------------------------------------------------
# Which operands require grad


@pytest.mark.representatives
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("layout", ["contiguous", "row", "column", "scalar", "outer"])
def test_each_operand_alone_and_together(loss: Loss, layout: str, reduction: str, device: str) -> None:
    properties.differentiates_operands_alone_and_together(
        getattr(F, loss.name), loss, reduction=reduction, layout=layout, device=device
    )


@pytest.mark.representatives
def test_gradients_that_nobody_wants_are_not_there(loss: Loss, device: str) -> None:
    for position in range(len(loss.operands)):
        operands = [torch.rand(9, device=device) for _ in loss.operands]
        operands[position].requires_grad_()
        bind(getattr(F, loss.name), loss, loss.values(), "mean")(*operands).backward()
        assert [x.grad is not None for x in operands] == [i == position for i in range(len(operands))]


@pytest.mark.representatives
def test_gradients_have_their_operands_strides(loss: Loss, device: str) -> None:
    """As torch's accumulation into `.grad` wants them: the operand's own, dense, order of dimensions."""
    for reduction in ("none", "sum"):
        operands = [torch.rand(4, 6, 5, device=device).permute(2, 0, 1).requires_grad_() for _ in loss.operands]
        value = bind(getattr(F, loss.name), loss, loss.values(), reduction)(*operands)
        gradients = torch.autograd.grad(value.sum(), operands)
        assert [g.stride() for g in gradients] == [x.stride() for x in operands]


# ----------------------------------------------------------------------------------------------------------------------
# Upstream gradients


@pytest.mark.representatives
@pytest.mark.parametrize("layout", ["contiguous", "row", "column", "scalar", "outer"])
def test_upstream_gradients_in_any_storage(loss: Loss, layout: str, device: str) -> None:
    properties.reads_any_upstream_gradient(getattr(F, loss.name), loss, layout=layout, device=device)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_upstream_gradients_of_other_widths(dtype: str, device: str) -> None:
    properties.reads_any_upstream_gradient(F.mse_loss, F.mse_loss.loss, dtype=dtype, device=device)


@pytest.mark.representatives
def test_reduced_backward_through_later_operations(loss: Loss, device: str) -> None:
    """The upstream gradient arrives from arithmetic behind the loss, not from ``backward(gradient)``."""
    function = bind(getattr(F, loss.name), loss, loss.values(), "sum")
    operands = [torch.rand(33, device=device, requires_grad=True) for _ in loss.operands]
    plain = torch.autograd.grad(function(*operands), operands)
    scaled = torch.autograd.grad(function(*operands) * 4 - 1, operands)
    for a, b in zip(plain, scaled, strict=True):
        assert same_bits(a * 4, b)


# ----------------------------------------------------------------------------------------------------------------------
# Finite differences


@pytest.mark.formulas
@pytest.mark.parametrize(("loss", "case"), CASES)
def test_gradient_is_the_slope(loss: Loss, case: Mapping[str, Any], device: str) -> None:
    for reduction in loss.reductions:
        properties.is_differentiable(getattr(F, loss.name), loss, case, reduction, device)


@pytest.mark.formulas
@pytest.mark.parametrize(("loss", "case"), CASES)
def test_second_derivative_is_the_slope_of_the_gradient(loss: Loss, case: Mapping[str, Any], device: str) -> None:
    for reduction in loss.reductions:
        properties.is_differentiable(getattr(F, loss.name), loss, case, reduction, device, second=True)
