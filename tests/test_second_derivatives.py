"""Directional derivative of a loss: itself a loss, whose gradients are second derivatives of the original.

The truth is the reference formula, times the weight if there is one, differentiated twice by torch in float64.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as combinations
from typing import Any

import pytest
import torch
from devices import GPU, KERNELS
from grids import CASES, REPRESENTATIVES, in_turn, short_or_full
from tools.formulas import Formula
from tools.nvrtc import Nvrtc
from torch import Tensor

import cupylosses
from cupylosses.backends.torch import evaluation
from cupylosses.backends.torch.plans import forget
from cupylosses.call import Call
from cupylosses.definition.base import MASK, WEIGHT, Flag, Operand
from cupylosses.definition.registry import registry
from cupylosses.engines.base import Machine
from cupylosses.engines.base import TensorSpec as Described
from cupylosses.engines.pointwise import layout as pointwise_layout
from cupylosses.engines.pointwise import reference as pointwise_reference
from cupylosses.engines.pointwise.codegen import PRODUCT
from cupylosses.engines.pointwise.curvature import curved_pairs
from cupylosses.engines.pointwise.definition import Loss, ModifiedLoss, modified
from cupylosses.engines.pointwise.engine import POINTWISE
from cupylosses.engines.pointwise.jvp import TangentLoss, along_tangents
from cupylosses.engines.pointwise.plan import PointwisePlan
from cupylosses.engines.pointwise.reduction import Static
from cupylosses.jit import sources
from cupylosses.jit.gpu import Chip
from cupylosses.testing import samples
from cupylosses.testing.counters import counters

inf, nan = math.inf, math.nan

LOSSES = registry(Loss)
FORMS = {"plain": {}, "weight and mask": {"weight": "array", "mask": True}}

SHAPE = (6, 20)

#: Accepted error of a result in epsilons, relative to the magnitudes of its terms plus the effect of its operands' last
#: bits. The float32 bound is that of a value (testing/tolerance.py). In float64 the truth rounds too, and cancels where
#: a formula was written to be accurate in its value only: against truths without these errors, the kernels' error is a
#: quarter of this bound.
FEW = {"float32": 4, "float64": 32}


@dataclass
class Truth:
    """Exact derivative, and the magnitude that its errors are relative to."""

    exact: Tensor
    size: Tensor

    def error(self, result: Tensor) -> float:
        """Returns the worst error in epsilons of the result's arithmetic."""
        kind = torch.float64 if result.dtype == torch.float64 else torch.float32
        wrong = (result.double() - self.exact).abs()
        finfo = torch.finfo(kind)
        same = (wrong <= finfo.tiny) | (result.double() == self.exact) | (result.isnan() & self.exact.isnan())
        return float(torch.where(same, 0.0, wrong / self.size / finfo.eps).nan_to_num(inf).max())


