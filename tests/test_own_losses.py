"""Users' losses have everything that the library's own have, and mistakes in them are reported at the user's line."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from math import inf, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from devices import GPU, KERNELS
from grids import in_turn, reference_and_kernels, short_or_full
from tools import formulas
from tools.nvrtc import CompileError, Nvrtc, find_library
from tools.variants import variants

import cupylosses
import cupylosses.functional as F
from cupylosses import ExpressionError, Flag, Kink, Operand, Parameter, checks, define_loss, define_statistics
from cupylosses.definition.base import MAX_OWN_OPERANDS, RESERVED
from cupylosses.definition.expressions import cuda
from cupylosses.engines.pointwise.definition import Loss, modified
from cupylosses.nn import module_of
from cupylosses.testing import properties
from cupylosses.testing.check import EDGES, function_for
from cupylosses.testing.host.build import HostCompileError
from cupylosses.testing.tolerance import same_bits

pytestmark = pytest.mark.plain

Function = Callable[..., Any]

needs_nvrtc = pytest.mark.skipif(find_library() is None, reason="there is no NVRTC")

# ----------------------------------------------------------------------------------------------------------------------
# Three losses as users write them, with references


def _asymmetric_reference(xp: Any, input: Any, target: Any) -> Any:
    one = xp.ones_like(input - target)
    return xp.where(input > target, 2 * one, one) * (input - target) ** 2


asymmetric = define_loss(
    "asymmetric",
    "where(input > target, 2, 1) * square(input - target)",
    reference=_asymmetric_reference,
)


def _label_hinge_reference(xp: Any, score: Any, label: Any, margin: float, squared: bool) -> Any:
    sign = 2 * label - 1
    inactive = margin - sign * score < 0
    zero = xp.zeros_like(sign * score)
    gap = xp.where(inactive, zero, margin - xp.where(inactive, zero, sign) * xp.where(inactive, zero, score))
    return gap**2 if squared else gap


label_hinge = define_loss(
    "label_hinge",
    "where(squared, square(gap), gap)",
    operands=("score", Operand("label", "0 or 1.", domain="binary", integer=True)),
    parameters={"margin": 1.0},
    flags={"squared": False},
    let={"sign": "2 * label - 1", "gap": "relu_active(margin - sign * score)"},
    reference=_label_hinge_reference,
    cases=({}, {"margin": 0.5}, {"squared": True}),
)


def _tukey_reference(xp: Any, input: Any, target: Any, c: float) -> Any:
    d = input - target
    outside = xp.abs(d) >= c
    s = (xp.where(outside, xp.zeros_like(d), d) / c) ** 2
    inside = xp.where(s < 0.5, s * (3 - s * (3 - s)), 1 - (1 - s) ** 3)
    return c * c / 6 * xp.where(outside, xp.ones_like(d), inside)


TUKEY: dict[str, Any] = {
    "name": "tukey",
    # A polynomial, because 1 - (1 - s)^3 loses its digits near 0. The polynomial's derivative loses them near c.
    "value": "c * c / 6 * where(s >= 1, 1, s * (3 - s * (3 - s)))",
    "parameters": {"c": 4.0},
    "let": {"d": "input - target", "s": "square(d / c)", "slope": "where(s >= 1, 0, d * square(1 - s))"},
    "derivatives": {"input": "slope", "target": "-slope"},
    "reference": _tukey_reference,
    "kinks": lambda c: [Kink((c, 0.0), c * c / 6, (0.0, 0.0))],
    "cases": ({}, {"c": 1.0}),
}
tukey = define_loss(**TUKEY)

OWN = {x.loss.name: x for x in (asymmetric, label_hinge, tukey)}
CASES = [(f, case) for f in OWN.values() for case in f.loss.cases]


@pytest.fixture(params=list(OWN.values()), ids=list(OWN))
def own(request: pytest.FixtureRequest) -> Function:
    """Each of the losses above."""
    return request.param


def each_loss_in_turn(name: str, values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes ``own`` and another argument in turn: the engine's part does not depend on the loss."""
    return pytest.mark.parametrize(("own", name), in_turn(list(OWN.values()), values))


# ----------------------------------------------------------------------------------------------------------------------
# The generic properties


@pytest.mark.parametrize(
    ("own", "case", "dtype", "reduction"),
    [(*x, *rest) for x, *rest in in_turn(CASES, checks.FLOATING, asymmetric.loss.reductions)],
)
def test_values_and_gradients(own: Function, case: Mapping[str, Any], dtype: str, reduction: str, device: str) -> None:
    properties.agrees_with_truth(own, own.loss, case=case, dtypes=(dtype,), reduction=reduction, device=device)


@pytest.mark.parametrize(
    ("own", "case", "dtype"), [(*x, dtype) for x, dtype in in_turn(CASES, ["float32", "bfloat16"])]
)
def test_edges_and_kinks(own: Function, case: Mapping[str, Any], dtype: str, device: str) -> None:
    setting = {"case": case, "dtypes": (dtype,), "reduction": "none", "layout": EDGES, "device": device}
    properties.agrees_with_truth(own, own.loss, **setting)
    properties.follows_declared_kinks(own, own.loss, case, dtype, device)


@pytest.mark.parametrize(
    ("own", "layout", "reduction"),
    in_turn(list(OWN.values()), ["row", "column", "scalar", "transposed", "misaligned"], ["none", "mean"]),
)
def test_layouts(own: Function, layout: str, reduction: str, device: str) -> None:
    properties.agrees_with_truth(own, own.loss, layout=layout, reduction=reduction, device=device)


@each_loss_in_turn("dim", [(0,), (-1,), (0, 1)])
def test_dimensions(own: Function, dim: tuple[int, ...], device: str) -> None:
    properties.agrees_with_truth(own, own.loss, dim=dim, reduction="sum", device=device)


@each_loss_in_turn("dtype", ["int64", "uint8", "bool"])
def test_integer_targets(own: Function, dtype: str, device: str) -> None:
    """Operands that are defined by name alone accept labels, except the first one, which is the prediction."""
    properties.agrees_with_truth(own, own.loss, dtypes=("float32", dtype), device=device)
    with pytest.raises(TypeError, match=rf"^{own.loss.name}: `{own.loss.operands[0].name}` must have one of"):
        own(*[torch.ones(3, dtype=getattr(torch, dtype), device=device)] * 2)


