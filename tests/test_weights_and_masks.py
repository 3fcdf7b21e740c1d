"""Weights and masks: any shape that broadcasts, the elements that they hide, and gradients with respect to weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import numpy
import pytest
import torch
from devices import KERNELS
from grids import in_turn, reference_and_kernels, short_or_full
from tools.representatives import representatives
from torch import Tensor

import cupylosses
import cupylosses.functional as F
from cupylosses.definition.base import REDUCTIONS, Operand
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise import reference as pointwise_reference
from cupylosses.engines.pointwise.definition import Loss, modified
from cupylosses.testing import properties, samples
from cupylosses.testing.check import Check, perform, run
from cupylosses.testing.properties import composed
from cupylosses.testing.tolerance import same_bits
from cupylosses.testing.truth import runs_kernels

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore:.*broadcast")]

inf, nan = math.inf, math.nan

#: Rows and columns of operands: multiples of every vector width, so that few kernels serve all tests.
ROWS, COLUMNS = 24, 40

#: Broadcast shapes of a weight or a mask.
SHAPES = {"full": (ROWS, COLUMNS), "row": (COLUMNS,), "column": (ROWS, 1), "scalar": (), "larger": (2, ROWS, COLUMNS)}


def operands(check: Check, *added: str) -> list[Tensor]:
    """Returns random operands: the loss's own are full, added weights and masks have the named shapes."""
    own = len(check.loss.operands) - len(added)
    shapes = [(ROWS, COLUMNS)] * own + [SHAPES[x] for x in added]
    drawn = samples.operands(check.loss, check.values, check.operand_dtypes, shapes, check.device)
    for x, name in zip(drawn[own:], added, strict=True):
        if name == "scalar":  # A weight or a mask that is 0 everywhere has its own tests.
            x.fill_(1.5)
    return drawn


def require_right(check: Check, *added: str) -> None:
    outcome = perform(check, operands(check, *added))
    assert outcome.ok, "\n".join(outcome.problems)


# ----------------------------------------------------------------------------------------------------------------------
# Against the truth


def reductions(loss: Loss, device: str) -> tuple[str, ...]:
    """Returns all reductions for the representatives by the formula, else one.

    An element is the same in all reductions, so that one is enough elsewhere.
    """
    by_formula = not runs_kernels(torch.empty(0, device=device))
    return REDUCTIONS if by_formula and loss in representatives() else ("mean",)


def test_every_loss_weighs_masks_and_reduces(loss: Loss, device: str) -> None:
    for reduction in reductions(loss, device):
        properties.weighs_masks_and_reduces(getattr(F, loss.name), loss, reduction=reduction, device=device)


def test_what_does_not_count_is_shielded(loss: Loss, device: str) -> None:
    for reduction in reductions(loss, device):
        properties.shields_what_does_not_count(getattr(F, loss.name), loss, reduction=reduction, device=device)


#: Reductions, and the dimensions that they run over.
SETTINGS = [
    *((kind, None) for kind in REDUCTIONS),
    *product(("sum", "mean", "weighted_mean"), ((0,), (1,))),
]


