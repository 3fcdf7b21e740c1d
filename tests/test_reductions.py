"""Reductions: their dimensions, divisors and dtypes; and arguments that cannot be reduced."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from devices import KERNELS, allocated
from grids import REPRESENTATIVES, in_turn, reference_and_kernels
from torch import Tensor

import cupylosses
import cupylosses.functional as F
from cupylosses.build import function_of
from cupylosses.definition.base import REDUCTIONS
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import samples
from cupylosses.testing.check import Check, perform
from cupylosses.testing.properties import composed
from cupylosses.testing.tolerance import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:.*broadcast")


def draw(*shape: int, device: str = "cpu", count: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random tensors that require grad, with the same numbers on every device."""
    drawn = torch.randn(count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def require_same(found: Tensor, expected: Tensor, leaves: list[Tensor], rtol: float = 1e-12) -> None:
    """Asserts that value and gradients agree."""
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0, equal_nan=True)
    upstream = torch.linspace(0.25, 2.0, expected.numel(), dtype=expected.dtype).reshape(expected.shape)
    pairs = [torch.autograd.grad(x, leaves, upstream.to(x.device), retain_graph=True) for x in (found, expected)]
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-14)


# ----------------------------------------------------------------------------------------------------------------------
# Dimensions


@pytest.mark.parametrize("reduction", ["sum", "mean", "weighted_mean"])
@pytest.mark.parametrize(
    "dim", [0, 1, 2, -1, -3, (0,), (0, 2), (2, 0), [1, -1], (0, 1, 2), (), numpy.int64(1)], ids=str
)
def test_dimensions_are_torchs(dim: Any, reduction: str) -> None:
    x, y = draw(3, 4, 5)
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (int(dim),)
    found = F.mse_loss(x, y, reduction=reduction, dim=dim)
    elements = (x - y) ** 2
    # torch's mean over no dimensions is the mean over all, and so is ours.
    expected = elements.sum(dims or (0, 1, 2)) if reduction == "sum" else elements.mean(dims)
    require_same(found, expected, [x, y])


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("layout", "dim"),
    [("contiguous", 0), ("contiguous", 1), ("transposed", 0), ("sliced", 1), ("row", 0), ("row", 1), ("column", 0)],
)
def test_dimensions_in_any_layout(layout: str, dim: int) -> None:
    outcome = perform(Check(registry(Loss)["mse_loss"], dim=(dim,), layout=layout, device=KERNELS))
    assert outcome.ok, "\n".join(outcome.problems)


@pytest.mark.kernels
@pytest.mark.parametrize("dim", [(0,), (1,), (0, 2), (1, 3), (0, 1, 2, 3)], ids=str)
def test_dimensions_among_four(dim: tuple[int, ...]) -> None:
    """One kernel reduces dimensions that alternate with kept ones, and also all dimensions."""
    x, y = draw(3, 8, 5, 16, device=KERNELS)
    require_same(F.mse_loss(x, y, dim=dim), ((x - y) ** 2).mean(dim), [x, y])


@pytest.mark.kernels
@pytest.mark.parametrize(("shape", "dim"), [((40, 3), 0), ((3, 4000), 1), ((4000, 3), 0), ((1, 7), 0), ((7, 1), 1)])
def test_few_outputs_and_few_terms(shape: tuple[int, int], dim: int) -> None:
    """Covers sums that are cut into slices, sums of a single term, and a single output."""
    x, y = draw(*shape, device=KERNELS)
    require_same(F.mse_loss(x, y, dim=dim), ((x - y) ** 2).mean(dim), [x, y])


def test_a_loss_without_dimensions(device: str) -> None:
    x, y = draw(device=device)
    for dim in ((), None):
        for reduction in ("sum", "mean", "weighted_mean"):
            require_same(F.mse_loss(x, y, dim=dim, reduction=reduction), (x - y) ** 2, [x, y])