@each_loss_in_turn("weighted", [("array", True), ("array", False), ("number", True)])
def test_weights_and_masks(own: Function, weighted: tuple[str, bool], device: str) -> None:
    weight, mask = weighted
    loss = modified(own.loss, weight=weight, mask=mask)
    case = {"weight": 1.5} if weight == "number" else {}
    for reduction in short_or_full(("none", "weighted_mean"), ("none", "mean", "weighted_mean")):
        properties.agrees_with_truth(own, loss, case=case, reduction=reduction, device=device, shape=(33, 20))


@each_loss_in_turn(
    "holds",
    [
        properties.propagates_nan,
        properties.reduces_consistently,
        properties.differentiates_operands_alone_and_together,
        properties.reads_any_upstream_gradient,
        properties.repeats_bit_by_bit,
        properties.writes_one_gradient_in_one_pass_or_two,
        properties.is_differentiable,
    ],
)
def test_properties(own: Function, holds: Callable[..., None], device: str) -> None:
    holds(own, own.loss, device=device)


@pytest.mark.parametrize(
    "own",
    # The loss with its own derivatives: the library's losses test the chain rule.
    short_or_full([tukey], list(OWN.values())),
)
def test_second_derivatives(own: Function, device: str) -> None:
    properties.is_differentiable(own, own.loss, second=True, device=device)


def test_a_check_finds_the_function_of_a_loss() -> None:
    assert all(function_for(x.loss).loss is x.loss for x in OWN.values())
    assert function_for(F.mse_loss.loss) is F.mse_loss
    assert function_for(modified(F.mse_loss.loss, weight="array")) is F.mse_loss
    assert function_for(modified(tukey.loss, mask=True)).loss is tukey.loss
    other = dataclasses.replace(F.mse_loss.loss, value="abs(input - target)")
    assert function_for(other).loss is other


def changed(spec: Mapping[str, Any], **changes: Any) -> Function:
    """The loss of these arguments of ``define_loss``, with changes."""
    return define_loss(**{**spec, **changes})


@pytest.mark.programs
@pytest.mark.kernels
@pytest.mark.parametrize(
    "derivatives",
    [
        {"input": "slope", "target": "slope"},
        {"input": "1.001 * slope", "target": "-slope"},
    ],
    ids=["sign", "factor"],
)
def test_a_wrong_derivative_is_caught(derivatives: dict[str, str]) -> None:
    wrong = changed(TUKEY, derivatives=derivatives)
    for reduction in ("none", "mean"):
        with pytest.raises(AssertionError):
            properties.agrees_with_truth(wrong, wrong.loss, reduction=reduction, device=KERNELS)


@pytest.mark.kernels
def test_a_derivative_replaces_the_one_of_the_chain_rule() -> None:
    """It applies even where the chain rule yields no derivative or a constant, and to its own operand only."""
    through = define_loss("through", "zero_unless_nan(input) + 3 * target", derivatives={"input": "target - input"})
    x, y = (torch.tensor(v, device=KERNELS, requires_grad=True) for v in ([1.0, 5.0, nan], [4.0, -2.0, 1.0]))
    for reduction in ("none", "sum"):
        value = through(x, y, reduction=reduction)
        gradients = torch.autograd.grad(value.sum(), (x, y))
        assert torch.equal(gradients[0][:2], torch.tensor([3.0, -7.0], device=KERNELS))
        assert torch.equal(gradients[1][:2], torch.tensor([3.0, 3.0], device=KERNELS))
        assert gradients[0][2].isnan() and gradients[1][2].isnan()
        (alone,) = torch.autograd.grad(through(x.detach(), y, reduction=reduction).sum(), y)
        assert torch.equal(alone[:2], gradients[1][:2])
    constant = define_loss("constant", "input * target", derivatives={"input": "2", "target": "input < target"})
    gradients = torch.autograd.grad(constant(x[:2], y[:2], weight=torch.tensor([1.0, 10.0], device=KERNELS)), (x, y))
    assert [g.tolist()[:2] for g in gradients] == [[1.0, 10.0], [0.5, 0.0]]


@pytest.mark.kernels
def test_constants() -> None:
    """Constants are computed in float64, each from earlier ones, and rounded once; parts use them like parameters."""
    made = define_loss(
        "made",
        "part * input",
        operands=("input",),
        parameters={"alpha": 0.5},
        constants={"rest": "1 - alpha", "third": "1 / 3 * rest", "sure": "(alpha < 1) * true"},
        let={"part": "third * sure"},
    )
    x = torch.ones(3, device=KERNELS, requires_grad=True)
    for alpha in (0.99, 1 - 1e-9):  # 1 - alpha is off by 1e-6 for a rounded alpha, or is 0.
        value = made(x, alpha=alpha, reduction="sum")
        (gradient,) = torch.autograd.grad(value, x)
        exact = torch.tensor((1 - alpha) / 3, device=KERNELS)
        assert torch.equal(gradient, exact.expand(3))
        assert value.item() == pytest.approx(3 * exact.item(), rel=1e-7)


# ----------------------------------------------------------------------------------------------------------------------
# Everything that a function of the library has

#: A loss without a reference: everything that needs none works.
BARE = {"name": "bare", "value": "square(input - target) * gain", "parameters": {"gain": 1.0}}
bare = define_loss(**BARE)


def drawn(*shape: int, seed: int = 0, device: str = KERNELS) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.kernels
def test_without_a_reference_kernels_do_everything() -> None:
    x, y = drawn(7, 5).requires_grad_(), drawn(5, seed=1)
    square = (x - y) ** 2
    weight, mask = drawn(7, 1, seed=2).abs(), drawn(7, 5, seed=3) > 0
    sums = (square * mask * weight).sum(0)
    for found, expected in [
        (bare(x, y), square.mean()),
        (bare(x, y, 3.0, "sum"), 3 * square.sum()),
        (bare(x, y, reduction="none"), square),
        (bare(x, y, reduction="batchmean"), square.sum() / 7),
        (bare(x, y, dim=0), square.mean(0)),
        (bare(x, y, weight=weight, mask=mask, dim=0, reduction="sum"), sums),
        (bare(x, y, weight=weight, mask=mask, dim=0, reduction="weighted_mean"), sums / (mask * weight).sum(0)),
        (bare(x, y, weight=2.0, mask=mask), 2 * (square * mask).sum() / mask.sum()),
        (bare(x, y, normalizer=10), square.sum() / 10),
        (bare(x.half(), y.half(), out_dtype=torch.float32), ((x.half().float() - y.half().float()) ** 2).mean()),
    ]:
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected)
        # The gradient of a float16 operand is rounded to float16.
        gradients = (torch.autograd.grad(v.sum(), x, retain_graph=True)[0] for v in (found, expected))
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)


