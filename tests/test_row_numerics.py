"""Row losses at the edges of their domain: inactive rows, confident rows, infinities, NaN, labels out of range."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, isnan, log, nan
from typing import Any

import pytest
import torch
from grids import short_or_full, thorough
from torch import Tensor

import cupylosses.functional as F
from cupylosses import define_loss
from cupylosses.definition.registry import registry
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing import host
from cupylosses.testing.softmax.truth import NAMES, exact_row

pytestmark = [pytest.mark.plain, pytest.mark.formulas]

LOSSES = registry(SoftmaxLoss)
each_loss = pytest.mark.parametrize("row_loss", LOSSES.values(), ids=list(LOSSES))
of_labels = pytest.mark.parametrize(
    "row_loss", [x for x in LOSSES.values() if x.row], ids=[x for x in LOSSES if LOSSES[x].row]
)

#: Values that make any loss NaN or infinite.
BAD = {"nan": nan, "inf": inf, "-inf": -inf}


def graded(function: Callable[..., Tensor], x: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Returns the value, and the gradient of its sum."""
    leaf = x.detach().clone().requires_grad_()
    value = function(leaf, *others, **options)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def positive_zero(x: Tensor) -> bool:
    return bool((x == 0).all()) and not bool(torch.signbit(x).any())


def targets(row_loss: SoftmaxLoss, device: str, rows: int = 3, classes: int = 4) -> Tensor:
    """Returns labels if the loss takes them, else random probabilities."""
    if row_loss.row:
        return (torch.arange(rows) % classes).to(device)
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(1)).softmax(-1).to(device)


def logits(device: str, rows: int = 3, classes: int = 4) -> Tensor:
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(0)).to(device)


# ----------------------------------------------------------------------------------------------------------------------
# Rows that do not count


@each_loss
@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("reduction", short_or_full(["none", "mean"], ["none", "mean", "sum"]))
def test_masked_rows_count_for_nothing(row_loss: SoftmaxLoss, what: str, reduction: str, device: str) -> None:
    """A masked row has no effect, whatever its logits and target hold, even on second derivatives. The kernels of these
    are tested in test_row_second.py.
    """
    function, x, y = getattr(F, row_loss.name), logits(device), targets(row_loss, device)
    mask = torch.tensor([True, False, True], device=device)
    expected = graded(function, x[mask], y[mask], reduction=reduction)
    x[1] = BAD[what]
    if y.is_floating_point():
        y[1] = nan
    else:
        y[1] = 1000
    value, gradient = graded(function, x, y, reduction=reduction, mask=mask)
    torch.testing.assert_close(value[mask] if reduction == "none" else value, expected[0])
    torch.testing.assert_close(gradient[mask], expected[1])
    assert positive_zero(gradient[1]) and (reduction != "none" or positive_zero(value[1]))

    if (device == "cuda" or host.active()) and not thorough():
        return
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(leaf, y, reduction="sum", mask=mask), leaf, create_graph=True)
    if first.requires_grad:
        (second,) = torch.autograd.grad((first**2).sum(), leaf)
        assert bool(second.isfinite().all()) and positive_zero(second[1].abs())


@of_labels
@pytest.mark.parametrize("what", BAD)
def test_ignored_rows_count_for_nothing(row_loss: SoftmaxLoss, what: str, device: str) -> None:
    function, x = getattr(F, row_loss.name), logits(device)
    y = torch.tensor([0, -100, 2], device=device)
    expected = graded(function, x[[0, 2]], y[[0, 2]])
    x[1] = BAD[what]
    value, gradient = graded(function, x, y)
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(gradient[[0, 2]], expected[1])
    assert positive_zero(gradient[1])


@pytest.mark.parametrize("name", ["kl_div_with_logits", "distillation_loss"])
def test_masked_targets_have_no_gradient(name: str, device: str) -> None:
    x, y = logits(device), targets(LOSSES[name], device)
    y[1] = nan
    y.requires_grad_()
    getattr(F, name)(x, y, mask=torch.tensor([True, False, True], device=device)).backward()
    assert y.grad is not None and positive_zero(y.grad[1]) and bool(y.grad.isfinite().all())