@pytest.mark.parametrize(("shape", "dim"), [((0, 3), 0), ((3, 0), 1), ((0, 3), 1), ((0, 0), 0), ((2, 0, 3), (0, 2))])
def test_no_elements(shape: tuple[int, ...], dim: Any, device: str) -> None:
    x, y = draw(*shape, device=device)
    for reduction in ("sum", "mean"):
        value = F.mse_loss(x, y, reduction=reduction, dim=dim)
        expected = getattr(((x - y) ** 2), reduction)(dim)
        torch.testing.assert_close(value, expected, equal_nan=True)
        assert [g.shape for g in torch.autograd.grad(value.sum(), (x, y))] == [shape, shape]


def test_upstream_gradients_of_any_storage(device: str) -> None:
    """With `dim`, each output has its own grad_output, which may be contiguous, strided or expanded."""
    x, y = draw(6, 4, 8, device=device)
    found, expected = F.mse_loss(x, y, dim=1), ((x - y) ** 2).mean(1)
    (base,) = draw(8, 6, device=device, count=1)
    upstreams = {
        "contiguous": base.detach().T.contiguous(),
        "transposed": base.detach().T,
        "strided": base.detach().repeat(2, 1).T[:, ::2],
        "one number": base.detach()[:1, :1].expand(6, 8),
        "a row": base.detach()[:, 0].expand(6, 8),
    }
    for name, upstream in upstreams.items():
        pairs = [torch.autograd.grad(v, (x, y), upstream, retain_graph=True) for v in (found, expected)]
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@reference_and_kernels("weight, mask, reduction", [None, 0.5, "array"], [False, True], REDUCTIONS)
def test_elements_that_are_means_of_rows(weight: Any, mask: bool, reduction: str, device: str) -> None:
    """Without `dim`, the last dimension belongs to the element; with `dim`, it is a dimension like the others."""
    loss = replace(registry(Loss)["mse_loss"], name="rows", torch=None, mean_of_rows=True, mean_of_weights=False)
    function = function_of(loss)
    x, y = draw(6, 8, device=device)
    options: dict[str, Any] = {"weight": weight} if weight else {}
    leaves = [x, y]
    if weight == "array":
        options["weight"] = (y.detach()[0].abs() + 0.25).requires_grad_()
        leaves.append(options["weight"])
    if mask:
        options["mask"] = x.detach() > -0.5
    found = function(x, y, reduction=reduction, **options)
    assert found.shape == ((6,) if reduction == "none" else ())
    require_same(found, composed((x - y) ** 2, loss, reduction, **options), leaves)
    if reduction in ("sum", "mean"):
        along = function(x, y, reduction=reduction, dim=1, **options)
        require_same(along, composed((x - y) ** 2, loss, reduction, dim=(1,), **options), leaves)


@pytest.mark.kernels
def test_repeated_sums_have_the_same_bits() -> None:
    x, y = draw(67, 129, device=KERNELS, dtype=torch.float32)
    for dim in (0, 1):
        mask = x.detach() > 0
        values = [F.mse_loss(x, y, dim=dim, mask=mask) for _ in range(3)]
        gradients = [torch.autograd.grad(v.sum(), x)[0] for v in values]
        assert all(same_bits(v, values[0]) for v in values) and all(same_bits(g, gradients[0]) for g in gradients)


# ----------------------------------------------------------------------------------------------------------------------
# Normalizers


NORMALIZERS: dict[str, Callable[[str], Any]] = {
    "int": lambda device: 7,
    "float": lambda device: 7.0,
    "numpy.float32": lambda device: numpy.float32(7),
    "numpy array": lambda device: numpy.array(7),
    "numpy array (1,)": lambda device: numpy.array([7.0], dtype=numpy.float32),
    **{
        name: lambda device, name=name: torch.tensor(7, dtype=getattr(torch, name), device=device)
        for name in ("int64", "uint8", "float16", "bfloat16", "float32", "float64")
    },
    "tensor (1,)": lambda device: torch.tensor([7.0], device=device),
    "tensor on the CPU": lambda device: torch.tensor(7.0),
}