@pytest.mark.kernels
def test_the_gradient_is_there_after_one_pass() -> None:
    value = bare(drawn(100).requires_grad_(), drawn(100, seed=1))
    ((_, gradients),) = value.grad_fn.speculations
    assert gradients[0] is not None


@pytest.mark.kernels
def test_value_and_grad() -> None:
    x, y = drawn(9), drawn(9, seed=1)
    value, (first, second) = cupylosses.value_and_grad(bare, x, y, argnums=("input", 1), reduction="sum", gain=2.0)
    torch.testing.assert_close(value, 2 * ((x - y) ** 2).sum())
    torch.testing.assert_close((first, second), (4 * (x - y), -4 * (x - y)))


def test_the_function_describes_itself() -> None:
    assert list(inspect.signature(tukey).parameters)[:4] == ["input", "target", "c", "reduction"]
    assert inspect.signature(tukey).parameters["c"].default == 4.0
    assert tukey.__name__ == tukey.__qualname__ == "tukey" and tukey.__module__ == __name__
    assert tukey.__doc__.startswith("The loss tukey.\n\n    c * c / 6 * where(")
    with pytest.raises(TypeError, match=r"tukey\(\) got an unexpected keyword argument 'k'"):
        tukey(torch.ones(2), torch.ones(2), k=1.0)
    with pytest.raises(TypeError, match=r"tukey\(\) got an unexpected keyword argument 'k'"):
        cupylosses.value_and_grad(tukey, torch.ones(2), torch.ones(2), k=1.0)
    documented = define_loss("d", "input", ["input"], summary="Said.", formula="i", notes="Noted.", source="S, 1900.")
    assert all(x in documented.__doc__ for x in ("Said.", "    i\n", "Noted.", "References:\n    S, 1900."))


def test_everything_that_a_definition_takes(device: str) -> None:
    """Operands with numbers and defaults, parameters with ranges, flags with choices, as in losses of the library."""
    full = define_loss(
        "full",
        "gain * where(norm == 2, square(d), where(norm == 1, abs(d), d)) / scale",
        operands=("input", Operand("target", "T.", number=True), Operand("scale", "S.", "positive", default=2.0)),
        parameters=(Parameter("gain", 1, "G.", minimum=0.0, exclusive=True),),
        flags=(Flag("norm", "square", "N.", choices=("none", "abs", "square")),),
        let={"d": "input - target"},
        reference=lambda xp, input, target, scale, gain, norm: (
            gain * {"none": lambda d: d, "abs": xp.abs, "square": xp.square}[norm](input - target) / scale
        ),
    )
    x, y = drawn(5, device=device), drawn(5, seed=1, device=device)
    torch.testing.assert_close(full(x, y), ((x - y) ** 2 / 2).mean())
    torch.testing.assert_close(full(x, 1.5, norm="abs", gain=3), (3 * (x - 1.5).abs() / 2).mean())
    torch.testing.assert_close(full(x, y, scale=x.exp(), norm="none"), ((x - y) / x.exp()).mean())
    with pytest.raises(ValueError, match=r"full: `gain` must be a number > 0, got 0\.0\."):
        full(x, y, gain=0.0)
    with pytest.raises(TypeError, match=r"full: `norm` must be 'none' or 'abs' or 'square', got 'cube'"):
        full(x, y, norm="cube")


def test_a_name_can_be_defined_again(device: str) -> None:
    """Losses of the same name do not get each other's kernels."""
    squared = changed(BARE, reference=lambda xp, input, target, gain: (input - target) ** 2 * gain)
    absolute = changed(
        BARE,
        value="abs(input - target) * gain",
        reference=lambda xp, input, target, gain: xp.abs(input - target) * gain,
    )
    x, y = drawn(40, device=device).requires_grad_(), drawn(40, seed=1, device=device)
    for function in (squared, absolute, squared):
        found, expected = function(x, y), ((x - y) ** 2 if function is squared else (x - y).abs()).mean()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(v, x) for v in (found, expected)))


def _power(xp: Any, input: Any, exponent: int) -> Any:
    return input**exponent


def test_two_threads(device: str) -> None:
    """Each thread defines losses, all of the same name, and uses them."""

    def work(seed: int) -> None:
        for exponent, value in ((1, "input"), (2, "square(input)"), (3, "input * square(input)")):
            loss = define_loss("power", value, ["input"], reference=partial(_power, exponent=exponent))
            for n in (10, 100):
                x = drawn(n, seed=seed, device=device).requires_grad_()
                loss(x, reduction="sum").backward()
                torch.testing.assert_close(x.grad, exponent * x.detach() ** (exponent - 1))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(6)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_cupy_arrays(dtype: str) -> None:
    cupy = pytest.importorskip("cupy")
    kind = getattr(torch, dtype)
    tensors = drawn(33, 65).to(kind), drawn(65, seed=1).to(kind)
    arrays = [cupy.from_dlpack(x) for x in tensors]
    options = {"argnums": (0, 1), "gain": 2.0, "mask": None}
    mask = drawn(33, 65, seed=2) > 0
    for given in ({}, {"weight": (tensors[1].abs(), cupy.abs(arrays[1]))}, {"mask": (mask, cupy.from_dlpack(mask))}):
        expected, exact = cupylosses.value_and_grad(bare, *tensors, **options | {k: v[0] for k, v in given.items()})
        value, gradients = cupylosses.value_and_grad(bare, *arrays, **options | {k: v[1] for k, v in given.items()})
        for a, b in zip((value, *gradients), (expected, *exact), strict=True):
            assert isinstance(a, cupy.ndarray) and same_bits(torch.from_dlpack(a), b)


# ----------------------------------------------------------------------------------------------------------------------
# Missing without a reference

MISSING = r"^bare: this loss was defined without a `reference`, which CPU arrays, empty operands, tensor subclasses"


def without_reference(function: Function) -> Any:
    with pytest.raises(NotImplementedError, match=MISSING) as error:
        function()
    return error


def test_arrays_on_the_cpu_need_a_reference() -> None:
    x = drawn(3, device="cpu")
    without_reference(lambda: bare(x, x))
    without_reference(lambda: bare(x.requires_grad_(), x, weight=2.0, reduction="sum"))
    without_reference(lambda: bare(numpy.ones(3), numpy.ones(3)))
    without_reference(lambda: cupylosses.value_and_grad(bare, numpy.ones(3), numpy.ones(3)))


