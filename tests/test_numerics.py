"""Points where torch's losses lose digits, overflow, or become NaN: the loss and its gradient there.

The expected numbers are exact limits, or were computed with 40 digits. Each point is checked on the reference path and
on the kernels' formula, which is compiled on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, inf, isnan, log, nan, pi
from typing import Any

import mpmath
import numpy
import pytest
import torch
from devices import KERNELS
from grids import reference_and_kernels
from tools import accuracy, exact, formulas

import cupylosses.functional as F
from cupylosses.reference_math import log_factorial, stirling_remainder
from cupylosses.testing.truth import runs_kernels

pytestmark = pytest.mark.plain

#: Accepted error of a finite result other than 0, in epsilons.
EPSILONS = 4

FLOATS = pytest.mark.parametrize("dtype", ["float32", "float64"])


def at(name: str, device: str, dtype: str, operands: Sequence[float], **options: Any) -> tuple[float, ...]:
    """The loss of one element, then its derivative with respect to each operand."""
    function = getattr(F, name)
    names = [x.name for x in function.loss.operands]
    tensors = [torch.tensor([x], dtype=getattr(torch, dtype), device=device, requires_grad=True) for x in operands]
    if runs_kernels(tensors[0]):
        function = formulas.function(function.loss)
    value = function(**dict(zip(names, tensors, strict=False)), reduction="none", **options)
    return value.item(), *(x.item() for x in torch.autograd.grad(value, tensors))


def check(
    name: str, device: str, dtype: str, operands: Sequence[float], expected: Sequence[float], **options: Any
) -> None:
    """Checks the loss at a point, and as many of its derivatives as ``expected`` lists."""
    found = at(name, device, dtype, operands, **options)[: len(expected)]
    error = EPSILONS * torch.finfo(getattr(torch, dtype)).eps
    for a, b in zip(found, expected, strict=True):
        exact = b in (0, inf, -inf) or isnan(b)
        right = a == b or (isnan(a) and isnan(b)) if exact else abs(a - b) <= error * abs(b)
        assert right, f"{name}{tuple(operands)}: {found}, not {tuple(expected)}"


# ----------------------------------------------------------------------------------------------------------------------
# binary_cross_entropy


@FLOATS
@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        # Perfect predictions: the derivative is not 0, unlike torch's.
        ((0.0, 0.0), (0.0, 1.0, 100.0)),
        ((1.0, 1.0), (0.0, -1.0, -100.0)),
        # Wrong predictions: logarithm and derivatives are bounded, including the label's, which is infinite in torch.
        ((0.0, 1.0), (100.0, -1e12, 100.0)),
        ((1.0, 0.0), (100.0, 1e12, -100.0)),
        # Tiny probabilities: torch returns 1e-18 where the derivative is 1, because it divides by p (1 - p).
        ((2.0**-100, 0.0), (7.888609052210118e-31, 1.0, 69.31471805599453)),
        ((2.0**-100, 1.0), (69.31471805599453, -1e12, 69.31471805599453)),
        ((2.0**-30, 0.0), (9.313225750491594e-10, 1.0000000009313226, 20.794415415867036)),
        ((2.0**-30, 1.0), (20.79441541679836, -(2.0**30), 20.794415415867036)),
        ((1 - 2.0**-24, 1.0), (5.960464655174753e-08, -1.0000000596046483)),
        ((0.5, 0.25), (log(2), 1.0, 0.0)),
        # Not a probability: torch raises, ends the CUDA context or, if compiled, returns a negative loss.
        *[(x, (nan, nan, nan)) for x in ((1.5, 1.0), (-0.5, 0.0), (0.5, 2.0), (0.5, -1.0), (nan, 0.0), (0.5, nan))],
    ],
)
def test_bce(operands: Sequence[float], expected: Sequence[float], dtype: str, device: str) -> None:
    check("binary_cross_entropy", device, dtype, operands, expected)


def test_bce_is_no_negative_zero(device: str) -> None:
    right = torch.tensor([0.0, 1.0], device=device)
    assert not F.binary_cross_entropy(right, right, reduction="none").signbit().any()


def test_bce_gradient_in_half_is_scaled_before_it_is_rounded(device: str) -> None:
    """torch's gradient is -inf in float16, whatever it is multiplied by."""
    probability = torch.zeros(1, dtype=torch.float16, device=device, requires_grad=True)
    loss = F.binary_cross_entropy(probability, torch.ones_like(probability), reduction="none")
    loss.backward(torch.full_like(loss, 2.0**-24))
    assert probability.grad is not None and probability.grad.item() == -59616.0  # 1e12 / 2^24 in float16