@pytest.mark.parametrize("kind", NORMALIZERS)
def test_any_normalizer_is_what_a_mean_divides_by(kind: str, device: str) -> None:
    x, y = draw(6, 8, device=device)
    normalizer = NORMALIZERS[kind](device)
    elements, mask = (x - y) ** 2, x.detach() > 0
    for reduction in ("mean", "batchmean", "weighted_mean"):
        found = F.mse_loss(x, y, reduction=reduction, normalizer=normalizer)
        require_same(found, elements.sum() / 7, [x, y])
    found = F.mse_loss(x, y, normalizer=normalizer, mask=mask)
    require_same(found, torch.where(mask, elements, 0.0).sum() / 7, [x, y])
    found = F.mse_loss(x, y, normalizer=normalizer, mask=mask, dim=0)
    require_same(found, torch.where(mask, elements, 0.0).sum(0) / 7, [x, y])


def test_means_are_rounded_correctly(device: str) -> None:
    """Kernels divide by a multiplication and a correction, which must round as a division does."""
    x, y = draw(6, 8, device=device)
    normalizers = numpy.random.default_rng(0).uniform(0.1, 1e6, 64).tolist()
    for normalizer in (*normalizers, 48.0, 1e300, 1e-300, -7.0, math.inf, math.nan):
        for scale in (1.0, math.inf):
            a, b = (x * scale).detach().requires_grad_(), y.detach()
            expected = F.mse_loss(a, b, reduction="sum").item() / normalizer
            for operand in (a, a.detach()):
                numpy.testing.assert_array_equal(F.mse_loss(operand, b, normalizer=normalizer).item(), expected)


def test_a_normalizer_takes_the_place_of_the_weights(device: str) -> None:
    """The normalizer divides the sum of the weighted elements, and the weights still have a gradient."""
    x, y = draw(6, 8, device=device)
    weight = (y.detach()[0].abs() + 0.25).requires_grad_()
    for normalizer in (3.0, torch.tensor(3.0, device=device)):
        for dim in (None, (0,)):
            found = F.mse_loss(x, y, weight=weight, normalizer=normalizer, dim=dim)
            expected = composed((x - y) ** 2, registry(Loss)["mse_loss"], "mean", weight, normalizer=3.0, dim=dim)
            require_same(found, expected, [x, y, weight])


@reference_and_kernels("normalizer, dim", [3.0, torch.tensor(3.0)], [None, 1], kernels=[(3.0, 1)])
def test_second_derivatives_with_a_normalizer(normalizer: Any, dim: int | None, device: str) -> None:
    x, y = draw(3, 4, device=device)
    mask = x.detach() > -0.5

    def function(a: Tensor, b: Tensor) -> Tensor:
        return F.huber_loss(a, b, normalizer=normalizer, mask=mask, dim=dim)

    assert torch.autograd.gradcheck(function, (x, y), rtol=1e-5, atol=1e-7)
    assert torch.autograd.gradgradcheck(function, (x, y), rtol=1e-5, atol=1e-7, check_undefined_grad=False)


def test_a_normalizer_may_change_after_the_call(device: str) -> None:
    """The gradient uses the number at the time of the call, even if it then changes, like a counter of tokens."""
    x, y = draw(6, 8, device=device)
    for grad_output in (1.0, 1.0, -2.0):
        normalizer = torch.tensor(5.0, dtype=torch.float64, device=device)
        value = F.mse_loss(x, y, normalizer=normalizer)
        normalizer += 100
        (found,) = torch.autograd.grad(value, x, torch.full_like(value, grad_output))
        torch.testing.assert_close(found, grad_output * 2 * (x - y).detach() / 5)


@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0.0), torch.tensor(0)], ids=repr)
def test_a_normalizer_of_0_gives_gradients_of_0(zero: Any, device: str) -> None:
    x, y = draw(6, 8, device=device)
    for dim in (None, 0):
        value = F.mse_loss(x, y, normalizer=zero, dim=dim)
        assert value.isinf().all()
        assert F.mse_loss(x, x, normalizer=zero, dim=dim).isnan().all()
        assert torch.autograd.grad(value.sum(), x)[0].eq(0).all()