@of_labels
def test_all_rows_ignored(row_loss: SoftmaxLoss, device: str) -> None:
    """A mean of nothing is NaN, as in torch, with zero gradients."""
    function, x, y = getattr(F, row_loss.name), logits(device), torch.full((3,), -100, device=device)
    for options, expected in (
        ({}, nan),
        ({"reduction": "sum"}, 0.0),
        ({"reduction": "batchmean"}, 0.0),
        ({"normalizer": 5.0}, 0.0),
    ):
        value, gradient = graded(function, x, y, **options)
        assert isnan(value.item()) if isnan(expected) else positive_zero(value)
        assert positive_zero(gradient)
    value, gradient = graded(function, x, y, reduction="none")
    assert positive_zero(value) and positive_zero(gradient)


@each_loss
def test_no_rows(row_loss: SoftmaxLoss, device: str) -> None:
    function, x, y = getattr(F, row_loss.name), logits(device, rows=0), targets(row_loss, device, rows=0)
    for reduction, expected in {"mean": nan, "sum": 0.0, "batchmean": nan}.items():
        value, gradient = graded(function, x, y, reduction=reduction)
        assert isnan(value.item()) if isnan(expected) else value.item() == expected
        assert gradient.shape == (0, 4)
    assert graded(function, x, y, reduction="none")[0].shape == (0,)


@of_labels
def test_labels_of_weight_zero(row_loss: SoftmaxLoss, device: str) -> None:
    """An infinite loss with weight 0 counts as 0; torch computes 0 * inf, which is NaN."""
    function, x, y = getattr(F, row_loss.name), logits(device), torch.tensor([0, 1, 2], device=device)
    x[0, 0] = -inf
    weights = {str(row_loss.weights): torch.tensor([0.0, 1.0, 2.0, 0.5], device=device)}
    value, gradient = graded(function, x, y, reduction="none", **weights)
    assert positive_zero(value[0]) and positive_zero(gradient[0].abs())
    assert bool(value.isfinite().all()) and bool(gradient.isfinite().all())
    value, gradient = graded(function, x, y, **weights)
    expected = graded(function, x[1:], y[1:], reduction="sum", **weights)[0]
    torch.testing.assert_close(value, expected / 3)


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
@pytest.mark.parametrize(("weights", "expected"), [((0.0, 1.0), nan), ((1.0, -1.0), None)], ids=["none", "cancel"])
def test_weights_of_sum_zero(name: str, weights: tuple[float, float], expected: float | None, device: str) -> None:
    x = torch.tensor([[1.0, 2.0], [0.5, -1.0]], device=device)
    y = torch.tensor([0, 0 if expected is not None else 1], device=device)
    value, gradient = graded(getattr(F, name), x, y, torch.tensor(weights, device=device))
    assert not value.isfinite().item() and positive_zero(gradient.abs())


# ----------------------------------------------------------------------------------------------------------------------
# Confident rows