@reference_and_kernels(
    "name, dtype",
    ["binary_cross_entropy", "binary_cross_entropy_with_logits"],
    ["bool", "uint8", "int64", "bfloat16", "float64"],
)
def test_labels_of_any_dtype(name: str, dtype: str, device: str) -> None:
    """torch raises for integers and bools, and returns its loss of logits in the dtype of a narrow label."""
    prediction = torch.tensor([0.25, 0.75, 0.5], device=device)
    label = torch.tensor([0.0, 1.0, 1.0], device=device)
    found = getattr(F, name)(prediction, label.to(getattr(torch, dtype)))
    torch.testing.assert_close(found.float(), getattr(F, name)(prediction, label))
    assert found.dtype == (torch.float64 if dtype == "float64" else torch.float32)


# ----------------------------------------------------------------------------------------------------------------------
# Logits

LOGITS = [
    # Confident and right: torch's derivative is 0.
    ((17.0, 1.0), (4.139937633089748e-08, -4.1399375473943306e-08, -17.0)),
    ((-17.0, 0.0), (4.139937633089748e-08, 4.1399375473943306e-08, 17.0)),
    ((80.0, 1.0), (1.8048513878454153e-35, -1.8048513878454153e-35, -80.0)),
    ((1e4, 0.0), (1e4, 1.0, -1e4)),
    ((-1e4, 1.0), (1e4, -1.0, 1e4)),
    ((3e38, 0.0), (3e38, 1.0, -3e38)),
    ((0.0, 0.5), (log(2), 0.0, 0.0)),
    ((3.0, 2.0), (-2.951412648426258, -1.0474258731775667, -3.0)),
    # Infinite logits: torch returns NaN in four of these cases.
    ((inf, 0.0), (inf, 1.0, -inf)),
    ((inf, 0.5), (inf, 0.5, -inf)),
    ((inf, 1.0), (0.0, 0.0, 0.0)),
    ((-inf, 0.0), (0.0, 0.0, 0.0)),
    ((-inf, 0.5), (inf, -0.5, inf)),
    ((-inf, 1.0), (inf, -1.0, inf)),
    ((nan, 1.0), (nan, nan, nan)),
    ((1.0, nan), (nan, nan, nan)),
]


@FLOATS
@pytest.mark.parametrize("name", ["binary_cross_entropy_with_logits", "multilabel_soft_margin_loss"])
@pytest.mark.parametrize(("operands", "expected"), LOGITS)
def test_logits(name: str, operands: Sequence[float], expected: Sequence[float], dtype: str, device: str) -> None:
    check(name, device, dtype, operands, expected)


@FLOATS
@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        (
            (17.0, 1.0, 3.0),
            (1.241981289926924e-07, -1.2419812642182992e-07, -16.999999917201247, 4.139937633089748e-08),
        ),
        ((-2.0, 0.25, 3.0), (1.6903920165644588, -0.5711956169668236, 6.253856022085945, 0.5317320027607432)),
        ((2.0, 1.0, 0.0), (0.0, 0.0, -2.1269280110429727, 0.1269280110429725)),
        ((inf, 1.0, 3.0), (0.0, 0.0, 0.0, 0.0)),
        ((-inf, 1.0, 0.0), (0.0, 0.0, 0.0, 0.0)),
        ((-inf, 1.0, 3.0), (inf, -3.0, inf, inf)),
        ((1.0, 0.0, inf), (nan, nan, nan, nan)),
        ((1.0, 0.0, nan), (nan, nan, nan, nan)),
    ],
)
def test_weight_of_the_label_1(operands: Sequence[float], expected: Sequence[float], dtype: str, device: str) -> None:
    check("binary_cross_entropy_with_logits", device, dtype, operands, expected)


@pytest.mark.parametrize(("logit", "label"), [(10.0, 1.0), (-10.0, 0.0)])
def test_confident_logits_in_half(logit: float, label: float, device: str) -> None:
    """In float16, torch returns 0 for either the value or the gradient of each."""
    value, slope, _ = at("binary_cross_entropy_with_logits", device, "float16", (logit, label))
    assert value == abs(slope) == torch.tensor(4.54e-5, dtype=torch.float16).item()


def test_multilabel_takes_labels_of_bool(device: str) -> None:
    logits, labels = torch.randn(4, 3, device=device), torch.rand(4, 3, device=device) > 0.5
    expected = torch.nn.functional.multilabel_soft_margin_loss(logits, labels.float(), reduction="none")
    torch.testing.assert_close(F.multilabel_soft_margin_loss(logits, labels, reduction="none"), expected)