@pytest.mark.kernels
def test_what_kernels_do_not_do_needs_a_reference() -> None:
    x = drawn(3).requires_grad_()
    y = drawn(3, seed=1)
    (first,) = torch.autograd.grad(bare(x, y), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.func.grad(bare)(x.detach(), y), first)
    assert torch.func.vmap(bare)(x.detach(), y).shape == (3,)
    torch.testing.assert_close(torch.func.jvp(lambda z: bare(z, y), (x.detach(),), (y,))[1], (first * y).sum())
    without_reference(lambda: torch.autograd.grad(second.sum(), x))
    for reduction in ("none", "sum", "mean"):
        without_reference(lambda: bare(x[:0], y[:0], reduction=reduction))  # noqa: B023
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(bare, backend="eager", fullgraph=True)(x, y), bare(x, y))


# ----------------------------------------------------------------------------------------------------------------------
# Losses of vectors


def _contrastive_reference(xp: Any, input: Any, other: Any, same: Any, margin: float, p: float) -> Any:
    distance = xp.sum(xp.abs(input - other) ** p, axis=-1) ** (1 / p)
    gap = margin - distance
    return xp.where(same > 0, distance**2, xp.where(gap < 0, xp.zeros_like(gap), gap) ** 2)


contrastive = define_statistics(
    "contrastive",
    "where(same > 0, square(distance), square(relu_active(margin - distance)))",
    statistics={},
    norms={"distance": "input - other"},
    operands=("input", "other"),
    row_operands=("same",),
    parameters=(
        Parameter("margin", 6.0, "The distance of others."),
        Parameter("p", 2.0, "Degree.", 0.0, exclusive=True),
    ),
    reference=_contrastive_reference,
    cases=({}, {"margin": 2.0, "p": 3.0}),
)

#: A loss of vectors without a reference.
spread = define_statistics(
    "spread",
    "squares / count - where(centred, square(total / count), 0)",
    statistics={"squares": "square(input - origin)", "total": "input - origin"},
    operands=("input",),
    first={"origin": "input"},
    only_with={"total": "centred"},
    flags={"centred": True},
)


@pytest.mark.parametrize(
    ("case", "dtype", "reduction"), in_turn(contrastive.loss.cases, ["float32", "bfloat16"], ["mean", "none"])
)
def test_losses_of_vectors(case: Mapping[str, Any], dtype: str, reduction: str, device: str) -> None:
    properties.agrees_with_truth(
        contrastive, contrastive.loss, case=case, dtypes=(dtype,), reduction=reduction, device=device
    )


def test_a_loss_of_vectors_describes_itself(device: str) -> None:
    x, y = drawn(5, 7, device=device), drawn(5, 7, seed=1, device=device)
    same = torch.tensor([1, 0, 1, 0, 0], device=device)
    distance = (x - y).norm(dim=-1)
    exact = torch.where(same > 0, distance**2, (3 - distance).clamp(min=0) ** 2)
    torch.testing.assert_close(module_of(contrastive)(margin=3.0)(x, y, same), exact.mean())
    value, gradient = cupylosses.value_and_grad(contrastive, x.T, y.T, same, margin=3.0, feature_dim=0, reduction="sum")
    assert gradient.shape == (7, 5)
    torch.testing.assert_close(value, exact.sum())
    assert list(inspect.signature(contrastive).parameters)[:5] == ["input", "other", "same", "margin", "p"]
    assert contrastive.__doc__.startswith("The loss contrastive.\n\n    where(same > 0")
    with pytest.raises(TypeError, match=r"^contrastive: `input` must have one of the dtypes"):
        contrastive(x.long(), y, same)


@pytest.mark.kernels
def test_losses_of_vectors_without_a_reference() -> None:
    x = (1000 + drawn(6, 40)).requires_grad_()
    exact = x.double().var(dim=-1, correction=0)
    found = spread(x, reduction="none")
    torch.testing.assert_close(found, exact.float())
    gradients = [torch.autograd.grad(v.sum(), x, create_graph=True)[0] for v in (found, exact)]
    torch.testing.assert_close(*gradients)
    moved = torch.randn(x.shape, device=x.device)
    products = [torch.autograd.grad(g, x, moved, create_graph=g is gradients[0])[0] for g in gradients]
    torch.testing.assert_close(*products)
    from_first = ((x - x[:, :1]).double() ** 2).mean()
    torch.testing.assert_close(spread(x, centred=False), from_first.float())
    missing = r"^spread: this loss was defined without a `reference`, .* and third derivatives, .* take"
    with pytest.raises(NotImplementedError, match=missing):
        torch.autograd.grad(products[0].sum(), x)
    with pytest.raises(NotImplementedError, match=missing):
        spread(x.detach().cpu().numpy())
    assert "NotImplementedError: The operands are on the CPU, or third derivatives" in spread.__doc__


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"statistics": {}}, r"expected 1 to 11 `statistics` and `norms`, got 0"),
        ({"statistics": {f"s{i}": "input" for i in range(12)}}, r"expected 1 to 11 `statistics` and `norms`, got 12"),
        ({"first": {"x": "other"}}, r"`first` names 'other' for `x`, expected one of \['input', 'target'\]"),
        ({"first": {"x": "input", "y": "input"}}, r"`first` must have one name for each operand"),
        ({"only_with": {"s": "centred"}}, r"`only_with` must name a flag .* got 'centred' for 's'"),
        ({"operands": (), "row_operands": ("label",)}, r"expected an operand with features"),
        ({"row_operands": ("count",)}, r"the name 'count' is taken by every loss"),
        ({"value": "sum / count"}, r"value, .*: the name `sum` is unknown"),
        ({"statistics": {"s": "input * label"}, "row_operands": ("label",)}, r"s, .*: the name `label` is unknown"),
    ],
)
def test_losses_of_vectors_that_are_refused(fields: Mapping[str, Any], message: str) -> None:
    with pytest.raises((ValueError, ExpressionError), match=rf"^wrong: {message}"):
        define_statistics(**{"name": "wrong", "value": "s / count", "statistics": {"s": "input"}, **fields})
    with pytest.raises(TypeError, match=r"^define_statistics: the `operands` of wrong must be a sequence"):
        define_statistics("wrong", "s", {"s": "input"}, "input")


def test_a_reference_returns_a_value_for_each_row() -> None:
    whole = define_statistics("whole", "s", {"s": "input"}, ("input",), reference=lambda xp, input: xp.sum(input))
    with pytest.raises(ValueError, match=r"^whole: `reference` must return one value per row, of shape \(3,\), got an"):
        whole(torch.ones(3, 2))


# ----------------------------------------------------------------------------------------------------------------------
# Invalid expressions