def test_one_pass_with_a_normalizer_that_changes(device: str) -> None:
    x, y = draw(6, 8, device=device)

    def step(normalizer: float | Tensor, grad_output: float) -> list[Tensor]:
        value = F.mse_loss(x, y, normalizer=normalizer)
        return [value.detach(), *torch.autograd.grad(value, (x, y), torch.full_like(value, grad_output))]

    settings = [(n, g) for g in (1.0, 1.0, -2.0, 1.0) for n in (3.0, 5.0, torch.tensor(7.0, device=device))]
    with cupylosses.set_one_pass(False):
        expected = [step(*x) for x in settings]
    for setting, exact in zip(settings, expected, strict=True):
        for a, b in zip(step(*setting), exact, strict=True):
            assert same_bits(a, b), setting


# ----------------------------------------------------------------------------------------------------------------------
# The dtype of the result


@reference_and_kernels(
    "dtypes, options",
    [("bfloat16", "float32"), ("float16", "float64"), ("float32", "bfloat16"), ("float64", "float16")],
    [{"reduction": "none"}, {"reduction": "mean"}, {"dim": 1, "mask": True}],
)
def test_dtype_of_the_result(dtypes: tuple[str, str], options: dict[str, Any], device: str) -> None:
    """`out_dtype` changes only the dtype of the result: gradients keep the operands' dtype."""
    dtype, out_dtype = dtypes
    kind, result = getattr(torch, dtype), getattr(torch, out_dtype)
    x, y = draw(6, 8, device=device, dtype=kind)
    if "mask" in options:
        options = {**options, "mask": torch.ones(6, 1, dtype=torch.bool, device=device)}
    value = F.mse_loss(x, y, out_dtype=result, **options)
    exact = composed((x.double() - y.double()) ** 2, registry(Loss)["mse_loss"], **{"reduction": "mean"} | options)
    assert value.dtype == result
    eps = max(torch.finfo(result).eps, 4 * torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps)
    torch.testing.assert_close(value.double(), exact.double(), rtol=eps, atol=0)
    gradients = torch.autograd.grad(value.sum(), (x, y))
    assert [g.dtype for g in gradients] == [kind, kind]
    torch.testing.assert_close(gradients[0], -gradients[1])
    torch.testing.assert_close(
        gradients[0].double(), torch.autograd.grad(exact.sum(), x)[0].double(), rtol=1e-2, atol=0
    )


@pytest.mark.parametrize(
    "spelling", [torch.float32, "float32", numpy.float32, numpy.dtype("float32")], ids=lambda x: type(x).__name__
)
def test_spellings_of_a_dtype(spelling: Any, device: str) -> None:
    x, y = draw(3, device=device, dtype=torch.float16)
    value = F.mse_loss(x, y, out_dtype=spelling)
    assert value.dtype == torch.float32
    assert value != value.half(), "rounded once, to the wider dtype"


def test_a_result_keeps_what_a_half_would_round() -> None:
    x = torch.full((70000,), 1.0, dtype=torch.float16)
    assert F.mse_loss(x, torch.zeros_like(x), reduction="sum").isinf()
    assert F.mse_loss(x, torch.zeros_like(x), reduction="sum", out_dtype=torch.float32) == 70000


# ----------------------------------------------------------------------------------------------------------------------
# NumPy


def test_numpy_arrays() -> None:
    """NumPy's own operations give the same values. Masks and weights use the reference formula, without torch."""
    generator = numpy.random.default_rng(0)
    x, y, w = generator.random((3, 6, 8))
    mask = generator.random((6, 8)) < 0.5
    elements = (x - y) ** 2
    close = numpy.testing.assert_allclose
    close(F.mse_loss(x, y, weight=w[0], mask=mask, reduction="none"), numpy.where(mask, w[0] * elements, 0), rtol=1e-12)
    close(F.mse_loss(x, y, mask=mask), elements[mask].mean(), rtol=1e-12)
    close(F.huber_loss(x, y, weight=w, mask=mask, delta=9.0), (w * elements / 2)[mask].mean(), rtol=1e-12)
    close(F.mse_loss(x, y, weight=w), (w * elements).sum() / w.sum(), rtol=1e-12)
    close(F.mse_loss(x, y, mask=mask, dim=1), (mask * elements).sum(1) / mask.sum(1), rtol=1e-12)
    close(F.mse_loss(x, y, reduction="batchmean", weight=3), 3 * elements.sum() / 6, rtol=1e-12)
    for normalizer in (5, numpy.array(5), numpy.float32(5), torch.tensor(5)):
        close(F.mse_loss(x, y, normalizer=normalizer), elements.sum() / 5, rtol=1e-12)
    assert F.mse_loss(x, y, out_dtype=numpy.float32).dtype == numpy.float32
    assert math.isnan(F.mse_loss(x, y, mask=numpy.zeros_like(mask)))