def exactly(
    name: str, x: list[float], target: Any, dtype: torch.dtype, device: str, units: float, **options: Any
) -> None:
    """Asserts that value and gradient elements are right to ``units`` in the last place, however small they are."""
    given = torch.tensor([x], dtype=dtype, device=device)
    y = torch.tensor([target], device=device) if isinstance(target, int) else torch.tensor([target]).to(given)
    value, gradient = graded(getattr(F, name), given, y, reduction="sum", **options)
    scale = options.pop("logit_scale", 1.0) / options.pop("temperature", 1.0)
    expected, slope = exact_row(name, given[0].tolist(), target, scale=scale, **options)
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    for found, exact in zip([value.item(), *gradient[0].tolist()], [expected, *slope], strict=True):
        assert abs(found - exact) <= units * eps * abs(exact) + tiny, (found, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("gap", [1.0, 5.0, 17.0, 18.0, 40.0, 80.0])
@pytest.mark.parametrize(
    "options",
    [{}, {"gamma": 1.0}, {"gamma": 2.0}, {"gamma": 0.5}, {"poly": 1.0}, {"gamma": 1.5, "poly": 0.5}],
    ids=str,
)
def test_sure_rows_keep_their_digits(dtype: torch.dtype, gap: float, options: Mapping[str, float], device: str) -> None:
    """Confidently right and wrong rows, for the first and the last class. torch's loss is 0 from a gap of 17 on."""
    for label in (0, 3):
        # A power multiplies the error of its base.
        exactly("cross_entropy", [gap, 0.0, -1.5, -0.25], label, dtype, device, 64, **options)


@pytest.mark.parametrize("name", ["cross_entropy", "kl_div_with_logits"])
@pytest.mark.parametrize("gap", [5.0, 18.0, 60.0])
def test_sure_rows_against_probabilities(name: str, gap: float, device: str) -> None:
    exactly(name, [gap, 0.0, -1.5, -0.25], [1.0, 0.0, 0.0, 0.0], torch.float32, device, 64)
    exactly(name, [gap, 0.0, -1.5, -0.25], [0.0, 0.5, 0.25, 0.25], torch.float32, device, 256)


def test_the_row_of_which_torch_loses_the_loss(device: str) -> None:
    value, gradient = graded(
        F.cross_entropy, torch.tensor([[18.0, 0, 0, 0]], device=device), torch.tensor([0]).to(device)
    )
    assert value.item() == pytest.approx(4.568993716e-08, rel=1e-6)
    assert gradient[0, 0].item() == pytest.approx(-gradient[0, 1:].double().sum().item(), rel=1e-6)
    assert gradient[0, 1].item() == pytest.approx(1.522998e-08, rel=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("distance", [0.0, 1e-3, 1.0, 30.0])
def test_students_near_their_teacher(beta: float, distance: float, device: str) -> None:
    """The loss is of the order of the square of the difference, and is never negative."""
    teacher = [2.0, 0.5, -1.0, 0.25]
    student = torch.tensor(teacher) + distance * torch.tensor([1.0, -2.0, 0.5, 0.0])
    exact, slope = exact_row("distillation_loss", student.tolist(), teacher, beta=beta)
    y = torch.tensor([teacher], device=device)
    value, gradient = graded(F.distillation_loss, student[None].to(device), y, beta=beta)
    assert value.item() >= 0.0
    # The rounding error of logits is not small compared with a small difference of log-probabilities.
    lost = 2e-6 / distance if distance else 1.0
    assert value.item() == pytest.approx(exact, rel=lost + 1e-5, abs=0.0 if distance else 1e-30)
    # A confident student's gradient is a difference of terms that are larger by the ratio of the probabilities.
    scale = max(map(abs, slope)) if distance else 0.0
    atol = max(lost * scale, 2e-8) if distance > 1 else lost * scale
    torch.testing.assert_close(gradient[0].double().cpu(), torch.tensor(slope).double(), rtol=1e-5, atol=atol)


@pytest.mark.kernels
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergences_of_narrow_rows(beta: float) -> None:
    """bfloat16 results are right to the last digit: students near the teacher, equally confident, far apart, with
    impossible classes, or far from 0. The student's gradient alone takes another path than both gradients.
    """
    from devices import KERNELS

    generator = torch.Generator().manual_seed(3)
    student, teacher = torch.randn(2, 6, 300, generator=generator)
    student[1] = teacher[1] + 0.01 * student[1]
    student[2, 5] += 24.0
    teacher[2, 5] += 25.0
    student[3, 7] += 12.0
    teacher[3, 200] += 12.0
    student[4, ::4] = teacher[4, :: 4 if beta == 1.0 else 2] = -inf
    student[5] += 100.0
    exact = [x.bfloat16().double().requires_grad_() for x in (student, teacher)]
    leaves = [x.detach().bfloat16().to(KERNELS).requires_grad_() for x in exact]
    log_p, log_q = (torch.where(x.isinf(), -1e3, x.log_softmax(-1)) for x in exact)
    p, q = log_p.exp(), log_q.exp()
    if beta in (0.0, 1.0):
        wanted = p * (log_p - log_q) if beta else q * (log_q - log_p)
    else:
        log_m = torch.logaddexp(log_q + log(beta), log_p + log(1.0 - beta))
        wanted = beta * q * (log_q - log_m) + (1.0 - beta) * p * (log_p - log_m)
    value = F.distillation_loss(*leaves, beta=beta, reduction="none")
    torch.testing.assert_close(value.double().cpu(), wanted.sum(-1), rtol=2**-8, atol=0.0)
    slopes = torch.autograd.grad(wanted.sum(), exact)
    both = torch.autograd.grad(value.sum(), leaves)
    alone = torch.autograd.grad(F.distillation_loss(leaves[0], teacher.bfloat16().to(KERNELS), beta=beta), leaves[0])
    for gradient, slope in zip((*both, alone[0] * len(student)), (*slopes, slopes[0]), strict=True):
        scale = slope.abs().amax(-1, keepdim=True)
        torch.testing.assert_close(gradient.double().cpu() / scale, slope / scale, rtol=2**-7, atol=2e-4)


def test_distributions_far_apart_have_a_finite_divergence(device: str) -> None:
    """Probabilities underflow where their logarithms do not."""
    student, teacher = torch.tensor([[0.0, 300.0]], device=device), torch.tensor([[300.0, 0.0]], device=device)
    for beta in (0.0, 1.0):
        value, gradient = graded(F.distillation_loss, student, teacher, beta=beta)
        assert value.item() == pytest.approx(300.0, rel=1e-6)
        assert bool(gradient.isfinite().all())
    assert F.distillation_loss(student, teacher, beta=0.5).item() == pytest.approx(log(2.0), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_impossible_classes_cost_nothing_where_the_teacher_underflows(dtype: torch.dtype, device: str) -> None:
    """A term of 0 log(0 / 0), whose ratio is infinite."""
    student, teacher = (torch.linspace(-a, a, 40).to(device, dtype)[None] for a in (1.0, 2.0))
    student[0, 3], teacher[0, 3] = -inf, -300.0
    value, gradient = graded(F.distillation_loss, student, teacher)
    assert bool(value.isfinite()) and value.item() > 0.0
    assert bool(gradient.isfinite().all()) and gradient[0, 3].item() == 0.0


@pytest.mark.parametrize("row", [[200.0, 0.0, 0.0], [1e4, -1e4, 0.0], [3e38, 0.0, 0.0]])
def test_perfect_rows_cost_nothing(row: list[float], device: str) -> None:
    value, gradient = graded(F.cross_entropy, torch.tensor([row], device=device), torch.tensor([0]).to(device))
    assert positive_zero(value) and positive_zero(gradient.abs())
    assert positive_zero(F.nll_loss(torch.zeros(1, 3, device=device), torch.tensor([0]).to(device)))


def test_large_logits_do_not_cancel(device: str) -> None:
    x = torch.full((1, 2), 2.0**24, device=device)
    assert F.cross_entropy(x, torch.tensor([1]).to(device)).item() == pytest.approx(log(2.0), rel=1e-7)
    value, gradient = graded(
        F.cross_entropy, torch.tensor([[3e38, -3e38]], device=device), torch.tensor([1]).to(device)
    )
    assert value.item() == inf and gradient.tolist() == [[1.0, -1.0]]


# ----------------------------------------------------------------------------------------------------------------------
# Infinities and NaN


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_labels_of_probability_zero(reduction: str, device: str) -> None:
    x = torch.tensor([[-inf, 1.0, 2.0]], device=device)
    value, gradient = graded(F.cross_entropy, x, torch.tensor([0]).to(device), reduction=reduction)
    assert value.item() == inf
    torch.testing.assert_close(gradient[0], torch.tensor([-1.0, 0.26894143, 0.73105860], device=device))
    for gamma in (0.5, 2.0):
        value, again = graded(F.cross_entropy, x, torch.tensor([0]).to(device), gamma=gamma)
        assert value.item() == inf
        torch.testing.assert_close(again, gradient)


def test_classes_of_probability_zero_beside_the_label(device: str) -> None:
    x, y = torch.tensor([[0.5, -inf, 2.0]], device=device), torch.tensor([2], device=device)
    value, gradient = graded(F.cross_entropy, x, y)
    expected = graded(F.cross_entropy, x[:, [0, 2]], torch.tensor([1], device=device))
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(gradient[:, [0, 2]], expected[1])
    assert positive_zero(gradient[:, 1].abs())
    assert F.cross_entropy(x, y, label_smoothing=0.1).item() == inf
    weight = torch.tensor([1.0, 0.0, 1.0], device=device)
    assert F.cross_entropy(x, y, weight, label_smoothing=0.1).isfinite()


@pytest.mark.parametrize("name", ["cross_entropy", "kl_div_with_logits"])
def test_impossible_classes_without_mass(name: str, device: str) -> None:
    """An impossible class without mass adds 0; torch's cross entropy of probabilities is NaN."""
    x, t = torch.tensor([[0.5, -inf, 2.0]], device=device), torch.tensor([[0.25, 0.0, 0.75]], device=device)
    value, gradient = graded(getattr(F, name), x, t)
    expected = graded(getattr(F, name), x[:, [0, 2]], t[:, [0, 2]])
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(gradient[:, [0, 2]], expected[1])
    assert positive_zero(gradient[:, 1].abs())
    t[0] = torch.tensor([0.25, 0.5, 0.25])
    value, gradient = graded(getattr(F, name), x, t)
    assert value.item() == inf
    p = x.softmax(-1)
    torch.testing.assert_close(gradient, p - t)


def test_log_targets_without_mass(device: str) -> None:
    x = torch.tensor([[0.5, -inf, 2.0, 1.0]], device=device)
    t = torch.tensor([[log(0.25), -inf, -inf, log(0.75)]], device=device)
    leaf = t.clone().requires_grad_()
    value, gradient = graded(F.kl_div_with_logits, x, leaf, log_target=True)
    torch.testing.assert_close(value, F.kl_div_with_logits(x, t.exp()))
    assert bool(gradient.isfinite().all())
    (of_target,) = torch.autograd.grad(F.kl_div_with_logits(x, leaf, log_target=True), leaf)
    assert bool(of_target.isfinite().all()) and of_target[0, 1].item() == of_target[0, 2].item() == 0.0


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_classes_that_student_and_teacher_exclude(beta: float, device: str) -> None:
    x, y = torch.tensor([[0.5, -inf, 2.0]], device=device), torch.tensor([[1.5, -inf, 0.0]], device=device)
    value, gradient = graded(F.distillation_loss, x, y, beta=beta)
    expected = graded(F.distillation_loss, x[:, [0, 2]], y[:, [0, 2]], beta=beta)
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(gradient[:, [0, 2]], expected[1])
    assert positive_zero(gradient[:, 1].abs())


@each_loss
@pytest.mark.parametrize("row", [[nan, 1.0, 2.0], [inf, 1.0, 2.0], [-inf] * 3], ids=["nan", "inf", "-inf"])
def test_rows_without_a_value(row_loss: SoftmaxLoss, row: list[float], device: str) -> None:
    """NaN stays in its row, whose gradients are all NaN."""
    if not row_loss.softmax:
        pytest.skip("only the label is read")
    x = torch.stack([torch.tensor(row), torch.tensor([0.5, 1.0, 2.0])]).to(device)
    value, gradient = graded(getattr(F, row_loss.name), x, targets(row_loss, device, 2, 3), reduction="none")
    assert value.isnan().tolist() == [True, False]
    assert gradient.isnan().tolist() == [[True] * 3, [False] * 3]


@pytest.mark.parametrize("log_target", [False, True])
def test_a_row_without_a_value_at_a_class_without_mass(log_target: bool, device: str) -> None:
    """The class's own term is 0; NaN comes from the sum of exponentials."""
    x = torch.tensor([[nan, 1.0, 2.0], [0.5, 1.0, 2.0]], device=device)
    t = torch.tensor([[0.0, 0.25, 0.75]] * 2, device=device)
    given = t.log() if log_target else t
    value, gradient = graded(F.kl_div_with_logits, x, given, reduction="none", log_target=log_target)
    assert value.isnan().tolist() == [True, False]
    assert gradient.isnan().tolist() == [[True] * 3, [False] * 3]


@pytest.mark.parametrize("name", ["cross_entropy", "kl_div_with_logits", "distillation_loss"])
def test_targets_without_a_value(name: str, device: str) -> None:
    x, t = logits(device), targets(LOSSES["kl_div_with_logits"], device)
    t[1, 2] = nan
    t.requires_grad_()
    value, gradient = graded(getattr(F, name), x, t, reduction="none")
    assert value.isnan().tolist() == [False, True, False]
    assert gradient.isnan().all(-1).tolist() == [False, True, False]
    (of_target,) = torch.autograd.grad(getattr(F, name)(x, t, reduction="sum"), t)
    assert of_target.isnan().all(-1).tolist() == of_target.isnan().any(-1).tolist() == [False, True, False]


def test_only_the_label_of_log_probabilities_is_read(device: str) -> None:
    x = torch.tensor([[-1.0, nan, inf], [nan, -2.0, -inf]], device=device)
    value, gradient = graded(F.nll_loss, x, torch.tensor([0, 1], device=device))
    assert value.item() == 1.5 and gradient.tolist() == [[-0.5, 0.0, 0.0], [0.0, -0.5, 0.0]]


def test_softcap_holds_infinities(device: str) -> None:
    x = torch.tensor([[inf, 0.0, -inf]], device=device)
    value, gradient = graded(F.cross_entropy, x, torch.tensor([0]).to(device), softcap=2.0)
    expected = F.cross_entropy(torch.tensor([[2.0, 0.0, -2.0]], device=device), torch.tensor([0]).to(device))
    torch.testing.assert_close(value, expected)
    assert bool(gradient.isfinite().all()) and gradient[0, 0].item() == gradient[0, 2].item() == 0.0


# ----------------------------------------------------------------------------------------------------------------------
# Labels out of range


@of_labels
@pytest.mark.parametrize("label", [5, -1, -101, 2**40])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_labels_out_of_range(row_loss: SoftmaxLoss, label: int, reduction: str, device: str) -> None:
    """The row is NaN with a gradient of 0; the other rows are as if it were absent."""
    function, x = getattr(F, row_loss.name), logits(device, classes=5)
    y = torch.tensor([0, label, 2], device=device)
    value, gradient = graded(function, x, y, reduction=reduction, check_targets="off")
    expected = graded(function, x[[0, 2]], y[[0, 2]], reduction=reduction)
    assert value.isnan().tolist() == ([False, True, False] if reduction == "none" else True)
    torch.testing.assert_close(gradient[[0, 2]], expected[1])
    assert positive_zero(gradient[1])


def test_labels_of_every_dtype_may_be_ignored(device: str) -> None:
    x = logits(device, classes=5)
    for dtype, ignored in ((torch.uint8, 255), (torch.int8, -1), (torch.int16, -100), (torch.int32, 1000)):
        y = torch.tensor([1, ignored, 3], device=device).to(dtype)
        found = F.cross_entropy(x, y, ignore_index=ignored)
        torch.testing.assert_close(found, F.cross_entropy(x[[0, 2]], y[[0, 2]]))
    y = torch.tensor([True, False, True], device=device)
    torch.testing.assert_close(F.cross_entropy(x, y), F.cross_entropy(x, y.long()))


# ----------------------------------------------------------------------------------------------------------------------
# Dtypes, sums, and additional results


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_overflow(dtype: torch.dtype, device: str) -> None:
    """torch's mean of float16 rows is inf where their sum is, and its CPU log-softmax from 65504 equal classes on."""
    x, y = torch.zeros(5000, 20, dtype=dtype, device=device), torch.zeros(5000, dtype=torch.int64, device=device)
    log_p = torch.full((5000, 20), -20.0, dtype=dtype, device=device)
    assert F.nll_loss(log_p, y).item() == 20.0
    assert F.cross_entropy(x, y).item() == pytest.approx(log(20.0), rel=4e-3)
    wide = torch.zeros(1, 70000, dtype=dtype, device=device)
    assert F.cross_entropy(wide, y[:1]).item() == pytest.approx(log(70000.0), rel=4e-3)
    assert F.cross_entropy(wide, y[:1], out_dtype=torch.float32).item() == pytest.approx(log(70000.0), rel=1e-6)


@each_loss
def test_autocast_computes_in_float32(row_loss: SoftmaxLoss, device: str) -> None:
    x, y = logits(device).bfloat16(), targets(row_loss, device)
    y = y.bfloat16() if y.is_floating_point() else y
    with torch.autocast(device, dtype=torch.bfloat16):
        found = getattr(F, row_loss.name)(x, y)
    torch.testing.assert_close(found, getattr(F, row_loss.name)(x.float(), y.float() if y.is_floating_point() else y))
    assert found.dtype == torch.float32


@each_loss
def test_rows_do_not_depend_on_each_other(row_loss: SoftmaxLoss, device: str) -> None:
    # Kernels add the edge elements of a misaligned row separately, so this test uses rows of whole vectors.
    function, x, y = getattr(F, row_loss.name), logits(device, 7, 8), targets(row_loss, device, 7, 8)
    together = graded(function, x, y, reduction="none", class_dim=-1)
    for i in range(7):
        alone = graded(function, x[i], y[i], reduction="none", class_dim=-1)
        assert torch.equal(alone[0], together[0][i]) and torch.equal(alone[1], together[1][i])


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 5, 3, 4)])
def test_class_dimension(shape: tuple[int, ...], device: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    for dim in range(-len(shape), len(shape)):
        rows = x.movedim(dim, -1).shape[:-1]
        y = (torch.arange(rows.numel()).reshape(rows) % shape[dim]).to(device)
        found = graded(F.cross_entropy, x, y, class_dim=dim)
        moved = graded(F.cross_entropy, x.movedim(dim, 1), y)
        torch.testing.assert_close(found[0], moved[0])
        torch.testing.assert_close(found[1].movedim(dim, 1), moved[1])


def test_accuracy_and_lse(device: str) -> None:
    x = torch.tensor(
        [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 9.0], [nan, 0.0, 0.0], [5.0, 0.0, 0.0]], device=device
    )
    y = torch.tensor([0, 1, 2, 0, -100], device=device)
    result = F.cross_entropy(x.requires_grad_(), y, reduction="sum", return_lse=True, return_accuracy=True)
    assert result.accuracy.item() == 0.75 and result.accuracy.dtype == torch.float32 and result.accuracy.dim() == 0
    torch.testing.assert_close(result.lse[:3], torch.logsumexp(x[:3], -1).detach())
    assert result.lse[3].isnan() and result.lse[4].item() == 0.0 and not result.lse.requires_grad
    assert F.cross_entropy(x, y, return_lse=True).accuracy is None
    none = F.cross_entropy(x, torch.full_like(y, -100), return_accuracy=True)
    assert none.lse is None and none.accuracy.isnan()
    scaled = F.cross_entropy(x[:3], y[:3], softcap=2.0, logit_scale=3.0, return_lse=True).lse
    torch.testing.assert_close(scaled, torch.logsumexp(2 * torch.tanh(3 * x[:3] / 2), -1).detach())