def refused(value: str, **changes: Any) -> str:
    """The message of the definition's error, without the location at its start."""
    with pytest.raises(ExpressionError) as error:
        define_loss("wrong", value, **changes)
    return re.fullmatch(r"wrong: [\w.]+, [^:]+:\d+: (.*)", str(error.value), re.DOTALL)[1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "the expression is empty; there are input, target."),
        (" \n\t ", "the expression is empty; there are input, target."),
        ("inptu - target", "the name `inptu` is unknown; did you mean `input`?"),
        ("zzz", "the name `zzz` is unknown; there are input, target, true, false."),
        ("sqaure(input)", "the function `sqaure` is unknown; did you mean `square`?"),
        ("qqqqqq(input)", "the function `qqqqqq` is unknown; there are square, abs, exp"),
        ("input(2)", "`input` is no function; an operator is missing before the parenthesis."),
        ("square", "`square` is a function: `square(x)`."),
        ("square + 1", "`square` is a function: `square(x)`."),
        ("square(input, target)", "`square(x)` takes 1 argument, got 2."),
        ("square()", "`square(x)` takes 1 argument, got 0."),
        ("where(input < 1, 0)", "`where(condition, a, b)` takes 3 arguments, got 2."),
        ("where(input < 1, square(input, 2), 0)", "`square(x)` takes 1 argument, got 2."),
        ("(input - target", "the parentheses do not match: this one is not closed."),
        ("square(input - target", "the parentheses do not match: this one is not closed."),
        ("input - target)", "the parentheses do not match: this one closes none."),
        ("input) - (target", "the parentheses do not match: this one closes none."),
        (")input(", "something is missing before `)`."),
        ("()", "something is missing between `(` and `)`."),
        ("input - ()", "something is missing between `(` and `)`."),
        ("input target", "an operator is missing before `target`."),
        ("2input", "an operator is missing before `input`."),
        ("2 3", "an operator is missing before `3`."),
        ("1.5f", "the name `f` is unknown; there are"),
        ("0x10", "the name `x10` is unknown; there are"),
        ("(input)(target)", "an operator is missing before `(`."),
        ("input !target", "an operator is missing before `!`."),
        ("input.5", "an operator is missing before `.5`."),
        ("input -", "something is missing after `-`."),
        ("* input", "something is missing before `*`."),
        ("+input", "something is missing before `+`."),
        ("input + * target", "something is missing between `+` and `*`."),
        ("input // target", "something is missing between `/` and `/`."),
        ("input /* target */", "something is missing between `/` and `*`."),
        ("input << 2", "something is missing between `<` and `<`."),
        ("input->target", "something is missing between `-` and `>`."),
        ("input++", "something is missing between `+` and `+`."),
        ("input--", "something is missing after `-`."),
        ("input, target", "a comma separates the arguments of a call, and stands nowhere else."),
        ("square((input, target))", "a comma separates the arguments of a call, and stands nowhere else."),
        ("square(input,)", "something is missing between `,` and `)`."),
        ("0 < input < 1", "comparisons do not chain; write `a < b && b < c`."),
        ("input == target != 1", "comparisons do not chain; write `a < b && b < c`."),
        ("input + 1 < target * 2 == true", "comparisons do not chain; write `a < b && b < c`."),
        ("1e999", "`1e999` is beyond the largest number, 1.8e308."),
        ("input ** 2", "`**` cannot stand in an expression; write square(x), or a product."),
        ("input ^ 2", "`^` cannot stand in an expression; write square(x), or a product."),
        ("input < 0 ? 1 : 2", "`?` cannot stand in an expression; write where(condition, a, b)."),
        ("1 if input else 2", "`if` cannot stand in an expression; write where(condition, a, b)."),
        ("max(input, 0)", "`max` cannot stand in an expression; write where(a > b, a, b)."),
        ("input < 0 and target < 0", "`and` cannot stand in an expression; write &&."),
        ("input < 0 & target < 0", "`&` cannot stand in an expression; write &&."),
        ("not input < 0", "`not` cannot stand in an expression; write !."),
        ("True", "`True` cannot stand in an expression; write true."),
        ("x = input", "the name `x` is unknown; there are"),
        ("input = target", "`=` cannot stand in an expression; write ==, or a name in `let`."),
        ("input += target", "`=` cannot stand in an expression; write ==, or a name in `let`."),
    ],
)
def test_wrong_expressions(value: str, message: str) -> None:
    assert refused(value).startswith(message)


@pytest.mark.parametrize("character", [*";{}\"'#[]@$%~`:\\.^?=&|\0\v\f\x1b\xa0\xe9\u2028\u0663\u2212"], ids=ascii)
def test_characters_that_no_expression_has(character: str) -> None:
    for value in (f"input {character} target", f"input - {character}", character, f"square(input{character})"):
        shown = character if character.isprintable() else ascii(character)[1:-1]
        assert refused(value).startswith(f"`{shown}` cannot stand in an expression")


def test_errors_show_the_line() -> None:
    message = refused("square(input)\n    - abs(inptu)\n    + 1")
    assert message == "the name `inptu` is unknown; did you mean `input`?\n    - abs(inptu)\n          ^^^^^"


@pytest.mark.parametrize("part", ["value", "d", "c", "derivatives.input"])
def test_errors_name_the_part(part: str) -> None:
    fields: dict[str, Any] = {"constants": {"c": "oops" if part == "c" else "1"}}
    fields["value"] = "oops" if part == "value" else "d"
    fields["let"] = {"d": "oops" if part == "d" else "input"}
    fields["derivatives"] = {"input": "oops" if part == "derivatives.input" else "d"}
    with pytest.raises(ExpressionError, match=rf"^wrong: {re.escape(part)}, .*: the name `oops` is unknown"):
        define_loss("wrong", **fields)


def test_parts_see_those_before_them() -> None:
    with pytest.raises(ExpressionError, match=r"^wrong: a, .*the name `b` is unknown"):
        define_loss("wrong", "b", let={"a": "b", "b": "input"})
    with pytest.raises(ExpressionError, match=r"^wrong: a, .*the name `a` is unknown"):
        define_loss("wrong", "a", let={"a": "a + input"})
    assert define_loss("right", "b", let={"a": "input", "b": "a"}).loss.let == {"a": "input", "b": "a"}
    for unseen in ("input", "a"):
        with pytest.raises(ExpressionError, match=rf"^wrong: c, .*the name `{unseen}` is unknown"):
            define_loss("wrong", "a", let={"a": "input"}, constants={"c": unseen})
    with pytest.raises(ExpressionError, match=r"^wrong: c, .*`abs` cannot be called here: a constant is arithmetic"):
        define_loss("wrong", "c", parameters={"p": 1.0}, constants={"c": "abs(p)"})