def graph(output: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the derivatives, with a graph so that they can be differentiated again."""
    if not output.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(output, inputs, torch.ones_like(output), create_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def truths(value: Tensor, parts: Sequence[Tensor], inputs: Sequence[Tensor]) -> Truth:
    """Returns the truth of a sum of parts.

    Its size adds the magnitudes of the parts and the effect of the operands' last bits.
    """
    moved = [(x * g).detach().abs().nan_to_num(0.0, inf) for x, g in zip(inputs, graph(value, inputs), strict=True)]
    return Truth(value.detach(), sum(x.detach().abs() for x in parts) + sum(moved))


def product(loss: Loss, operands: Sequence[Tensor], values: Mapping[str, Any]) -> Tensor:
    """Returns the elements of a loss, weighted and masked by torch: correct where all values are finite."""
    own = loss.base if isinstance(loss, ModifiedLoss) and loss.base else loss
    elements = pointwise_reference.elements(own, operands[: len(own.operands)], values)
    for x, operand in zip(operands, loss.operands, strict=True):
        if operand is WEIGHT:
            elements = x * elements
        elif operand is MASK:
            elements = torch.where(x != 0, elements, 0.0)
    return elements


@dataclass
class Setting:
    """Derivative of a loss along all its floating operands, with the operands and parameters of a call.

    ``values`` are the parameters and flags as the reference formula takes them.
    """

    loss: TangentLoss
    operands: tuple[Tensor, ...]
    parameters: tuple[float, ...]
    flags: tuple[int, ...]
    values: Mapping[str, Any]

    @property
    def own(self) -> int:
        return len(self.loss.has_tangent)

    def call(self, operands: Sequence[Tensor], reduction: Static) -> Call:
        return Call(self.loss, tuple(operands), reduction._replace(flags=self.flags), self.parameters)

    def leaves(self) -> list[Tensor]:
        return [x.detach().clone().requires_grad_(x.is_floating_point()) for x in self.operands]

    def evaluate(self, how: Static) -> tuple[Tensor, list[Tensor]]:
        """Returns the kernels' result and its gradients."""
        leaves = self.leaves()
        result = evaluation.evaluate(self.call(leaves, how))
        return result.detach(), list(torch.autograd.grad(result.sum(), [x for x in leaves if x.requires_grad]))

    def by_formula(self) -> tuple[Tensor, list[Tensor]]:
        """Returns value and gradients of every element, by the kernels' formula without a kernel."""
        value, gradients = Formula(self.loss, self.flags, self.parameters).evaluate(self.operands)
        return value, [x for x in gradients if x is not None]

    def truth(self) -> tuple[Truth, list[Truth]]:
        """Returns the truth of the elements, and of their gradients.

        The gradients are those with respect to the floating operands and the directions.
        """
        base = self.loss.base
        assert base is not None
        x = [t.detach().double().requires_grad_() for t in self.operands[: self.own]]
        moving = [t for t, moves in zip(x, self.loss.has_tangent, strict=True) if moves]
        v = [t.double() for t in self.operands[self.own :]]
        slopes = graph(product(base, x, self.values), moving)
        terms = [d * g for d, g in zip(v, slopes, strict=True)]
        entries = [graph(term, moving) for term in terms]
        gradients = [truths(sum(row), row, moving) for row in zip(*entries, strict=True)]
        return truths(sum(terms), terms, moving), gradients + [truths(g, [g], moving) for g in slopes]


def setting(
    loss: Loss, dtype: str, case: Mapping[str, Any] = {}, shapes: Sequence[Sequence[int]] = (), **how: Any
) -> Setting:
    """Builds a setting with random operands and directions."""
    base = modified(loss, **how)
    values = loss.values(case)
    parameters = tuple(float(values[x.name]) for x in loss.parameters)
    masked = how.get("mask", False)
    count = len(base.operands)
    dtypes = [dtype] * (count - masked) + ["bool"] * masked
    shapes = shapes or [SHAPE] * count
    found = samples.operands(base, values, dtypes, shapes, seed=11)
    generator = torch.Generator().manual_seed(12)
    moving = tuple(x != "bool" for x in dtypes)
    directions = [
        torch.randn(tuple(s), generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
        for s, m in zip(shapes, moving, strict=True)
        if m
    ]
    operands = tuple(x.to(KERNELS) for x in (*found, *directions))
    return Setting(along_tangents(base, moving), operands, parameters, loss.choose(values), values)


def worst_errors(chosen: Setting) -> dict[str, float]:
    """Returns the worst errors of the elements and of every gradient, by name, without a kernel."""
    value, gradients = chosen.by_formula()
    expected, slopes = chosen.truth()
    names = [x.name for x in chosen.loss.operands if x.name != "mask"]
    found = {name: t.error(g) for name, g, t in zip(names, gradients, slopes, strict=True)}
    return found | {"value": expected.error(value)}


# ----------------------------------------------------------------------------------------------------------------------
# Against the truth


@pytest.mark.kernels
@pytest.mark.every_loss
@pytest.mark.parametrize(("loss", "case", "dtype"), [(*x, dtype) for x, dtype in in_turn(CASES, [*FEW])])
def test_agrees_with_the_formula(loss: Loss, case: Mapping[str, Any], dtype: str) -> None:
    """Compares at random points, and at points where the definition specifies the first derivative."""
    chosen = setting(loss, dtype, case)
    kinks = [x.operands for x in loss.kinks(**chosen.values) if not any(map(math.isinf, x.operands))]
    for row, point in enumerate(kinks):
        for x, given in zip(chosen.operands, point, strict=False):
            x[row, :] = given
    found = worst_errors(chosen)
    assert {name: x for name, x in found.items() if not x <= FEW[dtype]} == {}


@pytest.mark.parametrize(("loss", "case"), CASES)
def test_second_derivatives_that_vanish_do_so_in_the_formula(loss: Loss, case: Mapping[str, Any]) -> None:
    for how in FORMS.values():
        chosen = setting(loss, "float64", case, **how)
        base = chosen.loss.base
        assert base is not None
        leaves = [x.detach().cpu().requires_grad_(x.is_floating_point()) for x in chosen.operands[: chosen.own]]
        named = [(o.name, x) for o, x in zip(base.operands, leaves, strict=True) if x.requires_grad]
        slopes = graph(product(base, leaves, chosen.values), [x for _, x in named])
        curved = curved_pairs(base, chosen.flags)
        for (name, _), slope in zip(named, slopes, strict=True):
            for (other, x), second in zip(named, graph(slope, [x for _, x in named]), strict=True):
                assert (name, other) in curved or not second.any(), (how, name, other, x.shape)


@pytest.mark.parametrize(
    ("value", "flags", "curved"),
    [
        ("abs(a - b) + 2 * a", (), []),
        ("a * b", (), ["ab"]),
        ("a / b", (), ["ab", "bb"]),
        ("where(a < b && !(a == b), -a, exp(b))", (), ["bb"]),
        ("where(!first || second, a * a, a)", (1, 0), []),
        ("where(first && second, a, where(second, a, b * b))", (0, 1), []),
        ("relu_active(times_log(a, b))", (), ["aa", "ab"]),
        ("kl_term(a, b) + kl_term_of_log(b, a)", (), ["aa", "ab", "bb"]),
        ("zero_unless_nan(a * a) * b", (), []),
    ],
)
def test_pairs_along_which_an_expression_is_curved(value: str, flags: tuple[int, ...], curved: list[str]) -> None:
    own = Loss(
        name="own",
        summary="",
        formula="",
        operands=(Operand("a", ""), Operand("b", "")),
        flags=tuple(Flag(x, False, "") for x in ("first", "second")[: len(flags)]),
        value=value,
    )
    assert curved_pairs(own, flags) == {pair for x in curved for pair in ((x[0], x[1]), (x[1], x[0]))}


@pytest.mark.kernels
def test_a_product_has_the_same_bits_however_many_lanes_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise_layout, "GATHERED_ELEMENTS", 1)
    x, target, other, tangent = torch.rand(4, 1031, device=KERNELS)[:, 1:].half()
    found = []
    for few in (pointwise_layout.FEW_CHUNKS, 0):
        monkeypatch.setattr(pointwise_layout, "FEW_CHUNKS", few)
        for targets in (target, torch.stack([target, other], 1)[:, 0]):
            forget()
            leaf = x.detach().requires_grad_()
            value = cupylosses.functional.binary_cross_entropy_with_logits(leaf, targets)
            (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
            found += torch.autograd.grad(gradient, leaf, tangent)
    assert all(torch.equal(x, found[0]) for x in found)
    forget()


@pytest.mark.kernels
def test_a_product_with_a_hessian_of_zeros_runs_no_kernel() -> None:
    x, target, weight = (torch.randn(5, 7, device=KERNELS, requires_grad=i < 2) for i in range(3))
    (gradient,) = torch.autograd.grad(cupylosses.functional.l1_loss(x, target, weight=weight), x, create_graph=True)
    before = counters.launches
    found = torch.autograd.grad(gradient, (x, target), torch.ones_like(gradient))
    assert counters.launches == before
    assert all(not g.any() and g.shape == x.shape for g in found)


@pytest.mark.kernels
@pytest.mark.parametrize("how", [x for x in FORMS.values() if x], ids=[name for name, x in FORMS.items() if x])
def test_forms_agree_with_the_formula(loss: Loss, how: Mapping[str, Any]) -> None:
    for dtype in FEW:
        found = worst_errors(setting(loss, dtype, **how))
        assert {name: x for name, x in found.items() if not x <= FEW[dtype]} == {}, dtype


@pytest.mark.kernels
@pytest.mark.parametrize(("how", "loss", "dtype"), in_turn([*FORMS.values()], REPRESENTATIVES, [*FEW]))
def test_kernels_agree_with_the_formula(loss: Loss, how: Mapping[str, Any], dtype: str) -> None:
    """Bit-equal, without contraction; where rows are averaged, gradients differ by a rounding of the factor."""
    chosen = setting(loss, dtype, **how)
    expected = flat(chosen.by_formula())
    factor = SHAPE[-1] if loss.mean_of_rows else 1
    value, *gradients = flat(chosen.evaluate(Static("sum" if loss.mean_of_rows else "none")))
    for found, wanted in zip(gradients, expected[1:], strict=True):
        torch.testing.assert_close(found * factor, wanted, rtol=1e-6 if loss.mean_of_rows else 0, atol=0)
    if not loss.mean_of_rows:
        assert torch.equal(value, expected[0])


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("name", "how"),
    short_or_full(
        [("gaussian_nll_loss", FORMS["plain"])],
        [*combinations(["gaussian_nll_loss", "binary_cross_entropy_with_logits"], FORMS.values())],
    ),
)
def test_broadcast_operands_and_reductions(name: str, how: Mapping[str, Any]) -> None:
    """Reduces over all elements or some dimensions, with gradients of broadcast operands."""
    shapes = [SHAPE, (SHAPE[1],), (SHAPE[0], 1), *[(SHAPE[0], 1), SHAPE][: len(how)]]
    chosen = setting(LOSSES[name], "float32", shapes=shapes, **how)
    everything = replace(chosen, operands=tuple(x.expand(SHAPE).contiguous() for x in chosen.operands))
    value, slopes = everything.truth()
    for reduction, divide in ((Static("sum"), 1), (Static("sum", (0,)), 1), (Static("batchmean"), SHAPE[0])):
        result, gradients = chosen.evaluate(reduction)
        axis = reduction.dim or (0, 1)
        torch.testing.assert_close(result.double() * divide, value.exact.sum(axis), rtol=1e-5, atol=1e-4)
        for found, slope in zip(gradients, slopes, strict=True):
            expected = slope.exact.sum_to_size(found.shape)
            torch.testing.assert_close(found.double() * divide, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.kernels
def test_value_has_the_same_bits_with_and_without_second_derivatives() -> None:
    for name, how in (("js_div", Static("none")), ("general_robust_loss", Static("sum"))):
        chosen = setting(LOSSES[name], "float32")
        with_gradients, _ = chosen.evaluate(how)
        alone = evaluation.evaluate(chosen.call(chosen.operands, how))
        assert torch.equal(with_gradients, alone)


@pytest.mark.kernels
def test_sixteen_bits_are_rounded_once() -> None:
    """Derivatives never use narrow arithmetic: results are those of float32, rounded."""
    how = Static("sum")
    chosen = setting(LOSSES["binary_cross_entropy_with_logits"], "bfloat16")
    for found, exact in zip(flat(chosen.evaluate(how)), flat(in_float32(chosen).evaluate(how)), strict=True):
        assert torch.equal(found, exact.to(found.dtype))


#: Values of operands at the edges of domains, and next to them.
EDGES = (0.0, -0.0, 1e-4, 0.01, 0.06, 0.25, 0.5, 0.75, 1.0, 2.0, -0.5, -3.0, 20.0, -300.0, inf, -inf, nan)


@pytest.mark.kernels
@pytest.mark.every_loss
@pytest.mark.parametrize(
    ("loss", "dtype"), in_turn([x for x in LOSSES.values() if x.tentative], ["float16", "bfloat16"])
)
def test_edges_that_are_tried_first_in_sixteen_bits_are_those_of_float32(loss: Loss, dtype: str) -> None:
    """Tentative formulas have other kinks, and their products have no guards against 0 times infinity."""
    chosen = setting(loss, dtype, shapes=[(len(EDGES), len(EDGES))] * len(loss.operands))
    for x, points in zip(chosen.operands, torch.meshgrid([torch.tensor(EDGES)] * 2, indexing="ij"), strict=False):
        x.copy_(points)
    how = Static("none")
    for found, exact in zip(flat(chosen.evaluate(how)), flat(in_float32(chosen).evaluate(how)), strict=True):
        rounded = exact.to(found.dtype)
        close = (found.double() - exact.double()).abs() <= torch.finfo(found.dtype).eps * exact.double().abs() + 1e-7
        assert ((found == rounded) | (found.isnan() & rounded.isnan()) | close).all()


def in_float32(chosen: Setting) -> Setting:
    return replace(chosen, operands=tuple(x.float() for x in chosen.operands))


def flat(result: tuple[Tensor, list[Tensor]]) -> list[Tensor]:
    return [result[0], *result[1]]


# ----------------------------------------------------------------------------------------------------------------------
# The reference formula, which serves CPU tensors and third derivatives


@pytest.mark.parametrize("how", FORMS.values(), ids=list(FORMS))
def test_formula_of_the_derivative_is_differentiable(how: Mapping[str, Any], loss: Loss) -> None:
    chosen = setting(loss, "float64", **how)
    value, slopes = chosen.truth()
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in map(Tensor.cpu, chosen.operands)]
    found = pointwise_reference.elements(chosen.loss, leaves, chosen.values)
    torch.testing.assert_close(found, value.exact.cpu())
    gradients = torch.autograd.grad(found.sum(), [x for x in leaves if x.requires_grad], create_graph=True)
    for gradient, slope in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(gradient, slope.exact.cpu())


def test_formula_needs_no_graph_and_leaves_none() -> None:
    chosen = setting(LOSSES["mse_loss"], "float32")
    plain = [x.cpu() for x in chosen.operands]
    assert not pointwise_reference.elements(chosen.loss, plain, {}).requires_grad
    with torch.no_grad():
        assert not pointwise_reference.elements(chosen.loss, [x.requires_grad_() for x in plain], {}).requires_grad


def test_operands_and_identity() -> None:
    base = modified(LOSSES["mse_loss"], weight="array", mask=True)
    found = along_tangents(base, (True, False, True, False))
    assert [x.name for x in found.operands] == [
        "input", "target", "weight", "mask", "input__direction", "weight__direction",
    ]  # fmt: skip
    assert found is along_tangents(base, (True, False, True, False))
    assert (found.weight, found.mask, found.suffix) == ("array", True, "weight-array_mask_tangent1010")
    with pytest.raises(TypeError, match="along a direction already"):
        along_tangents(found, (True,) * 6)
    for wrong in ((True,), (False,) * 4):
        with pytest.raises(ValueError, match="`has_tangent`"):
            along_tangents(base, wrong)


def test_a_loss_without_formula_has_a_derivative_without() -> None:
    own = Loss(name="own", summary="", formula="", operands=(Operand("x", ""),), value="x * x")
    assert along_tangents(own, (True,)).reference is None


# ----------------------------------------------------------------------------------------------------------------------
# Conventions


Point = tuple[float, list[float]]


def at(loss: Loss, along: Sequence[int], operands: Sequence[float], directions: Sequence[float], **how: Any) -> Point:
    """Returns the value and its derivatives with respect to the operands, at one point, by the kernels' formula."""
    derivative, leaves, values = posed(loss, along, operands, directions, KERNELS, **how)
    parameters = tuple(float(values[x.name]) for x in loss.parameters)
    parameters += tuple([0.0] if how.get("weight") == "number" else [])
    result, gradients = Formula(derivative, loss.choose(values), parameters).evaluate([x.detach() for x in leaves])
    return result.item(), [x.item() for x in gradients if x is not None]


def at_by_formula(
    loss: Loss, along: Sequence[int], operands: Sequence[float], directions: Sequence[float], **how: Any
) -> Point:
    """Returns the value and its derivatives at one point, by the reference formula."""
    derivative, leaves, values = posed(loss, along, operands, directions, "cpu", **how)
    result = pointwise_reference.elements(
        derivative, [x if x.is_floating_point() else x.float() for x in leaves], values
    )
    return result.item(), slopes(result, leaves)


def posed(
    loss: Loss, along: Sequence[int], operands: Sequence[float], directions: Sequence[float], device: str, **how: Any
) -> tuple[TangentLoss, list[Tensor], dict[str, Any]]:
    """Returns the derivative of a modified loss, its operands as leaves, and the values of parameters and flags."""
    base = modified(loss, **how)
    derivative = along_tangents(base, tuple(i in along for i in range(len(base.operands))))
    given = [torch.tensor([x], device=device) for x in (*operands, *directions)]
    if how.get("mask"):
        given[len(operands) - 1] = given[len(operands) - 1] != 0
    return derivative, [x.requires_grad_() if x.is_floating_point() else x for x in given], dict(loss.values())


def slopes(result: Tensor, leaves: Sequence[Tensor]) -> list[float]:
    inputs = [x for x in leaves if x.requires_grad]
    return [x.item() for x in torch.autograd.grad(result.sum(), inputs, materialize_grads=True)]


@pytest.mark.kernels
def test_clamped_variance_is_differentiated_as_if_it_were_the_bound() -> None:
    loss, eps = LOSSES["gaussian_nll_loss"], 1e-6
    _, (by_input, _, by_variance, _) = at(loss, [2], (2e-3, 0.0, 1e-9), (1.0,))
    assert by_input == pytest.approx(-2e-3 / eps**2, rel=1e-5)
    assert by_variance == pytest.approx(-0.5 / eps**2 + 4e-6 / eps**3, rel=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["binary_cross_entropy_with_logits", "sigmoid_focal_loss", "poly1_loss"])
@pytest.mark.parametrize(("logit", "label"), [(inf, 1.0), (-inf, 0.0)])
def test_infinite_logit_for_the_right_label_has_second_derivatives_of_0(name: str, logit: float, label: float) -> None:
    more = (1.0,) if name.endswith("logits") else ()
    for along in (0, 1):
        value, gradients = at(LOSSES[name], [along], (logit, label, *more), (1.0,))
        assert (value, gradients[:2]) == (0.0, [0.0, 0.0])


@pytest.mark.kernels
def test_logit_of_0_is_a_point_like_others() -> None:
    """The formula contains |x|, which has no derivative at 0."""
    loss = LOSSES["binary_cross_entropy_with_logits"]
    assert at(loss, [0], (0.0, 1.0, 1.0), (1.0,))[1][0] == 0.25
    # The second derivative of (1 - p^q) / q: p^q (q (1 - p)^2 - p (1 - p)), negated.
    q = 0.7
    found = at(LOSSES["generalized_cross_entropy"], [0], (0.0, 1.0), (1.0,))[1][0]
    assert found == pytest.approx(-(0.5**q) * (0.25 * q - 0.25), rel=1e-6)


@pytest.mark.kernels
@pytest.mark.parametrize("held", [nan, inf, 1.0])
@pytest.mark.parametrize("direction", [nan, inf, 1.0])
def test_what_does_not_count_is_0_along_any_direction(held: float, direction: float) -> None:
    loss = LOSSES["mse_loss"]
    for how, last in (({"mask": True}, 0.0), ({"weight": "array"}, 0.0)):
        value, gradients = at(loss, [0, 1], (held, 2.0, last), (direction, direction), **how)
        assert (value, gradients) == (0.0, [0.0] * len(gradients))
    assert at(loss, [0, 1], (held, 2.0), (direction, direction), weight="number") == (0.0, [0.0] * 4)


#: For an element of weight 0: the loss, the operands with a direction, the operands and directions, and the expected
#: value with its derivatives with respect to the operands, the weight and the directions.
WEIGHTLESS = {
    "finite": ("mse_loss", [0, 1, 2], (3.0, 1.0), (0.25, -1.0, 0.5), (2.0, [2.0, -2.0, 5.0, 0.0, 0.0, 4.0])),
    "weight alone": ("mse_loss", [2], (3.0, 1.0), (0.5,), (2.0, [2.0, -2.0, 0.0, 4.0])),
    "operand alone": ("mse_loss", [0], (3.0, 1.0), (0.5,), (0.0, [0.0, 0.0, 2.0, 0.0])),
    "direction of NaN": ("mse_loss", [0, 2], (3.0, 1.0), (nan, 0.5), (2.0, [2.0, -2.0, 0.0, 0.0, 4.0])),
    "infinite direction": ("mse_loss", [0, 2], (3.0, 1.0), (inf, 0.5), (2.0, [2.0, -2.0, 0.0, 0.0, 4.0])),
    "NaN": ("mse_loss", [0, 2], (nan, 1.0), (1.0, nan), (0.0, [0.0] * 5)),
    "infinite value": ("l1_loss", [0, 2], (inf, 1.0), (1.0, 1.0), (0.0, [0.0] * 5)),
    # x - t + t log(t / x), whose derivative in t is infinite at 0.
    "finite slope": ("generalized_kl_div", [0, 2], (0.5, 0.0), (2.0, 3.0), (1.5, [3.0, 0.0, 2.0, 0.0, 0.5])),
    "infinite slope": ("generalized_kl_div", [1, 2], (0.5, 0.0), (2.0, 3.0), (1.5, [3.0, 0.0, 0.0, 0.0, 0.5])),
    "both slopes": ("generalized_kl_div", [0, 1], (0.5, 0.0), (2.0, 3.0), (0.0, [0.0, 0.0, 2.0, 0.0, 0.0])),
    "impossible": ("kl_div", [0, 2], (-inf, 0.25), (1.0, 1.0), (0.0, [0.0] * 5)),
}  # fmt: skip


@pytest.mark.parametrize("way", [pytest.param("kernels", marks=pytest.mark.kernels), "formula"])
@pytest.mark.parametrize(
    ("name", "along", "operands", "directions", "expected"), WEIGHTLESS.values(), ids=list(WEIGHTLESS)
)
def test_a_weight_of_0_is_moved_by_what_is_finite(
    name: str, along: list[int], operands: tuple[float, ...], directions: tuple[float, ...], expected: Any, way: str
) -> None:
    point = at if way == "kernels" else at_by_formula
    assert point(LOSSES[name], along, (*operands, 0.0), directions, weight="array") == expected
    # A mask hides the element even if its values are finite.
    masked = point(LOSSES[name], along, (*operands, 0.0, 0.0), directions, weight="array", mask=True)
    assert masked == (0.0, [0.0] * len(expected[1]))


@pytest.mark.kernels
def test_undefined_losses_have_undefined_derivatives() -> None:
    value, gradients = at(LOSSES["binary_cross_entropy"], [0], (2.0, 0.5), (1.0,))
    assert math.isnan(value) and all(map(math.isnan, gradients))


# ----------------------------------------------------------------------------------------------------------------------
# User-defined losses


@pytest.mark.kernels
def test_derivatives_by_hand_constants_and_parts_are_followed() -> None:
    """Definitions may also use the names that the generated code uses itself."""
    own = Loss(
        name="own",
        summary="",
        formula="",
        operands=(Operand("base", ""), Operand("counts", "")),
        parameters=tuple(cupylosses.Parameter(n, x, "") for n, x in (("number", 2.0), ("Base", 0.5))),
        constants={"twice": "2 * number"},
        let={"moved": "base - counts"},
        value="twice * square(moved) * Base + exp(counts)",
        derivatives={"base": "2 * twice * moved * Base"},
        reference=lambda xp, base, counts, number, Base: 2 * number * (base - counts) ** 2 * Base + xp.exp(counts),
    )
    for how in FORMS.values():
        assert max(worst_errors(setting(own, "float32", **how)).values()) <= FEW["float32"]


@pytest.mark.kernels
@pytest.mark.parametrize("role", ["input", "target"])
def test_number_in_place_of_an_operand(role: str) -> None:
    loss = LOSSES["general_robust_loss"]
    base = modified(loss, frozenset({"alpha", "scale"}), weight="number")
    operands = tuple(torch.tensor([x], device=KERNELS) for x in (0.5, -0.25, 1.5))
    moves = tuple(x == role for x in ("input", "target"))
    leaves = [x.requires_grad_() for x in operands]
    call = Call(along_tangents(base, moves), tuple(leaves), Static("none"), (1.0, 2.0, 3.0))
    by_input, by_target, _ = torch.autograd.grad(evaluation.evaluate(call).sum(), leaves)
    # 3 (sqrt(r^2 + 1) - 1) with r = d / 2.
    expected = 1.5 * 3 / 4 * (1 + 0.375**2) ** -1.5 * (1 if role == "input" else -1)
    assert (by_input.item(), by_target.item()) == pytest.approx((expected, -expected), rel=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Sensitivity to defects, and compilation


@pytest.mark.programs
@pytest.mark.kernels
@pytest.mark.skipif(GPU, reason="kernels are compiled from altered text on the host")
@pytest.mark.parametrize(
    ("name", "text", "instead"),
    [
        ("mse_loss", "{value.value, tangent_product<kGuarded>(slope.value, x.tangent)};", "{value.value, T(0)};"),
        ("log_cosh_loss", "T(4) * e", "T(3.9) * e"),
        ("charbonnier_loss", "inverse * inverse * inverse, x.value", "inverse * inverse, x.value"),
    ],
)
def test_a_wrong_second_derivative_is_noticed(
    name: str, text: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expand = sources.expand

    def altered(files: tuple[str, ...]) -> str:
        source = expand(files)
        assert text in source
        return source.replace(text, instead)

    monkeypatch.setattr(sources, "expand", altered)
    found = worst_errors(setting(LOSSES[name], "float32"))
    assert found["value"] <= FEW["float32"] < found["input"]


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc()


@pytest.mark.skipif(platform.system() == "Darwin", reason="there is no NVRTC for macOS")
@pytest.mark.parametrize(
    ("definition", "dtype"),
    in_turn(short_or_full(REPRESENTATIVES[::3], tuple(LOSSES.values())), ["float32", "bfloat16"]),
)
def test_compiles(definition: Loss, dtype: str, nvrtc: Nvrtc) -> None:
    """Compiles the kernel with all gradients, for the weighted and masked loss, which has the most operands."""
    base = modified(definition, weight="array", mask=True)
    moving = tuple(x.name != "mask" for x in base.operands)
    loss = along_tangents(base, moving)
    operands = tuple(Described("bool" if x.name == "mask" else dtype, SHAPE, (SHAPE[1], 1), 0) for x in loss.operands)
    for case in definition.cases[:1]:
        flags = definition.choose(definition.values(case))
        call = Call(loss, (), Static("sum", flags=flags))
        plan = PointwisePlan(POINTWISE, call, operands, dtype, Machine(100, Chip()))
        wanted = tuple(x.name != "mask" for x in loss.operands)
        product = plan.product_launch.variant(PRODUCT, wanted)
        for variant in (plan.elements_launch.variant("value_and_gradient", wanted), product):
            text = variant.source()
            assert "#define NARROW false" in text
            assert nvrtc.compile(text, "sm_90").resources.warnings == ()
