"""Values of every loss against the float64 truth: dtypes, reductions, parameters, layouts, sizes, edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from devices import KERNELS, on_gpu
from grids import BY_KERNEL, CASES, MIXED, MIXTURES, OTHERS, SIZES, losses_in_turn

import cupylosses.functional as F
from cupylosses.checks import FLOATING
from cupylosses.definition import Loss
from cupylosses.testing import properties, samples
from cupylosses.testing.check import EDGES, bind
from cupylosses.testing.covering import OWN
from cupylosses.testing.layouts import LAYOUTS
from cupylosses.testing.truth import OVERFLOWING, truth

pytestmark = pytest.mark.filterwarnings("ignore:.*broadcast")


def agrees(loss: Loss, **setting: Any) -> None:
    """The public function agrees with the truth; value alone unless ``wanted`` says otherwise."""
    setting = {"wanted": (False,) * len(loss.operands)} | setting
    properties.agrees_with_truth(getattr(F, loss.name), loss, **setting)


@pytest.mark.covering(gradients=False)
@BY_KERNEL
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(("loss", "case"), CASES)
def test_parameters_and_dtypes(
    loss: Loss, case: Mapping[str, Any], dtype: str, reductions: Sequence[str], device: str
) -> None:
    for reduction in reductions:
        agrees(loss, case=case, dtypes=(dtype,), reduction=reduction, device=device)


@pytest.mark.covering(gradients=False, reduction="none", layout=EDGES)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(("loss", "case"), CASES)
def test_edges_of_the_domain(loss: Loss, case: Mapping[str, Any], dtype: str, device: str) -> None:
    """Zeros of both signs, subnormal and huge numbers, infinities, NaN, and the kinks with their neighbours."""
    if (loss.name, dtype) in OVERFLOWING:
        pytest.skip("the truth overflows on the way; tests/test_numerics.py has one of many digits")
    agrees(loss, case=case, dtypes=(dtype,), reduction="none", layout=EDGES, device=device)


@pytest.mark.covering(gradients=False)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(loss: Loss, layout: str, reduction: str, device: str) -> None:
    agrees(loss, layout=layout, reduction=reduction, device=device)


@pytest.mark.parametrize(("loss", "layout", "dtype"), losses_in_turn(OWN, OTHERS))
def test_layouts_of_other_dtypes(loss: Loss, layout: str, dtype: str, device: str) -> None:
    agrees(loss, dtypes=(dtype,), layout=layout, reduction="mean", device=device)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(("loss", "dtypes"), MIXTURES)
def test_mixed_dtypes(loss: Loss, dtypes: tuple[str, ...], reduction: str, device: str) -> None:
    check = properties.Trial(loss, dtypes=dtypes, reduction=reduction, device=device)
    agrees(loss, dtypes=dtypes, reduction=reduction, device=device)
    assert check.ours()(*check.operands()).dtype == getattr(torch, MIXED[dtypes])


@pytest.mark.representatives
def test_a_number_does_not_widen_a_tensor(loss: Loss, device: str) -> None:
    """torch's promotion: a tensor without dimensions gives way to one with dimensions."""
    first = torch.rand(5, dtype=torch.bfloat16, device=device)
    others = [torch.rand((), dtype=torch.float32, device=device)] * (len(loss.operands) - 1)
    function = bind(getattr(F, loss.name), loss, loss.values(), "none")
    assert function(first, *others).dtype == torch.bfloat16


@pytest.mark.representatives
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_around_vectors_and_warps(loss: Loss, dtype: str, device: str) -> None:
    for size, reduction in product(SIZES, ("none", "sum")):
        agrees(loss, dtypes=(dtype,), shape=(size,), reduction=reduction, device=device)


@pytest.mark.kernels
@pytest.mark.parametrize(("loss", "dtype"), losses_in_turn(["float32", "bfloat16"]))
@pytest.mark.parametrize("size", [(1 << 21) - 1, (1 << 21) + 1, *on_gpu((1 << 22) + 513, 12_345_678)])
def test_sizes_where_groups_take_many_batches(loss: Loss, size: int, dtype: str) -> None:
    agrees(loss, dtypes=(dtype,), shape=(size,), reduction="sum", device=KERNELS)


@pytest.mark.representatives
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 2)])
def test_empty_operands(loss: Loss, shape: tuple[int, ...], device: str) -> None:
    """The mean of nothing is NaN and its sum 0, as in torch; of rows that are means, the sum too is NaN."""
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


@pytest.mark.representatives
def test_empty_after_broadcasting(loss: Loss, device: str) -> None:
    """A row against no rows: its gradient is a sum of nothing."""
    operands = [torch.rand(0, 3, device=device, requires_grad=True)]
    operands += [torch.rand(3, device=device, requires_grad=True) for _ in loss.operands[1:]]
    value = bind(getattr(F, loss.name), loss, loss.values(), "sum")(*operands)
    value.backward()
    assert [x.grad.tolist() for x in operands[1:]] == [[0.0, 0.0, 0.0]] * (len(operands) - 1)


@pytest.mark.covering
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(("loss", "case"), CASES)
def test_torch_agrees(loss: Loss, case: Mapping[str, Any], reduction: str, device: str) -> None:
    properties.agrees_with_torch(getattr(F, loss.name), loss, case, reduction=reduction, device=device)


@pytest.mark.parametrize(("loss", "case"), CASES)
def test_reductions_are_consistent(loss: Loss, case: Mapping[str, Any], device: str) -> None:
    for dtype in ("float32", "float64"):
        properties.reduces_consistently(getattr(F, loss.name), loss, case, dtype, device)


@pytest.mark.covering
@BY_KERNEL
@pytest.mark.parametrize("layout", ["contiguous", "row", "outer"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_nan_is_never_swallowed(loss: Loss, dtype: str, layout: str, reductions: Sequence[str], device: str) -> None:
    properties.propagates_nan(
        getattr(F, loss.name), loss, dtype=dtype, device=device, layouts=[layout], reductions=reductions
    )


@pytest.mark.representatives
def test_reduced_halves_do_not_overflow(loss: Loss, device: str) -> None:
    """The sum of 2^18 halves of about 1 exceeds float16, but not its mean: the division comes before the rounding."""
    values = loss.values()
    operands = samples.operands(loss, values, ("float16",) * len(loss.operands), [(1 << 16, 4)] * len(loss.operands))
    expected = truth(loss, operands, values, "mean").value.exact
    if abs(expected) * (1 << 18) < torch.finfo(torch.float16).max:
        return
    value = bind(getattr(F, loss.name), loss, values, "mean")(*(x.to(device) for x in operands))
    assert value.dtype == torch.float16
    torch.testing.assert_close(value.cpu().double(), expected, rtol=1e-3, atol=0)