def test_expressions_are_strings() -> None:
    for fields, part in [({"value": 3}, "value"), ({"value": "d", "let": {"d": None}}, "d")]:
        with pytest.raises(TypeError, match=rf"^wrong: {part}: an expression is a string, got "):
            define_loss("wrong", **fields)


VALID = {
    "input": [2.0, -3.0, 0.5],
    " ( input ) ": [2.0, -3.0, 0.5],
    "input--target": [3.0, -1.0, 0.5],
    "input - - - target": [1.0, -5.0, 0.5],
    "-input": [-2.0, 3.0, -0.5],
    "1 / 2": [0.5, 0.5, 0.5],
    ".5 + 1. + 1e0 + 2.5E-1": [2.75, 2.75, 2.75],
    "input\r\n\t+ target": [3.0, -1.0, 0.5],
    "input < target": [0.0, 1.0, 0.0],
    "!(input < target) * 2": [2.0, 0.0, 2.0],
    "where(input < target && !(0 < input) || input == 2, 1, 0)": [1.0, 1.0, 0.0],
    "where(true, input, target)": [2.0, -3.0, 0.5],
    "where((input > 0) == (target > 0), square(input), abs(target))": [4.0, 2.0, 0.0],
    "7": [7.0, 7.0, 7.0],
}


@pytest.mark.kernels
@pytest.mark.parametrize("value", VALID)
def test_valid_expressions(value: str) -> None:
    x, y = (torch.tensor(v, device=KERNELS, requires_grad=True) for v in ([2.0, -3.0, 0.5], [1.0, 2.0, 0.0]))
    found = formulas.function(define_loss("valid", value).loss)(input=x, target=y, reduction="none")
    assert found.tolist() == VALID[value]
    found.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.kernels
def test_a_weight_and_what_it_weighs_may_depend_on_one_operand() -> None:
    cube = define_loss("cube", "weighted(input, square(input))", operands=("input",))
    x = torch.tensor([2.0, -3.0, 0.0, inf], device=KERNELS, requires_grad=True)
    assert cube(x, reduction="none").tolist() == [8, -27, 0, inf]
    (gradient,) = torch.autograd.grad(cube(x, reduction="sum"), x)
    assert gradient.tolist() == [12, 27, 0, inf]


# ----------------------------------------------------------------------------------------------------------------------
# Locations of mistakes

HEAD = "from cupylosses import define_loss\n"

#: Programs with a mistake at the word MISTAKE.
PLACES = {
    "one line": """
wrong = define_loss("wrong", "square(input) - MISTAKE")
""",
    "several lines": """
wrong = define_loss(
    "wrong",
    "square(d) - MISTAKE",
    let={"d": "input"},
)
""",
    "let": """
wrong = define_loss(
    "wrong",
    "square(d)",
    let={
        "d": "input - MISTAKE",
    },
)
""",
    "constant": """
wrong = define_loss(
    "wrong",
    "input * c",
    parameters={"p": 1.0},
    constants={
        "c": "p - MISTAKE",
    },
)
""",
    "derivative": """
wrong = define_loss(
    "wrong", "input",
    derivatives={"input": "MISTAKE"},
)
""",
    "triple-quoted": '''
wrong = define_loss("wrong", """square(
    input
) - MISTAKE
""")
''',
    "triple-quoted, blank lines": '''
wrong = define_loss("wrong", """

    square(
    input) - MISTAKE""")
''',
    "triple-quoted, backslash": '''
wrong = define_loss("wrong", """\\
square(
    input
) - MISTAKE""")
''',
    "dedented": '''
import textwrap
wrong = define_loss("wrong", textwrap.dedent("""
  square(
    input) -
  MISTAKE"""))
''',
    "stripped": '''
wrong = define_loss("wrong", """

  input -
  MISTAKE
""".strip())
''',
    "variable": """
VALUE = "input - MISTAKE"


def make():
    return define_loss("wrong", VALUE)


wrong = make()
""",
    "variable over lines": '''
VALUE = """
  input
  - MISTAKE
"""

wrong = define_loss("wrong", VALUE)
''',
    "the same elsewhere": """
text = "input - MIS" "TAKE"
right = define_loss("right", "d", let={"d": "input"})
wrong = define_loss(
    "wrong",
    "d",
    let={
        # "input - MIS" "TAKE"
        "d": "input - MISTAKE",
    },
)
text = "input - MIS" "TAKE"
""",
}

#: A mistake that only a compiler finds: a number where a condition belongs.
NO_CONDITION = "where(target, 1, input)"

#: The expression does not occur in the file, so the line of the call is reported.
COMPUTED = """
n = 2

wrong = define_loss(  # CALL
    "wrong",
    f"input - {n} - MIS" + "TAKE",
)
"""


def filled(place: str, mistake: str) -> str:
    """The program with this mistake.

    Where the mistake must not be found, its halves are written as two adjacent string literals.
    """
    half = len(mistake) // 2
    program = PLACES[place].replace("MISTAKE", mistake)
    return HEAD + program.replace('MIS" "TAKE', f'{mistake[:half]}" "{mistake[half:]}')


def line_of(program: str, word: str) -> int:
    return next(i for i, line in enumerate(program.splitlines(), 1) if word in line)