def test_gradients_of_numpy_arrays() -> None:
    generator = numpy.random.default_rng(0)
    x, y, w = generator.random((3, 6, 8))
    mask = generator.random((6, 8)) < 0.5
    value, (gx, gw) = cupylosses.value_and_grad(
        F.mse_loss, x, y, weight=w, mask=mask, normalizer=numpy.array(7), argnums=("input", "weight")
    )
    numpy.testing.assert_allclose(value, (w * (x - y) ** 2)[mask].sum() / 7, rtol=1e-12)
    numpy.testing.assert_allclose(gx, numpy.where(mask, 2 * w * (x - y), 0) / 7, rtol=1e-12)
    numpy.testing.assert_allclose(gw, numpy.where(mask, (x - y) ** 2, 0) / 7, rtol=1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# Bad arguments: messages name function, argument, got, expected, and a way out

X = torch.rand(4, 3)

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dim too large": ({"dim": 2}, ValueError, "`dim` must be within -2 to 1 for the shape (4, 3), got 2."),
    "dim too small": ({"dim": (0, -3)}, ValueError, "`dim` must be within -2 to 1 for the shape (4, 3), got -3."),
    "dim twice": ({"dim": (1, -1)}, ValueError, "`dim` must name each dimension once, got (1, -1)."),
    "dim no integer": ({"dim": 1.0}, TypeError, "`dim` must be an integer or a tuple of integers, got 1.0."),
    "dim a bool": ({"dim": True}, TypeError, "`dim` must be an integer or a tuple of integers, got True."),
    "dim with none": (
        {"dim": 0, "reduction": "none"},
        ValueError,
        "`dim` needs the reduction 'mean', 'sum' or 'weighted_mean', got 'none'. Leave `dim` out, or choose one",
    ),
    "dim with batchmean": ({"dim": 0, "reduction": "batchmean"}, ValueError, "got 'batchmean'. Leave `dim` out"),
    "normalizer with sum": (
        {"normalizer": 3, "reduction": "sum"},
        ValueError,
        "`normalizer` replaces what a mean is divided by, got reduction='sum'. Use reduction='mean', or divide",
    ),
    "normalizer with none": ({"normalizer": 3, "reduction": "none"}, ValueError, "got reduction='none'. Use"),
    "normalizer that requires grad": (
        {"normalizer": torch.tensor(3.0, requires_grad=True)},
        ValueError,
        "`normalizer` has no gradient, but requires one; pass `normalizer.detach()`.",
    ),
    "normalizer of two": (
        {"normalizer": torch.ones(2)},
        ValueError,
        "`normalizer` must be one number, got an array of shape (2,).",
    ),
    "normalizer a list": (
        {"normalizer": [3]},
        TypeError,
        "`normalizer` must be a number or an array without dimensions, got list.",
    ),
    "normalizer a bool": (
        {"normalizer": True},
        TypeError,
        "must be a number or an array without dimensions, got bool.",
    ),
    "mask of floats": (
        {"mask": torch.ones(4, 3)},
        TypeError,
        "`mask` must be bool, True where an element counts, got float32. Pass `mask != 0`.",
    ),
    "mask of bytes": (
        {"mask": torch.ones(4, 3, dtype=torch.uint8)},
        TypeError,
        "`mask` must be bool, True where an element counts, got uint8.",
    ),
    "mask that does not broadcast": (
        {"mask": torch.ones(2, dtype=torch.bool)},
        ValueError,
        "the shapes do not broadcast, got `input` of shape (4, 3) and `target` of shape (4, 3) and "
        "`mask` of shape (2,). "
        "Shapes are aligned at the last dimension; reshape one with `.reshape(...)` or `[:, None]`.",
    ),
    "mask no array": (
        {"mask": True},
        TypeError,
        "`mask` must be a torch.Tensor, a cupy.ndarray, a numpy.ndarray or an",
    ),
    "mask of another library": (
        {"mask": numpy.ones((4, 3), dtype=bool)},
        TypeError,
        "got `input` from torch and `target` from torch and `mask` from numpy. Convert with",
    ),
    "weight of another library": ({"weight": numpy.ones((4, 3))}, TypeError, "and `weight` from numpy. Convert with"),
    "weight on another device": (
        {"weight": torch.ones(3, device="meta")},
        ValueError,
        "operands must be on one device, got `input` on cpu and `target` on cpu and `weight` on meta. Move",
    ),
    "weight that does not broadcast": ({"weight": torch.ones(2)}, ValueError, "and `weight` of shape (2,). Shapes are"),
    "weight of integers": ({"weight": torch.ones(3).int()}, TypeError, "`weight` must have one of the dtypes float16,"),
    "weight a string": ({"weight": "x"}, TypeError, "`weight` must be a torch.Tensor, a cupy.ndarray, a numpy.ndarray"),
    "weight a bool": ({"weight": True}, TypeError, "`weight` must be a torch.Tensor, a cupy.ndarray, a numpy.ndarray"),
    "out_dtype of integers": (
        {"out_dtype": torch.int32},
        TypeError,
        "`out_dtype` must be one of the dtypes float16, bfloat16, float32, float64, of torch, of NumPy or by name, "
        "got torch.int32.",
    ),
    "out_dtype unknown": ({"out_dtype": "float"}, TypeError, "of torch, of NumPy or by name, got 'float'."),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments(what: str, device: str) -> None:
    options, exception, message = BAD[what]
    with pytest.raises(exception, match=f"^mse_loss: .*{re.escape(message)}"):
        F.mse_loss(X.clone(), X.clone(), **options)


@pytest.mark.parametrize("what", [x for x in BAD if "another" not in x])
def test_bad_arguments_beside_numpy_arrays(what: str) -> None:
    options, exception, message = BAD[what]
    options = {n: x.detach().numpy() if isinstance(x, Tensor) and n != "normalizer" else x for n, x in options.items()}
    with pytest.raises(exception, match=f"^mse_loss: .*{re.escape(message)}"):
        F.mse_loss(X.numpy(), X.numpy(), **options)


def test_numpy_has_no_bfloat16() -> None:
    with pytest.raises(
        TypeError, match=r"^mse_loss: the result would be bfloat16, which NumPy has not\. Choose another"
    ):
        F.mse_loss(X.numpy(), X.numpy(), out_dtype="bfloat16")


@pytest.mark.gpu
def test_a_weight_on_another_device() -> None:
    with pytest.raises(ValueError, match=r"^mse_loss: operands must be on one device, got .*`weight` on cpu\. Move"):
        F.mse_loss(X.cuda(), X.cuda(), weight=torch.ones(3))


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU: no call waits for the device, every call can be captured, and only outputs have the size of an operand

#: Calls whose divisor is computed on the device: their options, as functions of the shape of the operands.
FOUND: dict[str, Callable[[tuple[int, ...]], dict[str, Any]]] = {
    "mask": lambda shape: {"mask": torch.rand(shape, device="cuda") < 0.5},
    "column of a mask": lambda shape: {"mask": torch.rand(shape[0], 1, device="cuda") < 0.5},
    "weighted mean": lambda shape: {"weight": torch.rand(shape[1:], device="cuda"), "reduction": "weighted_mean"},
    "learned weight": lambda shape: {
        "weight": torch.rand(shape[1:], device="cuda").requires_grad_(),
        "reduction": "weighted_mean",
    },
    "normalizer": lambda shape: {"normalizer": torch.tensor(7.0, device="cuda")},
    "normalizer on the CPU": lambda shape: {"normalizer": torch.tensor(7.0)},
    "dimension and mask": lambda shape: {"mask": torch.rand(shape, device="cuda") < 0.5, "dim": 1},
    "dimension": lambda shape: {"dim": 0},
}

#: Pairs in which each call and each loss occurs. That is enough, because these tests are about the engine, not about
#: formulas. All tests use the same pairs, and therefore the same kernels.
FOUND_IN_TURN = in_turn(list(FOUND), REPRESENTATIVES)


def on_gpu(loss: Loss, shape: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    count = len(loss.operands)
    drawn = samples.operands(loss, loss.values(), ("float32",) * count, [shape] * count, "cuda", seed)
    return [x.requires_grad_() for x in drawn]


def step(loss: Loss, operands: list[Tensor], options: dict[str, Any], grad_output: float) -> list[Tensor]:
    """Value and gradients, including the weight's if it requires one."""
    value = getattr(F, loss.name)(**dict(zip((x.name for x in loss.operands), operands, strict=True)), **options)
    leaves = operands + [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
    return [value.detach(), *torch.autograd.grad(value, leaves, torch.full_like(value, grad_output))]


@pytest.mark.gpu
@pytest.mark.parametrize(("what", "loss"), FOUND_IN_TURN)
def test_nothing_waits_for_the_device(loss: Loss, what: str) -> None:
    operands, options = on_gpu(loss, (257, 129)), FOUND[what]((257, 129))
    step(loss, operands, options, 3.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for grad_output in (3.0, 1.0):
            step(loss, operands, options, grad_output)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize(("what", "loss"), [x for x in FOUND_IN_TURN if x[0] != "normalizer on the CPU"])
def test_graph_replayed_with_other_content(loss: Loss, what: str) -> None:
    """A replayed graph counts the new content of the mask, and reads weights and normalizers again."""
    shape = (257, 129)
    operands, options = on_gpu(loss, shape), FOUND[what](shape)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(loss, operands, options, 3.0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(loss, operands, options, 3.0)
    for seed in (1, 2):
        torch.manual_seed(seed)
        fresh, others = on_gpu(loss, shape, seed), FOUND[what](shape)
        with torch.no_grad():
            for x, y in zip(operands, fresh, strict=True):
                x.copy_(y)
            for name, x in options.items():
                if isinstance(x, Tensor):
                    x.copy_(others[name] * seed if name == "normalizer" else others[name])
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(captured, step(loss, fresh, options, 3.0), strict=True):
            assert same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize(("what", "loss"), FOUND_IN_TURN)
def test_peak_memory_is_the_outputs(loss: Loss, what: str) -> None:
    """Besides the outputs there are at most 8 MiB of workspace: no weighted copy, no mask of another dtype."""
    shape = (1 << 13, 1 << 13)
    operands, options = [torch.rand(shape, device="cuda") for _ in loss.operands], FOUND[what](shape)
    operands[0].requires_grad_()

    def measured() -> None:
        value = getattr(F, loss.name)(**dict(zip((x.name for x in loss.operands), operands, strict=True)), **options)
        inputs = [x for x in (operands[0], *options.values()) if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.grad(value, inputs, torch.ones_like(value))

    measured()
    gc.collect()
    torch.cuda.synchronize()
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    measured()
    assert torch.cuda.max_memory_allocated() - before <= operands[0].numel() * 4 + (8 << 20)
    assert allocated() == pytest.approx(before, abs=1 << 16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("loss", "dim", "layout"),
    [
        (loss, *x)
        for loss, x in in_turn(REPRESENTATIVES, [(dim, x) for dim in ((0,), (1,)) for x in ("contiguous", "row")])
    ],
)
def test_dimensions_on_a_gpu(loss: Loss, dim: tuple[int, ...], layout: str) -> None:
    """Covers cases that take long to compile for the host."""
    outcome = perform(Check(loss, dim=dim, layout=layout, device="cuda"))
    assert outcome.ok, "\n".join(outcome.problems)