@pytest.mark.parametrize("mask", [None, *SHAPES])
@pytest.mark.parametrize("weight", [None, "number", *SHAPES])
@pytest.mark.parametrize("name", ["mse_loss", "huber_loss"])
def test_shapes_by_the_formula(name: str, weight: str | None, mask: str | None) -> None:
    """Checks every combination, since no kernel has to be compiled; torch's own loss computes the expected elements."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, ROWS, COLUMNS, dtype=torch.float64, generator=generator)
    leaves = {"input": drawn[0].clone().requires_grad_(), "target": drawn[1].clone().requires_grad_()}
    options: dict[str, Any] = {}
    if weight == "number":
        options["weight"] = 0.7
    elif weight:
        options["weight"] = leaves["weight"] = torch.rand(SHAPES[weight], generator=generator).double().requires_grad_()
    if mask:
        options["mask"] = torch.rand(SHAPES[mask], generator=generator) < (1.1 if mask == "scalar" else 0.6)
    elements = getattr(torch.nn.functional, name)(leaves["input"], leaves["target"], reduction="none")
    for reduction, dim in SETTINGS:
        found = getattr(F, name)(leaves["input"], leaves["target"], reduction=reduction, dim=dim, **options)
        expected = composed(elements, registry(Loss)[name], reduction, dim=dim, **options)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
        upstream = torch.linspace(0.25, 2.0, expected.numel(), dtype=torch.float64).reshape(expected.shape)
        pairs = [torch.autograd.grad(x, list(leaves.values()), upstream, retain_graph=True) for x in (found, expected)]
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.races
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("added", "shapes", "reduction", "dim"),
    [
        ({"weight": "array"}, ("full",), "mean", None),
        ({"weight": "array"}, ("scalar",), "weighted_mean", (0,)),
        ({"mask": True}, ("full",), "none", None),
        ({"weight": "number", "mask": True}, ("row",), "weighted_mean", (0,)),
        ({"weight": "array", "mask": True}, ("column", "full"), "weighted_mean", (1,)),
        ({"weight": "array", "mask": True}, ("row", "larger"), "mean", (0, 2)),
        *short_or_full(
            [],
            [
                ({"mask": True}, ("column",), "mean", None),
                ({"weight": "array", "mask": True}, ("column", "full"), "none", None),
            ],
        ),
    ],
    ids=str,
)
def test_shapes_in_kernels(
    added: dict[str, Any], shapes: tuple[str, ...], reduction: str, dim: tuple[int, ...] | None
) -> None:
    weighted = modified(registry(Loss)["mse_loss"], **added)
    case = {"weight": 0.75} if added.get("weight") == "number" else {}
    require_right(Check(weighted, case, reduction=reduction, dim=dim, device=KERNELS), *shapes)


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("mse_loss", ("float32", "bool", "float32")),
        ("hinge_loss", ("float16", "int8", "float32")),
        ("huber_loss", ("bfloat16", "int64", "bfloat16")),
        ("kl_div", ("bfloat16", "float32", "float64")),
    ],
)
def test_dtypes(name: str, dtypes: tuple[str, ...], device: str) -> None:
    """Labels and weights may have other dtypes than the operands; each gradient has the dtype of its operand."""
    loss = modified(registry(Loss)[name], weight="array", mask=True)
    require_right(Check(loss, dtypes=dtypes, device=device), "row", "full")


def test_optional_operands_and_numbers_join_them(device: str) -> None:
    """Combines a number instead of an operand, a weight that is a number, and a mask."""
    scaled = cupylosses.define_loss(
        "scaled_error",
        "scale * square(input - target)",
        operands=(Operand("input", ""), Operand("target", ""), Operand("scale", "", number=True, default=2.0)),
        reference=lambda xp, input, target, scale: scale * (input - target) ** 2,
    )
    generator = torch.Generator().manual_seed(0)
    x, y, s = torch.randn(3, ROWS, COLUMNS, dtype=torch.float64, generator=generator).to(device)
    mask = x > 0
    for given, scale in (({}, 2.0), ({"scale": None}, 2.0), ({"scale": 3}, 3.0), ({"scale": s}, s)):
        for reduction in ("none", "mean"):
            found = scaled(x, y, **given, weight=0.5, mask=mask, reduction=reduction)
            expected = composed(scale * (x - y) ** 2, scaled.loss, reduction, 0.5, mask)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


# ----------------------------------------------------------------------------------------------------------------------
# Zeros


@pytest.mark.parametrize("content", [nan, inf, -inf])
def test_an_element_without_weight_has_no_gradient(content: float, device: str) -> None:
    x = torch.tensor([content, 1.0, 3.0], device=device, requires_grad=True)
    y = torch.zeros(3, device=device, requires_grad=True)
    weight = torch.tensor([0.0, 2.0, 0.0], device=device, requires_grad=True)
    value = F.mse_loss(x, y, weight=weight, reduction="sum")
    assert value.item() == 2.0
    gradients = torch.autograd.grad(value, (x, y, weight))
    assert [g.tolist() for g in gradients] == [[0, 4, 0], [0, -4, 0], [0, 1, 9]], "9: a weight is learned from 0"


@reference_and_kernels(
    "name, reduction",
    ["log_cosh_loss", "binary_cross_entropy_with_logits", "js_div", "gaussian_nll_loss"],
    ["none", "sum", "mean"],
    kernels=[("log_cosh_loss", "none"), ("gaussian_nll_loss", "mean")],
)
def test_a_weight_of_0_has_torchs_second_derivatives(name: str, reduction: str, device: str) -> None:
    """Second derivatives at a weight of 0 are those of the product in torch.

    The gradient with respect to the weight is the element, so its derivative with respect to an operand is the
    element's. No other gradient depends on the operand.
    """
    loss = registry(Loss)[name]
    own = samples.operands(loss, loss.values(), ["float64"] * len(loss.operands), [(3, 4)] * len(loss.operands))
    leaves = [x.to(device).requires_grad_() for x in (*own, torch.tensor([0.0, 1.5, 0.0, -0.5], dtype=torch.float64))]
    *operands, weight = leaves
    elements = pointwise_reference.elements(loss, operands, loss.values())
    named = dict(zip((x.name for x in loss.operands), operands, strict=True))
    found = getattr(F, name)(**named, weight=weight, reduction=reduction).sum()
    expected = composed(elements, loss, reduction, weight).sum()
    generator = torch.Generator().manual_seed(0)
    along = [torch.randn(x.shape, dtype=torch.float64, generator=generator).to(device) for x in leaves]
    pairs = [
        torch.autograd.grad(torch.autograd.grad(x, leaves, create_graph=True), leaves, along) for x in (found, expected)
    ]
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("content", [nan, inf, -inf])
def test_what_is_not_finite_moves_no_weight(content: float, device: str) -> None:
    x = torch.tensor([content, 3.0, 3.0], device=device, requires_grad=True)
    weight = torch.zeros(3, device=device, requires_grad=True)
    mask = torch.tensor([True, True, False], device=device)
    value = F.mse_loss(x, torch.zeros_like(x), weight=weight, mask=mask, reduction="sum")
    slopes = torch.autograd.grad(value, (x, weight), create_graph=True)
    assert [g.tolist() for g in slopes] == [[0, 0, 0], [0, 9, 0]]
    along = torch.tensor([2.0, 0.5, 1.0], device=device)
    assert [g.tolist() for g in torch.autograd.grad(slopes, (x, weight), (along, along))] == [[0, 3, 0], [0, 3, 0]]


def test_an_infinite_slope_moves_no_weight(device: str) -> None:
    """The derivative of x - t + t log(t / x) in t is infinite at 0; that in x is 1."""
    x = torch.tensor([0.5, 0.5], device=device, requires_grad=True)
    t = torch.tensor([0.0, 0.5], device=device, requires_grad=True)
    weight = torch.zeros(2, device=device, requires_grad=True)
    value = F.generalized_kl_div(x, t, weight=weight, reduction="sum")
    by_x, by_t, by_weight = torch.autograd.grad(value, (x, t, weight), create_graph=True)
    assert [g.tolist() for g in (by_x, by_t, by_weight)] == [[0, 0], [0, 0], [0.5, 0]]
    ones = torch.ones_like(x)
    for slope, expected in ((by_x, [1, 0]), (by_t, [0, 0])):
        (mixed,) = torch.autograd.grad(slope, weight, ones, retain_graph=True)
        assert mixed.tolist() == expected
    moved = torch.autograd.grad(by_weight, (x, t), ones)
    assert [g.tolist() for g in moved] == [[1, 0], [0, 0]]


def test_weights_are_learned_from_0(device: str) -> None:
    """Weights of examples are learned from 0, as by Ren, Zeng, Yang and Urtasun (ICML 2018).

    "Learning to Reweight Examples for Robust Deep Learning": the weight of an example is the amount by which a step
    along its gradient, away from a weight of 0, lowers the loss of clean examples.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 3, dtype=torch.float64, generator=generator).to(device)
    truth = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, device=device)
    targets = inputs @ truth
    targets[:20] *= -3  # 20 of the 40 examples; 20 more are clean
    (x, clean_x), (y, clean_y) = inputs.split([40, 20]), targets.split([40, 20])

    def learned(model: Tensor) -> Tensor:
        weight = torch.zeros(40, dtype=torch.float64, device=device, requires_grad=True)
        trial = F.log_cosh_loss(x @ model, y, weight=weight, reduction="sum")
        (step,) = torch.autograd.grad(trial, model, create_graph=True)
        (slope,) = torch.autograd.grad(F.log_cosh_loss(clean_x @ (model - step), clean_y), weight)
        return (-slope).clamp(min=0)

    def error(weigh: Callable[[Tensor], Tensor]) -> float:
        model = torch.zeros_like(truth, requires_grad=True)
        for _ in range(30):
            value = F.log_cosh_loss(x @ model, y, weight=weigh(model), reduction="weighted_mean")
            (slope,) = torch.autograd.grad(value, model)
            model = (model - 0.1 * slope).detach().requires_grad_()
        return float((model - truth).detach().norm())

    first = learned(torch.zeros_like(truth, requires_grad=True))
    assert 0 < first[:20].sum() < 0.1 * first.sum()
    assert error(learned) < 0.2 < 1.5 < error(lambda _: torch.ones_like(first))


