"""Accuracy over whole domains: the high-precision truth, the points, the metric, and the script."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from devices import KERNELS
from mpmath import mp, mpf
from tools import accuracy, exact, sweep
from tools.accuracy import Sweep
from tools.exact import Figure, Jet, xp
from tools.softmax.accuracy import CLASSES
from torch import Tensor

import cupylosses.functional as F
from cupylosses import define_loss, reference_math
from cupylosses.build import function_of
from cupylosses.definition.base import Kink, Operand
from cupylosses.definition.registry import registry
from cupylosses.engines.linear_softmax.definition import LinearSoftmaxLoss
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing import host
from cupylosses.testing.check import Check
from cupylosses.testing.pointwise.truth import truth

pytestmark = pytest.mark.plain

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"

dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])


# ----------------------------------------------------------------------------------------------------------------------
# Jets


#: By name: the mpmath function, which differentiates numerically, and the points to test.
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "abs": (abs, [-2.5, 0.75]),
    "sign": (mp.sign, [-2.5, 0.75]),
    "floor": (mp.floor, [-2.5, 0.75]),
    "ceil": (mp.ceil, [-2.5, 0.75]),
    "round": (mp.nint, [-2.25, 0.75]),
    "square": (lambda x: x**2, [-2.5, 0.75]),
    "reciprocal": (lambda x: 1 / x, [-2.5, 0.75]),
    "sqrt": (mp.sqrt, [0.75, 1e10]),
    "exp": (mp.exp, [-2.5, 0.0, 3.0]),
    "expm1": (mp.expm1, [-2.5, 1e-3, 3.0]),
    "log": (mp.log, [0.75, 1e10]),
    "log2": (lambda x: mp.log(x, 2), [0.75, 1e10]),
    "log10": (mp.log10, [0.75, 1e10]),
    "log1p": (mp.log1p, [-0.75, 1e-3, 3.0]),
    "sin": (mp.sin, [-2.5, 0.75]),
    "cos": (mp.cos, [-2.5, 0.75]),
    "sinh": (mp.sinh, [-2.5, 1e-3, 3.0]),
    "cosh": (mp.cosh, [-2.5, 0.75]),
    "tanh": (mp.tanh, [-2.5, 0.0, 30.0]),
    "atan": (mp.atan, [-2.5, 0.75]),
}


def variables(*numbers: float) -> list[numpy.ndarray]:
    """Returns a one-element array per number; each holds a jet that is a variable of its own."""
    arrays = [numpy.empty(1, dtype=object) for _ in numbers]
    for i, (array, x) in enumerate(zip(arrays, numbers, strict=True)):
        array[0] = Jet(mpf(x), {i: mpf(1)})
    return arrays


def close(a: Any, b: Any) -> bool:
    return bool(mp.almosteq(a, b, rel_eps=mpf(10) ** -20, abs_eps=mpf(10) ** -20))


@pytest.fixture(autouse=True)
def _digits() -> Any:
    with mp.workdps(50):
        yield


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_their_derivatives(name: str) -> None:
    function, points = FUNCTIONS[name]
    for x in points:
        # A composition, so that both terms of the chain rule contribute.
        y = getattr(xp, name)(variables(x)[0] * 1 + 0)[0]
        wanted = [mp.diff(function, mpf(x), n, h=mpf(10) ** -15) if n else function(mpf(x)) for n in range(3)]
        assert close(y.value, wanted[0]), x
        assert close(y.first.get(0, mpf(0)), wanted[1]) and close(y.second.get((0, 0), mpf(0)), wanted[2]), x


def test_every_function_is_tested() -> None:
    assert FUNCTIONS.keys() == exact._FUNCTIONS.keys()


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a + b * 2 - 3,
        lambda a, b: 1 - a * b,
        lambda a, b: a / b + 2 / a - b / 4,
        lambda a, b: -a / (a - b) ** 2,
        lambda a, b: a**b + a**-1.5 + 2**b,
        lambda a, b: abs(b - a) * (a * b) * (a + b),
    ],
)
def test_operators_and_their_derivatives(function: Callable[[Any, Any], Any]) -> None:
    x = 1.25, 0.375
    y = function(*variables(*x))[0]
    for orders in [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2)]:
        wanted = mp.diff(function, tuple(map(mpf, x)), orders) if any(orders) else function(*map(mpf, x))
        by = tuple(i for i, n in enumerate(orders) for _ in range(n))
        found = y.value if not by else y.first[by[0]] if len(by) == 1 else y.second.get(by, mpf(0))
        assert mp.almosteq(found, wanted, rel_eps=mpf(10) ** -12, abs_eps=mpf(10) ** -12), orders


#: Points where a derivative is defined by convention, and values at the limits of floating-point arithmetic.
@pytest.mark.parametrize(
    ("function", "numbers"),
    [
        (lambda xp, x: xp.abs(x), [0.0]),
        (lambda xp, x: xp.sign(x), [0.0]),
        (lambda xp, x: xp.sqrt(x), [0.0, -1.0, inf]),
        (lambda xp, x: xp.log(x), [0.0, -1.0, inf]),
        (lambda xp, x: xp.log1p(x), [-1.0, -2.0, inf]),
        (lambda xp, x: xp.exp(x), [1e6, -1e6, 1e300, -1e300, inf, -inf]),
        (lambda xp, x: xp.expm1(x), [-1e300, 1e300, -inf]),
        (lambda xp, x: xp.tanh(x), [1e300, -inf]),
        (lambda xp, x: 1 / x, [0.0, inf]),
        (lambda xp, x: x / x, [0.0, inf]),
        (lambda xp, x: x**2, [0.0, -3.0, inf]),
        (lambda xp, x: x**1.5, [0.0, -3.0, inf]),
        (lambda xp, x: xp.clip(x, -1.0, 2.0), [-1.0, 2.0, 3.0, -3.0, nan]),
        (lambda xp, x: xp.maximum(x, 0 * x + 1), [1.0, 2.0, 0.0]),
        (lambda xp, x: xp.minimum(2 * x, 0 * x + 1), [0.5, 2.0, 0.0, nan]),
        (lambda xp, x: xp.where(x > 0, x, 3 * x), [0.0, 2.0, nan]),
        (lambda xp, x: reference_math.with_derivative_of(xp.maximum(x, 0 * x + 1), x), [-2.0, 3.0]),
        (lambda xp, x: xp.zeros_like(x) + xp.ones_like(x) * xp.where(xp.isfinite(x), x, 2 * xp.full_like(x, 4.0)), [1]),
    ],
)
def test_limits_and_conventions_are_torchs(function: Callable[[Any, Any], Any], numbers: list[float]) -> None:
    from array_api_compat import array_namespace

    leaf = torch.tensor(numbers, dtype=torch.float64, requires_grad=True)
    wanted = function(array_namespace(leaf), leaf)
    (slope,) = torch.autograd.grad(wanted.sum(), leaf, allow_unused=True, materialize_grads=True)
    for i, x in enumerate(numbers):
        y = function(xp, variables(x)[0])[0]
        assert float(y.value) == pytest.approx(wanted[i].item(), rel=1e-15, nan_ok=True), x
        if not torch.isnan(wanted[i]):
            assert float(y.first.get(0, 0.0)) == pytest.approx(slope[i].item(), rel=1e-15, nan_ok=True), x


def test_a_missing_function_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"a reference formula calls `xp\.erfinv`, which .* does not have"):
        xp.erfinv(variables(0.5)[0])


def test_the_truth_is_that_of_torch_where_float64_will_do(loss: Loss) -> None:
    for case in loss.cases:
        check = Check(loss, case=case, reduction="none", shape=(40, 1))
        operands = check.operands()
        wanted = truth(loss, operands, check.values, "none")
        found = exact.evaluate(loss, [x.double().flatten().numpy() for x in operands], check.values, 64)
        for ours, theirs in zip((found.value, *found.gradients), (wanted.value, *wanted.gradients), strict=True):
            size = theirs.total.flatten().numpy()
            assert (abs(ours.high - theirs.exact.flatten().numpy()) <= 1e-12 * size).all()
            numpy.testing.assert_allclose(ours.size, size, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [0.0, 0.1])
def test_parameters_are_exact_and_may_be_asked(scale: float) -> None:
    def reference(xp: Any, x: Any, scale: Any) -> Any:
        return x * (scale / 3 if scale else 2.0) * (scale or 1.0) if scale != inf else x

    loss = define_loss("scaled", "x * scale", ["x"], {"scale": scale}, reference=reference).loss
    found = exact.evaluate(loss, [numpy.array([1.0])], loss.values(), 64)
    wanted = mpf(scale) ** 2 / 3 if scale else mpf(2)
    assert abs(mpf(found.value.high[0]) + mpf(found.value.low[0]) - wanted) < 1e-30


def of_one(formula: Callable[..., Any], *operands: float, digits: int = 64, **options: Any) -> exact.Exact:
    names = [Operand(f"x{i}", "A number.") for i in range(len(operands))]
    made = define_loss("formula", "x0", names, reference=formula).loss
    return exact.evaluate(made, [numpy.array([x]) for x in operands], {}, digits, **options)


def test_a_formula_may_cancel() -> None:
    naive = of_one(lambda xp, x: xp.log(1 + xp.exp(-x)), 740.0, digits=exact.DIGITS["float64"])
    assert naive.value.high[0] == pytest.approx(float(mp.exp(-740)), abs=5e-324)
    assert naive.gradients[0].high[0] == pytest.approx(-float(mp.exp(-740)), abs=5e-324)
    assert naive.value.size[0] == pytest.approx(740 * float(mp.exp(-740)), rel=1e-2)


def test_figures_have_more_digits_than_float64() -> None:
    third = of_one(lambda xp, x: x / 3, 1.0).value
    assert third.high[0] == 1 / 3 and mpf(third.high[0]) + mpf(third.low[0]) - mpf(1) / 3 < 1e-30
    assert third.low[0] != 0


def test_the_size_is_what_cancels() -> None:
    found = of_one(lambda xp, a, b: (a - b) ** 2, 3.0, 2.0)
    assert (found.value.high[0], found.value.size[0]) == (1.0, 2 * 3 + 2 * 2)
    assert (found.gradients[0].high[0], found.gradients[0].size[0]) == (2.0, 2 * 3 + 2 * 2)
    assert of_one(lambda xp, x: x + 1, 0.0).value.size[0] == 1.0


def test_what_is_detached_is_constant() -> None:
    found = of_one(lambda xp, x: xp.where(x > 0, (x * x).detach() * x, x), 3.0)
    assert (found.value.high[0], found.gradients[0].high[0]) == (27.0, 9.0)


def test_nan_has_nan_gradients() -> None:
    found = of_one(lambda xp, x: xp.abs(x) + 0 * xp.log(x), -1.0)
    assert numpy.isnan([found.value.high[0], found.gradients[0].high[0]]).all()


def test_exponentials_underflow_on_demand() -> None:
    def formula(xp: Any, x: Any) -> Any:
        return xp.where(xp.exp(x) == 0, xp.zeros_like(x), 1e30 * xp.exp(x))

    kept, lost = of_one(formula, -100.0), of_one(formula, -100.0, smallest=1e-38)
    assert kept.value.high[0] == pytest.approx(3.72e-14, rel=1e-3) and lost.value.high[0] == 0
    assert lost.gradients[0].high[0] == 0 and of_one(formula, -100.0).value == kept.value


# ----------------------------------------------------------------------------------------------------------------------
# Points


def drawn(loss: Loss, dtype: str, case: dict[str, Any] | None = None, **options: Any) -> list[Tensor]:
    return sweep.points(loss, loss.values(case), [dtype] * len(loss.operands), 1000, **options)


@dtype
def test_points_are_of_the_domain_and_repeatable(loss: Loss, dtype: str) -> None:
    for case in loss.cases:
        found = drawn(loss, dtype, case)
        assert len(found[0]) >= 500 and all(x.shape == (len(found[0]), 1) for x in found)
        assert all(torch.equal(a, b) for a, b in zip(found, drawn(loss, dtype, case), strict=True))
        others = drawn(loss, dtype, case, seed=1)
        assert any(len(a) != len(b) or not torch.equal(a, b) for a, b in zip(found, others, strict=True))
        for operand, x in zip(loss.operands, found, strict=True):
            domain = operand.domain_for(loss.values(case))
            assert x.dtype == getattr(torch, dtype) and x.isfinite().all()
            assert {
                "real": (x < 0).any() and (x > 0).any(),
                "probability": ((x >= 0) & (x <= 1)).all(),
                "log_probability": (x <= 0).all(),
                "sign": (x != 0).all(),
                "binary": True,
                "positive": (x > 0).all(),
                "nonnegative": (x >= 0).all(),
            }[domain]


@dtype
def test_points_are_everywhere(dtype: str) -> None:
    info = torch.finfo(getattr(torch, dtype))
    a, b = (x.double() for x in drawn(registry(Loss)["mse_loss"], dtype))
    assert a.abs().max() > info.max / 16 and a[a != 0].abs().min() < 16 * info.tiny
    # Points close to 1, pairs that are nearly equal, and pairs that are nearly opposite.
    assert 0 < (a.abs() - 1).abs()[a.abs() != 1].min() <= 2 * info.eps
    near = (a - b).abs() / a.abs().clamp(min=info.tiny)
    assert all(((near > 2.0**-k) & (near < 2.0 ** (2 - k))).any() for k in range(2, 8))
    assert ((a + b).abs() < a.abs() / 100).any()


def test_probabilities_are_near_0_and_1_and_each_others_logarithms() -> None:
    x, p = (y.double() for y in drawn(registry(Loss)["kl_div"], "float32"))
    assert p[p > 0].min() < 1e-30 and {0.0, 1.0} <= set(p.flatten().tolist())
    assert {1 - 2.0**-24, 1 - 2.0**-23} & set(p.flatten().tolist())
    cancels = (p.log() - x).abs() / x.abs()
    assert (cancels < 1e-2).sum() > 50 and (cancels < 1e-6).any()


def test_points_around_kinks() -> None:
    d = torch.sub(*(x.double() for x in drawn(registry(Loss)["huber_loss"], "float32"))).abs()
    assert ((d - 1).abs() < 1e-4).sum() > 20 and (d == 0).any()


def test_sums_and_differences_are_in_range() -> None:
    for name in ("bfloat16", "float32", "float64"):
        info = torch.finfo(torch.float64 if name == "float64" else torch.float32)
        a, b = (x.double() for x in drawn(registry(Loss)["l1_loss"], name))
        for x in (a, b, a - b, a + b):
            assert x[x != 0].abs().min() >= info.tiny and x.abs().max() <= info.max


# ----------------------------------------------------------------------------------------------------------------------
# The metric


def errors(result: float, truth: float, kind: torch.dtype, size: float = 0.0, low: float = 0.0) -> tuple[float, ...]:
    figure = Figure(*(torch.tensor([x], dtype=torch.float64) for x in (truth, low, max(size, abs(truth)))))
    computed = "float64" if kind == torch.float64 else "float32"
    found = accuracy.errors(torch.tensor([result], dtype=kind), figure, computed)
    return tuple(x.item() for x in found)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_errors_are_in_units_of_the_result(kind: torch.dtype) -> None:
    eps = torch.finfo(kind).eps
    assert errors(1 + 3 * eps, 1.0, kind) == (3.0, 3.0)
    assert errors(1.0, 1.0, kind, low=eps / 4) == (0.25, 0.25)
    assert errors(2.0, 1 + eps, kind) == pytest.approx((1 / eps - 1,) * 2)


def test_conditioned_errors_are_in_units_of_the_arithmetic() -> None:
    eps = torch.finfo(torch.float32).eps
    assert errors(1 + 32 * eps, 1.0, torch.float32, size=16.0) == (2.0, 32.0)
    assert errors(2.0**127 * (1 + 32 * eps), 2.0**127, torch.float32, size=2.0**131) == (2.0, 32.0)
    # Rounding to 16 bits outweighs every error of float32 arithmetic, unless the terms are far larger than the result.
    assert errors(1 + 2**-7, 1.0, torch.bfloat16, size=16.0) == (1.0, 1.0)
    assert errors(1 + 2**-7, 1.0, torch.bfloat16, size=2.0**13) == (2**-4, 1.0)


def test_what_is_out_of_range_counts_as_infinity_or_0() -> None:
    assert errors(inf, 1e39, torch.float32) == errors(inf, 1e300, torch.float32) == (0.0, 0.0)
    assert errors(inf, 65536.0, torch.float16) == (0.0, 0.0)
    assert errors(0.0, 1e-39, torch.float32) == errors(-1e-39, 1e-39, torch.float32) == (0.0, 0.0)
    assert errors(0.0, 1e-310, torch.float64) == (0.0, 0.0)
    assert errors(1e-37, 1e-39, torch.float32)[1] > 1e6
    assert errors(0.0, 4e-38, torch.float32) == (0.0, 0.0) and errors(0.0, 5e-38, torch.float32)[1] > 1e6
    assert errors(0.0, 6e-8, torch.float16) == pytest.approx((1.0, 1.0), rel=0.01)
    assert errors(-inf, 1e39, torch.float32)[0] > 1e6
    for got, wanted in ((nan, 1.0), (1.0, nan), (inf, -inf), (1.0, inf)):
        assert errors(got, wanted, torch.float32) == (inf, inf)
    assert errors(nan, nan, torch.float32) == (0.0, 0.0)


def results(function: Any, dtype: str, case: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    sweep = Sweep(function.loss, case or {}, (dtype,), KERNELS, 400, function=function, **options)
    return {x.result: x for x in sweep.measure()}


def names(found: dict[str, Any]) -> set[str]:
    return {name for name, x in found.items() if not x.ok}


POSITIVE = [Operand("input", "A number.", domain="positive"), Operand("target", "A number.", domain="positive")]

log_ratio = define_loss(
    "log_ratio", "log(input) - log(target)", POSITIVE, reference=lambda xp, a, b: xp.log(a) - xp.log(b)
)


@pytest.mark.kernels
@dtype
def test_losses_are_accurate(dtype: str) -> None:
    for name in ("mse_loss", "hinge_loss"):
        found = results(getattr(F, name), dtype)
        assert list(found) == ["value", "input", "target"] and not names(found), found
        assert found["value"].points > 300 and 0.4 < found["value"].worst.ulps < 2


@pytest.mark.programs
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_loss_that_loses_digits_is_noticed(dtype: str) -> None:
    found = results(log_ratio, dtype)
    assert names(found) == {"value"}
    x = found["value"]
    assert x.worst.ulps > 8 and x.over > 20 and x.plain > 1e3
    a, b = x.worst.operands
    assert x.worst.expected == pytest.approx(float(mp.log(mpf(a) / mpf(b))), rel=1e-15)


@pytest.mark.programs
@pytest.mark.kernels
def test_a_wrong_reference_is_noticed() -> None:
    off = define_loss("off", "square(input - target)", reference=lambda xp, a, b: (a - b) ** 2 * (1 + 1e-5))
    assert names(results(off, "float32")) == {"value", "input", "target"}


@pytest.mark.programs
@pytest.mark.kernels
def test_a_wrong_derivative_is_noticed() -> None:
    off = define_loss(
        "off",
        "square(input - target)",
        derivatives={"input": "1.00001 * (2 * (input - target))"},
        reference=lambda xp, a, b: (a - b) ** 2,
    )
    assert names(results(off, "float32")) == {"input"}


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        # The product is rounded and may land on the other side of the kink.
        ("relu_active(1 - input * target)", set()),
        ("where(input * target < 1.0001, 1 - input * target, 0.0)", {"value", "input", "target"}),
    ],
)
def test_a_point_may_be_on_the_other_side_of_a_kink_but_not_far(value: str, wrong: set[str]) -> None:
    def reference(xp: Any, a: Any, b: Any) -> Any:
        margin = 1 - a * b
        return xp.where(margin < 0, xp.zeros_like(margin), margin)

    hinge = define_loss("hinge", value, reference=reference, kinks=lambda: [Kink((1.0, 1.0), 0.0, (-1.0, -1.0))])
    assert names(results(hinge, "float32")) == wrong


@pytest.mark.kernels
def test_an_exponential_may_underflow() -> None:
    found = results(F.kl_div, "float32", {"log_target": True, "log_input": False}, seed=3)
    assert not names(found), found


@pytest.mark.kernels
def test_rows_of_one_element_are_elements() -> None:
    rows = function_of(dataclasses.replace(F.mse_loss.loss, name="rows", torch=None, mean_of_rows=True))
    assert not names(results(rows, "float32"))


# ----------------------------------------------------------------------------------------------------------------------
# Rows


def of_rows(name: str, kind: str, dtype: str, case: dict[str, Any] | None = None) -> dict[str, Any]:
    sweep = Sweep(registry(SoftmaxLoss)[name], case or {}, (dtype,), KERNELS, 24, kind=kind)
    return {x.result: x for x in sweep.measure()}


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("name", "kind", "dtype", "gradients"),
    [
        ("cross_entropy", "indices", "float32", ["input"]),
        ("softmax_focal_loss", "indices", "bfloat16", ["input"]),
        ("nll_loss", "indices", "float16", ["input"]),
        ("kl_div_with_logits", "probabilities", "float64", ["input", "target"]),
        ("distillation_loss", "logits", "float32", ["student_logits", "teacher_logits"]),
    ],
)
def test_losses_of_rows_are_accurate(name: str, kind: str, dtype: str, gradients: list[str]) -> None:
    found = of_rows(name, kind, dtype)
    assert list(found) == ["value", *gradients] and not names(found), found
    assert found["value"].points == 24 and found[gradients[0]].points == 24 * CLASSES
    assert 0 <= found["value"].worst.ulps < 2


@pytest.mark.programs
@pytest.mark.parametrize(("factor", "wrong"), [(1.0, set()), (1 + 1e-4, {"value", "input"})])
def test_a_loss_of_rows_that_is_a_little_off_is_noticed(
    factor: float, wrong: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda **k: right(**k) * factor)
    sweep = Sweep(registry(SoftmaxLoss)["cross_entropy"], {"label_smoothing": 0.1}, count=24)
    assert names({x.result: x for x in sweep.measure()}) == wrong


@pytest.mark.kernels
@pytest.mark.parametrize("i", [0, 1])
def test_losses_of_a_layer_are_as_accurate_as_those_of_the_logits(i: int) -> None:
    """Class indices in bfloat16, and class probabilities in float32."""
    loss, dtype = registry(LinearSoftmaxLoss)["linear_cross_entropy"], ("bfloat16", "float32")[i]
    found = list(Sweep.of(loss).sweeps(loss, [(dtype,)], device=KERNELS, count=24))
    assert {x.words[0] for x in found} == {"linear_cross_entropy"}
    sweep = next(x for x in found if x.kind == loss.of_logits.targets[i] and not x.case)
    measured = {x.result: x for x in sweep.measure()}
    assert list(measured) == ["value", "input", "target"][: 2 + i] and not names(measured), measured
    assert 0 < max(x.worst.ulps for x in measured.values()) < 2


# ----------------------------------------------------------------------------------------------------------------------
# The script


@pytest.fixture(scope="module")
def script() -> Any:
    """``scripts/compare.py`` as a module."""
    if not (SCRIPTS / "compare.py").is_file():
        pytest.skip("needs the checkout")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("compare")
        del sys.modules["compare"]


@pytest.fixture
def compare(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs the script with arguments; returns its status and its output."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["compare.py", "--accuracy", *arguments])
        return script.main(), capsys.readouterr().out

    return run


def test_two_losses_are_within_the_bar(compare: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    chosen = ("--loss", "l1_loss", "hinge_loss", "--dtype", "float32", "float64")
    code, printed = compare(*chosen, "--device", "cpu", "--json", str(file))
    assert code == 0 and "18 results in" in printed and printed.count("all within 4 ulp") == 1, printed
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 18 and all(r["ok"] and r["points"] > 1000 and r["ulp"] <= r["plain_ulp"] for r in rows)
    assert {r["result"] for r in rows} == {"value", "grad input", "grad target"}
    assert len([x for x in printed.splitlines() if x.startswith(("l1_loss", "hinge_loss")) and "  ok" in x]) == 18


def test_losses_of_rows_and_kernels_take_part(
    compare: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeping = importlib.import_module("comparing.accuracy")
    every = sweeping.sweeps
    monkeypatch.setattr(sweeping, "sweeps", lambda *given: [dataclasses.replace(x, count=8) for x in every(*given)])
    file = tmp_path / "rows.json"
    place = "cpu" if host.obstacle() else "host"
    before = host.counters.launches
    chosen = ("--loss", "l1_loss", "nll_loss", "--dtype", "float32", "--device", place, "--json", str(file))
    code, printed = compare(*chosen, "--csv", str(tmp_path / "rows.csv"))
    assert code == 0, printed
    found = {(r["loss"], r["result"]): r for r in json.loads(file.read_text())["rows"]}
    assert set(found) == {
        *(("l1_loss", x) for x in ("value", "grad input", "grad target")),
        *(("nll_loss", x) for x in ("value", "grad input")),
    }
    assert len(found["nll_loss", "value"]["operands"]) == CLASSES + 1
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + len(found)
    assert place == "cpu" or host.counters.launches - before >= 4


def test_what_is_over_the_bar_is_told(compare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = F.l1_loss
    monkeypatch.setattr(F, "l1_loss", lambda *operands, **options: right(*operands, **options) * (1 + 1e-6))
    code, printed = compare("--loss", "l1_loss", "--dtype", "float32", "--device", "cpu")
    assert code == 1 and "OVER" in printed and "3 are not within 4 ulp" in printed
    assert "points; at input = " in printed and ": got " in printed and ", expected " in printed


def test_a_loss_without_truth_is_a_failed_row(compare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "xp", object())
    code, printed = compare("--loss", "l1_loss", "--dtype", "float32", "--device", "cpu")
    assert code == 1 and "AttributeError: 'object' object has no attribute 'abs'" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--full",), "--accuracy has no --full"),
        (("--reduction", "mean"), "--accuracy has no --reduction"),
        (("--dtype", "float32+int64"), "--accuracy takes the dtypes float16, bfloat16, float32, float64"),
    ],
)
def test_bad_arguments_are_named(
    arguments: tuple[str, ...], words: str, compare: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        compare("--device", "cpu", *arguments)
    assert stop.value.code == 2 and words in capsys.readouterr().err