@FLOATS
@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        # torch overflows from 89 on, in float16 from 12, and has a NaN gradient.
        ((-89.0, 1.0), (89.0, -1.0, 89.0)),
        ((3e38, -1.0), (3e38, 1.0, -3e38)),
        ((-inf, 1.0), (inf, -1.0, inf)),
        ((inf, -1.0), (inf, 1.0, -inf)),
        ((inf, 1.0), (0.0, 0.0, 0.0)),
        ((-inf, -1.0), (0.0, 0.0, 0.0)),
        ((17.0, 1.0), (4.139937633089748e-08, -4.1399375473943306e-08)),
        ((2.0, 2.0**-40), (log(2) - 2.0**-40, -(2.0**-41) * (1 - 2.0**-40), 2.0**-40 - 1)),
        ((2.0, 0.0), (nan, nan, nan)),
        ((nan, 1.0), (nan, nan, nan)),
    ],
)
def test_soft_margin(operands: Sequence[float], expected: Sequence[float], dtype: str, device: str) -> None:
    check("soft_margin_loss", device, dtype, operands, expected)


def test_soft_margin_in_half(device: str) -> None:
    assert at("soft_margin_loss", device, "float16", (-12.0, 1.0)) == (12.0, -1.0, 12.0)


# ----------------------------------------------------------------------------------------------------------------------
# Margins


@FLOATS
@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        ((1.0, -1.0), (0.0, -1.0, 0.0)),
        ((2.0, -1.0), (0.0, 0.0, 0.0)),
        ((0.25, 1.0), (0.25, 1.0, 0.0)),
        ((inf, -1.0), (0.0, 0.0, 0.0)),
        ((-inf, 1.0), (-inf, 1.0, 0.0)),
        # Every label but 0 has a sign. For 0, torch adds both branches; for NaN, torch's gradient is 1.
        ((0.25, 2.0**-40), (0.25, 1.0, 0.0)),
        ((0.25, -(2.0**-40)), (0.75, -1.0, 0.0)),
        ((0.25, 0.0), (nan, nan, nan)),
        ((nan, 1.0), (nan, nan, nan)),
        ((nan, -1.0), (nan, nan, nan)),
    ],
)
def test_hinge_embedding(operands: Sequence[float], expected: Sequence[float], dtype: str, device: str) -> None:
    check("hinge_embedding_loss", device, dtype, operands, expected)


@FLOATS
@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        ((1.0, 1.0, 1.0), (0.0, -1.0, 1.0, 0.0)),
        ((1.5, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0)),
        ((1.5, 1.0, -1.0), (0.5, 1.0, -1.0, -0.5)),
        ((inf, 0.0, 1.0), (0.0, 0.0, 0.0, 0.0)),
        ((0.0, inf, 1.0), (inf, -1.0, 1.0, inf)),
        # Here torch's gradients are finite.
        ((nan, 0.0, 1.0), (nan, nan, nan, nan)),
        ((inf, inf, 1.0), (nan, nan, nan, nan)),
    ],
)
def test_margin_ranking(operands: Sequence[float], expected: Sequence[float], dtype: str, device: str) -> None:
    check("margin_ranking_loss", device, dtype, operands, expected)


# ----------------------------------------------------------------------------------------------------------------------
# Likelihoods


@FLOATS
@pytest.mark.parametrize(
    ("operands", "full", "expected"),
    [
        ((0.0, 2.0), False, (1.0, -1.0, 0.0)),
        # A rate of 0 and a count of 0: NaN in torch.
        ((-inf, 0.0), False, (0.0, 0.0, 0.0)),
        ((-inf, 1.0), False, (inf, -1.0, inf)),
        ((inf, 0.0), False, (inf, inf, 0.0)),
        ((nan, 0.0), False, (nan, nan, nan)),
        ((0.0, nan), False, (nan, nan, nan)),
        # Stirling's formula, for the counts for which torch uses it; at 0, torch's derivative for the count is NaN.
        ((-1.0, 0.0), True, (0.36787944117144233, 0.36787944117144233, 1.0)),
        ((0.0, 0.5), True, (1.0, 0.5, 0.0)),
        ((0.0, 1.0), True, (1.0, 0.0, 0.0)),
        ((0.0, 2.0), True, (1.651806484604536, -1.0, 0.9431471805599453)),
        ((3.0, 20.0), True, (2.416987064249156,)),
        # The exact term, which torch lacks, with the digamma function as derivative.
        ((-1.0, 0.0), "exact", (0.36787944117144233, 0.36787944117144233, 0.42278433509846713)),
        ((0.0, 0.5), "exact", (0.8792177623647548, 0.5)),
        ((0.0, 1.0), "exact", (1.0, 0.0, 0.42278433509846713)),
        ((0.0, 2.0), "exact", (1.6931471805599454, -1.0, 0.9227843350984671)),
        ((0.0, 5.0), "exact", (5.787491742782046, -4.0, 1.7061176684318005)),
        ((3.0, 20.0), "exact", (2.421153383941153,)),
        ((0.0, -1.0), "exact", (nan, nan, nan)),
        ((0.0, inf), "exact", (nan, nan, nan)),
    ],
)
def test_poisson(operands: Sequence[float], full: Any, expected: Sequence[float], dtype: str, device: str) -> None:
    check("poisson_nll_loss", device, dtype, operands, expected, full=full)