def test_inplace_backward_has_the_same_gradient(device: str) -> None:
    x, y = logits(device), torch.tensor([0, 1, 2], device=device)
    expected = graded(F.cross_entropy, x, y)
    leaf = x.clone().requires_grad_()
    hidden = leaf * 1.0
    value = F.cross_entropy(hidden, y, inplace_backward=True)
    value.backward()
    torch.testing.assert_close(value.detach(), expected[0])
    torch.testing.assert_close(leaf.grad, expected[1])


def test_normalizer_replaces_the_count(device: str) -> None:
    x, y = logits(device), torch.tensor([0, -100, 2], device=device)
    total, slope = graded(F.cross_entropy, x, y, reduction="sum")
    for normalizer in (4, 4.0, torch.tensor(4, device=device), torch.tensor([4.0])):
        value, gradient = graded(F.cross_entropy, x, y, normalizer=normalizer)
        torch.testing.assert_close(value, total / 4)
        torch.testing.assert_close(gradient, slope / 4)


# ----------------------------------------------------------------------------------------------------------------------
# Transforms, computed by the formulas


@each_loss
def test_function_transforms(row_loss: SoftmaxLoss) -> None:
    """Covers ``grad``, ``jvp`` and ``vmap`` of torch.func, under which labels are not read."""
    x, y = logits("cpu", 4, 5).double(), targets(row_loss, "cpu", 4, 5)
    y = y.double() if y.is_floating_point() else y

    def function(a: Tensor) -> Tensor:
        return getattr(F, row_loss.name)(a, y, reduction="sum")

    _, expected = graded(lambda a: function(a), x)
    torch.testing.assert_close(torch.func.grad(function)(x), expected)
    along = torch.randn_like(x)
    torch.testing.assert_close(torch.func.jvp(function, (x,), (along,))[1], (expected * along).sum())
    rows = torch.func.vmap(lambda a, b: getattr(F, row_loss.name)(a, b, reduction="sum"))(x, y)
    torch.testing.assert_close(rows, getattr(F, row_loss.name)(x, y, reduction="none"))