@pytest.mark.parametrize("content", [nan, inf, -inf])
def test_a_masked_element_gives_its_weight_no_gradient(content: float, device: str) -> None:
    x = torch.tensor([content, 1.0, 3.0], device=device, requires_grad=True)
    weight = torch.tensor([content, 2.0, 4.0], device=device, requires_grad=True)
    mask = torch.tensor([False, True, False], device=device)
    value = F.mse_loss(x, torch.zeros_like(x), weight=weight, mask=mask, reduction="sum")
    assert value.item() == 2.0
    assert [g.tolist() for g in torch.autograd.grad(value, (x, weight))] == [[0, 4, 0], [0, 1, 0]]


def test_what_counts_is_not_shielded(device: str) -> None:
    """Elements with NaN or infinity count under any weight but 0, and so does a weight of NaN."""
    for bad, weight in ((nan, 1e-30), (nan, -1.0), (1.0, nan), (inf, 1.0)):
        x = torch.tensor([bad, 1.0], device=device, requires_grad=True)
        w = torch.tensor([weight, 1.0], device=device, requires_grad=True)
        value = F.mse_loss(x, torch.zeros_like(x), weight=w, reduction="sum")
        (gradient,) = torch.autograd.grad(value, x)
        assert value.isnan() if bad != inf else value.isinf()
        assert not gradient[0].isfinite() and gradient[1] == 2.0