@FLOATS
@pytest.mark.parametrize(
    ("operands", "full", "expected"),
    [
        ((0.0, 1.0), False, (18.420680743952367, -99999999.0, 18.420680743952367)),
        ((0.0, 1.0), "exact", (18.420680743952367, -99999999.0)),
        # A negative rate has no likelihood, whatever the count, as in torch.
        ((-1.0, 0.0), False, (nan, nan, nan)),
        ((-1.0, 2.0), True, (nan, nan, nan)),
        ((-1.0, 2.0), "exact", (nan, nan, nan)),
        ((nan, 0.0), False, (nan, nan, nan)),
    ],
)
def test_poisson_of_rates(
    operands: Sequence[float], full: Any, expected: Sequence[float], dtype: str, device: str
) -> None:
    check("poisson_nll_loss", device, dtype, operands, expected, log_input=False, full=full)


@FLOATS
@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        # A rate of 0 and a count of 0: NaN in torch.
        ((0.0, 0.0), (0.0, 1.0, 0.0)),
        ((0.0, 1.0), (inf, -inf, inf)),
        ((2.0, 0.0), (2.0, 1.0, -log(2))),
        ((inf, 0.0), (inf, 1.0, 0.0)),
    ],
)
def test_poisson_of_rates_as_they_are(
    operands: Sequence[float], expected: Sequence[float], dtype: str, device: str
) -> None:
    check("poisson_nll_loss", device, dtype, operands, expected, log_input=False, eps=0.0)


def test_poisson_rate_of_0_in_half(device: str) -> None:
    """torch adds 1e-8 in float16, where it rounds to 0."""
    assert at("poisson_nll_loss", device, "float16", (0.0, 1.0), log_input=False)[0] == 18.421875


@pytest.mark.parametrize("log_input", [True, False])
def test_poisson_keeps_its_digits_where_the_prediction_is_good(log_input: bool, device: str) -> None:
    """Terms of 10^7 cancel to about 8, a remainder that torch loses in float32."""
    count = torch.tensor([1e6], dtype=torch.float32, device=device)
    rate = count * (1 + torch.linspace(-1e-3, 1e-3, 101, device=device))
    rate = rate.log() if log_input else rate
    for full in (True, "exact"):
        found = F.poisson_nll_loss(rate, count, log_input=log_input, full=full, reduction="none", eps=0.0)
        exact = F.poisson_nll_loss(
            rate.cpu().double(), count.cpu().double(), log_input=log_input, full=full, reduction="none", eps=0.0
        )
        # A rounding error of the rate changes the loss by a relative 1e-5.
        torch.testing.assert_close(found.cpu().double(), exact, rtol=2e-4, atol=0)


def test_log_factorial_is_log_gamma() -> None:
    t = numpy.array([0.0, 1e-300, 1e-16, 1e-8, 0.001, 0.1, 0.5, 0.9])
    with mpmath.workdps(330):
        exact = [float(mpmath.loggamma(1 + mpmath.mpf(x))) for x in t]
    numpy.testing.assert_allclose(log_factorial(numpy, t), exact, rtol=1e-13)


def test_stirling_remainder_is_what_log_gamma_leaves() -> None:
    t = numpy.array([1.0, 1.5, 3.0, 10.0, 50.0, 1e5])
    with mpmath.workdps(40):
        wide = [mpmath.mpf(x) for x in t]
        formula = [x * mpmath.log(x) - x + mpmath.log(2 * mpmath.pi * x) / 2 for x in wide]
        exact = [float(mpmath.loggamma(1 + x) - y) for x, y in zip(wide, formula, strict=True)]
    numpy.testing.assert_allclose(stirling_remainder(numpy, t), exact, rtol=0, atol=2e-15)