# ----------------------------------------------------------------------------------------------------------------------
# The primitives


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_primitives(dtype: torch.dtype) -> None:
    """Tests value, gradients and second derivatives of primitives that only row expressions use."""
    from devices import KERNELS

    from cupylosses.reference_math import log_relative_entropy, power

    focused = define_loss(
        "focused_loss", "focused(nll, rest, gamma)", ["nll", "rest"], {"gamma": 2.0},
        reference=lambda xp, nll, rest, gamma: power(xp, rest, gamma) * nll,
    )  # fmt: skip
    entropy = define_loss(
        "entropy_loss", "mixed_divergence(log_q, log_p, beta, 1 - beta)", ["log_q", "log_p"], {"beta": 0.0},
        reference=lambda xp, log_q, log_p, beta: log_relative_entropy(
            xp, *((log_p, log_q) if beta else (log_q, log_p))
        ),
    )  # fmt: skip
    rest = torch.linspace(0.01, 1.0, 40, dtype=torch.float64)
    a = torch.linspace(-6.0, -0.01, 40, dtype=torch.float64)
    b = torch.cat([a[:20] + 1e-3, a[20:].flip(0)])
    trials: list[tuple[Any, Tensor, Tensor, dict[str, float]]] = [
        *((focused, -a, rest, {"gamma": g}) for g in (0.0, 0.5, 1.0, 2.0, 3.0)),
        *((entropy, a, b, {"beta": x}) for x in (0.0, 1.0)),
    ]
    tolerance = {"rtol": 3e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-12}
    for function, first, second, options in trials:
        exact = [x.to(dtype).double().requires_grad_() for x in (first, second)]
        leaves = [x.detach().to(dtype).to(KERNELS).requires_grad_() for x in exact]
        wanted = function.loss.reference(torch_namespace(), *exact, **options)
        value = function(*leaves, **options, reduction="none")
        for a, b in zip(with_derivatives(value, leaves), with_derivatives(wanted, exact), strict=True):
            torch.testing.assert_close(a.cpu().double(), b, **tolerance)


def with_derivatives(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Returns the value, its gradients, and the second derivatives along a direction."""
    first = torch.autograd.grad(value.sum(), leaves, create_graph=True, materialize_grads=True)
    along = sum((1.0 + 2.0 * i) * x.sum() for i, x in enumerate(first))
    second = torch.autograd.grad(along, leaves, materialize_grads=True)
    return [x.detach() for x in (value, *first, *second)]


def torch_namespace() -> Any:
    import array_api_compat.torch

    return array_api_compat.torch


def test_every_name_is_known() -> None:
    assert set(NAMES) == set(LOSSES)