def imported(path: Path, program: str) -> ModuleType:
    """Writes the program to a file and imports it as a module."""
    path.write_text(program, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("users_module", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("place", PLACES)
def test_errors_are_reported_at_the_users_line(place: str, tmp_path: Path) -> None:
    program = filled(place, "inptu")
    expected = f"{tmp_path}/losses.py:{line_of(program, 'inptu')}: the name `inptu` is unknown"
    with pytest.raises(ExpressionError, match=re.escape(expected)):
        imported(tmp_path / "losses.py", program)


def test_errors_in_computed_expressions_are_reported_at_the_call(tmp_path: Path) -> None:
    program = HEAD + COMPUTED
    with pytest.raises(ExpressionError, match=re.escape(f"{tmp_path}/losses.py:{line_of(program, 'CALL')}: ")):
        imported(tmp_path / "losses.py", program)


@pytest.mark.parametrize("file", ["<string>", "<stdin>", "<ipython-input-1-0>", "/no/such/file.py", 'a\nb".py', ""])
def test_errors_without_a_file(file: str) -> None:
    """In executed and typed code, errors name the line of the call, and the file as Python names it."""
    program = HEAD + 'wrong = define_loss(\n    "wrong",\n    "inptu",\n)\n'
    with pytest.raises(ExpressionError) as error:
        exec(compile(program, file, "exec"), {})
    assert str(error.value).startswith(f"wrong: value, {file}:2: the name `inptu` is unknown")


def test_errors_in_what_is_not_python(tmp_path: Path) -> None:
    """Python cannot parse, for example, a notebook cell with magics."""
    path = tmp_path / "cell.py"
    path.write_text("%matplotlib inline\n")
    with pytest.raises(ExpressionError, match=r"cell\.py:2: the name"):
        exec(compile(HEAD + 'define_loss("wrong", "inptu")', str(path), "exec"), {})


def one_kernel(loss: Loss, kind: str = "elements") -> str:
    return next(x for x in variants(loss, fast=True) if x.kind == kind).source()


@needs_nvrtc
@pytest.mark.parametrize("place", ["let", "derivative", "triple-quoted, backslash", "variable over lines"])
def test_what_the_compiler_finds_is_at_the_users_line(place: str, tmp_path: Path) -> None:
    program = filled(place, NO_CONDITION)
    wrong = imported(tmp_path / "losses.py", program).wrong
    expected = re.escape(f"{tmp_path}/losses.py({line_of(program, NO_CONDITION)}): error")
    with pytest.raises(CompileError, match=expected):
        Nvrtc().compile(one_kernel(wrong.loss), "compute_80")


@pytest.mark.kernels
@pytest.mark.skipif(GPU, reason="the other compiler's messages are looked at")
def test_what_the_hosts_compiler_finds_is_at_the_users_line(tmp_path: Path) -> None:
    program = filled("derivative", NO_CONDITION)
    wrong = imported(tmp_path / "losses.py", program).wrong
    expected = re.escape(f"{tmp_path}/losses.py:{line_of(program, NO_CONDITION)}:") + r"\d+: error"
    x = drawn(3).requires_grad_()
    with pytest.raises(HostCompileError, match=expected):
        wrong(x, x, reduction="none").sum().backward()


@pytest.mark.gpu
def test_a_kernel_that_does_not_compile_says_so_at_the_users_line(kernel_cache: Path, tmp_path: Path) -> None:
    program = filled("triple-quoted", NO_CONDITION)
    wrong = imported(tmp_path / "losses.py", program).wrong
    with pytest.raises(
        cupylosses.KernelError, match=re.escape(f"{tmp_path}/losses.py({line_of(program, NO_CONDITION)})")
    ):
        wrong(drawn(3), drawn(3))


# ----------------------------------------------------------------------------------------------------------------------
# Names

#: Identifiers of the kernels and of the generated code.
WORDS = """
x T a b ab a_b aB A_B x1 x_1 T0 InputT value count elements divisor memory program layout scale sums partials chunks
outputs kept reduced slices length deposit expected_grad_output used_grad_output grad_output multiple sinks sources
Loss Layout Result Sources Sinks Element Compute Tuple Dual Source Sink Absent Access Pointwise kWarp kValue kMask
kMaxOperands get load store lift constant chain has variable with_derivative make_tuple widen int64 half_t x_gradients
verify_gradient grad_scale_is_stale reduce_value_and x_slope slope
""".split()  # noqa: SIM905

#: Identifiers of CUDA, of C libraries, of compilers and of Python that are not reserved.
OTHERS = """
min max fabs expf sin pow tanh sqrt warpSize float4 printf clock std linux unix INFINITY NAN EOF errno signbit isnan
major minor typeof I main type match prepare evaluate print float32 xp torch loss count_weight inf nan e pi d
gradient_input_of kStream
""".split()  # noqa: SIM905


def chunks(names: Sequence[str]) -> list[list[str]]:
    return [list(names[i : i + MAX_OWN_OPERANDS]) for i in range(0, len(names), MAX_OWN_OPERANDS)]


def naming(role: str, names: Sequence[str]) -> Function:
    """A loss that uses the names in a role, such as that of operands."""
    total = " + ".join(f"{i} * {x}" for i, x in enumerate(names, 1))
    number = len(names) * (len(names) + 1) / 2
    if role == "operands":
        reference = lambda xp, *arrays: sum(i * x for i, x in enumerate(arrays, 1))  # noqa: E731
        return define_loss("naming", total, names, reference=reference)
    fields: dict[str, Any] = {
        "parameters": {"parameters": dict.fromkeys(names, 1.0)},
        "flags": {"flags": dict.fromkeys(names, True)},
        "let": {"let": dict.fromkeys(names, "1")},
    }[role]
    reference = lambda xp, in_place, other, /, **_: number * in_place + other  # noqa: E731
    return define_loss("naming", f"({total}) * in_place + other", ["in_place", "other"], reference=reference, **fields)


#: Names as operands need many kernels: every fourth one is compiled. In other roles, one kernel has all names.
ROLES = [
    *(pytest.param("operands", x, id=f"operands-{x[0]}") for x in chunks(WORDS)[:: short_or_full(4, 1)]),
    *(pytest.param(role, WORDS + OTHERS, id=role) for role in ("parameters", "flags", "let")),
]


@needs_nvrtc
@pytest.mark.parametrize(
    ("role", "names", "kind"), [(*x.values, kind) for x, kind in in_turn(ROLES, ["elements", "broadcast_gradient"])]
)
def test_names_of_all_kinds_compile(role: str, names: list[str], kind: str) -> None:
    Nvrtc().compile(one_kernel(naming(role, names).loss, kind), "compute_80")


@pytest.mark.kernels
@pytest.mark.parametrize(("role", "names"), short_or_full([ROLES[0], *ROLES[-3:]], ROLES))
def test_names_of_all_kinds_work(role: str, names: list[str]) -> None:
    function = naming(role, names)
    properties.agrees_with_truth(function, function.loss, device=KERNELS)


def test_entry_points_name_each_argument_once() -> None:
    """Names in a definition may equal names that the generator derives from others."""
    words = [x for x in WORDS if x not in ("x", "verify")]
    for operands in (["x", "x_gradients", "verify", "verify_gradient"], *chunks(words)):
        loss = define_loss("n", " + ".join(operands), operands, {f"p_{x}": 1.0 for x in operands}).loss
        for variant in variants(loss, fast=True):
            (signature,) = re.findall(rf"\n{variant.entry}\((.*)\) {{\n", variant.source())
            arguments = [x.split()[-1] for x in re.sub("<.*?>", "", signature).split(", ")]
            assert len(set(arguments)) == len(arguments)


REFUSED = {
    "must be an identifier of Python and of C": [
        *("lambda", "class", "None", "True", "if", "and", "int", "float", "double", "auto", "template", "this", "true"),
        *("const", "xor", "and_eq", "static_cast", "char16_t", "thread_local", "co_await", "asm", "NULL", "threadIdx"),
        *("", "2x", "a-b", "a b", "x;", "x)", "x,y", "*", "*x", "x=1", "a\nb", "x\\", "x()", "x[0]", "x.y", "x/**/"),
        *("\xe9", 'x"', 3, None),
        *("x){} asm(", "x, *y", "x: 1", "x=__import__('os')", "\uff58"),
    ],
    "must not begin or end with an underscore": ["_x", "x_", "a__b", "_", "__x__", "_loss", "_defaults", "__class__"],
    "is taken by every loss": sorted(RESERVED),
    "is that of a primitive": ["abs", "exp", "log", "square", "where", "weighted", "relu_active"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"), [pytest.param(x, m, id=ascii(x)) for m, names in REFUSED.items() for x in names]
)
def test_names_that_are_refused(name: Any, message: str) -> None:
    """Names of operands, parameters, flags and parts are checked before anything is compiled or executed."""
    for fields in (
        {"operands": [name]},
        {"operands": ["z", Operand(name, "")]},
        {"parameters": {name: 1.0}},
        {"flags": {name: True}},
        {"let": {name: "1"}},
    ):
        with pytest.raises(ValueError, match=rf"^wrong: the name {re.escape(repr(name))} {message}"):
            define_loss("wrong", "1", **fields)


@pytest.mark.parametrize("name", ["", "a b", "x;", "lambda", "_x", "x__y", "a-b", "ü", "x(y):\n  pass\ndef z", 3])
def test_names_of_losses_that_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"the name {name!r} must ")):
        define_loss(name, "input")


@reference_and_kernels(
    "name",
    ["loss", "input", "prepare", "compiled", "print", "mse_loss", "int8", "Loss", "T"],
    kernels=[("input",), ("Loss",), ("T",)],
)
def test_names_of_losses(name: str, device: str) -> None:
    function = define_loss(name, "square(input - target)", reference=lambda xp, input, target: (input - target) ** 2)
    assert function.__name__ == name
    properties.agrees_with_truth(function, function.loss, device=device)


# ----------------------------------------------------------------------------------------------------------------------
# Nothing but the expression is executed


class Hostile(float):
    """A number whose ``repr`` is code."""

    def __repr__(self) -> str:
        return "1 / 0"


@pytest.mark.parametrize("default", [inf, -inf, 1e307, 5e-324, -0.0, 3, numpy.float32(1.5), Hostile(2.0)], ids=str)
def test_defaults_are_numbers_and_no_text(default: Any, device: str) -> None:
    loss = define_loss(
        "scaled", "input * gain", ["input"], {"gain": default}, reference=lambda xp, input, gain: input * gain
    )
    assert inspect.signature(loss).parameters["gain"].default is default
    x = torch.ones(3, dtype=torch.float64, device=device)
    assert loss(x).item() == float(default) and loss(x, gain=2).item() == 2.0
    assert repr(module_of(loss)()) == f"ScaledLoss(gain={default!r})"
    assert module_of(loss)()(x).item() == float(default)


@pytest.mark.parametrize("default", [nan, "1", None, True, 1j, [1.0]], ids=repr)
def test_defaults_that_are_no_numbers(default: Any) -> None:
    with pytest.raises(ValueError, match=r"^wrong: the default of `p` must be a number, not NaN, got "):
        define_loss("wrong", "input * p", parameters={"p": default})


@pytest.mark.parametrize("default", [1, 0, "yes", None, numpy.True_], ids=repr)
def test_flags_that_are_no_bools(default: Any) -> None:
    with pytest.raises(ValueError, match=r"^wrong: the default of `f` must be one of \(False, True\), got "):
        define_loss("wrong", "where(f, input, 0)", flags={"f": default})


def test_parameters_are_numbers(device: str) -> None:
    loss = define_loss("scaled", "input * gain", ["input"], {"gain": 1.0}, reference=lambda xp, x, gain: x * gain)
    x = torch.ones(3, dtype=torch.float64, device=device)
    for value in (inf, -inf, 1e307, 10**300, 5e-324, -0.0):
        assert loss(x, gain=value).item() == float(value)
        assert loss(x, weight=value).item() == float(value)
    with pytest.raises(ValueError, match=r"^scaled: `gain` must be a number, not NaN, got nan"):
        loss(x, gain=nan)
    for options in ({"gain": 10**400}, {"weight": -(10**400)}, {"normalizer": 10**400}):
        with pytest.raises(ValueError, match=rf"^scaled: `{next(iter(options))}` must be a number up to 1\.8e308"):
            loss(x, **options)
    for value in ("1", "1); asm(", None, [1.0]):
        with pytest.raises(TypeError, match=r"^scaled: `gain` must be a number, not NaN, got "):
            loss(x, gain=value)


FILES = [
    *('a"b.cu', "a\\b.py", "\n", "a??/", 'C:\\new"\\table.py', "ü é.py", "\x00", "\udcff"),
    'x"\n#error injected\n#line 1 "y',
]


@needs_nvrtc
@pytest.mark.parametrize("file", short_or_full(FILES[:3] + FILES[-1:], FILES), ids=ascii)
def test_file_names_are_names(file: str) -> None:
    """A file name stays within its `#line` directive, and is readable in messages."""
    fields = {"name": "n", "summary": "", "formula": "", "operands": (Operand("x", ""),), "let": {"d": "x"}}
    right = Loss(**fields, value="d", places={"value": (file, 7), "d": (file, 0)})
    text = one_kernel(right)
    assert len(text.splitlines()) == len(one_kernel(Loss(**fields, value="d")).splitlines())
    Nvrtc().compile(text, "compute_80")
    wrong = Loss(**fields, value="where(d, 1, x)", places={"value": (file, 7)})
    with pytest.raises(CompileError, match=r"\(7\): error: no instance of overloaded function") as error:
        Nvrtc().compile(one_kernel(wrong), "compute_80")
    assert "injected\n" not in str(error.value)


def test_the_compiler_gets_what_was_checked() -> None:
    assert cuda("1 / 2 - --x * 1e3 + .5") == "1.0 / 2.0 - - -x * 1e3 + .5"
    assert cuda("where(a <\r\n b, 10, 0.1)") == "where(a < \n b, 10.0, 0.1)"
    for value, part in product(["square(input)\n - 1", "0"], ["value", "d"]):
        loss = define_loss("n", value if part == "value" else "d", let={"d": value if part == "d" else "1"}).loss
        lines = one_kernel(loss).split(f"#line {loss.places[part][1]} ")
        assert any(cuda(value) in x for x in lines[1:])