@FLOATS
@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        # Too small a variance: the value at eps, and the derivatives there, as in torch.
        ((1.0, 0.0, 0.0), (499993.092244721, 1e6, -1e6, -499999500000.0)),
        ((0.0, 0.0, 0.0), (-6.907755278982137, 0.0, 0.0, 5e5)),
        ((0.0, 0.0, inf), (inf, 0.0, 0.0, 0.0)),
        # torch checks every variance on the host, and raises.
        ((1.0, 0.0, -1.0), (nan, nan, nan, nan)),
        ((1.0, 0.0, nan), (nan, nan, nan, nan)),
        ((nan, 0.0, 1.0), (nan, nan, nan, nan)),
        ((inf, 0.0, 1.0), (inf, inf, -inf, -inf)),
    ],
)
def test_gaussian(operands: Sequence[float], expected: Sequence[float], dtype: str, device: str) -> None:
    check("gaussian_nll_loss", device, dtype, operands, expected)


@FLOATS
def test_gaussian_below_a_variance_of_1(dtype: str, device: str) -> None:
    check("gaussian_nll_loss", device, dtype, (0.5, 0.0, 0.0), (0.125, 0.5, -0.5, 0.375), eps=1.0)
    check("gaussian_nll_loss", device, dtype, (1.0, 1.0, 1.0), (log(2 * pi) / 2, 0.0, 0.0, 0.5), full=True)


def test_gaussian_does_not_overflow_on_the_way(device: str) -> None:
    """torch squares first, which overflows to inf."""
    assert at("gaussian_nll_loss", device, "float32", (2.0**100, 0.0, 2.0**100))[0] == 2.0**99


@pytest.mark.parametrize("variance", [2, 2.0, torch.tensor([2, 2]), torch.tensor([True, True])], ids=repr)
def test_gaussian_takes_variances_of_any_kind(variance: Any, device: str) -> None:
    mean, target = torch.tensor([1.0, 2.0], device=device), torch.zeros(2, device=device)
    given = variance.to(device) if isinstance(variance, torch.Tensor) else variance
    expected = torch.nn.functional.gaussian_nll_loss(
        mean, target, torch.as_tensor(given, device=device).float() + target
    )
    torch.testing.assert_close(F.gaussian_nll_loss(mean, target, given), expected)


def test_gaussian_in_half(device: str) -> None:
    """torch divides by 1e-6 in float16, so the quotient overflows to inf."""
    mean = torch.tensor([1.0], dtype=torch.float16, device=device)
    zero = torch.zeros_like(mean)
    assert F.gaussian_nll_loss(mean, zero, zero, reduction="sum", out_dtype="float32").item() == pytest.approx(499993.1)


# ----------------------------------------------------------------------------------------------------------------------
# quantile_loss


def test_constants_are_rounded_once(device: str) -> None:
    """Computed from a rounded quantile, 1 - quantile would be off by 25 units in the last place."""
    check("quantile_loss", device, "float32", (1.0, 0.0), (0.01, 0.01, -0.01), quantile=0.99)


# ----------------------------------------------------------------------------------------------------------------------
# Losses that torch lacks


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + mpmath.exp(-x))


def _of_label(x: Any, y: Any) -> Any:
    """The probability of a label of 0 or 1."""
    return _sigmoid(x) if y else _sigmoid(-x)


def _half_squares(*points: float) -> list[tuple[float, float]]:
    return [(x, 0.0) for x in points] + [(1.0 + 2.0**-20, 1.0)]