def test_zeros_have_no_sign(device: str) -> None:
    """Hidden elements are +0, even where the element is negative."""
    x = torch.full((4,), -0.25, device=device)
    target = torch.full((4,), 0.25, device=device)  # kl_div is negative here.
    masked = F.kl_div(x, target, mask=torch.zeros(4, dtype=torch.bool, device=device), reduction="none")
    weightless = F.kl_div(x, target, weight=torch.zeros(4, device=device), reduction="none")
    number = F.kl_div(x, target, weight=0, reduction="none")
    assert F.kl_div(x, target).item() < 0
    for found in (masked, weightless, number):
        assert same_bits(found, torch.zeros_like(x))


@reference_and_kernels(
    "nothing, reduction", ["mask", "weight", "number"], ["none", "sum", "mean", "batchmean", "weighted_mean"]
)
def test_nothing_counts(nothing: str, reduction: str, device: str) -> None:
    """A sum of nothing is 0, a mean of nothing NaN, and neither has a gradient."""
    x = torch.full((3, 4), nan, device=device, requires_grad=True)
    y = torch.rand(3, 4, device=device, requires_grad=True)
    w = torch.zeros(4, device=device, requires_grad=True)
    options: dict[str, Any] = {
        "mask": {"mask": torch.zeros(3, 1, dtype=torch.bool, device=device), "weight": w},
        "weight": {"weight": w},
        "number": {"weight": 0.0},
    }[nothing]
    # huber_loss divides by the number of elements, whatever their weights.
    by_count = nothing != "mask" and reduction == "mean"
    both = [(F.mse_loss, True), (F.huber_loss, not by_count)]
    # Running kernels of both losses proves more than those of one only where they divide by different numbers.
    for function, empty in both if by_count or not runs_kernels(x) else both[1:]:
        value = function(x, y, reduction=reduction, **options)
        assert bool(value.isnan().all()) == (empty and "mean" in reduction and reduction != "batchmean")
        assert value.nan_to_num(0.0).eq(0).all()
        leaves = [x, y, *([w] if "weight" in options and nothing != "number" else [])]
        for g in torch.autograd.grad(value, leaves, torch.full_like(value, 3.0)):
            assert g.eq(0).all()