#: By name: the published formula, and interior points, each with two operands; some operands nearly cancel.
INTERIOR: dict[str, tuple[Any, list[tuple[float, float]]]] = {
    "squared_hinge_loss": (lambda x, y: max(1 - x * y, 0) ** 2, [(0.5, 1.0), (0.5, -1.0), (1 - 2.0**-20, 1.0)]),
    "logistic_loss": (lambda x, y: mpmath.log(1 + mpmath.exp(-x * y)), [(0.5, -1.0), (-80.0, 1.0), (80.0, 1.0)]),
    "exponential_loss": (lambda x, y: mpmath.exp(-x * y), [(0.5, -1.0), (2.0**-20, 1.0)]),
    "log_cosh_loss": (lambda x, y: mpmath.log(mpmath.cosh(x - y)), _half_squares(2.0**-16, 0.5, -3.0, 2.0**40)),
    "charbonnier_loss": (lambda x, y: mpmath.sqrt((x - y) ** 2 + 1) - 1, _half_squares(2.0**-16, -3.0, 2.0**100)),
    "cauchy_loss": (lambda x, y: mpmath.log(1 + (x - y) ** 2 / 2), _half_squares(2.0**-16, -3.0, 2.0**100)),
    "welsch_loss": (lambda x, y: 1 - mpmath.exp(-((x - y) ** 2) / 2), _half_squares(2.0**-16, -3.0, 0.5)),
    "geman_mcclure_loss": (lambda x, y: 2 * (x - y) ** 2 / ((x - y) ** 2 + 4), _half_squares(2.0**-16, -3.0, 2.0**20)),
    "wing_loss": (
        lambda x, y: 5 * mpmath.log(1 + abs(x - y) * 2) if abs(x - y) < 5 else abs(x - y) - 5 + 5 * mpmath.log(11),
        [(2.0**-16, 0.0), (-3.0, 0.0), (7.0, 1.0)],
    ),
    "quantile_loss": (lambda x, y: max((y - x) / 2, (x - y) / 2), [(3.0, 1.0), (-3.0, 1.0)]),
    "sigmoid_focal_loss": (
        lambda x, y: (
            -(mpmath.mpf(1) / 4 if y else mpmath.mpf(3) / 4) * (1 - _of_label(x, y)) ** 2 * mpmath.log(_of_label(x, y))
        ),
        [(0.5, 1.0), (-4.0, 1.0), (4.0, 1.0), (-4.0, 0.0)],
    ),
    "poly1_loss": (
        lambda x, y: -mpmath.log(_of_label(x, y)) + 2 * (1 - _of_label(x, y)),
        [(0.5, 1.0), (-4.0, 1.0), (20.0, 1.0), (0.5, 0.0)],
    ),
    "generalized_cross_entropy": (
        lambda x, y: (1 - _of_label(x, y) ** mpmath.mpf(0.7)) / mpmath.mpf(0.7),
        [(0.5, 1.0), (-4.0, 1.0), (20.0, 1.0), (0.5, 0.0)],
    ),
    "generalized_kl_div": (
        lambda x, y: y * mpmath.log(y / x) - y + x,
        [(0.5, 2.0), (1.0, 1 + 2.0**-20), (2.0**-100, 1.0), (2.0**100, 1.0)],
    ),
    "itakura_saito_loss": (
        lambda x, y: y / x - mpmath.log(y / x) - 1,
        [(0.5, 2.0), (1.0, 1 + 2.0**-20), (2.0**-40, 1.0), (2.0**40, 1.0)],
    ),
    "tv_distance": (lambda x, y: abs(x - y) / 2, [(0.25, 0.75), (0.75, 0.25)]),
    "msle_loss": (
        lambda x, y: (mpmath.log(1 + x) - mpmath.log(1 + y)) ** 2,
        [(3.0, 0.5), (2.0**-20, 2.0**-21), (1 + 2.0**-20, 1.0), (2.0**100, 1.0)],
    ),
    "mape_loss": (lambda x, y: 100 * abs(x - y) / abs(y), [(3.0, -4.0), (0.5, 2.0**40), (1 + 2.0**-20, 1.0)]),
}


@FLOATS
@pytest.mark.parametrize("name", INTERIOR)
def test_interior(name: str, dtype: str, device: str) -> None:
    formula, points = INTERIOR[name]
    for point in points:
        with mpmath.workdps(60):
            at_point = [mpmath.mpf(x) for x in point]
            value, slope = formula(*at_point), mpmath.diff(lambda x, y=at_point[1]: formula(x, y), at_point[0])
            check(name, device, dtype, point, (float(value), float(slope)))


@FLOATS
@pytest.mark.parametrize(
    ("name", "operands", "expected"),
    [
        ("squared_hinge_loss", (1.0, 1.0), (0.0, 0.0, 0.0)),
        ("squared_hinge_loss", (inf, 1.0), (0.0, 0.0)),
        ("squared_hinge_loss", (-inf, 1.0), (inf, -inf)),
        ("logistic_loss", (inf, 1.0), (0.0, 0.0, 0.0)),
        ("logistic_loss", (-inf, 1.0), (inf, -1.0)),
        ("exponential_loss", (inf, 1.0), (0.0, 0.0, 0.0)),
        ("exponential_loss", (2000.0, 1.0), (0.0, 0.0, 0.0)),
        ("exponential_loss", (-2000.0, 1.0), (inf, -inf)),
        ("log_cosh_loss", (-inf, 0.0), (inf, -1.0, 1.0)),
        ("charbonnier_loss", (-inf, 0.0), (inf, -1.0, 1.0)),
        ("cauchy_loss", (-inf, 0.0), (inf, 0.0, 0.0)),
        ("welsch_loss", (-inf, 0.0), (1.0, 0.0, 0.0)),
        ("geman_mcclure_loss", (-inf, 0.0), (2.0, 0.0, 0.0)),
        ("wing_loss", (0.5, 0.5), (0.0, 0.0, 0.0)),
        ("wing_loss", (-inf, 0.0), (inf, -1.0, 1.0)),
        ("quantile_loss", (0.5, 0.5), (0.0, 0.0, 0.0)),
        ("quantile_loss", (-inf, 0.0), (inf, -0.5, 0.5)),
        ("sigmoid_focal_loss", (inf, 1.0), (0.0, 0.0, 0.0)),
        ("sigmoid_focal_loss", (-inf, 1.0), (inf, -0.25)),
        ("asymmetric_loss", (inf, 1.0), (0.0, 0.0)),
        ("asymmetric_loss", (-inf, 1.0), (inf, -1.0)),
        # Probabilities up to the clip have neither value nor gradient.
        ("asymmetric_loss", (-4.0, 0.0), (0.0, 0.0)),
        ("asymmetric_loss", (-inf, 0.0), (0.0, 0.0)),
        ("poly1_loss", (inf, 1.0), (0.0, 0.0, 0.0)),
        ("poly1_loss", (-inf, 1.0), (inf, -1.0)),
        ("generalized_cross_entropy", (inf, 1.0), (0.0, 0.0)),
        ("generalized_cross_entropy", (-inf, 1.0), (1 / 0.7, 0.0)),
        ("generalized_kl_div", (0.5, 0.5), (0.0, 0.0, 0.0)),
        ("generalized_kl_div", (0.5, 0.0), (0.5, 1.0, 0.0)),
        ("generalized_kl_div", (0.0, 0.0), (0.0, 1.0, 0.0)),
        ("generalized_kl_div", (0.0, 0.5), (inf, -inf, inf)),
        ("generalized_kl_div", (-0.5, 0.5), (nan, nan, nan)),
        ("itakura_saito_loss", (0.5, 0.5), (0.0, 0.0, 0.0)),
        ("itakura_saito_loss", (0.0, 0.5), (inf, -inf)),
        ("itakura_saito_loss", (0.5, 0.0), (inf, 2.0, -inf)),
        ("itakura_saito_loss", (0.0, 0.0), (nan, nan, nan)),
        # Distributions that do not overlap.
        ("js_div", (-inf, 1.0), (0.5 * log(2), 0.0, 0.5 * log(2))),
        ("js_div", (0.0, 0.0), (0.5 * log(2), 0.5 * log(2), 0.0)),
        ("js_div", (-inf, 0.0), (0.0, 0.0, 0.0)),
        ("js_div", (0.0, 1.0), (0.0, 0.0, 0.0)),
        ("tv_distance", (0.5, 0.5), (0.0, 0.0, 0.0)),
        ("msle_loss", (0.5, 0.5), (0.0, 0.0, 0.0)),
        ("msle_loss", (-1.0, 0.0), (inf, -inf)),
        ("msle_loss", (-2.0, 0.0), (nan, nan, nan)),
        ("mape_loss", (0.0, 0.0), (0.0, 0.0, 0.0)),
        ("mape_loss", (1.0, 0.0), (1e9, 1e9)),
        ("mape_loss", (inf, 2.0), (inf, 50.0)),
    ],
)
def test_limits(name: str, operands: Sequence[float], expected: Sequence[float], dtype: str, device: str) -> None:
    check(name, device, dtype, operands, expected)


@pytest.mark.parametrize("name", [*INTERIOR, "asymmetric_loss", "js_div"])
def test_nan_is_kept(name: str, device: str) -> None:
    for operands in [(nan, 0.5), (0.5, nan), (nan, nan)]:
        assert all(isnan(x) for x in at(name, device, "float32", operands)), operands


# ----------------------------------------------------------------------------------------------------------------------
# general_robust_loss


def _general_robust(xp: Any, input: Any, target: Any, alpha: Any, scale: Any) -> Any:
    """The published formula. With enough digits, its limits and derivatives need no formulas of their own."""
    two = alpha == 2
    alpha = xp.where(two, 3, xp.where(alpha == 0, alpha + mpmath.mpf(10) ** -150, alpha))
    b = xp.where(alpha > 2, alpha - 2, 2 - alpha)
    z = ((input - target) / scale) ** 2
    return xp.where(two, z / 2, b / alpha * xp.expm1(alpha / 2 * xp.log1p(z / b)))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_general_robust(dtype: str) -> None:
    """Includes points where intermediate results of the generic tests' truth overflow or cancel."""
    published = replace(F.general_robust_loss.loss, reference=_general_robust)
    alone = formulas.function(published)
    alone.loss = published
    sweep = accuracy.Sweep(published, {}, (dtype,), KERNELS, count=300, function=alone)
    every = torch.cat(sweep.operands(), dim=1)
    operands = every[(every.double().abs() < 2.0**50).all(1) & (every[:, 3] > 2.0**-50)].split(1, dim=1)
    at = [x.flatten().double().cpu().numpy() for x in operands]
    truth = exact.evaluate(published, at, {}, digits=1000)
    assert len(at[0]) > 50
    computed = "float64" if dtype == "float64" else "float32"
    for found, figure in zip(sweep.results(operands), (truth.value, *truth.gradients), strict=True):
        error, _ = accuracy.errors(found.flatten(), exact.Figure(*map(torch.from_numpy, figure)), computed)
        worst = int(error.argmax())
        assert error[worst] <= accuracy.BAR, (error[worst], [x[worst] for x in at], found[worst], figure.high[worst])