def test_nothing_counts_in_one_row(device: str) -> None:
    x = torch.rand(3, 4, device=device, requires_grad=True)
    y, w = torch.zeros(3, 4, device=device), torch.rand(3, 4, device=device, requires_grad=True)
    mask = torch.tensor([[True], [False], [True]], device=device)
    value = F.mse_loss(x, y, weight=w, mask=mask, dim=1)
    assert value.isnan().tolist() == [False, True, False]
    for g in torch.autograd.grad(value, (x, w), torch.ones_like(value)):
        assert g[1].eq(0).all() and g[0].ne(0).all() and g[2].ne(0).all()


# ----------------------------------------------------------------------------------------------------------------------
# One pass


@pytest.mark.races
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("added", "reduction"), in_turn([{"mask": True}, {"weight": "array", "mask": True}], ["mean", "weighted_mean"])
)
def test_one_pass_or_two(added: dict[str, Any], reduction: str) -> None:
    loss = modified(registry(Loss)["huber_loss"], **added)
    setting = {"reduction": reduction, "device": KERNELS}
    properties.writes_one_gradient_in_one_pass_or_two(F.huber_loss, loss, **setting)
    properties.repeats_bit_by_bit(F.huber_loss, loss, **setting)


@pytest.mark.kernels
def test_a_count_that_changes_leaves_no_stale_gradient() -> None:
    """The expectation is about grad_output, not about the mask's count: each call divides by its own count."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 2503, generator=generator).to(KERNELS)
    x.requires_grad_()
    random = torch.rand(2503, generator=generator).to(KERNELS)

    def step(share: float, grad_output: float) -> tuple[Tensor, Tensor]:
        value = F.huber_loss(x, y, mask=random < share)
        (gradient,) = torch.autograd.grad(value, x, torch.full_like(value, grad_output))
        return value.detach(), gradient

    settings = [(s, g) for g in (1.0, 1.0, 1.0, -2.0, -2.0, 1.0) for s in (0.5, 0.9, 0.1)]
    with cupylosses.set_one_pass(False):
        expected = [step(*setting) for setting in settings]
    for setting, pair in zip(settings, expected, strict=True):
        for a, b in zip(step(*setting), pair, strict=True):
            assert same_bits(a, b), setting
    # The next call, with another mask, runs before this call's backward.
    first = F.huber_loss(x, y, mask=random < 0.5)
    F.huber_loss(x, y, mask=random < 0.1).backward()
    assert same_bits(torch.autograd.grad(first, x)[0], expected[0][1])


@pytest.mark.kernels
def test_editing_a_mask_before_backward_is_torchs_error() -> None:
    x = torch.rand(9, device=KERNELS, requires_grad=True)
    mask = torch.ones(9, dtype=torch.bool, device=KERNELS)
    value = F.mse_loss(x, torch.zeros_like(x), mask=mask)
    mask[0] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


# ----------------------------------------------------------------------------------------------------------------------
# Agreement with torch's own weights, and torch's features


TWINS = [("mse_loss", {}), ("l1_loss", {}), ("huber_loss", {}), ("huber_loss", {"delta": 0.25})]


@reference_and_kernels("twin, reduction", TWINS, ["none", "sum", "mean"])
def test_weights_are_torchs(twin: tuple[str, dict[str, float]], reduction: str, device: str) -> None:
    name, options = twin
    torchs = getattr(torch.nn.functional, name)
    if "weight" not in torchs.__code__.co_varnames:
        pytest.skip("this torch has no weights")
    generator = torch.Generator().manual_seed(0)
    drawn = [
        x.to(device).requires_grad_() for x in torch.rand(3, ROWS, COLUMNS, dtype=torch.float64, generator=generator)
    ]
    *own, weight = drawn
    found, expected = (f(*own, reduction=reduction, weight=weight, **options) for f in (getattr(F, name), torchs))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    upstream = torch.rand(expected.shape, dtype=torch.float64, generator=generator).to(device)
    ours = torch.autograd.grad(found, drawn, upstream)
    for a, b in zip(ours, torch.autograd.grad(expected, drawn, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_the_weight_can_be_given_by_position_where_torch_has_it() -> None:
    x, y, w = torch.rand(3, 5)
    assert same_bits(F.mse_loss(x, y, None, None, "sum", w), F.mse_loss(x, y, reduction="sum", weight=w))
    assert same_bits(F.huber_loss(x, y, "sum", 0.5, w), F.huber_loss(x, y, reduction="sum", delta=0.5, weight=w))


@pytest.mark.parametrize("weight", [2, 2.0, 0, -1.5, Fraction(1, 4), numpy.float32(0.5)], ids=repr)
def test_a_number_is_a_weight_for_all(weight: float, device: str) -> None:
    x = torch.rand(5, 7, device=device)
    y = torch.rand(5, 7, device=device)
    array = torch.full((5, 7), float(weight), device=device)
    for reduction in ("none", "sum"):
        found = F.huber_loss(x, y, reduction=reduction, weight=weight)
        assert same_bits(found, F.huber_loss(x, y, reduction=reduction, weight=array))


def test_numbers_compile_nothing_anew() -> None:
    """Equal modifications are the same object, and a number is an argument of the kernel."""
    loss = registry(Loss)["mse_loss"]
    assert modified(loss) is loss
    assert modified(loss, weight="number", mask=True) is modified(loss, weight="number", mask=True)
    prepared = [F.mse_loss.prepare(1, 2, weight=w) for w in (0.5, 7)]
    assert prepared[0].loss is prepared[1].loss
    assert [x.scalars for x in prepared] == [(0.5,), (7.0,)]


def differentiable(function: Callable[..., Tensor], device: str) -> tuple[Callable[..., Tensor], list[Tensor], Tensor]:
    """Returns a masked mean as a function of prediction, target and weights, these in float64, and the mask."""
    generator = torch.Generator().manual_seed(0)
    drawn = [x.to(device).requires_grad_() for x in torch.rand(2, 3, 4, dtype=torch.float64, generator=generator)]
    weight = (torch.rand(4, dtype=torch.float64, generator=generator) + 0.5).to(device).requires_grad_()
    mask = (torch.rand(3, 4, generator=generator) < 0.7).to(device)
    return lambda x, y, w, **options: function(x, y, weight=w, mask=mask, **options), [*drawn, weight], mask


@reference_and_kernels("options", [{}, {"dim": 0}, {"dim": 1}, {"reduction": "none"}], kernels=[({},)])
def test_derivatives_of_any_order(options: dict[str, Any], device: str) -> None:
    """Derivatives follow the quotient rule: the divisor depends on the weights."""
    function, leaves, _ = differentiable(F.mse_loss, device)

    def bound(*x: Tensor) -> Tensor:
        return function(*x, **options)

    assert torch.autograd.gradcheck(bound, leaves, rtol=1e-5, atol=1e-7)
    assert torch.autograd.gradgradcheck(bound, leaves, rtol=1e-5, atol=1e-7, check_undefined_grad=False)


def test_function_transforms(device: str) -> None:
    function, leaves, mask = differentiable(F.mse_loss, device)
    expected = torch.autograd.grad(function(*leaves), leaves)
    plain = [x.detach() for x in leaves]
    found = torch.func.grad(function, argnums=(0, 1, 2))(*plain)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    x, y, w = plain
    rows = torch.func.vmap(lambda a, b, m: F.mse_loss(a, b, weight=w, mask=m))(x, y, mask)
    for i in range(3):
        torch.testing.assert_close(rows[i], F.mse_loss(x[i], y[i], weight=w, mask=mask[i]))


def test_function_transforms_at_a_weight_of_0(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, dtype=torch.float64, generator=generator).to(device)
    weight = torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64, device=device)

    def found(x: Tensor, weight: Tensor) -> Tensor:
        return F.log_cosh_loss(x, y, weight=weight, reduction="sum")

    def expected(x: Tensor, weight: Tensor) -> Tensor:
        return (weight * torch.log(torch.cosh(x - y))).sum()

    def mixed(function: Callable[..., Tensor]) -> Callable[..., Any]:
        return torch.func.vmap(torch.func.jacrev(torch.func.grad(function, 1)))

    for a, b in zip(*(torch.func.hessian(f, (0, 1))(x, weight) for f in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)
    batch = torch.stack([x, x + 1]), torch.stack([weight, 0 * weight])
    torch.testing.assert_close(mixed(found)(*batch), mixed(expected)(*batch))


@pytest.mark.parametrize("argnums", ["weight", (1, "weight", "input")], ids=str)
def test_value_and_gradients(argnums: Any, device: str) -> None:
    """The weight is selected by its name, alone and together with operands."""
    function, leaves, mask = differentiable(F.mse_loss, device)
    expected = dict(zip(("input", 1, "weight"), torch.autograd.grad(function(*leaves), leaves), strict=True))
    x, y, w = (leaf.detach() for leaf in leaves)
    value, found = cupylosses.value_and_grad(F.mse_loss, x, y, weight=w, mask=mask, argnums=argnums)
    assert same_bits(value, function(x, y, w))
    alone = isinstance(argnums, str)
    for a, name in zip([found] if alone else found, [argnums] if alone else argnums, strict=True):
        torch.testing.assert_close(a, expected[name])


def test_integer_weights_have_a_way_out(device: str) -> None:
    x = torch.rand(4, device=device)
    with pytest.raises(
        TypeError, match=r"^mse_loss: `weight` must have one of the dtypes float16, .*, got int64\. Con"
    ):
        F.mse_loss(x, x, weight=torch.ones(4, dtype=torch.int64, device=device))


def test_run_without_gradients_of_the_weight(device: str) -> None:
    """A weight that requires no grad stays out of the graph, and does not change a bit of the results."""
    function, leaves, _ = differentiable(F.huber_loss, device)
    together = run(function, leaves, (True, True, True), -1.5)
    alone = run(function, leaves, (True, False, False), -1.5)
    assert same_bits(together.value, alone.value) and same_bits(together.gradients[0], alone.gradients[0])