@FLOATS
@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        ((0.5, 0.5, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0, 0.0)),
        # The named members of the family.
        ((3.0, 0.0, 2.0, 1.0), (4.5, 3.0, -3.0, 0.0, -9.0)),
        ((64.0, 0.0, 2.0, 1.0), (2048.0, 64.0, -64.0, 0.0, -4096.0)),
        ((3.0, 0.0, 1.0, 1.0), (10**0.5 - 1, 3 / 10**0.5)),
        ((3.0, 0.0, 0.0, 1.0), (log(5.5), 3 / 5.5)),
        ((3.0, 0.0, -2.0, 1.0), (18 / 13, 48 / 169)),
        ((1.0, 0.0, -inf, 1.0), (1 - exp(-0.5), exp(-0.5), -exp(-0.5), 0.0, -exp(-0.5))),
        ((1.0, 0.0, inf, 1.0), (exp(0.5) - 1, exp(0.5), -exp(0.5), 0.0, -exp(0.5))),
        ((inf, 0.0, 1.0, 1.0), (nan, nan, nan, nan, nan)),
        ((1.0, 0.0, 1.0, 0.0), (nan, nan, nan, nan, nan)),
        ((1.0, 0.0, nan, 1.0), (nan, nan, nan, nan, nan)),
    ],
)
def test_general_robust_limits(operands: Sequence[float], expected: Sequence[float], dtype: str, device: str) -> None:
    check("general_robust_loss", device, dtype, operands, expected)


@pytest.mark.kernels
def test_robust_loss_in_16_bits_has_the_same_bits_whichever_gradients_are_wanted() -> None:
    """Derivatives with respect to shape and scale have code paths apart from the value and the input's derivative."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(300, generator=generator).to(KERNELS, torch.float16) * 4 for _ in range(2))
    x.requires_grad_()
    alpha = torch.linspace(-9, 9, 300, dtype=torch.float16, device=KERNELS)
    results = []
    for wanted in (False, True):
        shape = alpha.detach().requires_grad_(wanted)
        value = F.general_robust_loss(x, y, alpha=shape, reduction="none")
        results.append((value.detach(), torch.autograd.grad(value.sum(), x)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.kernels
def test_an_element_in_16_bits_has_the_same_bits_beside_edges() -> None:
    """Vectors that contain an edge are evaluated in another way than vectors without one."""
    generator = torch.Generator().manual_seed(2)
    x, t = (torch.rand(67, generator=generator).add(0.1).to(torch.bfloat16) for _ in range(2))
    edges = {
        3: (0.0, 0.5),
        8: (0.0, 0.0),
        12: (nan, 0.5),
        23: (-0.5, 0.25),
        40: (inf, 1.0),
        41: (0.5, 0.0),
        66: (0.5, -1.0),
    }

    def results(x: torch.Tensor, t: torch.Tensor, reduction: str) -> tuple[torch.Tensor, ...]:
        operands = [v.to(KERNELS).requires_grad_() for v in (x, t)]
        value = F.generalized_kl_div(*operands, reduction=reduction)
        return (value.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(value.sum(), operands)))

    usual = results(x, t, "none")
    among = [v.clone() for v in (x, t)]
    for i, values in edges.items():
        among[0][i], among[1][i] = values
    found = results(*among, "none")
    others = torch.tensor([i not in edges for i in range(67)])
    for a, b in zip(usual, found, strict=True):
        assert torch.equal(a[others], b[others])
    for i in edges:
        alone = results(among[0][i : i + 1], among[1][i : i + 1], "none")
        for a, b in zip(alone, found, strict=True):
            assert torch.equal(a.isnan(), b[i : i + 1].isnan())
            assert torch.equal(a.nan_to_num(), b[i : i + 1].nan_to_num())
    assert found[0][[12, 23, 40, 66]].isnan().all()
    assert found[0][3] == inf
    assert found[0][8] == 0
    assert found[0][41] == 0.5
    # For a sum, all elements of a vector up to its edge are evaluated again.
    for a, b in zip(results(*among, "sum")[1:], found[1:], strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
